"""User reward functions: how they are called, and the component that runs them with a timeout and checks their values.

    this library    def correct(trajectories, answer, level):              columns of the rows by name, one list each
    TRL             def correct(prompts, completions, answer, **kwargs):   everything by name, as GRPOTrainer calls it

A function with a parameter `completions` has TRL's signature; any other takes the trajectories first. Both may be
asynchronous.
Source: TRL 1.16, trl/trainer/grpo_trainer.py, `_calculate_rewards`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from rl_core.environments.failed_episodes import format_error_trace
from rl_core.errors import RewardError, SettingsError, suggest_name
from rl_core.models.hidden_states import TurnEmbeddings
from rl_core.rewards.components import RewardComponent, SampleFailure
from rl_core.settings import RewardSettings
from rl_core.time_limits import CallTimeout, TooManyHungCalls, call_with_timeout
from rl_core.types import Message, Rollout, Trajectory
from rl_core.user_code.checks import (
    USER_CODE_ERRORS,
    inspect_signature,
    is_value_list,
    parse_finite,
)
from rl_core.user_code.load import import_function

_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Arguments that TRL passes besides the columns of the data set.
_TRL_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
_NOT_PASSED_BY_TRL = ("prompt", "completion", "completion_ids")
_UNKNOWN_TO_TRL = ("environments",)


class RewardSignature:
    """Call convention of one reward function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Inspect the function; `name` appears in messages.

        Raises: SettingsError if the function takes no trajectories.
        """
        self.function, self.name = function, name
        self.logged: dict[
            str, list[float]
        ] = {}  # values that `log_metric` received in the last calls
        signature = inspect_signature(function)
        if signature is None:
            parameters = [inspect.Parameter("trajectories", inspect.Parameter.POSITIONAL_ONLY)]
        else:
            parameters = list(signature.parameters.values())
        self.passed: list[str] = []  # TRL arguments other than columns that the function names
        self.is_trl = any(parameter.name == "completions" for parameter in parameters)
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if self.is_trl:
            self.passed = [p.name for p in named if p.name in _TRL_ARGUMENTS]
            wanted = [p for p in named if p.name not in _TRL_ARGUMENTS]
        else:
            if not any(
                p.kind in _POSITIONAL_KINDS or p.kind is p.VAR_POSITIONAL for p in parameters
            ):
                raise SettingsError(
                    f"reward '{name}' takes {signature}; its first argument is the list of "
                    "trajectories, or name `completions` as TRL's do"
                )
            wanted = named[1:] if named and named[0].kind in _POSITIONAL_KINDS else named
            self._first = named[0].name if len(wanted) < len(named) else ""
        self.needed = [p.name for p in wanted if p.default is p.empty]
        self.optional = [p.name for p in wanted if p.default is not p.empty]
        if not self.is_trl and self.needed and {"prompts", "completion"} & set(self.needed):
            raise SettingsError(
                f"reward '{name}' takes {signature}; TRL's signature has `completions`, this "
                "library's begins with the list of trajectories"
            )

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raise SettingsError if the function needs a column that no row has; `columns`: None = unknown."""
        if columns is None:
            return
        for wanted in self.needed:
            if wanted in columns:
                continue
            if self.is_trl and wanted in _UNKNOWN_TO_TRL:
                raise SettingsError(
                    f"reward '{self.name}' asks for `{wanted}`, which only TRL's environments have"
                )
            if not columns:
                raise SettingsError(
                    f"reward '{self.name}' asks for the column '{wanted}', but the environment's episodes have no rows "
                    "of data; environment: {name: prompts, options: {path: FILE}} has columns"
                )
            raise SettingsError(
                f"reward '{self.name}' asks for the column '{wanted}', but the rows have {', '.join(columns)}; "
                f"{suggest_name(wanted, columns)}"
            )

    @property
    def takes_ids(self) -> bool:
        """True = the function receives the completions' token ids."""
        return self.is_trl and (self.takes_all or "completion_ids" in self.passed)

    def resolve_call_form(self, rollouts: Sequence[Rollout]) -> tuple[list[str], bool]:
        """Return the columns of the batch's rows, and whether prompts and completions are messages."""
        rows = [rollout.trajectory.row for rollout in rollouts]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return columns, all(isinstance(row.get("prompt"), list) for row in rows)

    def call_function(self, rollouts: Sequence[Rollout], batch: Sequence[Rollout] = ()) -> Any:
        """Return the function's value for these rollouts; a coroutine is run to completion.

        Args:
            batch: rollouts that decide how the function is called, of which `rollouts` are a part; () = `rollouts`.
        """
        trajectories = [rollout.trajectory for rollout in rollouts]
        columns, conversational = self.resolve_call_form(batch or rollouts)
        self.check_columns(columns)
        if self.is_trl:
            values = self.function(
                **self._build_trl_arguments(rollouts, trajectories, columns, conversational)
            )
        else:
            taken = [name for name in columns if self._is_accepted(name) and name != self._first]
            values = self.function(
                trajectories, **{name: _collect_column(trajectories, name) for name in taken}
            )
        return complete_awaitable(values)

    def _build_trl_arguments(
        self,
        rollouts: Sequence[Rollout],
        trajectories: Sequence[Trajectory],
        columns: Sequence[str],
        conversational: bool,
    ) -> dict[str, Any]:
        values: dict[str, Any] = {
            "prompts": [_format_prompt(trajectory, conversational) for trajectory in trajectories],
            "completions": [
                _format_completion(trajectory, conversational) for trajectory in trajectories
            ],
            "completion_ids": [list(rollout.completion_ids) for rollout in rollouts],
            "trainer_state": SimpleNamespace(
                global_step=max((t.policy_version for t in trajectories), default=0)
            ),
            "log_extra": lambda *_, **__: None,  # columns of TRL's table of completions
            "log_metric": lambda name, value: self.logged.setdefault(name, []).append(float(value)),
        }
        passed = values if self.takes_all else {name: values[name] for name in self.passed}
        for name in columns:
            if name not in _NOT_PASSED_BY_TRL and self._is_accepted(name):
                passed[name] = _collect_column(trajectories, name)
        return passed

    def _is_accepted(self, column: str) -> bool:
        return self.takes_all or column in self.needed or column in self.optional


def _collect_column(trajectories: Sequence[Trajectory], name: str) -> list[Any]:
    """Return one column's values; None where a row lacks it."""
    return [trajectory.row.get(name) for trajectory in trajectories]


def _format_prompt(trajectory: Trajectory, conversational: bool) -> Any:
    return (
        trajectory.row["prompt"]
        if conversational
        else trajectory.row.get("prompt", trajectory.prompt)
    )


def _format_completion(trajectory: Trajectory, conversational: bool) -> Any:
    """Return the text of a completion, or its messages: the policy's turns and the tools' answers."""
    if not conversational:
        return trajectory.completion
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages.append(Message(role="assistant", content=turn.action))
        if turn.observation is not None:
            messages.append(Message(role="tool", content=turn.observation))
    return messages


def complete_awaitable(value: Any) -> Any:
    """Return a user function's value; a coroutine is run to completion."""
    return asyncio.run(_await_value(value)) if inspect.isawaitable(value) else value


async def _await_value(value: Any) -> Any:
    return await value


RewardFunction = Callable[..., Any]  # written by a user; `RewardSignature` describes its arguments


class _CallFailure(Exception):
    """A call that returned no list; the message continues "reward 'name' ..."."""


class UserReward(RewardComponent):
    """User function at 'package.module:function' or 'file.py:function' that returns one number per trajectory.

    `RewardSignature` describes its arguments. If a function with TRL's signature returns None for a sample, the reward
    does not apply to it: it adds nothing and is counted in the metric `skipped`.

    The function runs in its own thread, which is stopped after `timeout_s` (`rl_core.time_limits`: a call that blocks
    in
    C continues until it returns; after MAX_HUNG such calls the stage ends). If a call fails, each sample is tried
    alone:
    those that fail are listed in `failed`, the others are scored together, so that a function may still compare its
    samples. Once `has_too_many` failed, the remaining samples are not tried and get no value.
    A wrong number of values, or a failure that no single sample causes, is an error.
    """

    def __init__(
        self,
        name: str,
        options: RewardSettings,
        function: RewardFunction | None = None,
        has_too_many: Callable[[int, int], bool] = lambda failed, played: failed > 0,
    ) -> None:
        """Import the function if none is passed.

        Args:
            function: None = the function at the import path `name`.
            has_too_many: (failed, played) -> True if so many failures end the stage.
        Raises: SettingsError if the function cannot be imported.
        """
        super().__init__()
        self.name = name
        self.options = options
        self.signature = RewardSignature(import_function(name, f"rewards.{name}", function), name)
        self._has_too_many = has_too_many
        # Rollouts that decide how the function is called; () = the rollouts of each call.
        self._batch: Sequence[Rollout] = ()
        # Rollouts of the last call, by index, for which the function returned None.
        self.skipped: set[int] = set()

    def __call__(
        self, rollouts: Sequence[Rollout], states: Sequence[TurnEmbeddings] = ()
    ) -> list[float | None]:
        """Return one number per rollout; None = it failed. Raises: RewardError naming the function."""
        self.failed, self.skipped = {}, set()
        self.signature.logged.clear()
        try:
            values = self._call_function(rollouts)
        except _CallFailure as failure:
            return self._score_individually(rollouts, failure)
        if self.signature.is_trl:
            self.metrics = {"skipped": sum(value is None for value in values) / max(1, len(values))}
            self.metrics |= {name: fmean(logged) for name, logged in self.signature.logged.items()}
        return self._check_values(values, range(len(rollouts)))

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Refuse missing columns, see `RewardComponent`."""
        self.signature.check_columns(columns)

    def _call_function(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return the function's list. Raises: _CallFailure if it raises, times out or returns no list."""
        seconds, name = self.options.timeout_s, f"reward {self.name}"
        try:
            if seconds is None:
                return _collect_values(self.signature.call_function, rollouts, self._batch)
            return call_with_timeout(
                seconds, name, _collect_values, self.signature.call_function, rollouts, self._batch
            )
        except _CallFailure:
            raise
        except TooManyHungCalls as error:
            raise RewardError(str(error)) from error
        except CallTimeout as error:
            raise _CallFailure(
                f"did not return within {seconds:g} s (reward_options.timeout_s)"
            ) from error
        # a reward must not end the run; CancelledError is no Exception
        except USER_CODE_ERRORS as error:
            raise _CallFailure(f"raised {type(error).__name__}: {error}") from error

    def _check_values(self, values: Sequence[Any], indices: Sequence[int]) -> list[float | None]:
        """Return the values of the samples `indices` as numbers; None where one is not a finite number (recorded in
        `failed`).
        """
        if len(values) != len(indices):
            raise RewardError(
                f"reward '{self.name}' gave {len(values)} values for {len(indices)} trajectories"
            )
        checked: list[float | None] = []
        for value, index in zip(values, indices, strict=True):
            if value is None and self.signature.is_trl:
                self.skipped.add(index)
            number = 0.0 if index in self.skipped else parse_finite(value)
            if number is None:
                self.failed[index] = SampleFailure(f"gave {value!r}, no finite number")
            checked.append(number)
        return checked

    def _score_individually(
        self, rollouts: Sequence[Rollout], failure: _CallFailure
    ) -> list[float | None]:
        """Return values of the samples that pass, None for those that fail alone."""
        for index, rollout in enumerate(rollouts):
            try:
                self._call_function([rollout])
            except _CallFailure as single_failure:
                cause = single_failure.__cause__
                trace = format_error_trace(cause) if cause is not None else ""
                self.failed[index] = SampleFailure(str(single_failure), trace)
                if self._has_too_many(len(self.failed), max(len(rollouts), len(self._batch))):
                    return [None] * len(rollouts)
        passing = [index for index in range(len(rollouts)) if index not in self.failed]
        if not self.failed:
            raise RewardError(
                f"reward '{self.name}' {failure}, though it takes each sample alone"
            ) from failure.__cause__
        try:
            values = self._check_values(
                self._call_function([rollouts[index] for index in passing]), passing
            )
        except _CallFailure as again:
            raise RewardError(
                f"reward '{self.name}' {again}, without the samples that fail alone too"
            ) from again.__cause__
        found = dict(zip(passing, values, strict=True))
        return [found.get(index) for index in range(len(rollouts))]


def _collect_values(
    call: Callable[..., Any], rollouts: Sequence[Rollout], batch: Sequence[Rollout]
) -> list[Any]:
    values = call(rollouts, batch)
    if not is_value_list(values):
        raise _CallFailure(f"gave {type(values).__name__}, expected a list of numbers")
    return list(values)
