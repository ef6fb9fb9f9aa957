"""Contribution of each reward component to what the policy learned from, over a whole run."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rl_core.losses.advantages import STD_FLOOR
from rl_core.rewards.hacking_monitor import compute_point_biserial
from rl_core.rewards.orchestrator import WEIGHTED_PREFIX
from rl_core.rewards.running_stats import RunningNorm
from rl_core.storage.append_log import read_records

RewardRow = Mapping[str, Any]  # a line of the reward record, see `RewardRecord`


@dataclass(frozen=True, slots=True)
class RewardContribution:
    """One component's part in a run's reward. Rollouts are compared within groups, usually those of one prompt.

    Groups without the component, of other environments of a mixture, are left out.
    share: of the differences in reward within groups that differ, mean over these groups; all components and the length
        penalty add up to 1. None if no group differed.
    alone: share of all groups in which the reward differs, but would not without this component.
    ranked: share of the pairs of one group, a success and a failure, in which it scored the success higher; ties count
        half. None without such a pair.
    correlation: point-biserial, with success, over all rollouts. None where it is undefined.
    """

    share: float | None
    alone: float
    ranked: float | None
    correlation: float | None

    def to_metrics(self) -> dict[str, float]:
        """Return the defined numbers by name."""
        values = {
            "share": self.share,
            "alone": self.alone,
            "ranked": self.ranked,
            "correlation": self.correlation,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(slots=True)
class _ComponentSums:
    """Running sums of one component."""

    shares: float = 0.0
    alone: int = 0
    ranked: float = 0.0
    failed: RunningNorm = field(default_factory=RunningNorm)
    won: RunningNorm = field(default_factory=RunningNorm)
    played: int = 0  # groups
    differing: int = 0  # groups whose rewards differ
    pairs: int = 0  # of a success and a failure in one group

    def add_group(self, name: str, rows: Sequence[RewardRow]) -> None:
        """Add a group whose rollouts all have the component."""
        self.played += 1
        totals = [row["reward"] for row in rows]
        if _has_spread(totals):
            self.differing += 1
            added = [row["rewards"][WEIGHTED_PREFIX + name] for row in rows]
            self.shares += _compute_share(added, totals)
            others = [total - part for total, part in zip(totals, added, strict=True)]
            self.alone += not _has_spread(others)
        right = [row["rewards"][name] for row in rows if row["success"]]
        wrong = [row["rewards"][name] for row in rows if row["success"] is False]
        self.won.add_values(right)
        self.failed.add_values(wrong)
        self.ranked += _count_won_pairs(right, wrong)
        self.pairs += len(right) * len(wrong)


def compute_contributions(
    groups: Iterable[Sequence[RewardRow]], names: Sequence[str]
) -> dict[str, RewardContribution]:
    """Compute the contribution of each named component to the rewards of `groups`; {} without a group.

    A group's share of a component w is cov(w, r) / var(r): the differences of the reward r = sum of the weighted w
    split
    without remainder, as in a decomposition of variance. Every group that differs has the same weight, because
    algorithms
    that divide by the group's deviation learn as much from small differences as from large ones.
    Differences below a deviation of STD_FLOOR count as none, as in `losses.advantages`.
    """
    sums = {name: _ComponentSums() for name in names}
    is_empty = True
    for group in groups:
        scored = [row for row in group if not row["masked"]]
        is_empty = is_empty and not scored
        for name, sums_of in sums.items():
            # Environments of a mixture may have different components.
            rows = [row for row in scored if WEIGHTED_PREFIX + name in row["rewards"]]
            if rows:
                sums_of.add_group(name, rows)
    if is_empty:
        return {}
    return {
        name: RewardContribution(
            share=component.shares / component.differing if component.differing else None,
            alone=component.alone / component.played if component.played else 0.0,
            ranked=component.ranked / component.pairs if component.pairs else None,
            correlation=compute_point_biserial(component.failed, component.won),
        )
        for name, component in sums.items()
    }


def iter_compared_groups(
    record: Path, *, by_iteration: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rollouts of a reward record that were compared with each other, group by group, in order.

    Args:
        record: file written by `RewardRecord`, read line by line; damaged lines are reported and skipped.
        by_iteration: one group per iteration, for algorithms that do not compare the rollouts of one prompt.
    """
    group: list[dict[str, Any]] = []
    for row in read_records(record, consequence="the reward of one rollout is lost"):
        if group and _is_new_group(group[-1], row, by_iteration):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _is_new_group(last: RewardRow, row: RewardRow, by_iteration: bool) -> bool:
    """Return whether `row` starts a group; an episode drawn twice in one iteration makes two, as sample numbers
    restart.
    """
    if by_iteration:
        return bool(row["iteration"] != last["iteration"])
    keys = ("iteration", "level", "seed")
    return any(row[key] != last[key] for key in keys) or bool(row["sample"] <= last["sample"])


def _has_spread(values: Sequence[float]) -> bool:
    """Return whether the unbiased deviation reaches the floor below which advantages are 0."""
    if len(values) < 2:
        return False
    mean = fmean(values)
    return (
        math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
        >= STD_FLOOR
    )


def _count_won_pairs(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Count pairs of one of each in which `right` is higher; ties count half (the Mann-Whitney statistic)."""
    ordered = sorted(wrong)
    return (
        sum(
            bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value)
            for value in right
        )
        / 2
    )


def _compute_share(parts: Sequence[float], totals: Sequence[float]) -> float:
    mean_part, mean = fmean(parts), fmean(totals)
    shared = math.fsum(
        (part - mean_part) * (total - mean) for part, total in zip(parts, totals, strict=True)
    )
    return shared / math.fsum((total - mean) ** 2 for total in totals)
