"""Difference of two models on the same held-out episodes: how much, on what, how they behave, where they part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rl_core.analysis.comparison import Comparison, PairedRow, compare_models
from rl_core.analysis.episode_index import EpisodeIndex, EpisodeRef
from rl_core.analysis.paired_tests import sign_flip_test
from rl_core.analysis.trajectories import read_trajectory_at, read_with_offsets, turning_point
from rl_core.types import StopReason, Trajectory

__all__ = ["Behaviour", "ModelDiff", "PartedEpisode", "diff_models"]


@dataclass
class Behaviour:
    """Conduct of a model in its episodes, per episode or per turn."""

    turns: float = 0.0  # mean per episode
    tool_calls: float = 0.0  # mean per episode
    action_tokens: float = 0.0  # mean per episode
    misuse_rate: float = 0.0  # share of turns with misuse of a tool
    truncated_rate: float = 0.0  # share of episodes that a limit cut
    ungrounded_rate: float = 0.0  # share of successes that do not follow from what was observed (lucky)
    tools: dict[str, float] = field(default_factory=dict)  # calls per episode, by tool


@dataclass(frozen=True)
class PartedEpisode:
    """One episode whose outcome differs, and the first turn that does."""

    level: str
    kind: str
    seed: int
    prompt: str
    target: str
    success: tuple[float, float]
    reward: tuple[float, float]
    turn: int | None  # from 0; None = their actions are the same, so scoring or the environment differs
    before: tuple[str, ...]  # actions that both took before it
    actions: tuple[str, str]  # in that turn; "" = the episode had ended
    observations: tuple[str, str]  # after it; "" = none
    ends: tuple[str, str]  # reasons of the ends


@dataclass(frozen=True)
class ModelDiff:
    """Second model minus first, on their common episodes."""

    paired: Comparison
    exact_p_value: float  # two-sided sign-flip test of the mean difference of success, on episodes
    behaviour: tuple[Behaviour, Behaviour]
    worse: list[PairedRow]  # levels and kinds on which the second does worse, the most first
    lost: list[PartedEpisode]  # episodes that the first did better
    won: list[PartedEpisode]

    def to_json(self) -> dict[str, Any]:
        """Plain dict."""
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
            "worse": [{**asdict(row), "success": row.success._asdict()} for row in self.worse],
            "lost": [asdict(episode) for episode in self.lost],
            "won": [asdict(episode) for episode in self.won],
        }


def diff_models(
    paths: tuple[Path, Path], names: tuple[str, str], *, examples: int = 5, samples: int = 2000, seed: int = 0
) -> ModelDiff:
    """Compare two files of trajectories of the same held-out episodes, the second model with the first.

    The exact test is the sign-flip test (`paired_tests.sign_flip_test`) to both sides, 2 min(p of more, p of less), at
    most 1; with one sample an episode it is McNemar's.

    Args:
        examples: episodes that are told of those lost and of those won, the largest differences first.
        samples, seed: of the bootstrap behind the intervals.
    Raises: DataError without a common episode, or for a file that is none of trajectories.
    """
    with EpisodeIndex() as index:
        behaviour = [_add(index, model, path) for model, path in enumerate(paths)]
        paired = compare_models(index, list(names), 0, 1, samples=samples, seed=seed)
        pairs = index.pairs(0, 1)["all"]
        regressions = index.changed((0, 1), worse=True, limit=examples)
        improvements = index.changed((0, 1), worse=False, limit=examples)
    exact = [sign_flip_test([sign * value for value in pairs.values], pairs.counts) for sign in (1.0, -1.0)]
    groups = [row for row in (*paired.by_level, *paired.by_kind) if row.success.difference < 0]
    return ModelDiff(
        paired=paired,
        exact_p_value=min(1.0, 2 * min(exact)),
        behaviour=(behaviour[0], behaviour[1]),
        worse=sorted(groups, key=lambda row: row.success.difference),
        lost=[_parted(paths, episode) for episode in regressions],
        won=[_parted(paths, episode) for episode in improvements],
    )


def _add(index: EpisodeIndex, model: int, path: Path) -> Behaviour:
    """Put a file's trajectories into the index; returns their model's behaviour."""
    sums: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    for offset, trajectory in read_with_offsets(path):
        index.add(model, trajectory, offset)
        _count(sums, tools, trajectory)
    episodes = max(1, sums["episodes"])
    return Behaviour(
        turns=sums["turns"] / episodes,
        tool_calls=tools.total() / episodes,
        action_tokens=sums["tokens"] / episodes,
        misuse_rate=sums["misuse"] / max(1, sums["turns"]),
        truncated_rate=sums["truncated"] / episodes,
        ungrounded_rate=sums["lucky"] / max(1, sums["successes"]),
        tools={name: count / episodes for name, count in sorted(tools.items())},
    )


def _count(sums: Counter[str], tools: Counter[str], trajectory: Trajectory) -> None:
    sums["episodes"] += 1
    sums["turns"] += len(trajectory.turns)
    sums["tokens"] += trajectory.num_action_tokens
    sums["misuse"] += sum(turn.is_error for turn in trajectory.turns)
    sums["truncated"] += trajectory.stop_reason != StopReason.TERMINATED
    sums["successes"] += trajectory.success
    sums["lucky"] += trajectory.success and trajectory.is_grounded is False
    tools.update(call.name for turn in trajectory.turns for call in turn.calls)


def _parted(paths: Sequence[Path], episode: EpisodeRef) -> PartedEpisode:
    """An episode with the turn at which its first samples part."""
    one, other = (read_trajectory_at(path, offset) for path, offset in zip(paths, episode.offsets, strict=True))
    turn = turning_point(one, other)

    def said(trajectory: Trajectory, name: str) -> str:
        if turn is None or turn >= len(trajectory.turns):
            return ""
        return getattr(trajectory.turns[turn], name) or ""

    return PartedEpisode(
        level=episode.level,
        kind=episode.kind,
        seed=episode.seed,
        prompt=one.prompt,
        target=one.target,
        success=(episode.success[0], episode.success[1]),
        reward=(episode.reward[0], episode.reward[1]),
        turn=turn,
        before=tuple(each.action for each in one.turns[: turn or 0]),
        actions=(said(one, "action"), said(other, "action")),
        observations=(said(one, "observation"), said(other, "observation")),
        ends=(str(one.stop_reason), str(other.stop_reason)),
    )
