"""Reward component: user-defined function that its user declared pure, so that no value is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.errors import RewardError
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import describe
from rl_core.rewards.user_function import RewardFunction, UserReward
from rl_core.rewards.value_cache import MISSING, ValueCache
from rl_core.settings import RewardSettings
from rl_core.types import Rollout

__all__ = ["CachedReward", "user_reward"]

TooMany = Callable[[int, int], bool]


def user_reward(name: str, options: RewardSettings, function: RewardFunction | None, too_many: TooMany) -> UserReward:
    """The component of a function; with a cache where the settings name it. Arguments: `UserReward`."""
    return (CachedReward if name in options.cache else UserReward)(name, options, function, too_many)


class CachedReward(UserReward):
    """As `UserReward`, with `ValueCache`: gives the same bits, and calls the function for new samples alone.

    One kept value in each call is computed again; another result is an error. Metric: cached, the share of the rollouts
    for which the function was not called.
    """

    def __init__(self, name: str, options: RewardSettings, function: RewardFunction | None, too_many: TooMany) -> None:
        """As `UserReward`. Raises: SettingsError for a function that cannot be pure."""
        super().__init__(name, options, function, too_many)
        self.cache = ValueCache(self.signature, options.cache_entries)

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float | None]:
        """See `UserReward`."""
        self._batch = rollouts
        keys = self.cache.keys(rollouts)
        kept = {key: value for key in keys if (value := self.cache.get(key)) is not MISSING}
        checked = next((key for key in keys if key in kept), None)
        places: dict[bytes, int] = {}  # of the rollouts that the function is called with, by key
        for index, key in enumerate(keys):
            if key not in kept or key == checked:
                places.setdefault(key, index)
        values = super().__call__([rollouts[index] for index in places.values()])
        if self.signature.logged:
            raise RewardError(
                f"reward '{self.name}' logs metrics, so it is not pure; take it out of reward_options.cache"
            )
        failed = {key: self.failed[place] for place, key in enumerate(places) if place in self.failed}
        found: dict[bytes, float | None] = {}  # None = failed, or left untried; the function's own None is in `nones`
        nones = {key for key, value in kept.items() if value is None}
        for place, (key, value) in enumerate(zip(places, values, strict=True)):
            found[key] = value
            if value is not None:
                own = None if place in self.skipped else value
                if key == checked and own != kept[key]:
                    raise RewardError(_impure(self.name, rollouts[places[key]], kept[key], own))
                self.cache.put(key, own)
                nones |= {key} if own is None else set()
        self.failed = {index: failed[key] for index, key in enumerate(keys) if key in failed}
        self.skipped = {index for index, key in enumerate(keys) if key in nones and key not in failed}
        if "skipped" in self.metrics:
            self.metrics["skipped"] = len(self.skipped) / max(1, len(keys))
        self.metrics["cached"] = 1 - len(places) / max(1, len(keys))
        known = {key: 0.0 if value is None else value for key, value in kept.items()} | found
        return [known[key] for key in keys]

    def state_dict(self) -> dict[str, Any]:
        """Values that are kept."""
        return {"cache": self.cache.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; a checkpoint from before the function was declared pure has nothing to load."""
        if "cache" in state:
            self.cache.load_state_dict(state["cache"])


def _impure(name: str, rollout: Rollout, kept: float | None, found: float | None) -> str:
    return (
        f"reward '{name}' gave {found!r} for {describe(rollout)}, and {kept!r} before, so it is not pure; take it out "
        "of reward_options.cache"
    )
