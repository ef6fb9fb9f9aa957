"""Rotary frequencies that follow the length of a batch (longrope, dynamic NTK), and how long a row may be for each.

transformers chooses such frequencies by the largest position of the whole batch: the same row would be computed
differently alone and beside a longer one, and a sequence that grows past the bound keeps keys of other frequencies in
its cache than the trainer's pass, which sees its final length. Results depend on a row alone where no row crosses the
bound (the default: a model's context ends there), or where one set of frequencies, known beforehand, serves every row
of a run (`rope_context`; vLLM decides by its `max_model_len` likewise).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.capabilities.decision import Decision, unwrapped

__all__ = [
    "FollowedLength",
    "fixing_obstacles",
    "followed_length",
    "is_fixed",
    "positions",
    "rotary_modules",
    "row_limit",
]


@dataclass(frozen=True, slots=True)
class FollowedLength:
    """Frequencies that follow the length."""

    kind: str  # "longrope" or "dynamic"
    bound: int  # tokens; longer sequences have other frequencies
    longest: int  # tokens, of what the model is made for


def followed_length(config: Any) -> FollowedLength | None:
    """Bound of a transformers configuration; None where frequencies do not depend on the length.

    longrope (Ding et al. 2024, arXiv:2402.13753) has two sets of factors, for at most
    `original_max_position_embeddings` tokens and for more; dynamic NTK scaling grows with every token beyond
    `max_position_embeddings`.
    """
    text = config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", None) or 2**20)
    found = [
        FollowedLength("longrope", int(rope.get("original_max_position_embeddings") or most), most)
        if rope["rope_type"] == "longrope"
        else FollowedLength("dynamic", most, int(most * rope.get("factor", 1.0)))
        for rope in _ropes(text)
        if rope.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(found, key=lambda followed: followed.bound, default=None)


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters; those of each kind of layer, where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield from (parameters, *(part for part in parameters.values() if isinstance(part, Mapping)))


def row_limit(model: Any) -> int | None:
    """Longest row, in tokens, whose frequencies depend on nothing else; None = they never depend on the length.

    Args:
        model: a transformers model with or without adapters and head, or its trunk.
    """
    trunk = unwrapped(model).base_model
    fixed: int | None = getattr(trunk, "_posttrain_rope_context", None)
    if fixed is not None:
        return fixed
    followed = followed_length(trunk.config) if hasattr(trunk.config, "get_text_config") else None
    return followed.bound if followed is not None else None


def is_fixed(model: Any) -> bool:
    """True = its rotary frequencies were fixed for the length that is its `row_limit`."""
    return hasattr(unwrapped(model).base_model, "_posttrain_rope_context")


def positions(model: Any) -> Decision:
    """Independence of rotary frequencies from other rows of a batch."""
    limit, followed = row_limit(model), followed_length(unwrapped(model).config)
    if followed is None or limit is None:
        reason = "its rotary frequencies, if it has any, do not depend on the length"
    elif is_fixed(model):
        reason = (
            f"its rotary frequencies ({followed.kind}) are those of {limit:,} tokens in every row (rope_context); "
            "longer rows are refused"
        )
    else:
        reason = (
            f"its rotary frequencies change beyond {limit:,} tokens ({followed.kind}), so its context ends there; "
            f"model.rope_context, up to {followed.longest:,}, fixes those of a longer one for every row"
        )
    return Decision("positions", True, reason, "longer rows are refused")


def fixing_obstacles(model: Any) -> Iterator[str]:
    """Reasons why the frequencies of a model cannot be fixed for one length."""
    if followed_length(unwrapped(model).config) is None:
        yield "its rotary frequencies do not depend on the length"
    modules = rotary_modules(model)
    if not modules:
        yield "it has no rotary embedding of a kind that is known"
    for part in modules:
        if not isinstance(part.rope_type, str):
            yield f"the frequencies of its {type(part).__name__} differ from layer to layer"
        if hasattr(part, "rope_init_fn"):  # its forward pass computes them anew every time
            yield f"its {type(part).__name__} does not read the frequencies that it keeps"


def rotary_modules(model: Any) -> list[Any]:
    """Rotary embeddings as transformers has them."""
    parts: list[torch.nn.Module] = list(unwrapped(model).modules())
    return [part for part in parts if hasattr(part, "rope_type") and hasattr(part, "inv_freq")]
