"""Reward component: score of a reward model, normalised over the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rl_core.errors import RewardError
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.rewards.running_stats import RunningNorm
from rl_core.types import Rollout

__all__ = ["LearnedReward", "Scorer"]

Scorer = Callable[[Sequence[Sequence[int]]], Sequence[float]]  # token ids of whole sequences -> one score each


class LearnedReward(Component):
    """A reward model's score of each rollout's tokens, shifted and scaled to mean 0 and deviation 1 over the run.

    Bradley-Terry scores have no natural zero or unit; normalised, a weight means the same for every reward model.
    Metrics: score (mean of the raw scores), running_mean, running_std.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.norm = RunningNorm()

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """Raises RewardError when the model gives another number of scores, or one that is not finite."""
        rows = [tuple(r.last_context) for r in rollouts]
        different = list(dict.fromkeys(rows))  # a policy that is sure of itself plays the same again and again
        found = [float(s) for s in self.scorer([list(row) for row in different])]
        if len(found) != len(different):
            raise RewardError(f"the reward model gave {len(found)} scores for {len(different)} different rollouts")
        score_of = dict(zip(different, found, strict=True))
        scores = [score_of[row] for row in rows]
        for index, score in enumerate(scores):
            if not math.isfinite(score):  # before it spoils the running mean
                raise RewardError(f"the reward model scored rollout {index} with {score}")
        self.norm.update(scores)
        if scores:
            self.metrics = {
                "score": fmean(scores), "running_mean": self.norm.mean, "running_std": self.norm.std
            }  # fmt: skip
        return self.norm.normalise(scores)

    def state_dict(self) -> dict[str, Any]:
        """The running normalisation."""
        return {"norm": self.norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.norm.load_state_dict(state["norm"])
