"""Tracking of a pipeline run: its parent run, the nested runs of its stages, and the tags that all of them carry."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from tasks.config import PipelineSettings, resolve, settings_digest
from tasks.config.chosen import chosen
from tasks.config.masking import masked
from tasks.pipeline.changed_settings import changed_settings, told_settings
from tasks.pipeline.outcome import STOP_SECONDS
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_code import code_version
from tasks.tracking import RunTracker, Tracking, VersionOf, result_text
from tasks.tracking.beside import alerts_of, sinks_of

__all__ = ["PipelineTracker", "git_commit", "next_start", "run_folder", "told_progress"]

logger = logging.getLogger(__name__)

DATA_INPUTS = ("data", "demonstrations", "preferences")  # inputs of stages that are data, not models or results

TOLD_SECONDS = 20.0  # between two updates of what the table of runs says about a run that goes on

StageProgress = Callable[[str, int, int, str], None]  # stage, done, total, message


def told_progress(label: str, done: int, total: int, message: str = "") -> str:
    """Progress in words, for the runs table: `policy, 12 of 400: reward 0.61`."""
    far = f", {done:,} of {total:,}" if total > 1 else ""
    return f"{label.replace('_', ' ')}{far}{f': {message}' if message else ''}"


def git_commit() -> str:
    """Commit of the checkout that holds this code; "" where it is not a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def run_folder(home: Path, started: str) -> Path:
    """Folder of the run of a pipeline that began at `started`."""
    return home / "runs" / re.sub(r"[ :]", "-", started)


def next_start(folder: Path) -> str:
    """Start time of a new run in the folder of a pipeline's runs, which are named by theirs; the caller holds its lock.

    It is later than that of every run there, also where the clock was set back or two runs begin within a second: a
    run never goes into another's folder, and the newest is the last by name.
    """
    now = datetime.now().replace(microsecond=0)
    earlier = []
    for path in folder.glob("????-??-??-??-??-??"):
        with contextlib.suppress(ValueError):
            earlier.append(datetime.strptime(path.name, "%Y-%m-%d-%H-%M-%S"))
    if earlier and (newest := max(earlier)) >= now:
        if newest - now > timedelta(seconds=5):
            logger.warning("the clock says %s, but a run began at %s; this one comes after it", now, newest)
        now = newest + timedelta(seconds=1)
    return now.strftime("%Y-%m-%d %H:%M:%S")


class PipelineTracker:
    """The parent run of a pipeline run and the runs of its stages."""

    def __init__(
        self,
        tracking: Tracking,
        settings: PipelineSettings,
        options: RunOptions,
        *,
        started: str,
        resumed: bool,
        home: Path,
        on_progress: StageProgress,
    ) -> None:
        """Open the parent run, or reopen that of the run which began at `started`. `home`: folder of its `runs/`."""
        self._tracking = tracking
        self._settings = settings
        self._on_progress = on_progress
        self._tags = _common_tags(settings, options)
        self._data_tags: dict[str, str] = {}  # on the parent run already
        self._stages: list[RunTracker] = []
        self._told = time.monotonic()
        self._trial = trial = options.trial
        self._shared = Path(settings.output).resolve() / settings.name
        kind = "stage" if options.only else "pipeline"
        if trial is not None:
            kind = "evaluation" if options.given else "trial"
        whole, given = masked(resolve(settings)), masked(chosen(settings))
        folder = run_folder(home, started)
        changed = changed_settings(folder.parent, folder.name, whole) if trial is None and not options.only else ""
        self.parent = tracking.start_run(
            trial.name if trial is not None else f"{settings.name} · {started}",
            folder,
            tags={
                **self._tags,
                "kind": kind,
                **({"resumed": "true"} if resumed else {}),
                **({"changed": changed} if changed else {}),
                "settings": told_settings(given),
            },
            params=given,
            description="The pipeline is running; its result will stand here.",
            system_metrics_seconds=settings.tracking.system_metrics_seconds,
            parent_run_id=trial.parent_run_id if trial is not None else None,
            parent_folder=trial.parent_folder if trial is not None else None,
        )

    def log_settings(self, threads: int | None) -> None:
        """Leave the resolved settings, the number of threads, where it is known, and the environment with the run."""
        if threads is not None:
            self.parent.set_tag("threads", str(threads))
        self.parent.log_dict(masked(resolve(self._settings)), "config.json")
        self.parent.log_environment()

    def open_stage(
        self,
        label: str,
        stage: str,
        journal: Path,
        settings: Any,
        digests: Mapping[str, str],
        key: str,
        tags: Mapping[str, str | VersionOf],
    ) -> RunTracker:
        """The nested run of one stage; a folder that was tracked before continues its run.

        Args:
            label: name of the run; `stage` is the stage's own name.
            journal: folder of the run's journal.
            digests: of the stage's inputs by name; retention follows these tags.
            tags: further ones of this stage alone.
        """
        run = self._tracking.start_run(
            label.replace("_", " "),
            journal,
            parent_run_id=self.parent.run_id,
            parent_folder=self.parent.folder,
            tags={
                **self._tags,
                "stage": stage,
                "stage_key": key,
                **tags,
                **{f"input.{name}": digest[:16] for name, digest in digests.items()},
            },
            params=chosen(settings) if settings is not None else {},
            on_progress=[lambda done, total, message: self._tell(label, done, total, message)],
            system_metrics_seconds=self._settings.tracking.system_metrics_seconds,
        )
        run.beside += sinks_of(
            self._settings.tracking.sinks, self._shared, pipeline=self._settings.name, group=self.parent.name,
            folder=f"{stage}-{key[:8]}", run_id=f"{stage}-{key}", stage=stage,
        )  # fmt: skip
        run.beside.append(alerts_of(self._settings.tracking.alerts, self._settings.name, stage))
        for sink in run.beside:
            sink.begin(f"{self.parent.name} · {label}", resolve(settings) if settings is not None else {})
        if self._trial is not None and (tell := self._trial.on_metrics) is not None:
            run.on_metrics.append(lambda metrics, step: tell(stage, metrics, step))
        self._stages.append(run)
        return run

    def _tell(self, label: str, done: int, total: int, message: str) -> None:
        """Note progress of a stage on the parent run, whose line in the table of runs shows it, and pass it on."""
        self.parent.note_time()
        if self._trial is None and time.monotonic() - self._told >= TOLD_SECONDS:
            self._told = time.monotonic()
            self.parent.set_tag("result", result_text(told_progress(label, done, total, message)))
        self._on_progress(label, done, total, message)

    def tag_data(self, digests: Mapping[str, str]) -> None:
        """Note on the parent run which data a stage reads, whether the stage runs or was finished before."""
        tags = {f"input.{name}": digests[name][:16] for name in DATA_INPUTS if name in digests}
        if tags.items() - self._data_tags.items():
            self.parent.set_tags(tags)
            self._data_tags |= tags

    def note_cached(self, label: str, source: str) -> None:
        """Note on the parent run that a stage was taken from an earlier run; `source`: its run id or key."""
        self.parent.set_tag(f"cached.{label}", source)
        self._on_progress(label, 1, 1, "finished before, not run again")

    def abandon(self) -> None:
        """Mark every run that is open as killed, in its journal; whatever can be delivered at once is."""
        for run in (*reversed(self._stages), self.parent):
            run.close("KILLED", timeout_s=0.2)

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"], error: BaseException | None = None) -> None:
        """End the parent run, with the error that made it fail as a tag; a stop is not waited for."""
        if error is not None and status == "FAILED":
            said = f"{type(error).__name__}: {error}"
            self.parent.set_tags({"error": said[:4000], "result": result_text(f"failed: {said}")})
        elif status == "KILLED" and self._stages:
            last = self._stages[-1]
            self.parent.set_tag("result", result_text(f"stopped in {told_progress(last.name, last.done, last.total)}"))
        self.parent.close(status, timeout_s=STOP_SECONDS if status == "KILLED" else 30.0)


def _common_tags(settings: PipelineSettings, options: RunOptions) -> dict[str, str]:
    """Tags of the parent run and of every stage's; empty ones are left out."""
    tags = {
        **options.tags,
        "pipeline": settings.name,
        "config_digest": settings_digest(settings),
        "code_version": code_version(),
        "git_commit": git_commit(),
        "prefect.flow_run_id": options.flow_run.id,
        "prefect.flow_run_url": options.flow_run.url,
    }
    return {name: value for name, value in tags.items() if value}
