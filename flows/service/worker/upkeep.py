"""Upkeep between rounds: what has expired goes, idle runs leave memory, saved paths get versions in the registry."""

from __future__ import annotations

import logging
import time

from flows.service.worker.live_runs import LiveRuns
from flows.service.worker.live_samplers import LiveSamplers
from flows.service.worker.worker_parts import WorkerParts

__all__ = ["Upkeep"]

log = logging.getLogger(__name__)

SECONDS = 30.0  # between two rounds of it


class Upkeep:
    """Work that has no place in the order of requests."""

    def __init__(
        self,
        parts: WorkerParts,
        runs: LiveRuns,
        samplers: LiveSamplers,
    ) -> None:
        self._store, self._weights, self._runs, self._samplers = parts.store, parts.weights, runs, samplers
        self._settings = parts.settings.worker
        self._next = time.monotonic() + SECONDS

    def when_due(self) -> None:
        """Do it, if it is time."""
        if time.monotonic() >= self._next:
            self.now()
            self._next = time.monotonic() + SECONDS

    def now(self) -> None:
        """Do it. Raises: BackendError of the store; a disk that refuses is tried again later."""
        settings = self._settings
        self._store.expire(result_seconds=settings.result_seconds, memory_seconds=settings.memory_seconds)
        gone = self._weights.remove_expired()
        for path in gone:
            self._samplers.release(path)
        gone += self._samplers.remove_unused(settings.sampler_seconds, self._store.now())
        if gone:
            log.info("removed: %s", ", ".join(gone))
        if idle := self._runs.unload_idle():
            log.info("unused for long, saved and taken from memory: %s", ", ".join(idle))
