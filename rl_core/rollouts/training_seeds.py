"""Seeds of training episodes: traversed in epochs where a level has few, sampled where it has many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_core.data.batches import DataOrder
from rl_core.environments.environment import Environment
from rl_core.errors import SettingsError
from rl_core.inference.sampling import sequence_seed

__all__ = ["SeedOrders", "training_seeds"]

EPOCH_SEEDS = 2**20  # levels of up to so many seeds are traversed in epochs; larger ones are sampled


def training_seeds(environment: Environment, level: str) -> Sequence[int]:
    """Seeds of the training episodes of a level. Raises: SettingsError where it has none."""
    seeds = environment.seeds_of("train", level)
    if not len(seeds):
        raise SettingsError(f"environment '{environment.name}' has no training episodes of level '{level}'")
    return seeds


class SeedOrders:
    """Draws training seeds: without replacement within an epoch of a level that has few, else uniformly."""

    def __init__(self, environment: Environment, seed: int) -> None:
        self._environment = environment
        self._seed = seed
        self._orders: dict[str, DataOrder] = {}  # of the levels that have few seeds

    def draw(self, level: str, rng: np.random.Generator) -> int:
        """One seed. Raises: SettingsError for a level without training episodes."""
        seeds = training_seeds(self._environment, level)
        if len(seeds) > EPOCH_SEEDS:
            return int(seeds[int(rng.integers(len(seeds)))])
        return int(seeds[self._order(level, len(seeds)).next()[0]])

    def state_dict(self) -> dict[str, Any]:
        """Position in the order of each level."""
        return {level: order.state_dict() for level, order in self._orders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._orders = {}
        for level, order in state.items():
            self._order(level, int(order["num_rows"])).load_state_dict(order)

    def _order(self, level: str, num_rows: int) -> DataOrder:
        if level not in self._orders:
            # 63 bits: a level's order is its own, whatever other levels there are
            seed = sequence_seed(self._seed, "order", level) % 2**63
            self._orders[level] = DataOrder(num_rows, batch_size=1, seed=seed)
        return self._orders[level]
