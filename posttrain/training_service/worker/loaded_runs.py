"""Thread that writes snapshots while training goes on: a run's state is copied, then the disk has time.

A snapshot counts once its folder is published and the store knows of it, as one that is waited for. Errors are kept and
raised in the worker's own thread, where it is next asked for what became of the snapshots.

Training runs in the engine's memory: restored when they are asked for, snapshots, replay, eviction.

A snapshot holds a run's whole state after its requests up to a number, all of which have their answers in the store by
then. A run that is not in memory is its newest snapshot and the requests behind it, computed again in their order; the
answers that are in the store stay, and are compared with the new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.training_service.commands import LoadWeights, WeightsLoaded
from posttrain.training_service.store import ServiceStore, StoredRequest, TrainingRunRecord
from posttrain.training_service.wire.codec import decode_request, encode_result
from posttrain.training_service.worker.saved_weights import WorkerContext
from rl_core.errors import CheckpointError, PosttrainError, ServiceError
from rl_core.service.requests import CreateModel, ForwardBackward, OptimStep
from rl_core.service.results import ForwardBackwardResult, OptimStepResult
from rl_core.service.saved_weights import read_state, write_state
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 512 << 20  # of copies in memory at a time; a single larger one is waited for


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """State of a run, apart from it."""

    model_id: str
    folder: Path
    last_seq: int  # newest request that is in it
    steps: int
    state: Mapping[str, Any]
    started_at: float = field(default_factory=time.monotonic)

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _walk_tensors(self.state))


class SnapshotWriter:
    """One snapshot after the other, at most one of each run at a time."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="service-snapshots")
        self._pending: dict[str, tuple[Future[bool], RunSnapshot]] = {}  # by run, the oldest first
        self._written: dict[str, int] = {}
        self._error: BaseException | None = None

    def submit_snapshot(self, snapshot: RunSnapshot) -> None:
        """Begin to write; waits for the run's last one, and for room in memory. Raises: as `written`."""
        self.wait_for_snapshots(snapshot.model_id)
        while (
            self._pending
            and snapshot.num_bytes + sum(other.num_bytes for _, other in self._pending.values())
            > MAX_PENDING_BYTES
        ):
            self.wait_for_snapshots(next(iter(self._pending)))
        self._pending[snapshot.model_id] = (
            self._thread.submit(self._write_snapshot, snapshot),
            snapshot,
        )
        if snapshot.num_bytes > MAX_PENDING_BYTES:
            self.wait_for_snapshots(snapshot.model_id)

    def wait_for_snapshots(self, model_id: str | None = None) -> None:
        """Wait for the snapshot of a run, or for all."""
        for name in [model_id] if model_id is not None else list(self._pending):
            if name in self._pending:
                self._collect_result(name)

    def collect_written(self) -> dict[str, int]:
        """Newest requests in the snapshots that were finished since the last call, by run; waits for none.

        Raises: what writing raised, and a full disk does not: OSError, BackendError of the store.
        """
        for name in [name for name, (future, _) in self._pending.items() if future.done()]:
            self._collect_result(name)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        found, self._written = self._written, {}
        return found

    def _collect_result(self, model_id: str) -> None:
        future, snapshot = self._pending.pop(model_id)
        try:
            if future.result():
                self._written[model_id] = snapshot.last_seq
        except BaseException as error:
            self._error = self._error or error

    def _write_snapshot(self, snapshot: RunSnapshot) -> bool:
        """In the thread. False = the disk refused; replay takes longer then."""
        self._store.sync_to_disk()  # no snapshot may be ahead of the answers in the store
        try:
            write_state(snapshot.folder, snapshot.state)
        except PosttrainError as error:
            log.warning("%s: no snapshot: %s", snapshot.model_id, error)
            return False
        inject_fault("service.snapshot")
        self._store.record_snapshot(snapshot.model_id, snapshot.last_seq, snapshot.steps)
        took = time.monotonic() - snapshot.started_at
        log.info("%s: snapshot of request %d in %.2f s", snapshot.model_id, snapshot.last_seq, took)
        return True


def _walk_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk_tensors(item)


@dataclass(slots=True)
class _LoadedRun:
    """A run in memory."""

    applied_seq: int  # newest request that is in its weights
    snapshot_seq: int  # newest request that its snapshot has
    steps_since_snapshot: int  # updates since that
    saved_at: float  # of the snapshot; monotonic seconds
    used_at: float


class LoadedRuns:
    """The runs that are in memory."""

    def __init__(self, context: WorkerContext) -> None:
        self._engine, self._store, self._folder, self._weights = (
            context.engine,
            context.store,
            context.folder,
            context.weights,
        )
        self._settings = context.settings.worker
        self._writer = SnapshotWriter(context.store)
        self._loaded: dict[str, _LoadedRun] = {}
        self.on_unload: Callable[[str], None] = lambda model_id: None

    # -- in memory -----------------------------------------------------------------------------------------------------

    def ensure_loaded(self, model_id: str, pinned: Iterable[str] = ()) -> None:
        """Have a run in memory, if there is one to restore; `others` stay there.

        Raises: ServiceError (server) where its snapshot cannot be read.
        """
        now = time.monotonic()
        if model_id in self._loaded:
            self._loaded[model_id].used_at = now
            return
        record = self._store.find_run(model_id)
        if record is not None and record.state == "live":
            self.evict_unused_runs({*pinned, model_id})
            self._restore_run(record)

    def evict_unused_runs(self, pinned: set[str]) -> None:
        """Unload the run that was unused longest, where the engine has no room for one more."""
        while len(self._loaded) >= self._engine.settings.max_runs:
            free = [name for name in self._loaded if name not in pinned]
            if not free:
                return
            self.unload_run(min(free, key=lambda name: self._loaded[name].used_at))

    def add_new_run(self, model_id: str, seq: int) -> None:
        """A run is new in the engine."""
        now = time.monotonic()
        self._loaded[model_id] = _LoadedRun(
            applied_seq=seq, snapshot_seq=-1, steps_since_snapshot=0, saved_at=now, used_at=now
        )

    def record_applied_request(self, model_id: str, seq: int, *, is_update: bool) -> None:
        """A request is in the run's weights, and its answer in the store."""
        if model_id in self._loaded:
            self._loaded[model_id].applied_seq = seq
            self._loaded[model_id].steps_since_snapshot += is_update

    def drop_run(self, model_id: str) -> None:
        """Forget a run's memory as it is; it comes back from its snapshot, which is not being written then."""
        self._writer.wait_for_snapshots(model_id)
        self._loaded.pop(model_id, None)
        with contextlib.suppress(ServiceError):
            self._engine.unload_model(model_id)
        self.on_unload(model_id)

    def drop_all_runs(self) -> None:
        """Forget the memory of all runs: it may be ahead of the store."""
        for model_id in list(self._loaded):
            self.drop_run(model_id)

    def unload_run(self, model_id: str) -> None:
        """Save a run and take it from memory."""
        self.save_snapshot(model_id)
        self.drop_run(model_id)

    def unload_idle_runs(self) -> list[str]:
        """Unload runs that were not used for long; their names."""
        limit = time.monotonic() - self._settings.idle_seconds
        idle = [name for name, live in self._loaded.items() if live.used_at < limit]
        for model_id in idle:
            self.unload_run(model_id)
        return idle

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def save_due_snapshots(self) -> None:
        """Take the snapshots that are due; they are written beside. Raises: as `SnapshotWriter.written`."""
        self._collect_written_snapshots()
        now = time.monotonic()
        for model_id, live in list(self._loaded.items()):
            is_old = now - live.saved_at >= self._settings.snapshot_seconds
            if live.steps_since_snapshot >= self._settings.snapshot_steps or (
                is_old and live.applied_seq > live.snapshot_seq
            ):
                self._begin_snapshot(model_id)

    def save_all_snapshots(self) -> None:
        """Snapshots of all runs that have changed, written when this returns."""
        self._collect_written_snapshots(wait=True)
        for model_id, live in list(self._loaded.items()):
            if live.applied_seq > live.snapshot_seq:
                self._begin_snapshot(model_id)
        self._collect_written_snapshots(wait=True)

    def save_snapshot(self, model_id: str) -> bool:
        """A snapshot of a run, if it has changed, written when this returns.

        False = it could not be; replay takes longer then. Raises: as `SnapshotWriter.written`.
        """
        self._collect_written_snapshots(wait=True)
        live = self._loaded[model_id]
        if live.applied_seq > live.snapshot_seq:
            self._begin_snapshot(model_id)
            self._collect_written_snapshots(wait=True)
        return live.applied_seq <= live.snapshot_seq

    def wait_for_snapshots(self) -> None:
        """Wait for all snapshots that are being written."""
        self._writer.wait_for_snapshots()

    def _begin_snapshot(self, model_id: str) -> None:
        live = self._loaded[model_id]
        live.saved_at, live.steps_since_snapshot = (
            time.monotonic(),
            0,
        )  # one that cannot be written is not tried again at once
        state = self._engine.state_dict(model_id) | {"note": {"covers": live.applied_seq}}
        steps = self._engine.model_info(model_id).steps
        self._writer.submit_snapshot(
            RunSnapshot(
                model_id,
                self._folder.resolve_snapshot_folder(model_id),
                live.applied_seq,
                steps,
                state,
            )
        )

    def _collect_written_snapshots(self, *, wait: bool = False) -> None:
        if wait:
            self._writer.wait_for_snapshots()
        for model_id, covers in self._writer.collect_written().items():
            if model_id in self._loaded:
                self._loaded[model_id].snapshot_seq = max(
                    self._loaded[model_id].snapshot_seq, covers
                )

    # -- after a kill --------------------------------------------------------------------------------------------------

    def recover_after_crash(self) -> None:
        """At the start of a worker: what one that was killed had no time for. Raises: BackendError, OSError.

        Runs that have loaded saved weights get a snapshot before anything else is done: their replay needs the path,
        which may be deleted, replaced or withdrawn from now on.
        """
        for model_id in self._store.list_runs_to_snapshot():
            try:
                self.ensure_loaded(model_id)
                if model_id in self._loaded:
                    self.save_snapshot(model_id)
            except ServiceError as error:
                log.error("%s: cannot be restored: %s", model_id, error)
        place = self._folder.snapshots_root
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            record = self._store.find_run(folder.name)
            if record is not None and record.state == "unloaded":
                self._weights.delete_folder(folder)

    # -- replay --------------------------------------------------------------------------------------------------------

    def _restore_run(self, record: TrainingRunRecord) -> None:
        """A run as it was after the newest request whose answer is in the store."""
        model_id, began = record.model_id, time.monotonic()
        covered, state = -1, self._read_snapshot(record)
        if state is not None:
            covered = int(state["note"]["covers"])
            self._engine.restore_model(model_id, state)
        self.add_new_run(model_id, covered)
        self._loaded[model_id].snapshot_seq = covered
        repeated = 0
        try:
            for request in self._store.list_replay_requests(model_id, covered):
                repeated += self._replay_request(request)
                self.record_applied_request(
                    model_id, request.seq, is_update=request.kind == "optim_step"
                )
        except BaseException:
            self.drop_run(model_id)
            raise
        inject_fault("service.replayed")
        if repeated:
            self._store.count_worker_event("replayed", repeated)
        took = time.monotonic() - began
        log.info(
            "%s: restored from request %d, %d computed again, %.2f s",
            model_id,
            covered,
            repeated,
            took,
        )

    def _read_snapshot(self, record: TrainingRunRecord) -> dict[str, Any] | None:
        """The newest state of a run that can be read; None = it is computed from its creation on."""
        folder = self._folder.resolve_snapshot_folder(record.model_id)
        try:
            return read_state(folder) if folder.is_dir() else None
        except CheckpointError as error:  # also where a first snapshot was being written
            if record.covered_before >= 0:  # what it was made of is gone
                raise ServiceError(
                    f"{record.model_id}: no snapshot can be read: {error}", "server"
                ) from error
            return None

    def _replay_request(self, request: StoredRequest) -> bool:
        """Compute a request again whose answer is there. Returns True if it was."""
        fails = request.state == "failed"
        if request.state == "cancelled" or (fails and not _has_cleared_gradient(request)):
            return False
        try:
            command = decode_request(
                request.kind, request.payload, request.content_type, request.facts, request.target
            )
            answer = self._apply_command(command, request.owner)
        except ServiceError as error:
            if not fails:
                self._report_difference(request, f"it fails now: {error}")
            return True
        if answer is None:
            return False
        body, _ = encode_result(request.kind, answer, request.payload)
        if fails or hashlib.sha256(body).hexdigest() != request.answer_digest:
            self._report_difference(request, "another answer than the one that was given")
        return True

    def _apply_command(
        self, command: object, owner: str
    ) -> ForwardBackwardResult | OptimStepResult | WeightsLoaded | None:
        """The part of a request that changes its run; None = it has none."""
        if isinstance(command, CreateModel):
            self._engine.create_model(command)
        elif isinstance(command, ForwardBackward):
            (found,) = self._engine.forward_backward([command])
            if isinstance(found, ServiceError):
                raise found
            return found
        elif isinstance(command, OptimStep):
            return self._engine.optim_step(command)
        elif isinstance(command, LoadWeights):
            return self._weights.load_weights(command, owner)
        return None

    def _report_difference(self, request: StoredRequest, difference: str) -> None:
        log.error(
            "%s: request %d (%s), computed again: %s",
            request.target,
            request.seq,
            request.kind,
            difference,
        )
        self._store.count_worker_event("replay_differences")


def _has_cleared_gradient(request: StoredRequest) -> bool:
    """True = a failed request that changed its run: an update by a gradient that is not finite."""
    return request.kind == "optim_step" and request.category == "user"
