"""Causal self-attention over a batch's real tokens, laid end to end, with common prefixes stored once.

Compiled code (`rl_core.cpu.attention_kernel`) takes rows of any length; torch's kernel gets rectangles instead, each of
rows of similar length.

B rows, T real tokens, N of them of which no two have the same beginning, h all heads, D head size.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rl_core.cpu import attention_kernel
from rl_core.cpu.shared_prefixes import SharedPrefixes

__all__ = ["Attention", "attention_of", "chosen"]

_LEAST_FILLED = 0.85  # a row shorter than this share of its rectangle's width opens the next rectangle,
_LEAST_ROWS = 8  # if there are this many rows in it: a call of the attention kernel has a price of its own


class Attention(abc.ABC):
    """Rotary embedding and attention over the rows of one batch."""

    def __init__(self, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> None:
        """cos_ND, sin_ND: of each token's position."""
        self._cos_ND, self._sin_ND = cos_ND.contiguous(), sin_ND.contiguous()

    @abc.abstractmethod
    def __call__(self, heads_NhD: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
        """Queries, keys and values side by side, before their rotary embedding -> [N, Q * D]."""


def attention_of(
    lengths: list[int], shared: SharedPrefixes | None, head_dim: int, cos_ND: torch.Tensor, sin_ND: torch.Tensor
) -> Attention:
    """Attention for rows of these lengths, whose tokens lie end to end."""
    compiled = attention_kernel.load() if attention_kernel.AttentionKernel.suits(head_dim) else None
    if compiled is not None:
        return _Compiled(compiled, _named_rows(lengths, shared), cos_ND, sin_ND)
    return _Rectangles(_rows_of(lengths, shared), cos_ND, sin_ND)


def chosen(x_N: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Some rows of x, each at most once."""
    found: torch.Tensor = _Join.apply(x_N, places)
    return found


# -- compiled ----------------------------------------------------------------------------------------------------------


class _Compiled(Attention):
    def __init__(
        self,
        compiled: attention_kernel.AttentionKernel,
        rows: attention_kernel.Rows,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
    ) -> None:
        super().__init__(cos_ND, sin_ND)
        self._compiled, self._rows = compiled, rows

    def __call__(self, heads_NhD: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
        fixed = (self._rows, self._cos_ND, self._sin_ND, kv_heads, scale)
        out_NE: torch.Tensor = _CompiledAttention.apply(heads_NhD, self._compiled, fixed)
        return out_NE


def _named_rows(lengths: Sequence[int], shared: SharedPrefixes | None) -> attention_kernel.Rows:
    lengths_R = torch.tensor(lengths)
    starts_R = functional.pad(lengths_R.cumsum(0), (1, 0))
    count = int(starts_R[-1])
    if shared is None:
        every = torch.arange(count)
        ends_N = torch.arange(count + 1)
        return attention_kernel.Rows(starts_R, every, torch.zeros_like(lengths_R), ends_N, every, max(lengths))
    # What a row has in common with one before it is its beginning, so what is new in it comes after that.
    row_of_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_R)
    first_R = torch.bincount(row_of_T[shared.repeated_R], minlength=len(lengths))
    ends_N = functional.pad(torch.bincount(shared.unique_T, minlength=len(shared.first_N)).cumsum(0), (1, 0))
    places_T = shared.unique_T.argsort(stable=True)
    return attention_kernel.Rows(starts_R, shared.unique_T, first_R, ends_N, places_T, max(lengths))


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads_NhD: torch.Tensor, compiled: attention_kernel.AttentionKernel, fixed: tuple[Any, ...]
    ) -> torch.Tensor:
        out_NE, turned_NhD, logs_NQ = compiled.forward(heads_NhD.contiguous(), *fixed)
        ctx.save_for_backward(out_NE, turned_NhD, logs_NQ)
        ctx.compiled, ctx.fixed = compiled, fixed
        return out_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NE: torch.Tensor) -> tuple[Any, ...]:
        return ctx.compiled.backward(grad_NE.contiguous(), *ctx.saved_tensors, *ctx.fixed), None, None


# -- by torch's kernel -------------------------------------------------------------------------------------------------


class _Rectangles(Attention):
    def __init__(self, rows: _RowShapes, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> None:
        super().__init__(cos_ND, sin_ND)
        self._rows = rows

    def __call__(self, heads_NhD: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
        query_heads = heads_NhD.shape[1] - 2 * kv_heads
        q_NhD, k_NhD, v_NhD = heads_NhD.split([query_heads, kv_heads, kv_heads], dim=1)
        turning = self._cos_ND[:, None], self._sin_ND[:, None]
        q_NhD, k_NhD = _Rotary.apply(q_NhD, *turning), _Rotary.apply(k_NhD, *turning)
        parts = zip(*(self._rows.spread(x_NhD) for x_NhD in (q_NhD, k_NhD, v_NhD)), strict=True)
        return self._rows.join(
            [
                functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=query_heads != kv_heads
                )
                for q, k, v in parts
            ]
        )


@dataclass(slots=True)
class _RowShapes:
    """The rectangles in which attention sees the real tokens: rows of similar length together."""

    shapes: list[tuple[int, int]]  # rows and width of each rectangle
    tokens_P: torch.Tensor  # int64, which of the N stands at each place of all rectangles; at padding, any of them
    places_N: torch.Tensor  # int64, one place of each
    repeated: tuple[torch.Tensor, torch.Tensor] | None = None  # int64, the other places of some, and which they are

    def spread(self, x_NhD: torch.Tensor) -> list[torch.Tensor]:
        """[N, h, D] -> [rows, h, width, D] of each rectangle; no gradient comes back from padding."""
        padded_PhD: torch.Tensor = _Spread.apply(x_NhD, self.tokens_P, self.places_N, self.repeated)
        parts = padded_PhD.split([rows * width for rows, width in self.shapes])
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """[rows, h, width, D] of each rectangle -> [N, h * D]."""
        flat_PE = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).flatten(1)
        joined_NE: torch.Tensor = _Join.apply(flat_PE, self.places_N)
        return joined_NE


def _rows_of(lengths: list[int], shared: SharedPrefixes | None = None) -> _RowShapes:
    """Rectangles for rows of these lengths, whose tokens lie end to end: sorted, cut where much would be padding."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if not groups or (lengths[row] < _LEAST_FILLED * lengths[groups[-1][0]] and len(groups[-1]) >= _LEAST_ROWS):
            groups.append([])
        groups[-1].append(row)
    shapes = [(len(group), lengths[group[0]]) for group in groups]
    ends = list(itertools.accumulate(lengths))
    tokens: list[torch.Tensor] = []
    is_real: list[torch.Tensor] = []
    for group, (_, width) in zip(groups, shapes, strict=True):
        starts_R1 = torch.tensor([ends[row] - lengths[row] for row in group])[:, None]
        last_R1 = torch.tensor([lengths[row] - 1 for row in group])[:, None]
        places_W = torch.arange(width)
        tokens.append((starts_R1 + places_W.minimum(last_R1)).reshape(-1))
        is_real.append((places_W <= last_R1).reshape(-1))
    tokens_P, real_places_T = torch.cat(tokens), torch.cat(is_real).nonzero().squeeze(1)
    places_T = torch.empty_like(real_places_T)
    places_T[tokens_P[real_places_T]] = real_places_T
    if shared is None:
        return _RowShapes(shapes, tokens_P, places_T)
    repeated_R = shared.repeated_R
    repeated = places_T[repeated_R], shared.unique_T[repeated_R]
    return _RowShapes(shapes, shared.unique_T[tokens_P], places_T[shared.first_N], repeated)


class _Rotary(torch.autograd.Function):
    """Rotary position embedding of [N, h, D], halves against each other (Su et al. 2021, arXiv:2104.09864)."""

    @staticmethod
    def forward(ctx: Any, x_NhD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_N1D, sin_N1D)
        return _turned(x_NhD, cos_N1D, sin_N1D, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NhD: torch.Tensor) -> tuple[Any, ...]:
        cos_N1D, sin_N1D = ctx.saved_tensors
        return _turned(grad_NhD, cos_N1D, sin_N1D, -1.0), None, None


def _turned(x_NhD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor, sign: float) -> torch.Tensor:
    turned = x_NhD * cos_N1D
    (x1, x2), (sin1, sin2) = x_NhD.chunk(2, dim=-1), sin_N1D.chunk(2, dim=-1)
    turned1, turned2 = turned.chunk(2, dim=-1)
    turned1.addcmul_(x2, sin1, value=-sign)
    turned2.addcmul_(x1, sin2, value=sign)
    return turned


class _Spread(torch.autograd.Function):
    """Tokens to their places in the rectangles; gradients come back from real places alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x_N: torch.Tensor,
        tokens_P: torch.Tensor,
        places_N: torch.Tensor,
        repeated: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(places_N, *(repeated or ()))
        return x_N.index_select(0, tokens_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: torch.Tensor) -> tuple[Any, ...]:
        places_N, *repeated = ctx.saved_tensors
        grad_N = grad_P.index_select(0, places_N)
        if repeated:
            places_R, tokens_R = repeated
            grad_N.index_add_(0, tokens_R, grad_P.index_select(0, places_R))
        return grad_N, None, None, None


class _Join(torch.autograd.Function):
    """Chosen rows, each at most once: gradients are put back in place, where torch's index_select would add them up."""

    @staticmethod
    def forward(ctx: Any, x_P: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_N)
        ctx.count = len(x_P)
        return x_P.index_select(0, places_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[Any, ...]:
        (places_N,) = ctx.saved_tensors
        return grad_N.new_zeros(ctx.count, *grad_N.shape[1:]).index_copy_(0, places_N, grad_N), None
