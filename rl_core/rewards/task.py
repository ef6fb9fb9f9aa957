"""Reward component: the environment's own reward."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.types import Rollout

__all__ = ["TaskReward"]


class TaskReward(Component):
    """Sum of the environment's rewards over the episode. Metrics: answered, the share of episodes with an answer."""

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout."""
        self.metrics = {"answered": sum(r.trajectory.answer is not None for r in rollouts) / max(1, len(rollouts))}
        return [rollout.trajectory.rewards["task"] for rollout in rollouts]
