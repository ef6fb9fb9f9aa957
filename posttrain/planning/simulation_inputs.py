"""Inputs of a simulation: layout of the run, sizes of its rollouts, rates from the metrics of a finished stage."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rl_core.errors import DataError, SettingsError
from rl_core.settings.planning import ClusterRates, LogNormalSpread

# Share of the decoding time that grows with the rows; a run with one batch size cannot measure it.
DEFAULT_ROW_SHARE = 0.5
_P90 = 1.2816  # of the standard normal distribution


class SizeDistribution(Protocol):
    """Distribution of sizes."""

    def draw_values(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw independent values, float64 of this shape."""


@dataclass(frozen=True, kw_only=True)
class RolloutSizeDistributions:
    """Distributions of an episode's parts. A group's values depend only on its number and the seed."""

    turns: int
    tokens: SizeDistribution  # of an action
    tools: SizeDistribution  # seconds between two actions

    @classmethod
    def from_rates(cls, rates: ClusterRates) -> RolloutSizeDistributions:
        """Return the distributions of the settings."""
        return cls(turns=rates.turns, tokens=rates.tokens, tools=rates.tools)

    def draw_group(self, seed: int, group_number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens [count, turns] (integers of at least 1) and tool seconds [count, turns - 1] of one group."""
        generator = np.random.default_rng([seed, group_number])
        tokens = np.maximum(1.0, np.rint(self.tokens.draw_values(generator, (count, self.turns))))
        return tokens, self.tools.draw_values(generator, (count, self.turns - 1))


@dataclass(frozen=True, kw_only=True)
class ClusterLayout:
    """Batch, processes and schedule of a run."""

    prompts: int  # P, groups that an iteration learns from
    group_size: int  # G
    workers: int = 1
    trainers: int = 1  # share the tokens of an update evenly
    slots: int = 128  # sequences that a worker decodes concurrently
    max_staleness: int = 0  # 0 = rollouts and updates take turns
    partial: Literal["keep", "drop"] = "keep"
    rejoin: Literal["together", "ready"] = "ready"  # if synchronous; asynchronous is always ready
    tasks_each: int = 2  # of a synchronous collection, for each of several workers
    refill: bool = True  # asynchronous: fill free slots; False = wait until all of a run have ended
    shares_gpus: bool = False  # synchronous: the same GPUs are workers and trainers in turns
    cores: int | None = None  # shared by all processes; None = each has its own machine
    # Slowdown of shared cores with 1, 2, 3 ... computing processes.
    crowding: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the values. Raises: SettingsError for an impossible run."""
        for name in ("prompts", "group_size", "workers", "trainers", "slots", "tasks_each"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.shares_gpus and self.max_staleness:
            raise SettingsError(
                "shares_gpus: rollouts next to updates need separate GPUs; set max_staleness 0"
            )

    def compute_slowdown(self, count: int) -> float:
        """Return the slowdown of a slice while `count` processes want a core; waiting for a free core comes on top."""
        assert self.cores is not None
        if not self.crowding:
            return 1.0
        known = min(count, len(self.crowding))
        return self.crowding[known - 1] * min(1.0, self.cores / known)

    @property
    def gpus(self) -> int:
        """Number of GPUs of workers and trainers, each counted once."""
        if self.shares_gpus:
            return max(self.workers, self.trainers)
        return self.workers + self.trainers

    @property
    def max_groups_in_flight(self) -> int:
        """Number of groups that may be in flight together."""
        return self.prompts * (self.max_staleness + 1)

    def with_changes(self, **changes: object) -> ClusterLayout:
        """Return a copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def estimate_cluster_rates(
    records: Sequence[tuple[int, Mapping[str, float]]],
    rollouts: int,
    max_tokens: int,
    *,
    row_share: float = DEFAULT_ROW_SHARE,
) -> ClusterRates:
    """Estimate the rates of one worker and one trainer from the metrics of iterations.

    The rates are medians without the first iteration. An episode counts as one action. Time spent waiting for the
    environment is excluded: the metrics do not contain its distribution, so `tools` has to be set by hand.
    Args:
        rollouts: of an iteration.
        max_tokens: limit of a rollout.
        row_share: share of the decoding time that grows with the number of rows; the rest is per step.
    Raises: DataError if the records are not those of a policy stage, or fewer than three iterations.
    """
    rows = [metrics for _, metrics in records if "perf/rollout_seconds" in metrics][1:]
    if len(rows) < 2:
        raise DataError(
            "fewer than three iterations with rollouts were recorded: run the policy stage first"
        )

    def compute_median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    waits = [
        row.get("perf/environment_seconds", 0.0) + row.get("perf/weight_sync_seconds", 0.0)
        for row in rows
    ]
    decoding = statistics.median(
        max(0.0, row["perf/rollout_seconds"] - wait) for row, wait in zip(rows, waits, strict=True)
    )
    tokens = compute_median("train/action_tokens")
    low = max(1.0, compute_median("train/action_tokens_p10"))
    high = compute_median("train/action_tokens_p90")
    sigma = max(0.0, math.log(max(low, high) / low) / (2 * _P90))
    spread = LogNormalSpread(mean=tokens, sigma=min(4.0, round(sigma, 3)), most=float(max_tokens))
    samples = spread.draw_values(np.random.default_rng(0), (200, rollouts))
    longest = float(np.mean(samples.max(axis=1)))
    update = compute_median("perf/update_seconds") + compute_median("perf/reward_seconds")
    return ClusterRates(
        step_seconds=(1 - row_share) * decoding / max(1.0, longest),
        row_seconds=row_share * decoding / max(1.0, tokens * rollouts),
        token_seconds=update / max(1.0, tokens * rollouts),
        load_seconds=compute_median("perf/weight_sync_seconds"),
        tokens=spread,
    )
