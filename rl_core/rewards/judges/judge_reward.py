"""Reward of a judge: scores, rubrics, rankings or pairwise comparisons of the rollouts of each prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rl_core.errors import RewardError, SettingsError, suggest_name
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import RewardComponent, SampleFailure
from rl_core.rewards.judges.clients import JudgeQuestion, create_judge_client
from rl_core.rewards.judges.questions import (
    BUILTIN_NAMES,
    PLACEHOLDER,
    JudgedSample,
    build_choice_question,
    build_ranking_question,
    build_rubric_question,
    build_score_question,
)
from rl_core.rewards.judges.verdicts import (
    PositionCounts,
    choose_pairs,
    compute_ranking_wins,
    compute_rubric_score,
    compute_win_rates,
)
from rl_core.settings import JudgeSettings
from rl_core.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _GroupPlan:
    """Questions about the samples of one prompt."""

    members: list[list[int]]  # of each different candidate: its samples, as indices of the batch
    # key -> candidates that the question shows, in that order
    shown: dict[str, list[int]] = field(default_factory=dict)


class JudgeReward(RewardComponent):
    """Judge's score of each rollout in [0, 1], see `JudgeSettings.mode`.

    score and rubric: (score - lowest) / (highest - lowest), a rubric's as the weighted mean of its criteria. ranking
    and pairwise: win rate against the other samples of the prompt, ties counted half; equal samples are one candidate.
    A request that fails, or whose reply was cut or has no verdict, is repeated a bounded number of times; a rollout
    without any verdict is in `failed` and has no reward. Once `has_too_many` have failed, no further requests are sent.
    Complete replies with a verdict are cached in a folder by the digest of the request, so each request is sent once.
    Metrics: asked, cached (judgements), failed (rollouts), failed_requests, calls (of the run); of comparisons
    first_rate, tie_rate, contradiction_rate; of a rubric criterion/NAME; with labels agreement and its interval, kappa.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        has_too_many: Callable[[int, int], bool] = lambda failed, played: failed > 0,
    ) -> None:
        """Check the settings; `has_too_many` as in `UserReward`. Raises: SettingsError without a judge."""
        super().__init__()
        self.settings, self._has_too_many = settings, has_too_many
        self.client = create_judge_client(settings)
        self.calibration_metrics: dict[str, float] = {}  # logged with every iteration's

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Refuse placeholders that no column fills, see `RewardComponent`."""
        if columns is None:
            return
        known = [*BUILTIN_NAMES, *columns]
        name = "prompt" if self.settings.mode == "score" else "instructions"
        for match in PLACEHOLDER.finditer(getattr(self.settings, name)):
            if match[1] and match[1] not in known:
                raise SettingsError(
                    f"reward_options.judge.{name}: '{{{match[1]}}}' is none of {', '.join(known)}; "
                    f"{suggest_name(match[1], known)} Double literal braces"
                )

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float | None]:
        """Return one number per rollout; None = not judged. Raises: RewardError if the budget of calls is spent."""
        sizes = self.group_sizes or [1] * len(rollouts)
        if sum(sizes) != len(rollouts):
            raise RewardError(f"the groups hold {sum(sizes)} rollouts, not {len(rollouts)}")
        samples = [
            JudgedSample(
                rollout.trajectory.prompt,
                rollout.trajectory.completion,
                rollout.trajectory.target,
                rollout.trajectory.row,
            )
            for rollout in rollouts
        ]
        return self.judge_samples(samples, sizes)

    def judge_samples(
        self, samples: Sequence[JudgedSample], sizes: Sequence[int]
    ) -> list[float | None]:
        """Judge samples, and set `failed` and `metrics`.

        Args:
            sizes: of the groups of samples of one prompt, in order.
        Returns: one number in [0, 1] for each; None = not judged.
        """
        questions: dict[str, JudgeQuestion] = {}
        plans: list[_GroupPlan] = []
        start = 0
        for size in sizes:
            plans.append(self._plan_questions(samples, list(range(start, start + size)), questions))
            start += size
        verdicts: dict[str, Any] = {}
        for key, question in questions.items():
            cached = self.client.cache.read_verdict(key, question.read)
            if cached is not None:
                verdicts[key] = cached
        missing = {key: question for key, question in questions.items() if key not in verdicts}
        reasons = self._request_missing(missing, verdicts, plans, len(samples))
        scores: list[float | None] = [None] * len(samples)
        position = PositionCounts()
        criteria: dict[str, list[float]] = {}
        for plan in plans:
            values = self._score_candidates(plan, verdicts, position, criteria)
            for members, value in zip(plan.members, values, strict=True):
                for index in members:
                    scores[index] = value
        self.failed = self._describe_failures(plans, scores, reasons)
        self.metrics = {
            "asked": float(len(missing)),
            "cached": float(len(questions) - len(missing)),
            "failed": float(len(self.failed)),
            "failed_requests": float(len(reasons)),
            "calls": float(self.client.budget.spent),
            **position.compute_metrics(),
            **{f"criterion/{name}": fmean(values) for name, values in criteria.items()},
            **self.calibration_metrics,
        }
        return scores

    def state_dict(self) -> dict[str, Any]:
        """Return the calls that the run has spent."""
        return {"calls": self.client.budget.spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; calls that this process has sent since are spent all the same."""
        budget = self.client.budget
        budget.spent = max(budget.spent, int(state.get("calls", 0)))

    def _plan_questions(
        self,
        samples: Sequence[JudgedSample],
        indices: Sequence[int],
        questions: dict[str, JudgeQuestion],
    ) -> _GroupPlan:
        """Add the questions about the samples of one prompt, equal ones as one candidate."""
        settings = self.settings
        by_content: dict[tuple[str, ...], list[int]] = {}
        for index in indices:
            sample = samples[index]  # in self-play the samples of a group answer different prompts
            key = (sample.completion, sample.prompt, sample.target)
            by_content.setdefault(key, []).append(index)
        # Independent of the order in which the samples were drawn.
        plan = _GroupPlan([by_content[texts] for texts in sorted(by_content)])
        candidates = [samples[members[0]] for members in plan.members]
        if settings.compares and len({sample.prompt for sample in candidates}) > 1:
            raise RewardError(
                f"mode {settings.mode} compares answers to one prompt, but those of a group answer different ones; use "
                "mode score or rubric"
            )

        def add_question(question: JudgeQuestion, shown: list[int]) -> None:
            key = self.client.compute_key(question)
            questions[key], plan.shown[key] = question, shown

        if not settings.compares:
            for number, sample in enumerate(candidates):
                if settings.mode == "score":
                    add_question(build_score_question(sample, settings), [number])
                    continue
                for order in range(settings.orders):
                    add_question(build_rubric_question(sample, settings, order), [number])
        elif len(candidates) > 1 and settings.mode == "ranking":
            for order in range(settings.orders):
                shown, question = build_ranking_question(candidates, settings, order)
                add_question(question, shown)
        elif len(candidates) > 1:
            for i, j in choose_pairs(len(candidates), settings.opponents):
                for first, second in ((i, j), (j, i)):
                    question = build_choice_question(
                        candidates[first], candidates[second], settings
                    )
                    add_question(question, [first, second])
        return plan

    def _request_missing(
        self,
        missing: Mapping[str, JudgeQuestion],
        verdicts: dict[str, Any],
        plans: Sequence[_GroupPlan],
        num_samples: int,
    ) -> dict[str, str]:
        """Ask what is not cached, add the verdicts, and return the reasons of requests that failed."""
        reasons: dict[str, str] = {}
        waiting: dict[tuple[int, int], set[str]] = {}  # (plan, candidate) -> open questions
        owners: dict[str, list[tuple[int, int]]] = {}
        for number, plan in enumerate(plans):
            for key, shown in plan.shown.items():
                for candidate in shown:
                    waiting.setdefault((number, candidate), set()).add(key)
                    owners.setdefault(key, []).append((number, candidate))
        num_failed = 0
        for key, verdict, reason in self.client.request_verdicts(missing):
            if not reason:
                verdicts[key] = verdict
                continue
            reasons[key] = reason
            for owner in owners[key]:
                waiting[owner].discard(key)
                if not waiting[owner]:
                    num_failed += len(plans[owner[0]].members[owner[1]])
            if num_failed and self._has_too_many(num_failed, num_samples):
                break
        return reasons

    def _score_candidates(
        self,
        plan: _GroupPlan,
        verdicts: Mapping[str, Any],
        position: PositionCounts,
        criteria: dict[str, list[float]],
    ) -> list[float | None]:
        """Return the score of each candidate of a prompt; None = no verdict."""
        settings = self.settings
        copies = [len(members) for members in plan.members]
        judged = [(shown, verdicts[key]) for key, shown in plan.shown.items() if key in verdicts]
        if not settings.compares:
            values: list[list[float]] = [[] for _ in copies]
            weights = {part.name: part.weight for part in settings.criteria}
            for (candidate,), verdict in judged:
                if settings.mode == "rubric":
                    for name, score in verdict.items():
                        criteria.setdefault(name, []).append(score)
                    verdict = compute_rubric_score(verdict, weights)
                values[candidate].append(verdict)
            return [fmean(part) if part else None for part in values]
        if sum(copies) == 1:
            return [None]  # nothing to compare it with
        wins: dict[tuple[int, int], list[float]] = {}
        for shown, verdict in judged:
            ranks = verdict if settings.mode == "ranking" else _rank_choice(verdict)
            position.add_order(ranks)
            for (i, j), value in compute_ranking_wins(ranks).items():
                wins.setdefault((shown[i], shown[j]), []).append(value)
        for (i, j), values_of_pair in wins.items():
            if i < j:
                position.add_verdicts(values_of_pair)
        if settings.mode == "pairwise":  # one order alone would hold the judge's position bias
            wins = {pair: verdicts for pair, verdicts in wins.items() if len(verdicts) == 2}
        return compute_win_rates(wins, copies)

    def _describe_failures(
        self,
        plans: Sequence[_GroupPlan],
        scores: Sequence[float | None],
        reasons: Mapping[str, str],
    ) -> dict[int, SampleFailure]:
        """Return why samples have no score; those that were not asked about after too many failures are left out."""
        failed: dict[int, SampleFailure] = {}
        for plan in plans:
            for candidate, members in enumerate(plan.members):
                if scores[members[0]] is not None:
                    continue
                problems = [
                    reasons[key]
                    for key, shown in plan.shown.items()
                    if candidate in shown and key in reasons
                ]
                if self.settings.compares and not plan.shown:
                    problems = [
                        f"no other sample of its prompt to compare it with ({self.settings.mode})"
                    ]
                for index in members if problems else ():
                    failed[index] = SampleFailure(f"could not judge it: {problems[0]}")
        return failed


def _rank_choice(value: float) -> list[int]:
    """Return the ranks of two answers of which the first won 1, 0.5 or 0."""
    return [0, 0] if value == 0.5 else [0, 1] if value == 1 else [1, 0]
