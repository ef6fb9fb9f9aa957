"""Tracking of a worker's training runs: MLflow runs, metrics, and registration of saved paths.

MLflow calls may take seconds (its import, a store that does not answer), so threads other than the worker's make them.
Metrics come from the engine's answers and go to MLflow, the configured sinks, and alerts. A tracker's step is an update
of the run, with the means of the passes before it. Metrics never fail a request.

Saved paths become versions of a registered model, with their lineage. Weights are exported as a Hugging Face folder
between two rounds, because the engine belongs to one thread. Another thread uploads the folder to the tracking store,
so no request waits for a slow or unreachable store. The same bytes of the same run are one version, so an upload that
was killed is repeated after a restart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.training_service.store import CheckpointRecord, ServiceStore
from posttrain.training_service.worker.saved_weights import WorkerContext
from rl_core.errors import BackendError, PosttrainError, ServiceError
from rl_core.service.results import rename_metrics_for_trackers
from rl_core.settings import ServiceSettings
from rl_core.settings.services import check_sink_installed
from rl_core.storage.atomic_files import make_folder, protect_database
from rl_core.storage.faults import inject_fault
from rl_core.trackers import BackgroundTracker
from rl_core.tracking import SilentTracker, replace_invalid_characters
from tasks.tracking import RunTracker, Tracking
from tasks.tracking.extra_trackers import build_alert_tracker, build_extra_trackers
from tasks.tracking.system import SystemMonitor

log = logging.getLogger(__name__)

EXPERIMENT = "service"
# between deliveries of a run's metrics, each of which costs the worker milliseconds
DELIVERY_SECONDS = 10.0
MLFLOW_CLOSE_SECONDS = 1.0  # the next start, or `posttrain store sync`, delivers the rest
PIPELINE_LABEL = "service"  # value of the label `pipeline`
METRICS_CLOSE_SECONDS = 1.0  # longest wait, in a thread, for the end of a run's trackers
MAX_REMEMBERED_PASSES = 4096  # passes kept until an update, because a run may only evaluate
REGISTRATION_RETRY_SECONDS = 60.0  # after the store was unreachable
SUMMED_METRICS = (
    "train/loss_sum",
    "train/tokens",
    "train/sequences",
    "perf/forward_backward_seconds",
)


class MlflowRuns:
    """Open MLflow runs of a service, one per training run, shared by everything that writes into it."""

    def __init__(self, settings: ServiceSettings, root: Path, store: ServiceStore) -> None:
        """Args: root: folder of the service."""
        self._settings, self._root, self._store = settings, root, store
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RunTracker, int]] = {}  # with the number of users

    def acquire_run(self, model_id: str) -> RunTracker:
        """Return the MLflow run of a training run. Call `release_run` afterwards."""
        with self._lock:
            tracker, num_users = self._open.get(model_id) or (self._start_run(model_id), 0)
            self._open[model_id] = tracker, num_users + 1
            return tracker

    def release_run(self, model_id: str) -> None:
        """Close the run if nobody else uses it."""
        with self._lock:
            tracker, num_users = self._open.pop(model_id)
            if num_users > 1:
                self._open[model_id] = tracker, num_users - 1
                return
        tracker.close("FINISHED", timeout_s=MLFLOW_CLOSE_SECONDS)

    @contextmanager
    def use_run(self, model_id: str) -> Iterator[RunTracker]:
        """Yield the MLflow run of a training run."""
        tracker = self.acquire_run(model_id)
        try:
            yield tracker
        finally:
            self.release_run(model_id)

    @property
    def tracking_uri(self) -> str:
        """Address of the store, for messages."""
        return str(Tracking(self._settings.mlflow or None, self._root, EXPERIMENT).uri)

    def measure_queue_depth(self) -> dict[str, float]:
        """Return the queue length as a machine metric; empty if the store does not answer."""
        try:
            counts = self._store.count_open_requests()
        except BackendError:
            return {}
        return {"perf/queue_depth": float(sum(sum(states.values()) for states in counts.values()))}

    def _start_run(self, model_id: str) -> RunTracker:
        run = self._store.find_run(model_id)
        facts = {} if run is None else {**run.facts, **run.info}
        base = "" if run is None else str(run.facts.get("base") or run.base)
        tags = {
            "kind": "training",
            "service.run": model_id,
            "base_model": base,
            "service.owner": "" if run is None else run.owner,
        }
        tracking = Tracking(self._settings.mlflow or None, self._root, EXPERIMENT)
        if tracking.uri == tracking.store.default_uri:
            self._protect_store()
        folder = self._root / "tracking" / model_id
        return tracking.start_run(
            model_id, folder, tags=tags, params=facts, wait_s=0.0, interval_s=DELIVERY_SECONDS
        )

    def _protect_store(self) -> None:
        """Let only this user read the store in the service's folder: API keys guard what it holds."""
        folder = make_folder(self._root / "mlflow")
        folder.chmod(0o700)
        if (database := folder / "mlflow.db").exists():
            protect_database(database)


class MlflowRunTracker(SilentTracker):
    """Tracker that writes to the MLflow run of a training run, opened on construction."""

    def __init__(self, runs: MlflowRuns, model_id: str) -> None:
        self._runs, self._model_id = runs, model_id
        self._run = runs.acquire_run(model_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the scalars of one update."""
        self._run.log_metrics(dict(metrics), step)

    def close(self, status: str = "FINISHED", *arguments: Any) -> None:
        """Release the MLflow run."""
        self._runs.release_run(self._model_id)


class _TrackedRun:
    """Trackers of a training run, each on a thread, and the metrics of its passes since the last update."""

    def __init__(self, sinks: list[BackgroundTracker]) -> None:
        self.sinks = sinks
        self.passes: deque[dict[str, float]] = deque(maxlen=MAX_REMEMBERED_PASSES)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for sink in self.sinks:
            sink.log_metrics(metrics, step)

    def close_sinks(self) -> None:
        for sink in self.sinks:
            sink.close("FINISHED", METRICS_CLOSE_SECONDS)


class RunMetrics:
    """Trackers of a worker's training runs."""

    def __init__(self, settings: ServiceSettings, root: Path, runs: MlflowRuns) -> None:
        """Args: root: folder of the service. Raises: SettingsError if the package of a sink is missing."""
        for sink in settings.sinks:
            check_sink_installed(sink)
        self._settings, self._root, self._mlflow_runs = settings, root, runs
        self._closing: list[threading.Thread] = []
        self._runs: dict[str, _TrackedRun] = {}
        self._is_broken = False
        self._machine_sinks = self._create_sinks("worker") if settings.sinks else []
        self._monitor = None
        if self._machine_sinks and settings.system_metrics_seconds:
            self._monitor = SystemMonitor(
                root, settings.system_metrics_seconds, self._log_system_metrics
            )

    def record_pass(self, model_id: str, metrics: Mapping[str, float], seconds: float) -> None:
        """Record a forward and backward pass.

        Args:
            seconds: duration of all passes that were computed together.
        """
        if self._is_broken:
            return
        with self._disable_on_error():
            self._open_run(model_id).passes.append(
                {**rename_metrics_for_trackers(metrics), "perf/forward_backward_seconds": seconds}
            )

    def record_step(
        self, model_id: str, metrics: Mapping[str, float], step: int, seconds: float
    ) -> None:
        """Log an update with everything measured since the last one."""
        if self._is_broken:
            return
        with self._disable_on_error():
            run = self._open_run(model_id)
            values = {
                **_average_passes(run.passes),
                **rename_metrics_for_trackers(metrics),
                "perf/optim_step_seconds": seconds,
            }
            run.passes.clear()
            run.log_metrics(values, step)

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """Disable all metrics, with one warning, if the block raises."""
        try:
            yield
        except Exception as error:
            self._is_broken = True
            log.warning(
                "metrics of training runs are disabled: %s: %s", type(error).__name__, error
            )

    def end_run(self, model_id: str) -> None:
        """Close, in a thread, the trackers of a run that has left memory. A later update opens them again."""
        run = self._runs.pop(model_id, None)
        if run is None:
            return
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = threading.Thread(target=run.close_sinks, name="metrics-close", daemon=True)
        self._closing.append(thread)
        thread.start()

    def close_trackers(self) -> None:
        """Close all trackers."""
        if self._monitor is not None:
            self._monitor.close()
        for model_id in list(self._runs):
            self.end_run(model_id)
        for sink in self._machine_sinks:
            sink.close("FINISHED", 1.0)
        deadline = time.monotonic() + 2 * METRICS_CLOSE_SECONDS
        for thread in self._closing:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _open_run(self, model_id: str) -> _TrackedRun:
        if model_id not in self._runs:
            sinks = [
                *self._create_sinks(model_id),
                build_alert_tracker(self._settings.alerts, PIPELINE_LABEL, model_id),
            ]
            if self._settings.mlflow_runs:
                create_tracker = partial(MlflowRunTracker, self._mlflow_runs, model_id)
                sinks.append(BackgroundTracker("MLflow", create_tracker))
            for sink in sinks:
                sink.begin(f"{PIPELINE_LABEL} · {model_id}", {})
            self._runs[model_id] = _TrackedRun(sinks)
        return self._runs[model_id]

    def _create_sinks(self, stage: str) -> list[BackgroundTracker]:
        return build_extra_trackers(
            self._settings.sinks,
            self._root,
            pipeline=PIPELINE_LABEL,
            group=PIPELINE_LABEL,
            folder=stage,
            run_id=stage,
            stage=stage,
        )

    def _log_system_metrics(self, metrics: dict[str, float], number: int) -> None:
        readings = {**metrics, **self._mlflow_runs.measure_queue_depth()}
        for sink in self._machine_sinks:
            sink.log_system(readings, number)


def _average_passes(passes: Iterable[dict[str, float]]) -> dict[str, float]:
    """Compute means over passes; token counts, losses and durations are summed."""
    columns: dict[str, list[float]] = {}
    for metrics in passes:
        for name, value in metrics.items():
            columns.setdefault(name, []).append(value)
    return {
        name: sum(values) / (1 if name in SUMMED_METRICS else len(values))
        for name, values in columns.items()
    }


def format_registered_name(prefix: str, base: str) -> str:
    """Return the name of the registered model for a base model."""
    return replace_invalid_characters(f"{prefix}-{base}", r"A-Za-z0-9_.\- ", "-")[:100]


class CheckpointRegistrar:
    """Registration of saved paths in the model registry, one at a time, oldest first."""

    def __init__(self, context: WorkerContext, trackers: MlflowRuns) -> None:
        self._engine = context.engine
        self._store = context.store
        self._folder = context.folder
        self._weights = context.weights
        self._settings, self._mlflow_runs = context.settings.worker, trackers
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0

    def step(self) -> None:
        """Start the next upload if a path waits and no upload is running."""
        if self._settings.registered == "none" or time.monotonic() < self._retry_at:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        record = self._store.find_checkpoint_to_register()
        if record is None:
            return
        staging = self._folder.resolve_staging_folder("model")
        try:
            self._weights.delete_folder(staging)
            self._engine.export(self._folder.to_absolute_path(record.folder), staging)
        except ServiceError as error:
            self._mark_failed(record, error)
            return
        inject_fault("service.exported")
        self._thread = threading.Thread(
            target=self._register_checkpoint, args=(record, staging), name="versions", daemon=True
        )
        self._thread.start()

    def wait_for_upload(self, seconds: float) -> None:
        """Wait for the running upload."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _register_checkpoint(self, record: CheckpointRecord, staging: Path) -> None:
        try:
            version = self._upload_version(record, staging)
            inject_fault("service.registered")
            self._store.update_checkpoint(record.path, version=version, registration="done")
            log.info("%s is %s", record.path, version)
        except (BackendError, OSError) as error:
            log.warning("registration of %s is retried later: %s", record.path, error)
            self._retry_at = time.monotonic() + REGISTRATION_RETRY_SECONDS
        except PosttrainError as error:
            self._mark_failed(record, error)
        except BaseException:  # raised by the registry's packages
            self._retry_at = time.monotonic() + REGISTRATION_RETRY_SECONDS
            raise

    def _upload_version(self, record: CheckpointRecord, staging: Path) -> str:
        """Upload an exported folder; return its version NAME/NUMBER.

        Raises: BackendError while the store is unreachable.
        """
        name = format_registered_name(self._settings.registered_name, record.base)
        tags = {
            "stage": "service",
            "service.path": record.path,
            "service.run": record.model_id,
            "base_model": record.base,
            "service.owner": record.owner,
            "service.optimizer": record.facts.get("optimizer"),
            "service.updates": str(record.steps),
            "service.data_digest": record.facts.get("data_digest") or "none",
            **{
                f"service.user.{key}": value
                for key, value in (record.facts.get("user_metadata") or {}).items()
            },
        }
        with self._mlflow_runs.use_run(record.model_id) as run:
            number = run.log_model(
                staging, "policy", name, tags=tags, step=record.steps, description=record.path
            )
        if number is None:
            raise BackendError(
                f"the store of the model registry at {self._mlflow_runs.tracking_uri} does not answer"
            )
        return f"{name}/{number}"

    def _mark_failed(self, record: CheckpointRecord, error: Exception) -> None:
        log.error("%s could not be registered: %s", record.path, error)
        self._store.update_checkpoint(record.path, registration="failed")
