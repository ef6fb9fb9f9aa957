"""Dynamic sampling: groups whose rollouts earn the same reward carry no signal, and are replaced by new episodes.

Source: DAPO, arXiv:2503.14476, section 3.2; here a bounded number of rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rl_core.types import RolloutGroup

__all__ = ["SampledGroups", "sample_groups_with_signal"]

SAME_REWARD = 1e-6  # groups whose rewards differ by less carry no signal

Scored = tuple[list[RolloutGroup], dict[str, float]]  # groups with their rewards, and the rewards' metrics


@dataclass(slots=True)
class SampledGroups:
    """Groups of one iteration."""

    played: list[RolloutGroup] = field(default_factory=list)  # all of them: success and reward are measured here
    kept: list[RolloutGroup] = field(default_factory=list)  # those to train on
    scored: list[dict[str, float]] = field(default_factory=list)  # the rewards' metrics, round by round
    seconds: float = 0.0  # spent on playing

    def metrics(self) -> dict[str, float]:
        """Mean of the rewards' metrics over the rounds that have them, and the reward over all that counts."""
        names = dict.fromkeys(name for part in self.scored for name in part)
        metrics = {name: statistics.fmean(part[name] for part in self.scored if name in part) for name in names}
        totals = [rollout.reward for group in self.played for rollout in group.rollouts if not rollout.is_masked]
        return metrics | {"reward/mean": statistics.fmean(totals), "reward/std": statistics.pstdev(totals)}

    @property
    def dropped_rate(self) -> float:
        """Share of the groups that were played and not kept."""
        return 1 - len(self.kept) / len(self.played)


def sample_groups_with_signal(
    play: Callable[[int, int], list[RolloutGroup]],
    score: Callable[[list[RolloutGroup]], Scored],
    *,
    wanted: int,
    tries: int,
) -> SampledGroups:
    """Play groups until `wanted` are kept, in 1 + `tries` rounds at most.

    Args:
        play: given the number of groups and of the round, from 0; may give fewer, where episodes fail.
        tries: further rounds; 0 = every group is kept, also one without a difference in reward.
    """
    found = SampledGroups()
    for attempt in range(1 + tries):
        started = time.perf_counter()
        groups = play(wanted - len(found.kept), attempt)
        found.seconds += time.perf_counter() - started
        if not groups:
            continue
        groups, metrics = score(groups)
        found.scored.append(metrics)
        found.played += groups
        found.kept += [g for g in groups if not tries or max(g.rewards) - min(g.rewards) > SAME_REWARD]
        if len(found.kept) == wanted:
            break
    return found
