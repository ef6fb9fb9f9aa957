"""MLflow runs of training runs: one of each, opened once for all who write into it.

Everything here may take seconds (MLflow's import, a store that does not answer), so only threads beside the worker's
own call it.

Metrics of training runs, from the engine's answers to trackers: MLflow and sinks by setting, and alerts.

One step of a tracker is one update of the run, with the means of the passes before it. Nothing here can fail a request.

Saved paths as versions of a registered model, with their lineage; in the background, and gone on with after a kill.

Weights are exported as a Hugging Face folder between two rounds, for the engine belongs to one thread; another thread
gives the folder to the tracking store, which may be slow or away: no request waits for it. The same bytes of the same
run are one version, so an attempt that was killed is repeated.
"""

from __future__ import annotations

import logging
import re
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
from rl_core.storage.faults import inject_fault
from rl_core.trackers import BackgroundTracker
from rl_core.tracking import SilentTracker
from tasks.tracking import RunTracker, Tracking
from tasks.tracking.extra_trackers import build_alert_tracker, build_extra_trackers
from tasks.tracking.system import SystemMonitor

EXPERIMENT = "service"
DELIVERY_SECONDS = (
    10.0  # between two deliveries of a run's metrics: each costs the worker milliseconds
)
MLFLOW_CLOSE_SECONDS = 1.0  # the rest is sent by the next start, or `posttrain sync`


class MlflowRuns:
    """The runs of a service's folder that are open."""

    def __init__(self, settings: ServiceSettings, root: Path, store: ServiceStore) -> None:
        """`root`: folder of the service."""
        self._settings, self._root, self._store = settings, root, store
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RunTracker, int]] = {}  # and how many use it

    def acquire_run(self, model_id: str) -> RunTracker:
        """The MLflow run of a training run; `release_run` it."""
        with self._lock:
            found, users = self._open.get(model_id) or (self._start_run(model_id), 0)
            self._open[model_id] = found, users + 1
            return found

    def release_run(self, model_id: str) -> None:
        """Close it where nobody else uses it."""
        with self._lock:
            found, users = self._open.pop(model_id)
            if users > 1:
                self._open[model_id] = found, users - 1
                return
        found.close("FINISHED", timeout_s=MLFLOW_CLOSE_SECONDS)

    @contextmanager
    def use_run(self, model_id: str) -> Iterator[RunTracker]:
        """The run within a block."""
        found = self.acquire_run(model_id)
        try:
            yield found
        finally:
            self.release_run(model_id)

    @property
    def tracking_uri(self) -> str:
        """Address of the store, for messages."""
        return str(Tracking(self._settings.mlflow or None, self._root, EXPERIMENT).uri)

    def measure_queue_depth(self) -> dict[str, float]:
        """Length of the queue, for trackers of the machine; nothing where the store does not answer."""
        try:
            return {
                "perf/queue_depth": float(
                    sum(sum(kinds.values()) for kinds in self._store.count_open_requests().values())
                )
            }
        except BackendError:
            return {}

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
        folder = self._root / "tracking" / model_id
        return tracking.start_run(
            model_id, folder, tags=tags, params=facts, wait_s=0.0, interval_s=DELIVERY_SECONDS
        )


class MlflowRunTracker(SilentTracker):
    """The MLflow run of a training run as a tracker, opened when it is made."""

    def __init__(self, runs: MlflowRuns, model_id: str) -> None:
        self._runs, self._model_id = runs, model_id
        self._run = runs.acquire_run(model_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars of one update."""
        self._run.log_metrics(dict(metrics), step)

    def close(self, status: str = "FINISHED", *arguments: Any) -> None:
        """Leave it."""
        self._runs.release_run(self._model_id)


log = logging.getLogger(__name__)

PIPELINE_LABEL = "service"  # label `pipeline` of its metrics
METRICS_CLOSE_SECONDS = 1.0  # for which the end of a run is waited for, on a thread beside
MAX_REMEMBERED_PASSES = 4096  # that are remembered until an update: a run may only be evaluated


class _TrackedRun:
    """Trackers of one training run, each on a thread, and what its passes measured since the last update."""

    def __init__(self, sinks: list[BackgroundTracker]) -> None:
        self.sinks = sinks
        self.passes: deque[dict[str, float]] = deque(maxlen=MAX_REMEMBERED_PASSES)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self.sinks:
            tracker.log_metrics(metrics, step)

    def close_sinks(self) -> None:
        for sink in self.sinks:
            sink.close("FINISHED", METRICS_CLOSE_SECONDS)


class RunMetrics:
    """Trackers of the training runs of a worker."""

    def __init__(self, settings: ServiceSettings, root: Path, runs: MlflowRuns) -> None:
        """`root`: folder of the service. Raises: SettingsError where a sink's package is missing."""
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
        """A forward and backward pass; `seconds`: of the passes that were computed together."""
        if self._is_broken:
            return
        with self._disable_on_error():
            self._open_run(model_id).passes.append(
                {**rename_metrics_for_trackers(metrics), "perf/forward_backward_seconds": seconds}
            )

    def record_step(
        self, model_id: str, metrics: Mapping[str, float], step: int, seconds: float
    ) -> None:
        """An update: what was measured since the last one is logged."""
        if self._is_broken:
            return
        with self._disable_on_error():
            found = self._open_run(model_id)
            values = {
                **_average_passes(found.passes),
                **rename_metrics_for_trackers(metrics),
                "perf/optim_step_seconds": seconds,
            }
            found.passes.clear()
            found.log_metrics(values, step)

    @contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        """An error ends all tracking, with one warning."""
        try:
            yield
        except Exception as error:
            self._is_broken = True
            log.warning(
                "metrics of training runs are no longer kept: %s: %s", type(error).__name__, error
            )

    def end_run(self, model_id: str) -> None:
        """A run has left memory; a later update goes on with its trackers. Returns at once."""
        if (found := self._runs.pop(model_id, None)) is not None:
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(
                threading.Thread(target=found.close_sinks, name="metrics-close", daemon=True)
            )
            self._closing[-1].start()

    def close_trackers(self) -> None:
        """End all trackers."""
        if self._monitor is not None:
            self._monitor.close()
        for model_id in list(self._runs):
            self.end_run(model_id)
        for sink in self._machine_sinks:
            sink.close("FINISHED", 1.0)
        end = time.monotonic() + 2 * METRICS_CLOSE_SECONDS
        for thread in self._closing:
            thread.join(max(0.0, end - time.monotonic()))

    def _open_run(self, model_id: str) -> _TrackedRun:
        if model_id not in self._runs:
            sinks = [
                *self._create_sinks(model_id),
                build_alert_tracker(self._settings.alerts, PIPELINE_LABEL, model_id),
            ]
            if self._settings.mlflow_runs:
                sinks.append(
                    BackgroundTracker(
                        "MLflow", partial(MlflowRunTracker, self._mlflow_runs, model_id)
                    )
                )
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
    """Means over passes; sums of tokens and losses are added up."""
    names = dict.fromkeys(name for found in passes for name in found)
    columns = {name: [found[name] for found in passes if name in found] for name in names}
    summed = ("train/loss_sum", "train/tokens", "train/sequences", "perf/forward_backward_seconds")
    return {
        name: sum(values) / (1 if name in summed else len(values))
        for name, values in columns.items()
    }


RETRY_SECONDS = 60.0  # after the store was away


def format_registered_name(prefix: str, base: str) -> str:
    """Name of the registered model for a base model."""
    return re.sub(r"[^A-Za-z0-9_.\- ]+", "-", f"{prefix}-{base}")[:100]


class CheckpointRegistrar:
    """Registration of saved paths, one at a time, the oldest first."""

    def __init__(self, context: WorkerContext, trackers: MlflowRuns) -> None:
        self._engine, self._store, self._folder, self._weights = (
            context.engine,
            context.store,
            context.folder,
            context.weights,
        )
        self._settings, self._mlflow_runs = context.settings.worker, trackers
        self._thread: threading.Thread | None = None
        self._retry_at = 0.0

    def step(self) -> None:
        """Begin with the next path, if one waits and none is being sent."""
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
        """Wait for what is being sent."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _register_checkpoint(self, record: CheckpointRecord, staging: Path) -> None:
        try:
            version = self._upload_version(record, staging)
            inject_fault("service.registered")
            self._store.update_checkpoint(record.path, version=version, registration="done")
            log.info("%s is %s", record.path, version)
        except (BackendError, OSError) as error:
            log.warning("%s is registered later: %s", record.path, error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        except PosttrainError as error:
            self._mark_failed(record, error)
        except BaseException:  # of the registry's own packages
            self._retry_at = time.monotonic() + RETRY_SECONDS
            raise

    def _upload_version(self, record: CheckpointRecord, staging: Path) -> str:
        """The version of an exported folder, NAME/NUMBER. Raises: BackendError while the store is away."""
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
        log.error("%s gets no version: %s", record.path, error)
        self._store.update_checkpoint(record.path, registration="failed")
