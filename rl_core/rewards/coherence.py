"""Reward component: coherence of consecutive turns, without repetition and contradiction.

H hidden, N states.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import ClassVar

from torch.nn import functional

from rl_core.analysis.coherence_measures import band_score, contradictions, repetitions
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component
from rl_core.settings import CoherenceSettings
from rl_core.types import Rollout

__all__ = ["CoherenceReward"]


class CoherenceReward(Component):
    """Mean band score of consecutive turns - repetition (repeated turns) - contradiction (answers taken back).

    The states are the policy's own, averaged over each turn. A single turn has no predecessor and scores 1, so that
    additional turns earn nothing by themselves.
    Metrics: similarity and in_band (over pairs of turns), repetitions and contradictions (means over rollouts).
    """

    needs_states: ClassVar[bool] = True

    def __init__(self, settings: CoherenceSettings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float]:
        """One number for each rollout."""
        settings, values, similar = self.settings, [], []
        repeated = [repetitions(rollout.trajectory) for rollout in rollouts]
        taken_back = [contradictions(rollout.trajectory) for rollout in rollouts]
        for walk, repeats, changes in zip(states, repeated, taken_back, strict=True):
            turns_NH = walk.states_NH[1:]
            cosines = functional.cosine_similarity(turns_NH[:-1], turns_NH[1:], dim=-1).tolist()
            scores = [band_score(cosine, settings.low, settings.high) for cosine in cosines]
            flow = fmean(scores) if scores else 1.0
            values.append(flow - settings.repetition * repeats - settings.contradiction * changes)
            similar += cosines
        self.metrics = {"repetitions": fmean(repeated), "contradictions": fmean(taken_back)} if rollouts else {}
        if similar:
            self.metrics["similarity"] = fmean(similar)
            self.metrics["in_band"] = fmean(settings.low <= cosine <= settings.high for cosine in similar)
        return values
