"""Calls of a user's reward function: by its own signature, or by TRL's.

    own     def correct(trajectories, answer, level):          columns of the rows by name, one list each
    TRL     def correct(prompts, completions, answer, **kwargs):   everything by name, as GRPOTrainer calls it

A function with a parameter `completions` is TRL's; any other takes the trajectories first. Both may be asynchronous.
Source: TRL 1.16, trl/trainer/grpo_trainer.py, `_calculate_rewards`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rl_core.errors import SettingsError, nearest
from rl_core.types import Message, Rollout, Trajectory

__all__ = ["Signature"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# What TRL hands over besides the columns of the data set.
_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_PASSED_BY_TRL = ("prompt", "completion", "completion_ids")
_UNKNOWN_TO_TRL = ("environments",)


class Signature:
    """The way in which one reward function is called."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """`name`: for messages. Raises: SettingsError for a function that takes no trajectories."""
        self.function, self.name = function, name
        self.logged: dict[str, list[float]] = {}  # what a function of TRL's logged in its last calls
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # written in C: it shows no parameters
            parameters = [inspect.Parameter("trajectories", inspect.Parameter.POSITIONAL_ONLY)]
        self.passed: list[str] = []  # arguments of TRL's, besides columns, that it names
        self.is_trl = any(parameter.name == "completions" for parameter in parameters)
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if self.is_trl:
            self.passed = [p.name for p in named if p.name in _OF_TRL]
            wanted = [p for p in named if p.name not in _OF_TRL]
        else:
            if not any(p.kind in _POSITIONAL or p.kind is p.VAR_POSITIONAL for p in parameters):
                raise SettingsError(
                    f"reward '{name}' takes {inspect.signature(function)}; its first argument is the list of "
                    "trajectories, or name `completions` as TRL's do"
                )
            wanted = named[1:] if named and named[0].kind in _POSITIONAL else named
            self._first = named[0].name if len(wanted) < len(named) else ""
        self.needed = [p.name for p in wanted if p.default is p.empty]
        self.optional = [p.name for p in wanted if p.default is not p.empty]
        if not self.is_trl and self.needed and {"prompts", "completion"} & set(self.needed):
            raise SettingsError(
                f"reward '{name}' takes {inspect.signature(function)}; TRL's signature has `completions`, this "
                "library's own begins with the list of trajectories"
            )

    def check(self, columns: Sequence[str] | None) -> None:
        """Raise SettingsError where the function asks for a column that no row has; `columns`: None = not known."""
        if columns is None:
            return
        for wanted in self.needed:
            if wanted in columns:
                continue
            if self.is_trl and wanted in _UNKNOWN_TO_TRL:
                raise SettingsError(f"reward '{self.name}' asks for `{wanted}`, which is of TRL's own environments")
            if not columns:
                raise SettingsError(
                    f"reward '{self.name}' asks for the column '{wanted}', but the environment's episodes are no rows "
                    "of data; environment: {name: prompts, options: {path: FILE}} has columns"
                )
            raise SettingsError(
                f"reward '{self.name}' asks for the column '{wanted}', but the rows have {', '.join(columns)}; "
                f"{nearest(wanted, columns)}"
            )

    @property
    def takes_ids(self) -> bool:
        """True = it gets the completions' token ids."""
        return self.is_trl and (self.takes_all or "completion_ids" in self.passed)

    def way_of_calling(self, rollouts: Sequence[Rollout]) -> tuple[list[str], bool]:
        """The batch's part in the call: columns of its rows; True = prompts and completions are messages."""
        rows = [rollout.trajectory.row for rollout in rollouts]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return columns, all(isinstance(row.get("prompt"), list) for row in rows)

    def call(self, rollouts: Sequence[Rollout], batch: Sequence[Rollout] = ()) -> Any:
        """Return value of the function for these rollouts; a coroutine is run to its end.

        batch: rollouts that decide the way of calling, of which these are some; () = these.
        """
        trajectories = [rollout.trajectory for rollout in rollouts]
        columns, conversational = self.way_of_calling(batch or rollouts)
        self.check(columns)
        if self.is_trl:
            values = self.function(**self._of_trl(rollouts, trajectories, columns, conversational))
        else:
            taken = [name for name in columns if self._takes(name) and name != self._first]
            values = self.function(trajectories, **{name: _column(trajectories, name) for name in taken})
        return asyncio.run(_awaited(values)) if inspect.isawaitable(values) else values

    def _of_trl(
        self,
        rollouts: Sequence[Rollout],
        trajectories: Sequence[Trajectory],
        columns: Sequence[str],
        conversational: bool,
    ) -> dict[str, Any]:
        values: dict[str, Any] = {
            "prompts": [_prompt(trajectory, conversational) for trajectory in trajectories],
            "completions": [_completion(trajectory, conversational) for trajectory in trajectories],
            "completion_ids": [list(rollout.completion_ids) for rollout in rollouts],
            "trainer_state": SimpleNamespace(global_step=max((t.policy_version for t in trajectories), default=0)),
            "log_extra": lambda *_, **__: None,  # columns of TRL's table of completions
            "log_metric": lambda name, value: self.logged.setdefault(name, []).append(float(value)),
        }
        passed = values if self.takes_all else {name: values[name] for name in self.passed}
        for name in columns:
            if name not in _NOT_PASSED_BY_TRL and self._takes(name):
                passed[name] = _column(trajectories, name)
        return passed

    def _takes(self, column: str) -> bool:
        return self.takes_all or column in self.needed or column in self.optional


def _column(trajectories: Sequence[Trajectory], name: str) -> list[Any]:
    """Values of one column; None where a row has none."""
    return [trajectory.row.get(name) for trajectory in trajectories]


def _prompt(trajectory: Trajectory, conversational: bool) -> Any:
    return trajectory.row["prompt"] if conversational else trajectory.row.get("prompt", trajectory.prompt)


def _completion(trajectory: Trajectory, conversational: bool) -> Any:
    """Text of a completion, or its messages: the policy's turns and what tools answered."""
    if not conversational:
        return trajectory.completion
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages.append(Message(role="assistant", content=turn.action))
        if turn.observation is not None:
            messages.append(Message(role="tool", content=turn.observation))
    return messages


async def _awaited(value: Any) -> Any:
    return await value
