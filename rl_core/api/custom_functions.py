"""Functions of the user's in the Python API: the arguments `loss` and `advantages`, and the digest of their code.

The `reward` argument of the Python API: functions, components by name, or both with weights.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import REWARD_COMPONENTS
from rl_core.rewards.user_function import RewardFunction
from rl_core.settings import PolicySettings, Settings, iter_code_paths
from rl_core.storage.manifest import digest_bytes
from rl_core.user_code import digest_user_code

FunctionSource: TypeAlias = "Callable[..., Any] | str"  # a function, or its import path


def apply_custom_functions(
    settings: PolicySettings, **sources: FunctionSource | None
) -> tuple[PolicySettings, dict[str, Callable[..., Any]]]:
    """The settings with what was handed in, by the name of its setting, and those that are functions.

    Raises: SettingsError where a setting is given twice, or holds neither a function nor a text.
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


def digest_custom_code(
    settings: Settings, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """Digests of the user's code that a run rests on, so that a resumed one notices an edited file.

    Of functions handed in their own source, and the modules that they are from (but for the script that runs).
    """
    modules = [
        getattr(_unwrap_partial(function), "__module__", None) for function in functions.values()
    ]
    paths = [path for _, path in iter_code_paths(settings) if ":" in path]
    found = digest_user_code(paths, [f"{name}:" for name in modules if name and name != "__main__"])
    return found | {f"{name}()": digest_source(function) for name, function in functions.items()}


def resolve_function_name(function: Callable[..., Any], default: str) -> str:
    """A name for metrics and messages: the function's own; `unnamed` for a lambda."""
    inner = _unwrap_partial(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return default if name == "<lambda>" else name


def digest_source(function: Callable[..., Any]) -> str:
    """Digest of a function's source, and of what a partial gives it; its name where there is no source."""
    inner, bound = _unwrap_partial(function), ""
    while isinstance(function, functools.partial):
        bound += f" {function.args} {sorted(function.keywords.items())}"
        function = function.func
    try:
        return digest_bytes((inspect.getsource(inner) + bound).encode())[:16]
    except (OSError, TypeError):  # a callable object, or typed at a prompt
        return getattr(inner, "__qualname__", type(inner).__qualname__) + bound


def _unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function within partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


# A function of trajectories, a component's name or import path, several of them, or several with weights.
RewardSource: TypeAlias = (
    "RewardFunction | str | Sequence[RewardFunction | str] | Mapping[Any, float]"
)
DEFAULT_REWARDS = {"task": 1.0}


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """Weights of all components by name, and those components that are functions handed in."""

    weights: dict[str, float]
    functions: dict[str, RewardFunction]

    def digest_functions(self) -> dict[str, str]:
        """Name -> digest of each function's source, so that a resumed run notices an edited one."""
        return {name: digest_source(function) for name, function in self.functions.items()}


def parse_reward(reward: RewardSource) -> RewardSpec:
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
        raise SettingsError(
            f"reward: {reward!r} is no reward; hand in a function that takes a list of trajectories"
        )
    if not weighted:
        raise SettingsError("reward: holds no function and no component")
    weights: dict[str, float] = {}
    functions: dict[str, RewardFunction] = {}
    for part, weight in weighted:
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


def apply_reward_spec(settings: PolicySettings, parts: RewardSpec | None) -> PolicySettings:
    """The settings with the weights that were handed in. Raises: SettingsError where `settings` names rewards too."""
    if parts is None:
        return settings
    if settings.rewards != DEFAULT_REWARDS:
        raise SettingsError(
            "reward: given twice, here and in settings.rewards; leave one of them out"
        )
    return dataclasses.replace(settings, rewards=parts.weights)


def _build_reward_name(function: Callable[..., Any]) -> str:
    """A name for metrics: the function's own, `reward` for a lambda."""
    name = resolve_function_name(function, "reward")
    return f"{name}_function" if name in REWARD_COMPONENTS else name
