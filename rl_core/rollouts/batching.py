"""Micro-batches of rollouts and other token sequences: padded or packed, within a token budget.

B rows, S tokens of a whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rl_core.cpu.prefix_tree import encode_row
from rl_core.data.batches import (
    attention_mask,
    pack_sequences,
    pad_rows,
    plan_micro_batches,
    plan_shared_batches,
)
from rl_core.data.row_sequences import LazyRows
from rl_core.errors import DataError
from rl_core.types import ImagePixels, Rollout, TrainBatch, compute_context_positions


@dataclass(slots=True)
class TrainRow:
    """One sequence to train on; the lists run over the tokens after the prompt."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]  # [T]
    loss_mask: Sequence[bool]  # [T] True = token carries loss
    sampler_logprobs: Sequence[float] | None = (
        None  # [T] nats, under the policy that sampled the row
    )
    # of the sampling and of all log-probs; 0 = greedy, with log-probs at temperature 1
    temperature: float = 1.0
    # indices into completion_ids at which a new context begins
    context_starts: Sequence[int] = ()
    images: Sequence[ImagePixels] = ()  # in the order of their tokens

    @property
    def positions(self) -> list[int]:
        """Position of each token, prompt included, within its context."""
        return compute_context_positions(
            len(self.prompt_ids), len(self.completion_ids), self.context_starts
        )

    def encode_contexts(self) -> list[bytes]:
        """Encode the tokens of each context, prompt included, for a prefix tree."""
        ids, num_prompt = [*self.prompt_ids, *self.completion_ids], len(self.prompt_ids)
        edges = [0, *(num_prompt + start for start in self.context_starts), len(ids)]
        return [encode_row(ids[begin:end]) for begin, end in pairwise(edges)]


def build_train_row(rollout: Rollout) -> TrainRow:
    """Return the tokens, loss mask, sampler log-probs and temperature of a rollout."""
    return TrainRow(
        prompt_ids=rollout.prompt_ids,
        completion_ids=rollout.completion_ids,
        loss_mask=rollout.loss_mask,
        sampler_logprobs=rollout.sampler_logprobs,
        temperature=rollout.temperature,
        context_starts=tuple(rollout.context_starts),
        images=tuple(rollout.images),
    )


def build_batches(
    rows: Sequence[TrainRow | Rollout],
    max_tokens: int,
    pad_id: int,
    *,
    packing: bool = False,
    shares_prefixes: bool = False,
) -> list[TrainBatch]:
    """Build length-sorted, right-padded micro-batches of at most `max_tokens` padded tokens; a longer row gets its
    own batch.

    With `shares_prefixes`, rows that begin alike are in one batch, and `max_tokens` counts what they have in common
    once (`rl_core.cpu.prefix_tree`). All passes over these batches must be by models that compute it once
    (`capabilities.check_prefix_sharing`): a padded batch can be much larger.

    `TrainBatch.rows` is the index in `rows` of each batch row. Sampler log-probs are 0 where a token carries no loss,
    and None if the first row has none. With `packing`, a batch row holds several of `rows`, up to the length of the
    longest, and `position_ids_BS` separates them (`TrainBatch.rows` is then empty). Batch rows are no wider, because
    attention over a row costs the square of its width regardless of its mask.

    Each row's log-probs are taken at its sampling temperature; `temperatures_BS` is None if all are 1. A greedy row
    (0) counts as 1, as its sampler's log-probs do. If a row has several contexts, `position_ids_BS` separates them.

    Raises: DataError if a row has an empty prompt, lists of different lengths, a negative temperature, or fields that
        the first row lacks.
    """
    train_rows = [build_train_row(row) if isinstance(row, Rollout) else row for row in rows]
    return list(
        build_lazy_batches(
            train_rows, max_tokens, pad_id, packing=packing, shares_prefixes=shares_prefixes
        )
    )


def build_lazy_batches(
    rows: Sequence[TrainRow],
    max_tokens: int,
    pad_id: int,
    *,
    packing: bool = False,
    shares_prefixes: bool = False,
) -> LazyRows[TrainBatch]:
    """Build the batches of `build_batches` lazily: each is assembled, from its rows, when it is accessed."""
    lengths, first = [], None
    for index, row in enumerate(rows):
        first = first or row
        _check_row(row, first, index)
        lengths.append(len(row.prompt_ids) + len(row.completion_ids))
    if not packing:
        encoded_rows = (row.encode_contexts() for row in rows) if shares_prefixes else None
        groups = plan_shared_batches(lengths, max_tokens, encoded_rows)
        return LazyRows(
            len(groups), lambda n: _build_batch([[rows[i]] for i in groups[n]], pad_id, groups[n])
        )
    bins = pack_sequences(lengths)
    groups = plan_micro_batches([sum(lengths[i] for i in indices) for indices in bins], max_tokens)

    def build_packed(n: int) -> TrainBatch:
        batch_bins = [[rows[i] for i in bins[b]] for b in groups[n]]
        return _build_batch(batch_bins, pad_id, None)

    return LazyRows(len(groups), build_packed)


def _check_row(row: TrainRow, first: TrainRow, index: int) -> None:
    if not row.prompt_ids:
        raise DataError(
            f"row {index} has no prompt; the first token of a sequence cannot carry loss"
        )
    if not 0 <= row.temperature < math.inf:
        raise DataError(f"row {index}: temperature {row.temperature} must be finite and at least 0")
    count = len(row.completion_ids)
    for name in ("loss_mask", "sampler_logprobs"):
        values = getattr(row, name)
        if (values is None) != (getattr(first, name) is None):
            raise DataError(f"row {index}: {name} must be set for all rows or for none")
        if values is not None and len(values) != count:
            raise DataError(
                f"row {index}: {name} has {len(values)} entries, its completion {count} tokens"
            )
    if any(b <= a for a, b in pairwise([-1, *row.context_starts, count])):
        raise DataError(
            f"row {index}: context_starts {list(row.context_starts)} must be increasing and within {count} tokens"
        )


def _build_batch(bins: list[list[TrainRow]], pad_id: int, rows: list[int] | None) -> TrainBatch:
    """Build a batch with one row per bin.

    Args:
        rows: see `TrainBatch.rows`; None = packed.
    """

    def join_bins(values_of: Callable[[TrainRow], Sequence[Any]]) -> list[list[Any]]:
        return [[value for row in bin_rows for value in values_of(row)] for bin_rows in bins]

    loss_mask_BS = pad_rows(
        join_bins(lambda row: [False] * len(row.prompt_ids) + list(row.loss_mask)),
        False,
        dtype=torch.bool,
    )

    sampler_logprobs_BS: torch.Tensor | None = None
    if bins[0][0].sampler_logprobs is not None:
        sampler_logprobs_BS = pad_rows(
            join_bins(lambda row: [0.0] * len(row.prompt_ids) + list(row.sampler_logprobs or ())),
            0.0,
            dtype=torch.float32,
        ).masked_fill_(~loss_mask_BS, 0.0)
    temperatures_BS: torch.Tensor | None = None
    if any(row.temperature not in (0, 1) for bin_rows in bins for row in bin_rows):
        temperatures_BS = pad_rows(
            join_bins(
                lambda row: (
                    [row.temperature or 1.0] * (len(row.prompt_ids) + len(row.completion_ids))
                )
            ),
            1.0,
            dtype=torch.float32,
        )
    ids = join_bins(lambda row: [*row.prompt_ids, *row.completion_ids])
    images = [tuple(image for row in bin_rows for image in row.images) for bin_rows in bins]
    is_separated = rows is None or any(row.context_starts for bin_rows in bins for row in bin_rows)
    return TrainBatch(
        input_ids_BS=pad_rows(ids, pad_id),
        attention_mask_BS=attention_mask([len(row) for row in ids]),
        loss_mask_BS=loss_mask_BS,
        sampler_logprobs_BS=sampler_logprobs_BS,
        # position 0: every padding token counts as a separate sequence
        position_ids_BS=pad_rows(join_bins(lambda row: row.positions), 0) if is_separated else None,
        rows=list(rows or []),
        temperatures_BS=temperatures_BS,
        images=images if any(images) else [],
    )
