"""Tasks of one collection on their way: which is played next, and what is played a second time because it is late.

Groups follow from their numbers alone, so whichever worker plays a task gives the same groups, and the first counts. A
clock decides who plays, never what.

The trainer's side of its rollout workers: weights out and verified, episodes in, lost workers replaced.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, FailedEpisode
from rl_core.errors import PosttrainError, SamplerMismatch, SettingsError, WorkerFailed
from rl_core.inference.sampling import RolloutBackend
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.rollout_workers.cluster import (
    NO_HEARTBEAT,
    HeartbeatMonitor,
    WorkerCluster,
    WorkerLost,
)
from rl_core.rollout_workers.sampler_probe import (
    ProbeCompletion,
    SamplerProbe,
    check_probe_completions,
    check_trainer_difference,
    sample_probe,
)
from rl_core.rollout_workers.weight_transfer import (
    WeightUpdate,
    collect_unique_weights,
    combine_digests,
    copy_without_weights,
    digest_tensors,
    pack_tensors,
)
from rl_core.rollout_workers.worker import (
    FinishedRolloutBatch,
    RolloutBatch,
    TransferReport,
    WorkerSpec,
    read_runtime_versions,
)
from rl_core.rollouts.collect import plan_groups, record_failures
from rl_core.rollouts.episode_sequence import EpisodeRequest, Renderer
from rl_core.settings import RolloutSettings, SamplingSettings
from rl_core.settings.rollouts import select_rounding_bound
from rl_core.storage.faults import inject_fault
from rl_core.timing import span
from rl_core.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LATE_FACTOR = 3.0  # times as long as the longest finished task takes one that others play, too


@dataclass
class _BatchProgress:
    """One task."""

    task: RolloutBatch
    num_workers: int = 0  # workers that play it
    started_at: float = 0.0  # when the first of them did
    result: FinishedRolloutBatch | None = None


@dataclass
class TaskQueue:
    """The tasks of one collection."""

    tasks: Sequence[RolloutBatch]
    clock: Callable[[], float] = time.monotonic
    _rows: list[_BatchProgress] = field(init=False)
    _waiting: deque[int] = field(init=False)
    # seconds of the longest finished task; None = none has finished
    _longest_s: float | None = None

    def __post_init__(self) -> None:
        self._rows = [_BatchProgress(task) for task in self.tasks]
        self._waiting = deque(range(len(self.tasks)))

    @property
    def is_over(self) -> bool:
        """True = every task has been played."""
        return all(row.result is not None for row in self._rows)

    @property
    def results(self) -> list[FinishedRolloutBatch]:
        """Played tasks, in the order of the tasks."""
        return [row.result for row in self._rows if row.result is not None]

    def start_next_task(self) -> int | None:
        """Number of the task that a free worker plays, which begins with this; None = nothing is to be played now."""
        if self._waiting:
            number = self._waiting.popleft()
            self._rows[number].started_at = self.clock()
        elif (late := self._find_late_task()) is not None:
            number = late
        else:
            return None
        self._rows[number].num_workers += 1
        return number

    def _find_late_task(self) -> int | None:
        """The oldest task that one worker alone plays, if it takes much longer than the others did."""
        alone = [
            number
            for number, row in enumerate(self._rows)
            if row.result is None and row.num_workers == 1
        ]
        if not alone or self._longest_s is None:
            return None
        oldest = min(alone, key=lambda number: self._rows[number].started_at)
        return (
            oldest
            if self.clock() - self._rows[oldest].started_at > LATE_FACTOR * self._longest_s
            else None
        )

    def is_finished(self, number: int) -> bool:
        """True = a worker has played it."""
        return self._rows[number].result is not None

    def record_result(self, number: int, played: FinishedRolloutBatch) -> None:
        """Note a result; the second of a task is the first one's equal, and left out."""
        row = self._rows[number]
        row.num_workers -= 1
        if row.result is None:
            row.result = played
            self._longest_s = max(self._longest_s or 0.0, self.clock() - row.started_at)

    def record_lost_worker(self, number: int) -> bool:
        """Note that a player is gone; True = the task is played again from its beginning."""
        row = self._rows[number]
        row.num_workers -= 1
        if row.num_workers or row.result is not None:
            return False
        self._waiting.appendleft(number)
        return True


logger = logging.getLogger(__name__)

MAX_LOSSES_PER_WORKER = 3  # of each worker's place within one collection; more, and the run ends
# of a collection for each of several workers: a slow one keeps less from the others
BATCHES_PER_WORKER = 2
_POLL_INTERVAL_S = 0.2  # between two looks at signals while workers play
# in shared memory at a time: the present, the next, and one that is being let go
_MAX_SHARED_VERSIONS = 3


@dataclass
class WorkerConfig:
    """Parts of the trainer that workers are made of."""

    model: PreTrainedModel
    backend: RolloutBackend  # the trainer's own sampler: what the workers' are compared with
    renderer: Renderer
    environment: Callable[[], Environment]
    eos_ids: Sequence[int]
    pad_id: int
    is_exact: bool = True  # False = a forward pass that rounds to half the digits (autocast)

    @property
    def bound(self) -> float:
        """Largest difference of log-probs, in nats, that rounding explains."""
        is_float32 = next(self.model.parameters()).dtype == torch.float32
        return select_rounding_bound(is_float32 and self.is_exact)


@dataclass
class _WorkerSlot:
    """The place of one worker, taken by another when it is lost."""

    number: int
    worker: Any
    losses: int = 0  # within the present collection
    version: int = -1  # of the weights that it was verified with
    # its call for a task that another worker has played meanwhile; None = it is free
    late_call: Any = None
    # asynchronous: its call that waits for finished groups; None = not asked
    collect_call: Any = None


@dataclass
class WorkerGroup:
    """Workers of one trainer. They are started by the first collection, and ended by `close`."""

    settings: RolloutSettings
    cluster: WorkerCluster
    config: WorkerConfig
    lost_workers: int = 0  # since the beginning
    replayed_groups: int = 0  # since the beginning: their worker was lost while it played them
    sent_bytes: int = 0  # of weights, by the newest transfer
    on_event: Callable[[str], None] | None = None  # told of every lost worker, in words for people
    _slots: list[_WorkerSlot] = field(default_factory=list)
    # spec and weights of the start, as the cluster keeps them
    _shared: tuple[Any, Any] | None = None
    # digest of each tensor that the workers have
    _sent_digests: dict[str, str] = field(default_factory=dict)
    _update: WeightUpdate | None = None  # the newest, and what a new worker needs in its place:
    _answers: list[ProbeCompletion] = field(default_factory=list)
    _probe: SamplerProbe | None = None
    _heartbeats: HeartbeatMonitor = field(init=False)

    def __post_init__(self) -> None:
        self._heartbeats = HeartbeatMonitor(self.cluster)

    # Playing

    def collect_rollouts(
        self,
        requests: Sequence[EpisodeRequest],
        *,
        group_size: int,
        sampling: SamplingSettings,
        seed: int,
        policy_version: int,
        failures: EpisodeFailureMonitor,
    ) -> list[RolloutGroup]:
        """As `rollouts.collect.collect` with the present weights, to the last bit, however many workers there are.

        Raises: as `collect`; SamplerMismatch for a worker whose weights or log-probs are not the trainer's;
            WorkerFailed where too many workers are lost.
        """
        for seat in self._slots:
            seat.losses = 0
        self.send_weights(sampling)
        plans, planned = plan_groups(requests, group_size), len(requests) * group_size
        tasks = [
            RolloutBatch(
                part, [plans[index] for index in part], group_size, sampling, seed, policy_version
            )
            for part in _split_batches(len(plans), self.settings.count)
        ]
        groups: dict[int, RolloutGroup] = {}
        failed: list[FailedEpisode] = []
        for played in self._run_batches(tasks):
            groups |= dict(zip(played.indices, played.groups, strict=True))
            failed += played.failed
            failures.check_failures(failed, planned)
        inject_fault("rollouts.played")
        record_failures(failed, planned, failures)
        return [groups[index] for index in range(len(plans))]

    def _run_batches(self, tasks: Sequence[RolloutBatch]) -> list[FinishedRolloutBatch]:
        """Every task once, by whichever worker is free; that of a lost one again, and one that is late by another, too.

        A worker whose task another one has played is left to it, takes no new weights, and comes back when it has
        ended: it costs the others at most its own share.
        """
        board = TaskQueue(tasks)
        running: dict[Any, tuple[_WorkerSlot, int]] = {}
        free = [seat for seat in self._slots if seat.late_call is None]
        try:
            while not board.is_over:
                while free and (number := board.start_next_task()) is not None:
                    seat = free.pop(0)
                    running[self.cluster.call_worker(seat.worker, "play", tasks[number])] = (
                        seat,
                        number,
                    )
                late = {seat.late_call: seat for seat in self._slots if seat.late_call is not None}
                for call in self.cluster.wait_for_calls([*running, *late], _POLL_INTERVAL_S):
                    if call in late:
                        self._reclaim_late_worker(late[call])
                        free.append(late[call])
                        continue
                    seat, number = running.pop(call)
                    self._heartbeats.forget_worker(seat.number)
                    try:
                        board.record_result(number, self._unwrap_result(call))
                    except WorkerLost as lost:
                        self._requeue_batch(board, number, seat, str(lost))
                    free.append(seat)
                free += self._replace_unresponsive(board, running)
        finally:  # of those that still play: their results are not needed, or an error ends the run
            for call, (seat, _) in running.items():
                seat.late_call = call
        return board.results

    def _requeue_batch(self, board: TaskQueue, number: int, seat: _WorkerSlot, how: str) -> None:
        # 0 = another one plays them, too
        groups = len(board.tasks[number].plans) if board.record_lost_worker(number) else 0
        self.replayed_groups += groups
        self._replace_worker(seat, how, f"{groups} groups are played again")

    def _replace_unresponsive(
        self, board: TaskQueue, running: dict[Any, tuple[_WorkerSlot, int]]
    ) -> list[_WorkerSlot]:
        """Replace workers that play or are late and give no sign of life; returns their seats, which are free now."""
        calls = {seat.number: call for call, (seat, _) in running.items()}
        busy = [seat for seat in self._slots if seat.number in calls or seat.late_call is not None]
        silent = set(
            self._heartbeats.list_unresponsive((seat.number, seat.worker) for seat in busy)
        )
        found = [seat for seat in busy if seat.number in silent]
        for seat in found:
            if seat.late_call is not None:
                self._replace_worker(seat, NO_HEARTBEAT, "it was late")
            else:
                self._requeue_batch(board, running.pop(calls[seat.number])[1], seat, NO_HEARTBEAT)
        return found

    def _reclaim_late_worker(self, seat: _WorkerSlot) -> None:
        """Give a worker whose late task has ended the weights that it has missed; one that was lost is replaced."""
        call, seat.late_call = seat.late_call, None
        self._heartbeats.forget_worker(seat.number)
        try:
            self._unwrap_result(call)  # the first result of its task counts
        except WorkerLost as lost:
            self._replace_worker(seat, str(lost), "it was late")
            return
        except PosttrainError as error:  # the other one met it, too, or it is of this machine alone
            logger.warning(
                "rollout worker %d failed at a task that another one has played: %s",
                seat.number,
                error,
            )
        assert self._update is not None
        if seat.version != self._update.number:
            self._load_workers([seat], self._build_full_update())

    def _unwrap_result(self, call: Any) -> Any:
        """Result of a call. Raises: the error that the worker met; WorkerLost."""
        value = self.cluster.fetch_result(call)
        if isinstance(value, PosttrainError):
            raise value
        return value

    # Weights

    def send_weights(self, sampling: SamplingSettings) -> None:
        """Give every worker the present weights, of which only changed tensors travel, and verify that it has them."""
        found = digest_tensors(collect_trainable_weights(self.config.model))
        if self._update is not None and found == self._sent_digests:
            return
        with span("weight_sync"):
            update = self._build_update(
                found, 0 if self._update is None else self._update.number + 1, sampling
            )
            if not self._slots:
                self._start_workers()
            else:
                self._load_workers([seat for seat in self._slots if seat.late_call is None], update)

    def _build_update(
        self, digests_by_name: dict[str, str], number: int, sampling: SamplingSettings
    ) -> WeightUpdate:
        """The present weights as a version, of which the digests are `found`."""
        weights = collect_trainable_weights(self.config.model)
        changed = {
            name: weights[name]
            for name, digest in digests_by_name.items()
            if self._sent_digests.get(name) != digest
        }
        self._update = WeightUpdate(number, pack_tensors(changed), combine_digests(digests_by_name))
        self.sent_bytes = self._update.num_bytes
        self._sent_digests = digests_by_name
        self._probe, self._answers = (
            SamplerProbe.from_sampling(self.config.model.config.vocab_size, sampling),
            [],
        )
        return self._update

    def _sample_trainer_probe(self) -> None:
        """The probe's answers of the trainer's own sampler, which its forward pass has to agree with; once a version.

        Asked for once the weights are under way, so that trainer and workers load and answer at the same time.
        """
        if self._answers:
            return
        parts = self.config
        assert self._probe is not None
        parts.backend.refresh_weights()
        self._answers = sample_probe(parts.backend, self._probe)
        check_trainer_difference(parts.model, self._answers, self._probe, parts.bound)

    def _load_workers(self, seats: Sequence[_WorkerSlot], update: WeightUpdate) -> None:
        """Send an update to these workers, and verify each; one that is lost meanwhile is replaced."""
        assert self._probe is not None
        shared = self.cluster.share_value(update)
        calls = {
            self.cluster.call_worker(seat.worker, "load", shared, self._probe): seat
            for seat in seats
        }
        self._sample_trainer_probe()
        while calls:
            for call in self.cluster.wait_for_calls(list(calls), _POLL_INTERVAL_S):
                seat = calls.pop(call)
                try:
                    self._verify_worker(seat, self._unwrap_result(call))
                except WorkerLost as lost:
                    self._replace_worker(seat, str(lost), "it was taking new weights")
            # not one that begins
            known = {seat.number: call for call, seat in calls.items() if seat.version >= 0}
            for number in self._heartbeats.list_unresponsive(
                (n, calls[call].worker) for n, call in known.items()
            ):
                seat = calls.pop(known[number])
                self._replace_worker(seat, NO_HEARTBEAT, "it was taking new weights")

    def _verify_worker(self, seat: _WorkerSlot, report: TransferReport) -> None:
        """Raises: SamplerMismatch where the worker has other weights, or samples from others."""
        expected, answers = self._find_expected_probe(report.number)
        who = f"rollout worker {seat.number} (process {report.pid})"
        if report.digest != expected:
            raise SamplerMismatch(
                f"{who}: after weight update {report.number} its weights have the digest {report.digest[:12]}, "
                f"the trainer's {expected[:12]}: the transfer did not arrive. None of its rollouts is used"
            )
        check_probe_completions(who, answers, report.answers, self.config.bound)
        seat.version = report.number

    def _find_expected_probe(self, number: int) -> tuple[str, list[ProbeCompletion]]:
        """Digest and probe's answers of a version."""
        assert self._update is not None and self._update.number == number
        return self._update.digest, self._answers

    # Workers

    def _start_workers(self) -> None:
        """Open the cluster, and start every worker with the present weights."""
        base = pack_tensors(collect_unique_weights(self.config.model))
        num_bytes = sum(packed.data.nbytes for packed in base.values())
        self.cluster.open_cluster(
            num_bytes
            + _MAX_SHARED_VERSIONS * (self._update.num_bytes if self._update is not None else 0)
        )
        self._shared = (self._share_spec(), self.cluster.share_value(base))
        self._slots = [
            _WorkerSlot(number, self._start_worker()) for number in range(self.settings.count)
        ]
        self._load_workers(self._slots, self._build_full_update())

    def _start_worker(self) -> Any:
        assert self._shared is not None
        return self.cluster.start_worker(*self._shared, is_live=self.settings.max_staleness > 0)

    def _share_spec(self) -> Any:
        parts = self.config
        device = next(parts.model.parameters()).device.type
        spec = WorkerSpec(
            copy_without_weights(parts.model),
            device,
            parts.renderer,
            parts.environment,
            list(parts.eos_ids),
            parts.pad_id,
            parts.backend.max_length,
            torch.get_num_threads(),
            read_runtime_versions(),
        )
        try:
            return self.cluster.share_value(spec)
        except (TypeError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"rollouts.workers: the environment or the model cannot be sent to another process ({error}); name the "
                "environment in the settings, or keep open files and locks out of its constructor"
            ) from error

    def _build_full_update(self) -> WeightUpdate:
        """The present version with all its tensors, for workers that have none before it."""
        assert self._update is not None
        weights = collect_trainable_weights(self.config.model)
        return WeightUpdate(self._update.number, pack_tensors(weights), self._update.digest)

    def _replace_worker(self, seat: _WorkerSlot, how: str, consequence: str) -> None:
        """Put a new worker into the place of a lost one. Raises: WorkerFailed where that was tried too often."""
        seat.losses += 1
        self.lost_workers += 1
        text = f"rollout worker {seat.number} was lost ({how}); {consequence}"
        logger.warning("%s", text)
        if self.on_event is not None:
            self.on_event(text)
        self.cluster.stop_worker(seat.worker)
        seat.late_call, seat.collect_call, seat.version = None, None, -1
        self._heartbeats.forget_worker(seat.number)
        if seat.losses > MAX_LOSSES_PER_WORKER:
            raise WorkerFailed(
                f"rollout worker {seat.number} was lost {seat.losses} times within one iteration, the last time: "
                f"{how}. Look at the memory of its machine and at what the environment does; the same command resumes"
            )
        seat.worker = self._start_worker()
        self._load_workers([seat], self._build_full_update())

    def collect_metrics(self) -> dict[str, float]:
        """Counts since the beginning, and the size of the newest transfer."""
        return {
            "perf/rollout_workers": float(len(self._slots)),
            "perf/lost_workers": float(self.lost_workers),
            "perf/late_workers": float(sum(seat.late_call is not None for seat in self._slots)),
            "perf/replayed_groups": float(self.replayed_groups),
            "perf/weight_bytes": float(self.sent_bytes),
        }

    def close(self) -> None:
        """End all workers; a later collection starts others."""
        self._slots, self._shared, self._update, self._sent_digests = [], None, None, {}
        self._heartbeats = HeartbeatMonitor(self.cluster)
        self.cluster.close()


def _split_batches(count: int, workers: int) -> list[list[int]]:
    """Indices of each task: all in one for a single worker, else TASKS_EACH tasks for each."""
    tasks = min(count, workers * BATCHES_PER_WORKER if workers > 1 else 1)
    edges = [count * place // tasks for place in range(tasks + 1)] if tasks else []
    return [list(range(begin, end)) for begin, end in pairwise(edges)]
