"""Hidden states of a causal language model for training: dispatch between the packed forward pass and transformers.

B rows, S sequence, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import packs_into_one_row, training_forward
from rl_core.cpu.packed_forward import check_needed, packed_forward
from rl_core.cpu.shared_prefixes import RowGroups
from rl_core.models.rotary import check_lengths
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["hidden_states", "model_inputs"]


def hidden_states(
    model: PreTrainedModel,
    batch: TrainBatch,
    needed_BS: torch.Tensor | None = None,
    groups: RowGroups | None = None,
) -> torch.Tensor:
    """Last hidden states, after the final norm, of a right-padded batch, with gradient.

    Args:
        model: a model of transformers with a head on it (without adapters around it: see `unwrap`), or its trunk.
        needed_BS: True at the positions whose hidden states will be read, all of them real; the last layer may leave
            out the others. None = all real positions.
        groups: rows that go through other adapters than the rest; not with `position_ids_BS`.
    Returns: [B, S, H]; arbitrary at padding and at positions that are not needed.
    Raises: DataError when a position is needed that the attention mask calls padding (on a CPU, where it is read), or
        a row is longer than the model's rotary frequencies allow.
    """
    trunk: Any = model.base_model
    check_lengths(trunk, batch)
    if training_forward(trunk).allowed:
        if batch.position_ids_BS is not None:
            return _of_sequences(trunk, batch, batch.position_ids_BS, needed_BS)
        return packed_forward(trunk, batch, needed_BS, groups)
    if groups is not None:
        groups.tokens = [rows * batch.input_ids_BS.shape[1] for rows in groups.rows]
    hidden: torch.Tensor = trunk(**model_inputs(model, batch), use_cache=False).last_hidden_state
    return hidden.reshape(*batch.input_ids_BS.shape, -1)


def _of_sequences(
    trunk: Any, batch: TrainBatch, positions_BS: torch.Tensor, needed_BS: torch.Tensor | None
) -> torch.Tensor:
    """Hidden states of rows that hold several sequences, each computed in a row of its own: [B, S, H]."""
    real_BS = batch.attention_mask_BS
    check_needed(real_BS, needed_BS)
    place_N = positions_BS[real_BS]
    sequence_N = (place_N == 0).cumsum(0) - 1  # a row begins a sequence, so the real tokens of all rows can be counted
    shape = (int(sequence_N[-1]) + 1, int(place_N.max()) + 1)
    ids_RW, mask_RW = batch.input_ids_BS.new_zeros(shape), real_BS.new_zeros(shape)
    ids_RW[sequence_N, place_N] = batch.input_ids_BS[real_BS]
    mask_RW[sequence_N, place_N] = True
    needed_RW = None
    if needed_BS is not None:
        needed_RW = real_BS.new_zeros(shape)
        needed_RW[sequence_N, place_N] = needed_BS[real_BS]
    hidden_RWH = packed_forward(trunk, TrainBatch(ids_RW, mask_RW, torch.zeros_like(mask_RW)), needed_RW)
    hidden_BSH = hidden_RWH.new_zeros(*real_BS.shape, hidden_RWH.shape[-1])
    hidden_BSH[real_BS] = hidden_RWH[sequence_N, place_N]
    return hidden_BSH


def model_inputs(model: PreTrainedModel, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Keyword arguments of the trunk for a batch: its tokens and, where rows are packed, their positions.

    transformers builds a block-diagonal causal mask from positions that start again, when it is given neither an
    attention mask nor a cache. Its flash kernels read the same positions, but only in a batch of one row: there the
    rows are laid end to end, which changes nothing, as each begins a sequence. The output then has shape [1, B*S, ...].
    Raises: DataError when a row is longer than the model's rotary frequencies allow.
    """
    check_lengths(model, batch)
    if batch.position_ids_BS is None:
        return {"input_ids": batch.input_ids_BS}
    inputs = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS}
    if packs_into_one_row(model):
        inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
    return inputs
