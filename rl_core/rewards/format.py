"""Reward component: share of well-formed turns."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from statistics import fmean

from rl_core.data.timed_pattern import MATCH_S, TimedPattern
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.settings import FormatSettings
from rl_core.types import Rollout, StopReason, Trajectory

__all__ = ["FormatReward"]

logger = logging.getLogger(__name__)


class FormatReward(Component):
    """Share of well-formed turns, 0 to 1; 0 for an episode without a turn.

    Malformed is a turn that is neither a call nor an answer (a call whose tool failed was well-formed), the last one of
    an episode that ran out of tokens, and with `pattern` one whose whole text does not match it, or not within MATCH_S
    seconds of processor time (counted in timed_out).
    Metrics: malformed_turns (mean per rollout), perfect (share of rollouts without one), with `pattern` timed_out
    (turns of the batch).
    """

    def __init__(self, settings: FormatSettings) -> None:
        super().__init__()
        self._pattern = TimedPattern(settings.pattern, MATCH_S) if settings.pattern is not None else None

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout."""
        if self._pattern is not None:
            self._pattern.timed_out = 0
        malformed = [self._malformed(rollout.trajectory) for rollout in rollouts]
        turns = [len(rollout.trajectory.turns) for rollout in rollouts]
        values = [1 - bad / count if count else 0.0 for bad, count in zip(malformed, turns, strict=True)]
        if rollouts:
            self.metrics = {"malformed_turns": fmean(malformed), "perfect": fmean(value == 1 for value in values)}
            if self._pattern is not None:
                self.metrics["timed_out"] = float(self._pattern.timed_out)
        return values

    def _malformed(self, trajectory: Trajectory) -> int:
        cut = trajectory.stop_reason == StopReason.MAX_TOKENS
        last = len(trajectory.turns) - 1
        return sum(
            (turn.is_error and turn.tool_call is None) or (cut and index == last) or not self._fits(turn.action)
            for index, turn in enumerate(trajectory.turns)
        )

    def _fits(self, text: str) -> bool:
        if self._pattern is None:
            return True
        timed_out = self._pattern.timed_out
        fits = self._pattern.matches(text, whole=True)
        if self._pattern.timed_out > timed_out:
            _warn(self._pattern.pattern)
        return fits


@functools.lru_cache(maxsize=64)  # each pattern is named once
def _warn(pattern: str) -> None:
    logger.warning(
        "reward 'format': a turn was not matched against pattern %r within %g s and counts as malformed (counted in "
        "reward/format/timed_out); repeats of what can match one text in several ways, as (a|a)*, take very long on "
        "some texts: write each part so that it can begin in one place only, as [^<]* before a tag",
        pattern,
        MATCH_S,
    )
