"""Reward components: ready-made verifiers of the last action, see `environments.answer_checks`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

from rl_core.environments.answer_checks import AnswerCheck
from rl_core.errors import DataError, RewardError
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component, describe
from rl_core.types import Rollout

__all__ = ["VerifierReward"]


class VerifierReward(Component):
    """Score of one verifier, 0 to 1.

    Metrics: right (share of rollouts with score 1), and of verifiers with limits timed_out and failed (rollouts, which
    earn 0).
    """

    def __init__(self, check: AnswerCheck, workers: int = 1) -> None:
        """`workers`: answers that are verified at once, by a verifier that waits for child processes."""
        super().__init__()
        self.check, self._workers = check, workers

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout. Raises: RewardError for a target that the verifier cannot use."""
        self.check.counts.clear()
        if self.check.blocking:
            with ThreadPoolExecutor(self._workers) as pool:
                values = list(pool.map(self._score, rollouts))
        else:
            values = [self._score(rollout) for rollout in rollouts]
        if rollouts:
            self.metrics = {"right": fmean(value == 1 for value in values)}
            self.metrics |= {name: float(count) for name, count in self.check.counts.items()}
        return values

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """See `Component`."""
        self.check.check_columns(None if columns is None else tuple(columns))

    def _score(self, rollout: Rollout) -> float:
        trajectory = rollout.trajectory
        text = trajectory.turns[-1].action if trajectory.turns else ""
        try:
            return self.check.score(text, trajectory.target, trajectory.row)
        except DataError as error:
            raise RewardError(f"{error} (at {describe(rollout)})") from error
