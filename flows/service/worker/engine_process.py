"""The process that computes: takes requests from the store in their order and puts answers there.

It may be killed at any moment: what it has not answered is computed again when it is back (`live_runs`).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from flows.runtime.stopping import bounded
from flows.service.store import ServiceStore
from flows.service.worker.computing import Computing
from flows.service.worker.live_runs import LiveRuns
from flows.service.worker.live_samplers import LiveSamplers
from flows.service.worker.rounds import choose
from flows.service.worker.run_metrics import RunMetrics
from flows.service.worker.run_trackers import RunTrackers
from flows.service.worker.saved_versions import SavedVersions
from flows.service.worker.service_folder import ServiceFolder
from flows.service.worker.upkeep import Upkeep
from flows.service.worker.weights_on_disk import WeightsOnDisk
from flows.service.worker.worker_parts import WorkerParts
from rl_core.errors import BackendError
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceSettings
from rl_core.storage.folder_removal import clear_leftovers
from rl_core.storage.locks import FolderLock
from rl_core.storage.single_files import make_folder

__all__ = ["EngineProcess", "run_worker"]

log = logging.getLogger(__name__)

WAIT_SECONDS = 1.0  # without a request, until snapshots and upkeep are looked at
RETRY_SECONDS = 1.0  # after the store refused
NOT_SAVED = 75  # exit code where there was no time to save all runs (EX_TEMPFAIL of sysexits.h)
LOCK_SECONDS = 15.0  # that a worker which is being stopped may hold the lock


class EngineProcess:
    """The worker of a service's folder."""

    def __init__(self, settings: ServiceSettings, store: ServiceStore) -> None:
        self._store = store
        self._folder = ServiceFolder(Path(settings.folder).resolve())
        engine = TrainingEngine(settings.engine, settings.references, settings.reference_models)
        self._most, self._most_runs = settings.worker.batch_requests, settings.engine.max_runs
        weights = WeightsOnDisk(engine, store, self._folder, settings.worker)
        parts = WorkerParts(engine, store, self._folder, weights, settings)
        self._runs, self._samplers = LiveRuns(parts), LiveSamplers(parts)
        self._runs.when_unloaded = self._unloaded
        trackers = RunTrackers(settings, self._folder.root, store)
        self._metrics = RunMetrics(settings, self._folder.root, trackers)
        self._computing = Computing(parts, self._runs, self._samplers, self._metrics)
        self._upkeep = Upkeep(parts, self._runs, self._samplers)
        self._versions = SavedVersions(parts, trackers)
        self._is_stopping = False  # a plain flag: an Event that is waited for would lock out the signal that sets it

    def _unloaded(self, model_id: str) -> None:
        """A run has left memory, saved or not."""
        self._samplers.drop_inflight(model_id)
        self._metrics.ended(model_id)

    def stop(self) -> None:
        """Let `run` end after what it is computing; any thread, also a signal handler."""
        self._is_stopping = True

    def run(self) -> None:
        """Compute until `stop`, then save what has changed. Raises: FolderBusy where another worker runs."""
        make_folder(self._folder.root)
        with FolderLock(self._folder.lock, wait_s=LOCK_SECONDS):
            clear_leftovers(self._folder.root)
            again = self._store.reclaim()
            log.info("worker starts; %d requests were being computed", again)
            is_tidy = False
            while not self._is_stopping:
                try:
                    if not is_tidy:
                        self._runs.tidy()
                        is_tidy = True
                    self.step()
                except (BackendError, OSError) as error:  # memory may be ahead of the store
                    log.error("%s; trying again", error)
                    self._runs.drop_all()
                    is_tidy = False
                    self._pause(RETRY_SECONDS)
                    self._again()
            self._runs.save_all()
            self._metrics.close()
            log.info("worker stops; all runs are saved")

    def _again(self) -> None:
        """Put back what was being computed, once the store answers."""
        while not self._is_stopping:
            try:
                self._store.reclaim(died=False)
                return
            except (BackendError, OSError):
                self._pause(RETRY_SECONDS)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < until:
            time.sleep(0.05)

    def step(self, wait: float = WAIT_SECONDS) -> int:
        """One round, or a wait for a request; the number of requests computed. Raises: BackendError, OSError."""
        seen = self._store.changes()
        if ready := self._store.ready():
            number = self._computing.compute(choose(ready, self._most, self._most_runs), lambda: self._is_stopping)
        else:
            number = 0
            self._runs.save_due()
            self._versions.step()
            until = time.monotonic() + wait
            while not self._is_stopping and time.monotonic() < until:
                if self._store.wait_for_change(seen, 0.1) != seen:
                    break
        self._upkeep.when_due()
        return number


def run_worker(settings: ServiceSettings) -> int:
    """The worker until a signal; the exit code: 143 after SIGTERM, 130 after Ctrl-C.

    The process itself is ended with `NOT_SAVED` where it is not done `stop_seconds` after SIGTERM.

    Raises: FolderBusy where another worker runs; SettingsError, BackendError where the store cannot be opened.
    """
    with bounded(settings.worker.stop_seconds, NOT_SAVED), _noted_signals() as (received, told):
        store = ServiceStore(settings.store_url)  # a signal may come while it waits for the database
        process = EngineProcess(settings, store)
        told.append(process.stop)
        if received:
            process.stop()
        process.run()
    store.close()
    return 128 + received[0] if received else 0


@contextmanager
def _noted_signals() -> Iterator[tuple[list[int], list[Callable[[], None]]]]:
    """Numbers of the signals that came; and functions that are called at each."""
    received: list[int] = []
    told: list[Callable[[], None]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for call in told:
            call()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received, told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
