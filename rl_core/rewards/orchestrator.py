"""The reward that training uses: a weighted sum of named components."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rl_core.errors import RewardError, SettingsError, nearest
from rl_core.rewards.learned import LearnedReward, Scorer
from rl_core.rewards.task import task_rewards, tool_use_rewards
from rl_core.types import Rollout, RolloutGroup, Trajectory

__all__ = ["COMPONENTS", "RewardFunction", "RewardOrchestrator"]

RewardFunction = Callable[[list[Trajectory]], Sequence[float]]  # what a user writes
Component = Callable[[Sequence[Rollout]], Sequence[float]]

COMPONENTS: dict[str, str] = {
    "task": "what the environment gave",
    "learned": "score of the reward model, normalised over the run",
    "tool_use": "minus 1 for every turn that misused a tool",
}


class RewardOrchestrator:
    """Scores rollouts with every component and weighs the parts.

    A component is a name from COMPONENTS or an import path 'package.module:function' of a function that takes a list of
    Trajectory and gives as many numbers.
    """

    def __init__(self, weights: Mapping[str, float], *, scorer: Scorer | None = None) -> None:
        """`scorer`: what the component `learned` asks.

        Raises: SettingsError for an unknown name, a function that cannot be imported, or `learned` without a scorer.
        """
        if not weights:
            raise SettingsError("rewards: names no component; task: 1.0 is what the environment gives")
        self.weights = dict(weights)
        self.components: dict[str, Component] = {name: self._component(name, scorer) for name in weights}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Weigh the components otherwise from now on; those not named keep their weight.

        Raises: SettingsError for a component that this orchestrator was not made with.
        """
        for name in weights:
            if name not in self.components:
                raise SettingsError(f"rewards.{name}: is no component of this run; {nearest(name, self.components)}")
        self.weights = {**self.weights, **weights}

    def score(self, groups: Iterable[RolloutGroup]) -> dict[str, float]:
        """Set `trajectory.rewards` (raw parts), `trajectory.reward` and `rollout.reward` of every rollout.

        Returns: reward/mean, reward/std (over all rollouts), reward/<component> (mean raw part).
        Raises: RewardError naming the component and the sample when one raises, gives another number of values than
            there are rollouts, or a value that is no finite number.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not rollouts:
            return {}
        parts = {name: self._score(name, component, rollouts) for name, component in self.components.items()}
        for index, rollout in enumerate(rollouts):
            raw = {name: values[index] for name, values in parts.items()}
            # The environment's own reward stays in the record also where training does not use it.
            rollout.trajectory.rewards = {**rollout.trajectory.rewards, **raw}
            rollout.reward = math.fsum(self.weights[name] * value for name, value in raw.items())
            rollout.trajectory.reward = rollout.reward
        totals = [rollout.reward for rollout in rollouts]
        metrics = {"reward/mean": statistics.fmean(totals), "reward/std": statistics.pstdev(totals)}
        for name, values in parts.items():
            metrics[f"reward/{name.replace(':', '.')}"] = statistics.fmean(values)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State of the components that have one."""
        return {name: part.state_dict() for name, part in self.components.items() if isinstance(part, LearnedReward)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        for name, part in self.components.items():
            if isinstance(part, LearnedReward):
                part.load_state_dict(state[name])

    def _component(self, name: str, scorer: Scorer | None) -> Component:
        if name == "task":
            return task_rewards
        if name == "tool_use":
            return tool_use_rewards
        if name == "learned":
            if scorer is None:
                raise SettingsError(
                    "rewards.learned: needs a reward model; add the stage reward_model, or leave it out"
                )
            return LearnedReward(scorer)
        if ":" not in name:
            raise SettingsError(
                f"rewards.{name}: no such component; {nearest(name, COMPONENTS)} "
                "A function of yours is named by its import path, 'package.module:function'"
            )
        function = _import(name)
        return lambda rollouts: function([rollout.trajectory for rollout in rollouts])

    def _score(self, name: str, component: Component, rollouts: Sequence[Rollout]) -> list[float]:
        """One component's values, checked."""
        try:
            values = component(rollouts)
        except RewardError as error:
            raise RewardError(f"reward '{name}': {error}") from error
        except Exception as error:
            place = _first_failing(component, rollouts) if ":" in name else ""
            raise RewardError(f"reward '{name}' raised {type(error).__name__}: {error}{place}") from error
        try:
            values = list(values)
        except TypeError:
            raise RewardError(f"reward '{name}' gave {type(values).__name__}, expected a list of numbers") from None
        if len(values) != len(rollouts):
            raise RewardError(f"reward '{name}' gave {len(values)} values for {len(rollouts)} trajectories")
        checked = []
        for value, rollout in zip(values, rollouts, strict=True):
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise RewardError(f"reward '{name}' gave {value!r}, no finite number, for {_describe(rollout)}")
            checked.append(number)
        return checked


def _import(path: str) -> RewardFunction:
    """The function at 'package.module:function'. Raises SettingsError."""
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise SettingsError(
            f"rewards.{path}: module '{module_name}' cannot be imported ({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise SettingsError(f"rewards.{path}: no function '{function_name}' there; {nearest(function_name, known)}")
    return function


def _first_failing(component: Component, rollouts: Sequence[Rollout]) -> str:
    """Which trajectory makes a function raise, found by giving it one at a time; "" when each passes alone."""
    for rollout in rollouts:
        try:
            component([rollout])
        except Exception:
            return f" (at {_describe(rollout)})"
    return ""


def _describe(rollout: Rollout) -> str:
    trajectory = rollout.trajectory
    return (
        f"environment '{trajectory.environment}', level '{trajectory.level}', seed {trajectory.seed}, "
        f"sample {trajectory.sample}"
    )
