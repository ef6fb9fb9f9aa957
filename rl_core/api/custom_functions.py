"""User functions in the Python API: the arguments `reward`, `loss` and `advantages`.

A `reward` is a function, a component by name, several of them, or several with weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import REWARD_COMPONENTS
from rl_core.rewards.user_function import RewardFunction
from rl_core.settings import PolicySettings
from rl_core.user_code.digest import digest_function, unwrap_partial

FunctionSource: TypeAlias = "Callable[..., Any] | str"  # a function, or its import path
# A function of trajectories, a component's name or import path, several of them, or several with weights.
RewardSource: TypeAlias = (
    "RewardFunction | str | Sequence[RewardFunction | str] | Mapping[Any, float]"
)
DEFAULT_REWARDS = {"task": 1.0}


def apply_custom_functions(
    settings: PolicySettings, **sources: FunctionSource | None
) -> tuple[PolicySettings, dict[str, Callable[..., Any]]]:
    """Return the settings with the sources by setting name, and the sources that are functions.

    Raises: SettingsError if a setting is also in `settings`, or is neither a function nor a string.
    """
    changes: dict[str, Any] = {}
    functions: dict[str, Callable[..., Any]] = {}
    for field, value in sources.items():
        if value is None:
            continue
        if getattr(settings, field) is not None:
            raise SettingsError(
                f"{field}: given twice, here and in settings.{field}; leave one of them out"
            )
        if not callable(value) and not isinstance(value, str):
            raise SettingsError(f"{field}: {value!r} is neither a function nor an import path")
        changes[field] = value if isinstance(value, str) else resolve_function_name(value, field)
        if not isinstance(value, str):
            functions[field] = value
    return dataclasses.replace(settings, **changes) if changes else settings, functions


def resolve_function_name(function: Callable[..., Any], default: str) -> str:
    """Return a function's name for metrics and messages; `default` for a lambda."""
    inner, _ = unwrap_partial(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return default if name == "<lambda>" else name


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """Weights of all components by name, and the components passed as functions."""

    weights: dict[str, float]
    functions: dict[str, RewardFunction]

    def digest_functions(self) -> dict[str, str]:
        """Map names to digests of the functions' source, so that a resumed run notices an edited one."""
        return {name: digest_function(function, 16) for name, function in self.functions.items()}


def parse_reward(reward: RewardSource) -> RewardSpec:
    """Parse a `reward` argument into names and weights; functions get their `__name__`.

    Raises: SettingsError for anything that is not a reward, or two functions with the same name.
    """
    if callable(reward) or isinstance(reward, str):
        weighted_parts: list[tuple[Any, Any]] = [(reward, 1.0)]
    elif isinstance(reward, Mapping):
        weighted_parts = list(reward.items())
    elif isinstance(reward, Sequence):
        weighted_parts = [(part, 1.0) for part in reward]
    else:
        raise SettingsError(
            f"reward: {reward!r} is not a reward; pass a function that takes a list of trajectories"
        )
    if not weighted_parts:
        raise SettingsError("reward: contains no function and no component")
    weights: dict[str, float] = {}
    functions: dict[str, RewardFunction] = {}
    for part, weight in weighted_parts:
        if not callable(part) and not isinstance(part, str):
            raise SettingsError(
                f"reward: {part!r} is neither a function nor the name of a component"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise SettingsError(f"reward: the weight of {part!r} is {weight!r}, expected a number")
        name = part if isinstance(part, str) else _build_reward_name(part)
        if name in weights:
            raise SettingsError(
                f"reward: two parts are named '{name}'; give the functions different names"
            )
        weights[name] = float(weight)
        if not isinstance(part, str):
            functions[name] = part
    return RewardSpec(weights, functions)


def apply_reward_spec(settings: PolicySettings, spec: RewardSpec | None) -> PolicySettings:
    """Return the settings with these weights. Raises: SettingsError if `settings` names rewards too."""
    if spec is None:
        return settings
    if settings.rewards != DEFAULT_REWARDS:
        raise SettingsError(
            "reward: given twice, here and in settings.rewards; leave one of them out"
        )
    return dataclasses.replace(settings, rewards=spec.weights)


def _build_reward_name(function: Callable[..., Any]) -> str:
    """Return a name for metrics: that of the function, `reward` for a lambda."""
    name = resolve_function_name(function, "reward")
    return f"{name}_function" if name in REWARD_COMPONENTS else name
