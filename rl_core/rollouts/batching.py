"""Rollouts as padded training batches.

B rows, S whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.batches import attention_mask, micro_batches, pack, pad_rows
from rl_core.errors import DataError
from rl_core.types import Rollout, RolloutGroup, TrainBatch

__all__ = ["TrainRow", "make_batches", "rows_of"]


@dataclass(slots=True)
class TrainRow:
    """One sequence to learn from; the lists run over the tokens after the prompt."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]  # [T]
    loss_mask: Sequence[bool]  # [T] True = token carries loss
    advantage: float | Sequence[float] | None = None  # one for all loss tokens, or [T]
    sampler_logprobs: Sequence[float] | None = None  # [T] nats
    ref_logprobs: Sequence[float] | None = None  # [T] nats
    temperature: float = 1.0  # at which it was sampled and its log-probs are taken; 0 = greedy: they are taken at 1


def rows_of(groups: Sequence[RolloutGroup]) -> list[TrainRow]:
    """One row per rollout, in order; advantages where the groups have them, old log-probs from the sampler."""
    rows: list[TrainRow] = []
    for group in groups:
        advantages = group.advantages if group.advantages is not None else [None] * len(group.rollouts)
        if len(advantages) != len(group.rollouts):
            raise DataError(f"a group of {len(group.rollouts)} rollouts has {len(advantages)} advantages")
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            rows.append(_row_of(rollout, advantage))
    return rows


def make_batches(
    rows: Sequence[TrainRow | Rollout], max_tokens: int, pad_id: int, *, packing: bool = False
) -> list[TrainBatch]:
    """Length-sorted, right-padded micro-batches of at most `max_tokens` padded tokens (a longer row stands alone).

    `TrainBatch.rows` says which of `rows` each batch row is. Advantages and log-probabilities are 0 where a token
    carries no loss; a field is None when the first row has none. With `packing`, a batch row holds several of `rows`,
    up to the length of the longest, and `position_ids_BS` tells them apart (`rows` is empty then). No wider, because
    attention over a row costs the square of its width, whatever its mask lets through.

    Each row's log-probabilities are those of the temperature that it was sampled at, beside rows of other ones too;
    `temperatures_BS` is None where all are 1. A greedy row (0) counts as 1, as its sampler's log-probabilities do.

    Raises: DataError when a row has an empty prompt, lists of different lengths, fields that the first has not, or a
        negative temperature.
    """
    plain = [_row_of(row, None) if isinstance(row, Rollout) else row for row in rows]
    for index, row in enumerate(plain):
        _check(row, plain[0], index)
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in plain]
    if not packing:
        return [_batch([[plain[i]] for i in group], pad_id, group) for group in micro_batches(lengths, max_tokens)]
    bins = [[plain[i] for i in indices] for indices in pack(lengths)]
    filled = [sum(len(row.prompt_ids) + len(row.completion_ids) for row in parts) for parts in bins]
    return [_batch([bins[i] for i in group], pad_id, None) for group in micro_batches(filled, max_tokens)]


def _row_of(rollout: Rollout, advantage: float | None) -> TrainRow:
    return TrainRow(
        prompt_ids=rollout.prompt_ids,
        completion_ids=rollout.completion_ids,
        loss_mask=rollout.loss_mask,
        advantage=advantage,
        sampler_logprobs=rollout.sampler_logprobs,
        temperature=rollout.temperature,
    )


def _check(row: TrainRow, first: TrainRow, index: int) -> None:
    if not row.prompt_ids:
        raise DataError(f"row {index} has no prompt; its first token could carry no loss")
    if not 0 <= row.temperature < math.inf:
        raise DataError(f"row {index}: temperature {row.temperature} has to be at least 0, and finite")
    count = len(row.completion_ids)
    for name in ("loss_mask", "advantage", "sampler_logprobs", "ref_logprobs"):
        values = getattr(row, name)
        if (values is None) != (getattr(first, name) is None):
            raise DataError(f"row {index}: {name} has to be given for all rows or for none")
        if values is not None and not isinstance(values, int | float) and len(values) != count:
            raise DataError(f"row {index}: {name} has {len(values)} entries, its completion {count} tokens")


def _batch(bins: list[list[TrainRow]], pad_id: int, rows: list[int] | None) -> TrainBatch:
    """One batch row for each bin; `rows` None = packed."""

    def joined(values_of: Callable[[TrainRow], Sequence[Any]]) -> list[list[Any]]:
        return [[value for row in parts for value in values_of(row)] for parts in bins]

    loss_mask_BS = pad_rows(
        joined(lambda row: [False] * len(row.prompt_ids) + list(row.loss_mask)), False, dtype=torch.bool
    )

    def per_token(name: str) -> torch.Tensor | None:
        if getattr(bins[0][0], name) is None:
            return None

        def values_of(row: TrainRow) -> list[float]:
            values = getattr(row, name)
            if isinstance(values, int | float):
                values = [values] * len(row.completion_ids)
            return [0.0] * len(row.prompt_ids) + list(values)

        return pad_rows(joined(values_of), 0.0, dtype=torch.float32).masked_fill_(~loss_mask_BS, 0.0)

    temperatures_BS: torch.Tensor | None = None
    if any(row.temperature not in (0, 1) for parts in bins for row in parts):
        temperatures_BS = pad_rows(
            joined(lambda row: [row.temperature or 1.0] * (len(row.prompt_ids) + len(row.completion_ids))),
            1.0,
            dtype=torch.float32,
        )
    ids = joined(lambda row: [*row.prompt_ids, *row.completion_ids])
    positions = joined(lambda row: range(len(row.prompt_ids) + len(row.completion_ids)))
    return TrainBatch(
        input_ids_BS=pad_rows(ids, pad_id),
        attention_mask_BS=attention_mask([len(row) for row in ids]),
        loss_mask_BS=loss_mask_BS,
        advantages_BS=per_token("advantage"),
        sampler_logprobs_BS=per_token("sampler_logprobs"),
        ref_logprobs_BS=per_token("ref_logprobs"),
        position_ids_BS=pad_rows(positions, 0) if rows is None else None,  # a padding token is a sequence of its own
        rows=list(rows or []),
        temperatures_BS=temperatures_BS,
    )
