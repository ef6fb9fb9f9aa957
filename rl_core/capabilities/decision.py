"""A decision about one fast path, and properties of a model that several paths check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("Llama", "Qwen2", "Qwen3")
FIXED_ROPE = (
    "fixed"  # replaces a type whose frequencies depend on the length (`rl_core.models.rotary`)
)
# types whose frequencies do not depend on the sequence's length
STATIC_ROPES = ("default", "linear", "llama3", "yarn", FIXED_ROPE)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one fast path."""

    name: str
    allowed: bool
    reason: str  # for users: the justification, or the first obstacle
    fallback: str = ""  # path that is taken otherwise
    is_undecided: bool = False  # needs a trial run, but the weights are not loaded


def build_decision(
    name: str, obstacles: Iterator[str], justification: str, fallback: str
) -> Decision:
    """Decide by the first obstacle; later ones are not computed, because they may not make sense for such a model."""
    obstacle = next(obstacles, None)
    return Decision(
        name, obstacle is None, justification if obstacle is None else obstacle, fallback
    )


def find_family_obstacles(module: Any, suffix: str) -> Iterator[str]:
    """Yield obstacles if a module's class is not one of `FAMILIES` + suffix, as transformers ships it."""
    kind = type(module)
    if kind.__name__ not in {f"{family}{suffix}" for family in FAMILIES}:
        yield f"{kind.__name__} is not of a known family ({', '.join(FAMILIES)})"
    if not kind.__module__.startswith("transformers."):
        yield f"{kind.__name__} is code from {kind.__module__}, which may differ from transformers' version"


def find_position_obstacles(trunk: Any) -> Iterator[str]:
    """Yield obstacles if a trunk's rotary embedding or attention pattern is not full and static."""
    rope = getattr(trunk.rotary_emb, "rope_type", "default")
    if rope not in STATIC_ROPES:
        yield f"its rotary frequencies depend on the length (rope_type '{rope}'); known ones: {', '.join(STATIC_ROPES)}"
    for kind in getattr(trunk.config, "layer_types", None) or ():
        if kind != "full_attention":
            yield f"some layers do not attend to all earlier tokens ({kind})"


def unwrap_adapters(model: Any) -> Any:
    """Return the transformers model under its adapters."""
    is_wrapped = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapped else model


def resolve_device_type(weight: torch.Tensor, device: str | None) -> str:
    """Return the requested device type; None = the weight's own."""
    return device or weight.device.type


def format_dtype(weight: torch.Tensor) -> str:
    """Format the weight's dtype as in settings ("bfloat16")."""
    return str(weight.dtype).removeprefix("torch.")
