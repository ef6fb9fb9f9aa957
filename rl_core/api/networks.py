"""Entry point of the Python API for networks on plain observations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.api.recipes.network import build_network_recipe
from rl_core.api.training import (
    ResumableTraining,
    resolve_output_folder,
    resolve_settings,
    select_decisive_settings,
)
from rl_core.errors import SettingsError
from rl_core.networks.actor_critic import ActorCritic
from rl_core.networks.network_files import publish_network
from rl_core.networks.trainer import NetworkTrainer, PlayedEpisodes
from rl_core.networks.vector_environment import (
    EnvironmentFactory,
    build_environment_factory,
    read_environment_name,
)
from rl_core.settings import NetworkSettings
from rl_core.trackers import TrackerSource
from rl_core.training.callbacks import Callback
from rl_core.user_code.digest import digest_settings_code


@dataclass(kw_only=True, repr=False)
class NetworkTraining(ResumableTraining[NetworkTrainer]):
    """Training of a network. `run` trains, `save` writes the network; both may be called again."""

    environment: str  # name of the environment

    @property
    def model(self) -> ActorCritic:
        """The networks in training: `model.act(observations)` returns the likeliest actions."""
        return self.trainer.model

    def test(self) -> PlayedEpisodes:
        """Return the returns of held-out episodes, whose seeds neither training nor validation uses. Raises:
        SettingsError.
        """
        return self.trainer.evaluate_on_test_seeds()

    def save(self, folder: str | Path) -> Path:
        """Write the networks as a folder for `rl_core.load_network`; a folder written earlier is replaced.

        Raises: CheckpointError if nothing was trained yet, or the folder cannot be written.
        """
        self.check_trained()
        publish_network(self.model, folder, self.environment)
        return Path(folder)


def network_ppo(
    environment: str | EnvironmentFactory | Any | None = None,
    *,
    settings: NetworkSettings | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> NetworkTraining:
    """Train a policy and a value network with PPO on a Gymnasium environment (extra `gymnasium`).

    Args:
        environment: an id ("CartPole-v1"), a `gymnasium.Env` class or a function that makes one, or a `VectorEnv`,
            whose autoreset mode is kept; None = what the settings name. A `VectorEnv` has no held-out episodes, and a
            resumed run starts new episodes in it; with the others a resume is exact bit for bit.
        settings: every option of the environment, networks, PPO, optimizer and loop.
        output: folder of metrics and checkpoints; a stopped run resumes there. None = nothing is written.
        others: as in `policy_gradient`.
    Raises: SettingsError, before anything is played.
    """
    settings = resolve_settings(settings, NetworkSettings)
    factory: EnvironmentFactory | None = None
    vector: Any = None
    if isinstance(environment, str):
        settings = dataclasses.replace(settings, environment=environment, environment_class=None)
    if environment is None or isinstance(environment, str):
        factory, name = build_environment_factory(settings), read_environment_name(settings)
    elif hasattr(environment, "single_observation_space"):
        vector, name = environment, type(environment).__name__
        settings = dataclasses.replace(settings, num_environments=vector.num_envs)
    elif callable(environment):
        factory = functools.partial(environment, **settings.environment_options)
        name = getattr(environment, "__qualname__", "environment")
    else:
        raise SettingsError(
            f"environment: a {type(environment).__name__}; pass an id, a function that makes one, or a VectorEnv"
        )
    if vector is not None and (settings.eval_every or settings.selects_best):
        raise SettingsError(
            "eval_every: a VectorEnv has no held-out episodes; pass a function that makes an environment"
        )
    recipe = build_network_recipe(factory, settings, seed, name=name, vector=vector)
    functions = {"environment": environment} if callable(environment) else {}
    fingerprint = {
        "algorithm": "network_ppo",
        "settings": select_decisive_settings(settings, ("environment_steps",)),
        "seed": seed,
        "environment": name,
        "code": digest_settings_code(settings, functions),
    }
    return NetworkTraining(
        "network_ppo",
        recipe,
        settings,
        fingerprint,
        resolve_output_folder(output),
        tracker,
        callbacks,
        environment=name,
    )
