"""Process reward: scores of the steps of a completion, by a reward model of steps or by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from rl_core.data.text_steps import find_completing_tokens, split_into_steps
from rl_core.environments.failed_episodes import format_error_trace
from rl_core.errors import DataError, RewardError, SettingsError
from rl_core.losses.process_rewards import aggregate_steps
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import RewardComponent, SampleFailure
from rl_core.rewards.user_function import complete_awaitable
from rl_core.settings import ProcessRewardSettings
from rl_core.time_limits import CallTimeout, TooManyHungCalls, call_with_timeout
from rl_core.types import Rollout, Trajectory
from rl_core.user_code.checks import USER_CODE_ERRORS, is_value_list, parse_finite
from rl_core.user_code.load import import_function

# Token ids of complete sequences and the positions at which steps end -> one score in [0, 1] for each.
StepScorer = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Sequence[Sequence[float]]]
# Text of tokens within a conversation.
DecodeIds = Callable[[Sequence[int]], str]
# Texts of the steps of a completion and its trajectory -> one number for each step; may be async.
StepFunction = Callable[[list[str], Trajectory], Sequence[float]]


class ProcessReward(RewardComponent):
    """Sum, mean or minimum of the scores of a completion's steps, see `ProcessRewardSettings`.

    It also stores in `Rollout.step_scores` where each step ends and its score, for credit by step. A rollout whose
    steps cannot be scored has no reward.
    Metrics: steps (mean number), step_score (mean over all steps), first_low (mean share of the steps before the first
    one with a score below 0.5).
    """

    def __init__(
        self,
        settings: ProcessRewardSettings,
        *,
        scorer: StepScorer | None = None,
        decode: DecodeIds | None = None,
        timeout_s: float | None = None,
        has_too_many: Callable[[int, int], bool] = lambda failed, played: failed > 0,
    ) -> None:
        """Import the function, if the settings name one.

        Args:
            scorer: reward model of steps; needed without a function when the reward is called.
            decode: of the policy's tokenizer; needed when the reward is called.
            timeout_s: time limit of one call of the function.
        Raises: SettingsError if the function cannot be imported.
        """
        super().__init__()
        self.settings, self._scorer, self._decode = settings, scorer, decode
        self._timeout_s, self._has_too_many = timeout_s, has_too_many
        self._function: StepFunction | None = None
        if settings.function is not None:
            self._function = import_function(settings.function, "reward_options.process.function")

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float | None]:
        """Return one number per rollout; None = its steps could not be scored."""
        if self._decode is None:
            raise RewardError("needs the policy's tokenizer; train with rl_core.policy_gradient")
        self.failed = {}
        steps = [self._find_steps(index, rollout) for index, rollout in enumerate(rollouts)]
        scores = self._score_steps(rollouts, steps)
        values: list[float | None] = []
        for rollout, step_ends, row in zip(rollouts, steps, scores, strict=True):
            rollout.step_scores = []
            if row is None:
                values.append(None)
                continue
            rollout.step_scores = list(zip((end for _, end in step_ends), row, strict=True))
            scores_N = torch.tensor(row, dtype=torch.float64)
            values.append(float(aggregate_steps(scores_N, self.settings.aggregate)))
        known = [row for row in scores if row]
        if known:
            self.metrics = {
                "steps": fmean(map(len, known)),
                "step_score": fmean(score for row in known for score in row),
                "first_low": fmean(_measure_first_low(row) for row in known),
            }
        return values

    def _find_steps(self, index: int, rollout: Rollout) -> list[tuple[str, int]]:
        """Return text and last token of each step, over all turns that carry loss; [] = it has none (recorded)."""
        assert self._decode is not None
        steps: list[tuple[str, int]] = []
        try:
            tokens_of_turns = rollout.list_turn_tokens()
        except DataError as error:
            raise RewardError(str(error)) from error
        for turn, tokens in zip(rollout.trajectory.turns, tokens_of_turns, strict=True):
            if not len(tokens):
                continue
            ids = rollout.completion_ids[tokens.start : tokens.stop]
            # The end-of-turn token belongs to the last step.
            parts = split_into_steps(turn.action, self.settings.delimiter)
            ends = find_completing_tokens(ids, [part.end for part in parts], self._decode)
            ends[-1] = len(ids) - 1
            steps += [
                (part.text, tokens.start + end) for part, end in zip(parts, ends, strict=True)
            ]
        if not steps:
            self.failed[index] = SampleFailure("has no step: nothing was sampled")
        return steps

    def _score_steps(
        self, rollouts: Sequence[Rollout], steps: Sequence[Sequence[tuple[str, int]]]
    ) -> list[list[float] | None]:
        """Return the scores of each rollout's steps; None = it failed, or was not tried after too many failures."""
        scores: list[list[float] | None] = [None] * len(rollouts)
        if self._function is not None:
            for index, rollout in enumerate(rollouts):
                if index in self.failed:
                    continue
                try:
                    scores[index] = self._call_function([text for text, _ in steps[index]], rollout)
                except _StepFailure as failure:
                    self.failed[index] = failure.failure
                    if self._has_too_many(len(self.failed), len(rollouts)):
                        break
            return scores
        if self._scorer is None:
            raise RewardError("needs a reward model of steps or reward_options.process.function")
        known = [index for index in range(len(rollouts)) if index not in self.failed]
        rows = [[*rollouts[index].prompt_ids, *rollouts[index].completion_ids] for index in known]
        for index in known:
            rollouts[index].check_one_context("a process reward")
        positions = [
            [len(rollouts[index].prompt_ids) + end for _, end in steps[index]] for index in known
        ]
        for index, row in zip(known, self._scorer(rows, positions), strict=True):
            if any(not math.isfinite(score) for score in row):
                raise RewardError(f"the reward model scored a step of rollout {index} with {row}")
            scores[index] = list(row)
        return scores

    def _call_function(self, texts: list[str], rollout: Rollout) -> list[float]:
        """Return the function's scores. Raises: _StepFailure if it raises, hangs or returns other than one a step."""
        assert self._function is not None
        name, seconds = f"reward {self.settings.function}", self._timeout_s
        try:
            arguments = (self._function, texts, rollout.trajectory)
            if seconds is None:
                values = _collect_scores(*arguments)
            else:
                values = call_with_timeout(seconds, name, _collect_scores, *arguments)
        except TooManyHungCalls as error:
            raise RewardError(str(error)) from error
        except _StepFailure:
            raise
        except CallTimeout as error:
            raise _StepFailure(f"did not return within {seconds:g} s") from error
        # a reward must not end the run; CancelledError is no Exception
        except USER_CODE_ERRORS as error:
            trace = format_error_trace(error)
            raise _StepFailure(f"raised {type(error).__name__}: {error}", trace) from error
        if len(values) != len(texts):
            raise _StepFailure(f"gave {len(values)} scores for {len(texts)} steps")
        numbers = [parse_finite(value) for value in values]
        scores = [number for number in numbers if number is not None]
        if len(scores) < len(numbers):
            bad = values[numbers.index(None)]
            raise _StepFailure(f"gave {bad!r} for a step, no finite number")
        return scores


def _collect_scores(function: StepFunction, texts: list[str], trajectory: Trajectory) -> list[Any]:
    """Call the function, which may be async, and collect its scores within the time limit."""
    scores = complete_awaitable(function(texts, trajectory))
    if not is_value_list(scores):
        raise _StepFailure(f"gave {type(scores).__name__}, expected a list of numbers")
    return list(scores)


class _StepFailure(Exception):
    """Error: the function failed on one completion."""

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.failure = SampleFailure(text, trace)


def _measure_first_low(row: Sequence[float]) -> float:
    """Return the share of steps before the first one with a score below 0.5; 1 = none is below."""
    return next((index for index, score in enumerate(row) if score < 0.5), len(row)) / len(row)


def check_step_scorer(settings: ProcessRewardSettings, scorer: StepScorer | None) -> None:
    """Refuse a process reward that nothing scores. Raises: SettingsError."""
    if settings.function is None and scorer is None:
        raise SettingsError(
            "rewards.process: needs a reward model trained with `loss: process`, or reward_options.process.function, "
            "which scores steps"
        )
