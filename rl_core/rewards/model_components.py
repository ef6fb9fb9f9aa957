"""Reward component of a reward model: its score of each rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rl_core.errors import RewardError
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import RewardComponent
from rl_core.rewards.running_stats import RunningNorm
from rl_core.types import Rollout

# Token ids of complete sequences -> one score each.
Scorer = Callable[[Sequence[Sequence[int]]], Sequence[float]]


class LearnedReward(RewardComponent):
    """A reward model's score of each rollout's tokens, shifted and scaled to mean 0 and deviation 1 over the run.

    Bradley-Terry scores have no natural zero or unit; normalised, a weight means the same for every reward model.
    Metrics: score (mean of the raw scores), running_mean, running_std.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.norm = RunningNorm()

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float]:
        """Return one number per rollout. Raises: RewardError for a wrong number of scores or a non-finite one."""
        rows = [tuple(r.last_context) for r in rollouts]
        different = list(dict.fromkeys(rows))  # a confident policy repeats the same rollouts
        different_scores = [float(s) for s in self.scorer([list(row) for row in different])]
        if len(different_scores) != len(different):
            raise RewardError(
                f"the reward model gave {len(different_scores)} scores for {len(different)} different rollouts"
            )
        score_of = dict(zip(different, different_scores, strict=True))
        scores = [score_of[row] for row in rows]
        for index, score in enumerate(scores):
            if not math.isfinite(score):  # before it spoils the running mean
                raise RewardError(f"the reward model scored rollout {index} with {score}")
        self.norm.add_values(scores)
        if scores:
            self.metrics = {
                "score": fmean(scores),
                "running_mean": self.norm.mean,
                "running_std": self.norm.std,
            }
        return self.norm.normalise_values(scores)

    def state_dict(self) -> dict[str, Any]:
        """Return the running normalisation."""
        return {"norm": self.norm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.norm.load_state_dict(state["norm"])
