"""Paired comparison of two models: differences with intervals, by level and kind, and the worst regressions.

Difference of two models on the same held-out episodes: how much, on what, how they behave, where they part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rl_core.analysis.episode_index import EpisodeIndex, EpisodeReference, PairedDifferences
from rl_core.analysis.significance_tests import sign_flip_test
from rl_core.analysis.statistics import Difference, bootstrap_mean, sign_test
from rl_core.analysis.trajectories import (
    find_turning_point,
    read_trajectories_with_offsets,
    read_trajectory_at,
)
from rl_core.errors import DataError
from rl_core.types import StopReason, Trajectory

MAX_REGRESSIONS = 10  # episodes listed


@dataclass(frozen=True, slots=True)
class PairedGroup:
    """Difference of success rates on one group of episodes."""

    name: str  # all, a level or a kind
    success: Difference | None  # None = unknown
    episodes: int
    wins: int  # episodes with a higher success rate of the second model; with a higher reward if success is unknown
    losses: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        success = None if self.success is None else self.success._asdict()
        return {**asdict(self), "success": success}


@dataclass(frozen=True)
class ModelComparison:
    """Second model minus first, on their common episodes."""

    first: str
    second: str
    total: PairedGroup
    reward: Difference
    by_level: list[PairedGroup]
    by_kind: list[PairedGroup]
    p_value: float  # exact sign test of wins against losses
    regressions: list[EpisodeReference]  # offsets and outcomes in the order (first, second)
    improvements: list[EpisodeReference]
    only_first: int  # episodes missing for the second, or with another prompt or target
    only_second: int
    measures: dict[str, Difference] = field(
        default_factory=dict
    )  # of those that an episode has, by name
    by_environment: list[PairedGroup] = field(default_factory=list)  # of a mixture

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""

        def ref(episode: EpisodeReference) -> dict[str, Any]:
            return {name: value for name, value in asdict(episode).items() if name != "offsets"}

        return {
            "first": self.first,
            "second": self.second,
            "total": self.total.to_json(),
            "reward": self.reward._asdict(),
            "by_environment": [paired.to_json() for paired in self.by_environment],
            "by_level": [paired.to_json() for paired in self.by_level],
            "by_kind": [paired.to_json() for paired in self.by_kind],
            "p_value": self.p_value,
            "regressions": [ref(episode) for episode in self.regressions],
            "improvements": [ref(episode) for episode in self.improvements],
            "only_first": self.only_first,
            "only_second": self.only_second,
            "measures": {name: difference._asdict() for name, difference in self.measures.items()},
        }


def compare_models(
    index: EpisodeIndex,
    names: list[str],
    first: int,
    second: int,
    *,
    samples: int,
    seed: int,
    confidence: float = 0.95,
) -> ModelComparison:
    """Compare two models of the index on their common episodes.

    Args:
        names: model names by index. first, second: indices; differences are second minus first.
        samples, seed, confidence: of the bootstrap over episodes.
    Raises: DataError if the two have no episode in common.
    """

    def row(name: str, pairs: PairedDifferences) -> PairedGroup:
        difference = None
        if pairs.knows_success:
            difference = bootstrap_mean(
                pairs.values, pairs.counts, samples=samples, seed=seed, confidence=confidence
            )
        signed = list(zip(pairs.values, pairs.counts, strict=True))
        wins, losses = sum(c for v, c in signed if v > 0), sum(c for v, c in signed if v < 0)
        return PairedGroup(name, difference, pairs.episodes, wins, losses)

    total = index.compute_paired_differences(first, second)
    if not total:
        raise DataError(
            f"models '{names[first]}' and '{names[second]}' have no episode in common (environment, level, seed, "
            "prompt and target must agree); evaluate both on the same held-out episodes"
        )
    pairs = total["all"]
    summed = row("all", pairs)
    return ModelComparison(
        first=names[first],
        second=names[second],
        total=summed,
        reward=_estimate_mean_difference(
            pairs.episodes, pairs.reward_sum, pairs.reward_squares, confidence
        ),
        by_environment=[
            row(name, group)
            for name, group in index.compute_paired_differences(
                first, second, "environment"
            ).items()
        ],
        by_level=[
            row(name, group)
            for name, group in index.compute_paired_differences(first, second, "level").items()
        ],
        by_kind=[
            row(name, group)
            for name, group in index.compute_paired_differences(first, second, "kind").items()
        ],
        p_value=sign_test(summed.wins, summed.losses),
        regressions=index.find_changed_episodes((first, second), worse=True, limit=MAX_REGRESSIONS),
        improvements=index.find_changed_episodes(
            (first, second), worse=False, limit=MAX_REGRESSIONS
        ),
        only_first=index.count_episodes(first) - pairs.episodes,
        only_second=index.count_episodes(second) - pairs.episodes,
        measures={
            name: _estimate_mean_difference(found.episodes, found.total, found.squares, confidence)
            for name, found in index.sum_paired_metrics(first, second).items()
        },
    )


def _estimate_mean_difference(
    n: int, total: float, squares: float, confidence: float
) -> Difference:
    """Mean of n paired differences with the normal interval mean +- z s / sqrt(n), s the std over episodes.

    A bootstrap would have to hold all of them; this needs only their sum and sum of squares.
    """
    mean = total / n
    if n < 2:
        return Difference(mean, mean, mean)
    variance = max(0.0, squares - n * mean * mean) / (n - 1)
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance / n)
    return Difference(mean, mean - half, mean + half)


@dataclass
class ModelBehaviour:
    """Conduct of a model in its episodes, per episode or per turn."""

    turns: float = 0.0  # mean per episode
    tool_calls: float = 0.0  # mean per episode
    action_tokens: float = 0.0  # mean per episode
    misuse_rate: float = 0.0  # share of turns with misuse of a tool
    truncated_rate: float = 0.0  # share of episodes that a limit cut
    ungrounded_rate: float = (
        0.0  # share of successes that do not follow from what was observed (lucky)
    )
    tools: dict[str, float] = field(default_factory=dict)  # calls per episode, by tool


@dataclass(frozen=True)
class DivergentEpisode:
    """One episode whose outcome differs, and the first turn that does."""

    level: str
    kind: str
    seed: int
    prompt: str
    target: str
    success: tuple[float | None, float | None]  # None = unknown
    reward: tuple[float, float]
    turn: (
        int | None
    )  # from 0; None = their actions are the same, so scoring or the environment differs
    before: tuple[str, ...]  # actions that both took before it
    actions: tuple[str, str]  # in that turn; "" = the episode had ended
    observations: tuple[str, str]  # after it; "" = none
    ends: tuple[str, str]  # reasons of the ends


@dataclass(frozen=True)
class ModelDiff:
    """Second model minus first, on their common episodes."""

    paired: ModelComparison
    # Two-sided sign-flip test of the mean difference of success (of the reward's sign, if unknown), on episodes.
    exact_p_value: float
    behaviour: tuple[ModelBehaviour, ModelBehaviour]
    worse: list[PairedGroup]  # levels and kinds on which the second does worse, the most first
    lost: list[DivergentEpisode]  # episodes that the first did better
    won: list[DivergentEpisode]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        paired = self.paired.to_json()
        for name in ("regressions", "improvements"):
            del paired[name]  # `lost` and `won` say more
        return {
            **paired,
            "exact_p_value": self.exact_p_value,
            "behaviour": {
                self.paired.first: asdict(self.behaviour[0]),
                self.paired.second: asdict(self.behaviour[1]),
            },
            "worse": [row.to_json() for row in self.worse],
            "lost": [asdict(episode) for episode in self.lost],
            "won": [asdict(episode) for episode in self.won],
        }


def diff_models(
    paths: tuple[Path, Path],
    names: tuple[str, str],
    *,
    examples: int = 5,
    samples: int = 2000,
    seed: int = 0,
) -> ModelDiff:
    """Compare two files of trajectories of the same held-out episodes, the second model with the first.

    The exact test is the sign-flip test (`paired_tests.sign_flip_test`) to both sides, 2 min(p of more, p of less), at
    most 1; with one sample an episode it is McNemar's.

    Args:
        examples: number of lost and of won episodes to list, largest differences first.
        samples, seed: of the bootstrap behind the intervals.
    Raises: DataError without a common episode, or for a file that does not hold trajectories.
    """
    with EpisodeIndex() as index:
        behaviour = [_index_trajectories(index, model, path) for model, path in enumerate(paths)]
        paired = compare_models(index, list(names), 0, 1, samples=samples, seed=seed)
        pairs = index.compute_paired_differences(0, 1)["all"]
        regressions = index.find_changed_episodes((0, 1), worse=True, limit=examples)
        improvements = index.find_changed_episodes((0, 1), worse=False, limit=examples)
    exact = [
        sign_flip_test([sign * value for value in pairs.values], pairs.counts)
        for sign in (1.0, -1.0)
    ]
    worse = [
        (row.success.difference, row)
        for row in (*paired.by_environment, *paired.by_level, *paired.by_kind)
        if row.success is not None and row.success.difference < 0
    ]
    return ModelDiff(
        paired=paired,
        exact_p_value=min(1.0, 2 * min(exact)),
        behaviour=(behaviour[0], behaviour[1]),
        worse=[row for _, row in sorted(worse, key=lambda entry: entry[0])],
        lost=[_read_divergent_episode(paths, episode) for episode in regressions],
        won=[_read_divergent_episode(paths, episode) for episode in improvements],
    )


def _index_trajectories(index: EpisodeIndex, model: int, path: Path) -> ModelBehaviour:
    """Put a file's trajectories into the index; returns their model's behaviour."""
    sums: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    for offset, trajectory in read_trajectories_with_offsets(path):
        index.add_trajectory(model, trajectory, offset)
        _count_behaviour(sums, tools, trajectory)
    episodes = max(1, sums["episodes"])
    return ModelBehaviour(
        turns=sums["turns"] / episodes,
        tool_calls=tools.total() / episodes,
        action_tokens=sums["tokens"] / episodes,
        misuse_rate=sums["misuse"] / max(1, sums["turns"]),
        truncated_rate=sums["truncated"] / episodes,
        ungrounded_rate=sums["lucky"] / max(1, sums["successes"]),
        tools={name: count / episodes for name, count in sorted(tools.items())},
    )


def _count_behaviour(sums: Counter[str], tools: Counter[str], trajectory: Trajectory) -> None:
    sums["episodes"] += 1
    sums["turns"] += len(trajectory.turns)
    sums["tokens"] += trajectory.num_action_tokens
    sums["misuse"] += sum(turn.is_error for turn in trajectory.turns)
    sums["truncated"] += trajectory.stop_reason != StopReason.TERMINATED
    sums["successes"] += bool(trajectory.success)
    sums["lucky"] += bool(trajectory.success) and trajectory.is_grounded is False
    tools.update(call.name for turn in trajectory.turns for call in turn.calls)


def _read_divergent_episode(paths: Sequence[Path], episode: EpisodeReference) -> DivergentEpisode:
    """Read an episode and the turn at which its first samples diverge."""
    one, other = (
        read_trajectory_at(path, offset)
        for path, offset in zip(paths, episode.offsets, strict=True)
    )
    turn = find_turning_point(one, other)

    def read_turn(trajectory: Trajectory, name: str) -> str:
        if turn is None or turn >= len(trajectory.turns):
            return ""
        return getattr(trajectory.turns[turn], name) or ""

    return DivergentEpisode(
        level=episode.level,
        kind=episode.kind,
        seed=episode.seed,
        prompt=one.prompt,
        target=one.target,
        success=(episode.success[0], episode.success[1]),
        reward=(episode.reward[0], episode.reward[1]),
        turn=turn,
        before=tuple(each.action for each in one.turns[: turn or 0]),
        actions=(read_turn(one, "action"), read_turn(other, "action")),
        observations=(read_turn(one, "observation"), read_turn(other, "observation")),
        ends=(str(one.stop_reason), str(other.stop_reason)),
    )
