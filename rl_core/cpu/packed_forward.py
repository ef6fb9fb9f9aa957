"""Forward pass of Llama, Qwen2 and Qwen3 on the distinct prefixes of a batch, for training on a CPU.

transformers computes every layer on the padded rectangle and builds norms, rotary embeddings and gated activations
from many small kernels, each with its own pass over memory. On a CPU that costs more than the matrix products. Here
the same layers, calling the same linear modules (adapters included), run on the nodes of the rows' prefix tree
(`rl_core.cpu.prefix_tree`), laid end to end: no padding, and common beginnings of rows once. Only attention sees rows:
compiled code (`rl_core.cpu.attention_kernel`) takes rows of any length and computes each node's query once; torch's
kernel gets rectangles of rows of similar length, common beginnings included.

States are float32. Under autocast to bfloat16, or with bfloat16 weights, linear layers round the operands of their
products (`rl_core.cpu.linear_layers`) where that is faster than float32.

B rows, S tokens of a padded row, T real tokens, N nodes of their prefix tree, P positions of all rectangles, H hidden,
h all heads, D head size, I width of the MLP, E = width of all query heads.
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
from torch.utils.checkpoint import checkpoint

from rl_core.cpu import attention_kernel
from rl_core.cpu.layer_kernels import add_norm, apply_gated_silu, apply_rms_norm
from rl_core.cpu.linear_layers import apply_linears
from rl_core.cpu.prefix_tree import MIN_SHARED_SHARE, PrefixTree, build_separate_trees
from rl_core.errors import DataError
from rl_core.types import TrainBatch

# A row shorter than this share of its rectangle's width opens the next rectangle,
_MIN_FILLED_SHARE = 0.85
# if the rectangle has this many rows, because every call of the attention kernel has a fixed cost.
_MIN_RECTANGLE_ROWS = 8


@dataclass(slots=True)
class RowGroups:
    """Consecutive rows of a batch that use other adapters than the rest; groups share no states."""

    rows: list[int]  # rows of each group, in order
    # current tokens of each group, as layers see them; updated by the forward pass
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PrefixStates:
    """Last hidden states of a batch, after the final norm, with gradient: one for each distinct prefix, or one for each
    position if the rows do not share any.
    """

    states_NH: torch.Tensor
    numbers_BS: torch.Tensor  # int64, the state of each position; 0 where there is none
    is_shared: bool = False  # True = several positions may have one state

    @classmethod
    def from_padded(cls, hidden_BSH: torch.Tensor) -> PrefixStates:
        """Wrap states of all positions."""
        numbers_P = torch.arange(hidden_BSH.shape[:2].numel(), device=hidden_BSH.device)
        return cls(hidden_BSH.flatten(0, 1), numbers_P.view(hidden_BSH.shape[:2]))

    def select(self, positions_N: torch.Tensor) -> torch.Tensor:
        """Select the states [N, H] at flat positions of the batch."""
        numbers_N = self.numbers_BS.reshape(-1)[positions_N]
        if len(numbers_N) == len(self.states_NH):
            in_order_N = torch.arange(len(numbers_N), device=numbers_N.device)
            if torch.equal(numbers_N, in_order_N):  # spares a copy, and one of the gradient
                return self.states_NH
        return self.states_NH.index_select(0, numbers_N)

    def spread(self, positions_N: torch.Tensor) -> torch.Tensor:
        """Return the states at flat positions as [B, S, H], 0 elsewhere."""
        padded_PH = self.states_NH.new_zeros(self.numbers_BS.numel(), self.states_NH.shape[1])
        padded_PH = padded_PH.index_copy(0, positions_N, self.select(positions_N))
        return padded_PH.unflatten(0, self.numbers_BS.shape)


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
    tree: PrefixTree | None,
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
        return _KernelAttention(compiled, _index_rows(lengths, tree), cos_ND, sin_ND)
    return _RectangleAttention(_build_rectangles(lengths, tree), cos_ND, sin_ND)


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


def _index_rows(lengths: Sequence[int], tree: PrefixTree | None) -> attention_kernel.AttentionRows:
    lengths_R = torch.tensor(lengths)
    starts_R = functional.pad(lengths_R.cumsum(0), (1, 0))
    count = int(starts_R[-1])
    if tree is None:
        all_tokens = torch.arange(count)
        ends_N = torch.arange(count + 1)
        return attention_kernel.AttentionRows(
            starts_R, all_tokens, torch.zeros_like(lengths_R), ends_N, all_tokens, max(lengths)
        )
    row_of_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_R)
    # the nodes that a row does not own are its first ones
    first_R = torch.bincount(row_of_T[tree.repeated_R], minlength=len(lengths))
    ends_N = functional.pad(
        torch.bincount(tree.nodes_T, minlength=tree.num_nodes).cumsum(0), (1, 0)
    )
    positions_T = tree.nodes_T.argsort(stable=True)
    return attention_kernel.AttentionRows(
        starts_R, tree.nodes_T, first_R, ends_N, positions_T, max(lengths)
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


def _build_rectangles(lengths: list[int], tree: PrefixTree | None = None) -> _RowRectangles:
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
    if tree is None:
        return _RowRectangles(shapes, tokens_P, positions_T)
    repeated = positions_T[tree.repeated_R], tree.nodes_T[tree.repeated_R]
    return _RowRectangles(shapes, tree.nodes_T[tokens_P], positions_T[tree.owners_N], repeated)


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
) -> PrefixStates:
    """Compute the last hidden states, after the final norm, of a right-padded batch, with gradient.

    If the model checkpoints activations, each layer saves its input alone and is computed again in backward.

    Args:
        trunk: of a family that `capabilities.check_training_forward` allows.
        needed_BS: True at positions whose hidden states will be read, all of them real; None = all real positions.
        groups: rows that share no prefixes with others; its `tokens` are set before linear layers are called.
    Raises: DataError if a needed position is padding by the attention mask.
    """
    ids_BS, mask_BS = batch.input_ids_BS, batch.attention_mask_BS
    check_needed_positions(mask_BS, needed_BS)
    lengths = mask_BS.sum(1).tolist()
    rows = [len(lengths)] if groups is None else groups.rows
    tree = None
    if not has_active_dropout(trunk):
        tree = build_separate_trees(rows, ids_BS, lengths, min_share=MIN_SHARED_SHARE)
    # flat position of each real token in the batch, and of each node's owner
    flat_T = mask_BS.reshape(-1).nonzero().squeeze(1)
    flat_N = flat_T if tree is None else flat_T[tree.owners_N]
    x_NH = trunk.embed_tokens(ids_BS.reshape(-1)[flat_N]).float()
    layers = trunk.layers[: trunk.config.num_hidden_layers]
    cos_1ND, sin_1ND = trunk.rotary_emb(x_NH, position_ids=(flat_N % ids_BS.shape[1])[None])
    attend = build_attention(lengths, tree, layers[0].self_attn.head_dim, cos_1ND[0], sin_1ND[0])
    read_T, needed_n, numbers_T = _find_needed_nodes(flat_T, tree, needed_BS)

    def count_tokens(flat: torch.Tensor) -> None:
        if groups is not None:
            groups.tokens = _count_group_tokens(groups.rows, flat, ids_BS.shape[1])

    def run_layer(
        index: int, x_NH: torch.Tensor, normed_NH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state after attention and what the MLP adds to it."""
        attention, layer = layers[index].self_attn, layers[index]
        heads_NhD, kv_heads = _project_heads(attention, normed_NH)
        attended_NE = attend(heads_NhD, kv_heads, attention.scaling)
        # after the last attention only the needed nodes matter
        if index + 1 == len(layers) and needed_n is not None:
            attended_NE, x_NH = select_rows(attended_NE, needed_n), select_rows(x_NH, needed_n)
            count_tokens(flat_N[needed_n])
        # results of linear layers stay unnamed, so that they are freed early without gradients
        x_NH, normed_NH = add_norm(
            x_NH, apply_linears(attended_NE, [attention.o_proj]), layer.post_attention_layernorm
        )
        gated_NI = apply_gated_silu(
            apply_linears(normed_NH, [layer.mlp.gate_proj, layer.mlp.up_proj])
        )
        return x_NH, apply_linears(gated_NI, [layer.mlp.down_proj])

    def run_from_input(index: int, x_NH: torch.Tensor) -> torch.Tensor:
        x_NH, added_NH = run_layer(index, x_NH, apply_rms_norm(x_NH, layers[index].input_layernorm))
        return x_NH + added_NH

    count_tokens(flat_N)
    if _checkpoints_activations(trunk) and groups is None and torch.is_grad_enabled():
        for index in range(len(layers)):
            x_NH = checkpoint(run_from_input, index, x_NH, use_reentrant=False)
        normed_NH = apply_rms_norm(x_NH, trunk.norm)
    else:
        normed_NH = apply_rms_norm(x_NH, layers[0].input_layernorm)
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), trunk.norm]
        for index, next_norm in enumerate(next_norms):
            x_NH, normed_NH = add_norm(*run_layer(index, x_NH, normed_NH), next_norm)
    numbers_P = torch.zeros(ids_BS.numel(), dtype=torch.int64)
    numbers_P[read_T] = numbers_T
    return PrefixStates(normed_NH, numbers_P.view(ids_BS.shape), is_shared=tree is not None)


def _find_needed_nodes(
    flat_T: torch.Tensor, tree: PrefixTree | None, needed_BS: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the flat positions whose states are read, the nodes needed for them (None = all), and the number of each
    position's node among those.
    """
    nodes_T = torch.arange(len(flat_T)) if tree is None else tree.nodes_T
    if needed_BS is None:
        return flat_T, None, nodes_T
    is_needed_T = needed_BS.reshape(-1)[flat_T]
    needed_n, numbers_T = torch.unique(nodes_T[is_needed_T], return_inverse=True)
    return flat_T[is_needed_T], needed_n, numbers_T


def _checkpoints_activations(trunk: Any) -> bool:
    """Return whether the layers are to be computed again in backward instead of saving their activations."""
    return trunk.training and any(
        getattr(module, "gradient_checkpointing", False) for module in (trunk, *trunk.layers[:1])
    )


def _count_group_tokens(rows: Sequence[int], flat_N: torch.Tensor, width: int) -> list[int]:
    """Count each group's tokens at these flat positions of the batch."""
    group_of_B = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    return torch.bincount(group_of_B[flat_N // width], minlength=len(rows)).tolist()


def has_active_dropout(trunk: Any) -> bool:
    """Return whether equal tokens get different noise (adapters with dropout)."""
    return any(
        isinstance(module, nn.Dropout) and module.training and module.p > 0
        for module in trunk.layers[0].modules()
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
