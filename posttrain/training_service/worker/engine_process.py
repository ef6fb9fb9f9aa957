"""Worker process: takes requests from the store in order, computes them, and stores the answers.

It may be killed at any moment. Unanswered requests are computed again after a restart (`loaded_runs`). Between rounds
it expires results, removes unused weights, unloads idle runs, and registers saved paths.
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
from posttrain.training_service.store import ServiceStore, open_service_store
from posttrain.training_service.worker.fair_rounds import FairRounds
from posttrain.training_service.worker.loaded_runs import LoadedRuns
from posttrain.training_service.worker.loaded_samplers import LoadedSamplers
from posttrain.training_service.worker.request_execution import RequestExecutor
from posttrain.training_service.worker.run_tracking import (
    CheckpointRegistrar,
    MlflowRuns,
    RunMetrics,
)
from posttrain.training_service.worker.saved_weights import WeightsStorage, WorkerContext
from rl_core.errors import BackendError
from rl_core.processes.supervision import handle_signals
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceSettings
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 30.0
IDLE_WAIT_SECONDS = 1.0  # longest wait for a request before snapshots and housekeeping are checked
SILENT_SESSION_SECONDS = 3600.0  # then what waits behind a missing request of it is cancelled
RETRY_SECONDS = 1.0  # after an error of the store
# exit code if time ran out before all runs were saved (EX_TEMPFAIL of sysexits.h)
EXIT_NOT_SAVED = 75
LOCK_WAIT_SECONDS = 15.0  # a worker that is being stopped may hold the lock for this long


class Housekeeping:
    """Work outside of the order of requests."""

    def __init__(
        self,
        context: WorkerContext,
        runs: LoadedRuns,
        samplers: LoadedSamplers,
    ) -> None:
        self._store = context.store
        self._weights = context.weights
        self._runs = runs
        self._samplers = samplers
        self._settings = context.settings.worker
        self._next_due = time.monotonic() + HOUSEKEEPING_SECONDS

    def run_if_due(self) -> None:
        """Run if the interval has passed."""
        if time.monotonic() >= self._next_due:
            self.run_now()
            self._next_due = time.monotonic() + HOUSEKEEPING_SECONDS

    def run_now(self) -> None:
        """Run now. Raises: BackendError of the store. A disk error is retried in the next round."""
        settings = self._settings
        self._store.expire_results(
            result_seconds=settings.result_seconds, memory_seconds=settings.memory_seconds
        )
        if removed_sequences := self._store.remove_expired_sequences(settings.recorded_seconds):
            log.info("%d recorded sequences expired", removed_sequences)
        if cancelled := self._store.cancel_blocked_requests(SILENT_SESSION_SECONDS):
            log.info("%d requests behind a missing one cancelled; their sessions ended", cancelled)
        removed = self._weights.delete_expired_weights()
        for path in removed:
            self._samplers.detach_samplers(path)
        removed += self._samplers.remove_unused_samplers(
            settings.sampler_seconds, self._store.read_clock()
        )
        if removed:
            log.info("removed: %s", ", ".join(removed))
        if idle := self._runs.unload_idle_runs():
            log.info("idle runs saved and unloaded: %s", ", ".join(idle))


class EngineProcess:
    """Worker of a service's folder."""

    def __init__(self, settings: ServiceSettings, store: ServiceStore) -> None:
        self._store = store
        self._folder = ServiceFolder(Path(settings.folder).resolve())
        engine = TrainingEngine(
            settings.engine,
            settings.references,
            settings.reference_models,
            settings.reward_models,
        )
        self._rounds = FairRounds(settings.worker.batch_requests, settings.engine.max_runs)
        weights = WeightsStorage(engine, store, self._folder, settings.worker)
        context = WorkerContext(engine, store, self._folder, weights, settings)
        self._runs, self._samplers = LoadedRuns(context), LoadedSamplers(context)
        self._runs.on_unload = self._release_run
        trackers = MlflowRuns(settings, self._folder.root, store)
        self._metrics = RunMetrics(settings, self._folder.root, trackers)
        self._executor = RequestExecutor(
            context, self._runs, self._samplers, self._metrics, self._rounds
        )
        self._housekeeping = Housekeeping(context, self._runs, self._samplers)
        self._registrar = CheckpointRegistrar(context, trackers)
        # Not an Event: waiting for it would block the signal handler that sets it.
        self._is_stopping = False

    def _release_run(self, model_id: str) -> None:
        """Release what belongs to a run that has left memory, saved or not."""
        self._samplers.drop_inflight_samplers(model_id)
        self._metrics.end_run(model_id)

    def request_stop(self) -> None:
        """Let `run_until_stopped` return after the current computation. Any thread or signal handler may call."""
        self._is_stopping = True

    def run_until_stopped(self) -> None:
        """Compute until `request_stop`, then save all changed runs. Raises: FolderBusy if another worker runs."""
        make_folder(self._folder.root)
        with FolderLock(self._folder.lock_file, wait_s=LOCK_WAIT_SECONDS):
            clear_leftovers(self._folder.root)
            num_running = self._store.reset_running_requests()
            log.info("worker starts; %d requests were being computed", num_running)
            is_recovered = False
            while not self._is_stopping:
                try:
                    if not is_recovered:
                        self._runs.recover_after_crash()
                        is_recovered = True
                    self.step()
                except (BackendError, OSError) as error:
                    log.error("%s; trying again", error)
                    # The runs in memory may be ahead of the store.
                    self._runs.drop_all_runs()
                    is_recovered = False
                    self._wait_unless_stopping(RETRY_SECONDS)
                    self._reset_running_requests()
            self._runs.save_all_snapshots()
            self._metrics.close_trackers()
            log.info("worker stops; all runs are saved")

    def _reset_running_requests(self) -> None:
        """Return interrupted requests to the queue once the store answers."""
        while not self._is_stopping:
            try:
                self._store.reset_running_requests(count_death=False)
                return
            except (BackendError, OSError):
                self._wait_unless_stopping(RETRY_SECONDS)

    def _wait_unless_stopping(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < deadline:
            time.sleep(0.05)

    def step(self, wait: float = IDLE_WAIT_SECONDS) -> int:
        """Execute a round, or wait for a request; return the number of requests computed.

        Raises: BackendError, OSError.
        """
        counter = self._store.read_change_counter()
        if ready := self._store.list_ready_requests():
            num_computed = self._executor.execute_round(
                self._rounds.select_round(ready), lambda: self._is_stopping
            )
        else:
            num_computed = 0
            self._runs.save_due_snapshots()
            self._registrar.step()
            deadline = time.monotonic() + wait
            while not self._is_stopping and time.monotonic() < deadline:
                if self._store.wait_for_change(counter, 0.1) != counter:
                    break
        self._housekeeping.run_if_due()
        return num_computed


def run_worker(settings: ServiceSettings) -> int:
    """Run the worker until a signal; return 143 after SIGTERM, 130 after Ctrl-C.

    The process exits with `EXIT_NOT_SAVED` if it has not finished `stop_seconds` after SIGTERM.
    Raises: FolderBusy if another worker runs; SettingsError or BackendError if the store cannot be opened.
    """
    with (
        bound_shutdown_time(settings.worker.stop_seconds, EXIT_NOT_SAVED),
        _collect_signals() as (received, callbacks),
    ):
        # A signal may arrive while this waits for the database.
        store = open_service_store(settings)
        process = EngineProcess(settings, store)
        callbacks.append(process.request_stop)
        if received:
            process.request_stop()
        process.run_until_stopped()
    store.close()
    return 128 + received[0] if received else 0


@contextmanager
def _collect_signals() -> Iterator[tuple[list[int], list[Callable[[], None]]]]:
    """Yield the list of received signals, and the list of callbacks for further signals."""
    received: list[int] = []
    callbacks: list[Callable[[], None]] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for callback in callbacks:
            callback()

    with handle_signals({signal.SIGTERM: record_signal, signal.SIGINT: record_signal}):
        yield received, callbacks
