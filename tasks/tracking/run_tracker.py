"""Tracked run: rl_core's Tracker on top of a local journal and a background shipper."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import SettingsError, Stopped
from rl_core.storage.atomic_files import make_folder, write_text_unsynced
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import fsync_tree, link_tree
from rl_core.tracking import CLOSE_SECONDS, BackgroundTracker
from rl_core.types import Trajectory
from tasks.tracking.journal import (
    LineLog,
    MetricsJournal,
    build_events_path,
    build_progress_path,
    clear_journal,
    read_recorded_seconds,
)
from tasks.tracking.models import check_model_registration
from tasks.tracking.replay import connect_sink, read_start_record
from tasks.tracking.shipper import Shipper
from tasks.tracking.system import SystemMonitor
from tasks.tracking.values import VersionByContent, flatten_settings, freeze_environment

if TYPE_CHECKING:
    from tasks.tracking.store import TrackingStore


log = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]
ProgressCallback = Callable[[int, int, str], None]

# longest wait at the end of a run for a store that was unreachable
UNREACHABLE_TIMEOUT_SECONDS = 5.0
PROGRESS_SECONDS = 1.0  # between two updates of the recorded progress


class RunTracker:
    """Implementation of rl_core.tracking.Tracker. Every call appends to the run folder; a thread delivers to MLflow.

    Use it as a context manager, or call `close`: FINISHED at a normal end, KILLED after Stopped or an interrupt, FAILED
    after any other exception.
    """

    def __init__(
        self,
        store: TrackingStore,
        name: str,
        folder: Path,
        *,
        parent_run_id: str | None = None,
        parent_folder: Path | None = None,
        run_id: str | None = None,
        on_progress: Iterable[ProgressCallback] = (),
        system_metrics_seconds: float | None = None,
        delivers_system_metrics: bool = True,
        interval_s: float = 2.0,
    ) -> None:
        """See `Tracking.start_run`."""
        self.store, self.name, self.folder = store, name, folder.resolve()
        self.on_progress = list(on_progress)
        self.on_metrics: list[Callable[[Mapping[str, float], int], None]] = []
        self.extra_trackers: list[BackgroundTracker] = []  # also receive metrics, tags and the end
        self.done, self.total, self.message = 0, 0, ""
        self._last_progress = -PROGRESS_SECONDS
        self._start_time = time.monotonic()
        self._earlier_seconds = read_recorded_seconds(self.folder)
        self._closed = False
        self._delivers_system_metrics = delivers_system_metrics
        self._events = LineLog(build_events_path(self.folder))
        try:
            self.journal = MetricsJournal(self.folder)
        except BaseException:
            self._events.close()
            raise
        self.resumed = self._events.end > 0
        self._shipper = Shipper(
            self.folder,
            self.journal,
            self._events,
            lambda: connect_sink(store, self.folder),
            interval_s,
            lambda seconds: store.cost.add_seconds(background=seconds),
        )
        clear_journal(self.folder, self._shipper.state.events_offset)
        process = {"host": platform.node(), "pid": os.getpid()}
        self.key = uuid.uuid4().hex  # hexadecimal digits, the first of which are in the short id
        if self.resumed:
            self.key = str(read_start_record(self.folder).get("key") or self.key)
            self._append_event("resume", **process)
        else:
            parent = str(Path(parent_folder).resolve()) if parent_folder else None
            self._append_event(
                "start",
                name=name,
                key=self.key,
                run_id=run_id,
                parent_run_id=parent_run_id,
                parent_folder=parent,
                experiment=store.experiment,
                store=store.label,
                **process,
            )
        self._shipper.start_thread()
        self._monitor = None
        if system_metrics_seconds:
            self._monitor = SystemMonitor(
                self.folder,
                system_metrics_seconds,
                self._log_system_metrics,
                self.journal.last_system_step + 1,
            )

    def _append_event(self, op: str, **fields: Any) -> None:
        self._events.append_record({"op": op, "time": time.time_ns() // 1_000_000, **fields})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record scalars of one step. An existing value of (step, name) stays unchanged."""
        with self.store.cost.count_waiting():
            self.journal.append_metrics(metrics, step)
        for callback in self.on_metrics:
            callback(metrics, step)
        for sink in self.extra_trackers:
            sink.log_metrics(metrics, step)

    def _log_system_metrics(self, metrics: dict[str, float], number: int) -> None:
        self.journal.append_metrics(metrics, number, is_local=not self._delivers_system_metrics)
        for sink in self.extra_trackers:
            sink.log_system(metrics, number)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store a copy of a finished file or folder, which may then be moved or removed but not overwritten."""
        with self.store.cost.count_waiting():
            path = Path(path).resolve()
            if not path.exists():
                log.warning("tracking: %s does not exist and was not logged", path)
                return
            # The stage's folder is renamed while files still wait; a hard link stays valid.
            self._append_event(
                "artifact",
                path=self._store_copy(path),
                origin=str(path),
                folder=_check_artifact_name(folder),
            )

    def _store_copy(self, path: Path) -> str:
        """Copy a file or folder until it is delivered; return the copy's path in the run folder."""
        copy = build_events_path(self.folder).parent / "files" / uuid.uuid4().hex / path.name
        make_folder(copy.parent)
        link_tree(path, copy)
        # The record, which is synced later, refers to the copy.
        fsync_tree(copy.parent)
        inject_fault("artifact.kept")
        return str(copy.relative_to(self.folder))

    def set_tag(self, name: str, value: str) -> None:
        """Set a tag of the run."""
        self.set_tags({name: value})

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Record the progress of the work for the live page, and call the callbacks."""
        self.done, self.total, self.message = done, total, message
        if done >= total:
            self._write_progress()
        else:
            self.record_elapsed_time()
        for callback in list(self.on_progress):
            try:
                callback(done, total, message)
            except Exception as error:
                log.warning("progress display stopped: %s", error)
                self.on_progress.remove(callback)

    def record_elapsed_time(self) -> None:
        """Record the time spent on the run, at most once a second.

        After a kill the time continues from the last record.
        """
        if time.monotonic() - self._last_progress >= PROGRESS_SECONDS:
            self._write_progress()

    @property
    def seconds(self) -> float:
        """Time spent on this run in all its processes, without the time between them."""
        return self._earlier_seconds + time.monotonic() - self._start_time

    def _write_progress(self) -> None:
        """Replace the folder's progress.json."""
        self._last_progress = time.monotonic()
        values = {
            "done": self.done,
            "total": self.total,
            "message": self.message,
            "time": time.time_ns() // 1_000_000,
            "seconds": round(self.seconds, 3),
        }
        write_text_unsynced(build_progress_path(self.folder), json.dumps(values))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags, skipping None values. A VersionByContent becomes the model version's name on delivery."""
        versions = {
            name: value._asdict()
            for name, value in tags.items()
            if isinstance(value, VersionByContent)
        }
        texts = {
            str(name): str(value)
            for name, value in tags.items()
            if value is not None and name not in versions
        }
        if "git_commit" in texts:
            texts.setdefault("mlflow.source.git.commit", texts["git_commit"])
        if texts or versions:
            self._append_event("tags", tags=texts, **({"versions": versions} if versions else {}))
        for sink in self.extra_trackers:
            for name, text in texts.items():
                sink.set_tag(name, text)

    def set_description(self, markdown: str) -> None:
        """Set the markdown at the top of the run's page. Links to MLflow's pages are relative (`build_run_link`)."""
        self.set_tags({"mlflow.note.content": markdown})

    def log_params(self, params: Any, prefix: str = "") -> None:
        """Record settings (nested mapping or dataclass) as flat parameters: policy.sampling.temperature."""
        flat = flatten_settings(params, prefix)
        if flat:
            self._append_event("params", params=flat)

    def log_text(self, text: str, name: str) -> None:
        """Record a text as an artifact called `name` ('report/summary.md')."""
        self._append_event("text", text=text, name=_check_artifact_name(name))

    def log_dict(self, values: Any, name: str) -> None:
        """Record a structure as a JSON artifact."""
        self.log_text(json.dumps(values, indent=2, default=str, ensure_ascii=False) + "\n", name)

    def log_environment(self) -> None:
        """Record Python and every installed distribution as environment/requirements.txt."""
        self.log_text(freeze_environment(), "environment/requirements.txt")

    def log_dataset(
        self,
        path: Path | str,
        digest: str,
        name: str,
        context: str = "training",
        *,
        profile: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an input of the run: its location, SHA-256 and use. `profile`: rows, sizes, ..."""
        self._append_event(
            "dataset",
            path=str(path),
            digest=digest,
            name=name,
            context=context,
            profile=dict(profile or {}),
        )

    def log_traces(
        self, trajectories: Sequence[Trajectory], limit: int = 20, *, model: str = ""
    ) -> int:
        """Record the first `limit` episodes as traces, with a span per turn; return their number.

        `model`: who played them.
        """
        rows = [trajectory.to_json() for trajectory in trajectories[:limit]]
        if rows:
            self._append_event("traces", rows=rows, model=model)
        return len(rows)

    def log_model(
        self,
        folder: Path,
        kind: Literal["policy", "reward_model"],
        registered_name: str,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, Any] | None = None,
        input_example: str | None = None,
        step: int = 0,
        description: str = "",
        parent: VersionByContent | None = None,
        timeout_s: float = 30.0,
    ) -> int | None:
        """Record a Hugging Face folder as a new version of a registered model; return the version's number.

        None = the store is unreachable; the version is created once it answers, after those recorded before. The same
        bytes from the same run are one version, so a retry is safe.

        Args:
            parent: the model from which this one was trained; becomes the tag `parent_version`, and replaces
                PARENT_PLACEHOLDER in the description.
            timeout_s: seconds to wait while the store does not answer. A running upload is always awaited.
        Raises: DataError for a folder that is no safe model, and if the store refuses it; SettingsError for an invalid
            name.
        """
        folder = Path(folder)
        check_model_registration(folder, kind, registered_name)
        key = uuid.uuid4().hex
        text_tags = {name: str(value) for name, value in (tags or {}).items() if value is not None}
        with self.store.cost.count_waiting():
            self._append_event(
                "model",
                key=key,
                path=self._store_copy(folder),
                origin=str(folder.resolve()),
                kind=kind,
                name=registered_name,
                metrics=dict(metrics or {}),
                step=step,
                input_example=input_example,
                tags=text_tags,
                description=description,
                parent=parent._asdict() if parent else None,
            )
            if not self._wait_for_version(key, timeout_s):
                log.warning(
                    "tracking: the model is registered as %s when the store answers",
                    registered_name,
                )
                return None
        if key in self._shipper.refused_models:
            raise self._shipper.refused_models[key]
        return self._shipper.state.versions[key]

    def _wait_for_version(self, key: str, timeout_s: float) -> bool:
        """Wait until the store has accepted or refused a model. Return False if it is unreachable for `timeout_s`."""
        if self._shipper.problem:
            timeout_s = min(timeout_s, UNREACHABLE_TIMEOUT_SECONDS)
        deadline = time.monotonic() + timeout_s
        while key not in self._shipper.state.versions and key not in self._shipper.refused_models:
            if self._shipper.problem and time.monotonic() > deadline:
                return False
            self._shipper.request_delivery()
            time.sleep(0.5 if self._shipper.problem else 0.05)
        return True

    def log_alias(self, alias: str, model: VersionByContent, tags: Mapping[str, Any]) -> None:
        """Record that an alias was moved and the version tagged.

        A store that loses its database gets both again.
        """
        self._events.append_record(_build_alias_record(alias, model, tags))

    def sync(self) -> None:
        """Sync everything to disk. A checkpoint that follows relies on it."""
        self.journal.lines.flush_pending(sync=True)
        self._events.flush_pending(sync=True)

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until the store has answered."""
        return self._shipper.state.run_id

    @property
    def url(self) -> str | None:
        """Page of the run; None until the store has answered, and while nobody serves the pages of a local store."""
        state = self._shipper.state
        if not state.run_id:
            return None
        return (
            self.store.resolve_link(self.store.build_run_link(state.run_id, state.experiment_id))
            or None
        )

    @property
    def num_failed(self) -> int:
        """Number of records that the store refused permanently."""
        return self._shipper.state.num_failed

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the run exists, or the first attempt to create it failed."""
        self._shipper.wait_started(timeout_s)

    def flush(self, timeout_s: float = 0.0) -> bool:
        """Sync everything to disk, then wait at most `timeout_s` for the store; return whether it has everything."""
        self.sync()
        self._shipper.request_delivery()
        return self._shipper.wait_drained(timeout_s) if timeout_s > 0 else self._shipper.is_drained

    def close(self, status: Status = "FINISHED", *, timeout_s: float = 30.0) -> bool:
        """End the run: deliver for at most `timeout_s`; the rest stays on disk for the next start or `store sync`.

        Return whether the store has everything. A second call does nothing.
        """
        if self._closed:
            return self._shipper.is_drained
        self._closed = True
        if self._monitor is not None:
            self._monitor.close()
        with self.store.cost.count_waiting():
            self._write_progress()
            self._append_event("end", status=status, seconds=round(self.seconds, 3))
            self.sync()
            is_unreachable = self.store.is_unreachable or bool(self._shipper.problem)
            delivered = self._shipper.close(
                min(timeout_s, UNREACHABLE_TIMEOUT_SECONDS) if is_unreachable else timeout_s
            )
            self.store.is_unreachable = bool(self._shipper.problem)
        if not delivered:
            metrics, others = self._shipper.count_waiting()
            log.warning(
                "tracking: %d lines of metrics and %d other records wait in %s; they are sent at the next start",
                metrics,
                others,
                self.folder,
            )
        if self.num_failed:
            log.warning(
                "tracking: the store refused %d records of %s", self.num_failed, self.folder
            )
        if damaged := self._shipper.state.num_damaged:
            log.warning(
                "tracking: %d damaged lines of %s were skipped; their contents are lost",
                damaged,
                self.folder,
            )
        for sink in self.extra_trackers:
            sink.close(status, min(timeout_s, CLOSE_SECONDS))
        self.journal.close()
        self._events.close()
        return delivered

    def __enter__(self) -> RunTracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close("FINISHED")
        elif isinstance(error, Stopped | KeyboardInterrupt | SystemExit):
            self.close("KILLED", timeout_s=5.0)  # a preempted run has 10 s in all
        else:
            self.set_tag("error", f"{type(error).__name__}: {error}"[:1000])
            self.close("FAILED")


def record_alias_move(
    folder: Path, alias: str, model: VersionByContent, tags: Mapping[str, Any]
) -> None:
    """Record an alias move in the journal of a run that has ended. Raises: FolderBusy while the run is live."""
    events = LineLog(build_events_path(folder))
    try:
        events.append_record(_build_alias_record(alias, model, tags))
    finally:
        events.close()


def _build_alias_record(
    alias: str, model: VersionByContent, tags: Mapping[str, Any]
) -> dict[str, Any]:
    texts = {name: str(value) for name, value in tags.items() if value is not None}
    now = time.time_ns() // 1_000_000
    return {"op": "alias", "time": now, "alias": alias, "model": model._asdict(), "tags": texts}


def _check_artifact_name(name: str) -> str:
    """Normalise a path within the run's artifacts. Raises: SettingsError for a path outside of them."""
    parts = [part for part in str(name).replace("\\", "/").split("/") if part not in ("", ".")]
    if ".." in parts or str(name).startswith(("/", "\\")):
        raise SettingsError(
            f"artifact name '{name}' must be relative and stay inside the run's artifacts"
        )
    return "/".join(parts)
