"""Thread that writes snapshots while training goes on: a run's state is copied, then the disk has time.

A snapshot counts once its folder is published and the store knows of it, as one that is waited for. Errors are kept and
raised in the worker's own thread, where it is next asked for what became of the snapshots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flows.service.store import ServiceStore
from rl_core.errors import PosttrainError
from rl_core.service.saved_weights import write_state
from rl_core.storage.faults import fault

__all__ = ["Snapshot", "SnapshotWriter"]

log = logging.getLogger(__name__)

MOST_BYTES = 512 << 20  # of copies in memory at a time; a single larger one is waited for


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a run, apart from it."""

    model_id: str
    folder: Path
    covers: int  # newest request that is in it
    steps: int
    state: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)

    @property
    def bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.state))


class SnapshotWriter:
    """One snapshot after the other, at most one of each run at a time."""

    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="service-snapshots")
        self._writing: dict[str, tuple[Future[bool], Snapshot]] = {}  # by run, the oldest first
        self._written: dict[str, int] = {}
        self._error: BaseException | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Begin to write; waits for the run's last one, and for room in memory. Raises: as `written`."""
        self.settle(snapshot.model_id)
        while self._writing and snapshot.bytes + sum(other.bytes for _, other in self._writing.values()) > MOST_BYTES:
            self.settle(next(iter(self._writing)))
        self._writing[snapshot.model_id] = (self._thread.submit(self._write, snapshot), snapshot)
        if snapshot.bytes > MOST_BYTES:
            self.settle(snapshot.model_id)

    def settle(self, model_id: str | None = None) -> None:
        """Wait for the snapshot of a run, or for all."""
        for name in [model_id] if model_id is not None else list(self._writing):
            if name in self._writing:
                self._take(name)

    def written(self) -> dict[str, int]:
        """Newest requests in the snapshots that were finished since the last call, by run; waits for none.

        Raises: what writing raised, and a full disk does not: OSError, BackendError of the store.
        """
        for name in [name for name, (future, _) in self._writing.items() if future.done()]:
            self._take(name)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        found, self._written = self._written, {}
        return found

    def _take(self, model_id: str) -> None:
        future, snapshot = self._writing.pop(model_id)
        try:
            if future.result():
                self._written[model_id] = snapshot.covers
        except BaseException as error:
            self._error = self._error or error

    def _write(self, snapshot: Snapshot) -> bool:
        """In the thread. False = the disk refused; replay takes longer then."""
        self._store.sync()  # no snapshot may be ahead of the answers in the store
        try:
            write_state(snapshot.folder, snapshot.state)
        except PosttrainError as error:
            log.warning("%s: no snapshot: %s", snapshot.model_id, error)
            return False
        fault("service.snapshot")
        self._store.cover(snapshot.model_id, snapshot.covers, snapshot.steps)
        took = time.monotonic() - snapshot.began
        log.info("%s: snapshot of request %d in %.2f s", snapshot.model_id, snapshot.covers, took)
        return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
