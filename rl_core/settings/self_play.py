"""Settings of self-play: the opponents of a policy in two-player games, and baselines by role."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting


@dataclass(frozen=True, kw_only=True)
class SelfPlaySettings(Settings):
    """Opponents of the policy in a two-player game."""

    opponent: Literal["current", "pool", "random"] = setting(
        "pool",
        doc="who plays the other seat; current: the policy itself, and both seats are trained; pool: also its past "
        "versions; random: random legal moves",
    )
    pool_size: int = setting(
        8, ge=1, le=10_000, doc="snapshots in the pool; the first one is stored in addition"
    )
    snapshot_every: int = setting(
        10, ge=1, le=1_000_000, doc="iterations between two snapshots of the weights"
    )
    retention: Literal["newest", "reservoir"] = setting(
        "reservoir",
        doc="snapshots that stay in a full pool; reservoir: a uniform sample of all past ones (Vitter 1985)",
    )
    current_share: float = setting(
        0.5,
        ge=0,
        le=1,
        doc="pool: share of the pairs of prompts that are played against the current policy instead of a snapshot",
    )
    opponents_per_iteration: int = setting(
        2,
        ge=1,
        le=1_000,
        doc="different snapshots in one iteration at most; the weights are swapped once for each and each round of "
        "moves",
    )
    eval_games: int = setting(
        200,
        ge=2,
        le=1_000_000,
        doc="games in an evaluation (eval_every) against the random player, and again against the first snapshot",
    )

    def check(self) -> None:
        """Refuse settings of a pool that no game would be played against."""
        if self.opponent == "pool" and self.current_share == 1:
            raise SettingsError(
                "current_share: 1 plays no game against the pool; set opponent: current, or a share below 1"
            )

    def count_current_pairs(self, num_pairs: int) -> int:
        """Return how many pairs of prompts of an iteration are played against the current policy, with a pool."""
        return min(num_pairs, math.floor(self.current_share * num_pairs + 0.5))


@dataclass(frozen=True, kw_only=True)
class RoleBaselineSettings(Settings):
    """Running mean of the rewards of each role, subtracted instead of the group's mean."""

    decay: float = setting(
        0.95,
        ge=0,
        lt=1,
        doc="alpha of b = alpha b + (1 - alpha) R for each role (arXiv:2506.24119); larger = slower. The mean covers "
        "about 1 / (1 - alpha) rollouts",
    )
    group_weight: float = setting(
        0.0,
        ge=0,
        lt=1,
        doc="share of the algorithm's own advantage: A = (1 - w) (R - b) + w A_group; needs an algorithm that "
        "compares rewards",
    )


def check_self_play(settings: Any) -> None:
    """Refuse role baselines that would not be used, and self-play that could not play both seats in this process.

    Args:
        settings: `PolicySettings`.
    Raises: SettingsError naming the setting.
    """
    if settings.role_baseline is not None:
        if settings.is_taught:
            raise SettingsError("role_baseline: a distillation compares no rewards; remove it")
        if settings.value_function is not None:
            raise SettingsError(
                f"role_baseline: not used by {settings.algorithm} with a critic, whose values are the baseline; remove "
                "one of the two"
            )
        if settings.role_baseline.group_weight and settings.algorithm == "gdpo":
            raise SettingsError(
                "role_baseline.group_weight: gdpo compares components of the reward, a role baseline its total; set 0"
            )
        if settings.advantages is not None:
            raise SettingsError(
                "role_baseline: not used by a custom advantage estimator; remove one of the two"
            )
    if settings.self_play is None:
        return
    if settings.is_taught:
        raise SettingsError("self_play: a distillation learns from its teacher; remove it")
    if settings.prompts_per_iteration % 2:
        raise SettingsError(
            "self_play: each deal is played from both seats, so prompts_per_iteration "
            f"{settings.prompts_per_iteration} must be even"
        )
    num_pairs = settings.prompts_per_iteration // 2
    plays_pool = settings.self_play.opponent == "pool"
    if plays_pool and settings.self_play.count_current_pairs(num_pairs) == num_pairs:
        raise SettingsError(
            f"self_play.current_share: {settings.self_play.current_share:g} of {num_pairs} pairs of prompts rounds to "
            "all of them, so no game is played against the pool; lower it, or raise prompts_per_iteration"
        )
    if settings.sampling_tries:
        raise SettingsError(
            "self_play: dynamic_sampling_tries would replace groups of one seat only; set it to 0"
        )
    rollouts = settings.rollouts
    if rollouts.workers != "in_process" or rollouts.replay_schedule is not None:
        raise SettingsError(
            f"self_play: rollouts.workers {rollouts.workers} sample from one version of the weights, but opponents "
            "need several; set workers: in_process, without replay_schedule"
        )
    if settings.launch.kind != "in_process":
        raise SettingsError(
            f"self_play: launch.kind {settings.launch.kind} shards the weights, which opponents' weights replace "
            "during a game; leave launch.kind out"
        )
