"""The policy's last hidden states at the turns of an episode, averaged over each turn's tokens.

B rows, S sequence, H hidden, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from rl_core.data.batches import micro_batches, pad_rows, unscored_batch
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import evaluating
from rl_core.models.hidden_states import hidden_states
from rl_core.models.lora import unwrap
from rl_core.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Embed", "TurnStates", "turn_spans", "turn_states"]


@dataclass(slots=True)
class TurnStates:
    """The policy's states along one rollout. float32, on the CPU, without gradient."""

    states_NH: torch.Tensor  # [1 + turns, H] mean over the prompt, then over each turn: its action and what came back
    actions_NH: torch.Tensor  # [turns, H] mean over each turn's action
    is_observed: list[bool]  # [turns] True = something came back


Embed = Callable[[Sequence[Rollout]], list[TurnStates]]


def turn_spans(loss_mask: Sequence[bool]) -> list[tuple[int, int, int]]:
    """(start, end of the action, end of the observation) of each turn, in tokens after the prompt.

    A turn is a run of sampled tokens and the run of observed ones after it: `collect` appends at least one observed
    token between two actions. Where a context begins anew, what was observed stands at the end of its prompt.
    """
    runs, place = [], 0
    for sampled, run in groupby(loss_mask):
        stop = place + sum(1 for _ in run)
        runs.append((sampled, place, stop))
        place = stop
    ends = {start: stop for sampled, start, stop in runs if not sampled}
    return [(start, stop, ends.get(stop, stop)) for sampled, start, stop in runs if sampled]


@torch.no_grad()
def turn_states(
    model: PreTrainedModel, rollouts: Sequence[Rollout], *, pad_id: int, max_tokens: int = 16384
) -> list[TurnStates]:
    """The states of each rollout, from one pass of the policy over its whole sequence.

    Attention is causal, so a turn's state knows everything before it and nothing after.

    Args:
        max_tokens: padded tokens of one micro-batch.
    """
    rows = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
    base = unwrap(model)
    device = next(base.parameters()).device
    lengths = [len(row) for row in rows]
    found: list[TurnStates | None] = [None] * len(rows)

    def fill(group: list[int]) -> None:
        batch = unscored_batch([rows[index] for index in group], pad_id)
        if any(rollouts[index].context_starts for index in group):
            batch.position_ids_BS = pad_rows([rollouts[index].positions for index in group], 0)
        hidden_BSH = hidden_states(base, batch.to(device)).float().cpu()
        for b, index in enumerate(group):
            found[index] = _states_of(hidden_BSH[b], rollouts[index])

    with evaluating(model):
        MemoryFit("hidden states of rollouts").compute(micro_batches(lengths, max_tokens), fill, lengths=lengths)
    return [states for states in found if states is not None]


def _states_of(hidden_SH: torch.Tensor, rollout: Rollout) -> TurnStates:
    start = len(rollout.prompt_ids)
    completion_TH = hidden_SH[start:]
    spans = turn_spans(rollout.loss_mask)
    turns = [completion_TH[first:end].mean(0) for first, _, end in spans]
    actions = [completion_TH[first:acted].mean(0) for first, acted, _ in spans]
    return TurnStates(
        states_NH=torch.stack([hidden_SH[:start].mean(0), *turns]),
        actions_NH=torch.stack(actions) if actions else hidden_SH.new_zeros(0, hidden_SH.shape[1]),
        is_observed=[end > acted for _, acted, end in spans],
    )
