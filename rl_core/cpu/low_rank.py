"""Low-rank adapters over spans of tokens, and the table of them that compiled code takes.

I inputs, O outputs, R rank.

Products of low-rank adapters over spans of tokens, each span with factors of its own.

Where there is compiled code, those of all spans are one call: with many small ones the calls themselves would cost more
than the work. Each product is the very one that its span would have alone. Code for tiles computes them as it does any
product (`amx_gemm.c`), otherwise there is code for products whose one side is a rank (`low_rank.c`).

N tokens, n of a span, I inputs, O outputs, R rank, all updates of a span side by side.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl_core.cpu import build, gemm
from rl_core.cpu.allocator import ScratchMemory
from rl_core.cpu.gemm import MatrixProduct, Operand
from rl_core.cpu.layer_kernels import compute_input_grad, compute_linear, compute_weight_grad


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

    def __init__(
        self, spans: Sequence[AdapterSpan], offsets: Sequence[Sequence[int]] | None = None
    ) -> None:
        """places: of the gradients of each span's A, then its B, within a tensor of all; None = in order."""
        self._spans = list(spans)
        self.table = SpanTable(spans, offsets)

    @classmethod
    def from_spans(cls, spans: Sequence[AdapterSpan]) -> AdapterSpans:
        """The spans themselves, if they are such already."""
        return spans if isinstance(spans, cls) else cls(spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    def with_token_counts(self, tokens: Sequence[int]) -> AdapterSpans:
        """The same of other tokens. Args: tokens: of each span, which follow one another."""
        moved, start = copy.copy(self), 0
        moved._spans = []
        for span, count in zip(self._spans, tokens, strict=True):
            moved._spans.append(replace(span, start=start, stop=start + count))
            start += count
        moved.table = self.table.with_spans(moved._spans)
        return moved

    def view_gradients(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Views of the places of each span's A, then its B, within a flat tensor."""
        found = []
        for span, places in zip(self._spans, self.table.offsets, strict=True):
            for factor, place in zip((*span.downs, *span.ups), places, strict=True):
                found.append(gradients[place : place + factor.numel()].view(factor.shape))
        return found


_FIELDS = 16  # of an `Update` in low_rank.c, 8 bytes each
_START, _COUNT = 0, 1
_UP_ACROSS, _DOWN_COPY, _LOW, _GRAD_LOW, _GRAD_DOWN, _GRAD_UP, _SCALE = 8, 9, 10, 11, 12, 13, 14


class SpanTable:
    """An `Update` of low_rank.c for every update of some spans; places within flat tensors as distances from these."""

    def __init__(
        self, spans: Sequence[AdapterSpan], offsets: Sequence[Sequence[int]] | None = None
    ) -> None:
        """places: as `AdapterSpans` has them."""
        factors = [factor for span in spans for factor in (*span.downs, *span.ups)]
        self.is_supported = all(map(is_row_contiguous_float32, factors))
        self.is_contiguous = all(factor.is_contiguous() for factor in factors)
        self.dtype = factors[0].dtype if factors else torch.float32
        downs = [[down.numel() for down in span.downs] for span in spans]
        ups = [[up.numel() for up in span.ups] for span in spans]
        self.size, self.down_size, self.up_size = 0, sum(map(sum, downs)), sum(map(sum, ups))
        self.offsets: list[Sequence[int]] = [] if offsets is None else list(offsets)
        for down_sizes, up_sizes in zip(downs, ups, strict=True):
            ends = list(itertools.accumulate([*down_sizes, *up_sizes], initial=self.size))
            self.size = ends.pop()
            if offsets is None:
                self.offsets.append(ends)
        ranks = [span.ranks for span in spans]
        self.max_rank = max((max(own) for own in ranks), default=1)
        self._updates, self._strides = [len(own) for own in ranks], [sum(own) for own in ranks]
        if not self.is_supported:
            return
        rows, scales, at_beside, at_up = [], [], 0, 0
        for span, own, at, down_sizes, up_sizes in zip(
            spans, ranks, self.offsets, downs, ups, strict=True
        ):
            at_low = 0
            for index, ((begin, end), rank) in enumerate(zip(span.columns, own, strict=True)):
                down, up = span.downs[index], span.ups[index]
                beside = down.data_ptr() if len(own) == 1 else 4 * at_beside
                rows.append(
                    (
                        0,
                        0,
                        begin,
                        end - begin,
                        rank,
                        sum(own),
                        down.data_ptr(),
                        up.data_ptr(),
                        4 * at_up,
                        beside,
                        4 * at_low,
                        4 * at_low,
                        4 * at[index],
                        4 * at[len(own) + index],
                        0,
                        index == 0,
                    )
                )
                scales.append(span.scale)
                at_low += rank
                at_up += up_sizes[index]
                at_beside += down_sizes[index]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, _FIELDS)
        self._rows.view(np.float64)[:, _SCALE] = scales
        self._within = self._rows[:, _LOW].copy()  # a row of `low`: place of the update
        self._needs_down_copy = np.repeat([len(own) > 1 for own in ranks], self._updates).astype(
            np.int64
        )
        self._set_token_ranges(spans)

    def _set_token_ranges(self, spans: Sequence[AdapterSpan]) -> None:
        """Take the tokens of the spans."""
        counts = np.array([span.stop - span.start for span in spans], dtype=np.int64)
        sizes = counts * np.array(self._strides, dtype=np.int64)
        self._rows[:, _START] = np.repeat([span.start for span in spans], self._updates)
        self._rows[:, _COUNT] = np.repeat(counts, self._updates)
        self._rows[:, _LOW] = self._within + np.repeat(
            4 * (np.cumsum(sizes) - sizes), self._updates
        )
        self._rows[:, _GRAD_LOW] = self._rows[:, _LOW]
        self.low_size = int(sizes.sum())

    def with_spans(self, spans: Sequence[AdapterSpan]) -> SpanTable:
        """The same of these spans, which differ in their tokens alone."""
        other = copy.copy(self)
        if self.is_supported:
            other._rows = self._rows.copy()
            other._set_token_ranges(spans)
        return other

    def build_rows(
        self,
        low: torch.Tensor,
        ups_across: torch.Tensor,
        backward: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> np.ndarray:
        """The table for these tensors. Args: backward: gradient of `low`, those of the factors, room for A."""
        rows = self._rows.copy()
        rows[:, _LOW] += low.data_ptr()
        rows[:, _UP_ACROSS] += ups_across.data_ptr()
        if backward is not None:
            grad_low, gradients, beside = backward
            rows[:, _GRAD_LOW] += grad_low.data_ptr()
            rows[:, _GRAD_DOWN : _GRAD_UP + 1] += gradients.data_ptr()
            rows[:, _DOWN_COPY] += self._needs_down_copy * beside.data_ptr()
        return rows


def is_row_contiguous_float32(matrix: torch.Tensor) -> bool:
    """True = compiled code takes the matrix: float32 on the CPU, without gaps within rows."""
    return matrix.is_cpu and matrix.dtype == torch.float32 and matrix.stride(1) == 1


def add_low_rank(
    out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]
) -> list[torch.Tensor]:
    """Add scale x A^T B^T to the outputs of each span, in place; returns what `compute_low_rank_grads` takes as `saved`."""
    spans = AdapterSpans.from_spans(spans)
    compiled = _select_code(out_NO, x_NI, spans)
    if compiled is None:
        return [_add_to_span(out_NO, x_NI, span) for span in spans]
    if isinstance(compiled, LowRankKernels):
        return compiled.add_updates(out_NO, x_NI, spans)
    return _add_by_tiles(compiled, out_NO, x_NI, spans)


def compute_low_rank_grads(
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    saved: Sequence[torch.Tensor],
    spans: Sequence[AdapterSpan],
    *,
    with_x: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gradients of what `add_low_rank` added: of x (0 outside the spans), and of each span's A, then its B."""
    spans = AdapterSpans.from_spans(spans)
    whole = grad_NO.new_empty(spans.table.size, dtype=spans.table.dtype)
    grad_x_NI = write_low_rank_grads(whole, grad_NO, x_NI, saved, spans, with_x=with_x)
    return grad_x_NI, spans.view_gradients(whole)


def write_low_rank_grads(
    gradients: torch.Tensor,
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    saved: Sequence[torch.Tensor],
    spans: AdapterSpans,
    *,
    with_x: bool,
) -> torch.Tensor | None:
    """As `compute_low_rank_grads`, with those of A and B written to their places within a flat tensor; returns that of x."""
    grad_x_NI = torch.zeros_like(x_NI) if with_x else None
    compiled = _select_code(grad_NO, x_NI, spans)
    if isinstance(compiled, LowRankKernels):
        compiled.write_grads(gradients, grad_NO, x_NI, saved, spans, grad_x_NI)
        return grad_x_NI
    if compiled is not None:
        found = _compute_grads_by_tiles(compiled, grad_NO, x_NI, saved, spans, grad_x_NI)
    else:
        found = []
        for span, low_nR in zip(spans, saved, strict=True):
            found += _compute_span_grads(grad_NO, x_NI, low_nR, span, grad_x_NI)
    for place, grad in zip(spans.view_gradients(gradients), found, strict=True):
        place.copy_(grad)
    return grad_x_NI


def _select_code(
    out_NO: torch.Tensor, x_NI: torch.Tensor, spans: AdapterSpans
) -> LowRankKernels | gemm.Gemm | None:
    """Code for ranks, or tiles; None where there is none, or these operands do not suit it."""
    table = spans.table
    if not (
        table.is_supported and is_row_contiguous_float32(out_NO) and is_row_contiguous_float32(x_NI)
    ):
        return None
    products = gemm.load_gemm()
    if products is not None and products is gemm.load_tiles():
        return products
    return load_low_rank() if table.is_contiguous else None


class LowRankKernels:
    """The compiled functions of `low_rank.c`; all tensors are float32 on the CPU, rows of factors without gaps."""

    def __init__(self, code: ctypes.CDLL) -> None:
        """`code`: the compiled library."""
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._forward, self._backward, self._room = (
            code.low_rank_forward,
            code.low_rank_backward,
            code.low_rank_room,
        )
        self._forward.argtypes = (place, count, place, count, count, place, count, number)
        self._backward.argtypes = (
            place,
            count,
            place,
            count,
            place,
            count,
            count,
            place,
            count,
            place,
            count,
            number,
        )
        self._forward.restype = self._backward.restype = None
        self._room.argtypes, self._room.restype = (count,), count
        self._scratch = ScratchMemory()

    def add_updates(
        self, out_NO: torch.Tensor, x_NI: torch.Tensor, spans: AdapterSpans
    ) -> list[torch.Tensor]:
        """`add_low_rank`; returns scale x A^T of all spans, and all B^T."""
        table = spans.table
        low, ups_across = x_NI.new_empty(table.low_size), x_NI.new_empty(table.up_size)
        rows = table.build_rows(low, ups_across)
        self._forward(
            rows.ctypes.data,
            len(rows),
            x_NI.data_ptr(),
            x_NI.stride(0),
            x_NI.shape[1],
            out_NO.data_ptr(),
            out_NO.stride(0),
            torch.get_num_threads(),
        )
        return [low, ups_across]

    def write_grads(
        self,
        gradients: torch.Tensor,
        grad_NO: torch.Tensor,
        x_NI: torch.Tensor,
        saved: Sequence[torch.Tensor],
        spans: AdapterSpans,
        grad_x_NI: torch.Tensor | None,
    ) -> None:
        """`write_low_rank_grads`, with the gradient of x added to `grad_x_NI`."""
        low, ups_across = saved
        table, grad_low = spans.table, torch.empty_like(low)
        beside = low.new_empty(table.down_size)
        rows = table.build_rows(low, ups_across, (grad_low, gradients, beside))
        threads, size = torch.get_num_threads(), self._room(table.max_rank)
        self._backward(
            rows.ctypes.data,
            len(rows),
            grad_NO.data_ptr(),
            grad_NO.stride(0),
            x_NI.data_ptr(),
            x_NI.stride(0),
            x_NI.shape[1],
            None if grad_x_NI is None else grad_x_NI.data_ptr(),
            0 if grad_x_NI is None else grad_x_NI.stride(0),
            self._scratch.reserve_address(4 * threads * size),
            size,
            threads,
        )


@functools.cache
def load_low_rank() -> LowRankKernels | None:
    """The functions, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load_library()
    return LowRankKernels(code) if code is not None and code.vectors_ready() else None


def _add_by_tiles(
    compiled: gemm.Gemm, out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]
) -> list[torch.Tensor]:
    lows = [x_NI.new_empty(span.stop - span.start, sum(span.ranks)) for span in spans]
    compiled.compute_products(
        [
            MatrixProduct(
                Operand(x_NI, row=span.start),
                [Operand(down) for down in span.downs],
                Operand(low),
                len(low),
            )
            for span, low in zip(spans, lows, strict=True)
        ]
    )
    for span, low in zip(spans, lows, strict=True):
        low.mul_(span.scale)
    compiled.compute_products(
        [
            MatrixProduct(
                Operand(low, column=at, width=rank),
                [Operand(up)],
                Operand(out_NO, span.start, begin),
                len(low),
                add=True,
            )
            for span, low in zip(spans, lows, strict=True)
            for (begin, _), (at, rank), up in zip(
                span.columns, _list_update_columns(span), span.ups, strict=True
            )
        ]
    )
    return lows


def _compute_grads_by_tiles(
    compiled: gemm.Gemm,
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    lows: Sequence[torch.Tensor],
    spans: Sequence[AdapterSpan],
    grad_x_NI: torch.Tensor | None,
) -> list[torch.Tensor]:
    grads: list[torch.Tensor] = []
    first, last, grad_lows = [], [], []
    for span, low in zip(spans, lows, strict=True):
        grad_low, count = torch.empty_like(low), len(low)
        grad_downs = low.new_empty(low.shape[1], x_NI.shape[1])
        grad_ups = [torch.empty_like(up) for up in span.ups]
        for (begin, end), (at, rank), up, grad_up in zip(
            span.columns, _list_update_columns(span), span.ups, grad_ups, strict=True
        ):
            part = Operand(grad_NO, span.start, begin, end - begin)
            first.append(
                MatrixProduct(
                    part, [Operand(up, is_transposed=True)], Operand(grad_low, column=at), count
                )
            )
            low_part = Operand(low, column=at, width=rank, is_transposed=True)
            first.append(
                MatrixProduct(part.transpose_left(count), [low_part], Operand(grad_up), end - begin)
            )
        x_part = Operand(x_NI, row=span.start, is_transposed=True)
        last.append(
            MatrixProduct(
                Operand(grad_low).transpose_left(count), [x_part], Operand(grad_downs), low.shape[1]
            )
        )
        if grad_x_NI is not None:
            for index, ((at, rank), down) in enumerate(
                zip(_list_update_columns(span), span.downs, strict=True)
            ):
                part, right = (
                    Operand(grad_low, column=at, width=rank),
                    Operand(down, is_transposed=True),
                )
                last.append(
                    MatrixProduct(
                        part, [right], Operand(grad_x_NI, span.start), count, add=index > 0
                    )
                )
        grad_lows.append(grad_low)
        grads += [*grad_downs.split(span.ranks), *grad_ups]
    compiled.compute_products(first)
    for span, grad_low in zip(spans, grad_lows, strict=True):
        grad_low.mul_(span.scale)
    compiled.compute_products(last)
    return grads


def _list_update_columns(span: AdapterSpan) -> list[tuple[int, int]]:
    """First column and rank of each update among the R."""
    places, at = [], 0
    for rank in span.ranks:
        places.append((at, rank))
        at += rank
    return places


def _add_to_span(out_NO: torch.Tensor, x_NI: torch.Tensor, span: AdapterSpan) -> torch.Tensor:
    x_nI, out_nO = x_NI[span.start : span.stop], out_NO[span.start : span.stop]
    low_nR = compute_linear(x_nI.to(span.downs[0].dtype), span.downs).mul_(span.scale)
    for (begin, end), part_nR, up_OR in zip(
        span.columns, low_nR.split(span.ranks, dim=1), span.ups, strict=True
    ):
        out_nO[:, begin:end] += compute_linear(part_nR, [up_OR]).to(out_NO.dtype)
    return low_nR


def _compute_span_grads(
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    low_nR: torch.Tensor,
    span: AdapterSpan,
    grad_x_NI: torch.Tensor | None,
) -> list[torch.Tensor]:
    grad_nO = grad_NO[span.start : span.stop].to(low_nR.dtype)
    grad_low_nR, grad_ups = torch.empty_like(low_nR), []
    parts = zip(low_nR.split(span.ranks, dim=1), grad_low_nR.split(span.ranks, dim=1), strict=True)
    for (begin, end), (part_nR, grad_part_nR), up_OR in zip(
        span.columns, parts, span.ups, strict=True
    ):
        grad_part_nR.copy_(compute_input_grad(grad_nO[:, begin:end], [up_OR]))
        grad_ups.append(compute_weight_grad(grad_nO[:, begin:end], part_nR))
    grad_low_nR.mul_(span.scale)
    if grad_x_NI is not None:
        grad_x_NI[span.start : span.stop] = compute_input_grad(grad_low_nR, span.downs)
    x_nI = x_NI[span.start : span.stop].to(low_nR.dtype)
    return [*compute_weight_grad(grad_low_nR, x_nI).split(span.ranks), *grad_ups]
