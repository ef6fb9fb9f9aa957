"""Log-probabilities of preference pairs under the reference model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rl_core.data.lazy_rows import LazyRows
from rl_core.data.pairs import Pair
from rl_core.errors import DataError
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.precision import Autocast, autocast
from rl_core.rollouts.batching import TrainRow, lazy_batches
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NO_REFERENCE", "Reference", "checked_references", "reference_logprobs"]

Reference = tuple[float, float]  # log-probs of (chosen, rejected) under the reference, nats, summed over loss tokens
NO_REFERENCE = (0.0, 0.0)


def reference_logprobs(
    model: PreTrainedModel, pairs: Sequence[Pair], *, pad_id: int, max_tokens: int, precision: Autocast = "none"
) -> list[Reference]:
    """Log-probabilities of both sides of every pair under `model` as it is now, without dropout and gradient.

    Length-sorted micro-batches of at most `max_tokens` padded tokens. Draws no random number.
    Returns: (chosen, rejected) of each pair, in nats, summed over the tokens that carry loss.
    """

    def row(place: int) -> TrainRow:
        pair = pairs[place // 2]
        side = pair.rejected if place % 2 else pair.chosen
        return TrainRow(side.prompt_ids, side.completion_ids, side.loss_mask)

    rows = LazyRows(2 * len(pairs), row)
    sums = [0.0] * len(rows)
    device = next(model.parameters()).device

    def fill(batch: TrainBatch) -> None:
        logprobs_B = completion_logprobs(model, batch.to(device))[0].sum(1)
        for row, value in zip(batch.rows, logprobs_B.tolist(), strict=True):
            sums[row] = value

    with evaluating(model), torch.no_grad(), autocast(precision, device):
        MemoryFit("reference log-probabilities").compute(lazy_batches(rows, max_tokens, pad_id), fill)
    return list(zip(sums[0::2], sums[1::2], strict=True))


def checked_references(pairs: Sequence[Pair], rows: Sequence[Reference], name: str) -> list[Reference]:
    """References of pairs. Raises: DataError where they do not fit or are not finite."""
    if len(rows) != len(pairs):
        raise DataError(f"references of {name}: {len(rows)} rows for {len(pairs)} pairs")
    bad = next((index for index, row in enumerate(rows) if not all(map(math.isfinite, row))), None)
    if bad is not None:
        raise DataError(f"references of {name}: row {bad} is {rows[bad]}; the starting model gives no finite number")
    return list(rows)
