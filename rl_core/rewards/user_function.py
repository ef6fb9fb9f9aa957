"""Reward component: user-defined function, run in a thread with a timeout and output validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from rl_core.environments.failed_episodes import error_trace
from rl_core.errors import RewardError, SettingsError
from rl_core.importing import import_named
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component, SampleFailure
from rl_core.rewards.signature import Signature
from rl_core.settings import RewardSettings
from rl_core.time_limits import CallTimeout, TooManyHung, call_within
from rl_core.types import Rollout

__all__ = ["RewardFunction", "UserReward", "import_function"]

RewardFunction = Callable[..., Any]  # written by a user; see `signature` for its arguments


class _Failure(Exception):
    """A call that returned no list; the message continues "reward 'name' ..."."""


class UserReward(Component):
    """A function at 'package.module:function' or 'file.py:function' that gives one number for each trajectory.

    Its arguments: `rewards.signature`. A None that a function of TRL's gives means there that it does not apply: it
    adds nothing, and is counted in the metric `skipped`.

    It runs in a thread of its own, which is made to end after `timeout_s` (`rl_core.time_limits`: one that waits in C
    goes on until that returns; with MAX_HUNG of them the stage ends). Where a call fails, the samples are tried one at
    a time; those that fail alone are in `failed`, and the others are scored together, so that a function may still
    compare its samples. As soon as `too_many` failed, the rest is left untried and without a value.
    A wrong number of values, or a failure of no sample in particular, is an error.
    """

    def __init__(
        self,
        name: str,
        options: RewardSettings,
        function: RewardFunction | None = None,
        too_many: Callable[[int, int], bool] = lambda failed, played: failed > 0,
    ) -> None:
        """Look the function up.

        Args:
            function: None = the one at the import path `name`.
            too_many: True = so many failures of so many samples end the stage.
        Raises: SettingsError when the function cannot be imported.
        """
        super().__init__()
        self.name = name
        self.options = options
        self.signature = Signature(import_function(name) if function is None else function, name)
        self._too_many = too_many
        self._batch: Sequence[Rollout] = ()  # that decides the way of calling; () = the rollouts of each call
        self.skipped: set[int] = set()  # of the last call, by index of the rollout: the function gave None

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float | None]:
        """One number for each rollout; None = it failed. Raises: RewardError naming the function."""
        self.failed, self.skipped = {}, set()
        self.signature.logged.clear()
        try:
            values = self._call(rollouts)
        except _Failure as failure:
            return self._one_by_one(rollouts, failure)
        if self.signature.is_trl:
            self.metrics = {"skipped": sum(value is None for value in values) / max(1, len(values))}
            self.metrics |= {name: fmean(logged) for name, logged in self.signature.logged.items()}
        return self._checked(values, range(len(rollouts)))

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """See `Component`."""
        self.signature.check(columns)

    def _call(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return value of the function. Raises: _Failure when it raises, hangs, or returns no list."""
        seconds, name = self.options.timeout_s, f"reward {self.name}"
        try:
            if seconds is None:
                return _as_list(self.signature.call, rollouts, self._batch)
            return call_within(seconds, name, _as_list, self.signature.call, rollouts, self._batch)
        except _Failure:
            raise
        except TooManyHung as error:
            raise RewardError(str(error)) from error
        except CallTimeout as error:
            raise _Failure(f"did not return within {seconds:g} s (reward_options.timeout_s)") from error
        except (Exception, SystemExit) as error:  # SystemExit: a reward must not end the run
            raise _Failure(f"raised {type(error).__name__}: {error}") from error

    def _checked(self, values: Sequence[Any], indices: Sequence[int]) -> list[float | None]:
        """The values of the samples `indices` as numbers; None for those that are none, which are noted."""
        if len(values) != len(indices):
            raise RewardError(f"reward '{self.name}' gave {len(values)} values for {len(indices)} trajectories")
        checked: list[float | None] = []
        for value, index in zip(values, indices, strict=True):
            if value is None and self.signature.is_trl:
                self.skipped.add(index)
            number = 0.0 if index in self.skipped else _finite(value)
            if number is None:
                self.failed[index] = SampleFailure(f"gave {value!r}, no finite number")
            checked.append(number)
        return checked

    def _one_by_one(self, rollouts: Sequence[Rollout], failure: _Failure) -> list[float | None]:
        """Values of the samples that pass, None for those that fail alone."""
        for index, rollout in enumerate(rollouts):
            try:
                self._call([rollout])
            except _Failure as own:
                trace = error_trace(own.__cause__) if own.__cause__ is not None else ""
                self.failed[index] = SampleFailure(str(own), trace)
                if self._too_many(len(self.failed), max(len(rollouts), len(self._batch))):
                    return [None] * len(rollouts)
        passing = [index for index in range(len(rollouts)) if index not in self.failed]
        if not self.failed:
            raise RewardError(
                f"reward '{self.name}' {failure}, though it takes each sample alone"
            ) from failure.__cause__
        try:
            values = self._checked(self._call([rollouts[index] for index in passing]), passing)
        except _Failure as again:
            raise RewardError(
                f"reward '{self.name}' {again}, without the samples that fail alone too"
            ) from again.__cause__
        found = dict(zip(passing, values, strict=True))
        return [found.get(index) for index in range(len(rollouts))]


def _as_list(call: Callable[..., Any], rollouts: Sequence[Rollout], batch: Sequence[Rollout]) -> list[Any]:
    values = call(rollouts, batch)
    if not isinstance(values, Iterable):
        raise _Failure(f"gave {type(values).__name__}, expected a list of numbers")
    return list(values)


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def import_function(path: str) -> RewardFunction:
    """The function at an import path or in a file. Raises: SettingsError."""
    function = import_named(path, f"rewards.{path}")
    if not callable(function):
        name = path.partition(":")[2]
        raise SettingsError(f"rewards.{path}: no function '{name}' there, but a {type(function).__name__} of that name")
    return function
