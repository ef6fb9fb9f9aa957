"""Description of a run to simulate: its batch, its workers and trainers, and how rollouts and updates take turns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rl_core.errors import SettingsError
from rl_core.settings.cluster_rates import ClusterRates

__all__ = ["ClusterLayout", "Drawable", "RolloutSizes"]


class Drawable(Protocol):
    """A distribution."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent values, float64 of this shape."""


@dataclass(frozen=True, kw_only=True)
class RolloutSizes:
    """Distributions of an episode's parts. A group's values follow from its number and the seed, in any schedule."""

    turns: int
    tokens: Drawable  # of an action
    tools: Drawable  # seconds between two actions

    @classmethod
    def of(cls, rates: ClusterRates) -> RolloutSizes:
        """Those that the settings name."""
        return cls(turns=rates.turns, tokens=rates.tokens, tools=rates.tools)

    def draw(self, seed: int, number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [count, turns] of one group, whole and at least 1; seconds of tools [count, turns - 1]."""
        generator = np.random.default_rng([seed, number])
        tokens = np.maximum(1.0, np.rint(self.tokens.draw(generator, (count, self.turns))))
        return tokens, self.tools.draw(generator, (count, self.turns - 1))


@dataclass(frozen=True, kw_only=True)
class ClusterLayout:
    """Batch, processes and schedule of a run."""

    prompts: int  # P, groups that an iteration learns from
    group_size: int  # G
    workers: int = 1
    trainers: int = 1  # tokens of an update are shared out evenly
    slots: int = 128  # sequences that a worker decodes at once
    max_staleness: int = 0  # 0 = rollouts and updates take turns
    partial: Literal["keep", "drop"] = "keep"
    rejoin: Literal["together", "ready"] = "ready"  # of synchronous rollouts; asynchronous ones are always ready
    tasks_each: int = 2  # of a synchronous collection, for each of several workers
    refill: bool = True  # asynchronous: free slots take the next groups; False = when all of a run have ended
    shares_gpus: bool = False  # synchronous: workers and trainers are the same GPUs, which change their work
    cores: int | None = None  # that all processes share; None = each has its own machine
    crowding: tuple[float, ...] = ()  # of shared cores: times as long as alone, where 1, 2, 3 ... processes compute

    def __post_init__(self) -> None:
        """Raises: SettingsError for a run that cannot be."""
        for name in ("prompts", "group_size", "workers", "trainers", "slots", "tasks_each"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.shares_gpus and self.max_staleness:
            raise SettingsError("shares_gpus: rollouts beside updates need GPUs of their own; set max_staleness 0")

    def slowdown(self, count: int) -> float:
        """Factor on a slice of a core while `count` processes want one; waiting for a free core comes on top."""
        assert self.cores is not None
        if not self.crowding:
            return 1.0
        known = min(count, len(self.crowding))
        return self.crowding[known - 1] * min(1.0, self.cores / known)

    @property
    def gpus(self) -> int:
        """Workers and trainers, each counted once."""
        return max(self.workers, self.trainers) if self.shares_gpus else self.workers + self.trainers

    @property
    def most_groups(self) -> int:
        """Groups that may be under way at once."""
        return self.prompts * (self.max_staleness + 1)

    def changed(self, **changes: object) -> ClusterLayout:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
