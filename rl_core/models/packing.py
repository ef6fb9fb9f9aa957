"""Several sequences in one row: which models keep them apart, and how they are told to.

B rows, S positions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from rl_core.models.causal_lm import evaluating
from rl_core.models.hidden_states import model_inputs
from rl_core.models.lora import unwrap
from rl_core.types import TrainBatch

__all__ = ["can_pack"]


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model keeps the sequences of a packed row apart, found by trying it on short ones.

    Not every family and attention kernel does (recurrent ones, those that know no position ids, kernels without a block
    mask), and one that does not would mix them in silence. Tried in two rows, in eval mode: what stands before a
    sequence must not move its hidden states by 1/50 of what it does in a plain row (on most machines by nothing at all;
    experts may round with their load), and they must be the same as alone, up to rounding.
    """
    base = unwrap(model)
    device, dtype = next(base.parameters()).device, next(base.parameters()).dtype
    embedding: torch.Tensor = base.get_input_embeddings().weight  # type: ignore[assignment]
    vocab_size = embedding.shape[0]
    tokens_S = torch.arange(12, device=device)
    first_ids_S, other_ids_S, ids_S = (tokens_S * step % (vocab_size - 1) + 1 for step in (3, 5, 7))
    before = 5  # tokens of the sequence that stands in front
    packed_rows = [torch.cat([front_ids_S[:before], ids_S]) for front_ids_S in (first_ids_S, other_ids_S)]
    positions_BS = torch.cat([tokens_S[:before], tokens_S]).expand(2, -1)

    def hidden(rows: list[torch.Tensor], positions_BS: torch.Tensor | None) -> torch.Tensor:
        ids_BS = torch.stack(rows)
        real_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        inputs: dict[str, Any] = model_inputs(base, TrainBatch(ids_BS, real_BS, real_BS, position_ids_BS=positions_BS))
        output = base.base_model(**inputs, use_cache=False).last_hidden_state
        return output.reshape(*ids_BS.shape, -1).double()[:, -len(ids_S) :]

    with evaluating(base), torch.no_grad():
        try:
            alone, plain, packed = (
                hidden([ids_S] * 2, None),
                hidden(packed_rows, None),
                hidden(packed_rows, positions_BS),
            )
        except (TypeError, ValueError, RuntimeError):  # a family that takes no position ids
            return False
    leak, effect = (float((rows[0] - rows[1]).abs().max()) for rows in (packed, plain))
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # some families take a softmax in float32 always
    difference = float((packed - alone).abs().max()) / float(alone.abs().max())
    return leak <= effect / 50 and difference <= eps**0.5
