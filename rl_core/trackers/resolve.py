"""From the `tracker` argument to one tracker: names, objects, several at once, and plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from rl_core.errors import SettingsError, nearest
from rl_core.trackers.background import BackgroundTracker
from rl_core.trackers.dogstatsd import DogStatsdTracker
from rl_core.trackers.metric_files import CsvTracker, JsonlTracker
from rl_core.trackers.prometheus import PrometheusTracker, target_of
from rl_core.trackers.tensorboard import TensorBoardTracker
from rl_core.trackers.terminal import TerminalTracker
from rl_core.trackers.weights_and_biases import WandbTracker
from rl_core.tracking import Tracker, sync_tracker

__all__ = ["Several", "TrackerSource", "begin", "close", "several"]

GROUP = "rl_core.trackers"  # of entry points: functions (address, folder) -> tracker
# The output folder's own metrics.jsonl, which is cut where a run resumes, is another file.
_FILES = {"csv": "metrics.csv", "jsonl": "tracker.jsonl", "tensorboard": "tensorboard", "prometheus": "prometheus"}
METHODS = ("log_metrics", "log_artifact", "log_dict", "set_tag", "progress")

TrackerSource: TypeAlias = "str | Tracker | Sequence[str | Tracker] | None"


class Several:
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


def several(source: TrackerSource, own: Sequence[Tracker] = (), *, folder: Path | None = None) -> Several:
    """One tracker of all that `source` names, after `own`.

    Args:
        folder: where a plug-in may keep files of its own; None = a temporary place of its choice.
    Raises: SettingsError for an unknown name, a missing package, or an object that is no tracker.
    """
    parts = (
        [] if source is None else [source] if isinstance(source, str) or not isinstance(source, Sequence) else source
    )
    return Several([*own, *(_tracker(part, folder) for part in parts)])


def begin(trackers: Several, name: str, params: Mapping[str, Any]) -> None:
    """Tell those that want to know that a run starts: its name and its settings."""
    for tracker in trackers.trackers:
        start: Callable[[str, Mapping[str, Any]], None] | None = getattr(tracker, "begin", None)
        if start is not None:
            start(name, params)


def close(trackers: Several, status: str) -> None:
    """Tell those that want to know that a run has ended: FINISHED, FAILED or KILLED."""
    for tracker in trackers.trackers:
        end: Callable[[str], None] | None = getattr(tracker, "close", None)
        if end is not None:
            end(status)


def _in_background(tracker: Tracker) -> Tracker:
    return BackgroundTracker(type(tracker).__name__, lambda: tracker)


def _tracker(source: str | Tracker, folder: Path | None) -> Tracker:
    if not isinstance(source, str):
        missing = [name for name in METHODS if not callable(getattr(source, name, None))]
        if missing:
            raise SettingsError(f"tracker: {type(source).__name__} has no method {missing[0]} (see rl_core.Tracker)")
        return source
    kind, _, address = source.partition(":")
    known: dict[str, Callable[[str], Tracker]] = {
        "none": lambda _: Several([]),
        "terminal": lambda _: TerminalTracker(),
        "csv": CsvTracker,
        "jsonl": JsonlTracker,
        "tensorboard": TensorBoardTracker,
        "wandb": lambda project: WandbTracker(project, folder),
        "prometheus": lambda place: PrometheusTracker(target_of(place, folder or Path(), "metrics")),
        "dogstatsd": lambda place: _in_background(DogStatsdTracker(place, (folder or Path()) / "dogstatsd.txt")),
    }
    if kind in known:
        return known[kind](address or _default_place(kind, folder))
    if source.endswith((".csv", ".jsonl")):
        return CsvTracker(source) if source.endswith(".csv") else JsonlTracker(source)
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in plugins:
        hint = nearest(kind, [*known, *plugins])
        if kind == "mlflow":
            hint = "it comes with the package posttrain: install that, or hand in tasks.tracking.MlflowTracker(URI)"
        raise SettingsError(f"tracker: no tracker '{source}'; {hint}")
    made: Tracker = plugins[kind].load()(address, folder)
    return made


def _default_place(kind: str, folder: Path | None) -> str:
    """Place of a tracker that names none: in the output folder. Raises: SettingsError where it has to name one."""
    if kind == "wandb":
        return "posttrain"
    if kind in _FILES:
        if folder is None:
            raise SettingsError(f"tracker: '{kind}' names no place; write {kind}:{_FILES[kind]}, or give output=FOLDER")
        return str(folder / _FILES[kind])
    return ""
