"""Replay of an asynchronous run from its schedule: the same groups, each token under the same version, without workers.

A schedule has a line for each time that rollouts were taken: the iteration, how often it had taken some before, and for
every group its ticket and the version starts of its rollouts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailures
from rl_core.environments.step_pool import StepPool
from rl_core.errors import DataError, SettingsError
from rl_core.inference.engine import Engine
from rl_core.inference.versioned_run import ReplayRun
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.rollout_workers.team import TeamParts
from rl_core.rollout_workers.tickets import Ticket, TicketGroup
from rl_core.rollouts.collect import settle_failures, with_native_tools
from rl_core.settings import SamplingSettings
from rl_core.types import RolloutGroup

__all__ = ["ScheduleReplay", "read_schedule"]

Row = dict[str, Any]


def read_schedule(path: Path | str) -> dict[int, list[Row]]:
    """Lines of a schedule by iteration. Of an iteration that was computed twice, since a run was resumed, the last.

    Raises: DataError naming file and line.
    """
    found: dict[int, list[Row]] = {}
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: the schedule cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            iteration, part = int(row["iteration"]), int(row["part"])
            [Ticket.from_json(_ticket(group)) for group in row["groups"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}, line {number}: is no line of a schedule ({type(error).__name__}: {error})"
            ) from error
        if part == 0:
            found = {earlier: rows for earlier, rows in found.items() if earlier < iteration}
        found.setdefault(iteration, []).append(row)
    if not found:
        raise DataError(f"{path}: is empty; an asynchronous run writes its schedule")
    return found


def _ticket(group: Row) -> Row:
    return {name: value for name, value in group.items() if name != "rollouts"}


class ScheduleReplay:
    """Gives a trainer the groups that an asynchronous run learned from, in its process."""

    def __init__(self, path: Path | str, parts: TeamParts, max_staleness: int) -> None:
        """Raises: DataError for a file that is no schedule; SettingsError for a model that the engine cannot sample."""
        if not isinstance(parts.backend, Engine):
            raise SettingsError("rollouts.replay_schedule: needs the rollout engine, which does not support this model")
        self.path, self.parts, self._bound = path, parts, max_staleness
        self._engine = parts.backend
        self._engine.keep_apart()
        self._rows = read_schedule(path)
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        self._environment: Environment | None = None
        self._iteration = self._part = -1

    def take(
        self, iteration: int, count: int, *, ahead: int, draw: Any, sampling: SamplingSettings,
        failures: EpisodeFailures, policy_version: int,
    ) -> list[RolloutGroup]:  # fmt: skip
        """As `RolloutStream.take`. Raises: DataError where the schedule has nothing for this iteration."""
        if self._iteration != iteration:
            self._iteration, self._part = iteration, -1
            self._versions[iteration] = trainable_weights(self.parts.model, copy=True)
            for old in [version for version in self._versions if version < iteration - self._bound]:
                del self._versions[old]
        self._part += 1
        rows = self._rows.get(iteration, [])
        if self._part >= len(rows):
            raise DataError(f"{self.path}: the schedule ends before iteration {iteration + 1}; train for {iteration}")
        try:
            groups = self._play(rows[self._part]["groups"], sampling)
        finally:
            load_trainable_weights(self.parts.model, self._versions[iteration])
        failed = [episode for group in groups for episode in group.failed]
        finished = [group.finished() for group in groups]
        settle_failures(failed, sum(group.ticket.group_size for group in groups), failures)
        for one in finished:
            for rollout in one.group.rollouts:
                rollout.trajectory.policy_version = policy_version
        return [one.group for one in finished]

    def _play(self, rows: Sequence[Row], sampling: SamplingSettings) -> list[TicketGroup]:
        if self._environment is None:
            self._environment = self.parts.environment()
        environment = self._environment
        renderer = with_native_tools(self.parts.renderer, environment.tools)
        with ExitStack() as stack:
            pool = None
            if environment.blocking:
                pool = stack.enter_context(StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s))
            groups = []
            for row in rows:
                ticket = Ticket.from_json(_ticket(row))
                group = TicketGroup(ticket, environment, renderer, sampling, pool, self._engine.max_length)
                for sample, sequence in enumerate(group.sequences):
                    sequence.version_starts = [(int(n), int(v)) for n, v in row["rollouts"].get(str(sample), [])]
                groups.append(group)
            for temperature in dict.fromkeys(group.ticket.temperature for group in groups):
                self._play_at(temperature, [g for g in groups if g.ticket.temperature == temperature], sampling)
        return groups

    def _play_at(self, temperature: float, groups: Sequence[TicketGroup], sampling: SamplingSettings) -> None:
        own = dataclasses.replace(sampling, temperature=temperature)
        sequences = [s for group in groups for s in group.sequences if s.version_starts and not s.has_failed]
        if not sequences:
            return
        run = ReplayRun(self._engine, sequences, own, self._load)
        try:
            run.play()
        finally:
            run.close()

    def _load(self, version: int) -> None:
        if version not in self._versions:
            raise DataError(f"{self.path}: iteration {self._iteration} has tokens of version {version}, which is gone")
        load_trainable_weights(self.parts.model, self._versions[version])

    def metrics(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def close(self) -> None:
        """There is nothing to end."""

    def state_dict(self) -> dict[str, Any]:
        """Weights of the versions that later iterations may ask for."""
        return {"versions": {str(version): weights for version, weights in self._versions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._versions = {int(version): weights for version, weights in state["versions"].items()}
