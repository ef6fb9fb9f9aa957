"""Recipe of PPO for networks on plain observations."""

from __future__ import annotations

from typing import Any

from rl_core.api.recipes import Recipe
from rl_core.networks.trainer import NetworkTrainer
from rl_core.networks.vector_environment import EnvironmentFactory
from rl_core.settings import NetworkSettings


def build_network_recipe(
    maker: EnvironmentFactory | None,
    settings: NetworkSettings,
    seed: int,
    *,
    name: str,
    vector: Any = None,
) -> Recipe[NetworkTrainer]:
    """Build PPO on a vectorised environment; arguments: `NetworkTrainer`."""
    trainer = NetworkTrainer(maker, settings, seed, name=name, vector=vector)
    best_metric = "eval/episode_return" if settings.selects_best else None
    return Recipe(trainer, settings.iterations, best_metric)
