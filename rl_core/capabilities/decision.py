"""One decision about a fast path, and the properties of a model that several paths look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("Llama", "Qwen2", "Qwen3")
# in place of a type whose frequencies follow the length (`rl_core.models.rotary`)
FIXED_ROPE = "fixed"
# do not depend on the sequence's length
STATIC_ROPES = (
    "default",
    "linear",
    "llama3",
    "yarn",
    FIXED_ROPE,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Permission for one fast path."""

    name: str
    allowed: bool
    reason: str  # for people: what speaks for it, or the first thing that speaks against it
    fallback: str = ""  # the path that is taken otherwise
    is_undecided: bool = False  # only a trial run can tell, and the weights are not loaded


def build_decision(name: str, obstacles: Iterator[str], granted: str, fallback: str) -> Decision:
    """The first obstacle decides; those after it are not looked for (they may not make sense for such a model)."""
    obstacle = next(obstacles, None)
    return Decision(name, obstacle is None, granted if obstacle is None else obstacle, fallback)


def find_family_obstacles(module: Any, suffix: str) -> Iterator[str]:
    """Reasons against a module whose class is not one of `FAMILIES` + suffix, as transformers ships it."""
    kind = type(module)
    if kind.__name__ not in {f"{family}{suffix}" for family in FAMILIES}:
        yield f"{kind.__name__} is of another family than {', '.join(FAMILIES)}"
    if not kind.__module__.startswith("transformers."):
        yield f"{kind.__name__} is code from {kind.__module__}, which may differ from transformers' own"


def find_position_obstacles(trunk: Any) -> Iterator[str]:
    """Reasons against a trunk whose rotary embedding or attention pattern is another than full and static."""
    rope = getattr(trunk.rotary_emb, "rope_type", "default")
    if rope not in STATIC_ROPES:
        yield f"its rotary frequencies follow the length (rope_type '{rope}'); known ones: {', '.join(STATIC_ROPES)}"
    for kind in getattr(trunk.config, "layer_types", None) or ():
        if kind != "full_attention":
            yield f"some layers attend otherwise than to all tokens before ({kind})"


def unwrap_adapters(model: Any) -> Any:
    """The transformers model under its adapters."""
    return (
        model.get_base_model()
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        else model
    )


def resolve_device_type(weight: torch.Tensor, device: str | None) -> str:
    """Type of the device that is asked about; None = the weight's own."""
    return device or weight.device.type


def format_dtype(weight: torch.Tensor) -> str:
    """The weight's dtype as settings write it ("bfloat16")."""
    return str(weight.dtype).removeprefix("torch.")
