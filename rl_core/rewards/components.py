"""Reward components without a model: base class, task, length, overlong penalty, tool use, format, verifiers."""

from __future__ import annotations

import functools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import torch

from rl_core.data.model_text import MATCH_TIME_LIMIT_S, TimeLimitedPattern
from rl_core.environments.answer_checks import AnswerCheck
from rl_core.errors import DataError, RewardError
from rl_core.losses.advantages import overlong_penalty
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.settings import FormatSettings, LengthSettings, ToolUseSettings
from rl_core.types import Rollout, StopReason, Trajectory

logger = logging.getLogger(__name__)


class SampleFailure(NamedTuple):
    """Failure of a component on one sample."""

    error: str  # continues "reward 'name' ..."
    trace: str = ""


class RewardComponent(ABC):
    """Scores the rollouts of an iteration: one number each; None = it could not score that rollout.

    `metrics` holds further scalars of the last call, logged as `reward/<component>/<name>`.
    """

    needs_states: ClassVar[bool] = False  # True = called with the policy's states, one per rollout
    reads_rows: ClassVar[bool] = False  # True = `check_row` may refuse a row

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.failed: dict[int, SampleFailure] = {}  # of the last call, by index of the rollout
        self.group_sizes: list[int] = []  # rollouts of each prompt, in order; set before each call

    @abstractmethod
    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> Sequence[float | None]:
        """Score the rollouts. Raises: RewardError."""

    def check_columns(self, columns: Sequence[str] | None) -> None:  # noqa: B027 most read no column
        """Raise SettingsError for a column that the component reads and no row has; None = unknown."""

    def check_row(self, target: str, row: Mapping[str, Any]) -> None:  # noqa: B027 most read no row
        """Raise DataError for a row that the component cannot use."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs; empty for most components."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 most have nothing to load
        """Restore `state_dict`."""


def describe_rollout(rollout: Rollout) -> str:
    """Return environment, level, seed and sample of a rollout, for messages."""
    trajectory = rollout.trajectory
    return (
        f"environment '{trajectory.environment}', level '{trajectory.level}', seed {trajectory.seed}, "
        f"sample {trajectory.sample}"
    )


class TaskReward(RewardComponent):
    """Sum of the environment's rewards over the episode. Metrics: answered, the share of episodes with an answer."""

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout."""
        self.metrics = {
            "answered": sum(r.trajectory.answer is not None for r in rollouts)
            / max(1, len(rollouts))
        }
        return [rollout.trajectory.rewards["task"] for rollout in rollouts]


class LengthReward(RewardComponent):
    """0 up to `free` sampled tokens, then linearly down to -1 at `limit`; observations do not count.

    Metrics: tokens (mean), punished (share of rollouts beyond `free`).
    """

    def __init__(self, settings: LengthSettings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout."""
        free, limit = self.settings.free, self.settings.limit
        lengths = [sum(rollout.loss_mask) for rollout in rollouts]
        if lengths:
            self.metrics = {
                "tokens": fmean(lengths),
                "punished": fmean(length > free for length in lengths),
            }
        return [-(min(max(length, free), limit) - free) / (limit - free) for length in lengths]


class OverlongPenalty(RewardComponent):
    """DAPO's soft penalty: 0 up to `max_tokens - buffer` completion tokens, then linearly down to -1 at `max_tokens`.

    Part of the algorithm, not of the task: it is added to the total without weight, normalisation or clipping.
    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.buffer = buffer

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one penalty per rollout, -1 to 0; observations count towards its length."""
        lengths_B = torch.tensor([rollout.num_episode_tokens for rollout in rollouts])
        penalties_B = overlong_penalty(lengths_B, max_tokens=self.max_tokens, buffer=self.buffer)
        return [float(penalty) for penalty in penalties_B.tolist()]


class ToolUseReward(RewardComponent):
    """-misuse (turns that misused a tool) - excess (calls beyond max_calls) + min(bonus (different calls), max_bonus).

    Misuse is an action that did not parse, named no tool, or made one fail. Repeated calls with the same arguments
    count once for the bonus.
    Metrics, means over rollouts: misused_turns, excess_calls, bonus.
    """

    def __init__(self, settings: ToolUseSettings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout."""
        counts = [self._count_calls(rollout.trajectory) for rollout in rollouts]
        names = ("misused_turns", "excess_calls", "bonus")
        self.metrics = {
            name: fmean(column)
            for name, column in zip(names, zip(*counts, strict=True), strict=False)
        }
        misuse, excess = self.settings.misuse, self.settings.excess
        return [-misuse * misused - excess * extra + bonus for misused, extra, bonus in counts]

    def _count_calls(self, trajectory: Trajectory) -> tuple[int, int, float]:
        """Count misused turns and calls beyond the free ones; compute the bonus."""
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


class FormatReward(RewardComponent):
    """Share of well-formed turns, 0 to 1; 0 for an episode without a turn.

    A turn is malformed if it is neither a call nor an answer (a call whose tool failed is well-formed), if it is the
    last
    turn of an episode that ran out of tokens, or, with `pattern`, if its text does not match the pattern entirely
    within
    MATCH_TIME_LIMIT_S seconds of processor time (counted in timed_out).
    Metrics: malformed_turns (mean per rollout), perfect (share of rollouts without one), with `pattern` timed_out
    (turns of the batch).
    """

    def __init__(self, settings: FormatSettings) -> None:
        super().__init__()
        self._pattern = (
            TimeLimitedPattern(settings.pattern, MATCH_TIME_LIMIT_S)
            if settings.pattern is not None
            else None
        )

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout."""
        if self._pattern is not None:
            self._pattern.timed_out = 0
        malformed = [self._count_malformed_turns(rollout.trajectory) for rollout in rollouts]
        turns = [len(rollout.trajectory.turns) for rollout in rollouts]
        values = [
            1 - bad / count if count else 0.0 for bad, count in zip(malformed, turns, strict=True)
        ]
        if rollouts:
            self.metrics = {
                "malformed_turns": fmean(malformed),
                "perfect": fmean(value == 1 for value in values),
            }
            if self._pattern is not None:
                self.metrics["timed_out"] = float(self._pattern.timed_out)
        return values

    def _count_malformed_turns(self, trajectory: Trajectory) -> int:
        cut = trajectory.stop_reason == StopReason.MAX_TOKENS
        last = len(trajectory.turns) - 1
        return sum(
            (turn.is_error and turn.tool_call is None)
            or (cut and index == last)
            or not self._is_well_formed(turn.action)
            for index, turn in enumerate(trajectory.turns)
        )

    def _is_well_formed(self, text: str) -> bool:
        if self._pattern is None:
            return True
        timed_out = self._pattern.timed_out
        fits = self._pattern.matches_text(text, match_entire_text=True)
        if self._pattern.timed_out > timed_out:
            _warn_timed_out(self._pattern.pattern)
        return fits


@functools.lru_cache(maxsize=64)  # warn once per pattern
def _warn_timed_out(pattern: str) -> None:
    logger.warning(
        "reward 'format': a turn was not matched against pattern %r within %g s and counts as malformed (counted in "
        "reward/format/timed_out); repeats of what can match one text in several ways, as (a|a)*, take very long on "
        "some texts: write each part so that it can begin in one place only, as [^<]* before a tag",
        pattern,
        MATCH_TIME_LIMIT_S,
    )


class VerifierReward(RewardComponent):
    """Score of one verifier on the last action, 0 to 1, see `environments.answer_checks`.

    Metrics: right (share of rollouts with score 1); for verifiers with limits also timed_out and failed (rollouts,
        which
    earn 0).
    """

    reads_rows = True

    def __init__(self, check: AnswerCheck, workers: int = 1) -> None:
        """Use `workers` threads for a verifier that waits for child processes."""
        super().__init__()
        self.check, self._workers = check, workers

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout. Raises: RewardError for a target that the verifier cannot use."""
        self.check.counts.clear()
        if self.check.blocking:
            with ThreadPoolExecutor(self._workers) as pool:
                values = list(pool.map(self._score_rollout, rollouts))
        else:
            values = [self._score_rollout(rollout) for rollout in rollouts]
        if rollouts:
            self.metrics = {"right": fmean(value == 1 for value in values)}
            self.metrics |= {name: float(count) for name, count in self.check.counts.items()}
        return values

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Refuse missing columns, see `RewardComponent`."""
        self.check.check_columns(None if columns is None else tuple(columns))

    def check_row(self, target: str, row: Mapping[str, Any]) -> None:
        """Refuse a row that the verifier cannot use, see `RewardComponent`."""
        self.check.check_row(target, row)

    def _score_rollout(self, rollout: Rollout) -> float:
        trajectory = rollout.trajectory
        text = trajectory.turns[-1].action if trajectory.turns else ""
        try:
            return self.check.score_action(text, trajectory.target, trajectory.row)
        except DataError as error:
            raise RewardError(f"{error} (at {describe_rollout(rollout)})") from error
