"""The trainer's side of its rollout workers: weights out and verified, episodes in, lost workers replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailures, FailedEpisode
from rl_core.errors import PosttrainError, SamplerMismatch, SettingsError, WorkerFailed
from rl_core.inference.sampling import RolloutBackend
from rl_core.models.trainable_weights import trainable_weights
from rl_core.rollout_workers.cluster import WorkerCluster, WorkerLost
from rl_core.rollout_workers.heartbeats import SILENT, Heartbeats
from rl_core.rollout_workers.sampler_probe import Probe, ProbeAnswer, check_answers, check_trainer, play_probe
from rl_core.rollout_workers.task_board import TaskBoard
from rl_core.rollout_workers.weights import WeightUpdate, all_weights, digest_of, digests, pack, skeleton
from rl_core.rollout_workers.worker import PlayedTask, PlayTask, TransferReport, WorkerSpec, runtime_versions
from rl_core.rollouts.collect import EpisodeRequest, Renderer, plan_groups, settle_failures
from rl_core.settings import RolloutSettings, SamplingSettings
from rl_core.settings.numerics import rounding_bound
from rl_core.storage.faults import fault
from rl_core.timing import span
from rl_core.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RolloutTeam", "TeamParts"]

logger = logging.getLogger(__name__)

LOSSES = 3  # of each worker's place within one collection; more, and the run ends
TASKS_EACH = 2  # of a collection for each of several workers: a slow one keeps less from the others
_LOOK_S = 0.2  # between two looks at signals while workers play
_VERSIONS_HELD = 3  # in shared memory at a time: the present, the next, and one that is being let go


@dataclass
class TeamParts:
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
        return rounding_bound(is_float32 and self.is_exact)


@dataclass
class _WorkerSeat:
    """The place of one worker, taken by another when it is lost."""

    number: int
    worker: Any
    losses: int = 0  # within the present collection
    version: int = -1  # of the weights that it was verified with
    late: Any = None  # its call for a task that another worker has played meanwhile; None = it is free
    collecting: Any = None  # asynchronous: its call that waits for finished groups; None = not asked


@dataclass
class RolloutTeam:
    """Workers of one trainer. They are started by the first collection, and ended by `close`."""

    settings: RolloutSettings
    cluster: WorkerCluster
    parts: TeamParts
    lost_workers: int = 0  # since the beginning
    replayed_groups: int = 0  # since the beginning: their worker was lost while it played them
    sent_bytes: int = 0  # of weights, by the newest transfer
    on_event: Callable[[str], None] | None = None  # told of every lost worker, in words for people
    _seats: list[_WorkerSeat] = field(default_factory=list)
    _shared: tuple[Any, Any] | None = None  # spec and weights of the start, as the cluster keeps them
    _sent: dict[str, str] = field(default_factory=dict)  # digest of each tensor that the workers have
    _update: WeightUpdate | None = None  # the newest, and what a new worker needs in its place:
    _answers: list[ProbeAnswer] = field(default_factory=list)
    _probe: Probe | None = None
    _heartbeats: Heartbeats = field(init=False)

    def __post_init__(self) -> None:
        self._heartbeats = Heartbeats(self.cluster)

    # Playing

    def play(
        self,
        requests: Sequence[EpisodeRequest],
        *,
        group_size: int,
        sampling: SamplingSettings,
        seed: int,
        policy_version: int,
        failures: EpisodeFailures,
    ) -> list[RolloutGroup]:
        """As `rollouts.collect.collect` with the present weights, to the last bit, however many workers there are.

        Raises: as `collect`; SamplerMismatch for a worker whose weights or log-probs are not the trainer's;
            WorkerFailed where too many workers are lost.
        """
        for seat in self._seats:
            seat.losses = 0
        self.send_weights(sampling)
        plans, planned = plan_groups(requests, group_size), len(requests) * group_size
        tasks = [
            PlayTask(part, [plans[index] for index in part], group_size, sampling, seed, policy_version)
            for part in _cut(len(plans), self.settings.count)
        ]
        groups: dict[int, RolloutGroup] = {}
        failed: list[FailedEpisode] = []
        for played in self._play_all(tasks):
            groups |= dict(zip(played.indices, played.groups, strict=True))
            failed += played.failed
            failures.check(failed, planned)
        fault("rollouts.played")
        settle_failures(failed, planned, failures)
        return [groups[index] for index in range(len(plans))]

    def _play_all(self, tasks: Sequence[PlayTask]) -> list[PlayedTask]:
        """Every task once, by whichever worker is free; that of a lost one again, and one that is late by another, too.

        A worker whose task another one has played is left to it, takes no new weights, and comes back when it has
        ended: it costs the others at most its own share.
        """
        board = TaskBoard(tasks)
        running: dict[Any, tuple[_WorkerSeat, int]] = {}
        free = [seat for seat in self._seats if seat.late is None]
        try:
            while not board.is_over:
                while free and (number := board.next()) is not None:
                    seat = free.pop(0)
                    running[self.cluster.call(seat.worker, "play", tasks[number])] = (seat, number)
                late = {seat.late: seat for seat in self._seats if seat.late is not None}
                for call in self.cluster.wait([*running, *late], _LOOK_S):
                    if call in late:
                        self._come_back(late[call])
                        free.append(late[call])
                        continue
                    seat, number = running.pop(call)
                    self._heartbeats.forget(seat.number)
                    try:
                        board.ended(number, self._value(call))
                    except WorkerLost as lost:
                        self._play_again(board, number, seat, str(lost))
                    free.append(seat)
                free += self._replace_silent(board, running)
        finally:  # of those that still play: their results are not needed, or an error ends the run
            for call, (seat, _) in running.items():
                seat.late = call
        return board.results

    def _play_again(self, board: TaskBoard, number: int, seat: _WorkerSeat, how: str) -> None:
        groups = len(board.tasks[number].plans) if board.lost(number) else 0  # 0 = another one plays them, too
        self.replayed_groups += groups
        self._replace(seat, how, f"{groups} groups are played again")

    def _replace_silent(self, board: TaskBoard, running: dict[Any, tuple[_WorkerSeat, int]]) -> list[_WorkerSeat]:
        """Replace workers that play or are late and give no sign of life; returns their seats, which are free now."""
        calls = {seat.number: call for call, (seat, _) in running.items()}
        busy = [seat for seat in self._seats if seat.number in calls or seat.late is not None]
        silent = set(self._heartbeats.silent((seat.number, seat.worker) for seat in busy))
        found = [seat for seat in busy if seat.number in silent]
        for seat in found:
            if seat.late is not None:
                self._replace(seat, SILENT, "it was late")
            else:
                self._play_again(board, running.pop(calls[seat.number])[1], seat, SILENT)
        return found

    def _come_back(self, seat: _WorkerSeat) -> None:
        """Give a worker whose late task has ended the weights that it has missed; one that was lost is replaced."""
        call, seat.late = seat.late, None
        self._heartbeats.forget(seat.number)
        try:
            self._value(call)  # the first result of its task counts
        except WorkerLost as lost:
            self._replace(seat, str(lost), "it was late")
            return
        except PosttrainError as error:  # the other one met it, too, or it is of this machine alone
            logger.warning("rollout worker %d failed at a task that another one has played: %s", seat.number, error)
        assert self._update is not None
        if seat.version != self._update.number:
            self._load([seat], self._whole())

    def _value(self, call: Any) -> Any:
        """Result of a call. Raises: the error that the worker met; WorkerLost."""
        value = self.cluster.result(call)
        if isinstance(value, PosttrainError):
            raise value
        return value

    # Weights

    def send_weights(self, sampling: SamplingSettings) -> None:
        """Give every worker the present weights, of which only changed tensors travel, and verify that it has them."""
        found = digests(trainable_weights(self.parts.model))
        if self._update is not None and found == self._sent:
            return
        with span("weight_sync"):
            update = self._next_update(found, 0 if self._update is None else self._update.number + 1, sampling)
            if not self._seats:
                self._start_all()
            else:
                self._load([seat for seat in self._seats if seat.late is None], update)

    def _next_update(self, found: dict[str, str], number: int, sampling: SamplingSettings) -> WeightUpdate:
        """The present weights as a version, of which the digests are `found`."""
        weights = trainable_weights(self.parts.model)
        changed = {name: weights[name] for name, digest in found.items() if self._sent.get(name) != digest}
        self._update = WeightUpdate(number, pack(changed), digest_of(found))
        self.sent_bytes = self._update.num_bytes
        self._sent = found
        self._probe, self._answers = Probe.of(self.parts.model.config.vocab_size, sampling), []
        return self._update

    def _ask_own(self) -> None:
        """The probe's answers of the trainer's own sampler, which its forward pass has to agree with; once a version.

        Asked for once the weights are under way, so that trainer and workers load and answer at the same time.
        """
        if self._answers:
            return
        parts = self.parts
        assert self._probe is not None
        parts.backend.refresh()
        self._answers = play_probe(parts.backend, self._probe)
        check_trainer(parts.model, self._answers, self._probe, parts.bound)

    def _load(self, seats: Sequence[_WorkerSeat], update: WeightUpdate) -> None:
        """Send an update to these workers, and verify each; one that is lost meanwhile is replaced."""
        assert self._probe is not None
        shared = self.cluster.share(update)
        calls = {self.cluster.call(seat.worker, "load", shared, self._probe): seat for seat in seats}
        self._ask_own()
        while calls:
            for call in self.cluster.wait(list(calls), _LOOK_S):
                seat = calls.pop(call)
                try:
                    self._verify(seat, self._value(call))
                except WorkerLost as lost:
                    self._replace(seat, str(lost), "it was taking new weights")
            known = {seat.number: call for call, seat in calls.items() if seat.version >= 0}  # not one that begins
            for number in self._heartbeats.silent((n, calls[call].worker) for n, call in known.items()):
                seat = calls.pop(known[number])
                self._replace(seat, SILENT, "it was taking new weights")

    def _verify(self, seat: _WorkerSeat, report: TransferReport) -> None:
        """Raises: SamplerMismatch where the worker has other weights, or samples from others."""
        expected, answers = self._expected(report.number)
        who = f"rollout worker {seat.number} (process {report.pid})"
        if report.digest != expected:
            raise SamplerMismatch(
                f"{who}: after weight update {report.number} its weights have the digest {report.digest[:12]}, "
                f"the trainer's {expected[:12]}: the transfer did not arrive. None of its rollouts is used"
            )
        check_answers(who, answers, report.answers, self.parts.bound)
        seat.version = report.number

    def _expected(self, number: int) -> tuple[str, list[ProbeAnswer]]:
        """Digest and probe's answers of a version."""
        assert self._update is not None and self._update.number == number
        return self._update.digest, self._answers

    # Workers

    def _start_all(self) -> None:
        """Open the cluster, and start every worker with the present weights."""
        base = pack(all_weights(self.parts.model))
        num_bytes = sum(packed.data.nbytes for packed in base.values())
        self.cluster.open(num_bytes + _VERSIONS_HELD * (self._update.num_bytes if self._update is not None else 0))
        self._shared = (self._share_spec(), self.cluster.share(base))
        self._seats = [_WorkerSeat(number, self._start_worker()) for number in range(self.settings.count)]
        self._load(self._seats, self._whole())

    def _start_worker(self) -> Any:
        assert self._shared is not None
        return self.cluster.start(*self._shared, is_live=self.settings.max_staleness > 0)

    def _share_spec(self) -> Any:
        parts = self.parts
        device = next(parts.model.parameters()).device.type
        spec = WorkerSpec(
            skeleton(parts.model), device, parts.renderer, parts.environment, list(parts.eos_ids), parts.pad_id,
            parts.backend.max_length, torch.get_num_threads(), runtime_versions(),
        )  # fmt: skip
        try:
            return self.cluster.share(spec)
        except (TypeError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"rollouts.workers: the environment or the model cannot be sent to another process ({error}); name the "
                "environment in the settings, or keep open files and locks out of its constructor"
            ) from error

    def _whole(self) -> WeightUpdate:
        """The present version with all its tensors, for workers that have none before it."""
        assert self._update is not None
        weights = trainable_weights(self.parts.model)
        return WeightUpdate(self._update.number, pack(weights), self._update.digest)

    def _replace(self, seat: _WorkerSeat, how: str, consequence: str) -> None:
        """Put a new worker into the place of a lost one. Raises: WorkerFailed where that was tried too often."""
        seat.losses += 1
        self.lost_workers += 1
        text = f"rollout worker {seat.number} was lost ({how}); {consequence}"
        logger.warning("%s", text)
        if self.on_event is not None:
            self.on_event(text)
        self.cluster.stop(seat.worker)
        seat.late, seat.collecting, seat.version = None, None, -1
        self._heartbeats.forget(seat.number)
        if seat.losses > LOSSES:
            raise WorkerFailed(
                f"rollout worker {seat.number} was lost {seat.losses} times within one iteration, the last time: "
                f"{how}. Look at the memory of its machine and at what the environment does; the same command resumes"
            )
        seat.worker = self._start_worker()
        self._load([seat], self._whole())

    def metrics(self) -> dict[str, float]:
        """Counts since the beginning, and the size of the newest transfer."""
        return {
            "perf/rollout_workers": float(len(self._seats)),
            "perf/lost_workers": float(self.lost_workers),
            "perf/late_workers": float(sum(seat.late is not None for seat in self._seats)),
            "perf/replayed_groups": float(self.replayed_groups),
            "perf/weight_bytes": float(self.sent_bytes),
        }

    def close(self) -> None:
        """End all workers; a later collection starts others."""
        self._seats, self._shared, self._update, self._sent = [], None, None, {}
        self._heartbeats = Heartbeats(self.cluster)
        self.cluster.close()


def _cut(count: int, workers: int) -> list[list[int]]:
    """Indices of each task: all in one for a single worker, else TASKS_EACH tasks for each."""
    tasks = min(count, workers * TASKS_EACH if workers > 1 else 1)
    edges = [count * place // tasks for place in range(tasks + 1)] if tasks else []
    return [list(range(begin, end)) for begin, end in pairwise(edges)]
