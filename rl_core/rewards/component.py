"""Base class of reward components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rl_core.models.turn_states import TurnStates
from rl_core.types import Rollout

__all__ = ["Component", "SampleFailure", "describe"]


class SampleFailure(NamedTuple):
    """Failure of a component on one sample."""

    error: str  # continues "reward 'name' ..."
    trace: str = ""


class Component(ABC):
    """Scores the rollouts of an iteration: one number for each; None = it could not score that one.

    `metrics` holds further scalars of the last call, logged as `reward/<component>/<name>`.
    """

    needs_states: ClassVar[bool] = False  # True = it is called with the policy's states, one entry per rollout

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.failed: dict[int, SampleFailure] = {}  # of the last call, by index of the rollout

    @abstractmethod
    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> Sequence[float | None]:
        """Score them. Raises: RewardError."""

    def check_columns(self, columns: Sequence[str] | None) -> None:  # noqa: B027 most look at no column
        """Raise SettingsError for a column that it reads and the environment's rows do not have; None = not known."""

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs; empty for most components."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 most have nothing to load
        """Inverse of `state_dict`."""


def describe(rollout: Rollout) -> str:
    """Environment, level, seed and sample of a rollout, for messages."""
    trajectory = rollout.trajectory
    return (
        f"environment '{trajectory.environment}', level '{trajectory.level}', seed {trajectory.seed}, "
        f"sample {trajectory.sample}"
    )
