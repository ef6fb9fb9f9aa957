"""From the `tracker` argument to one tracker: names, objects, several at once, and plug-ins."""

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

ENTRY_POINT_GROUP = "rl_core.trackers"  # of entry points: functions (address, folder) -> tracker
# The output folder's own metrics.jsonl, which is cut where a run resumes, is another file.
_DEFAULT_FILES = {
    "csv": "metrics.csv",
    "jsonl": "tracker.jsonl",
    "tensorboard": "tensorboard",
    "prometheus": "prometheus",
}
TRACKER_METHODS = ("log_metrics", "log_artifact", "log_dict", "set_tag", "progress")

TrackerSource: TypeAlias = "str | Tracker | Sequence[str | Tracker] | None"


class TrackerGroup:
    """A tracker that hands everything to each of `trackers`, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """To each."""
        for tracker in self.trackers:
            tracker.log_metrics(metrics, step)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """To each."""
        for tracker in self.trackers:
            tracker.log_artifact(path, folder)

    def log_dict(self, values: Mapping[str, Any], name: str) -> None:
        """To each."""
        for tracker in self.trackers:
            tracker.log_dict(values, name)

    def set_tag(self, name: str, value: str) -> None:
        """To each."""
        for tracker in self.trackers:
            tracker.set_tag(name, value)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """To each."""
        for tracker in self.trackers:
            tracker.progress(done, total, message)

    def sync(self) -> None:
        """Force what was recorded to the disk, in those trackers that can."""
        for tracker in self.trackers:
            sync_tracker(tracker)


def build_tracker_group(
    source: TrackerSource, first_trackers: Sequence[Tracker] = (), *, folder: Path | None = None
) -> TrackerGroup:
    """One tracker of all that `source` names, after `own`.

    Args:
        folder: where a plug-in may keep files of its own; None = a temporary place of its choice.
    Raises: SettingsError for an unknown name, a missing package, or an object that is no tracker.
    """
    parts = (
        []
        if source is None
        else [source]
        if isinstance(source, str) or not isinstance(source, Sequence)
        else source
    )
    return TrackerGroup([*first_trackers, *(_build_tracker(part, folder) for part in parts)])


def begin_run(trackers: TrackerGroup, name: str, params: Mapping[str, Any]) -> None:
    """Tell those that want to know that a run starts: its name and its settings."""
    for tracker in trackers.trackers:
        start: Callable[[str, Mapping[str, Any]], None] | None = getattr(tracker, "begin", None)
        if start is not None:
            start(name, params)


def end_run(trackers: TrackerGroup, status: str) -> None:
    """Tell those that want to know that a run has ended: FINISHED, FAILED or KILLED."""
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
        "prometheus": lambda place: PrometheusTracker(
            parse_target(place, folder or Path(), "metrics")
        ),
        "dogstatsd": lambda place: _wrap_in_background(
            DogStatsdTracker(place, (folder or Path()) / "dogstatsd.txt")
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
            hint = "it comes with the package posttrain: install that, or hand in tasks.tracking.MlflowTracker(URI)"
        raise SettingsError(f"tracker: no tracker '{source}'; {hint}")
    made: Tracker = plugins[kind].load()(address, folder)
    return made


def _resolve_default_address(kind: str, folder: Path | None) -> str:
    """Place of a tracker that names none: in the output folder. Raises: SettingsError where it has to name one."""
    if kind == "wandb":
        return "posttrain"
    if kind in _DEFAULT_FILES:
        if folder is None:
            raise SettingsError(
                f"tracker: '{kind}' names no place; write {kind}:{_DEFAULT_FILES[kind]}, or give output=FOLDER"
            )
        return str(folder / _DEFAULT_FILES[kind])
    return ""
