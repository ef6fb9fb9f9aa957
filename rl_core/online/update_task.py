"""Update tasks: the experiences of one update with rewards, advantages, learning rate and old distribution.

R rollouts of an experience, N loss tokens of a rollout, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.losses.advantages import GroupMethod, group_advantages
from rl_core.online.experience import Experience
from rl_core.online.experience_buffer import KeptExperience
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.labels import Label

__all__ = ["RunningBaseline", "ScoredExperience", "UpdateTask", "adaptive_learning_rate", "request_advantages"]


def adaptive_learning_rate(error: float, *, base: float, reference: float, low: float, high: float) -> float:
    """base error / reference, within [low, high].

    Args:
        error: root mean square of reward minus baseline over the update's rollouts; 0 or more.
        base: learning rate at `reference`. low, high: bounds.
    Raises: DataError for an error that is none, or bounds out of order.
    """
    if not 0 <= error < math.inf or not 0 < low <= high or reference <= 0 or base <= 0:
        raise DataError(f"learning rate: error {error}, reference {reference}, base {base}, bounds {low} to {high}")
    return min(max(base * error / reference, low), high)


def request_advantages(
    rewards_R: NDArray[np.float64], is_known_R: NDArray[np.bool_], baseline: float, method: GroupMethod
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages and errors (reward minus baseline) of one request's rollouts; 0 where nothing is known.

    Two or more known rollouts are compared with each other (`group_advantages`); a single one with the running mean of
    its environment and level.
    """
    advantages_R, errors_R = np.zeros(len(rewards_R)), np.zeros(len(rewards_R))
    known = np.flatnonzero(is_known_R)
    if len(known) > 1:
        values = rewards_R[known]
        advantages_R[known] = group_advantages(torch.from_numpy(values)[None], method=method)[0].numpy()
        errors_R[known] = values - values.mean()
    elif len(known) == 1:
        advantages_R[known] = errors_R[known] = rewards_R[known] - baseline
    return advantages_R, errors_R


class RunningBaseline:
    """Running mean of rewards by environment and level, its start corrected: m_t / (1 - decay^t)."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._sums: dict[str, tuple[float, int]] = {}

    def value(self, place: tuple[str, str]) -> float:
        """The mean; 0 before the first reward."""
        total, count = self._sums.get("/".join(place), (0.0, 0))
        return total / (1 - self.decay**count) if count else 0.0

    def update(self, place: tuple[str, str], reward: float) -> None:
        """Take one reward in."""
        total, count = self._sums.get("/".join(place), (0.0, 0))
        self._sums["/".join(place)] = (self.decay * total + (1 - self.decay) * reward, count + 1)

    def state_dict(self) -> dict[str, Any]:
        """Sums and counts by place."""
        return {place: [total, count] for place, (total, count) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._sums = {place: (float(total), int(count)) for place, (total, count) in state.items()}


@dataclass(frozen=True, slots=True)
class ScoredExperience:
    """An experience of an update with its rewards."""

    kept: KeptExperience
    experience: Experience  # that is learned from: the recorded one, or one with fresh rollouts
    label: Label  # as it was for this update; a better one may come
    weight: float  # importance weight of its draw
    rewards: RewardTable
    advantages_R: NDArray[np.float64]
    errors_R: NDArray[np.float64]

    @property
    def error(self) -> float:
        """Root mean square error of its known rollouts: its next priority."""
        known = self.errors_R[self.rewards.is_known_R]
        return float(np.sqrt(np.square(known).mean())) if len(known) else 0.0


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """Everything that one update takes in."""

    number: int  # of the update, from 1
    items: tuple[ScoredExperience, ...]
    learning_rate: float
    kl_coef: float

    @property
    def error(self) -> float:
        """Root mean square error over all known rollouts."""
        return rms_error(self.items)


def rms_error(items: Sequence[ScoredExperience]) -> float:
    """Root mean square of reward minus baseline over the known rollouts of all experiences; 0 without one."""
    errors = [item.errors_R[item.rewards.is_known_R] for item in items]
    flat = np.concatenate(errors) if errors else np.zeros(0)
    return float(np.sqrt(np.square(flat).mean())) if len(flat) else 0.0
