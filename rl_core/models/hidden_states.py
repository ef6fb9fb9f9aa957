"""Hidden states of a causal language model, on real tokens only where that is possible.

transformers computes every layer on the padded rectangle and builds norms, rotary embeddings and gated activations from
many small kernels, each with a pass over memory of its own. On a CPU that costs more than the matrix products. For
Llama, Qwen2 and Qwen3 in float32, `hidden_states` runs the same layers, calling the same linear modules (adapters
included), on the real tokens laid end to end, and on what rows have in common from their beginning only once; only
attention sees rows, those of similar length together. Everything else goes to transformers.

B rows, S sequence, T real tokens, N of them of which no two have the same beginning, H hidden, h heads, D head size,
I width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rl_core.cpu.kernels import add_norm, gated_silu, linears, norm
from rl_core.cpu.packed_attention import attention_of, chosen
from rl_core.cpu.shared_prefixes import shared_prefixes
from rl_core.errors import DataError
from rl_core.types import TrainBatch

__all__ = ["STATIC_ROPES", "hidden_states", "model_inputs"]

_FAMILIES = ("LlamaModel", "Qwen2Model", "Qwen3Model")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the sequence's length
_LEAST_FILLED = 0.85  # a row shorter than this share of its rectangle's width opens the next rectangle,
_LEAST_ROWS = 8  # if there are this many rows in it: a call of the attention kernel has a price of its own
_LEAST_SHARED = 0.05  # sharing less than this share of the tokens costs about what it saves


def hidden_states(model: PreTrainedModel, batch: TrainBatch, needed_BS: torch.Tensor | None = None) -> torch.Tensor:
    """Last hidden states, after the final norm, of a right-padded batch, with gradient.

    Args:
        model: a model of transformers with a head on it (without adapters around it: see `unwrap`), or its trunk.
        needed_BS: True at the positions whose hidden states will be read, all of them real; the last layer may leave
            out the others. None = all real positions.
    Returns: [B, S, H]; what stands at padding and at positions that are not needed means nothing.
    Raises: DataError when a position is needed that the attention mask calls padding (on a CPU, where it is read).
    """
    trunk: Any = model.base_model
    if batch.position_ids_BS is None and _is_plain(trunk):
        return _run(trunk, batch, needed_BS)
    hidden: torch.Tensor = trunk(**model_inputs(model, batch), use_cache=False).last_hidden_state
    return hidden.reshape(*batch.input_ids_BS.shape, -1)


def model_inputs(model: PreTrainedModel, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """What the trunk of `model` gets for a batch: its tokens and, where rows are packed, their positions.

    transformers builds a block-diagonal causal mask from positions that start again, when it is given neither an
    attention mask nor a cache. Its flash kernels read the same positions, but only in a batch of one row: there the
    rows are laid end to end, which changes nothing, as each begins a sequence. The output then has shape [1, B*S, ...].
    """
    if batch.position_ids_BS is None:
        return {"input_ids": batch.input_ids_BS}
    inputs = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS}
    if _reads_one_row_alone(model):
        inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
    return inputs


def _reads_one_row_alone(model: PreTrainedModel) -> bool:
    return "flash" in str(getattr(model.config, "_attn_implementation", None))


def _is_plain(trunk: Any) -> bool:
    """Whether this module's own forward pass may stand in for that of transformers."""
    kind = type(trunk)
    if kind.__name__ not in _FAMILIES or not kind.__module__.startswith("transformers."):
        return False
    weight, config = trunk.embed_tokens.weight, trunk.config
    # A GPU has fused attention over several sequences and does not mind small kernels; in low precision transformers
    # rounds at places that are its own.
    if isinstance(trunk.layers[0], FSDPModule):  # its weights are in one piece only while it is called itself
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    return (
        getattr(config, "_attn_implementation", None) == "sdpa"
        and config.hidden_act == "silu"
        and not (trunk.training and (getattr(config, "attention_dropout", 0.0) or _checkpoints_activations(trunk)))
        and getattr(trunk.rotary_emb, "rope_type", "default") in STATIC_ROPES
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    )


def _checkpoints_activations(trunk: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in (trunk, *trunk.layers[:1]))


def _run(trunk: Any, batch: TrainBatch, needed_BS: torch.Tensor | None) -> torch.Tensor:
    ids_BS, mask_BS = batch.input_ids_BS, batch.attention_mask_BS
    if needed_BS is not None and bool((needed_BS & ~mask_BS).any()):
        raise DataError(
            "attention_mask is False where a hidden state is needed: its rows are not those of the loss mask"
        )
    lengths = mask_BS.sum(1).tolist()
    shared = None if _drops_out(trunk) else shared_prefixes(ids_BS, lengths, least=_LEAST_SHARED)
    flat_T = mask_BS.reshape(-1).nonzero().squeeze(1)  # place of each real token in the batch
    flat_N = flat_T if shared is None else flat_T[shared.first_N]
    out_T, from_T = flat_T, None if shared is None else shared.unique_T  # where the result goes, and which goes there
    x_NH = trunk.embed_tokens(ids_BS.reshape(-1)[flat_N])
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
        x_NH, normed_NH = add_norm(x_NH, linears(attended_NE, [layer.self_attn.o_proj]), layer.post_attention_layernorm)
        active_NI = gated_silu(linears(normed_NH, [layer.mlp.gate_proj, layer.mlp.up_proj]))
        after = layers[index + 1].input_layernorm if index + 1 < len(layers) else trunk.norm
        x_NH, normed_NH = add_norm(x_NH, linears(active_NI, [layer.mlp.down_proj]), after)
    states_TH = normed_NH if from_T is None else normed_NH.index_select(0, from_T)
    flat_PH = x_NH.new_zeros(ids_BS.numel(), x_NH.shape[1])
    return flat_PH.index_copy(0, out_T, states_TH).unflatten(0, ids_BS.shape)


def _drops_out(trunk: Any) -> bool:
    """Whether equal tokens get different noise (adapters with dropout)."""
    return trunk.training and any(isinstance(part, nn.Dropout) and part.p > 0 for part in trunk.layers[0].modules())


def _heads(attention: Any, normed_NH: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Queries, keys and values side by side [N, h, D], and how many of them are keys."""
    heads_NE = linears(normed_NH, [attention.q_proj, attention.k_proj, attention.v_proj])
    heads_NhD = heads_NE.unflatten(1, (-1, attention.head_dim))
    groups = attention.num_key_value_groups
    kv_heads = heads_NhD.shape[1] // (groups + 2)
    if hasattr(attention, "q_norm"):
        q_NhD, k_NhD, v_NhD = heads_NhD.split([groups * kv_heads, kv_heads, kv_heads], dim=1)
        heads_NhD = torch.cat([norm(q_NhD, attention.q_norm), norm(k_NhD, attention.k_norm), v_NhD], dim=1)
    return heads_NhD, kv_heads
