"""Forward pass of Llama, Qwen2 and Qwen3 on real tokens only, for training on a CPU in float32.

transformers computes every layer on the padded rectangle and builds norms, rotary embeddings and gated activations
from many small kernels, each with its own pass over memory. On a CPU that costs more than the matrix products. Here
the same layers, calling the same linear modules (adapters included), run on the real tokens laid end to end. Prefixes
that rows share (prompts of a group, a pair, a whole task) are computed once: a causal model's states at a token
depend on it and the tokens before it. Only attention sees rows: compiled code (`rl_core.cpu.attention_kernel`) takes
rows of any length; torch's kernel gets rectangles of rows of similar length.

B rows, S tokens of a padded row, T real tokens, N of them with distinct prefixes, P positions of all rectangles, H
hidden, h all heads, D head size, I width of the MLP, E = width of all query heads.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rl_core.cpu import attention_kernel
from rl_core.cpu.layer_kernels import add_norm, apply_gated_silu, apply_linears, apply_rms_norm
from rl_core.errors import DataError
from rl_core.types import TrainBatch

# A row shorter than this share of its rectangle's width opens the next rectangle,
_MIN_FILLED_SHARE = 0.85
# if the rectangle has this many rows, because every call of the attention kernel has a fixed cost.
_MIN_RECTANGLE_ROWS = 8
_MIN_SHARED_SHARE = 0.05  # sharing fewer tokens than this costs about what it saves


@dataclass(slots=True)
class SharedPrefixes:
    """Equivalence of real tokens, laid end to end row by row: the same token with the same tokens before it."""

    unique_T: torch.Tensor  # int64, index in 0..N-1 of each real token
    first_N: torch.Tensor  # int64, ascending: the first real token of each index
    repeated_R: torch.Tensor  # int64, the T - N real tokens not in `first_N`


@dataclass(slots=True)
class RowGroups:
    """Consecutive rows of a batch that use other adapters than the rest; groups share no states."""

    rows: list[int]  # rows of each group, in order
    # current tokens of each group, as layers see them; updated by the forward pass
    tokens: list[int] = field(default_factory=list)


def find_shared_prefixes(
    ids_BS: torch.Tensor, lengths: Sequence[int], *, min_share: float = 0.0
) -> SharedPrefixes | None:
    """Find common prefixes; return None if sharing would not save more than `min_share` of all real tokens.

    Args:
        ids_BS: right-padded token ids on the CPU.
        lengths: real tokens of each row.
    """
    if len(lengths) < 2:
        return None
    ids_BS = ids_BS.contiguous()
    # Sorted as bytes, rows with a common prefix are adjacent, and each row shares most with a neighbour.

    def get_bytes(row: int) -> bytes:
        return ids_BS[row, : lengths[row]].numpy().tobytes()

    order = sorted(range(len(lengths)), key=get_bytes)
    previous, following = ids_BS[order[:-1]], ids_BS[order[1:]]
    lengths_B = torch.tensor(lengths)
    limits = torch.minimum(lengths_B[order[:-1]], lengths_B[order[1:]])
    common = (previous == following).to(torch.int64).cumprod(1).sum(1).minimum(limits).tolist()
    if sum(common) <= min_share * sum(lengths) or not sum(common):
        return None
    starts = [0] * len(lengths)
    for row in range(1, len(lengths)):
        starts[row] = starts[row - 1] + lengths[row - 1]
    origins_T = torch.arange(sum(lengths))  # representative real token of each
    for i, count in enumerate(common, start=1):
        start, previous_start = starts[order[i]], starts[order[i - 1]]
        origins_T[start : start + count] = origins_T[previous_start : previous_start + count]
    is_first_T = origins_T == torch.arange(len(origins_T))
    numbers_T = is_first_T.cumsum(0) - 1
    return SharedPrefixes(
        numbers_T[origins_T], is_first_T.nonzero().squeeze(1), (~is_first_T).nonzero().squeeze(1)
    )


def find_group_prefixes(
    groups: Sequence[int], ids_BS: torch.Tensor, lengths: Sequence[int], *, min_share: float = 0.0
) -> SharedPrefixes | None:
    """Find common prefixes within groups of rows; the result for a group depends on its own rows alone.

    Args:
        groups: number of consecutive rows of each group.
        ids_BS, lengths, min_share: as in `find_shared_prefixes`; `min_share` applies to each group.
    """
    if len(groups) < 2:
        return find_shared_prefixes(ids_BS, lengths, min_share=min_share)
    parts = []
    row = start = count = 0
    has_shared = False
    for rows in groups:
        total = sum(lengths[row : row + rows])
        shared = find_shared_prefixes(
            ids_BS[row : row + rows], lengths[row : row + rows], min_share=min_share
        )
        has_shared |= shared is not None
        if shared is None:
            all_tokens = torch.arange(total)
            shared = SharedPrefixes(all_tokens, all_tokens, all_tokens[:0])
        parts.append(
            SharedPrefixes(
                shared.unique_T + count, shared.first_N + start, shared.repeated_R + start
            )
        )
        row, start, count = row + rows, start + total, count + len(shared.first_N)
    if not has_shared:
        return None
    return SharedPrefixes(
        *(torch.cat(part) for part in zip(*map(_list_fields, parts), strict=True))
    )


def _list_fields(shared: SharedPrefixes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return shared.unique_T, shared.first_N, shared.repeated_R


class PackedAttention(abc.ABC):
    """Rotary embedding and attention over the rows of one batch."""

    def __init__(self, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> None:
        """Store the rotary tables.

        Args:
            cos_ND, sin_ND: of each token's position.
        """
        self._cos_ND, self._sin_ND = cos_ND.contiguous(), sin_ND.contiguous()

    @abc.abstractmethod
    def __call__(self, heads_NhD: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
        """Map queries, keys and values side by side, before rotary embedding, to [N, Q * D]."""


def build_attention(
    lengths: list[int],
    shared: SharedPrefixes | None,
    head_dim: int,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
) -> PackedAttention:
    """Build the attention for rows of these lengths, whose tokens lie end to end."""
    compiled = (
        attention_kernel.load_attention_kernel()
        if attention_kernel.AttentionKernel.supports_head_dim(head_dim)
        else None
    )
    if compiled is not None:
        return _KernelAttention(compiled, _index_rows(lengths, shared), cos_ND, sin_ND)
    return _RectangleAttention(_build_rectangles(lengths, shared), cos_ND, sin_ND)


def select_rows(x_N: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select some rows of x, each at most once."""
    selected: torch.Tensor = _Join.apply(x_N, indices)
    return selected


class _KernelAttention(PackedAttention):
    def __init__(
        self,
        compiled: attention_kernel.AttentionKernel,
        rows: attention_kernel.AttentionRows,
        cos_ND: torch.Tensor,
        sin_ND: torch.Tensor,
    ) -> None:
        super().__init__(cos_ND, sin_ND)
        self._compiled, self._rows = compiled, rows

    def __call__(self, heads_NhD: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
        fixed = (self._rows, self._cos_ND, self._sin_ND, kv_heads, scale)
        out_NE: torch.Tensor = _KernelAttentionFunction.apply(heads_NhD, self._compiled, fixed)
        return out_NE


def _index_rows(
    lengths: Sequence[int], shared: SharedPrefixes | None
) -> attention_kernel.AttentionRows:
    lengths_R = torch.tensor(lengths)
    starts_R = functional.pad(lengths_R.cumsum(0), (1, 0))
    count = int(starts_R[-1])
    if shared is None:
        all_tokens = torch.arange(count)
        ends_N = torch.arange(count + 1)
        return attention_kernel.AttentionRows(
            starts_R, all_tokens, torch.zeros_like(lengths_R), ends_N, all_tokens, max(lengths)
        )
    # A row shares its beginning with an earlier row, so its own tokens come after that.
    row_of_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_R)
    first_R = torch.bincount(row_of_T[shared.repeated_R], minlength=len(lengths))
    ends_N = functional.pad(
        torch.bincount(shared.unique_T, minlength=len(shared.first_N)).cumsum(0), (1, 0)
    )
    positions_T = shared.unique_T.argsort(stable=True)
    return attention_kernel.AttentionRows(
        starts_R, shared.unique_T, first_R, ends_N, positions_T, max(lengths)
    )


class _KernelAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads_NhD: torch.Tensor,
        compiled: attention_kernel.AttentionKernel,
        fixed: tuple[Any, ...],
    ) -> torch.Tensor:
        out_NE, rotated_NhD, logs_NQ = compiled.forward(heads_NhD.contiguous(), *fixed)
        ctx.save_for_backward(out_NE, rotated_NhD, logs_NQ)
        ctx.compiled, ctx.fixed = compiled, fixed
        return out_NE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NE: torch.Tensor) -> tuple[Any, ...]:
        return (
            ctx.compiled.backward(grad_NE.contiguous(), *ctx.saved_tensors, *ctx.fixed),
            None,
            None,
        )


class _RectangleAttention(PackedAttention):
    def __init__(self, rows: _RowRectangles, cos_ND: torch.Tensor, sin_ND: torch.Tensor) -> None:
        super().__init__(cos_ND, sin_ND)
        self._rows = rows

    def __call__(self, heads_NhD: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
        query_heads = heads_NhD.shape[1] - 2 * kv_heads
        q_NhD, k_NhD, v_NhD = heads_NhD.split([query_heads, kv_heads, kv_heads], dim=1)
        tables = self._cos_ND[:, None], self._sin_ND[:, None]
        q_NhD, k_NhD = _Rotary.apply(q_NhD, *tables), _Rotary.apply(k_NhD, *tables)
        parts = zip(
            *(self._rows.spread_tokens(x_NhD) for x_NhD in (q_NhD, k_NhD, v_NhD)), strict=True
        )
        return self._rows.join_tokens(
            [
                functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=query_heads != kv_heads
                )
                for q, k, v in parts
            ]
        )


@dataclass(slots=True)
class _RowRectangles:
    """The rectangles in which attention sees the real tokens: rows of similar length together."""

    shapes: list[tuple[int, int]]  # rows and width of each rectangle
    # int64, token in 0..N-1 at each position of all rectangles; arbitrary at padding
    tokens_P: torch.Tensor
    indices_N: torch.Tensor  # int64, one position of each token
    # int64, further positions of shared tokens, and which tokens
    repeated: tuple[torch.Tensor, torch.Tensor] | None = None

    def spread_tokens(self, x_NhD: torch.Tensor) -> list[torch.Tensor]:
        """Map [N, h, D] to [rows, h, width, D] of each rectangle; padding gets no gradient."""
        padded_PhD: torch.Tensor = _Spread.apply(
            x_NhD, self.tokens_P, self.indices_N, self.repeated
        )
        parts = padded_PhD.split([rows * width for rows, width in self.shapes])
        return [
            part.unflatten(0, shape).transpose(1, 2)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def join_tokens(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Map [rows, h, width, D] of each rectangle to [N, h * D]."""
        flat_PE = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).flatten(1)
        joined_NE: torch.Tensor = _Join.apply(flat_PE, self.indices_N)
        return joined_NE


def _build_rectangles(lengths: list[int], shared: SharedPrefixes | None = None) -> _RowRectangles:
    """Build rectangles for rows of these lengths: sorted by length, split where padding would be large."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for row in order:
        if not groups or (
            lengths[row] < _MIN_FILLED_SHARE * lengths[groups[-1][0]]
            and len(groups[-1]) >= _MIN_RECTANGLE_ROWS
        ):
            groups.append([])
        groups[-1].append(row)
    shapes = [(len(group), lengths[group[0]]) for group in groups]
    ends = list(itertools.accumulate(lengths))
    tokens: list[torch.Tensor] = []
    is_real: list[torch.Tensor] = []
    for group, (_, width) in zip(groups, shapes, strict=True):
        starts_R1 = torch.tensor([ends[row] - lengths[row] for row in group])[:, None]
        last_R1 = torch.tensor([lengths[row] - 1 for row in group])[:, None]
        positions_W = torch.arange(width)
        tokens.append((starts_R1 + positions_W.minimum(last_R1)).reshape(-1))
        is_real.append((positions_W <= last_R1).reshape(-1))
    tokens_P, real_positions_T = torch.cat(tokens), torch.cat(is_real).nonzero().squeeze(1)
    positions_T = torch.empty_like(real_positions_T)
    positions_T[tokens_P[real_positions_T]] = real_positions_T
    if shared is None:
        return _RowRectangles(shapes, tokens_P, positions_T)
    repeated_R = shared.repeated_R
    repeated = positions_T[repeated_R], shared.unique_T[repeated_R]
    return _RowRectangles(shapes, shared.unique_T[tokens_P], positions_T[shared.first_N], repeated)


class _Rotary(torch.autograd.Function):
    """Rotary position embedding of [N, h, D], first half against second (Su et al. 2021, arXiv:2104.09864)."""

    @staticmethod
    def forward(
        ctx: Any, x_NhD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_N1D, sin_N1D)
        return _apply_rotary(x_NhD, cos_N1D, sin_N1D, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NhD: torch.Tensor) -> tuple[Any, ...]:
        cos_N1D, sin_N1D = ctx.saved_tensors
        return _apply_rotary(grad_NhD, cos_N1D, sin_N1D, -1.0), None, None


def _apply_rotary(
    x_NhD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor, sign: float
) -> torch.Tensor:
    rotated = x_NhD * cos_N1D
    (x1, x2), (sin1, sin2) = x_NhD.chunk(2, dim=-1), sin_N1D.chunk(2, dim=-1)
    rotated1, rotated2 = rotated.chunk(2, dim=-1)
    rotated1.addcmul_(x2, sin1, value=-sign)
    rotated2.addcmul_(x1, sin2, value=sign)
    return rotated


class _Spread(torch.autograd.Function):
    """Copies of tokens at their positions in the rectangles; only real positions return gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_N: torch.Tensor,
        tokens_P: torch.Tensor,
        indices_N: torch.Tensor,
        repeated: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(indices_N, *(repeated or ()))
        return x_N.index_select(0, tokens_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: torch.Tensor) -> tuple[Any, ...]:
        positions_N, *repeated = ctx.saved_tensors
        grad_N = grad_P.index_select(0, positions_N)
        if repeated:
            positions_R, tokens_R = repeated
            grad_N.index_add_(0, tokens_R, grad_P.index_select(0, positions_R))
        return grad_N, None, None, None


class _Join(torch.autograd.Function):
    """Selected rows, each at most once.

    Backward copies gradients into place, where torch's index_select would add them up.
    """

    @staticmethod
    def forward(ctx: Any, x_P: torch.Tensor, indices_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices_N)
        ctx.count = len(x_P)
        return x_P.index_select(0, indices_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[Any, ...]:
        (positions_N,) = ctx.saved_tensors
        return grad_N.new_zeros(ctx.count, *grad_N.shape[1:]).index_copy_(
            0, positions_N, grad_N
        ), None


def check_needed_positions(mask_BS: torch.Tensor, needed_BS: torch.Tensor | None) -> None:
    """Raise DataError if a needed position is padding by the attention mask."""
    if needed_BS is not None and bool((needed_BS & ~mask_BS).any()):
        raise DataError(
            "attention_mask is False where a hidden state is needed: it does not match the rows of the loss mask"
        )


def run_packed_forward(
    trunk: Any,
    batch: TrainBatch,
    needed_BS: torch.Tensor | None = None,
    groups: RowGroups | None = None,
) -> torch.Tensor:
    """Compute the last hidden states, after the final norm, of a right-padded batch, with gradient.

    Args:
        trunk: of a family that `capabilities.check_training_forward` allows.
        needed_BS: True at positions whose hidden states will be read, all of them real; None = all real positions.
        groups: rows that share no prefixes with others; its `tokens` are set before linear layers are called.
    Returns: [B, S, H]; arbitrary at padding and at positions that are not needed.
    Raises: DataError if a needed position is padding by the attention mask.
    """
    ids_BS, mask_BS = batch.input_ids_BS, batch.attention_mask_BS
    check_needed_positions(mask_BS, needed_BS)
    lengths = mask_BS.sum(1).tolist()
    rows = [len(lengths)] if groups is None else groups.rows
    shared = (
        None
        if _has_active_dropout(trunk)
        else find_group_prefixes(rows, ids_BS, lengths, min_share=_MIN_SHARED_SHARE)
    )
    flat_T = (
        mask_BS.reshape(-1).nonzero().squeeze(1)
    )  # flat position of each real token in the batch
    flat_N = flat_T if shared is None else flat_T[shared.first_N]
    # flat positions of the result, and the token in 0..N-1 of each; None = the same order
    out_T = flat_T
    from_T = None if shared is None else shared.unique_T
    x_NH = trunk.embed_tokens(ids_BS.reshape(-1)[flat_N])
    _count_tokens(groups, flat_N, ids_BS)
    layers = trunk.layers[: trunk.config.num_hidden_layers]
    cos_1ND, sin_1ND = trunk.rotary_emb(x_NH, position_ids=(flat_N % ids_BS.shape[1])[None])
    attend = build_attention(lengths, shared, layers[0].self_attn.head_dim, cos_1ND[0], sin_1ND[0])
    normed_NH = apply_rms_norm(x_NH, layers[0].input_layernorm)
    for index, layer in enumerate(layers):
        heads_NhD, kv_heads = _project_heads(layer.self_attn, normed_NH)
        attended_NE = attend(heads_NhD, kv_heads, layer.self_attn.scaling)
        # after the last attention only the needed tokens matter
        if index + 1 == len(layers) and needed_BS is not None:
            needed_T = needed_BS.reshape(-1)[flat_T]
            out_T = flat_T[needed_T]
            if from_T is None:
                needed_n = needed_T.nonzero().squeeze(1)
            else:
                needed_n, from_T = torch.unique(from_T[needed_T], return_inverse=True)
            attended_NE, x_NH = select_rows(attended_NE, needed_n), select_rows(x_NH, needed_n)
            _count_tokens(groups, flat_N[needed_n], ids_BS)
        # results of linear layers stay unnamed, so that they are freed early without gradients
        x_NH, normed_NH = add_norm(
            x_NH,
            apply_linears(attended_NE, [layer.self_attn.o_proj]),
            layer.post_attention_layernorm,
        )
        gated_NI = apply_gated_silu(
            apply_linears(normed_NH, [layer.mlp.gate_proj, layer.mlp.up_proj])
        )
        next_norm = layers[index + 1].input_layernorm if index + 1 < len(layers) else trunk.norm
        x_NH, normed_NH = add_norm(x_NH, apply_linears(gated_NI, [layer.mlp.down_proj]), next_norm)
    states_TH = normed_NH if from_T is None else normed_NH.index_select(0, from_T)
    flat_PH = x_NH.new_zeros(ids_BS.numel(), x_NH.shape[1])
    return flat_PH.index_copy(0, out_T, states_TH).unflatten(0, ids_BS.shape)


def _count_tokens(groups: RowGroups | None, flat_N: torch.Tensor, ids_BS: torch.Tensor) -> None:
    """Set `groups.tokens` to the number of each group's tokens at these flat positions of the batch."""
    if groups is not None:
        numbers = torch.arange(len(groups.rows))
        group_of_B = torch.repeat_interleave(numbers, torch.tensor(groups.rows))
        group_N = group_of_B[flat_N // ids_BS.shape[1]]
        groups.tokens = torch.bincount(group_N, minlength=len(groups.rows)).tolist()


def _has_active_dropout(trunk: Any) -> bool:
    """Return whether equal tokens get different noise (adapters with dropout)."""
    return trunk.training and any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in trunk.layers[0].modules()
    )


def _project_heads(attention: Any, normed_NH: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return queries, keys and values side by side [N, h, D], and the number of key heads among them."""
    heads_NE = apply_linears(normed_NH, [attention.q_proj, attention.k_proj, attention.v_proj])
    heads_NhD = heads_NE.unflatten(1, (-1, attention.head_dim))
    groups = attention.num_key_value_groups
    kv_heads = heads_NhD.shape[1] // (groups + 2)
    if hasattr(attention, "q_norm"):
        q_NhD, k_NhD, v_NhD = heads_NhD.split([groups * kv_heads, kv_heads, kv_heads], dim=1)
        q_NhD = _normalize_heads(q_NhD, attention.q_norm)
        k_NhD = _normalize_heads(k_NhD, attention.k_norm)
        heads_NhD = torch.cat([q_NhD, k_NhD, v_NhD], dim=1)
    return heads_NhD, kv_heads


def _normalize_heads(x_NhD: torch.Tensor, module: Any) -> torch.Tensor:
    """Normalise every head separately."""
    return apply_rms_norm(x_NhD.flatten(0, 1), module).view(x_NhD.shape)
