"""Asynchronous rollout workers: tasks of one group each, and the worker that plays them while new weights arrive."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import torch

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.environments.step_pool import StepPool
from rl_core.errors import PosttrainError, WorkerFailed
from rl_core.inference.engine import Engine
from rl_core.inference.versioned_run import StreamingEngineRun, VersionedSequence, VersionStarts
from rl_core.rollout_workers.sampler_probe import SamplerProbe
from rl_core.rollout_workers.weight_transfer import PackedTensor, WeightUpdate
from rl_core.rollout_workers.worker import RolloutWorker, TransferReport, WorkerSpec
from rl_core.rollouts.collect import GroupPlan, begin_group, build_group
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import SamplingSettings
from rl_core.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One group to play.

    Its number determines its random numbers, so it is the same group on every worker.
    """

    number: int
    request: EpisodeRequest
    group_size: int
    temperature: float
    seed: int  # of the sampling
    plays: int = 0  # times that its group became too old

    def to_json(self) -> dict[str, Any]:
        """Return the task as a dict."""
        return {**dataclasses.asdict(self), "seed": str(self.seed)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RolloutTask:
        """Build a task from the result of `to_json`."""
        return cls(**{**row, "request": EpisodeRequest(**row["request"]), "seed": int(row["seed"])})


@dataclass(frozen=True, slots=True)
class FinishedRolloutTask:
    """A task's group and its failed episodes."""

    task: RolloutTask
    group: RolloutGroup
    failed: list[FailedEpisode]


class VersionedEpisode(EpisodeSequence):
    """An episode that records the versions of the weights that sampled it."""

    def __init__(self, *arguments: Any) -> None:
        self.version_starts: VersionStarts = []
        super().__init__(*arguments)


class RolloutTaskEpisodes:
    """The sequences of one task; dropped sequences are restarted one by one."""

    def __init__(
        self,
        task: RolloutTask,
        environment: Environment,
        renderer: Renderer,
        sampling: SamplingSettings,
        pool: StepPool | None,
        max_length: int,
    ) -> None:
        """Begin the task's episodes.

        Raises: as `rollouts.collect.begin_group`.
        """
        self.task, self.failed = task, list[FailedEpisode]()
        self._max_length = max_length
        task_sampling = dataclasses.replace(sampling, temperature=task.temperature)
        self._build_sequences: Callable[[], list[VersionedEpisode]] = lambda: build_group(
            environment,
            renderer,
            GroupPlan(task.request, 0),
            task.group_size,
            task_sampling,
            pool,
            task.seed,
            self.failed.append,
            VersionedEpisode,
        )
        self.sequences = self._build_sequences()
        begin_group(self.sequences, max_length)

    def restart_episode(self, sequence: VersionedEpisode) -> VersionedEpisode:
        """Replace a sequence by the same episode from its beginning; return the new sequence."""
        position = self.sequences.index(sequence)
        sequence.close()
        replacements = self._build_sequences()
        for index, other in enumerate(replacements):
            if index != position:
                other.close()
        replacement = replacements[position]
        replacement.begin_episode(self._max_length)
        self.sequences[position] = replacement
        return replacement

    @property
    def is_over(self) -> bool:
        """True if every episode has ended or failed."""
        return all(sequence.has_failed or sequence.is_over for sequence in self.sequences)

    def collect_result(self) -> FinishedRolloutTask:
        """Close the episodes and return the finished group."""
        rollouts = []
        for sequence in self.sequences:
            sequence.close()
            if not sequence.has_failed:
                rollout = sequence.build_rollout(
                    min(version for _, version in sequence.version_starts)
                )
                rollout.version_starts = sequence.version_starts
                rollouts.append(rollout)
        return FinishedRolloutTask(self.task, RolloutGroup(rollouts), self.failed)


def list_token_versions(rollout: Rollout) -> list[int]:
    """List the version that sampled each token."""
    sampled, versions = sum(rollout.loss_mask), list[int]()
    starts = [*rollout.version_starts, (sampled, 0)]
    for (start, version), (end, _) in pairwise(starts):
        versions += [version] * (min(end, sampled) - min(start, sampled))
    return versions


def find_oldest_version(rollouts: Sequence[Rollout], default: int) -> int:
    """Return the oldest version in any of the rollouts."""
    return min(
        (version for rollout in rollouts for _, version in rollout.version_starts), default=default
    )


@dataclass(slots=True)
class WorkerProgress:
    """A worker's results since the last request."""

    finished: list[FinishedRolloutTask] = field(default_factory=list)
    transfers: list[TransferReport] = field(default_factory=list)
    dropped: int = 0  # rollouts restarted because of new weights


class _StopRequested(Exception):
    """Signal: the worker has to stop in the middle of a run."""


class AsyncRolloutWorker(RolloutWorker):
    """A worker that plays its tasks in order and loads new weights between two steps of the engine."""

    def __init__(self, spec: WorkerSpec, base: Mapping[str, PackedTensor]) -> None:
        super().__init__(spec, base)
        if not isinstance(self.backend, Engine):
            raise WorkerFailed(
                "rollouts.max_staleness: only the rollout engine can change weights during a rollout, and this model "
                "is sampled by transformers' own forward pass; set it to 0"
            )
        self.engine: Engine = self.backend
        self._condition = threading.Condition()
        self._tasks: deque[RolloutTask] = deque()
        self._updates: deque[tuple[WeightUpdate, SamplerProbe]] = deque()
        self._progress = WorkerProgress()
        self._error: PosttrainError | None = None
        self._thread: threading.Thread | None = None
        self._is_ended = False
        self._sampling, self._max_concurrent = SamplingSettings(), 1
        # groups that have begun but need a longer cache, for the next run
        self._deferred_groups: list[RolloutTaskEpisodes] = []
        self._partial: Literal["keep", "drop"] = "keep"

    # The trainer calls the next four methods, on any thread.

    def begin(
        self,
        tasks: Sequence[RolloutTask],
        sampling: SamplingSettings,
        max_concurrent: int,
        partial: Literal["keep", "drop"],
    ) -> None:
        """Queue tasks; play at most `max_concurrent` together: the next begins when another has ended."""
        with self._condition:
            self._tasks += tasks
            self._sampling, self._max_concurrent, self._partial = sampling, max_concurrent, partial
            self._condition.notify_all()
        if self._thread is None:
            # a second engine, to sample probes while the other one is in the middle of a run
            self.backend = Engine(
                self.model,
                eos_ids=self.spec.eos_ids,
                pad_id=self.spec.pad_id,
                max_length=self.spec.max_length,
                textless_ids=self.spec.textless_ids,
                autocast=self.spec.autocast,
            )
            self.backend.disable_cross_row_batching()
            self._thread = threading.Thread(target=self._run_loop, name="rollouts", daemon=True)
            self._thread.start()

    def send(self, update: WeightUpdate, probe: SamplerProbe) -> None:
        """Queue new weights."""
        with self._condition:
            self._updates.append((update, probe))
            self._condition.notify_all()

    def collect(self, wait_s: float = 0.0) -> WorkerProgress:
        """Return all results since the last call; wait up to `wait_s` seconds for the first.

        Raises: the error that ended the playing thread.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._progress.finished
                    or self._progress.transfers
                    or self._error
                    or self._is_ended
                ),
                wait_s,
            )
            if self._error is not None:
                raise self._error
            progress, self._progress = self._progress, WorkerProgress()
            return progress

    def end(self) -> None:
        """Stop playing and wait for the thread."""
        with self._condition:
            self._is_ended = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    # The remaining methods run on the playing thread.

    def _run_loop(self) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._tasks or self._updates or self._is_ended)
                if self._is_ended:
                    return
                self._apply_weight_updates(None)
                with self._condition:
                    count = min(self._max_concurrent, len(self._tasks))
                    tasks = [self._tasks.popleft() for _ in range(count)]
                if tasks:
                    self._run_tasks(tasks)
        except _StopRequested:
            return
        except PosttrainError as error:
            self._record_error(error)
        except Exception as error:
            self._record_error(
                WorkerFailed(f"a rollout worker raised {type(error).__name__}: {error}")
            )

    def _record_error(self, error: PosttrainError) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def _run_tasks(self, tasks: Sequence[RolloutTask]) -> None:
        torch.set_num_threads(self.spec.threads)
        sampling = self._sampling
        with ExitStack() as stack:
            pool = None
            if self.environment.blocking:
                pool = stack.enter_context(
                    StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s)
                )

            def begin_task(task: RolloutTask) -> RolloutTaskEpisodes:
                return RolloutTaskEpisodes(
                    task, self.environment, self.renderer, sampling, pool, self.engine.max_length
                )

            groups = [begin_task(task) for task in tasks]
            while groups:
                temperature = groups[0].task.temperature
                same_temperature = [
                    group for group in groups if group.task.temperature == temperature
                ]
                groups = [group for group in groups if group.task.temperature != temperature]
                self._run_groups(same_temperature, sampling, begin_task)
                groups, self._deferred_groups = [*self._deferred_groups, *groups], []

    def _run_groups(
        self,
        groups: list[RolloutTaskEpisodes],
        sampling: SamplingSettings,
        begin_task: Callable[[RolloutTask], RolloutTaskEpisodes],
    ) -> None:
        """Run the engine once, for as long as there are tasks of this temperature."""
        run_sampling = dataclasses.replace(sampling, temperature=groups[0].task.temperature)
        running = list(groups)
        sequences = [
            sequence for group in groups for sequence in group.sequences if not sequence.has_failed
        ]
        group_by_id = {id(sequence): group for group in groups for sequence in group.sequences}

        def between_steps(run: StreamingEngineRun) -> None:
            if self._is_ended:
                raise _StopRequested
            for group in [group for group in running if group.is_over]:
                running.remove(group)
                self._publish_finished_task(group.collect_result())
                for sequence in group.sequences:
                    group_by_id.pop(id(sequence), None)
            if self._updates and self._apply_weight_updates(run) and self._partial == "drop":
                dropped = run.restart_sequences(build_replacement)
                with self._condition:
                    self._progress.dropped += dropped
            while (
                len(running) < self._max_concurrent
                and (task := self._pop_matching_task(sampling, run_sampling.temperature))
                is not None
            ):
                add_group(run, begin_task(task))

        def add_group(run: StreamingEngineRun, group: RolloutTaskEpisodes) -> None:
            new_sequences = [sequence for sequence in group.sequences if not sequence.has_failed]
            if not all(run.can_fit(sequence) for sequence in new_sequences):
                self._deferred_groups.append(group)
                return
            running.append(group)
            group_by_id.update((id(sequence), group) for sequence in group.sequences)
            for sequence in new_sequences:
                run.add_sequence(sequence)

        def build_replacement(sequence: VersionedSequence) -> VersionedSequence | None:
            group = group_by_id[id(sequence)]
            replacement = group.restart_episode(cast(VersionedEpisode, sequence))
            group_by_id[id(replacement)] = group
            return None if replacement.has_failed else replacement

        if sequences:
            run = StreamingEngineRun(
                self.engine,
                sequences,
                run_sampling,
                version=lambda: self.version,
                between_steps=between_steps,
                capacity=self._max_concurrent * groups[0].task.group_size,
            )
            try:
                run.play_sequences()
            finally:
                run.close()
        for group in running:
            self._publish_finished_task(group.collect_result())

    def _pop_matching_task(
        self, sampling: SamplingSettings, temperature: float
    ) -> RolloutTask | None:
        """Return the next task if a run with these settings may take it, otherwise None."""
        with self._condition:
            if self._deferred_groups or not self._tasks or self._sampling != sampling:
                return None
            return self._tasks.popleft() if self._tasks[0].temperature == temperature else None

    def _publish_finished_task(self, finished: FinishedRolloutTask) -> None:
        with self._condition:
            self._progress.finished.append(finished)
            self._condition.notify_all()

    def _apply_weight_updates(self, run: StreamingEngineRun | None) -> bool:
        """Load all weights that have arrived, in order; return whether there were any."""
        reports: list[TransferReport] = []

        def load() -> None:
            while True:
                with self._condition:
                    if not self._updates:
                        return
                    update, probe = self._updates.popleft()
                reports.append(self.load(update, probe))

        load() if run is None else run.exchange_weights(load)
        with self._condition:
            self._progress.transfers += reports
            self._condition.notify_all()
        return bool(reports)
