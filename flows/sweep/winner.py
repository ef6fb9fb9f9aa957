"""The winner of a sweep: chosen on the evaluation's episodes, measured on fresh ones.

The best of many looks better than it is: its figure is the largest of many noisy ones (Cawley and Talbot 2010, JMLR
11:2079, section 5). So the choice and the figure are of different episodes. The configuration with the best mean over
its seeds on the evaluation's episodes wins. It and the next best ones (and the configuration's own settings, where they
are among the trials) then play held-out episodes that no trial was evaluated or validated on. The winner's figure is of
those episodes alone, and needs no correction, as they had no part in the choice (data splitting: Cox 1975,
doi:10.1093/biomet/62.2.441). Its gain over each other finalist is tested on the same episodes, with p-values adjusted
for their number (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flows.sweep.plan import SweepPlan
from flows.sweep.schedule import TrialOutcome, format_trial_name
from flows.sweep.search import Params
from rl_core.analysis.significance_tests import (
    adjust_p_values_holm,
    compute_seed_interval,
    run_gain_test,
)
from rl_core.analysis.statistics import Rate, bootstrap_paired_difference

ALPHA = 0.05
CHOICE_METHOD = (
    "chosen by the mean over seeds on the evaluation's episodes; measured on fresh held-out episodes, which had no "
    "part in the choice (data splitting, Cox 1975; Cawley and Talbot 2010); gains over the other finalists tested "
    "there, p-values adjusted by Holm 1979"
)


@dataclass(frozen=True)
class RankedConfiguration:
    """A configuration with its finished trials."""

    number: int
    params: Params
    values: tuple[float, ...]  # by seed
    interval: Rate  # of their mean
    models: dict[int, str]  # folders by seed

    @property
    def best_seed(self) -> int:
        """The seed whose model is offered: the first with the best value; the values were chosen by, too."""
        return max(self.models, key=lambda seed: self.values[list(self.models).index(seed)])


@dataclass(frozen=True)
class FinalistGain:
    """The winner against another finalist on fresh episodes, both as means over their seeds."""

    number: int
    difference: float
    low: float
    high: float
    p_value: float  # of no gain
    adjusted: float
    episodes: int


@dataclass(frozen=True)
class SweepChoice:
    """The winner, and what fresh episodes say of it."""

    winner: int
    params: Params
    metric: str
    chosen_by: float  # its value on the episodes of the choice
    method: str
    draw: int | None = None  # of the held-out episodes; None = there were no fresh ones
    fresh: dict[int, list[float]] = field(
        default_factory=dict
    )  # finalist -> value of each seed on fresh episodes
    comparisons: list[FinalistGain] = field(default_factory=list)
    why: str = ""  # there are no fresh episodes
    equal: int = 0  # other configurations with the same value

    def to_json(self) -> dict[str, Any]:
        """Plain dict."""
        return asdict(self)

    @property
    def interval(self) -> Rate | None:
        """The winner's mean on fresh episodes, with its interval over seeds."""
        return compute_seed_interval(self.fresh[self.winner]) if self.fresh else None

    def describe_choice(self, label: str) -> str:
        """The result in a sentence or two."""
        best = (
            f"is the first of {self.equal + 1} equally good"
            if self.equal
            else "is best of those tried"
        )
        how = f"{label} {best}: {self.metric} {_format_number(self.chosen_by)} where it was chosen"
        if (found := self.interval) is None:
            return f"{how}; {self.why or 'not measured on fresh episodes'}, so that figure is too good to be true"
        spread = (
            f" [{_format_number(found.low)}, {_format_number(found.high)}] over {found.n} seeds"
            if found.n > 1
            else ""
        )
        text = f"{how}, {_format_number(found.rate)}{spread} on fresh held-out episodes"
        if alike := [one for one in self.comparisons if one.adjusted > ALPHA]:
            return f"{text}; not better for sure than {len(alike)} of {len(self.comparisons)} other finalists"
        return (
            f"{text}; better than the other finalists (adjusted p at most {ALPHA})"
            if self.comparisons
            else text
        )


def _format_number(value: float) -> str:
    return f"{value:.4g}"


def rank_configurations(
    outcomes: Mapping[tuple[int, int], TrialOutcome], plan: SweepPlan
) -> list[RankedConfiguration]:
    """Configurations all of whose seeds have finished, the best first; equal ones in the order of their numbers."""
    found = []
    for number in sorted({number for number, _ in outcomes}):
        trials = [outcomes.get((number, seed)) for seed in range(plan.seeds)]
        done = [
            trial
            for trial in trials
            if trial is not None and trial.status == "finished" and trial.value is not None
        ]
        if len(done) == plan.seeds:
            values = tuple(trial.value for trial in done if trial.value is not None)
            models = {trial.seed: trial.model for trial in done}
            found.append(
                RankedConfiguration(
                    number, done[0].params, values, compute_seed_interval(values), models
                )
            )
    return sorted(found, key=lambda one: one.interval.rate if plan.minimize else -one.interval.rate)


def select_finalists(
    ranked: Sequence[RankedConfiguration], plan: SweepPlan, base_params: Params
) -> list[RankedConfiguration]:
    """The best configurations, the winner first, and the configuration's own settings where they were tried."""
    first = list(ranked[: plan.finalists])
    return [*first, *(one for one in ranked[plan.finalists :] if one.params == base_params)]


def compare_finalists(
    winner: int,
    finalists: Sequence[RankedConfiguration],
    episodes: Mapping[str, Mapping[Any, float]],
    *,
    metric: str,
    seed: int,
) -> tuple[dict[int, list[float]], list[FinalistGain]]:
    """Values of the finalists on fresh episodes, and the winner's gains.

    Args:
        episodes: model name (`model_name`) -> outcome by episode.
    """
    fresh = {
        one.number: [
            _compute_mean(episodes[format_trial_name(one.number, each)].values())
            for each in one.models
        ]
        for one in finalists
    }
    means = {
        one.number: _average_by_episode(
            [episodes[format_trial_name(one.number, each)] for each in one.models]
        )
        for one in finalists
    }
    rows: list[tuple[int, Any, float, int]] = []
    for one in finalists:
        if one.number == winner:
            continue
        shared = sorted(means[winner].keys() & means[one.number].keys())
        ours, theirs = ([means[number][key] for key in shared] for number in (winner, one.number))
        interval = bootstrap_paired_difference(
            ours, theirs, samples=2000, seed=seed, confidence=1 - ALPHA
        )
        test = run_gain_test(
            [a - b for a, b in zip(ours, theirs, strict=True)],
            bounded=metric == "success",
            seed=seed,
        )
        rows.append((one.number, interval, test.p_value, len(shared)))
    adjusted = adjust_p_values_holm([p_value for _, _, p_value, _ in rows])
    return fresh, [
        FinalistGain(number, found.difference, found.low, found.high, p_value, corrected, count)
        for (number, found, p_value, count), corrected in zip(rows, adjusted, strict=True)
    ]


def _average_by_episode(seeds: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Mean over seeds of each episode that all of them have played."""
    shared = set.intersection(*(set(one) for one in seeds))
    return {key: _compute_mean(one[key] for one in seeds) for key in shared}


def _compute_mean(values: Any) -> float:
    kept = list(values)
    return sum(kept) / len(kept)
