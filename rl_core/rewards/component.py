"""What every component of the reward is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_core.models.turn_states import TurnStates
from rl_core.types import Rollout

__all__ = ["Component", "describe"]


class Component(ABC):
    """Called with the rollouts of an iteration, gives one number for each; None = it could not score that one.

    `metrics` says more about the last call; `reward/<component>/` goes before the names.
    """

    needs_states: ClassVar[bool] = False  # True = it is given the policy's states, one entry for each rollout

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @abstractmethod
    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> Sequence[float | None]:
        """Score them. Raises: RewardError."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; most components keep nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 most have nothing to load
        """Inverse of `state_dict`."""


def describe(rollout: Rollout) -> str:
    """Which sample it is, in words."""
    trajectory = rollout.trajectory
    return (
        f"environment '{trajectory.environment}', level '{trajectory.level}', seed {trajectory.seed}, "
        f"sample {trajectory.sample}"
    )
