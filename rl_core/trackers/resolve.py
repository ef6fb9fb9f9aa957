"""Resolution of the `tracker` argument: names, objects, lists of them, and plug-ins become one tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from rl_core.errors import SettingsError, suggest_name
from rl_core.trackers.dogstatsd import DogStatsdTracker
from rl_core.trackers.experiment_trackers import TensorBoardTracker, WandbTracker
from rl_core.trackers.local_trackers import CsvTracker, JsonlTracker, TerminalTracker
from rl_core.trackers.prometheus import PrometheusTracker, parse_target
from rl_core.tracking import BackgroundTracker, Tracker, sync_tracker

ENTRY_POINT_GROUP = "rl_core.trackers"  # functions (address, folder) -> tracker
# Not metrics.jsonl, which the output folder uses and truncates when a run resumes.
_DEFAULT_FILES = {
    "csv": "metrics.csv",
    "jsonl": "tracker.jsonl",
    "tensorboard": "tensorboard",
    "prometheus": "prometheus",
}
TRACKER_METHODS = ("log_metrics", "log_artifact", "log_dict", "set_tag", "progress")

TrackerSource: TypeAlias = "str | Tracker | Sequence[str | Tracker] | None"


class TrackerGroup:
    """Tracker that forwards everything to each of `trackers`, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Forward to each tracker."""
        for tracker in self.trackers:
            tracker.log_metrics(metrics, step)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Forward to each tracker."""
        for tracker in self.trackers:
            tracker.log_artifact(path, folder)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """Forward to each tracker."""
        for tracker in self.trackers:
            tracker.log_dict(values, name)

    def set_tag(self, name: str, value: str) -> None:
        """Forward to each tracker."""
        for tracker in self.trackers:
            tracker.set_tag(name, value)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Forward to each tracker."""
        for tracker in self.trackers:
            tracker.progress(done, total, message)

    def sync(self) -> None:
        """Flush records to the disk in all trackers that support it."""
        for tracker in self.trackers:
            sync_tracker(tracker)


def build_tracker_group(
    source: TrackerSource, first_trackers: Sequence[Tracker] = (), *, folder: Path | None = None
) -> TrackerGroup:
    """Build one tracker from `first_trackers` and all that `source` names.

    Args:
        folder: for files of plug-ins; None = a temporary folder of their choice.
    Raises: SettingsError for an unknown name, a missing package, or an object that is not a tracker.
    """
    sources: Sequence[str | Tracker] = []
    if isinstance(source, Sequence) and not isinstance(source, str):
        sources = source
    elif source is not None:
        sources = [source]
    return TrackerGroup([*first_trackers, *(_build_tracker(part, folder) for part in sources)])


def notify_run_start(trackers: TrackerGroup, name: str, params: Mapping[str, Any]) -> None:
    """Notify trackers that support it of the start of a run: its name and settings."""
    for tracker in trackers.trackers:
        start: Callable[[str, Mapping[str, Any]], None] | None = getattr(tracker, "begin", None)
        if start is not None:
            start(name, params)


def notify_run_end(trackers: TrackerGroup, status: str) -> None:
    """Notify trackers that support it of the end of a run: FINISHED, FAILED or KILLED."""
    for tracker in trackers.trackers:
        end: Callable[[str], None] | None = getattr(tracker, "close", None)
        if end is not None:
            end(status)


def _wrap_in_background(tracker: Tracker) -> Tracker:
    return BackgroundTracker(type(tracker).__name__, lambda: tracker)


def _build_tracker(source: str | Tracker, folder: Path | None) -> Tracker:
    if not isinstance(source, str):
        missing = [name for name in TRACKER_METHODS if not callable(getattr(source, name, None))]
        if missing:
            raise SettingsError(
                f"tracker: {type(source).__name__} has no method {missing[0]} (see rl_core.Tracker)"
            )
        return source
    kind, _, address = source.partition(":")
    known: dict[str, Callable[[str], Tracker]] = {
        "none": lambda _: TrackerGroup([]),
        "terminal": lambda _: TerminalTracker(),
        "csv": CsvTracker,
        "jsonl": JsonlTracker,
        "tensorboard": TensorBoardTracker,
        "wandb": lambda project: WandbTracker(project, folder),
        "prometheus": lambda address: PrometheusTracker(
            parse_target(address, folder or Path(), "metrics")
        ),
        "dogstatsd": lambda address: _wrap_in_background(
            DogStatsdTracker(address, (folder or Path()) / "dogstatsd.txt")
        ),
    }
    if kind in known:
        return known[kind](address or _resolve_default_address(kind, folder))
    if source.endswith((".csv", ".jsonl")):
        return CsvTracker(source) if source.endswith(".csv") else JsonlTracker(source)
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if kind not in plugins:
        hint = suggest_name(kind, [*known, *plugins])
        if kind == "mlflow":
            hint = "it comes with the package posttrain: install that, or pass tasks.tracking.MlflowTracker(URI)"
        raise SettingsError(f"tracker: no tracker '{source}'; {hint}")
    plugin_tracker: Tracker = plugins[kind].load()(address, folder)
    return plugin_tracker


def _resolve_default_address(kind: str, folder: Path | None) -> str:
    """Return the default address of a tracker, in the output folder. Raises: SettingsError without that folder."""
    if kind == "wandb":
        return "posttrain"
    if kind in _DEFAULT_FILES:
        if folder is None:
            raise SettingsError(
                f"tracker: '{kind}' has no address; write {kind}:{_DEFAULT_FILES[kind]}, or set output=FOLDER"
            )
        return str(folder / _DEFAULT_FILES[kind])
    return ""
