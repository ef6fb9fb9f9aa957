"""Spaces of Gymnasium environments as vectors: sizes, and conversion of observations and actions.

Suffixes: N environments, D numbers of an observation, A numbers of an action.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rl_core.errors import SettingsError
from rl_core.networks.actor_critic import ActionSpace

__all__ = ["action_space", "clipped_share", "observation_size", "observations_of", "to_environment"]


def _kind(space: Any) -> str:
    """Class name of a space; spaces are recognised by it, so that gymnasium need not be imported."""
    return next((base.__name__ for base in type(space).__mro__ if base.__name__ in ("Box", "Discrete")), "")


def action_space(space: Any) -> ActionSpace:
    """The space as a network acts in it. Raises: SettingsError for another than Discrete, or Box of numbers."""
    if _kind(space) == "Discrete":
        return ActionSpace("discrete", int(space.n), start=int(space.start))
    if _kind(space) == "Box" and np.issubdtype(space.dtype, np.floating) and math.prod(space.shape) > 0:
        low, high = (tuple(np.asarray(bound, np.float64).flatten().tolist()) for bound in (space.low, space.high))
        return ActionSpace("continuous", len(low), low=low, high=high, shape=tuple(space.shape))
    raise SettingsError(f"environment: actions are {space}; a network acts in Discrete, or in Box of real numbers")


def observation_size(space: Any) -> int:
    """Numbers of an observation: of a Box all of them, of a Discrete one for each value.

    Raises: SettingsError for another space.
    """
    if _kind(space) == "Discrete":
        return int(space.n)
    if _kind(space) == "Box" and math.prod(space.shape) > 0:
        return math.prod(space.shape)
    raise SettingsError(
        f"environment: observations are {space}; a network reads Box or Discrete (wrap others, as by "
        "gymnasium.wrappers.FlattenObservation, in a class of yours: environment_class)"
    )


def observations_of(found: Any, space: Any) -> np.ndarray:
    """Observations of several environments as float32 [N, D]; a Discrete one is 1 at its value and 0 elsewhere."""
    values = np.asarray(found)
    if _kind(space) == "Discrete":
        return np.eye(int(space.n), dtype=np.float32)[values.astype(np.int64) - int(space.start)]
    return values.reshape(len(values), -1).astype(np.float32)


def to_environment(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """Actions as the environments take them: counted from the space's start, or clipped to its bounds and shaped.

    Args:
        actions: int64 [N] counted from 0, or float [N, A].
    """
    if space.is_discrete:
        return actions + space.start
    clipped_NA = np.clip(actions, space.low, space.high).astype(np.float32)
    return clipped_NA.reshape(len(actions), *space.shape)


def clipped_share(actions: np.ndarray, space: ActionSpace) -> float:
    """Share of the numbers [..., A] that lie outside the bounds of a continuous space; 0 for a discrete one."""
    if space.is_discrete:
        return 0.0
    return float(((actions < np.array(space.low)) | (actions > np.array(space.high))).mean())
