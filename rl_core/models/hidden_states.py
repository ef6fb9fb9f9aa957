"""Hidden states of a causal language model: for training, by the packed forward pass or transformers, and per turn.

B rows, S tokens of a sequence, H hidden, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import check_training_forward, needs_single_packed_row
from rl_core.cpu.packed_forward import (
    PrefixStates,
    RowGroups,
    check_needed_positions,
    run_packed_forward,
)
from rl_core.data.batches import build_unscored_batch, pad_rows, plan_micro_batches
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.device_attention import use_device_attention
from rl_core.models.image_inputs import build_batch_image_inputs
from rl_core.models.lora import unwrap_model
from rl_core.models.rotary import check_row_lengths
from rl_core.out_of_memory import MemoryFit
from rl_core.types import Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compute_prefix_states(
    model: PreTrainedModel,
    batch: TrainBatch,
    needed_BS: torch.Tensor | None = None,
    groups: RowGroups | None = None,
) -> PrefixStates:
    """Compute the last hidden states, after the final norm, of a right-padded batch, with gradient.

    Args:
        model: a transformers model with a head (without adapters around it: see `unwrap_model`), or its trunk.
        needed_BS: True at positions whose hidden states will be read, all of them real; the last layer may skip the
            others. None = all real positions.
        groups: rows that use other adapters than the rest; not with `position_ids_BS`.
    Returns: states of the distinct prefixes, if the model computes them once (`capabilities.check_prefix_sharing`),
        otherwise of all positions; arbitrary at padding and at positions that are not needed.
    Raises: DataError if a needed position is padding by the attention mask (checked on a CPU, which reads it), or a
        row is longer than the model's rotary frequencies allow.
    """
    trunk: Any = model.base_model
    check_row_lengths(trunk, batch)
    if check_training_forward(trunk).allowed:
        if batch.position_ids_BS is not None:
            return _compute_sequence_states(trunk, batch, batch.position_ids_BS, needed_BS)
        return run_packed_forward(trunk, batch, needed_BS, groups)
    if groups is not None:
        groups.tokens = [rows * batch.input_ids_BS.shape[1] for rows in groups.rows]
    inputs = build_model_inputs(model, batch)
    with use_device_attention(trunk, batch) as options:
        hidden: torch.Tensor = trunk(**inputs, **options, use_cache=False).last_hidden_state
    return PrefixStates.from_padded(hidden.reshape(*batch.input_ids_BS.shape, -1))


def compute_hidden_states(
    model: PreTrainedModel, batch: TrainBatch, needed_BS: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the states of `compute_prefix_states` at every position.

    Args, Raises: as there.
    Returns: [B, S, H]; arbitrary at padding and at positions that are not needed.
    """
    states = compute_prefix_states(model, batch, needed_BS)
    if len(states.states_NH) == states.numbers_BS.numel():  # one for each position, in order
        return states.states_NH.view(*states.numbers_BS.shape, -1)
    read_BS = batch.attention_mask_BS if needed_BS is None else needed_BS
    return states.spread(read_BS.reshape(-1).nonzero().squeeze(1))


def _compute_sequence_states(
    trunk: Any, batch: TrainBatch, positions_BS: torch.Tensor, needed_BS: torch.Tensor | None
) -> PrefixStates:
    """Compute the states of rows that hold several sequences, each sequence in its own row."""
    real_BS = batch.attention_mask_BS
    check_needed_positions(real_BS, needed_BS)
    position_N = positions_BS[real_BS]
    # every row begins a sequence, so sequences can be counted over all rows
    sequence_N = (position_N == 0).cumsum(0) - 1
    shape = (int(sequence_N[-1]) + 1, int(position_N.max()) + 1)
    ids_RW, mask_RW = batch.input_ids_BS.new_zeros(shape), real_BS.new_zeros(shape)
    ids_RW[sequence_N, position_N] = batch.input_ids_BS[real_BS]
    mask_RW[sequence_N, position_N] = True
    needed_RW = None
    if needed_BS is not None:
        needed_RW = real_BS.new_zeros(shape)
        needed_RW[sequence_N, position_N] = needed_BS[real_BS]
    states = run_packed_forward(
        trunk, TrainBatch(ids_RW, mask_RW, torch.zeros_like(mask_RW)), needed_RW
    )
    numbers_BS = torch.zeros_like(positions_BS)
    numbers_BS[real_BS] = states.numbers_BS[sequence_N, position_N]
    return PrefixStates(states.states_NH, numbers_BS, states.is_shared)


def build_model_inputs(model: PreTrainedModel, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Build the trunk's keyword arguments for a batch: its tokens and, for packed rows, their positions.

    Without an attention mask and a cache, transformers builds a block-diagonal causal mask from positions that
    restart. Its flash kernels read the same positions, but only in a batch of one row. For them the rows are
    concatenated, which changes nothing because each begins a sequence; the output then has shape [1, B*S, ...].
    A model that reads images also gets their pixels, and positions by M-RoPE.
    Raises: DataError if a row is longer than the model's rotary frequencies allow; as `build_batch_image_inputs`.
    """
    check_row_lengths(model, batch)
    if image_inputs := build_batch_image_inputs(model, batch):
        return {"input_ids": batch.input_ids_BS, **image_inputs}
    if batch.position_ids_BS is None:
        return {"input_ids": batch.input_ids_BS}
    inputs = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS}
    if needs_single_packed_row(model):
        inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
    return inputs


@dataclass(slots=True)
class TurnEmbeddings:
    """The policy's states along one rollout, float32, on the CPU, without gradient."""

    # [1 + turns, H] mean over the prompt, then over each turn (action and observation)
    states_NH: torch.Tensor
    actions_NH: torch.Tensor  # [turns, H] mean over each turn's action
    is_observed: list[bool]  # [turns] True = the turn has an observation


TurnEmbedder = Callable[[Sequence[Rollout]], list[TurnEmbeddings]]


def find_turn_spans(loss_mask: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Return (start, end of the action, end of the observation) of each turn, in tokens after the prompt.

    A turn is a run of sampled tokens followed by a run of observed ones: `collect_rollouts` appends at least one
    observed token between two actions. If a new context begins, the observation is at the end of its prompt.
    """
    runs = []
    position = 0
    for sampled, run in groupby(loss_mask):
        stop = position + sum(1 for _ in run)
        runs.append((sampled, position, stop))
        position = stop
    ends = {start: stop for sampled, start, stop in runs if not sampled}
    return [(start, stop, ends.get(stop, stop)) for sampled, start, stop in runs if sampled]


@torch.no_grad()
def compute_turn_embeddings(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, pad_id: int, max_tokens: int = 16384
) -> list[TurnEmbeddings]:
    """Compute each rollout's states from one pass of the policy over its whole sequence.

    Attention is causal, so a turn's state depends on everything before it and nothing after it.

    Args:
        max_tokens: padded tokens of one micro-batch.
    """
    rows = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
    base = unwrap_model(model)
    device = next(base.parameters()).device
    lengths = [len(row) for row in rows]
    embeddings: list[TurnEmbeddings | None] = [None] * len(rows)

    def fill(group: list[int]) -> None:
        batch = build_unscored_batch([rows[index] for index in group], pad_id)
        batch.images = [tuple(rollouts[index].images) for index in group]
        if any(rollouts[index].context_starts for index in group):
            batch.position_ids_BS = pad_rows([rollouts[index].positions for index in group], 0)
        hidden_BSH = compute_hidden_states(base, batch.to(device)).float().cpu()
        for b, index in enumerate(group):
            embeddings[index] = _average_over_turns(hidden_BSH[b], rollouts[index])

    with use_eval_mode(model):
        MemoryFit("hidden states of rollouts").compute_batches(
            plan_micro_batches(lengths, max_tokens), fill, lengths=lengths
        )
    return [states for states in embeddings if states is not None]


def _average_over_turns(hidden_SH: torch.Tensor, rollout: Rollout) -> TurnEmbeddings:
    start = len(rollout.prompt_ids)
    completion_TH = hidden_SH[start:]
    spans = find_turn_spans(rollout.loss_mask)
    turns = [completion_TH[first:end].mean(0) for first, _, end in spans]
    actions = [completion_TH[first:acted].mean(0) for first, acted, _ in spans]
    return TurnEmbeddings(
        states_NH=torch.stack([hidden_SH[:start].mean(0), *turns]),
        actions_NH=torch.stack(actions) if actions else hidden_SH.new_zeros(0, hidden_SH.shape[1]),
        is_observed=[end > acted for _, acted, end in spans],
    )
