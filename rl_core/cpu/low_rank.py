"""Products of low-rank adapters over spans of tokens, each span with its own factors.

With compiled code, the products of all spans are one call: with many small ones, the calls would cost more than the
work. Each product is exactly the one that its span would have alone. Code for tiles computes them like any product
(`amx_gemm.c`); otherwise there is code for products with one side of the size of a rank (`low_rank.c`).

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

_FIELDS = 16  # of an `Update` in low_rank.c, 8 bytes each
_START, _COUNT = 0, 1
_UP_ACROSS, _DOWN_COPY, _LOW, _GRAD_LOW, _GRAD_DOWN, _GRAD_UP, _SCALE = 8, 9, 10, 11, 12, 13, 14


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """The tokens of one adapter, and its updates of some layers side by side."""

    start: int
    stop: int
    columns: list[tuple[int, int]]  # output columns (begin, end) of each updated layer
    scale: float
    downs: Sequence[torch.Tensor]  # A of each [r, I], float32
    ups: Sequence[torch.Tensor]  # B of each [O, r], float32

    @property
    def ranks(self) -> list[int]:
        """Rank of each update."""
        return [up_OR.shape[1] for up_OR in self.ups]


class AdapterSpans(Sequence[AdapterSpan]):
    """Spans whose factors stay in place, so that the table about them is computed once."""

    def __init__(
        self, spans: Sequence[AdapterSpan], offsets: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Build the table.

        Args:
            offsets: of the gradients of each span's A, then its B, within a flat tensor; None = in order.
        """
        self._spans = list(spans)
        self.table = SpanTable(spans, offsets)

    @classmethod
    def from_spans(cls, spans: Sequence[AdapterSpan]) -> AdapterSpans:
        """Convert spans; return them unchanged if they are `AdapterSpans`."""
        return spans if isinstance(spans, cls) else cls(spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    def with_token_counts(self, tokens: Sequence[int]) -> AdapterSpans:
        """Return the same spans over other tokens.

        Args:
            tokens: number of consecutive tokens of each span.
        """
        moved, start = copy.copy(self), 0
        moved._spans = []
        for span, count in zip(self._spans, tokens, strict=True):
            moved._spans.append(replace(span, start=start, stop=start + count))
            start += count
        moved.table = self.table.with_spans(moved._spans)
        return moved

    def view_gradients(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """View the gradients of each span's A, then its B, within a flat tensor."""
        views = []
        for span, offsets in zip(self._spans, self.table.offsets, strict=True):
            for factor, offset in zip((*span.downs, *span.ups), offsets, strict=True):
                views.append(gradients[offset : offset + factor.numel()].view(factor.shape))
        return views


class SpanTable:
    """One `Update` of low_rank.c per update of some spans; positions in flat tensors are stored as offsets."""

    def __init__(
        self, spans: Sequence[AdapterSpan], offsets: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Fill the table.

        Args:
            offsets: as in `AdapterSpans`.
        """
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
        self.max_rank = max((max(span_ranks) for span_ranks in ranks), default=1)
        self._updates = [len(span_ranks) for span_ranks in ranks]
        self._strides = [sum(span_ranks) for span_ranks in ranks]
        if not self.is_supported:
            return
        rows, scales = [], []
        down_offset = up_offset = 0
        for span, span_ranks, grad_offsets, down_sizes, up_sizes in zip(
            spans, ranks, self.offsets, downs, ups, strict=True
        ):
            num_updates, low_offset = len(span_ranks), 0
            for index, ((begin, end), rank) in enumerate(
                zip(span.columns, span_ranks, strict=True)
            ):
                down, up = span.downs[index], span.ups[index]
                # the As of several updates are copied next to each other
                down_copy = down.data_ptr() if num_updates == 1 else 4 * down_offset
                rows.append(
                    (
                        0,
                        0,
                        begin,
                        end - begin,
                        rank,
                        sum(span_ranks),
                        down.data_ptr(),
                        up.data_ptr(),
                        4 * up_offset,
                        down_copy,
                        4 * low_offset,
                        4 * low_offset,
                        4 * grad_offsets[index],
                        4 * grad_offsets[num_updates + index],
                        0,
                        index == 0,
                    )
                )
                scales.append(span.scale)
                low_offset += rank
                up_offset += up_sizes[index]
                down_offset += down_sizes[index]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, _FIELDS)
        self._rows.view(np.float64)[:, _SCALE] = scales
        self._low_offsets = self._rows[:, _LOW].copy()  # of each update within a row of `low`
        needs_copy = np.repeat([count > 1 for count in self._updates], self._updates)
        self._needs_down_copy = needs_copy.astype(np.int64)
        self._set_token_ranges(spans)

    def _set_token_ranges(self, spans: Sequence[AdapterSpan]) -> None:
        """Write the spans' tokens into the table."""
        counts = np.array([span.stop - span.start for span in spans], dtype=np.int64)
        sizes = counts * np.array(self._strides, dtype=np.int64)
        self._rows[:, _START] = np.repeat([span.start for span in spans], self._updates)
        self._rows[:, _COUNT] = np.repeat(counts, self._updates)
        starts = 4 * (np.cumsum(sizes) - sizes)
        self._rows[:, _LOW] = self._low_offsets + np.repeat(starts, self._updates)
        self._rows[:, _GRAD_LOW] = self._rows[:, _LOW]
        self.low_size = int(sizes.sum())

    def with_spans(self, spans: Sequence[AdapterSpan]) -> SpanTable:
        """Return a table of these spans, which differ only in their tokens."""
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
        """Build the table for these tensors.

        Args:
            backward: gradient of `low`, gradients of the factors, scratch for copies of A.
        """
        rows = self._rows.copy()
        rows[:, _LOW] += low.data_ptr()
        rows[:, _UP_ACROSS] += ups_across.data_ptr()
        if backward is not None:
            grad_low, gradients, down_copy = backward
            rows[:, _GRAD_LOW] += grad_low.data_ptr()
            rows[:, _GRAD_DOWN : _GRAD_UP + 1] += gradients.data_ptr()
            rows[:, _DOWN_COPY] += self._needs_down_copy * down_copy.data_ptr()
        return rows


def is_row_contiguous_float32(matrix: torch.Tensor) -> bool:
    """Return whether compiled code supports the matrix: float32 on the CPU, contiguous rows."""
    return matrix.is_cpu and matrix.dtype == torch.float32 and matrix.stride(1) == 1


def add_low_rank(
    out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]
) -> list[torch.Tensor]:
    """Add scale x A^T B^T to the outputs of each span in place; return the `saved` argument of
    `compute_low_rank_grads`.
    """
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
    """Compute the gradients of what `add_low_rank` added: of x (0 outside the spans), and of each span's A, then its
    B.
    """
    spans = AdapterSpans.from_spans(spans)
    gradients = grad_NO.new_empty(spans.table.size, dtype=spans.table.dtype)
    grad_x_NI = write_low_rank_grads(gradients, grad_NO, x_NI, saved, spans, with_x=with_x)
    return grad_x_NI, spans.view_gradients(gradients)


def write_low_rank_grads(
    gradients: torch.Tensor,
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    saved: Sequence[torch.Tensor],
    spans: AdapterSpans,
    *,
    with_x: bool,
) -> torch.Tensor | None:
    """Compute as `compute_low_rank_grads`; write the gradients of A and B into a flat tensor and return that of x."""
    grad_x_NI = torch.zeros_like(x_NI) if with_x else None
    compiled = _select_code(grad_NO, x_NI, spans)
    if isinstance(compiled, LowRankKernels):
        compiled.write_grads(gradients, grad_NO, x_NI, saved, spans, grad_x_NI)
        return grad_x_NI
    if compiled is not None:
        grads = _compute_grads_by_tiles(compiled, grad_NO, x_NI, saved, spans, grad_x_NI)
    else:
        grads = []
        for span, low_nR in zip(spans, saved, strict=True):
            grads += _compute_span_grads(grad_NO, x_NI, low_nR, span, grad_x_NI)
    for view, grad in zip(spans.view_gradients(gradients), grads, strict=True):
        view.copy_(grad)
    return grad_x_NI


def _select_code(
    out_NO: torch.Tensor, x_NI: torch.Tensor, spans: AdapterSpans
) -> LowRankKernels | gemm.Gemm | None:
    """Return code for ranks or tiles; None if there is none, or these operands are not supported."""
    table = spans.table
    if not (table.is_supported and all(map(is_row_contiguous_float32, (out_NO, x_NI)))):
        return None
    products = gemm.load_gemm()
    if products is not None and products is gemm.load_tiles():
        return products
    return load_low_rank() if table.is_contiguous else None


class LowRankKernels:
    """The compiled functions of `low_rank.c`; all tensors are float32 on the CPU, factors with contiguous rows."""

    def __init__(self, code: ctypes.CDLL) -> None:
        """Bind the functions of the compiled library `code`."""
        count, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._forward, self._backward = code.low_rank_forward, code.low_rank_backward
        self._room = code.low_rank_room
        self._forward.argtypes = (pointer, count, pointer, count, count, pointer, count, number)
        self._backward.argtypes = (
            pointer,
            count,
            pointer,
            count,
            pointer,
            count,
            count,
            pointer,
            count,
            pointer,
            count,
            number,
        )
        self._forward.restype = self._backward.restype = None
        self._room.argtypes, self._room.restype = (count,), count
        self._scratch = ScratchMemory()

    def add_updates(
        self, out_NO: torch.Tensor, x_NI: torch.Tensor, spans: AdapterSpans
    ) -> list[torch.Tensor]:
        """Run `add_low_rank`; return scale x A^T of all spans, and all B^T."""
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
        """Run `write_low_rank_grads`; add the gradient of x to `grad_x_NI`."""
        low, ups_across = saved
        table, grad_low = spans.table, torch.empty_like(low)
        down_copy = low.new_empty(table.down_size)
        rows = table.build_rows(low, ups_across, (grad_low, gradients, down_copy))
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
    """Load the functions; return None without compiled code or vectors of at least 8 numbers."""
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
                Operand(low, column=column, width=rank),
                [Operand(up)],
                Operand(out_NO, span.start, begin),
                len(low),
                add=True,
            )
            for span, low in zip(spans, lows, strict=True)
            for (begin, _), (column, rank), up in zip(
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
    low_products, input_products, grad_lows = [], [], []
    for span, low in zip(spans, lows, strict=True):
        grad_low, count = torch.empty_like(low), len(low)
        grad_downs = low.new_empty(low.shape[1], x_NI.shape[1])
        grad_ups = [torch.empty_like(up) for up in span.ups]
        for (begin, end), (column, rank), up, grad_up in zip(
            span.columns, _list_update_columns(span), span.ups, grad_ups, strict=True
        ):
            part = Operand(grad_NO, span.start, begin, end - begin)
            low_products.append(
                MatrixProduct(
                    part, [Operand(up, is_transposed=True)], Operand(grad_low, column=column), count
                )
            )
            low_part = Operand(low, column=column, width=rank, is_transposed=True)
            low_products.append(
                MatrixProduct(part.transpose_left(count), [low_part], Operand(grad_up), end - begin)
            )
        x_part = Operand(x_NI, row=span.start, is_transposed=True)
        input_products.append(
            MatrixProduct(
                Operand(grad_low).transpose_left(count), [x_part], Operand(grad_downs), low.shape[1]
            )
        )
        if grad_x_NI is not None:
            for index, ((column, rank), down) in enumerate(
                zip(_list_update_columns(span), span.downs, strict=True)
            ):
                part = Operand(grad_low, column=column, width=rank)
                right = Operand(down, is_transposed=True)
                out = Operand(grad_x_NI, span.start)
                input_products.append(MatrixProduct(part, [right], out, count, add=index > 0))
        grad_lows.append(grad_low)
        grads += [*grad_downs.split(span.ranks), *grad_ups]
    compiled.compute_products(low_products)
    for span, grad_low in zip(spans, grad_lows, strict=True):
        grad_low.mul_(span.scale)
    compiled.compute_products(input_products)
    return grads


def _list_update_columns(span: AdapterSpan) -> list[tuple[int, int]]:
    """List first column and rank of each update among the R."""
    columns = []
    column = 0
    for rank in span.ranks:
        columns.append((column, rank))
        column += rank
    return columns


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
