"""Description of a run to simulate: its batch, its workers and trainers, and how rollouts and updates take turns.

Rates of a simulation from the metrics of a finished policy stage.
"""

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


class SizeDistribution(Protocol):
    """A distribution."""

    def draw_values(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent values, float64 of this shape."""


@dataclass(frozen=True, kw_only=True)
class RolloutSizeDistributions:
    """Distributions of an episode's parts. A group's values follow from its number and the seed, in any schedule."""

    turns: int
    tokens: SizeDistribution  # of an action
    tools: SizeDistribution  # seconds between two actions

    @classmethod
    def from_rates(cls, rates: ClusterRates) -> RolloutSizeDistributions:
        """Those that the settings name."""
        return cls(turns=rates.turns, tokens=rates.tokens, tools=rates.tools)

    def draw_group(self, seed: int, group_number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [count, turns] of one group, whole and at least 1; seconds of tools [count, turns - 1]."""
        generator = np.random.default_rng([seed, group_number])
        tokens = np.maximum(1.0, np.rint(self.tokens.draw_values(generator, (count, self.turns))))
        return tokens, self.tools.draw_values(generator, (count, self.turns - 1))


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
    rejoin: Literal["together", "ready"] = (
        "ready"  # of synchronous rollouts; asynchronous ones are always ready
    )
    tasks_each: int = 2  # of a synchronous collection, for each of several workers
    refill: bool = (
        True  # asynchronous: free slots take the next groups; False = when all of a run have ended
    )
    shares_gpus: bool = (
        False  # synchronous: workers and trainers are the same GPUs, which change their work
    )
    cores: int | None = None  # that all processes share; None = each has its own machine
    crowding: tuple[
        float, ...
    ] = ()  # of shared cores: times as long as alone, where 1, 2, 3 ... processes compute

    def __post_init__(self) -> None:
        """Raises: SettingsError for a run that cannot be."""
        for name in ("prompts", "group_size", "workers", "trainers", "slots", "tasks_each"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.shares_gpus and self.max_staleness:
            raise SettingsError(
                "shares_gpus: rollouts beside updates need GPUs of their own; set max_staleness 0"
            )

    def compute_slowdown(self, count: int) -> float:
        """Factor on a slice of a core while `count` processes want one; waiting for a free core comes on top."""
        assert self.cores is not None
        if not self.crowding:
            return 1.0
        known = min(count, len(self.crowding))
        return self.crowding[known - 1] * min(1.0, self.cores / known)

    @property
    def gpus(self) -> int:
        """Workers and trainers, each counted once."""
        return (
            max(self.workers, self.trainers) if self.shares_gpus else self.workers + self.trainers
        )

    @property
    def max_groups_in_flight(self) -> int:
        """Groups that may be under way at once."""
        return self.prompts * (self.max_staleness + 1)

    def with_changes(self, **changes: object) -> ClusterLayout:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


DEFAULT_ROW_SHARE = (
    0.5  # of decoding time that grows with the rows; a run of one batch size cannot tell
)
_P90 = 1.2816  # of the standard normal distribution


def estimate_cluster_rates(
    records: Sequence[tuple[int, Mapping[str, float]]],
    rollouts: int,
    max_tokens: int,
    *,
    row_share: float = DEFAULT_ROW_SHARE,
) -> ClusterRates:
    """Rates of one worker and one trainer that did what these iterations did; medians, the first iteration left out.

    An episode counts as one action. Time in which the environment was waited for is left out: its distribution is not
    in the metrics, so `tools` has to be set by hand.
    Args:
        rollouts: of an iteration.
        most_tokens: limit of a rollout.
        row_share: of the decoding time that grows with the number of rows; the rest is of steps.
    Raises: DataError where the records are of no policy stage, or of fewer than three iterations.
    """
    rows = [metrics for _, metrics in records if "perf/rollout_seconds" in metrics][1:]
    if len(rows) < 2:
        raise DataError(
            "fewer than three iterations with rollouts were recorded: run the policy stage first"
        )

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    waits = [
        row.get("perf/environment_seconds", 0.0) + row.get("perf/weight_sync_seconds", 0.0)
        for row in rows
    ]
    decoding = statistics.median(
        max(0.0, row["perf/rollout_seconds"] - wait) for row, wait in zip(rows, waits, strict=True)
    )
    tokens = median("train/action_tokens")
    low, high = max(1.0, median("train/action_tokens_p10")), median("train/action_tokens_p90")
    sigma = max(0.0, math.log(max(low, high) / low) / (2 * _P90))
    spread = LogNormalSpread(mean=tokens, sigma=min(4.0, round(sigma, 3)), most=float(max_tokens))
    longest = float(
        np.mean(spread.draw_values(np.random.default_rng(0), (200, rollouts)).max(axis=1))
    )
    update = median("perf/update_seconds") + median("perf/reward_seconds")
    return ClusterRates(
        step_seconds=(1 - row_share) * decoding / max(1.0, longest),
        row_seconds=row_share * decoding / max(1.0, tokens * rollouts),
        token_seconds=update / max(1.0, tokens * rollouts),
        load_seconds=median("perf/weight_sync_seconds"),
        tokens=spread,
    )
