"""Fast paths that a model may take, and the reason for each decision. Nothing else decides this.

A fast path replaces the forward pass of transformers for models whose results it reproduces to rounding; every other
model takes the fallback. Each function answers for one path, `capabilities` for all of them (`posttrain doctor --model`
prints its answer). Two properties are too varied for a list of families and are found by a trial run on a few tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.capabilities.decision import Decision
from rl_core.capabilities.decoding import compiled_decoding, decoder, fused_step, packed_weights, slot_adapters
from rl_core.capabilities.positions import positions
from rl_core.capabilities.training import independent_rows, training_forward
from rl_core.capabilities.trials import packs_into_one_row, plain_head, router_logits, sequence_packing

__all__ = [
    "Capabilities",
    "Decision",
    "capabilities",
    "compiled_decoding",
    "decoder",
    "fused_step",
    "independent_rows",
    "packed_weights",
    "packs_into_one_row",
    "plain_head",
    "positions",
    "router_logits",
    "sequence_packing",
    "slot_adapters",
    "training_forward",
]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Every fast path's decision for one model, in the order in which people read them."""

    positions: Decision
    training_forward: Decision
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


def capabilities(model: Any, device: str | None = None) -> Capabilities:
    """Decisions for a causal language model as it is now: its device, dtype, adapters, attention kernel and mode.

    Args:
        model: a transformers model, with or without adapters. On the meta device (without weights) no trial is run.
        device: answer as if the weights lay on this type of device ("cpu", "cuda"); None = where they are.
    """
    return Capabilities(
        positions=positions(model),
        training_forward=training_forward(model, device),
        plain_head=plain_head(model),
        sequence_packing=sequence_packing(model),
        decoder=decoder(model, device),
        packed_weights=packed_weights(model, device),
        compiled_decoding=compiled_decoding(model, device),
        fused_step=fused_step(model, device),
        independent_rows=independent_rows(model, device),
        slot_adapters=slot_adapters(model, device),
    )
