"""Asynchronous rollouts: workers play ahead of the trainer with weights up to `max_staleness` versions old.

A weights version has the number of the iteration that learns with it. Iteration i may learn from a group if none of
its tokens is older than version i - max_staleness. A group that became too old is played again; one that became too
old twice is waited for.

`ScheduleReplay` repeats an asynchronous run from its schedule: the same groups, each token under the same version,
without workers. A schedule has one line per batch of rollouts taken: the iteration, how often it had taken some
before, and for every group its task and the version starts of its rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    POLL_INTERVAL_S,
    WorkerConfig,
    WorkerGroup,
    WorkerSlot,
)
from rl_core.rollouts.collect import enable_native_tools, record_failures
from rl_core.settings import SamplingSettings
from rl_core.storage.append_log import AppendLog, extract_number
from rl_core.timing import span
from rl_core.types import RolloutGroup

logger = logging.getLogger(__name__)

DrawTask = Callable[[int], RolloutTask]  # makes the task of a number
MAX_STALE_PLAYS = 2  # times that a group may become too old before an iteration waits for it
COLLECT_TIMEOUT_S = 5.0  # a worker waits this long for a result before it returns none


@dataclass
class AsyncWorkerGroup(WorkerGroup):
    """A worker group that plays while the trainer updates. Tasks are drawn in order of their numbers, each once."""

    schedule: Path | None = None  # file that records the groups of each iteration, for a replay
    stale_groups: int = 0  # groups so far that became too old and were played again
    dropped_rollouts: int = 0  # rollouts so far that were restarted because of new weights
    iteration: int = -1
    # whether lines of an interrupted run were removed from the schedule
    _is_schedule_truncated: bool = False
    _part: int = -1  # number of earlier `take_groups` calls of this iteration
    # optimizer steps behind each version
    _steps_by_version: dict[int, int] = field(default_factory=dict)
    _next_number: int = 0
    _queue: deque[RolloutTask] = field(default_factory=deque)  # drawn, not assigned to a worker
    _running_tasks: dict[int, tuple[RolloutTask, WorkerSlot]] = field(default_factory=dict)
    _finished: list[FinishedRolloutTask] = field(default_factory=list)
    _versions: dict[int, tuple[str, list[ProbeCompletion]]] = field(default_factory=dict)
    # task number of a finished group -> slot number of its worker
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
        """Return the next `count` groups to learn from, in the order in which they finished.

        Args:
            iteration: that learns from them, with the current weights.
            groups_per_iteration: at most (max_staleness + 1) times this many groups are in progress or waiting.
            draw_task: makes the task of a number; called once per number.
            policy_version: optimizer steps behind the current weights.
        Raises: as `WorkerGroup.collect_rollouts`.
        """
        self._part = self._part + 1 if self.iteration == iteration else 0
        self.iteration = iteration
        self._steps_by_version[iteration] = policy_version
        self._publish_weights(iteration, sampling)
        for slot in self._slots:
            slot.losses = 0
        taken: list[FinishedRolloutTask] = []
        wait_s = 0.0
        while len(taken) < count:
            self._draw_tasks_ahead(groups_per_iteration, len(taken), draw_task)
            self._assign_tasks(groups_per_iteration, sampling)
            self._collect_finished(wait_s)
            fresh = self._select_fresh_groups(count - len(taken))
            taken += fresh
            wait_s = 0.0 if fresh else POLL_INTERVAL_S
        failed = [episode for finished in taken for episode in finished.failed]
        for finished in taken:
            for rollout in finished.group.rollouts:
                oldest = min(version for _, version in rollout.version_starts)
                rollout.trajectory.policy_version = self._steps_by_version.get(oldest, 0)
            self._last_workers.pop(finished.task.number, None)
        self._record_schedule(taken)
        record_failures(failed, _list_levels(finished.task for finished in taken), failures)
        return [finished.group for finished in taken]

    def _publish_weights(self, iteration: int, sampling: SamplingSettings) -> None:
        """Send the current weights as the version of this iteration, once; workers load them when they can."""
        if self._update is not None and self._update.number == iteration:
            return
        with span("weight_sync"):
            digests = digest_tensors(collect_trainable_weights(self.config.model))
            update = self._build_update(digests, iteration, sampling)
            for number in [number for number in self._versions if number < iteration - 64]:
                del self._versions[number], self._steps_by_version[number]
            if not self._slots:
                self._start_workers()
                return
            shared = self.cluster.share_value(update)
            calls = [
                (slot, self.cluster.call_worker(slot.worker, "send", shared, self._probe))
                for slot in self._slots
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

    def _draw_tasks_ahead(self, groups_per_iteration: int, taken: int, draw_task: DrawTask) -> None:
        """Draw tasks up to the bound: back-pressure on the workers; `_select_fresh_groups` holds back the trainer."""
        bound = groups_per_iteration * (self._max_staleness + 1)
        while self._count_open_tasks() + taken < bound:
            self._queue.append(draw_task(self._next_number))
            self._next_number += 1

    def _assign_tasks(self, groups_per_iteration: int, sampling: SamplingSettings) -> None:
        """Assign tasks evenly to the workers; a slow worker keeps those that it has and gets no more.

        A group that became too old goes to another worker than the one that was too slow, if there is room; one that
        an iteration will wait for may exceed the even share.
        """
        max_per_worker = math.ceil(
            groups_per_iteration * (self._max_staleness + 1) / len(self._slots)
        )
        loads = {slot.number: 0 for slot in self._slots}
        for _, slot in self._running_tasks.values():
            loads[slot.number] += 1
        assigned: dict[int, list[RolloutTask]] = {slot.number: [] for slot in self._slots}
        while self._queue:
            task = self._queue[0]
            slow_number = (
                self._last_workers.get(task.number) if task.plays and len(loads) > 1 else None
            )
            with_room = [number for number, load in loads.items() if load < max_per_worker]
            preferred = [
                number
                for number in (loads if task.plays >= MAX_STALE_PLAYS else with_room)
                if number != slow_number
            ]
            if not (preferred or with_room):
                break
            number = min(preferred or with_room, key=lambda number: (loads[number], number))
            assigned[number].append(self._queue.popleft())
            loads[number] += 1
        calls = []
        for slot in self._slots:
            if tasks := assigned[slot.number]:
                self._running_tasks |= {task.number: (task, slot) for task in tasks}
                call = self.cluster.call_worker(
                    slot.worker, "begin", tasks, sampling, max_per_worker, self.settings.partial
                )
                calls.append((slot, call))
        self._wait_for_workers(calls)

    def _collect_finished(self, wait_s: float) -> None:
        """Collect everything that workers have finished; wait up to `wait_s` seconds for the first result.

        Each worker always has one waiting call, also while the trainer updates, so a finished group is reported
        immediately and workers are not polled in vain.
        """
        for slot in self._slots:
            if slot.collect_call is None:
                slot.collect_call = self.cluster.call_concurrently(
                    slot.worker, "collect", COLLECT_TIMEOUT_S
                )
        waiting = {slot.collect_call: slot for slot in self._slots}
        while waiting and (ended := self.cluster.wait_for_calls(list(waiting), wait_s)):
            wait_s = 0.0
            for call in ended:
                slot = waiting.pop(call)
                slot.collect_call = None
                try:
                    self._receive_progress(slot, self._unwrap_result(call))
                except WorkerLost as lost:
                    self._replace_lost_worker(slot, str(lost))
        for number in self._heartbeats.list_unresponsive(
            (slot.number, slot.worker) for slot in self._slots
        ):
            self._replace_lost_worker(self._slots[number], NO_HEARTBEAT)

    def _receive_progress(self, slot: WorkerSlot, progress: WorkerProgress) -> None:
        """Verify the weights that a worker has played with, and take its groups."""
        for report in progress.transfers:
            self._verify_worker(slot, report)
        self.dropped_rollouts += progress.dropped
        for finished in progress.finished:
            if (
                self._running_tasks.pop(finished.task.number, None) is not None
            ):  # never count a group twice
                self._last_workers[finished.task.number] = slot.number
                self._finished.append(finished)

    def _select_fresh_groups(self, count: int) -> list[FinishedRolloutTask]:
        """Return at most `count` finished groups that are fresh enough; queue those that are too old again."""
        fresh: list[FinishedRolloutTask] = []
        for finished in self._finished:
            oldest = find_oldest_version(finished.group.rollouts, self.iteration)
            if oldest >= self.iteration - self._max_staleness:
                fresh.append(finished)
                continue
            self.stale_groups += 1
            task = finished.task
            self._queue.appendleft(dataclasses.replace(task, plays=task.plays + 1))
        awaited = [
            task
            for task in [*self._queue, *(t for t, _ in self._running_tasks.values())]
            if task.plays >= MAX_STALE_PLAYS
        ]
        if awaited:
            self._finished = fresh
            return []
        fresh.sort(key=lambda finished: -finished.task.plays)
        self._finished = fresh[count:]
        return fresh[:count]

    def _wait_for_workers(self, calls: Sequence[tuple[WorkerSlot, Any]]) -> None:
        """Wait for calls that return immediately (playing has its own thread); replace lost workers."""
        end = time.monotonic() + HEARTBEAT_TIMEOUT_S
        for slot, call in calls:
            try:
                while not self.cluster.wait_for_calls([call], POLL_INTERVAL_S):
                    if time.monotonic() > end:
                        raise WorkerLost(NO_HEARTBEAT)
                self._unwrap_result(call)
            except WorkerLost as lost:
                self._replace_lost_worker(slot, str(lost))

    def _replace_lost_worker(self, slot: WorkerSlot, reason: str) -> None:
        """Queue a lost worker's tasks again and start another worker in its slot."""
        lost_numbers = sorted(
            number for number, (_, other) in self._running_tasks.items() if other is slot
        )
        for number in reversed(lost_numbers):
            self._queue.appendleft(self._running_tasks.pop(number)[0])
        self.replayed_groups += len(lost_numbers)
        self._replace_worker(slot, reason, f"{len(lost_numbers)} groups are played again")

    def _record_schedule(self, taken: list[FinishedRolloutTask]) -> None:
        """Record the staleness of the taken groups and append their line to the schedule."""
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
        # synced, so that it is on disk before the next checkpoint
        log = AppendLog(
            self.schedule,
            synced=True,
            checksums=False,
            allow_nan=True,
            consequence="the schedule cannot be replayed",
        )
        if not self._is_schedule_truncated:
            # A damaged line remains, and `read_schedule` refuses it.
            log.truncate_tail(lambda row: extract_number(row, "iteration") >= self.iteration)
            self._is_schedule_truncated = True
        row = {"iteration": self.iteration, "part": self._part, "groups": groups}
        log.append_record(row)

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of every worker group, the staleness of the taken groups, and the queue's state."""
        return (
            super().collect_metrics()
            | self._staleness
            | {
                "perf/stale_groups": float(self.stale_groups),
                "perf/dropped_rollouts": float(self.dropped_rollouts),
                "perf/queued_groups": float(self._count_open_tasks()),
            }
        )

    def close(self) -> None:
        """End all workers; queue tasks in progress again."""
        self._queue = deque(self._list_open_tasks())
        self._running_tasks, self._finished, self._versions = {}, [], {}
        super().close()

    def _count_open_tasks(self) -> int:
        return len(self._queue) + len(self._running_tasks) + len(self._finished)

    def _list_open_tasks(self) -> list[RolloutTask]:
        """List tasks that were drawn and not learned from, by number."""
        tasks = [*self._queue, *(task for task, _ in self._running_tasks.values())]
        tasks += [finished.task for finished in self._finished]
        return sorted(tasks, key=lambda task: task.number)

    def state_dict(self) -> dict[str, Any]:
        """Return tasks that were drawn and not learned from: a resumed run plays each of them."""
        return {
            "next": self._next_number,
            "open": [task.to_json() for task in self._list_open_tasks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tasks of `state_dict`; workers are started again."""
        self._next_number = int(state["next"])
        self._queue = deque(RolloutTask.from_json(row) for row in state["open"])
        self._running_tasks, self._finished = {}, []


ScheduleRow = dict[str, Any]


def _list_levels(tasks: Iterable[RolloutTask]) -> list[str]:
    """List the level of every planned episode."""
    return [task.request.level for task in tasks for _ in range(task.group_size)]


def read_schedule(path: Path | str) -> dict[int, list[ScheduleRow]]:
    """Read the lines of a schedule by iteration.

    If an iteration was computed twice because the run was resumed, its last lines count.
    Raises: DataError naming file and line.
    """
    rows_by_iteration: dict[int, list[ScheduleRow]] = {}
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
                f"{path}, line {number}: invalid line of a schedule ({type(error).__name__}: {error})"
            ) from error
        if part == 0:
            rows_by_iteration = {
                earlier: rows for earlier, rows in rows_by_iteration.items() if earlier < iteration
            }
        rows_by_iteration.setdefault(iteration, []).append(row)
    if not rows_by_iteration:
        raise DataError(f"{path}: the schedule is empty; asynchronous runs write it")
    return rows_by_iteration


def _extract_task_fields(group: ScheduleRow) -> ScheduleRow:
    return {name: value for name, value in group.items() if name != "rollouts"}


class ScheduleReplay:
    """A source of the groups that an asynchronous run learned from, played in the trainer's process."""

    def __init__(self, path: Path | str, config: WorkerConfig, max_staleness: int) -> None:
        """Read the schedule.

        Raises: DataError for an invalid schedule; SettingsError for a model that the engine cannot sample.
        """
        if not isinstance(config.backend, Engine):
            raise SettingsError(
                "rollouts.replay_schedule: needs the rollout engine, which does not support this model"
            )
        self.path, self.config, self._max_staleness = path, config, max_staleness
        self._engine = config.backend
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
        """See `AsyncWorkerGroup.take_groups`.

        Raises: DataError if the schedule has no groups for this iteration.
        """
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
        record_failures(failed, _list_levels(group.task for group in groups), failures)
        for result in finished:
            for rollout in result.group.rollouts:
                rollout.trajectory.policy_version = policy_version
        return [result.group for result in finished]

    def _replay_groups(
        self, rows: Sequence[ScheduleRow], sampling: SamplingSettings
    ) -> list[RolloutTaskEpisodes]:
        if self._environment is None:
            self._environment = self.config.environment()
        environment = self._environment
        renderer = enable_native_tools(self.config.renderer, environment)
        with ExitStack() as stack:
            pool = None
            if environment.blocking:
                pool = stack.enter_context(
                    StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s)
                )
            groups = []
            for row in rows:
                task = RolloutTask.from_json(_extract_task_fields(row))
                group = RolloutTaskEpisodes(
                    task, environment, renderer, sampling, pool, self._engine.max_length
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
        run_sampling = dataclasses.replace(sampling, temperature=temperature)
        sequences = [
            s for group in groups for s in group.sequences if s.version_starts and not s.has_failed
        ]
        if not sequences:
            return
        run = ReplayEngineRun(self._engine, sequences, run_sampling, self._load_version)
        try:
            run.play_sequences()
        finally:
            run.close()

    def _load_version(self, version: int) -> None:
        if version not in self._versions:
            raise DataError(
                f"{self.path}: iteration {self._iteration} has tokens of version {version}, "
                "whose weights are no longer stored"
            )
        load_trainable_weights(self.config.model, self._versions[version])

    def collect_metrics(self) -> dict[str, float]:
        """Return nothing: a replay has no metrics."""
        return {}

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of versions that later iterations may need."""
        return {"versions": {str(version): weights for version, weights in self._versions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights of `state_dict`."""
        self._versions = {int(version): weights for version, weights in state["versions"].items()}
