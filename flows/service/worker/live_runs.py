"""Training runs in the engine's memory: restored when they are asked for, snapshots, replay, eviction.

A snapshot holds a run's whole state after its requests up to a number, all of which have their answers in the store by
then. A run that is not in memory is its newest snapshot and the requests behind it, computed again in their order; the
answers that are in the store stay, and are compared with the new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flows.service.commands import LoadWeights, WeightsLoaded
from flows.service.store import StoredRequest, TrainingRunRecord
from flows.service.wire.decoding import decode
from flows.service.wire.encoding import encode
from flows.service.worker.snapshot_writer import Snapshot, SnapshotWriter
from flows.service.worker.worker_parts import WorkerParts
from rl_core.errors import CheckpointError, ServiceError
from rl_core.service.answers import ForwardBackwardResult, OptimStepResult
from rl_core.service.requests import CreateModel, ForwardBackward, OptimStep
from rl_core.service.saved_weights import read_state
from rl_core.storage.faults import fault

__all__ = ["LiveRuns"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A run in memory."""

    done: int  # newest request that is in its weights
    covered: int  # newest request that its snapshot has
    steps: int  # updates since that
    saved_at: float  # of the snapshot; monotonic seconds
    used_at: float


class LiveRuns:
    """The runs that are in memory."""

    def __init__(self, parts: WorkerParts) -> None:
        self._engine, self._store, self._folder, self._weights = parts.engine, parts.store, parts.folder, parts.weights
        self._settings = parts.settings.worker
        self._writer = SnapshotWriter(parts.store)
        self._live: dict[str, _Live] = {}
        self.when_unloaded: Callable[[str], None] = lambda model_id: None

    # -- in memory -----------------------------------------------------------------------------------------------------

    def need(self, model_id: str, others: Iterable[str] = ()) -> None:
        """Have a run in memory, if there is one to restore; `others` stay there.

        Raises: ServiceError (server) where its snapshot cannot be read.
        """
        now = time.monotonic()
        if model_id in self._live:
            self._live[model_id].used_at = now
            return
        record = self._store.run(model_id)
        if record is not None and record.state == "live":
            self.make_room({*others, model_id})
            self._restore(record)

    def make_room(self, needed: set[str]) -> None:
        """Unload the run that was unused longest, where the engine has no room for one more."""
        while len(self._live) >= self._engine.settings.max_runs:
            free = [name for name in self._live if name not in needed]
            if not free:
                return
            self.unload(min(free, key=lambda name: self._live[name].used_at))

    def made(self, model_id: str, seq: int) -> None:
        """A run is new in the engine."""
        now = time.monotonic()
        self._live[model_id] = _Live(done=seq, covered=-1, steps=0, saved_at=now, used_at=now)

    def noted(self, model_id: str, seq: int, *, stepped: bool) -> None:
        """A request is in the run's weights, and its answer in the store."""
        if model_id in self._live:
            self._live[model_id].done = seq
            self._live[model_id].steps += stepped

    def drop(self, model_id: str) -> None:
        """Forget a run's memory as it is; it comes back from its snapshot, which is not being written then."""
        self._writer.settle(model_id)
        self._live.pop(model_id, None)
        with contextlib.suppress(ServiceError):
            self._engine.unload_model(model_id)
        self.when_unloaded(model_id)

    def drop_all(self) -> None:
        """Forget the memory of all runs: it may be ahead of the store."""
        for model_id in list(self._live):
            self.drop(model_id)

    def unload(self, model_id: str) -> None:
        """Save a run and take it from memory."""
        self.save(model_id)
        self.drop(model_id)

    def unload_idle(self) -> list[str]:
        """Unload runs that were not used for long; their names."""
        limit = time.monotonic() - self._settings.idle_seconds
        idle = [name for name, live in self._live.items() if live.used_at < limit]
        for model_id in idle:
            self.unload(model_id)
        return idle

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def save_due(self) -> None:
        """Take the snapshots that are due; they are written beside. Raises: as `SnapshotWriter.written`."""
        self._note_written()
        now = time.monotonic()
        for model_id, live in list(self._live.items()):
            is_old = now - live.saved_at >= self._settings.snapshot_seconds
            if live.steps >= self._settings.snapshot_steps or (is_old and live.done > live.covered):
                self._begin_snapshot(model_id)

    def save_all(self) -> None:
        """Snapshots of all runs that have changed, written when this returns."""
        self._note_written(wait=True)
        for model_id, live in list(self._live.items()):
            if live.done > live.covered:
                self._begin_snapshot(model_id)
        self._note_written(wait=True)

    def save(self, model_id: str) -> bool:
        """A snapshot of a run, if it has changed, written when this returns.

        False = it could not be; replay takes longer then. Raises: as `SnapshotWriter.written`.
        """
        self._note_written(wait=True)
        live = self._live[model_id]
        if live.done > live.covered:
            self._begin_snapshot(model_id)
            self._note_written(wait=True)
        return live.done <= live.covered

    def settle(self) -> None:
        """Wait for all snapshots that are being written."""
        self._writer.settle()

    def _begin_snapshot(self, model_id: str) -> None:
        live = self._live[model_id]
        live.saved_at, live.steps = time.monotonic(), 0  # one that cannot be written is not tried again at once
        state = self._engine.state_dict(model_id) | {"note": {"covers": live.done}}
        steps = self._engine.model_info(model_id).steps
        self._writer.write(Snapshot(model_id, self._folder.snapshots(model_id), live.done, steps, state))

    def _note_written(self, *, wait: bool = False) -> None:
        if wait:
            self._writer.settle()
        for model_id, covers in self._writer.written().items():
            if model_id in self._live:
                self._live[model_id].covered = max(self._live[model_id].covered, covers)

    # -- after a kill --------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """At the start of a worker: what one that was killed had no time for. Raises: BackendError, OSError.

        Runs that have loaded saved weights get a snapshot before anything else is done: their replay needs the path,
        which may be deleted, replaced or withdrawn from now on.
        """
        for model_id in self._store.loads_to_save():
            try:
                self.need(model_id)
                if model_id in self._live:
                    self.save(model_id)
            except ServiceError as error:
                log.error("%s: cannot be restored: %s", model_id, error)
        place = self._folder.all_snapshots
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            record = self._store.run(folder.name)
            if record is not None and record.state == "unloaded":
                self._weights.remove(folder)

    # -- replay --------------------------------------------------------------------------------------------------------

    def _restore(self, record: TrainingRunRecord) -> None:
        """A run as it was after the newest request whose answer is in the store."""
        model_id, began = record.model_id, time.monotonic()
        covered, state = -1, self._snapshot(record)
        if state is not None:
            covered = int(state["note"]["covers"])
            self._engine.restore_model(model_id, state)
        self.made(model_id, covered)
        self._live[model_id].covered = covered
        repeated = 0
        try:
            for request in self._store.history(model_id, covered):
                repeated += self._repeat(request)
                self.noted(model_id, request.seq, stepped=request.kind == "optim_step")
        except BaseException:
            self.drop(model_id)
            raise
        fault("service.replayed")
        if repeated:
            self._store.count("replayed", repeated)
        took = time.monotonic() - began
        log.info("%s: restored from request %d, %d computed again, %.2f s", model_id, covered, repeated, took)

    def _snapshot(self, record: TrainingRunRecord) -> dict[str, Any] | None:
        """The newest state of a run that can be read; None = it is computed from its creation on."""
        folder = self._folder.snapshots(record.model_id)
        try:
            return read_state(folder) if folder.is_dir() else None
        except CheckpointError as error:  # also where a first snapshot was being written
            if record.covered_before >= 0:  # what it was made of is gone
                raise ServiceError(f"{record.model_id}: no snapshot can be read: {error}", "server") from error
            return None

    def _repeat(self, request: StoredRequest) -> bool:
        """Compute a request again whose answer is there. Returns True if it was."""
        fails = request.state == "failed"
        if request.state == "cancelled" or (fails and not _forgets_gradient(request)):
            return False
        try:
            command = decode(request.kind, request.payload, request.content_type, request.facts, request.target)
            answer = self._compute(command, request.owner)
        except ServiceError as error:
            if not fails:
                self._differs(request, f"it fails now: {error}")
            return True
        if answer is None:
            return False
        body, _ = encode(request.kind, answer, request.payload)
        if fails or hashlib.sha256(body).hexdigest() != request.answer_digest:
            self._differs(request, "another answer than the one that was given")
        return True

    def _compute(self, command: object, owner: str) -> ForwardBackwardResult | OptimStepResult | WeightsLoaded | None:
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
            return self._weights.load(command, owner)
        return None

    def _differs(self, request: StoredRequest, how: str) -> None:
        log.error("%s: request %d (%s), computed again: %s", request.target, request.seq, request.kind, how)
        self._store.count("replay_differences")


def _forgets_gradient(request: StoredRequest) -> bool:
    """True = a failed request that changed its run: an update by a gradient that is not finite."""
    return request.kind == "optim_step" and request.category == "user"
