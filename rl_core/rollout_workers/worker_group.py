"""The trainer's side of its rollout workers: weights out and verified, episodes in, lost workers replaced.

Groups depend on their numbers alone: whichever worker plays a task gives the same groups, and the first result
counts. A clock decides who plays, never what.
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
from rl_core.types import AutocastPrecision, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

LATE_FACTOR = 3.0  # a task is late after this many times the duration of the longest finished one
MAX_LOSSES_PER_WORKER = 3  # of each slot within one collection; more end the run
BATCHES_PER_WORKER = (
    2  # tasks per worker in one collection: more than one, so that a slow worker holds up less
)
POLL_INTERVAL_S = 0.2  # how often signals are checked while workers play
_MAX_SHARED_VERSIONS = (
    3  # in shared memory at a time: the current, the next, and one being released
)


@dataclass
class _BatchProgress:
    """The state of one task."""

    task: RolloutBatch
    num_workers: int = 0  # workers that are playing it
    started_at: float = 0.0  # when the first of them started
    result: FinishedRolloutBatch | None = None


@dataclass
class TaskQueue:
    """The tasks of one collection: which is played next, and which is played a second time because it is late."""

    tasks: Sequence[RolloutBatch]
    clock: Callable[[], float] = time.monotonic
    _rows: list[_BatchProgress] = field(init=False)
    _waiting: deque[int] = field(init=False)
    # duration of the longest finished task; None = none has finished
    _longest_s: float | None = None

    def __post_init__(self) -> None:
        self._rows = [_BatchProgress(task) for task in self.tasks]
        self._waiting = deque(range(len(self.tasks)))

    @property
    def is_over(self) -> bool:
        """True if every task has been played."""
        return all(row.result is not None for row in self._rows)

    @property
    def results(self) -> list[FinishedRolloutBatch]:
        """Results in the order of the tasks."""
        return [row.result for row in self._rows if row.result is not None]

    def start_next_task(self) -> int | None:
        """Start a task on a free worker and return its number; return None if there is nothing to play now."""
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
        """Return the oldest task with a single worker if it takes much longer than the others did."""
        single = [
            number
            for number, row in enumerate(self._rows)
            if row.result is None and row.num_workers == 1
        ]
        if not single or self._longest_s is None:
            return None
        oldest = min(single, key=lambda number: self._rows[number].started_at)
        duration = self.clock() - self._rows[oldest].started_at
        return oldest if duration > LATE_FACTOR * self._longest_s else None

    def is_finished(self, number: int) -> bool:
        """Return whether a worker has played the task."""
        return self._rows[number].result is not None

    def record_result(self, number: int, result: FinishedRolloutBatch) -> None:
        """Store a result; ignore the second one of a task, which equals the first."""
        row = self._rows[number]
        row.num_workers -= 1
        if row.result is None:
            row.result = result
            self._longest_s = max(self._longest_s or 0.0, self.clock() - row.started_at)

    def record_lost_worker(self, number: int) -> bool:
        """Record that a worker of the task was lost; return True if the task is played again from its beginning."""
        row = self._rows[number]
        row.num_workers -= 1
        if row.num_workers or row.result is not None:
            return False
        self._waiting.appendleft(number)
        return True


@dataclass
class WorkerConfig:
    """The parts of the trainer that workers are built from."""

    model: PreTrainedModel
    backend: RolloutBackend  # the trainer's sampler, the reference for the workers' samplers
    renderer: Renderer
    environment: Callable[[], Environment]
    eos_ids: Sequence[int]
    pad_id: int
    is_exact: bool = True  # False = a forward pass in reduced precision (autocast)
    textless_ids: Sequence[int] = ()  # tokens that are never sampled
    autocast: AutocastPrecision = "none"  # of the trainer's forward pass

    @property
    def bound(self) -> float:
        """Largest difference of log-probs, in nats, that rounding explains."""
        is_float32 = next(self.model.parameters()).dtype == torch.float32
        return select_rounding_bound(is_float32 and self.is_exact)


@dataclass
class WorkerSlot:
    """The slot of one worker, reused by another when it is lost."""

    number: int
    worker: Any
    losses: int = 0  # within the current collection
    version: int = -1  # of the last verified weights
    # its call for a task that another worker has already finished; None = not late
    late_call: Any = None
    # asynchronous: its call that waits for finished groups; None = none
    collect_call: Any = None


@dataclass
class WorkerGroup:
    """The workers of one trainer, started by the first collection and ended by `close`."""

    settings: RolloutSettings
    cluster: WorkerCluster
    config: WorkerConfig
    lost_workers: int = 0  # so far
    replayed_groups: int = 0  # groups so far whose worker was lost while it played them
    sent_bytes: int = 0  # of weights, by the newest transfer
    on_event: Callable[[str], None] | None = None  # called with a message for every lost worker
    _slots: list[WorkerSlot] = field(default_factory=list)
    # spec and initial weights, as shared values
    _shared: tuple[Any, Any] | None = None
    # digest of each tensor on the workers
    _sent_digests: dict[str, str] = field(default_factory=dict)
    _update: WeightUpdate | None = None  # the newest version; _answers and _probe belong to it
    _answers: list[ProbeCompletion] = field(default_factory=list)
    _probe: SamplerProbe | None = None
    _heartbeats: HeartbeatMonitor = field(init=False)

    def __post_init__(self) -> None:
        self._heartbeats = HeartbeatMonitor(self.cluster)

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
        """Collect as `rollouts.collect.collect_rollouts` does with the current weights, bit for bit for any number of
        workers.

        Raises: as `collect_rollouts`; SamplerMismatch if a worker's weights or log-probs differ from the trainer's;
            WorkerFailed if too many workers are lost.
        """
        for slot in self._slots:
            slot.losses = 0
        self.send_weights(sampling)
        plans, planned = plan_groups(requests, group_size), len(requests) * group_size
        tasks = [
            RolloutBatch(
                indices,
                [plans[index] for index in indices],
                group_size,
                sampling,
                seed,
                policy_version,
            )
            for indices in _split_batches(len(plans), self.settings.count)
        ]
        groups: dict[int, RolloutGroup] = {}
        failed: list[FailedEpisode] = []
        for batch in self._run_batches(tasks):
            groups |= dict(zip(batch.indices, batch.groups, strict=True))
            failed += batch.failed
            failures.check_failures(failed, planned)
        inject_fault("rollouts.played")
        record_failures(failed, [request.level for request in requests] * group_size, failures)
        return [groups[index] for index in range(len(plans))]

    def _run_batches(self, tasks: Sequence[RolloutBatch]) -> list[FinishedRolloutBatch]:
        """Run every task once, on whichever worker is free; repeat tasks of lost workers, and late ones on a second
        worker.

        A worker whose task another one has finished keeps playing it, gets no new weights, and rejoins when it has
        ended: it costs the others at most its own share.
        """
        queue = TaskQueue(tasks)
        running: dict[Any, tuple[WorkerSlot, int]] = {}
        free = [slot for slot in self._slots if slot.late_call is None]
        try:
            while not queue.is_over:
                while free and (number := queue.start_next_task()) is not None:
                    slot = free.pop(0)
                    call = self.cluster.call_worker(slot.worker, "play", tasks[number])
                    running[call] = (slot, number)
                late = {slot.late_call: slot for slot in self._slots if slot.late_call is not None}
                for call in self.cluster.wait_for_calls([*running, *late], POLL_INTERVAL_S):
                    if call in late:
                        self._reclaim_late_worker(late[call])
                        free.append(late[call])
                        continue
                    slot, number = running.pop(call)
                    self._heartbeats.forget_worker(slot.number)
                    try:
                        queue.record_result(number, self._unwrap_result(call))
                    except WorkerLost as lost:
                        self._requeue_batch(queue, number, slot, str(lost))
                    free.append(slot)
                free += self._replace_unresponsive(queue, running)
        finally:  # results of those still playing are not needed, or an error ends the run
            for call, (slot, _) in running.items():
                slot.late_call = call
        return queue.results

    def _requeue_batch(self, queue: TaskQueue, number: int, slot: WorkerSlot, reason: str) -> None:
        # 0 = another worker plays them too
        groups = len(queue.tasks[number].plans) if queue.record_lost_worker(number) else 0
        self.replayed_groups += groups
        self._replace_worker(slot, reason, f"{groups} groups are played again")

    def _replace_unresponsive(
        self, queue: TaskQueue, running: dict[Any, tuple[WorkerSlot, int]]
    ) -> list[WorkerSlot]:
        """Replace workers without a heartbeat that play or are late; return their slots, which are now free."""
        calls = {slot.number: call for call, (slot, _) in running.items()}
        busy = [slot for slot in self._slots if slot.number in calls or slot.late_call is not None]
        silent = set(
            self._heartbeats.list_unresponsive((slot.number, slot.worker) for slot in busy)
        )
        unresponsive = [slot for slot in busy if slot.number in silent]
        for slot in unresponsive:
            if slot.late_call is not None:
                self._replace_worker(slot, NO_HEARTBEAT, "it was late")
            else:
                self._requeue_batch(queue, running.pop(calls[slot.number])[1], slot, NO_HEARTBEAT)
        return unresponsive

    def _reclaim_late_worker(self, slot: WorkerSlot) -> None:
        """Send a worker whose late task has ended the weights that it missed; replace it if it was lost."""
        call, slot.late_call = slot.late_call, None
        self._heartbeats.forget_worker(slot.number)
        try:
            self._unwrap_result(call)  # the first result of its task counts
        except WorkerLost as lost:
            self._replace_worker(slot, str(lost), "it was late")
            return
        except (
            PosttrainError
        ) as error:  # the other worker met the error too, or it only concerns this machine
            logger.warning(
                "rollout worker %d failed at a task that another worker has finished: %s",
                slot.number,
                error,
            )
        assert self._update is not None
        if slot.version != self._update.number:
            self._load_workers([slot], self._build_full_update())

    def _unwrap_result(self, call: Any) -> Any:
        """Return the result of a call.

        Raises: the worker's error; WorkerLost.
        """
        value = self.cluster.fetch_result(call)
        if isinstance(value, PosttrainError):
            raise value
        return value

    def send_weights(self, sampling: SamplingSettings) -> None:
        """Send every worker the changed tensors of the current weights and verify that it has them."""
        digests = digest_tensors(collect_trainable_weights(self.config.model))
        if self._update is not None and digests == self._sent_digests:
            return
        with span("weight_sync"):
            number = 0 if self._update is None else self._update.number + 1
            update = self._build_update(digests, number, sampling)
            if not self._slots:
                self._start_workers()
            else:
                self._load_workers([slot for slot in self._slots if slot.late_call is None], update)

    def _build_update(
        self, digests_by_name: dict[str, str], number: int, sampling: SamplingSettings
    ) -> WeightUpdate:
        """Build a version of the current weights, which have these digests."""
        weights = collect_trainable_weights(self.config.model)
        changed = {
            name: weights[name]
            for name, digest in digests_by_name.items()
            if self._sent_digests.get(name) != digest
        }
        self._update = WeightUpdate(number, pack_tensors(changed), combine_digests(digests_by_name))
        self.sent_bytes = self._update.num_bytes
        self._sent_digests = digests_by_name
        self._probe = SamplerProbe.from_sampling(self.config.model.config.vocab_size, sampling)
        self._answers = []
        return self._update

    def _sample_trainer_probe(self) -> None:
        """Sample the probe with the trainer's own sampler, once per version, and compare it with the trainer's
        forward pass.

        Called once the weights are being sent, so that trainer and workers load and answer at the same time.
        """
        if self._answers:
            return
        config = self.config
        assert self._probe is not None
        config.backend.refresh_weights()
        self._answers = sample_probe(config.backend, self._probe)
        check_trainer_difference(config.model, self._answers, self._probe, config.bound)

    def _load_workers(self, slots: Sequence[WorkerSlot], update: WeightUpdate) -> None:
        """Send an update to these workers and verify each; replace those lost meanwhile."""
        assert self._probe is not None
        shared = self.cluster.share_value(update)
        calls = {
            self.cluster.call_worker(slot.worker, "load", shared, self._probe): slot
            for slot in slots
        }
        self._sample_trainer_probe()
        while calls:
            for call in self.cluster.wait_for_calls(list(calls), POLL_INTERVAL_S):
                slot = calls.pop(call)
                try:
                    self._verify_worker(slot, self._unwrap_result(call))
                except WorkerLost as lost:
                    self._replace_worker(slot, str(lost), "it was taking new weights")
            # heartbeats of workers that are still starting are not expected
            known = {slot.number: call for call, slot in calls.items() if slot.version >= 0}
            for number in self._heartbeats.list_unresponsive(
                (n, calls[call].worker) for n, call in known.items()
            ):
                slot = calls.pop(known[number])
                self._replace_worker(slot, NO_HEARTBEAT, "it was taking new weights")

    def _verify_worker(self, slot: WorkerSlot, report: TransferReport) -> None:
        """Raise SamplerMismatch if the worker has other weights or samples from others."""
        expected, answers = self._find_expected_probe(report.number)
        label = f"rollout worker {slot.number} (process {report.pid})"
        if report.digest != expected:
            raise SamplerMismatch(
                f"{label}: after weight update {report.number} its weights have the digest {report.digest[:12]}, "
                f"the trainer's {expected[:12]}: the weight transfer failed. None of its rollouts is used"
            )
        check_probe_completions(label, answers, report.answers, self.config.bound)
        slot.version = report.number

    def _find_expected_probe(self, number: int) -> tuple[str, list[ProbeCompletion]]:
        """Return digest and probe answers of a version."""
        assert self._update is not None and self._update.number == number
        return self._update.digest, self._answers

    def _start_workers(self) -> None:
        """Open the cluster and start every worker with the current weights."""
        base = pack_tensors(collect_unique_weights(self.config.model))
        num_bytes = sum(packed.data.nbytes for packed in base.values())
        update_bytes = self._update.num_bytes if self._update is not None else 0
        self.cluster.open_cluster(num_bytes + _MAX_SHARED_VERSIONS * update_bytes)
        self._shared = (self._share_spec(), self.cluster.share_value(base))
        self._slots = [
            WorkerSlot(number, self._start_worker()) for number in range(self.settings.count)
        ]
        self._load_workers(self._slots, self._build_full_update())

    def _start_worker(self) -> Any:
        assert self._shared is not None
        return self.cluster.start_worker(*self._shared, is_live=self.settings.max_staleness > 0)

    def _share_spec(self) -> Any:
        config = self.config
        device = next(config.model.parameters()).device.type
        spec = WorkerSpec(
            copy_without_weights(config.model),
            device,
            config.renderer,
            config.environment,
            list(config.eos_ids),
            config.pad_id,
            config.backend.max_length,
            torch.get_num_threads(),
            read_runtime_versions(),
            config.textless_ids,
            config.autocast,
        )
        try:
            return self.cluster.share_value(spec)
        except (TypeError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"rollouts.workers: the environment or the model cannot be sent to another process ({error}); name the "
                "environment in the settings, or keep open files and locks out of its constructor"
            ) from error

    def _build_full_update(self) -> WeightUpdate:
        """Build the current version with all tensors, for workers without an earlier one."""
        assert self._update is not None
        weights = collect_trainable_weights(self.config.model)
        return WeightUpdate(self._update.number, pack_tensors(weights), self._update.digest)

    def _replace_worker(self, slot: WorkerSlot, reason: str, consequence: str) -> None:
        """Start a new worker in the slot of a lost one.

        Raises: WorkerFailed after too many losses.
        """
        slot.losses += 1
        self.lost_workers += 1
        text = f"rollout worker {slot.number} was lost ({reason}); {consequence}"
        logger.warning("%s", text)
        if self.on_event is not None:
            self.on_event(text)
        self.cluster.stop_worker(slot.worker)
        slot.late_call, slot.collect_call, slot.version = None, None, -1
        self._heartbeats.forget_worker(slot.number)
        if slot.losses > MAX_LOSSES_PER_WORKER:
            raise WorkerFailed(
                f"rollout worker {slot.number} was lost {slot.losses} times within one iteration, the last time: "
                f"{reason}. Check the memory of its machine and the environment; the same command resumes"
            )
        slot.worker = self._start_worker()
        self._load_workers([slot], self._build_full_update())

    def collect_metrics(self) -> dict[str, float]:
        """Return the counts so far and the size of the newest transfer."""
        return {
            "perf/rollout_workers": float(len(self._slots)),
            "perf/lost_workers": float(self.lost_workers),
            "perf/late_workers": float(sum(slot.late_call is not None for slot in self._slots)),
            "perf/replayed_groups": float(self.replayed_groups),
            "perf/weight_bytes": float(self.sent_bytes),
        }

    def close(self) -> None:
        """End all workers; a later collection starts new ones."""
        self._slots, self._shared, self._update, self._sent_digests = [], None, None, {}
        self._heartbeats = HeartbeatMonitor(self.cluster)
        self.cluster.close()


def _split_batches(count: int, workers: int) -> list[list[int]]:
    """Split groups into tasks: one task for a single worker, otherwise BATCHES_PER_WORKER per worker."""
    tasks = min(count, workers * BATCHES_PER_WORKER if workers > 1 else 1)
    edges = [count * i // tasks for i in range(tasks + 1)] if tasks else []
    return [list(range(begin, end)) for begin, end in pairwise(edges)]
