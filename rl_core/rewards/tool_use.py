"""Reward component: costs of tool misuse and excess calls, and a small bonus for calls that worked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean

from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.settings import ToolUseSettings
from rl_core.types import Rollout, Trajectory

__all__ = ["ToolUseReward"]


class ToolUseReward(Component):
    """-misuse (turns that misused a tool) - excess (calls beyond max_calls) + min(bonus (different calls), max_bonus).

    Misuse is an action that did not parse, named no tool, or made one fail. Repeated calls with the same arguments
    count once for the bonus.
    Metrics, means over rollouts: misused_turns, excess_calls, bonus.
    """

    def __init__(self, settings: ToolUseSettings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout."""
        counts = [self._count(rollout.trajectory) for rollout in rollouts]
        names = ("misused_turns", "excess_calls", "bonus")
        self.metrics = {name: fmean(column) for name, column in zip(names, zip(*counts, strict=True), strict=False)}
        misuse, excess = self.settings.misuse, self.settings.excess
        return [-misuse * misused - excess * extra + bonus for misused, extra, bonus in counts]

    def _count(self, trajectory: Trajectory) -> tuple[int, int, float]:
        """Misused turns, calls beyond the free ones, bonus."""
        settings = self.settings
        called = [call for turn in trajectory.turns for call in turn.calls]
        worked = {
            (call.name, json.dumps(call.arguments, sort_keys=True, default=str))
            for turn in trajectory.turns
            if not turn.is_error
            for call in turn.calls
        }
        extra = 0 if settings.max_calls is None else max(0, len(called) - settings.max_calls)
        bonus = min(settings.bonus * len(worked), settings.max_bonus)
        return sum(turn.is_error for turn in trajectory.turns), extra, bonus
