"""Rows of a data file as compressed bytes, in about half the memory of their text; dictionaries take twice as much."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

__all__ = ["KeptRows", "rows_at"]

Row = dict[str, Any]


class KeptRows(Sequence[Row]):
    """Rows that are made anew where they are asked for: a change of one that was given out changes nothing here."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._packed = [_packed(row) for row in rows]

    def append(self, row: Row) -> None:
        """Add a row at the end."""
        self._packed.append(_packed(row))

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows at the end; the bytes of `KeptRows` are shared."""
        self._packed += rows._packed if isinstance(rows, KeptRows) else map(_packed, rows)

    def replace(self, place: int, row: Row) -> None:
        """Put a row in the place of another."""
        self._packed[place] = _packed(row)

    def select(self, places: Iterable[int]) -> KeptRows:
        """The rows at these places, in this order; both share their bytes."""
        found = KeptRows()
        found._packed = [self._packed[place] for place in places]
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows take, without their places in a list."""
        return sum(map(len, self._packed))

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [_unpacked(packed) for packed in self._packed[index]]
        return _unpacked(self._packed[index])

    def __iter__(self) -> Iterator[Row]:
        return map(_unpacked, self._packed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KeptRows({list(self)!r})"


def rows_at(rows: Sequence[Row], places: Iterable[int]) -> Sequence[Row]:
    """The rows at these places, in this order, kept as they are."""
    return rows.select(places) if isinstance(rows, KeptRows) else [rows[place] for place in places]


def _packed(row: Row) -> bytes:
    return zlib.compress(pickle.dumps(row, pickle.HIGHEST_PROTOCOL), 1)  # 20 microseconds for 600 to 2,300 bytes


def _unpacked(packed: bytes) -> Row:
    row: Row = pickle.loads(zlib.decompress(packed))
    return row
