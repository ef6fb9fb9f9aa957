"""Fast paths that a model may take, with the reason for each decision; the only place that decides this.

A fast path replaces the forward pass of transformers for models whose results it reproduces up to rounding; every
other model takes the fallback. Each function decides about one path, `inspect_capabilities` about all of them
(`posttrain check machine --model` prints its result). Two properties vary too much for a list of families and are
found by a trial run on a few tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.capabilities.decision import Decision
from rl_core.capabilities.decoding import (
    check_compiled_decoding,
    check_fused_step,
    check_packed_weights,
    check_rollout_decoder,
    check_slot_adapters,
)
from rl_core.capabilities.images import (
    reads_images,
    refuse_image_model,
    refuse_image_training,
)
from rl_core.capabilities.rotary_positions import check_rotary_positions
from rl_core.capabilities.training import (
    check_causal_attention,
    check_chunked_head,
    check_independent_rows,
    check_packed_attention,
    check_prefix_sharing,
    check_router_logits,
    check_sequence_packing,
    check_training_forward,
    needs_single_packed_row,
)

__all__ = [
    "Capabilities",
    "Decision",
    "inspect_capabilities",
    "reads_images",
    "refuse_image_model",
    "refuse_image_training",
    "check_compiled_decoding",
    "check_rollout_decoder",
    "check_fused_step",
    "check_causal_attention",
    "check_independent_rows",
    "check_packed_attention",
    "check_packed_weights",
    "check_prefix_sharing",
    "needs_single_packed_row",
    "check_chunked_head",
    "check_rotary_positions",
    "check_router_logits",
    "check_sequence_packing",
    "check_slot_adapters",
    "check_training_forward",
]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Every fast path's decision for one model, in display order."""

    positions: Decision
    training_forward: Decision
    prefix_sharing: Decision
    plain_head: Decision
    sequence_packing: Decision
    decoder: Decision
    packed_weights: Decision
    compiled_decoding: Decision
    fused_step: Decision
    independent_rows: Decision
    slot_adapters: Decision

    def __iter__(self) -> Iterator[Decision]:
        return (getattr(self, field.name) for field in dataclasses.fields(self))


def inspect_capabilities(model: Any, device: str | None = None) -> Capabilities:
    """Decide about all fast paths of a causal language model in its current state: device, dtype, adapters, attention
    kernel and mode.

    Args:
        model: a transformers model, with or without adapters. On the meta device (without weights) no trial is run.
        device: decide as if the weights were on this type of device ("cpu", "cuda"); None = where they are.
    """
    return Capabilities(
        positions=check_rotary_positions(model),
        training_forward=check_training_forward(model, device),
        prefix_sharing=check_prefix_sharing(model, device),
        plain_head=check_chunked_head(model),
        sequence_packing=check_sequence_packing(model),
        decoder=check_rollout_decoder(model, device),
        packed_weights=check_packed_weights(model, device),
        compiled_decoding=check_compiled_decoding(model, device),
        fused_step=check_fused_step(model, device),
        independent_rows=check_independent_rows(model, device),
        slot_adapters=check_slot_adapters(model, device),
    )
