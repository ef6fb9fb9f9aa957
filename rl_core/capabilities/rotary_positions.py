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

from rl_core.capabilities.decision import Decision, unwrap_adapters


@dataclass(frozen=True, slots=True)
class RopeLengthBound:
    """Frequencies that follow the length."""

    kind: str  # "longrope" or "dynamic"
    bound: int  # tokens; longer sequences have other frequencies
    longest: int  # tokens, of what the model is made for


def read_rope_length_bound(config: Any) -> RopeLengthBound | None:
    """Bound of a transformers configuration; None where frequencies do not depend on the length.

    longrope (Ding et al. 2024, arXiv:2402.13753) has two sets of factors, for at most
    `original_max_position_embeddings` tokens and for more; dynamic NTK scaling grows with every token beyond
    `max_position_embeddings`.
    """
    text = config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", None) or 2**20)
    found = [
        RopeLengthBound("longrope", int(rope.get("original_max_position_embeddings") or most), most)
        if rope["rope_type"] == "longrope"
        else RopeLengthBound("dynamic", most, int(most * rope.get("factor", 1.0)))
        for rope in _iter_rope_parameters(text)
        if rope.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(found, key=lambda followed: followed.bound, default=None)


def _iter_rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters; those of each kind of layer, where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield from (parameters, *(part for part in parameters.values() if isinstance(part, Mapping)))


def find_row_limit(model: Any) -> int | None:
    """Longest row, in tokens, whose frequencies depend on nothing else; None = they never depend on the length.

    Args:
        model: a transformers model with or without adapters and head, or its trunk.
    """
    trunk = unwrap_adapters(model).base_model
    fixed: int | None = getattr(trunk, "_posttrain_rope_context", None)
    if fixed is not None:
        return fixed
    followed = (
        read_rope_length_bound(trunk.config) if hasattr(trunk.config, "get_text_config") else None
    )
    return followed.bound if followed is not None else None


def has_fixed_rope(model: Any) -> bool:
    """True = its rotary frequencies were fixed for the length that is its `find_row_limit`."""
    return hasattr(unwrap_adapters(model).base_model, "_posttrain_rope_context")


def check_rotary_positions(model: Any) -> Decision:
    """Independence of rotary frequencies from other rows of a batch."""
    limit, followed = find_row_limit(model), read_rope_length_bound(unwrap_adapters(model).config)
    if followed is None or limit is None:
        reason = "its rotary frequencies, if it has any, do not depend on the length"
    elif has_fixed_rope(model):
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


def find_fixing_obstacles(model: Any) -> Iterator[str]:
    """Reasons why the frequencies of a model cannot be fixed for one length."""
    if read_rope_length_bound(unwrap_adapters(model).config) is None:
        yield "its rotary frequencies do not depend on the length"
    modules = find_rotary_modules(model)
    if not modules:
        yield "it has no rotary embedding of a kind that is known"
    for part in modules:
        if not isinstance(part.rope_type, str):
            yield f"the frequencies of its {type(part).__name__} differ from layer to layer"
        if hasattr(part, "rope_init_fn"):  # its forward pass computes them anew every time
            yield f"its {type(part).__name__} does not read the frequencies that it keeps"


def find_rotary_modules(model: Any) -> list[Any]:
    """Rotary embeddings as transformers has them."""
    parts: list[torch.nn.Module] = list(unwrap_adapters(model).modules())
    return [part for part in parts if hasattr(part, "rope_type") and hasattr(part, "inv_freq")]
