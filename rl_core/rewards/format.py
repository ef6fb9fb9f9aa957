"""Reward component: share of well-formed turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.settings import FormatSettings
from rl_core.types import Rollout, StopReason, Trajectory

__all__ = ["FormatReward"]


class FormatReward(Component):
    """Share of well-formed turns, 0 to 1; 0 for an episode without a turn.

    Malformed is a turn that is neither a call nor an answer (a call whose tool failed was well-formed), the last one of
    an episode that ran out of tokens, and with `pattern` one whose whole text does not match it.
    Metrics: malformed_turns (mean per rollout), perfect (share of rollouts without one).
    """

    def __init__(self, settings: FormatSettings) -> None:
        super().__init__()
        self._pattern = re.compile(settings.pattern, re.DOTALL) if settings.pattern is not None else None

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout."""
        malformed = [self._malformed(rollout.trajectory) for rollout in rollouts]
        turns = [len(rollout.trajectory.turns) for rollout in rollouts]
        values = [1 - bad / count if count else 0.0 for bad, count in zip(malformed, turns, strict=True)]
        if rollouts:
            self.metrics = {"malformed_turns": fmean(malformed), "perfect": fmean(value == 1 for value in values)}
        return values

    def _malformed(self, trajectory: Trajectory) -> int:
        cut = trajectory.stop_reason == StopReason.MAX_TOKENS
        last = len(trajectory.turns) - 1
        return sum(
            (turn.is_error and turn.tool_call is None)
            or (cut and index == last)
            or (self._pattern is not None and self._pattern.fullmatch(turn.action) is None)
            for index, turn in enumerate(trajectory.turns)
        )
