"""Upkeep between rounds: what has expired goes, idle runs leave memory, saved paths get versions in the registry.

The process that computes: takes requests from the store in their order and puts answers there.

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

from flows.runtime.stopping import bound_shutdown_time
from posttrain.training_service.paths import ServiceFolder
from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.loaded_runs import LoadedRuns
from posttrain.training_service.worker.loaded_samplers import LoadedSamplers
from posttrain.training_service.worker.request_execution import RequestExecutor, select_round
from posttrain.training_service.worker.run_tracking import (
    CheckpointRegistrar,
    MlflowRuns,
    RunMetrics,
)
from posttrain.training_service.worker.saved_weights import WeightsStorage, WorkerContext
from rl_core.errors import BackendError
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceSettings
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 30.0  # between two rounds of it


class Housekeeping:
    """Work that has no place in the order of requests."""

    def __init__(
        self,
        context: WorkerContext,
        runs: LoadedRuns,
        samplers: LoadedSamplers,
    ) -> None:
        self._store, self._weights, self._runs, self._samplers = (
            context.store,
            context.weights,
            runs,
            samplers,
        )
        self._settings = context.settings.worker
        self._next_due = time.monotonic() + HOUSEKEEPING_SECONDS

    def run_if_due(self) -> None:
        """Do it, if it is time."""
        if time.monotonic() >= self._next_due:
            self.run_now()
            self._next_due = time.monotonic() + HOUSEKEEPING_SECONDS

    def run_now(self) -> None:
        """Do it. Raises: BackendError of the store; a disk that refuses is tried again later."""
        settings = self._settings
        self._store.expire_results(
            result_seconds=settings.result_seconds, memory_seconds=settings.memory_seconds
        )
        gone = self._weights.delete_expired_weights()
        for path in gone:
            self._samplers.detach_samplers(path)
        gone += self._samplers.remove_unused_samplers(
            settings.sampler_seconds, self._store.read_clock()
        )
        if gone:
            log.info("removed: %s", ", ".join(gone))
        if idle := self._runs.unload_idle_runs():
            log.info("unused for long, saved and taken from memory: %s", ", ".join(idle))


IDLE_WAIT_SECONDS = 1.0  # without a request, until snapshots and upkeep are looked at
RETRY_SECONDS = 1.0  # after the store refused
EXIT_NOT_SAVED = (
    75  # exit code where there was no time to save all runs (EX_TEMPFAIL of sysexits.h)
)
LOCK_WAIT_SECONDS = 15.0  # that a worker which is being stopped may hold the lock


class EngineProcess:
    """The worker of a service's folder."""

    def __init__(self, settings: ServiceSettings, store: ServiceStore) -> None:
        self._store = store
        self._folder = ServiceFolder(Path(settings.folder).resolve())
        engine = TrainingEngine(settings.engine, settings.references, settings.reference_models)
        self._max_requests, self._max_runs = (
            settings.worker.batch_requests,
            settings.engine.max_runs,
        )
        weights = WeightsStorage(engine, store, self._folder, settings.worker)
        parts = WorkerContext(engine, store, self._folder, weights, settings)
        self._runs, self._samplers = LoadedRuns(parts), LoadedSamplers(parts)
        self._runs.on_unload = self._release_run
        trackers = MlflowRuns(settings, self._folder.root, store)
        self._metrics = RunMetrics(settings, self._folder.root, trackers)
        self._executor = RequestExecutor(parts, self._runs, self._samplers, self._metrics)
        self._housekeeping = Housekeeping(parts, self._runs, self._samplers)
        self._registrar = CheckpointRegistrar(parts, trackers)
        self._is_stopping = False  # a plain flag: an Event that is waited for would lock out the signal that sets it

    def _release_run(self, model_id: str) -> None:
        """A run has left memory, saved or not."""
        self._samplers.drop_inflight_samplers(model_id)
        self._metrics.end_run(model_id)

    def request_stop(self) -> None:
        """Let `run` end after what it is computing; any thread, also a signal handler."""
        self._is_stopping = True

    def run_until_stopped(self) -> None:
        """Compute until `stop`, then save what has changed. Raises: FolderBusy where another worker runs."""
        make_folder(self._folder.root)
        with FolderLock(self._folder.lock_file, wait_s=LOCK_WAIT_SECONDS):
            clear_leftovers(self._folder.root)
            again = self._store.reset_running_requests()
            log.info("worker starts; %d requests were being computed", again)
            is_tidy = False
            while not self._is_stopping:
                try:
                    if not is_tidy:
                        self._runs.recover_after_crash()
                        is_tidy = True
                    self.step()
                except (BackendError, OSError) as error:  # memory may be ahead of the store
                    log.error("%s; trying again", error)
                    self._runs.drop_all_runs()
                    is_tidy = False
                    self._wait_unless_stopping(RETRY_SECONDS)
                    self._reset_running_requests()
            self._runs.save_all_snapshots()
            self._metrics.close_trackers()
            log.info("worker stops; all runs are saved")

    def _reset_running_requests(self) -> None:
        """Put back what was being computed, once the store answers."""
        while not self._is_stopping:
            try:
                self._store.reset_running_requests(count_death=False)
                return
            except (BackendError, OSError):
                self._wait_unless_stopping(RETRY_SECONDS)

    def _wait_unless_stopping(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < until:
            time.sleep(0.05)

    def step(self, wait: float = IDLE_WAIT_SECONDS) -> int:
        """One round, or a wait for a request; the number of requests computed. Raises: BackendError, OSError."""
        seen = self._store.read_change_counter()
        if ready := self._store.list_ready_requests():
            number = self._executor.execute_round(
                select_round(ready, self._max_requests, self._max_runs), lambda: self._is_stopping
            )
        else:
            number = 0
            self._runs.save_due_snapshots()
            self._registrar.step()
            until = time.monotonic() + wait
            while not self._is_stopping and time.monotonic() < until:
                if self._store.wait_for_change(seen, 0.1) != seen:
                    break
        self._housekeeping.run_if_due()
        return number


def run_worker(settings: ServiceSettings) -> int:
    """The worker until a signal; the exit code: 143 after SIGTERM, 130 after Ctrl-C.

    The process itself is ended with `EXIT_NOT_SAVED` where it is not done `stop_seconds` after SIGTERM.

    Raises: FolderBusy where another worker runs; SettingsError, BackendError where the store cannot be opened.
    """
    with (
        bound_shutdown_time(settings.worker.stop_seconds, EXIT_NOT_SAVED),
        _collect_signals() as (received, told),
    ):
        store = ServiceStore(
            settings.store_url
        )  # a signal may come while it waits for the database
        process = EngineProcess(settings, store)
        told.append(process.request_stop)
        if received:
            process.request_stop()
        process.run_until_stopped()
    store.close()
    return 128 + received[0] if received else 0


@contextmanager
def _collect_signals() -> Iterator[tuple[list[int], list[Callable[[], None]]]]:
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
