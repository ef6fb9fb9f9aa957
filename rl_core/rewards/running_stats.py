"""Running mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class RunningNorm:
    """Mean and standard deviation of all values so far, merged batch by batch.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
    """

    def __init__(self, values: Sequence[float] = ()) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of (x - mean)^2
        self.add_values(values)

    @property
    def std(self) -> float:
        """Unbiased; 0 with fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def rms(self) -> float:
        """Root mean square; 0 without values."""
        return math.sqrt(self.mean**2 + self.squares / self.count) if self.count else 0.0

    def add_values(self, values: Sequence[float]) -> None:
        """Add a batch."""
        if not values:
            return
        count, mean = len(values), math.fsum(values) / len(values)
        self._merge_sums(count, mean, math.fsum((value - mean) ** 2 for value in values))

    def merge_stats(self, other: RunningNorm) -> None:
        """Add all values of another instance."""
        if other.count:
            self._merge_sums(other.count, other.mean, other.squares)

    def normalise_values(self, values: Sequence[float], eps: float = 1e-8) -> list[float]:
        """Return (x - mean) / std; 0 while the deviation is at most `eps`."""
        return [(value - self.mean) / self.std if self.std > eps else 0.0 for value in values]

    def state_dict(self) -> dict[str, float]:
        """Return the three sums."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.count, self.mean, self.squares = (
            int(state["count"]),
            float(state["mean"]),
            float(state["squares"]),
        )

    def _merge_sums(self, count: int, mean: float, squares: float) -> None:
        total = self.count + count
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total
