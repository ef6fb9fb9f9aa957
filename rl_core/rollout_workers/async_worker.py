"""Tickets: episodes on their way from the trainer to a worker and back, one group each.

A rollout worker that plays on a thread of its own while tickets and weights arrive.
"""

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
    """One group to play. Its number decides its random numbers, so it is the same group wherever it is played."""

    number: int
    request: EpisodeRequest
    group_size: int
    temperature: float
    seed: int  # of the sampling
    plays: int = 0  # times that it was given up as too old before

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {**dataclasses.asdict(self), "seed": str(self.seed)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RolloutTask:
        """Inverse of `to_json`."""
        return cls(**{**row, "request": EpisodeRequest(**row["request"]), "seed": int(row["seed"])})


@dataclass(frozen=True, slots=True)
class FinishedRolloutTask:
    """A ticket's group, and its episodes that failed."""

    task: RolloutTask
    group: RolloutGroup
    failed: list[FailedEpisode]


class VersionedEpisode(EpisodeSequence):
    """An episode that notes the versions of the weights that it was sampled with."""

    def __init__(self, *arguments: Any) -> None:
        self.version_starts: VersionStarts = []
        super().__init__(*arguments)


class RolloutTaskEpisodes:
    """The sequences of one ticket; those that are dropped are begun anew, each for itself."""

    def __init__(
        self,
        ticket: RolloutTask,
        environment: Environment,
        renderer: Renderer,
        sampling: SamplingSettings,
        pool: StepPool | None,
        max_length: int,
    ) -> None:
        """Begin the ticket's episodes. Raises: as `rollouts.collect.begin_group`."""
        self.task, self.failed = ticket, list[FailedEpisode]()
        self._max_length = max_length
        own = dataclasses.replace(sampling, temperature=ticket.temperature)
        self._build_sequences: Callable[[], list[VersionedEpisode]] = lambda: build_group(
            environment,
            renderer,
            GroupPlan(ticket.request, 0),
            ticket.group_size,
            own,
            pool,
            ticket.seed,
            self.failed.append,
            VersionedEpisode,
        )
        self.sequences = self._build_sequences()
        begin_group(self.sequences, max_length)

    def restart_episode(self, sequence: VersionedEpisode) -> VersionedEpisode:
        """The same episode from its beginning, in place of this one."""
        place = self.sequences.index(sequence)
        sequence.close()
        made = self._build_sequences()
        for index, other in enumerate(made):
            if index != place:
                other.close()
        made[place].begin_episode(self._max_length)
        self.sequences[place] = made[place]
        return made[place]

    @property
    def is_over(self) -> bool:
        """True = every episode has ended or failed."""
        return all(sequence.has_failed or sequence.is_over for sequence in self.sequences)

    def collect_result(self) -> FinishedRolloutTask:
        """The group, closed."""
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
    """Version that each sampled token was drawn under."""
    sampled, versions = sum(rollout.loss_mask), list[int]()
    starts = [*rollout.version_starts, (sampled, 0)]
    for (start, version), (end, _) in pairwise(starts):
        versions += [version] * (min(end, sampled) - min(start, sampled))
    return versions


def find_oldest_version(rollouts: Sequence[Rollout], default: int) -> int:
    """Oldest version that any of the rollouts was begun or sampled with."""
    return min(
        (version for rollout in rollouts for _, version in rollout.version_starts), default=default
    )


@dataclass(slots=True)
class WorkerProgress:
    """Work of a worker since it was asked last."""

    finished: list[FinishedRolloutTask] = field(default_factory=list)
    transfers: list[TransferReport] = field(default_factory=list)
    dropped: int = 0  # rollouts begun anew because of new weights


class _StopRequested(Exception):
    """The worker is to stop in the middle of a run."""


class AsyncRolloutWorker(RolloutWorker):
    """Plays the tickets that it has, in order; weights that arrive are taken between two steps of the engine."""

    def __init__(self, spec: WorkerSpec, base: Mapping[str, PackedTensor]) -> None:
        super().__init__(spec, base)
        if not isinstance(self.backend, Engine):
            raise WorkerFailed(
                "rollouts.max_staleness: weights change in the middle of a rollout, which the rollout engine does, and "
                "transformers' own forward pass, which samples from this model, does not; set 0"
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
        # begun, for the next run: the cache of the last one was too short
        self._deferred_groups: list[RolloutTaskEpisodes] = []
        self._partial: Literal["keep", "drop"] = "keep"

    # Called by the trainer, on any thread

    def begin(
        self,
        tasks: Sequence[RolloutTask],
        sampling: SamplingSettings,
        max_concurrent: int,
        partial: Literal["keep", "drop"],
    ) -> None:
        """Queue tickets, of which so many are played at once: the next one begins when another has ended."""
        with self._condition:
            self._tasks += tasks
            self._sampling, self._max_concurrent, self._partial = sampling, max_concurrent, partial
            self._condition.notify_all()
        if self._thread is None:
            # the engine that plays probes while the other one is in the middle of a run
            self.backend = Engine(
                self.model,
                eos_ids=self.spec.eos_ids,
                pad_id=self.spec.pad_id,
                max_length=self.spec.max_length,
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
        """Everything that was finished since the last call; waits so long for the first of it.

        Raises: the error that ended the playing.
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
            done, self._progress = self._progress, WorkerProgress()
            return done

    def end(self) -> None:
        """Stop playing, and wait for the thread."""
        with self._condition:
            self._is_ended = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    # The playing thread

    def _run_loop(self) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._tasks or self._updates or self._is_ended)
                if self._is_ended:
                    return
                self._apply_weight_updates(None)
                with self._condition:
                    tickets = [
                        self._tasks.popleft()
                        for _ in range(min(self._max_concurrent, len(self._tasks)))
                    ]
                if tickets:
                    self._run_tasks(tickets)
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

    def _run_tasks(self, tickets: Sequence[RolloutTask]) -> None:
        torch.set_num_threads(self.spec.threads)
        sampling = self._sampling
        with ExitStack() as stack:
            pool = None
            if self.environment.blocking:
                pool = stack.enter_context(
                    StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s)
                )

            def begin(ticket: RolloutTask) -> RolloutTaskEpisodes:
                return RolloutTaskEpisodes(
                    ticket, self.environment, self.renderer, sampling, pool, self.engine.max_length
                )

            groups = [begin(ticket) for ticket in tickets]
            while groups:
                temperature = groups[0].task.temperature
                now = [group for group in groups if group.task.temperature == temperature]
                groups = [group for group in groups if group.task.temperature != temperature]
                self._run_groups(now, sampling, begin)
                groups, self._deferred_groups = [*self._deferred_groups, *groups], []

    def _run_groups(
        self,
        groups: list[RolloutTaskEpisodes],
        sampling: SamplingSettings,
        begin: Callable[[RolloutTask], RolloutTaskEpisodes],
    ) -> None:
        """One run of the engine, which goes on for as long as there are tickets of this temperature."""
        own = dataclasses.replace(sampling, temperature=groups[0].task.temperature)
        waiting = list(groups)
        sequences = [
            sequence for group in groups for sequence in group.sequences if not sequence.has_failed
        ]
        owner = {id(sequence): group for group in groups for sequence in group.sequences}

        def between(run: StreamingEngineRun) -> None:
            if self._is_ended:
                raise _StopRequested
            for group in [group for group in waiting if group.is_over]:
                waiting.remove(group)
                self._publish_finished_task(group.collect_result())
                for sequence in group.sequences:
                    owner.pop(id(sequence), None)
            if self._updates and self._apply_weight_updates(run) and self._partial == "drop":
                dropped = run.restart_sequences(again)
                with self._condition:
                    self._progress.dropped += dropped
            while (
                len(waiting) < self._max_concurrent
                and (ticket := self._pop_matching_task(sampling, own.temperature)) is not None
            ):
                refill(run, begin(ticket))

        def refill(run: StreamingEngineRun, group: RolloutTaskEpisodes) -> None:
            fresh = [sequence for sequence in group.sequences if not sequence.has_failed]
            if not all(run.can_fit(sequence) for sequence in fresh):
                self._deferred_groups.append(group)
                return
            waiting.append(group)
            owner.update((id(sequence), group) for sequence in group.sequences)
            for sequence in fresh:
                run.add_sequence(sequence)

        def again(sequence: VersionedSequence) -> VersionedSequence | None:
            group = owner[id(sequence)]
            made = group.restart_episode(cast(VersionedEpisode, sequence))
            owner[id(made)] = group
            return None if made.has_failed else made

        if sequences:
            run = StreamingEngineRun(
                self.engine,
                sequences,
                own,
                version=lambda: self.version,
                between_steps=between,
                capacity=self._max_concurrent * groups[0].task.group_size,
            )
            try:
                run.play_sequences()
            finally:
                run.close()
        for group in waiting:
            self._publish_finished_task(group.collect_result())

    def _pop_matching_task(
        self, sampling: SamplingSettings, temperature: float
    ) -> RolloutTask | None:
        """The next ticket, if a run with these settings may take it."""
        with self._condition:
            if self._deferred_groups or not self._tasks or self._sampling != sampling:
                return None
            return self._tasks.popleft() if self._tasks[0].temperature == temperature else None

    def _publish_finished_task(self, finished: FinishedRolloutTask) -> None:
        with self._condition:
            self._progress.finished.append(finished)
            self._condition.notify_all()

    def _apply_weight_updates(self, run: StreamingEngineRun | None) -> bool:
        """Load all weights that have arrived, in order; True = there were some."""
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
