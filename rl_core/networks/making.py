"""Gymnasium environments by id, class or function, made in vectors that reset by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_core.environments.environment import HELDOUT_START
from rl_core.environments.optional_packages import require_module
from rl_core.errors import SettingsError
from rl_core.importing import import_named
from rl_core.networks.actor_critic import ActionSpace
from rl_core.networks.spaces import action_space, observation_size
from rl_core.networks.vector_environment import DISABLED
from rl_core.settings import NetworkSettings

__all__ = [
    "VALIDATION_SEEDS",
    "TEST_SEEDS",
    "TRAINING_SEEDS",
    "EnvironmentMaker",
    "check_environment",
    "environment_name",
    "make_vector",
    "single_maker",
    "spaces_of",
]

EnvironmentMaker = Callable[[], Any]  # a gymnasium.Env, a new one at each call

# Seeds of episodes: those that are reported share none with training or with the choice of the best weights.
TRAINING_SEEDS = range(HELDOUT_START)
VALIDATION_SEEDS = range(HELDOUT_START, HELDOUT_START + HELDOUT_START // 2)
TEST_SEEDS = range(HELDOUT_START + HELDOUT_START // 2, 2 * HELDOUT_START)


def gymnasium_module() -> Any:
    """The package. Raises: SettingsError with the command that installs it."""
    return require_module("gymnasium", "gymnasium", "environment: a network's environment")


def single_maker(settings: NetworkSettings) -> EnvironmentMaker:
    """Function that makes one environment as the settings name it.

    Raises: SettingsError without the package, for an unknown id, or a class that is none.
    """
    gymnasium = gymnasium_module()
    options = dict(settings.environment_options)
    if settings.environment_class is None:
        return lambda: gymnasium.make(settings.environment, **options)
    found = import_named(settings.environment_class, "environment_class")
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        raise SettingsError(f"environment_class: '{settings.environment_class}' is not a subclass of gymnasium.Env")
    return lambda: found(**options)


def make_vector(maker: EnvironmentMaker, count: int, vectorization: str = "sync") -> Any:
    """A gymnasium `VectorEnv` of `count` environments that are reset by hand. Raises: SettingsError."""
    gymnasium = gymnasium_module()
    kind = gymnasium.vector.AsyncVectorEnv if vectorization == "async" else gymnasium.vector.SyncVectorEnv
    try:
        # its observations are read into arrays of our own before the next step
        return kind([maker] * count, copy=False, autoreset_mode=gymnasium.vector.AutoresetMode(DISABLED))
    except Exception as error:
        raise SettingsError(_refusal(error)) from error


def environment_name(settings: NetworkSettings) -> str:
    """The environment as the settings name it, for people."""
    return settings.environment if settings.environment_class is None else settings.environment_class


def check_environment(settings: NetworkSettings) -> None:
    """Make one environment and look at its spaces. Raises: SettingsError naming the setting."""
    spaces_of(settings)


def spaces_of(settings: NetworkSettings) -> tuple[int, ActionSpace]:
    """Numbers of an observation, and the actions, of one environment. Raises: SettingsError naming the setting."""
    maker = single_maker(settings)
    try:
        environment = maker()
    except Exception as error:
        raise SettingsError(_refusal(error)) from error
    try:
        actions = action_space(environment.action_space)
        return observation_size(environment.observation_space), actions
    finally:
        environment.close()


def _refusal(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"environment: cannot be made ({type(error).__name__}: {lines[0][:300]})"
