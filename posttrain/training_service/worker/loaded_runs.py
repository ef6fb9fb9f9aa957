"""Training runs in the engine's memory: restored on demand, saved as snapshots, replayed after a crash, evicted.

A snapshot holds a run's complete state after its requests up to a number; all of them have their answers in the store
by then. A run that is not in memory is restored from its newest snapshot, and the requests after it are computed again
in order. Stored answers are kept, and compared with the recomputed ones.

A thread writes snapshots while training continues: the run's state is copied, so the disk may take its time. A
snapshot counts once its folder is published and recorded in the store. Errors are kept, and raised in the worker's
thread when it next collects the written snapshots.
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
from posttrain.training_service.worker.recorded_sequences import add_recorded_inputs
from posttrain.training_service.worker.saved_weights import WorkerContext
from rl_core.errors import CheckpointError, PosttrainError, ServiceError
from rl_core.service.requests import CreateModel, ForwardBackward, OptimStep
from rl_core.service.results import ForwardBackwardResult, OptimStepResult
from rl_core.service.saved_weights import read_state, write_state
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

# size of pending copies in memory; a larger single copy is written synchronously
MAX_PENDING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Copy of a run's state."""

    model_id: str
    folder: Path
    last_seq: int  # newest request contained in it
    steps: int
    state: Mapping[str, Any]
    started_at: float = field(default_factory=time.monotonic)

    @property
    def num_bytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _walk_tensors(self.state))


class SnapshotWriter:
    """Thread that writes one snapshot after another, at most one pending per run."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="service-snapshots")
        self._pending: dict[str, tuple[Future[bool], RunSnapshot]] = {}  # by run, oldest first
        self._written: dict[str, int] = {}
        self._error: BaseException | None = None

    def submit_snapshot(self, snapshot: RunSnapshot) -> None:
        """Start writing. Wait first for the run's previous snapshot, and for memory."""
        self.wait_for_snapshots(snapshot.model_id)
        while (
            self._pending and snapshot.num_bytes + self._count_pending_bytes() > MAX_PENDING_BYTES
        ):
            self.wait_for_snapshots(next(iter(self._pending)))
        future = self._thread.submit(self._write_snapshot, snapshot)
        self._pending[snapshot.model_id] = (future, snapshot)
        if snapshot.num_bytes > MAX_PENDING_BYTES:
            self.wait_for_snapshots(snapshot.model_id)

    def _count_pending_bytes(self) -> int:
        return sum(snapshot.num_bytes for _, snapshot in self._pending.values())

    def wait_for_snapshots(self, model_id: str | None = None) -> None:
        """Wait for the snapshot of one run, or of all runs."""
        for name in [model_id] if model_id is not None else list(self._pending):
            if name in self._pending:
                self._collect_result(name)

    def collect_written(self) -> dict[str, int]:
        """Return, by run, the newest request in each snapshot finished since the last call. Does not wait.

        Raises: errors of writing other than a refusing disk: OSError, BackendError of the store.
        """
        done = [name for name, (future, _) in self._pending.items() if future.done()]
        for name in done:
            self._collect_result(name)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        written, self._written = self._written, {}
        return written

    def _collect_result(self, model_id: str) -> None:
        future, snapshot = self._pending.pop(model_id)
        try:
            if future.result():
                self._written[model_id] = snapshot.last_seq
        except BaseException as error:
            self._error = self._error or error

    def _write_snapshot(self, snapshot: RunSnapshot) -> bool:
        """Write a snapshot, in the thread. Return False if the disk refused; replay then takes longer."""
        self._store.sync_to_disk()  # a snapshot must not be ahead of the answers in the store
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
    """Run in memory."""

    applied_seq: int  # newest request applied to its weights
    snapshot_seq: int  # newest request contained in its snapshot
    steps_since_snapshot: int
    saved_at: float  # monotonic seconds
    used_at: float  # monotonic seconds


class LoadedRuns:
    """Runs in the engine's memory."""

    def __init__(self, context: WorkerContext) -> None:
        self._engine = context.engine
        self._store = context.store
        self._folder = context.folder
        self._weights = context.weights
        self._settings = context.settings.worker
        self._writer = SnapshotWriter(context.store)
        self._loaded: dict[str, _LoadedRun] = {}
        self.on_unload: Callable[[str], None] = lambda model_id: None

    def ensure_loaded(self, model_id: str, pinned: Iterable[str] = ()) -> None:
        """Load a run into memory if there is one to restore. Runs in `pinned` are not evicted.

        Raises: ServiceError (server) if its snapshot cannot be read.
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
        """Unload the least recently used runs until the engine has room for one more."""
        while len(self._loaded) >= self._engine.settings.max_runs:
            evictable = [name for name in self._loaded if name not in pinned]
            if not evictable:
                return
            self.unload_run(min(evictable, key=lambda name: self._loaded[name].used_at))

    def add_new_run(self, model_id: str, seq: int) -> None:
        """Track a run that is new in the engine."""
        now = time.monotonic()
        self._loaded[model_id] = _LoadedRun(
            applied_seq=seq, snapshot_seq=-1, steps_since_snapshot=0, saved_at=now, used_at=now
        )

    def record_applied_request(self, model_id: str, seq: int, *, is_update: bool) -> None:
        """Record that a request is applied to the run's weights and its answer stored."""
        run = self._loaded.get(model_id)
        if run is not None:
            run.applied_seq = seq
            run.steps_since_snapshot += is_update

    def drop_run(self, model_id: str) -> None:
        """Drop a run from memory without saving it; it can be restored from its snapshot."""
        self._writer.wait_for_snapshots(model_id)  # the snapshot must be complete before a restore
        self._loaded.pop(model_id, None)
        with contextlib.suppress(ServiceError):
            self._engine.unload_model(model_id)
        self.on_unload(model_id)

    def drop_all_runs(self) -> None:
        """Drop all runs from memory, which may be ahead of the store."""
        for model_id in list(self._loaded):
            self.drop_run(model_id)

    def unload_run(self, model_id: str) -> None:
        """Save a run and remove it from memory."""
        self.save_snapshot(model_id)
        self.drop_run(model_id)

    def unload_idle_runs(self) -> list[str]:
        """Unload runs that have been idle for long; return their names."""
        idle_since = time.monotonic() - self._settings.idle_seconds
        idle = [name for name, run in self._loaded.items() if run.used_at < idle_since]
        for model_id in idle:
            self.unload_run(model_id)
        return idle

    def save_due_snapshots(self) -> None:
        """Start writing all snapshots that are due. Raises: as `SnapshotWriter.collect_written`."""
        self._collect_written_snapshots()
        now = time.monotonic()
        for model_id, run in list(self._loaded.items()):
            is_old = now - run.saved_at >= self._settings.snapshot_seconds
            if run.steps_since_snapshot >= self._settings.snapshot_steps or (
                is_old and run.applied_seq > run.snapshot_seq
            ):
                self._begin_snapshot(model_id)

    def save_all_snapshots(self) -> None:
        """Write snapshots of all changed runs before returning."""
        self._collect_written_snapshots(wait=True)
        for model_id, run in list(self._loaded.items()):
            if run.applied_seq > run.snapshot_seq:
                self._begin_snapshot(model_id)
        self._collect_written_snapshots(wait=True)

    def save_snapshot(self, model_id: str) -> bool:
        """Write a snapshot of a run if it has changed, before returning.

        Return False if it could not be written; replay then takes longer. Raises: as `SnapshotWriter.collect_written`.
        """
        self._collect_written_snapshots(wait=True)
        run = self._loaded[model_id]
        if run.applied_seq > run.snapshot_seq:
            self._begin_snapshot(model_id)
            self._collect_written_snapshots(wait=True)
        return run.applied_seq <= run.snapshot_seq

    def wait_for_snapshots(self) -> None:
        """Wait for all pending snapshots."""
        self._writer.wait_for_snapshots()

    def _begin_snapshot(self, model_id: str) -> None:
        run = self._loaded[model_id]
        # Reset even if writing fails, so that a failing snapshot is not retried immediately.
        run.saved_at = time.monotonic()
        run.steps_since_snapshot = 0
        state = self._engine.state_dict(model_id) | {"note": {"covers": run.applied_seq}}
        steps = self._engine.model_info(model_id).steps
        folder = self._folder.resolve_snapshot_folder(model_id)
        self._writer.submit_snapshot(RunSnapshot(model_id, folder, run.applied_seq, steps, state))

    def _collect_written_snapshots(self, *, wait: bool = False) -> None:
        if wait:
            self._writer.wait_for_snapshots()
        for model_id, last_seq in self._writer.collect_written().items():
            run = self._loaded.get(model_id)
            if run is not None:
                run.snapshot_seq = max(run.snapshot_seq, last_seq)

    def recover_after_crash(self) -> None:
        """Finish, at the start of a worker, what a killed worker had no time for. Raises: BackendError, OSError.

        Runs that have loaded saved weights get a snapshot first: their replay needs the path, which may be deleted,
        replaced or unpublished from now on.
        """
        for model_id in self._store.list_runs_to_snapshot():
            try:
                self.ensure_loaded(model_id)
                if model_id in self._loaded:
                    self.save_snapshot(model_id)
            except ServiceError as error:
                log.error("%s: cannot be restored: %s", model_id, error)
        root = self._folder.snapshots_root
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            record = self._store.find_run(folder.name)
            if record is not None and record.state == "unloaded":
                self._weights.delete_folder(folder)

    def _restore_run(self, record: TrainingRunRecord) -> None:
        """Restore a run to its state after the newest request whose answer is in the store."""
        model_id, started_at = record.model_id, time.monotonic()
        last_seq, state = -1, self._read_snapshot(record)
        if state is not None:
            last_seq = int(state["note"]["covers"])
            self._engine.restore_model(model_id, state)
        self.add_new_run(model_id, last_seq)
        self._loaded[model_id].snapshot_seq = last_seq
        num_replayed = 0
        try:
            for request in self._store.list_replay_requests(model_id, last_seq):
                num_replayed += self._replay_request(request)
                self.record_applied_request(
                    model_id, request.seq, is_update=request.kind == "optim_step"
                )
        except BaseException:
            self.drop_run(model_id)
            raise
        inject_fault("service.replayed")
        if num_replayed:
            self._store.count_worker_event("replayed", num_replayed)
        seconds = time.monotonic() - started_at
        log.info(
            "%s: restored from request %d, %d computed again, %.2f s",
            model_id,
            last_seq,
            num_replayed,
            seconds,
        )

    def _read_snapshot(self, record: TrainingRunRecord) -> dict[str, Any] | None:
        """Read the run's newest readable state; None = compute it from its creation on."""
        folder = self._folder.resolve_snapshot_folder(record.model_id)
        try:
            return read_state(folder) if folder.is_dir() else None
        except CheckpointError as error:  # includes a first snapshot that was being written
            if record.covered_before >= 0:  # the payloads for a replay from the start were dropped
                raise ServiceError(
                    f"{record.model_id}: no snapshot can be read: {error}", "server"
                ) from error
            return None

    def _replay_request(self, request: StoredRequest) -> bool:
        """Compute an answered request again. Return whether anything was computed."""
        has_failed = request.state == "failed"
        if request.state == "cancelled" or (has_failed and not _has_cleared_gradient(request)):
            return False
        try:
            command = decode_request(
                request.kind, request.payload, request.content_type, request.facts, request.target
            )
            if isinstance(command, ForwardBackward):
                command, _ = add_recorded_inputs(
                    command, request, self._store, self._settings.recorded_seconds
                )
            result = self._apply_command(command, request.owner)
        except ServiceError as error:
            if not has_failed:
                self._report_difference(request, f"now fails: {error}")
            return True
        if result is None:
            return False
        body, _ = encode_result(request.kind, result, request.payload)
        if has_failed or hashlib.sha256(body).hexdigest() != request.answer_digest:
            self._report_difference(request, "the answer differs from the stored one")
        return True

    def _apply_command(
        self, command: object, owner: str
    ) -> ForwardBackwardResult | OptimStepResult | WeightsLoaded | None:
        """Apply the part of a request that changes its run; return None if there is none."""
        if isinstance(command, CreateModel):
            self._engine.create_model(command)
        elif isinstance(command, ForwardBackward):
            (result,) = self._engine.forward_backward([command])
            if isinstance(result, ServiceError):
                raise result
            return result
        elif isinstance(command, OptimStep):
            return self._engine.optim_step(command)
        elif isinstance(command, LoadWeights):
            return self._weights.load_weights(command, owner)
        return None

    def _report_difference(self, request: StoredRequest, difference: str) -> None:
        log.error(
            "%s: replay of request %d (%s): %s",
            request.target,
            request.seq,
            request.kind,
            difference,
        )
        self._store.count_worker_event("replay_differences")


def _has_cleared_gradient(request: StoredRequest) -> bool:
    """Return whether a failed request changed its run: an update with a non-finite gradient clears the gradient."""
    return request.kind == "optim_step" and request.category == "user"
