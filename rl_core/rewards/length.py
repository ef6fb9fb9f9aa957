"""Reward component: cost of sampled tokens beyond a free length."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.settings import LengthSettings
from rl_core.types import Rollout

__all__ = ["LengthReward"]


class LengthReward(Component):
    """0 up to `free` sampled tokens, then linearly down to -1 at `limit`; observations do not count.

    Metrics: tokens (mean), punished (share of rollouts beyond `free`).
    """

    def __init__(self, settings: LengthSettings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout."""
        free, limit = self.settings.free, self.settings.limit
        lengths = [sum(rollout.loss_mask) for rollout in rollouts]
        if lengths:
            self.metrics = {"tokens": fmean(lengths), "punished": fmean(length > free for length in lengths)}
        return [-(min(max(length, free), limit) - free) / (limit - free) for length in lengths]
