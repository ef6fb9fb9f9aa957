"""Reward component: user-defined function, run in a thread with a timeout and output validation."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from rl_core.errors import RewardError, SettingsError
from rl_core.importing import import_named
from rl_core.models.turn_states import TurnStates
from rl_core.rewards.component import Component, describe
from rl_core.rewards.signature import Signature
from rl_core.settings import RewardSettings
from rl_core.types import Rollout

__all__ = ["RewardFunction", "UserReward"]

RewardFunction = Callable[..., Any]  # written by a user; see `signature` for its arguments


class _Failure(Exception):
    """A call that returned no list; the message continues "reward 'name' ..."."""


class UserReward(Component):
    """A function at 'package.module:function' or 'file.py:function' that gives one number for each trajectory.

    Its arguments: `rewards.signature`. A None that a function of TRL's gives means there that it does not apply: it
    adds nothing, and is counted in the metric `skipped`.

    It runs in a thread of its own, abandoned after `timeout_s`. Python cannot kill a thread: one that hangs keeps its
    memory and processor time until the process ends, which it does not delay. With on_error 'stop' a failure ends the
    stage. With 'mask' the samples are then tried one at a time; those that fail alone are masked, up to
    max_masked_rate (which bounds the number of abandoned threads), and the others are scored together, so that a
    function may still compare its samples.
    A wrong number of values, or a failure of no sample in particular, ends the stage in both cases.
    """

    def __init__(self, name: str, options: RewardSettings, function: RewardFunction | None = None) -> None:
        """`function`: None = the one at the import path `name`.

        Raises: SettingsError when the function cannot be imported.
        """
        super().__init__()
        self.name = name
        self.options = options
        self.signature = Signature(_imported(name) if function is None else function, name)

    def __call__(self, rollouts: Sequence[Rollout], states: Sequence[TurnStates] = ()) -> list[float | None]:
        """One number for each rollout; None = masked. Raises: RewardError naming function and sample."""
        self.signature.logged.clear()
        try:
            values = self._call(rollouts)
        except _Failure as failure:
            if self.options.on_error == "mask":
                return self._one_by_one(rollouts, failure)
            raise RewardError(f"reward '{self.name}' {failure}{self._culprit(rollouts)}") from failure.__cause__
        if self.signature.is_trl:
            self.metrics = {"skipped": sum(value is None for value in values) / max(1, len(values))}
            self.metrics |= {name: fmean(logged) for name, logged in self.signature.logged.items()}
        return self._checked(values, rollouts)

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """See `Component`."""
        self.signature.check(columns)

    def _call(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return value of the function. Raises: _Failure when it raises, hangs, or returns no list."""
        outcome: list[tuple[list[Any] | None, BaseException | None]] = []
        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome.append((context.run(_as_list, self.signature.call, rollouts), None))
            except (Exception, SystemExit) as error:  # SystemExit: a reward must not end the run
                outcome.append((None, error))

        if self.options.timeout_s is None:
            work()
        else:
            thread = threading.Thread(target=work, daemon=True, name=f"reward {self.name}")
            thread.start()
            thread.join(self.options.timeout_s)
        if not outcome:
            raise _Failure(f"did not return within {self.options.timeout_s:g} s (reward_options.timeout_s)")
        values, error = outcome[0]
        if isinstance(error, _Failure):
            raise error
        if error is not None:
            raise _Failure(f"raised {type(error).__name__}: {error}") from error
        assert values is not None
        return values

    def _checked(self, values: Sequence[Any], rollouts: Sequence[Rollout]) -> list[float | None]:
        if len(values) != len(rollouts):
            raise RewardError(f"reward '{self.name}' gave {len(values)} values for {len(rollouts)} trajectories")
        checked: list[float | None] = []
        for value, rollout in zip(values, rollouts, strict=True):
            number = 0.0 if value is None and self.signature.is_trl else _finite(value)
            if number is None and self.options.on_error == "stop":
                raise RewardError(f"reward '{self.name}' gave {value!r}, no finite number, for {describe(rollout)}")
            checked.append(number)
        return checked

    def _culprit(self, rollouts: Sequence[Rollout]) -> str:
        """Text naming the first sample that makes the function fail alone; "" when each passes alone."""
        for rollout in rollouts:
            try:
                self._call([rollout])
            except _Failure:
                return f" (at {describe(rollout)})"
        return ""

    def _one_by_one(self, rollouts: Sequence[Rollout], failure: _Failure) -> list[float | None]:
        """Values of the samples that pass, None for those that fail alone."""
        failing: list[int] = []
        for index, rollout in enumerate(rollouts):
            try:
                self._call([rollout])
            except _Failure as own:
                failing.append(index)
                if len(failing) > self.options.max_masked_rate * len(rollouts):
                    raise RewardError(
                        f"reward '{self.name}' {own} (at {describe(rollout)}); with it {len(failing)} of "
                        f"{len(rollouts)} samples fail, more than max_masked_rate {self.options.max_masked_rate:g}"
                    ) from own.__cause__
        passing = [index for index in range(len(rollouts)) if index not in failing]
        if not failing:
            raise RewardError(f"reward '{self.name}' {failure}, though it takes each sample alone") from failure
        try:
            values = self._checked(self._call([rollouts[i] for i in passing]), [rollouts[i] for i in passing])
        except _Failure as again:
            raise RewardError(f"reward '{self.name}' {again}, without the samples that fail alone too") from again
        found = dict(zip(passing, values, strict=True))
        return [found.get(index) for index in range(len(rollouts))]


def _as_list(call: Callable[[Sequence[Rollout]], Any], rollouts: Sequence[Rollout]) -> list[Any]:
    values = call(rollouts)
    if not isinstance(values, Iterable):
        raise _Failure(f"gave {type(values).__name__}, expected a list of numbers")
    return list(values)


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _imported(path: str) -> RewardFunction:
    """The function at an import path or in a file. Raises: SettingsError."""
    function = import_named(path, f"rewards.{path}")
    if not callable(function):
        name = path.partition(":")[2]
        raise SettingsError(f"rewards.{path}: no function '{name}' there, but a {type(function).__name__} of that name")
    return function
