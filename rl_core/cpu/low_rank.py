"""Products of low-rank adapters over spans of tokens, each span with factors of its own.

Where products are compiled code, those of all spans are one call: with many small ones the calls themselves would cost
more than the work. Each product is the very one that its span would have alone.

N tokens, n of a span, I inputs, O outputs, R rank, all updates of a span side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_core.cpu import gemm
from rl_core.cpu.gemm import Operand, Product
from rl_core.cpu.kernels import input_grad, linear, weight_grad

__all__ = ["AdapterSpan", "add_low_rank", "low_rank_grads"]


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


def add_low_rank(out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]) -> list[torch.Tensor]:
    """Add scale x A^T B^T to the outputs of each span, in place; returns scale x A^T of each, [n, R]."""
    compiled = _compiled(out_NO, x_NI, spans)
    if compiled is None:
        return [_add_to_span(out_NO, x_NI, span) for span in spans]
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


def _add_to_span(out_NO: torch.Tensor, x_NI: torch.Tensor, span: AdapterSpan) -> torch.Tensor:
    x_nI, out_nO = x_NI[span.start : span.stop], out_NO[span.start : span.stop]
    low_nR = linear(x_nI.to(span.downs[0].dtype), span.downs).mul_(span.scale)
    for (begin, end), part_nR, up_OR in zip(span.columns, low_nR.split(span.ranks, dim=1), span.ups, strict=True):
        out_nO[:, begin:end] += linear(part_nR, [up_OR]).to(out_NO.dtype)
    return low_nR


def low_rank_grads(
    grad_NO: torch.Tensor,
    x_NI: torch.Tensor,
    lows: Sequence[torch.Tensor],
    spans: Sequence[AdapterSpan],
    *,
    with_x: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Gradients of what `add_low_rank` added: of x (0 outside the spans), and of each span's A, then its B."""
    grad_x_NI = torch.zeros_like(x_NI) if with_x else None
    compiled = _compiled(grad_NO, x_NI, spans)
    grads: list[torch.Tensor] = []
    if compiled is None:
        for span, low_nR in zip(spans, lows, strict=True):
            grads += _grads_of_span(grad_NO, x_NI, low_nR, span, grad_x_NI)
        return grad_x_NI, grads
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
    return grad_x_NI, grads


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


def _places(span: AdapterSpan) -> list[tuple[int, int]]:
    """First column and rank of each update among the R."""
    places, at = [], 0
    for rank in span.ranks:
        places.append((at, rank))
        at += rank
    return places


def _compiled(out_NO: torch.Tensor, x_NI: torch.Tensor, spans: Sequence[AdapterSpan]) -> gemm.Gemm | None:
    """The compiled products, where all of these operands suit them."""
    factors = [factor for span in spans for factor in (*span.downs, *span.ups)]
    for operand in (out_NO, x_NI, *factors):
        if operand.device.type != "cpu" or operand.dtype != torch.float32 or operand.stride(1) != 1:
            return None
    return gemm.load()
