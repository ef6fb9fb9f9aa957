"""The `reward` argument of the Python API: functions, components by name, or both with weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rl_core.api.own_functions import function_name, source_digest
from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import COMPONENTS, RewardFunction
from rl_core.settings import PolicySettings

__all__ = ["RewardSource", "RewardParts", "reward_parts", "with_rewards"]

# A function of trajectories, a component's name or import path, several of them, or several with weights.
RewardSource: TypeAlias = "RewardFunction | str | Sequence[RewardFunction | str] | Mapping[Any, float]"
TASK_ALONE = {"task": 1.0}


@dataclasses.dataclass(frozen=True)
class RewardParts:
    """Weights of all components by name, and those components that are functions handed in."""

    weights: dict[str, float]
    functions: dict[str, RewardFunction]

    def fingerprint(self) -> dict[str, str]:
        """Name -> digest of each function's source, so that a resumed run notices an edited one."""
        return {name: source_digest(function) for name, function in self.functions.items()}


def reward_parts(reward: RewardSource) -> RewardParts:
    """Names and weights of what was handed in; a function is named by its own name.

    Raises: SettingsError for what is no reward, or two functions of one name.
    """
    if callable(reward) or isinstance(reward, str):
        weighted: list[tuple[Any, Any]] = [(reward, 1.0)]
    elif isinstance(reward, Mapping):
        weighted = list(reward.items())
    elif isinstance(reward, Sequence):
        weighted = [(part, 1.0) for part in reward]
    else:
        raise SettingsError(f"reward: {reward!r} is no reward; hand in a function that takes a list of trajectories")
    if not weighted:
        raise SettingsError("reward: holds no function and no component")
    weights: dict[str, float] = {}
    functions: dict[str, RewardFunction] = {}
    for part, weight in weighted:
        if not callable(part) and not isinstance(part, str):
            raise SettingsError(f"reward: {part!r} is neither a function nor the name of a component")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise SettingsError(f"reward: the weight of {part!r} is {weight!r}, expected a number")
        name = part if isinstance(part, str) else _name(part)
        if name in weights:
            raise SettingsError(f"reward: two parts are named '{name}'; give the functions different names")
        weights[name] = float(weight)
        if not isinstance(part, str):
            functions[name] = part
    return RewardParts(weights, functions)


def with_rewards(settings: PolicySettings, parts: RewardParts | None) -> PolicySettings:
    """The settings with the weights that were handed in. Raises: SettingsError where `settings` names rewards too."""
    if parts is None:
        return settings
    if settings.rewards != TASK_ALONE:
        raise SettingsError("reward: given twice, here and in settings.rewards; leave one of them out")
    return dataclasses.replace(settings, rewards=parts.weights)


def _name(function: Callable[..., Any]) -> str:
    """A name for metrics: the function's own, `reward` for a lambda."""
    name = function_name(function, "reward")
    return f"{name}_function" if name in COMPONENTS else name
