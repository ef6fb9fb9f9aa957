"""Token ids and loss masks of many sequences in 5 bytes a token, in memory or in a mapped file; lists take 44."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rl_core.data.conversation import TrainingSequence

__all__ = ["TokenChunk", "TokenRows", "chunk_of"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Consecutive sequences, stored end to end."""

    rows: Ints  # [sequences] index of the row of the data that each is of, ascending
    prompts: NDArray[np.int32]  # [sequences] tokens of the prompt of a preference's side; 0 for a demonstration
    starts: Ints  # [sequences + 1] places of the first tokens, and the end
    ids: NDArray[np.int32]  # [tokens]
    mask: NDArray[np.uint8]  # [tokens] 1 = carries loss


def chunk_of(sequences: Iterable[tuple[int, int, Sequence[int], Sequence[bool]]]) -> TokenChunk:
    """Sequences (row, tokens of the prompt, token ids, loss mask) in compact form.

    Raises: ValueError if ids and mask differ in length.
    """
    rows, prompts, starts, ids, mask = array("q"), array("i"), array("q", [0]), array("i"), bytearray()
    for row, prompt, some_ids, some_mask in sequences:
        if len(some_ids) != len(some_mask):
            raise ValueError(f"{len(some_ids)} token ids, but a loss mask of {len(some_mask)}")
        rows.append(row)
        prompts.append(prompt)
        ids.extend(some_ids)
        mask.extend(some_mask)
        starts.append(len(ids))
    return TokenChunk(
        np.asarray(rows, np.int64),
        np.asarray(prompts, np.int32),
        np.asarray(starts, np.int64),
        np.asarray(ids, np.int32),
        np.frombuffer(bytes(mask), np.uint8),
    )


class TokenRows(Sequence[TrainingSequence]):
    """Sequences (token ids, loss mask) of chunks; each is made anew as lists where it is asked for."""

    def __init__(
        self,
        chunks: Sequence[TokenChunk] = (),
        places: Ints | None = None,
        limits: Sequence[int | None] | None = None,
        recipe: tuple[Any, ...] | None = None,
    ) -> None:
        """Rows of chunks, in their order.

        Args:
            places: of the sequences that are taken, in this order; None = all.
            limits: tokens of a sequence that are kept, for each chunk; None = all.
            recipe: a function and its arguments that make the same rows in another process, where chunks are mapped.
        """
        self._chunks, self._places, self._recipe = list(chunks), places, recipe
        self._limits = [None] * len(self._chunks) if limits is None else list(limits)
        self._firsts = [0, *itertools.accumulate(len(chunk.rows) for chunk in self._chunks)]

    @classmethod
    def of(cls, sequences: Iterable[TrainingSequence]) -> TokenRows:
        """Rows of one sequence each."""
        return cls([chunk_of((row, 0, ids, mask) for row, (ids, mask) in enumerate(sequences))])

    def __reduce__(self) -> tuple[Any, ...]:
        return self._recipe or (TokenRows, (self._chunks, self._places, self._limits))

    def select(self, places: Ints, max_tokens: int | None = None) -> TokenRows:
        """The sequences at these places, in this order; of each at most the first `max_tokens` tokens. Copies none."""
        places = np.asarray(places, np.int64)
        limits = [min((n for n in (limit, max_tokens) if n is not None), default=None) for limit in self._limits]
        inner = places if self._places is None else self._places[places]
        return TokenRows(self._chunks, inner, limits, (TokenRows.select, (self, places, max_tokens)))

    def joined(self, other: TokenRows) -> TokenRows:
        """These sequences and then the others."""
        mine, theirs = (np.arange(len(some)) if some._places is None else some._places for some in (self, other))
        return TokenRows(
            [*self._chunks, *other._chunks],
            np.concatenate([mine, theirs + self._firsts[-1]]),
            [*self._limits, *other._limits],
            (TokenRows.joined, (self, other)),
        )

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sequence."""
        return self._picked(ends - chunk.starts[:-1] for chunk, ends in self._ends())

    @cached_property
    def rows(self) -> Ints:
        """Row of the data that each sequence is of."""
        return self._picked(chunk.rows for chunk in self._chunks)

    @cached_property
    def prompts(self) -> Ints:
        """Tokens of each sequence's prompt; 0 for demonstrations."""
        return self._picked(chunk.prompts for chunk in self._chunks)

    @cached_property
    def loss_tokens(self) -> Ints:
        """Tokens of each sequence that carry loss."""
        return self._picked(_sums(chunk, ends) for chunk, ends in self._ends())

    @property
    def row_starts(self) -> Ints:
        """Place of the first sequence of each row."""
        return np.flatnonzero(np.diff(self.rows, prepend=-1))

    @property
    def num_rows(self) -> int:
        """Rows of the data that have a sequence here."""
        return len(self.row_starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def num_bytes(self) -> int:
        """Bytes that tokens, masks and places of all chunks take, mapped ones included."""
        parts = [getattr(chunk, name) for chunk in self._chunks for name in TokenChunk.__slots__]
        return sum(part.nbytes for part in parts) + (0 if self._places is None else self._places.nbytes)

    def places_of(self, rows: Sequence[int]) -> Ints:
        """Places of the sequences of these rows of the data, which ascend as rows do here."""
        wanted = np.asarray(rows, np.int64)
        starts, ends = (np.searchsorted(self.rows, wanted, side) for side in ("left", "right"))
        counts = ends - starts
        # of each row its first place, and the number of each place within its row
        first, within = (
            np.repeat(starts, counts),
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts),
        )
        return first + within

    def of_rows(self, rows: Sequence[int], max_tokens: int | None = None) -> TokenRows:
        """The sequences of these rows of the data. See `select`."""
        return self.select(self.places_of(rows), max_tokens)

    def __len__(self) -> int:
        return self._firsts[-1] if self._places is None else len(self._places)

    @overload
    def __getitem__(self, index: int) -> TrainingSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingSequence]: ...
    def __getitem__(self, index: int | slice) -> TrainingSequence | list[TrainingSequence]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        ids, mask = self.arrays(range(len(self))[index])  # raises IndexError; negative ones count from the end
        return ids.tolist(), mask.view(np.bool_).tolist()

    def arrays(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids and loss mask of a sequence, from 0, as views."""
        place = index if self._places is None else int(self._places[index])
        number = bisect.bisect_right(self._firsts, place) - 1
        chunk, inner, limit = self._chunks[number], place - self._firsts[number], self._limits[number]
        start, end = int(chunk.starts[inner]), int(chunk.starts[inner + 1])
        end = end if limit is None else min(end, start + limit)
        return chunk.ids[start:end], chunk.mask[start:end]

    def _ends(self) -> Iterator[tuple[TokenChunk, Ints]]:
        """Chunks, with the place behind each sequence's last token that is kept."""
        for chunk, limit in zip(self._chunks, self._limits, strict=True):
            ends = chunk.starts[1:]
            yield chunk, ends if limit is None else np.minimum(ends, chunk.starts[:-1] + limit)

    def _picked(self, parts: Iterable[NDArray[Any]]) -> Ints:
        whole = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64, copy=False)
        return whole if self._places is None else whole[self._places]


def _sums(chunk: TokenChunk, ends: Ints) -> Ints:
    """Tokens with loss of each sequence up to its end."""
    before = np.concatenate([[0], np.cumsum(chunk.mask, dtype=np.int64)])
    found: Ints = before[ends] - before[chunk.starts[:-1]]
    return found
