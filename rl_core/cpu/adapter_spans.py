"""Low-rank adapters over spans of tokens, and the table of them that compiled code takes.

I inputs, O outputs, R rank.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

__all__ = ["AdapterSpan", "AdapterSpans", "SpanTable", "is_plain"]


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Tokens of one adapter, and its updates of some layers side by side."""

    start: int
    stop: int
    columns: list[tuple[int, int]]  # of each updated layer among the outputs
    scale: float
    downs: Sequence[torch.Tensor]  # A of each [r, I], float32
    ups: Sequence[torch.Tensor]  # B of each [O, r], float32

    @property
    def ranks(self) -> list[int]:
        """Of each update."""
        return [up_OR.shape[1] for up_OR in self.ups]


class AdapterSpans(Sequence[AdapterSpan]):
    """Spans whose factors stay where they are, so what calls need to know of these is computed once."""

    def __init__(self, spans: Sequence[AdapterSpan], places: Sequence[Sequence[int]] | None = None) -> None:
        """places: of the gradients of each span's A, then its B, within a tensor of all; None = in order."""
        self._spans = list(spans)
        self.table = SpanTable(spans, places)

    @classmethod
    def of(cls, spans: Sequence[AdapterSpan]) -> AdapterSpans:
        """The spans themselves, if they are such already."""
        return spans if isinstance(spans, cls) else cls(spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    def over(self, tokens: Sequence[int]) -> AdapterSpans:
        """The same of other tokens. Args: tokens: of each span, which follow one another."""
        moved, start = copy.copy(self), 0
        moved._spans = []
        for span, count in zip(self._spans, tokens, strict=True):
            moved._spans.append(replace(span, start=start, stop=start + count))
            start += count
        moved.table = self.table.over(moved._spans)
        return moved

    def gradients_within(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Views of the places of each span's A, then its B, within a flat tensor."""
        found = []
        for span, places in zip(self._spans, self.table.places, strict=True):
            for factor, place in zip((*span.downs, *span.ups), places, strict=True):
                found.append(gradients[place : place + factor.numel()].view(factor.shape))
        return found


_FIELDS = 16  # of an `Update` in low_rank.c, 8 bytes each
_START, _COUNT = 0, 1
_UP_ACROSS, _BESIDE, _LOW, _GRAD_LOW, _GRAD_DOWN, _GRAD_UP, _SCALE = 8, 9, 10, 11, 12, 13, 14


class SpanTable:
    """An `Update` of low_rank.c for every update of some spans; places within flat tensors as distances from these."""

    def __init__(self, spans: Sequence[AdapterSpan], places: Sequence[Sequence[int]] | None = None) -> None:
        """places: as `AdapterSpans` has them."""
        factors = [factor for span in spans for factor in (*span.downs, *span.ups)]
        self.is_plain = all(map(is_plain, factors))
        self.is_contiguous = all(factor.is_contiguous() for factor in factors)
        self.dtype = factors[0].dtype if factors else torch.float32
        downs = [[down.numel() for down in span.downs] for span in spans]
        ups = [[up.numel() for up in span.ups] for span in spans]
        self.size, self.down_size, self.up_size = 0, sum(map(sum, downs)), sum(map(sum, ups))
        self.places: list[Sequence[int]] = [] if places is None else list(places)
        for down_sizes, up_sizes in zip(downs, ups, strict=True):
            ends = list(itertools.accumulate([*down_sizes, *up_sizes], initial=self.size))
            self.size = ends.pop()
            if places is None:
                self.places.append(ends)
        ranks = [span.ranks for span in spans]
        self.max_rank = max((max(own) for own in ranks), default=1)
        self._updates, self._strides = [len(own) for own in ranks], [sum(own) for own in ranks]
        if not self.is_plain:
            return
        rows, scales, at_beside, at_up = [], [], 0, 0
        for span, own, at, down_sizes, up_sizes in zip(spans, ranks, self.places, downs, ups, strict=True):
            at_low = 0
            for index, ((begin, end), rank) in enumerate(zip(span.columns, own, strict=True)):
                down, up = span.downs[index], span.ups[index]
                beside = down.data_ptr() if len(own) == 1 else 4 * at_beside
                rows.append((
                    0, 0, begin, end - begin, rank, sum(own), down.data_ptr(), up.data_ptr(), 4 * at_up, beside,
                    4 * at_low, 4 * at_low, 4 * at[index], 4 * at[len(own) + index], 0, index == 0,
                ))  # fmt: skip
                scales.append(span.scale)
                at_low += rank
                at_up += up_sizes[index]
                at_beside += down_sizes[index]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, _FIELDS)
        self._rows.view(np.float64)[:, _SCALE] = scales
        self._within = self._rows[:, _LOW].copy()  # a row of `low`: place of the update
        self._is_beside = np.repeat([len(own) > 1 for own in ranks], self._updates).astype(np.int64)
        self._put(spans)

    def _put(self, spans: Sequence[AdapterSpan]) -> None:
        """Take the tokens of the spans."""
        counts = np.array([span.stop - span.start for span in spans], dtype=np.int64)
        sizes = counts * np.array(self._strides, dtype=np.int64)
        self._rows[:, _START] = np.repeat([span.start for span in spans], self._updates)
        self._rows[:, _COUNT] = np.repeat(counts, self._updates)
        self._rows[:, _LOW] = self._within + np.repeat(4 * (np.cumsum(sizes) - sizes), self._updates)
        self._rows[:, _GRAD_LOW] = self._rows[:, _LOW]
        self.low_size = int(sizes.sum())

    def over(self, spans: Sequence[AdapterSpan]) -> SpanTable:
        """The same of these spans, which differ in their tokens alone."""
        other = copy.copy(self)
        if self.is_plain:
            other._rows = self._rows.copy()
            other._put(spans)
        return other

    def rows_at(
        self, low: torch.Tensor, ups_across: torch.Tensor,
        backward: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The table for these tensors. Args: backward: gradient of `low`, those of the factors, room for A."""
        rows = self._rows.copy()
        rows[:, _LOW] += low.data_ptr()
        rows[:, _UP_ACROSS] += ups_across.data_ptr()
        if backward is not None:
            grad_low, gradients, beside = backward
            rows[:, _GRAD_LOW] += grad_low.data_ptr()
            rows[:, _GRAD_DOWN : _GRAD_UP + 1] += gradients.data_ptr()
            rows[:, _BESIDE] += self._is_beside * beside.data_ptr()
        return rows


def is_plain(matrix: torch.Tensor) -> bool:
    """True = compiled code takes the matrix: float32 on the CPU, without gaps within rows."""
    return matrix.is_cpu and matrix.dtype == torch.float32 and matrix.stride(1) == 1
