"""Micro-batches under a token budget, sequence packing, padding, and a resumable data order.

Suffixes: B rows of a batch, S sequence positions.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.cpu.prefix_tree import plan_tree_batches
from rl_core.errors import DataError
from rl_core.types import TrainBatch


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups of rows of similar length with rows * longest row <= max_tokens.

    Longest first, so that the largest allocation comes first; only a group of one row may exceed the budget.
    Args:
        lengths: tokens of each row, each at least 1.
        max_tokens: padded tokens of one group, padding included.
    Returns: lists of row indices; every row is in exactly one. Ties keep the order of the rows.
    Raises: DataError for an empty row or a budget below 1.
    """
    if max_tokens < 1:
        raise DataError(f"max_tokens: {max_tokens} must be at least 1")
    if any(length < 1 for length in lengths):
        raise DataError(f"row {next(i for i, n in enumerate(lengths) if n < 1)} has no token")
    groups: list[list[int]] = []
    widest = 0
    for row in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups and (len(groups[-1]) + 1) * widest <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            widest = lengths[row]
    return groups


def plan_shared_batches(
    lengths: Sequence[int],
    max_tokens: int,
    encoded_rows: Iterable[Sequence[bytes]] | None,
    *,
    sides: int = 1,
) -> list[list[int]]:
    """Group examples into micro-batches: by the nodes of their prefix trees if they begin alike, otherwise as
    `plan_micro_batches`.

    Args:
        lengths: tokens of each example's longest row.
        max_tokens: limit of a micro-batch, in nodes or in padded tokens; a larger example gets its own.
        encoded_rows: rows of each example (`rl_core.cpu.prefix_tree.plan_tree_batches`); None = the model does not
            share prefixes (`capabilities.check_prefix_sharing`).
        sides: rows of each example in the padded micro-batch.
    Returns: lists of indices, each longest first; every example is in exactly one. Ties keep the order of the examples.
    Raises: DataError for an empty row or a budget below 1.
    """
    padded = plan_micro_batches(lengths, max(1, max_tokens // sides))
    shared = None if encoded_rows is None else plan_tree_batches(encoded_rows, max_tokens)
    if shared is None:
        return padded
    return [sorted(group, key=lambda index: -lengths[index]) for group in shared]


def pack_sequences(lengths: Sequence[int], width: int | None = None) -> list[list[int]]:
    """Pack sequences into bins of at most `width` tokens, best fit decreasing.

    Longest first, each into the fullest bin with room (ties: the first). Deterministic.
    Args:
        lengths: tokens of each sequence, each at least 1.
        width: tokens of a bin; None = the longest sequence.
    Returns: lists of indices in their order within the bin; every index is in exactly one.
    Raises: DataError for an empty sequence or one above `width`.
    Source: Johnson 1974, "Fast algorithms for bin packing": at most 11/9 of the optimum, plus a constant.
    """
    limit = max(lengths, default=0) if width is None else width
    if any(not 1 <= length <= limit for length in lengths):
        index = next(i for i, length in enumerate(lengths) if not 1 <= length <= limit)
        raise DataError(f"sequence {index} has {lengths[index]} tokens; a bin takes 1 to {limit}")
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(free, (lengths[index], 0))
        room, target = free.pop(place) if place < len(free) else (limit, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(index)
        bisect.insort(free, (room - lengths[index], target))
    return bins


def attention_mask(lengths: Sequence[int], width: int | None = None) -> torch.Tensor:
    """Build a bool mask [B, S], True = real token; S = `width`, by default the longest row."""
    lengths_B = torch.as_tensor(lengths, dtype=torch.int64)
    longest = int(lengths_B.max()) if len(lengths_B) else 0
    if width is not None and width < longest:
        raise DataError(f"width {width} is below the longest row, {longest} tokens")
    return torch.arange(longest if width is None else width)[None, :] < lengths_B[:, None]


def pad_rows(
    rows: Sequence[Sequence[Any]],
    pad_value: float | bool = 0,
    *,
    dtype: torch.dtype = torch.int64,
    width: int | None = None,
) -> torch.Tensor:
    """Return rows as one tensor [B, S], right-padded with `pad_value`.

    Args:
        rows: B sequences of token ids, mask values or floats.
        width: S; default: the longest row.
    Raises: DataError if a row is longer than `width`.
    """
    mask_BS = attention_mask([len(row) for row in rows], width)
    padded_BS = torch.full(mask_BS.shape, pad_value, dtype=dtype)
    padded_BS[mask_BS] = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)
    return padded_BS


def resolve_padding_id(renderer: object, explicit_id: int | None = None) -> int:
    """Return the padding token id: `explicit_id`, else the renderer's `pad_id`.

    A `ChatRenderer` always has one: its tokenizer's padding token, else the token that ends an action. Padding is
    masked in attention and loss, but must be a valid token id of the model.
    Raises: DataError if there is none, or it is negative.
    """
    pad_id = explicit_id if explicit_id is not None else getattr(renderer, "pad_id", None)
    if pad_id is None:
        raise DataError(
            f"pad_id: the renderer ({type(renderer).__name__}) has no padding token; give it a pad_id, for instance "
            "its end-of-sequence token, or pass pad_id to the trainer"
        )
    if pad_id < 0:
        raise DataError(f"pad_id: {pad_id} is not a token id; it must be at least 0")
    return int(pad_id)


def build_unscored_batch(rows: Sequence[Sequence[int]], pad_id: int) -> TrainBatch:
    """Build a right-padded batch without loss tokens, for reading hidden states."""
    ids_BS = pad_rows(rows, pad_id)
    return TrainBatch(
        ids_BS,
        attention_mask([len(row) for row in rows]),
        torch.zeros_like(ids_BS, dtype=torch.bool),
    )


class DataOrder:
    """Batches of row indices; every epoch is a new seeded permutation of all rows.

    The last batch of an epoch is short if batch_size does not divide num_rows; batches never span two epochs. The order
    depends only on (seed, epoch), so a restored state continues with exactly the remaining batches.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if num_rows < 1 or batch_size < 1 or seed < 0:
            raise DataError(
                f"num_rows {num_rows} and batch_size {batch_size} must be at least 1, seed {seed} at least 0"
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.position = 0  # rows of this epoch already returned
        self._rows = self._draw_permutation()

    @property
    def batches_per_epoch(self) -> int:
        """Batches per epoch."""
        return -(-self.num_rows // self.batch_size)

    def next_batch(self) -> list[int]:
        """Return the row indices of the next batch."""
        if self.position >= self.num_rows:
            self.epoch += 1
            self.position = 0
            self._rows = self._draw_permutation()
        batch = self._rows[self.position : self.position + self.batch_size]
        self.position += len(batch)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the order and the arguments it was created with."""
        names = ("num_rows", "batch_size", "seed", "epoch", "position")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`.

        Raises: DataError if it was saved with a different number of rows, batch size or seed.
        """
        for name in ("num_rows", "batch_size", "seed"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"data order was saved with {name} {state[name]}, now it is {getattr(self, name)}"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._rows = self._draw_permutation()

    def _draw_permutation(self) -> list[int]:
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows).tolist()
