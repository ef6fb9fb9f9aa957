"""Forward pass of Llama, Qwen2 and Qwen3 on real tokens only, for training on a CPU in float32.

transformers computes every layer on the padded rectangle and builds norms, rotary embeddings and gated activations from
many small kernels, each with a pass over memory of its own. On a CPU that costs more than the matrix products. Here the
same layers, calling the same linear modules (adapters included), run on the real tokens laid end to end, with prefixes
that rows have in common computed once; only attention sees rows, those of similar length together.

B rows, S sequence, T real tokens, N of them of which no two have the same beginning, H hidden, h heads, D head size,
I width of the MLP, E = width of all query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_core.cpu.kernels import add_norm, gated_silu, linears, norm
from rl_core.cpu.packed_attention import attention_of, chosen
from rl_core.cpu.shared_prefixes import RowGroups, prefixes_within
from rl_core.errors import DataError
from rl_core.types import TrainBatch

__all__ = ["check_needed", "packed_forward"]

_LEAST_SHARED = 0.05  # sharing less than this share of the tokens costs about what it saves


def check_needed(mask_BS: torch.Tensor, needed_BS: torch.Tensor | None) -> None:
    """Raises: DataError when a position is needed that the attention mask calls padding."""
    if needed_BS is not None and bool((needed_BS & ~mask_BS).any()):
        raise DataError(
            "attention_mask is False where a hidden state is needed: its rows are not those of the loss mask"
        )


def packed_forward(
    trunk: Any, batch: TrainBatch, needed_BS: torch.Tensor | None = None, groups: RowGroups | None = None
) -> torch.Tensor:
    """Last hidden states, after the final norm, of a right-padded batch, with gradient.

    Args:
        trunk: of a family that `capabilities.training_forward` allows.
        needed_BS: True at the positions whose hidden states will be read, all of them real; None = all real positions.
        groups: rows that share no prefixes with others; its `tokens` are set before linear layers are called.
    Returns: [B, S, H]; arbitrary at padding and at positions that are not needed.
    Raises: DataError when a position is needed that the attention mask calls padding.
    """
    ids_BS, mask_BS = batch.input_ids_BS, batch.attention_mask_BS
    check_needed(mask_BS, needed_BS)
    lengths = mask_BS.sum(1).tolist()
    rows = [len(lengths)] if groups is None else groups.rows
    shared = None if _drops_out(trunk) else prefixes_within(rows, ids_BS, lengths, least=_LEAST_SHARED)
    flat_T = mask_BS.reshape(-1).nonzero().squeeze(1)  # place of each real token in the batch
    flat_N = flat_T if shared is None else flat_T[shared.first_N]
    out_T, from_T = flat_T, None if shared is None else shared.unique_T  # where the result goes, and which goes there
    x_NH = trunk.embed_tokens(ids_BS.reshape(-1)[flat_N])
    _count_tokens(groups, flat_N, ids_BS)
    layers = trunk.layers[: trunk.config.num_hidden_layers]
    cos_1ND, sin_1ND = trunk.rotary_emb(x_NH, position_ids=(flat_N % ids_BS.shape[1])[None])
    attend = attention_of(lengths, shared, layers[0].self_attn.head_dim, cos_1ND[0], sin_1ND[0])
    normed_NH = norm(x_NH, layers[0].input_layernorm)
    for index, layer in enumerate(layers):
        heads_NhD, kv_heads = _heads(layer.self_attn, normed_NH)
        attended_NE = attend(heads_NhD, kv_heads, layer.self_attn.scaling)
        if index + 1 == len(layers) and needed_BS is not None:  # the other tokens' states have been read for good
            needed_T = needed_BS.reshape(-1)[flat_T]
            out_T = flat_T[needed_T]
            if from_T is None:
                needed_n = needed_T.nonzero().squeeze(1)
            else:
                needed_n, from_T = torch.unique(from_T[needed_T], return_inverse=True)
            attended_NE, x_NH = chosen(attended_NE, needed_n), chosen(x_NH, needed_n)
            _count_tokens(groups, flat_N[needed_n], ids_BS)
        x_NH, normed_NH = add_norm(x_NH, linears(attended_NE, [layer.self_attn.o_proj]), layer.post_attention_layernorm)
        active_NI = gated_silu(linears(normed_NH, [layer.mlp.gate_proj, layer.mlp.up_proj]))
        after = layers[index + 1].input_layernorm if index + 1 < len(layers) else trunk.norm
        x_NH, normed_NH = add_norm(x_NH, linears(active_NI, [layer.mlp.down_proj]), after)
    states_TH = normed_NH if from_T is None else normed_NH.index_select(0, from_T)
    flat_PH = x_NH.new_zeros(ids_BS.numel(), x_NH.shape[1])
    return flat_PH.index_copy(0, out_T, states_TH).unflatten(0, ids_BS.shape)


def _count_tokens(groups: RowGroups | None, flat_N: torch.Tensor, ids_BS: torch.Tensor) -> None:
    """Set `groups.tokens` to the tokens of each group among those at these places of the batch."""
    if groups is not None:
        group_of_B = torch.repeat_interleave(torch.arange(len(groups.rows)), torch.tensor(groups.rows))
        group_N = group_of_B[flat_N // ids_BS.shape[1]]
        groups.tokens = torch.bincount(group_N, minlength=len(groups.rows)).tolist()


def _drops_out(trunk: Any) -> bool:
    """True = equal tokens get different noise (adapters with dropout)."""
    return trunk.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in trunk.layers[0].modules())


def _heads(attention: Any, normed_NH: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Queries, keys and values side by side [N, h, D], and the number of key heads among them."""
    heads_NE = linears(normed_NH, [attention.q_proj, attention.k_proj, attention.v_proj])
    heads_NhD = heads_NE.unflatten(1, (-1, attention.head_dim))
    groups = attention.num_key_value_groups
    kv_heads = heads_NhD.shape[1] // (groups + 2)
    if hasattr(attention, "q_norm"):
        q_NhD, k_NhD, v_NhD = heads_NhD.split([groups * kv_heads, kv_heads, kv_heads], dim=1)
        heads_NhD = torch.cat([_of_heads(q_NhD, attention.q_norm), _of_heads(k_NhD, attention.k_norm), v_NhD], dim=1)
    return heads_NhD, kv_heads


def _of_heads(x_NhD: torch.Tensor, module: Any) -> torch.Tensor:
    """The norm of every head by itself."""
    return norm(x_NhD.flatten(0, 1), module).view(x_NhD.shape)
