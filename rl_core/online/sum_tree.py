"""Sum tree: sampling in proportion to priorities, with updates in logarithmic time.

Source: Schaul et al. 2015, arXiv:1511.05952, appendix B.2.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError

__all__ = ["SumTree"]


class SumTree:
    """Non-negative priorities of numbered leaves, and the sums over every aligned power of two of them.

    A parent is always the sum of its two children as they are, never changed by a difference: so rounding does not add
    up, and equal priorities give equal trees whatever happened before.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise DataError(f"capacity: {capacity} must be at least 1")
        self.capacity = capacity
        self.leaves = 1 << (capacity - 1).bit_length()
        self.nodes = np.zeros(2 * self.leaves)  # node i has the children 2 i and 2 i + 1; leaf l is node leaves + l

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self.nodes[1])

    @property
    def priorities(self) -> NDArray[np.float64]:
        """Priorities by leaf (a view)."""
        found: NDArray[np.float64] = self.nodes[self.leaves : self.leaves + self.capacity]
        return found

    def set(self, leaf: int, priority: float) -> None:
        """Change one priority. Raises: DataError for a leaf that is not there, or a priority that is none."""
        if not 0 <= leaf < self.capacity:
            raise DataError(f"leaf {leaf}: the tree has {self.capacity}")
        if not 0 <= priority < np.inf:
            raise DataError(f"priority: {priority} must be finite and at least 0")
        node = self.leaves + leaf
        self.nodes[node] = priority
        while node > 1:
            node //= 2
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]

    def find(self, mass: float) -> int:
        """The leaf l with sum(priorities before l) <= mass < that sum + priority of l; never one of priority 0.

        Args:
            mass: 0 to `total`; rounding may take it to the total, which belongs to the last leaf with a priority.
        Raises: DataError where all priorities are 0.
        """
        if self.total <= 0:
            raise DataError("nothing can be drawn: all priorities are 0")
        node = 1
        while node < self.leaves:
            left = float(self.nodes[2 * node])
            if mass < left or self.nodes[2 * node + 1] <= 0:
                node = 2 * node
            else:
                mass -= left
                node = 2 * node + 1
        return node - self.leaves

    def state_dict(self) -> dict[str, Any]:
        """The priorities."""
        return {"priorities": self.priorities.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Raises: DataError for another capacity."""
        priorities = np.asarray(state["priorities"], dtype=np.float64)
        if priorities.shape != (self.capacity,):
            raise DataError(f"priorities: {priorities.shape}, the tree has {self.capacity} leaves")
        self.priorities[:] = priorities
        for node in range(self.leaves - 1, 0, -1):
            self.nodes[node] = self.nodes[2 * node] + self.nodes[2 * node + 1]
