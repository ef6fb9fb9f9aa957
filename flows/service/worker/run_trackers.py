"""MLflow runs of training runs: one of each, opened once for all who write into it.

Everything here may take seconds (MLflow's import, a store that does not answer), so only threads beside the worker's
own call it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.service.store import ServiceStore
from rl_core.errors import BackendError
from rl_core.settings import ServiceSettings
from rl_core.trackers.base import SilentTracker
from tasks.tracking import RunTracker, Tracking

__all__ = ["MlflowRun", "RunTrackers"]

EXPERIMENT = "service"
SHIP_SECONDS = 10.0  # between two deliveries of a run's metrics: each costs the worker milliseconds
CLOSE_SECONDS = 1.0  # the rest is sent by the next start, or `posttrain sync`


class RunTrackers:
    """The runs of a service's folder that are open."""

    def __init__(self, settings: ServiceSettings, root: Path, store: ServiceStore) -> None:
        """`root`: folder of the service."""
        self._settings, self._root, self._store = settings, root, store
        self._lock = threading.Lock()
        self._open: dict[str, tuple[RunTracker, int]] = {}  # and how many use it

    def take(self, model_id: str) -> RunTracker:
        """The MLflow run of a training run; `give_back` it."""
        with self._lock:
            found, users = self._open.get(model_id) or (self._start(model_id), 0)
            self._open[model_id] = found, users + 1
            return found

    def give_back(self, model_id: str) -> None:
        """Close it where nobody else uses it."""
        with self._lock:
            found, users = self._open.pop(model_id)
            if users > 1:
                self._open[model_id] = found, users - 1
                return
        found.close("FINISHED", timeout_s=CLOSE_SECONDS)

    @contextmanager
    def using(self, model_id: str) -> Iterator[RunTracker]:
        """The run within a block."""
        found = self.take(model_id)
        try:
            yield found
        finally:
            self.give_back(model_id)

    @property
    def address(self) -> str:
        """Address of the store, for messages."""
        return str(Tracking(self._settings.mlflow or None, self._root, EXPERIMENT).uri)

    def queue(self) -> dict[str, float]:
        """Length of the queue, for trackers of the machine; nothing where the store does not answer."""
        try:
            return {"perf/queue_depth": float(sum(sum(kinds.values()) for kinds in self._store.depths().values()))}
        except BackendError:
            return {}

    def _start(self, model_id: str) -> RunTracker:
        run = self._store.run(model_id)
        facts = {} if run is None else {**run.facts, **run.info}
        base = "" if run is None else str(run.facts.get("base") or run.base)
        tags = {"kind": "training", "service.run": model_id, "base_model": base,
                "service.owner": "" if run is None else run.owner}  # fmt: skip
        tracking = Tracking(self._settings.mlflow or None, self._root, EXPERIMENT)
        folder = self._root / "tracking" / model_id
        return tracking.start_run(model_id, folder, tags=tags, params=facts, wait_s=0.0, interval_s=SHIP_SECONDS)


class MlflowRun(SilentTracker):
    """The MLflow run of a training run as a tracker, opened when it is made."""

    def __init__(self, trackers: RunTrackers, model_id: str) -> None:
        self._trackers, self._model_id = trackers, model_id
        self._run = trackers.take(model_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Scalars of one update."""
        self._run.log_metrics(dict(metrics), step)

    def close(self, status: str = "FINISHED", *arguments: Any) -> None:
        """Leave it."""
        self._trackers.give_back(self._model_id)
