"""Asynchronous rollouts: tickets ahead of the trainer, weights behind its back, and nothing older than the bound.

A version of the weights has the number of the iteration that learns with it. A group may be learned from in iteration i
if none of its tokens is older than version i - max_staleness; one that has become too old is played again, and one that
became so twice is waited for.

Replay of an asynchronous run from its schedule: the same groups, each token under the same version, without workers.

A schedule has a line for each time that rollouts were taken: the iteration, how often it had taken some before, and for
every group its ticket and the version starts of its rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.environments.step_pool import StepPool
from rl_core.errors import DataError, SettingsError
from rl_core.inference.engine import Engine
from rl_core.inference.versioned_run import ReplayEngineRun
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.rollout_workers.async_worker import (
    FinishedRolloutTask,
    RolloutTask,
    RolloutTaskEpisodes,
    WorkerProgress,
    find_oldest_version,
    list_token_versions,
)
from rl_core.rollout_workers.cluster import HEARTBEAT_TIMEOUT_S, NO_HEARTBEAT, WorkerLost
from rl_core.rollout_workers.sampler_probe import ProbeCompletion
from rl_core.rollout_workers.weight_transfer import digest_tensors
from rl_core.rollout_workers.worker_group import (
    _POLL_INTERVAL_S,
    WorkerConfig,
    WorkerGroup,
    _WorkerSlot,
)
from rl_core.rollouts.collect import enable_native_tools, record_failures
from rl_core.settings import SamplingSettings
from rl_core.storage.atomic_files import append_bytes, truncate_file
from rl_core.timing import span
from rl_core.types import RolloutGroup

logger = logging.getLogger(__name__)

DrawTask = Callable[[int], RolloutTask]  # the ticket of a number
MAX_STALE_PLAYS = 2  # times that a group may become too old before an iteration waits for it
# for a worker to wait for something finished, until it answers that there is nothing
COLLECT_TIMEOUT_S = 5.0


@dataclass
class AsyncWorkerGroup(WorkerGroup):
    """A team whose workers play while the trainer updates. Tickets are drawn in order of their numbers, each once."""

    schedule: Path | None = None  # file of what each iteration learned from, for a replay
    stale_groups: int = 0  # since the beginning: became too old, and were played again
    dropped_rollouts: int = 0  # since the beginning: begun anew because of new weights
    iteration: int = -1
    # the schedule of an interrupted run ends before this one's first iteration
    _is_schedule_truncated: bool = False
    _part: int = -1  # times that this iteration has taken groups before
    # optimizer steps behind each version
    _steps_by_version: dict[int, int] = field(default_factory=dict)
    _next_number: int = 0
    _queue: deque[RolloutTask] = field(default_factory=deque)  # drawn, with no worker
    _running_tasks: dict[int, tuple[RolloutTask, _WorkerSlot]] = field(default_factory=dict)
    _finished: list[FinishedRolloutTask] = field(default_factory=list)
    _versions: dict[int, tuple[str, list[ProbeCompletion]]] = field(default_factory=dict)
    # number of a group that was played -> its worker's
    _last_workers: dict[int, int] = field(default_factory=dict)
    _staleness: dict[str, float] = field(default_factory=dict)

    def take_groups(
        self,
        iteration: int,
        count: int,
        *,
        groups_per_iteration: int,
        draw_task: DrawTask,
        sampling: SamplingSettings,
        failures: EpisodeFailureMonitor,
        policy_version: int,
    ) -> list[RolloutGroup]:
        """The next groups to learn from, as many as asked for, in the order in which they were finished.

        Args:
            iteration: that learns from them, with the weights as they are now.
            ahead: groups of an iteration: so many times (max_staleness + 1) are under way or wait, at most.
            draw: makes the ticket of a number, once.
            policy_version: optimizer steps behind the present weights.
        Raises: as `WorkerGroup.play`.
        """
        self._part = self._part + 1 if self.iteration == iteration else 0
        self.iteration = iteration
        self._steps_by_version[iteration] = policy_version
        self._publish_weights(iteration, sampling)
        for seat in self._slots:
            seat.losses = 0
        taken: list[FinishedRolloutTask] = []
        wait_s = 0.0
        while len(taken) < count:
            self._draw_tasks_ahead(groups_per_iteration, len(taken), draw_task)
            self._assign_tasks(groups_per_iteration, sampling)
            self._collect_finished(wait_s)
            found = self._select_fresh_groups(count - len(taken))
            taken += found
            wait_s = 0.0 if found else _POLL_INTERVAL_S
        failed = [episode for finished in taken for episode in finished.failed]
        for finished in taken:
            for rollout in finished.group.rollouts:
                oldest = min(version for _, version in rollout.version_starts)
                rollout.trajectory.policy_version = self._steps_by_version.get(oldest, 0)
            self._last_workers.pop(finished.task.number, None)
        self._record_schedule(taken)
        record_failures(failed, sum(finished.task.group_size for finished in taken), failures)
        return [finished.group for finished in taken]

    # Weights

    def _publish_weights(self, iteration: int, sampling: SamplingSettings) -> None:
        """Send the present weights as the version of this iteration, once; workers take them when they can."""
        if self._update is not None and self._update.number == iteration:
            return
        with span("weight_sync"):
            update = self._build_update(
                digest_tensors(collect_trainable_weights(self.config.model)), iteration, sampling
            )
            for number in [number for number in self._versions if number < iteration - 64]:
                del self._versions[number], self._steps_by_version[number]
            if not self._slots:
                self._start_workers()
                return
            shared = self.cluster.share_value(update)
            calls = [
                (seat, self.cluster.call_worker(seat.worker, "send", shared, self._probe))
                for seat in self._slots
            ]
            self._sample_trainer_probe()
            self._wait_for_workers(calls)

    def _sample_trainer_probe(self) -> None:
        super()._sample_trainer_probe()
        assert self._update is not None
        self._versions[self._update.number] = (self._update.digest, self._answers)

    @property
    def _max_staleness(self) -> int:
        return self.settings.max_staleness

    def _find_expected_probe(self, number: int) -> tuple[str, list[ProbeCompletion]]:
        return self._versions[number]

    # Tickets

    def _draw_tasks_ahead(self, ahead: int, taken: int, draw: DrawTask) -> None:
        """Draw tickets up to the bound: back-pressure in one direction; `_ripe` waits in the other."""
        while len(self._queue) + len(self._running_tasks) + len(self._finished) + taken < ahead * (
            self._max_staleness + 1
        ):
            self._queue.append(draw(self._next_number))
            self._next_number += 1

    def _assign_tasks(self, ahead: int, sampling: SamplingSettings) -> None:
        """Give tickets to the workers, evenly; a slow one keeps those that it has, and gets no more.

        A group that became too old goes to another worker than the one that was too slow for it, where there is room;
        one that an iteration will wait for does so beyond the even share.
        """
        most = math.ceil(ahead * (self._max_staleness + 1) / len(self._slots))
        loads = {seat.number: 0 for seat in self._slots}
        for _, seat in self._running_tasks.values():
            loads[seat.number] += 1
        given: dict[int, list[RolloutTask]] = {seat.number: [] for seat in self._slots}
        while self._queue:
            ticket = self._queue[0]
            slow = (
                self._last_workers.get(ticket.number) if ticket.plays and len(loads) > 1 else None
            )
            room = [number for number, load in loads.items() if load < most]
            others = [
                number
                for number in (loads if ticket.plays >= MAX_STALE_PLAYS else room)
                if number != slow
            ]
            if not (others or room):
                break
            number = min(others or room, key=lambda number: (loads[number], number))
            given[number].append(self._queue.popleft())
            loads[number] += 1
        calls = []
        for seat in self._slots:
            if tickets := given[seat.number]:
                self._running_tasks |= {ticket.number: (ticket, seat) for ticket in tickets}
                call = self.cluster.call_worker(
                    seat.worker, "begin", tickets, sampling, most, self.settings.partial
                )
                calls.append((seat, call))
        self._wait_for_workers(calls)

    def _collect_finished(self, wait_s: float) -> None:
        """Take everything that workers have finished, waiting so long for the first of it.

        Each worker has one call that waits for it, also while the trainer updates: a finished group is told at once,
        and nothing is asked for in vain.
        """
        for seat in self._slots:
            if seat.collect_call is None:
                seat.collect_call = self.cluster.call_concurrently(
                    seat.worker, "collect", COLLECT_TIMEOUT_S
                )
        waiting = {seat.collect_call: seat for seat in self._slots}
        while waiting and (ended := self.cluster.wait_for_calls(list(waiting), wait_s)):
            wait_s = 0.0
            for call in ended:
                seat = waiting.pop(call)
                seat.collect_call = None
                try:
                    self._receive_progress(seat, self._unwrap_result(call))
                except WorkerLost as lost:
                    self._replace_lost_worker(seat, str(lost))
        for number in self._heartbeats.list_unresponsive(
            (seat.number, seat.worker) for seat in self._slots
        ):
            self._replace_lost_worker(self._slots[number], NO_HEARTBEAT)

    def _receive_progress(self, seat: _WorkerSlot, progress: WorkerProgress) -> None:
        """Verify the weights that a worker has played with, and take its groups."""
        for report in progress.transfers:
            self._verify_worker(seat, report)
        self.dropped_rollouts += progress.dropped
        for finished in progress.finished:
            if self._running_tasks.pop(finished.task.number, None) is not None:  # never twice
                self._last_workers[finished.task.number] = seat.number
                self._finished.append(finished)

    def _select_fresh_groups(self, count: int) -> list[FinishedRolloutTask]:
        """Finished groups that are young enough, at most so many; too old ones are queued again."""
        fresh: list[FinishedRolloutTask] = []
        for finished in self._finished:
            if (
                find_oldest_version(finished.group.rollouts, self.iteration)
                >= self.iteration - self._max_staleness
            ):
                fresh.append(finished)
                continue
            self.stale_groups += 1
            ticket = finished.task
            again = RolloutTask(
                ticket.number,
                ticket.request,
                ticket.group_size,
                ticket.temperature,
                ticket.seed,
                ticket.plays + 1,
            )
            self._queue.appendleft(again)
        awaited = [
            ticket
            for ticket in [*self._queue, *(t for t, _ in self._running_tasks.values())]
            if ticket.plays >= MAX_STALE_PLAYS
        ]
        if awaited:
            self._finished = fresh
            return []
        fresh.sort(key=lambda finished: -finished.task.plays)
        self._finished = fresh[count:]
        return fresh[:count]

    # Workers

    def _wait_for_workers(self, calls: Sequence[tuple[_WorkerSlot, Any]]) -> None:
        """Wait for calls of methods that return at once (the playing has a thread of its own); replace lost workers."""
        end = time.monotonic() + HEARTBEAT_TIMEOUT_S
        for seat, call in calls:
            try:
                while not self.cluster.wait_for_calls([call], _POLL_INTERVAL_S):
                    if time.monotonic() > end:
                        raise WorkerLost(NO_HEARTBEAT)
                self._unwrap_result(call)
            except WorkerLost as lost:
                self._replace_lost_worker(seat, str(lost))

    def _replace_lost_worker(self, seat: _WorkerSlot, how: str) -> None:
        """Queue again what a lost worker played, and put another into its place."""
        mine = sorted(number for number, (_, other) in self._running_tasks.items() if other is seat)
        for number in reversed(mine):
            self._queue.appendleft(self._running_tasks.pop(number)[0])
        self.replayed_groups += len(mine)
        self._replace_worker(seat, how, f"{len(mine)} groups are played again")

    def _record_schedule(self, taken: list[FinishedRolloutTask]) -> None:
        """Staleness of what is learned from, and its line in the schedule."""
        ages = [
            self.iteration - version
            for finished in taken
            for rollout in finished.group.rollouts
            for version in list_token_versions(rollout)
        ]
        self._staleness = {
            "policy/staleness_mean": sum(ages) / max(1, len(ages)),
            "policy/staleness_max": float(max(ages, default=0)),
        }
        if self.schedule is None:
            return
        groups = [
            {
                **finished.task.to_json(),
                "rollouts": {
                    r.trajectory.sample: r.version_starts for r in finished.group.rollouts
                },
            }
            for finished in taken
        ]
        if not self._is_schedule_truncated:
            _truncate_schedule(self.schedule, self.iteration)
            self._is_schedule_truncated = True
        line = json.dumps({"iteration": self.iteration, "part": self._part, "groups": groups})
        # before the checkpoint that follows
        append_bytes(self.schedule, line.encode() + b"\n", synced=True)

    def collect_metrics(self) -> dict[str, float]:
        """Those of every team, the age of what was learned from, and the state of the queue."""
        return (
            super().collect_metrics()
            | self._staleness
            | {
                "perf/stale_groups": float(self.stale_groups),
                "perf/dropped_rollouts": float(self.dropped_rollouts),
                "perf/queued_groups": float(
                    len(self._queue) + len(self._running_tasks) + len(self._finished)
                ),
            }
        )

    def close(self) -> None:
        """As of every team; what was under way is queued again."""
        self._queue = deque(self._list_open_tasks())
        self._running_tasks, self._finished, self._versions = {}, [], {}
        super().close()

    # Checkpoint

    def _list_open_tasks(self) -> list[RolloutTask]:
        """Tickets that were drawn and not learned from, by their numbers."""
        tickets = [*self._queue, *(ticket for ticket, _ in self._running_tasks.values())]
        return sorted(
            [*tickets, *(finished.task for finished in self._finished)],
            key=lambda ticket: ticket.number,
        )

    def state_dict(self) -> dict[str, Any]:
        """Tickets that were drawn and not learned from: a resumed run plays each of them."""
        return {
            "next": self._next_number,
            "open": [ticket.to_json() for ticket in self._list_open_tasks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; workers are started anew."""
        self._next_number = int(state["next"])
        self._queue = deque(RolloutTask.from_json(row) for row in state["open"])
        self._running_tasks, self._finished = {}, []


def _truncate_schedule(path: Path, iteration: int) -> None:
    """Cut what an interrupted run noted from this iteration on, and a last line that its end tore."""
    if not path.is_file():
        return
    place = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _parse_line_iteration(line) >= iteration:
                break
            place += len(line)
    truncate_file(path, place)


def _parse_line_iteration(line: bytes) -> float:
    """Iteration of a schedule's line; of a damaged one before all: it stays, and `read_schedule` names it."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return -math.inf


ScheduleRow = dict[str, Any]


def read_schedule(path: Path | str) -> dict[int, list[ScheduleRow]]:
    """Lines of a schedule by iteration. Of an iteration that was computed twice, since a run was resumed, the last.

    Raises: DataError naming file and line.
    """
    found: dict[int, list[ScheduleRow]] = {}
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: the schedule cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            iteration, part = int(row["iteration"]), int(row["part"])
            [RolloutTask.from_json(_extract_task_fields(group)) for group in row["groups"]]
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


def _extract_task_fields(group: ScheduleRow) -> ScheduleRow:
    return {name: value for name, value in group.items() if name != "rollouts"}


class ScheduleReplay:
    """Gives a trainer the groups that an asynchronous run learned from, in its process."""

    def __init__(self, path: Path | str, parts: WorkerConfig, max_staleness: int) -> None:
        """Raises: DataError for a file that is no schedule; SettingsError for a model that the engine cannot sample."""
        if not isinstance(parts.backend, Engine):
            raise SettingsError(
                "rollouts.replay_schedule: needs the rollout engine, which does not support this model"
            )
        self.path, self.config, self._max_staleness = path, parts, max_staleness
        self._engine = parts.backend
        self._engine.disable_cross_row_batching()
        self._rows = read_schedule(path)
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        self._environment: Environment | None = None
        self._iteration = self._part = -1

    def take_groups(
        self,
        iteration: int,
        count: int,
        *,
        groups_per_iteration: int,
        draw_task: Any,
        sampling: SamplingSettings,
        failures: EpisodeFailureMonitor,
        policy_version: int,
    ) -> list[RolloutGroup]:
        """As `AsyncWorkerGroup.take`. Raises: DataError where the schedule has nothing for this iteration."""
        if self._iteration != iteration:
            self._iteration, self._part = iteration, -1
            self._versions[iteration] = collect_trainable_weights(self.config.model, copy=True)
            for old in [
                version for version in self._versions if version < iteration - self._max_staleness
            ]:
                del self._versions[old]
        self._part += 1
        rows = self._rows.get(iteration, [])
        if self._part >= len(rows):
            raise DataError(
                f"{self.path}: the schedule ends before iteration {iteration + 1}; train for {iteration}"
            )
        try:
            groups = self._replay_groups(rows[self._part]["groups"], sampling)
        finally:
            load_trainable_weights(self.config.model, self._versions[iteration])
        failed = [episode for group in groups for episode in group.failed]
        finished = [group.collect_result() for group in groups]
        record_failures(failed, sum(group.task.group_size for group in groups), failures)
        for one in finished:
            for rollout in one.group.rollouts:
                rollout.trajectory.policy_version = policy_version
        return [one.group for one in finished]

    def _replay_groups(
        self, rows: Sequence[ScheduleRow], sampling: SamplingSettings
    ) -> list[RolloutTaskEpisodes]:
        if self._environment is None:
            self._environment = self.config.environment()
        environment = self._environment
        renderer = enable_native_tools(self.config.renderer, environment.tools)
        with ExitStack() as stack:
            pool = None
            if environment.blocking:
                pool = stack.enter_context(
                    StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s)
                )
            groups = []
            for row in rows:
                ticket = RolloutTask.from_json(_extract_task_fields(row))
                group = RolloutTaskEpisodes(
                    ticket, environment, renderer, sampling, pool, self._engine.max_length
                )
                for sample, sequence in enumerate(group.sequences):
                    sequence.version_starts = [
                        (int(n), int(v)) for n, v in row["rollouts"].get(str(sample), [])
                    ]
                groups.append(group)
            for temperature in dict.fromkeys(group.task.temperature for group in groups):
                self._replay_at_temperature(
                    temperature, [g for g in groups if g.task.temperature == temperature], sampling
                )
        return groups

    def _replay_at_temperature(
        self, temperature: float, groups: Sequence[RolloutTaskEpisodes], sampling: SamplingSettings
    ) -> None:
        own = dataclasses.replace(sampling, temperature=temperature)
        sequences = [
            s for group in groups for s in group.sequences if s.version_starts and not s.has_failed
        ]
        if not sequences:
            return
        run = ReplayEngineRun(self._engine, sequences, own, self._load_version)
        try:
            run.play_sequences()
        finally:
            run.close()

    def _load_version(self, version: int) -> None:
        if version not in self._versions:
            raise DataError(
                f"{self.path}: iteration {self._iteration} has tokens of version {version}, which is gone"
            )
        load_trainable_weights(self.config.model, self._versions[version])

    def collect_metrics(self) -> dict[str, float]:
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
