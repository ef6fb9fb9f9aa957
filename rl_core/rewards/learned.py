"""The score of a reward model as a reward, normalised by what it has scored so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.errors import RewardError
from rl_core.types import Rollout

__all__ = ["LearnedReward", "RunningNorm", "Scorer"]

Scorer = Callable[[Sequence[Sequence[int]]], Sequence[float]]  # token ids of whole sequences -> one score each


class RunningNorm:
    """Mean and standard deviation of everything seen, merged batch by batch.

    Source: Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of (x - mean)^2

    @property
    def std(self) -> float:
        """Unbiased; 0 with fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Take in a batch."""
        if not values:
            return
        count, mean = len(values), math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        total = self.count + count
        difference = mean - self.mean
        self.squares += squares + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total

    def normalise(self, values: Sequence[float], eps: float = 1e-8) -> list[float]:
        """(x - mean) / std; 0 as long as nothing differs."""
        return [(value - self.mean) / self.std if self.std > eps else 0.0 for value in values]

    def state_dict(self) -> dict[str, float]:
        """The three sums."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])


class LearnedReward:
    """A reward model's score of each rollout's tokens, shifted and scaled to mean 0 and deviation 1 over the run.

    Bradley-Terry scores have no natural zero or unit; normalised, the weight means the same for every reward model.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.norm = RunningNorm()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Raises RewardError when the model gives another number of scores, or one that is not finite."""
        scores = [float(s) for s in self.scorer([[*r.prompt_ids, *r.completion_ids] for r in rollouts])]
        if len(scores) != len(rollouts):
            raise RewardError(f"the reward model gave {len(scores)} scores for {len(rollouts)} rollouts")
        for index, score in enumerate(scores):
            if not math.isfinite(score):  # before it spoils the running mean
                raise RewardError(f"the reward model scored rollout {index} with {score}")
        self.norm.update(scores)
        return self.norm.normalise(scores)

    def state_dict(self) -> dict[str, Any]:
        """The running normalisation."""
        return {"norm": self.norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.norm.load_state_dict(state["norm"])
