"""Metrics of training runs, from the engine's answers to trackers: MLflow and sinks by setting, and alerts.

One step of a tracker is one update of the run, with the means of the passes before it. Nothing here can fail a request.
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

from flows.service.worker.run_trackers import MlflowRun, RunTrackers
from rl_core.service.tracked_names import tracked
from rl_core.settings import ServiceSettings
from rl_core.settings.sinks import check_installed
from rl_core.trackers import BackgroundTracker
from tasks.tracking.beside import alerts_of, sinks_of
from tasks.tracking.system import SystemMonitor

__all__ = ["RunMetrics"]

log = logging.getLogger(__name__)

NAME = "service"  # label `pipeline` of its metrics
CLOSE_SECONDS = 1.0  # for which the end of a run is waited for, on a thread beside
MOST_PASSES = 4096  # that are remembered until an update: a run may only be evaluated


class _Tracked:
    """Trackers of one training run, each on a thread, and what its passes measured since the last update."""

    def __init__(self, sinks: list[BackgroundTracker]) -> None:
        self.sinks = sinks
        self.passes: deque[dict[str, float]] = deque(maxlen=MOST_PASSES)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self.sinks:
            tracker.log_metrics(metrics, step)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close("FINISHED", CLOSE_SECONDS)


class RunMetrics:
    """Trackers of the training runs of a worker."""

    def __init__(self, settings: ServiceSettings, root: Path, runs: RunTrackers) -> None:
        """`root`: folder of the service. Raises: SettingsError where a sink's package is missing."""
        for sink in settings.sinks:
            check_installed(sink)
        self._settings, self._root, self._trackers = settings, root, runs
        self._closing: list[threading.Thread] = []
        self._runs: dict[str, _Tracked] = {}
        self._is_broken = False
        self._machine = self._sinks("worker") if settings.sinks else []
        self._monitor = None
        if self._machine and settings.system_metrics_seconds:
            self._monitor = SystemMonitor(root, settings.system_metrics_seconds, self._log_system)

    def passed(self, model_id: str, metrics: Mapping[str, float], seconds: float) -> None:
        """A forward and backward pass; `seconds`: of the passes that were computed together."""
        if self._is_broken:
            return
        with self._guarded():
            self._of(model_id).passes.append({**tracked(metrics), "perf/forward_backward_seconds": seconds})

    def stepped(self, model_id: str, metrics: Mapping[str, float], step: int, seconds: float) -> None:
        """An update: what was measured since the last one is logged."""
        if self._is_broken:
            return
        with self._guarded():
            found = self._of(model_id)
            values = {**_means(found.passes), **tracked(metrics), "perf/optim_step_seconds": seconds}
            found.passes.clear()
            found.log_metrics(values, step)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error ends all tracking, with one warning."""
        try:
            yield
        except Exception as error:
            self._is_broken = True
            log.warning("metrics of training runs are no longer kept: %s: %s", type(error).__name__, error)

    def ended(self, model_id: str) -> None:
        """A run has left memory; a later update goes on with its trackers. Returns at once."""
        if (found := self._runs.pop(model_id, None)) is not None:
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(threading.Thread(target=found.close, name="metrics-close", daemon=True))
            self._closing[-1].start()

    def close(self) -> None:
        """End all trackers."""
        if self._monitor is not None:
            self._monitor.close()
        for model_id in list(self._runs):
            self.ended(model_id)
        for sink in self._machine:
            sink.close("FINISHED", 1.0)
        end = time.monotonic() + 2 * CLOSE_SECONDS
        for thread in self._closing:
            thread.join(max(0.0, end - time.monotonic()))

    def _of(self, model_id: str) -> _Tracked:
        if model_id not in self._runs:
            sinks = [*self._sinks(model_id), alerts_of(self._settings.alerts, NAME, model_id)]
            if self._settings.mlflow_runs:
                sinks.append(BackgroundTracker("MLflow", partial(MlflowRun, self._trackers, model_id)))
            for sink in sinks:
                sink.begin(f"{NAME} · {model_id}", {})
            self._runs[model_id] = _Tracked(sinks)
        return self._runs[model_id]

    def _sinks(self, stage: str) -> list[BackgroundTracker]:
        return sinks_of(
            self._settings.sinks, self._root, pipeline=NAME, group=NAME, folder=stage, run_id=stage, stage=stage
        )

    def _log_system(self, metrics: dict[str, float], number: int) -> None:
        readings = {**metrics, **self._trackers.queue()}
        for sink in self._machine:
            sink.log_system(readings, number)


def _means(passes: Iterable[dict[str, float]]) -> dict[str, float]:
    """Means over passes; sums of tokens and losses are added up."""
    names = dict.fromkeys(name for found in passes for name in found)
    columns = {name: [found[name] for found in passes if name in found] for name in names}
    summed = ("train/loss_sum", "train/tokens", "train/sequences", "perf/forward_backward_seconds")
    return {name: sum(values) / (1 if name in summed else len(values)) for name, values in columns.items()}
