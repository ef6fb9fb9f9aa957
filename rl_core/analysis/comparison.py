"""Paired comparison of two models: differences with intervals, by level and kind, and the worst regressions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

from rl_core.analysis.episode_index import EpisodeIndex, EpisodeRef, PairCounts
from rl_core.analysis.statistics import Difference, bootstrap_mean, sign_test
from rl_core.analysis.trajectories import turning_point
from rl_core.errors import DataError

__all__ = ["Comparison", "PairedRow", "compare_models", "turning_point"]

REGRESSIONS = 10  # episodes listed


@dataclass(frozen=True, slots=True)
class PairedRow:
    """Difference of success rates on one group of episodes."""

    name: str  # all, a level or a kind
    success: Difference
    episodes: int
    wins: int  # episodes with a higher success rate of the second model
    losses: int


@dataclass(frozen=True)
class Comparison:
    """Second model minus first, on their common episodes."""

    first: str
    second: str
    total: PairedRow
    reward: Difference
    by_level: list[PairedRow]
    by_kind: list[PairedRow]
    p_value: float  # exact sign test of wins against losses
    regressions: list[EpisodeRef]  # offsets and outcomes in the order (first, second)
    improvements: list[EpisodeRef]
    only_first: int  # episodes missing for the second, or with another prompt or target
    only_second: int
    measures: dict[str, Difference] = field(default_factory=dict)  # of those that an episode has, by name

    def to_json(self) -> dict[str, Any]:
        """Plain dict."""

        def row(paired: PairedRow) -> dict[str, Any]:
            return {**asdict(paired), "success": paired.success._asdict()}

        def ref(episode: EpisodeRef) -> dict[str, Any]:
            return {name: value for name, value in asdict(episode).items() if name != "offsets"}

        return {
            "first": self.first,
            "second": self.second,
            "total": row(self.total),
            "reward": self.reward._asdict(),
            "by_level": [row(paired) for paired in self.by_level],
            "by_kind": [row(paired) for paired in self.by_kind],
            "p_value": self.p_value,
            "regressions": [ref(episode) for episode in self.regressions],
            "improvements": [ref(episode) for episode in self.improvements],
            "only_first": self.only_first,
            "only_second": self.only_second,
            "measures": {name: difference._asdict() for name, difference in self.measures.items()},
        }


def compare_models(
    index: EpisodeIndex, names: list[str], first: int, second: int, *, samples: int, seed: int, confidence: float = 0.95
) -> Comparison:
    """Paired comparison of two models of the index.

    Args:
        names: model names by index. first, second: indices; differences are second minus first.
        samples, seed, confidence: of the bootstrap over episodes.
    Raises: DataError if the two have no episode in common.
    """

    def row(name: str, pairs: PairCounts) -> PairedRow:
        difference = bootstrap_mean(pairs.values, pairs.counts, samples=samples, seed=seed, confidence=confidence)
        signed = list(zip(pairs.values, pairs.counts, strict=True))
        wins, losses = sum(c for v, c in signed if v > 0), sum(c for v, c in signed if v < 0)
        return PairedRow(name, difference, pairs.episodes, wins, losses)

    total = index.pairs(first, second)
    if not total:
        raise DataError(
            f"models '{names[first]}' and '{names[second]}' have no episode in common (environment, level, seed, "
            "prompt and target must agree); evaluate both on the same held-out episodes"
        )
    pairs = total["all"]
    summed = row("all", pairs)
    return Comparison(
        first=names[first],
        second=names[second],
        total=summed,
        reward=_mean_difference(pairs.episodes, pairs.reward_sum, pairs.reward_squares, confidence),
        by_level=[row(name, group) for name, group in index.pairs(first, second, "level").items()],
        by_kind=[row(name, group) for name, group in index.pairs(first, second, "kind").items()],
        p_value=sign_test(summed.wins, summed.losses),
        regressions=index.changed((first, second), worse=True, limit=REGRESSIONS),
        improvements=index.changed((first, second), worse=False, limit=REGRESSIONS),
        only_first=index.episodes(first) - pairs.episodes,
        only_second=index.episodes(second) - pairs.episodes,
        measures={
            name: _mean_difference(found.episodes, found.total, found.squares, confidence)
            for name, found in index.paired_measures(first, second).items()
        },
    )


def _mean_difference(n: int, total: float, squares: float, confidence: float) -> Difference:
    """Mean of n paired differences with the normal interval mean +- z s / sqrt(n), s the std over episodes.

    A bootstrap would have to hold all of them; this needs only their sum and sum of squares.
    """
    mean = total / n
    if n < 2:
        return Difference(mean, mean, mean)
    variance = max(0.0, squares - n * mean * mean) / (n - 1)
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance / n)
    return Difference(mean, mean - half, mean + half)
