"""Overlong penalty: DAPO's soft penalty on completions close to the length limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_core.losses.advantages import overlong_penalty
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.types import Rollout

__all__ = ["OverlongPenalty"]


class OverlongPenalty(Component):
    """0 up to `max_tokens - buffer` completion tokens, then linearly down to -1 at `max_tokens`.

    Part of the algorithm rather than of the task: it is added to the total without weight, normalisation or clipping.
    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.buffer = buffer

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One penalty per rollout, -1 to 0; observations count towards its length."""
        lengths_B = torch.tensor([rollout.num_episode_tokens for rollout in rollouts])
        penalties_B = overlong_penalty(lengths_B, max_tokens=self.max_tokens, buffer=self.buffer)
        return [float(penalty) for penalty in penalties_B.tolist()]
