"""Token ids and loss masks of many sequences in 5 bytes a token, a tenth of what Python lists take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from rl_core.data.conversation import TrainingSequence

__all__ = ["TokenRows"]


class TokenRows(Sequence[TrainingSequence]):
    """Sequences (token ids, loss mask), stored end to end; each is made anew as lists where it is asked for."""

    def __init__(self, rows: Iterable[TrainingSequence] = ()) -> None:
        self._ids, self._mask = array("i"), bytearray()
        self._ends = array("q", [0])  # position after each row, from the second on
        for ids, mask in rows:
            self.append(ids, mask)

    def append(self, ids: Sequence[int], mask: Sequence[bool]) -> None:
        """Add a sequence. Raises: ValueError if ids and mask differ in length."""
        if len(ids) != len(mask):
            raise ValueError(f"{len(ids)} token ids, but a loss mask of {len(mask)}")
        self._ids.extend(ids)
        self._mask.extend(mask)
        self._ends.append(len(self._ids))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self._ids)

    @property
    def num_bytes(self) -> int:
        """Bytes that tokens, masks and places take."""
        return self._ids.itemsize * len(self._ids) + len(self._mask) + self._ends.itemsize * len(self._ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> TrainingSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingSequence]: ...
    def __getitem__(self, index: int | slice) -> TrainingSequence | list[TrainingSequence]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # raises IndexError; negative ones count from the end
        start, end = self._ends[place], self._ends[place + 1]
        return self._ids[start:end].tolist(), [bool(value) for value in self._mask[start:end]]
