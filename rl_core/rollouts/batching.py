"""Micro-batches of rollouts and other token sequences: padded or packed, with a token budget.

B rows, S whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rl_core.data.batches import attention_mask, pack_sequences, pad_rows, plan_micro_batches
from rl_core.data.row_sequences import LazyRows
from rl_core.errors import DataError
from rl_core.types import Rollout, TrainBatch, compute_context_positions


@dataclass(slots=True)
class TrainRow:
    """One sequence to train on; the lists run over the tokens after the prompt."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]  # [T]
    loss_mask: Sequence[bool]  # [T] True = token carries loss
    sampler_logprobs: Sequence[float] | None = None  # [T] nats, of the policy that sampled it
    # of its sampling, and of all its log-probs; 0 = greedy: log-probs are taken at 1
    temperature: float = 1.0
    # indices into completion_ids at which a context of its own begins
    context_starts: Sequence[int] = ()

    @property
    def positions(self) -> list[int]:
        """Position of each token, prompt included, within its context."""
        return compute_context_positions(
            len(self.prompt_ids), len(self.completion_ids), self.context_starts
        )


def build_train_row(rollout: Rollout) -> TrainRow:
    """The tokens, loss mask, sampler log-probs and temperature of a rollout."""
    return TrainRow(
        prompt_ids=rollout.prompt_ids,
        completion_ids=rollout.completion_ids,
        loss_mask=rollout.loss_mask,
        sampler_logprobs=rollout.sampler_logprobs,
        temperature=rollout.temperature,
        context_starts=tuple(rollout.context_starts),
    )


def build_batches(
    rows: Sequence[TrainRow | Rollout], max_tokens: int, pad_id: int, *, packing: bool = False
) -> list[TrainBatch]:
    """Length-sorted, right-padded micro-batches of at most `max_tokens` padded tokens (a longer row stands alone).

    `TrainBatch.rows` gives the index in `rows` of each batch row. Sampler log-probs are 0 where a token carries no
    loss, and None when the first row has none. With `packing`, a batch row holds several of `rows`, up to the length
    of the longest, and `position_ids_BS` separates them (`TrainBatch.rows` is then empty). No wider, because attention
    over a row costs the square of its width, whatever its mask lets through.

    Each row's log-probs are those at its own sampling temperature; `temperatures_BS` is None where all are 1. A greedy
    row (0) counts as 1, as its sampler's log-probs do. Where a row has several contexts, `position_ids_BS` separates
    them.

    Raises: DataError when a row has an empty prompt, lists of different lengths, fields that the first has not, or a
        negative temperature.
    """
    plain = [build_train_row(row) if isinstance(row, Rollout) else row for row in rows]
    return list(build_lazy_batches(plain, max_tokens, pad_id, packing=packing))


def build_lazy_batches(
    rows: Sequence[TrainRow], max_tokens: int, pad_id: int, *, packing: bool = False
) -> LazyRows[TrainBatch]:
    """As `build_batches`; each is made where it is asked for, from rows that are asked for then."""
    lengths, first = [], None
    for index, row in enumerate(rows):
        first = first or row
        _check_row(row, first, index)
        lengths.append(len(row.prompt_ids) + len(row.completion_ids))
    if not packing:
        groups = plan_micro_batches(lengths, max_tokens)
        return LazyRows(
            len(groups), lambda n: _build_batch([[rows[i]] for i in groups[n]], pad_id, groups[n])
        )
    bins = pack_sequences(lengths)
    filled = plan_micro_batches([sum(lengths[i] for i in indices) for indices in bins], max_tokens)
    return LazyRows(
        len(filled),
        lambda n: _build_batch(
            [[rows[i] for i in bins[place]] for place in filled[n]], pad_id, None
        ),
    )


def _check_row(row: TrainRow, first: TrainRow, index: int) -> None:
    if not row.prompt_ids:
        raise DataError(f"row {index} has no prompt; its first token could carry no loss")
    if not 0 <= row.temperature < math.inf:
        raise DataError(
            f"row {index}: temperature {row.temperature} has to be at least 0, and finite"
        )
    count = len(row.completion_ids)
    for name in ("loss_mask", "sampler_logprobs"):
        values = getattr(row, name)
        if (values is None) != (getattr(first, name) is None):
            raise DataError(f"row {index}: {name} has to be given for all rows or for none")
        if values is not None and len(values) != count:
            raise DataError(
                f"row {index}: {name} has {len(values)} entries, its completion {count} tokens"
            )
    if any(b <= a for a, b in pairwise([-1, *row.context_starts, count])):
        raise DataError(
            f"row {index}: context_starts {list(row.context_starts)} have to rise within {count} tokens"
        )


def _build_batch(bins: list[list[TrainRow]], pad_id: int, rows: list[int] | None) -> TrainBatch:
    """One batch row for each bin; `rows` None = packed."""

    def joined(values_of: Callable[[TrainRow], Sequence[Any]]) -> list[list[Any]]:
        return [[value for row in parts for value in values_of(row)] for parts in bins]

    loss_mask_BS = pad_rows(
        joined(lambda row: [False] * len(row.prompt_ids) + list(row.loss_mask)),
        False,
        dtype=torch.bool,
    )

    sampler_logprobs_BS: torch.Tensor | None = None
    if bins[0][0].sampler_logprobs is not None:
        sampler_logprobs_BS = pad_rows(
            joined(lambda row: [0.0] * len(row.prompt_ids) + list(row.sampler_logprobs or ())),
            0.0,
            dtype=torch.float32,
        ).masked_fill_(~loss_mask_BS, 0.0)
    temperatures_BS: torch.Tensor | None = None
    if any(row.temperature not in (0, 1) for parts in bins for row in parts):
        temperatures_BS = pad_rows(
            joined(
                lambda row: (
                    [row.temperature or 1.0] * (len(row.prompt_ids) + len(row.completion_ids))
                )
            ),
            1.0,
            dtype=torch.float32,
        )
    ids = joined(lambda row: [*row.prompt_ids, *row.completion_ids])
    separated = rows is None or any(row.context_starts for parts in bins for row in parts)
    return TrainBatch(
        input_ids_BS=pad_rows(ids, pad_id),
        attention_mask_BS=attention_mask([len(row) for row in ids]),
        loss_mask_BS=loss_mask_BS,
        sampler_logprobs_BS=sampler_logprobs_BS,
        # a padding token is a sequence of its own
        position_ids_BS=pad_rows(joined(lambda row: row.positions), 0) if separated else None,
        rows=list(rows or []),
        temperatures_BS=temperatures_BS,
    )
