"""A sequence whose items are made where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["LazyRows"]

T = TypeVar("T")


class LazyRows(Sequence[T], Generic[T]):
    """`make` of 0, 1, ...: an item takes memory only while it is used."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._make(place) for place in range(self._count)[index]]
        return self._make(range(self._count)[index])
