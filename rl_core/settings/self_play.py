"""Settings of self-play: the opponents of a policy in two-player games, and baselines by role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
