"""Products of low-rank adapters over spans of tokens, each span with factors of its own.

Where there is compiled code, those of all spans are one call: with many small ones the calls themselves would cost more
than the work. Each product is the very one that its span would have alone. Code for tiles computes them as it does any
product (`amx_gemm.c`), otherwise there is code for products whose one side is a rank (`low_rank.c`).

N tokens, n of a span, I inputs, O outputs, R rank, all updates of a span side by side.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from rl_core.cpu import build, gemm
from rl_core.cpu.adapter_spans import AdapterSpan, AdapterSpans, is_plain
from rl_core.cpu.allocator import Scratch
from rl_core.cpu.gemm import Operand, Product
from rl_core.cpu.kernels import input_grad, linear, weight_grad

__all__ = ["LowRankCode", "add_low_rank", "load", "low_rank_grads", "low_rank_grads_into"]


def add_low_rank(out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]) -> list[torch.Tensor]:
    """Add scale x A^T B^T to the outputs of each span, in place; returns what `low_rank_grads` takes as `saved`."""
    spans = AdapterSpans.of(spans)
    compiled = _compiled(out_NO, x_NI, spans)
    if compiled is None:
        return [_add_to_span(out_NO, x_NI, span) for span in spans]
    if isinstance(compiled, LowRankCode):
        return compiled.add(out_NO, x_NI, spans)
    return _add_by_tiles(compiled, out_NO, x_NI, spans)


def low_rank_grads(
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    saved: Sequence[torch.Tensor],
    spans: Sequence[AdapterSpan],
    *,
    with_x: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gradients of what `add_low_rank` added: of x (0 outside the spans), and of each span's A, then its B."""
    spans = AdapterSpans.of(spans)
    whole = grad_NO.new_empty(spans.table.size, dtype=spans.table.dtype)
    grad_x_NI = low_rank_grads_into(whole, grad_NO, x_NI, saved, spans, with_x=with_x)
    return grad_x_NI, spans.gradients_within(whole)


def low_rank_grads_into(
    gradients: torch.Tensor,
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    saved: Sequence[torch.Tensor],
    spans: AdapterSpans,
    *,
    with_x: bool,
) -> torch.Tensor | None:
    """As `low_rank_grads`, with those of A and B written to their places within a flat tensor; returns that of x."""
    grad_x_NI = torch.zeros_like(x_NI) if with_x else None
    compiled = _compiled(grad_NO, x_NI, spans)
    if isinstance(compiled, LowRankCode):
        compiled.grads(gradients, grad_NO, x_NI, saved, spans, grad_x_NI)
        return grad_x_NI
    if compiled is not None:
        found = _grads_by_tiles(compiled, grad_NO, x_NI, saved, spans, grad_x_NI)
    else:
        found = []
        for span, low_nR in zip(spans, saved, strict=True):
            found += _grads_of_span(grad_NO, x_NI, low_nR, span, grad_x_NI)
    for place, grad in zip(spans.gradients_within(gradients), found, strict=True):
        place.copy_(grad)
    return grad_x_NI


def _compiled(out_NO: torch.Tensor, x_NI: torch.Tensor, spans: AdapterSpans) -> LowRankCode | gemm.Gemm | None:
    """Code for ranks, or tiles; None where there is none, or these operands do not suit it."""
    table = spans.table
    if not (table.is_plain and is_plain(out_NO) and is_plain(x_NI)):
        return None
    products = gemm.load()
    if products is not None and products is gemm.load_tiles():
        return products
    return load() if table.is_contiguous else None


# -- code for ranks ------------------------------------------------------------------------------------------------


class LowRankCode:
    """The compiled functions of `low_rank.c`; all tensors are float32 on the CPU, rows of factors without gaps."""

    def __init__(self, code: ctypes.CDLL) -> None:
        """`code`: the compiled library."""
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._forward, self._backward, self._room = code.low_rank_forward, code.low_rank_backward, code.low_rank_room
        self._forward.argtypes = (place, count, place, count, count, place, count, number)
        self._backward.argtypes = (
            place, count, place, count, place, count, count, place, count, place, count, number,
        )  # fmt: skip
        self._forward.restype = self._backward.restype = None
        self._room.argtypes, self._room.restype = (count,), count
        self._scratch = Scratch()

    def add(self, out_NO: torch.Tensor, x_NI: torch.Tensor, spans: AdapterSpans) -> list[torch.Tensor]:
        """`add_low_rank`; returns scale x A^T of all spans, and all B^T."""
        table = spans.table
        low, ups_across = x_NI.new_empty(table.low_size), x_NI.new_empty(table.up_size)
        rows = table.rows_at(low, ups_across)
        self._forward(
            rows.ctypes.data, len(rows), x_NI.data_ptr(), x_NI.stride(0), x_NI.shape[1], out_NO.data_ptr(),
            out_NO.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        return [low, ups_across]

    def grads(
        self,
        gradients: torch.Tensor,
        grad_NO: torch.Tensor,
        x_NI: torch.Tensor,
        saved: Sequence[torch.Tensor],
        spans: AdapterSpans,
        grad_x_NI: torch.Tensor | None,
    ) -> None:
        """`low_rank_grads_into`, with the gradient of x added to `grad_x_NI`."""
        low, ups_across = saved
        table, grad_low = spans.table, torch.empty_like(low)
        beside = low.new_empty(table.down_size)
        rows = table.rows_at(low, ups_across, (grad_low, gradients, beside))
        threads, size = torch.get_num_threads(), self._room(table.max_rank)
        self._backward(
            rows.ctypes.data, len(rows), grad_NO.data_ptr(), grad_NO.stride(0), x_NI.data_ptr(), x_NI.stride(0),
            x_NI.shape[1], None if grad_x_NI is None else grad_x_NI.data_ptr(),
            0 if grad_x_NI is None else grad_x_NI.stride(0), self._scratch.place(4 * threads * size), size, threads,
        )  # fmt: skip


@functools.cache
def load() -> LowRankCode | None:
    """The functions, or None where nothing is compiled or vectors have fewer than 8 numbers."""
    code = build.load()
    return LowRankCode(code) if code is not None and code.vectors_ready() else None


# -- tiles ---------------------------------------------------------------------------------------------------------


def _add_by_tiles(
    compiled: gemm.Gemm, out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]
) -> list[torch.Tensor]:
    lows = [x_NI.new_empty(span.stop - span.start, sum(span.ranks)) for span in spans]
    compiled.products(
        [
            Product(Operand(x_NI, row=span.start), [Operand(down) for down in span.downs], Operand(low), len(low))
            for span, low in zip(spans, lows, strict=True)
        ]
    )
    for span, low in zip(spans, lows, strict=True):
        low.mul_(span.scale)
    compiled.products(
        [
            Product(
                Operand(low, column=at, width=rank),
                [Operand(up)],
                Operand(out_NO, span.start, begin),
                len(low),
                add=True,
            )
            for span, low in zip(spans, lows, strict=True)
            for (begin, _), (at, rank), up in zip(span.columns, _places(span), span.ups, strict=True)
        ]
    )
    return lows


def _grads_by_tiles(
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
        for (begin, end), (at, rank), up, grad_up in zip(span.columns, _places(span), span.ups, grad_ups, strict=True):
            part = Operand(grad_NO, span.start, begin, end - begin)
            first.append(Product(part, [Operand(up, across=True)], Operand(grad_low, column=at), count))
            low_part = Operand(low, column=at, width=rank, across=True)
            first.append(Product(part.turned(count), [low_part], Operand(grad_up), end - begin))
        x_part = Operand(x_NI, row=span.start, across=True)
        last.append(Product(Operand(grad_low).turned(count), [x_part], Operand(grad_downs), low.shape[1]))
        if grad_x_NI is not None:
            for index, ((at, rank), down) in enumerate(zip(_places(span), span.downs, strict=True)):
                part, right = Operand(grad_low, column=at, width=rank), Operand(down, across=True)
                last.append(Product(part, [right], Operand(grad_x_NI, span.start), count, add=index > 0))
        grad_lows.append(grad_low)
        grads += [*grad_downs.split(span.ranks), *grad_ups]
    compiled.products(first)
    for span, grad_low in zip(spans, grad_lows, strict=True):
        grad_low.mul_(span.scale)
    compiled.products(last)
    return grads


def _places(span: AdapterSpan) -> list[tuple[int, int]]:
    """First column and rank of each update among the R."""
    places, at = [], 0
    for rank in span.ranks:
        places.append((at, rank))
        at += rank
    return places


# -- torch, span by span -------------------------------------------------------------------------------------------


def _add_to_span(out_NO: torch.Tensor, x_NI: torch.Tensor, span: AdapterSpan) -> torch.Tensor:
    x_nI, out_nO = x_NI[span.start : span.stop], out_NO[span.start : span.stop]
    low_nR = linear(x_nI.to(span.downs[0].dtype), span.downs).mul_(span.scale)
    for (begin, end), part_nR, up_OR in zip(span.columns, low_nR.split(span.ranks, dim=1), span.ups, strict=True):
        out_nO[:, begin:end] += linear(part_nR, [up_OR]).to(out_NO.dtype)
    return low_nR


def _grads_of_span(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, low_nR: torch.Tensor, span: AdapterSpan, grad_x_NI: torch.Tensor | None
) -> list[torch.Tensor]:
    grad_nO = grad_NO[span.start : span.stop].to(low_nR.dtype)
    grad_low_nR, grad_ups = torch.empty_like(low_nR), []
    parts = zip(low_nR.split(span.ranks, dim=1), grad_low_nR.split(span.ranks, dim=1), strict=True)
    for (begin, end), (part_nR, grad_part_nR), up_OR in zip(span.columns, parts, span.ups, strict=True):
        grad_part_nR.copy_(input_grad(grad_nO[:, begin:end], [up_OR]))
        grad_ups.append(weight_grad(grad_nO[:, begin:end], part_nR))
    grad_low_nR.mul_(span.scale)
    if grad_x_NI is not None:
        grad_x_NI[span.start : span.stop] = input_grad(grad_low_nR, span.downs)
    x_nI = x_NI[span.start : span.stop].to(low_nR.dtype)
    return [*weight_grad(grad_low_nR, x_nI).split(span.ranks), *grad_ups]
