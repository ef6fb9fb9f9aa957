"""Rotary frequencies that depend on the length of a batch (longrope, dynamic NTK), and the longest row for each.

transformers chooses such frequencies by the largest position of the whole batch: the same row would be computed
differently alone and next to a longer one, and a sequence that grows past the bound keeps keys of other frequencies
in its cache than the trainer's pass, which sees its final length. Results depend on a row alone if no row crosses the
bound (the default: a model's context ends there), or if one set of frequencies, known in advance, serves every row of
a run (`rope_context`; vLLM decides likewise by its `max_model_len`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.capabilities.decision import Decision, unwrap_adapters


@dataclass(frozen=True, slots=True)
class RopeLengthBound:
    """The bound of frequencies that depend on the length."""

    kind: str  # "longrope" or "dynamic"
    bound: int  # in tokens; longer sequences have other frequencies
    longest: int  # longest sequence that the model is made for, in tokens


def read_rope_length_bound(config: Any) -> RopeLengthBound | None:
    """Read the bound from a transformers configuration; return None if frequencies do not depend on the length.

    longrope (Ding et al. 2024, arXiv:2402.13753) has two sets of factors, for at most
    `original_max_position_embeddings` tokens and for more; dynamic NTK scaling grows with every token beyond
    `max_position_embeddings`.
    """
    text = config.get_text_config()
    max_positions = int(getattr(text, "max_position_embeddings", None) or 2**20)
    bounds = []
    for rope in _iter_rope_parameters(text):
        if rope.get("rope_type") == "longrope":
            original = int(rope.get("original_max_position_embeddings") or max_positions)
            bounds.append(RopeLengthBound("longrope", original, max_positions))
        elif rope.get("rope_type") == "dynamic":
            longest = int(max_positions * rope.get("factor", 1.0))
            bounds.append(RopeLengthBound("dynamic", max_positions, longest))
    return min(bounds, key=lambda bound: bound.bound, default=None)


def _iter_rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters, and those of each kind of layer if they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield from (parameters, *(part for part in parameters.values() if isinstance(part, Mapping)))


def find_row_limit(model: Any) -> int | None:
    """Return the longest row, in tokens, whose frequencies depend on the row alone; None = they never depend on the
    length.

    Args:
        model: a transformers model with or without adapters and head, or its trunk.
    """
    trunk = unwrap_adapters(model).base_model
    fixed: int | None = getattr(trunk, "_posttrain_rope_context", None)
    if fixed is not None:
        return fixed
    bound = (
        read_rope_length_bound(trunk.config) if hasattr(trunk.config, "get_text_config") else None
    )
    return bound.bound if bound is not None else None


def has_fixed_rope(model: Any) -> bool:
    """Return whether its rotary frequencies were fixed for the length `find_row_limit`."""
    return hasattr(unwrap_adapters(model).base_model, "_posttrain_rope_context")


def check_rotary_positions(model: Any) -> Decision:
    """Describe how rotary frequencies are kept independent of other rows of a batch."""
    limit, bound = find_row_limit(model), read_rope_length_bound(unwrap_adapters(model).config)
    if bound is None or limit is None:
        reason = "its rotary frequencies, if it has any, do not depend on the length"
    elif has_fixed_rope(model):
        reason = (
            f"its rotary frequencies ({bound.kind}) are those of {limit:,} tokens in every row (rope_context); "
            "longer rows are refused"
        )
    else:
        reason = (
            f"its rotary frequencies change beyond {limit:,} tokens ({bound.kind}), so its context ends there; "
            f"model.rope_context, up to {bound.longest:,}, fixes those of a longer one for every row"
        )
    return Decision("positions", True, reason, "longer rows are refused")


def find_fixing_obstacles(model: Any) -> Iterator[str]:
    """Yield reasons why a model's frequencies cannot be fixed for one length."""
    if read_rope_length_bound(unwrap_adapters(model).config) is None:
        yield "its rotary frequencies do not depend on the length"
    modules = find_rotary_modules(model)
    if not modules:
        yield "it has no rotary embedding of a known kind"
    for module in modules:
        if not isinstance(module.rope_type, str):
            yield f"the frequencies of its {type(module).__name__} differ from layer to layer"
        if hasattr(module, "rope_init_fn"):  # its forward pass recomputes them every time
            yield f"its {type(module).__name__} does not read the frequencies that it keeps"


def find_rotary_modules(model: Any) -> list[Any]:
    """List the rotary embeddings in transformers' form."""
    modules: list[torch.nn.Module] = list(unwrap_adapters(model).modules())
    return [
        module for module in modules if hasattr(module, "rope_type") and hasattr(module, "inv_freq")
    ]
