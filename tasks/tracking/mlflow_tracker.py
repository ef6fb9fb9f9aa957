"""MLflow as a tracker of the Python API: `tracker="mlflow:URI"`, or `tracker=MlflowTracker(URI)`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.tracking import SilentTracker
from tasks.tracking.run_tracker import RunTracker, Status
from tasks.tracking.tracking import Tracking


class MlflowTracker(SilentTracker):
    """Tracker that writes one MLflow run per training run. Nothing is opened before the run begins.

    Metrics go to a journal on disk first and are delivered in the background, so a slow or unreachable store delays no
    step. A resumed run stays the same MLflow run as long as its folder is the same.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        folder: str | Path | None = None,
        experiment: str = "posttrain",
        name: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Choose the store.

        Args:
            uri: MLflow tracking URI (sqlite:///FILE, http://HOST:PORT); None = MLFLOW_TRACKING_URI, else a sqlite file
                in `folder`.
            folder: of the journal; None = a temporary folder, so a new process starts a new MLflow run.
            experiment: created if missing.
            name: of the run; None = the algorithm's name.
            timeout_s: seconds that `close` waits for the store; the next start delivers the rest.
        """
        self.uri, self.experiment, self.name, self.timeout_s = uri, experiment, name, timeout_s
        self._folder = Path(folder) if folder is not None else None
        self._run: RunTracker | None = None
        self.run_id: str | None = None  # of the newest run

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Start the MLflow run, or resume it."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="posttrain-tracking-"))
        tracking = Tracking(self.uri, self._folder, self.experiment)
        self._run = tracking.start_run(
            self.name or name, self._folder / "tracking", params=dict(params)
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append to the journal."""
        self._open_run().log_metrics(metrics, step)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store a copy of a finished file or folder."""
        self._open_run().log_artifact(path, folder)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Store a structure as a JSON artifact."""
        self._open_run().log_dict(values, name)

    def set_tag(self, name: str, value: str) -> None:
        """Set a tag."""
        self._open_run().set_tag(name, value)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Record the progress of the work."""
        self._open_run().progress(done, total, message)

    def sync(self) -> None:
        """Sync the journal to disk."""
        if self._run is not None:
            self._run.sync()

    def close(self, status: Status = "FINISHED") -> None:
        """End the MLflow run. A later `begin` resumes it."""
        if self._run is not None:
            self._run.close(status, timeout_s=self.timeout_s)
            self.run_id = self._run.run_id
            self._run = None

    def _open_run(self) -> RunTracker:
        if self._run is None:
            self.begin("rl_core", {})
        assert self._run is not None
        return self._run


def from_address(address: str, folder: Path | None) -> MlflowTracker:
    """Create the tracker for "mlflow:ADDRESS"; the entry point `mlflow` of the group rl_core.trackers."""
    return MlflowTracker(address or None, folder=folder)
