"""One run of a pipeline: its folder, its lock, its parent run in MLflow, its stop signal and its progress.

<output>/<pipeline>/
    .lock             held while the pipeline runs; a second run into the same folder is refused
    run.json          the newest run: its MLflow run, its settings' digest, whether it ended
    runs/<started>/   journal of the parent run, and its own run.json
    stages/           see tasks/pipeline/stage.py
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from uuid import UUID

from rl_core.errors import Stopped
from rl_core.storage.folders import digest_folder, write_json_atomic
from rl_core.storage.locks import FolderLock
from tasks import stage_registry
from tasks.config import PipelineSettings, resolve, settings_digest
from tasks.lifecycle.approval import ApprovalRequest
from tasks.lifecycle.data_lineage import Records, record_sources, tags_of_records
from tasks.lifecycle.dead_runs import DeadRun, close_dead_runs
from tasks.pipeline.key import code_version
from tasks.pipeline.result import StageResult
from tasks.tracking import RunTracker, Tracking, is_registered_reference

__all__ = ["ProgressCallback", "PipelineRun", "git_commit"]

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int, str], None]  # stage, done, total, message

DATA_INPUTS = ("data", "demonstrations", "preferences")  # inputs of stages that are data, not models or results


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


class PipelineRun:
    """One run of a pipeline; a context manager that owns its lock, its parent run and its threads setting."""

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        fresh: bool = False,
        only: str | None = None,
        flow_run_id: str = "",
        flow_run_url: str = "",
        prefect_api: str = "",
        given: Mapping[str, str] | None = None,
        started: str = "",
        tags: Mapping[str, str] | None = None,
        lock: FolderLock | None = None,
        on_progress: ProgressCallback | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`fresh` runs stages again though they are finished: all of them, or the one that `only` names.

        Args:
            given: models that are evaluated in place of what the stages train, by name; kept for `posttrain resume`.
            started: go on with the run of this pipeline that began then; "" = decide by settings (`_previous`).
            tags: go to every run and model version that this makes.
            lock: the folder's, where the caller holds it.
            stop: when set, no further stage begins, and training saves and stops.
        """
        self.settings = settings
        self.fresh = fresh
        self.only = only
        self.flow_run_id = flow_run_id
        self.flow_run_url = flow_run_url
        self.prefect_api = prefect_api  # address of the Prefect server; "" = the run's own embedded one
        self.given = dict(given or {})
        self.gone: list[DeadRun] = []  # earlier runs of this pipeline that were found dead when this one began
        self._continues = started
        self.approval: ApprovalRequest | None = None  # what a person has to decide before the champion moves
        self.output = Path(settings.output).resolve()
        self.home = self.output / settings.name
        self.stages = self.home / "stages"
        self.threads = settings.threads or os.cpu_count() or 1
        self.stop = stop or threading.Event()
        self.keys_run: set[str] = set()  # keys that this run has computed: --fresh does not compute them twice
        self.results: dict[str, StageResult] = {}
        self.resumed = False
        self._started = time.monotonic()
        self.fraction = 0.0  # of the stage that runs
        self.progress_artifact: UUID | None = None  # Prefect's, of the stage that runs
        self._on_progress = on_progress
        self._lock = lock or FolderLock(self.home / ".lock", wait_s=settings.run.wait_seconds)
        self._holds_lock = lock is not None  # the caller does, and lets go of it
        self._given_tags = dict(tags or {})
        self.data_record: Records = {}  # of the files that this run learns from
        self._record: dict[str, Any] = {}
        self._base_model = f"preset {settings.model.preset}"  # for tags: what the pipeline starts from
        self._data_tags: dict[str, str] = {}  # on the parent run already
        self.tracking: Tracking
        self.parent: RunTracker

    def __enter__(self) -> PipelineRun:
        self.stages.mkdir(parents=True, exist_ok=True)
        if not self._holds_lock:
            self._lock.__enter__()
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise
        return self

    def _let_go(self) -> None:
        if not self._holds_lock:
            self._lock.__exit__(None, None, None)

    def _open(self) -> None:
        import torch
        import transformers

        torch.set_num_threads(self.threads)
        transformers.utils.logging.disable_progress_bar()  # our own display shows how far a stage is
        transformers.utils.logging.set_verbosity_error()  # a new head is meant to be new
        settings = self.settings
        self.tracking = Tracking(settings.tracking.uri, self.output, settings.tracking.experiment or settings.name)
        digest = settings_digest(settings)
        previous = self._previous(digest)
        self.gone = close_dead_runs(self.tracking, self.home)
        for run in self.gone:
            if run.is_pipeline and run.name != f"{settings.name} · {previous.get('started')}":
                logger.warning("%s; `posttrain resume '%s'` goes on with it", run.why, run.name)
        waiting = self.tracking.replay_all(self.home)
        if waiting:
            logger.warning("%d records of earlier runs still wait for the tracking store", waiting)
        # Before any stage reads them: rows that come meanwhile count as unseen, never the other way round.
        self.data_record = record_sources(settings)
        self.resumed = bool(previous)
        started = previous.get("started") or time.strftime("%Y-%m-%d %H:%M:%S")
        self.parent = self.tracking.start_run(
            f"{settings.name} · {started}",
            self.home / "runs" / re.sub(r"[ :]", "-", started),
            tags={
                **self._tags(),
                "kind": "stage" if self.only else "pipeline",
                **({"resumed": "true"} if self.resumed else {}),
            },
            params=resolve(settings),
            description="The pipeline is running; its result will stand here.",
            system_metrics_seconds=settings.tracking.system_metrics_seconds,
        )
        self._record = {
            "started": started,
            "run_id": self.parent.run_id,
            "config_digest": digest,
            "only": self.only,
            "given": self.given,
            "status": "running",
            "pid": os.getpid(),
            "host": platform.node(),
        }
        self._write_record()
        self.parent.log_dict(resolve(settings), "config.json")
        self.parent.log_environment()

    def _write_record(self) -> None:
        for folder in (self.parent.folder, self.home):
            write_json_atomic(folder / "run.json", self._record)

    def _tags(self) -> dict[str, str]:
        """What every run of this pipeline run is tagged with."""
        tags = {
            **self._given_tags,
            "pipeline": self.settings.name,
            "config_digest": settings_digest(self.settings),
            "code_version": code_version(),
            "git_commit": git_commit(),
            "prefect.flow_run_id": self.flow_run_id,
            "prefect.flow_run_url": self.flow_run_url,
        }
        return {name: value for name, value in tags.items() if value}

    def _previous(self, digest: str) -> dict[str, Any]:
        """The record of an interrupted run with these settings, to be gone on with; {} where there is none."""
        if self._continues:
            logger.info("going on with the run of %s", self._continues)
            return {"started": self._continues}
        try:
            record = json.loads((self.home / "run.json").read_text())
        except (OSError, ValueError):
            return {}
        same = record.get("config_digest") == digest and record.get("only") == self.only
        if self.fresh or not same or record.get("status") not in ("running", "stopped", "waiting"):
            return {}
        logger.info("going on with the interrupted run of %s", record.get("started"))
        return dict(record)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        ended = "waiting" if self.approval is not None else "finished"
        status = ended if error is None else "stopped" if stopped else "failed"
        try:
            if error is not None:
                self.parent.set_tag("error", f"{type(error).__name__}: {error}"[:4000])
            self.parent.close("FINISHED" if error is None else "KILLED" if stopped else "FAILED")
            self._record["status"] = status
            self._write_record()
        finally:
            self._let_go()

    @property
    def registered_model(self) -> str:
        """Name of the policy in the model registry."""
        return self.settings.tracking.registered_model or self.settings.name

    @property
    def seconds(self) -> float:
        """Since this run began."""
        return time.monotonic() - self._started

    def resolve_base_model(self) -> Path | str | None:
        """The model to start from: a folder, a hub name, or None for a preset."""
        path = self.settings.model.path
        if path is None:
            return None
        resolved, self._base_model = self.resolve_model(path)
        return resolved

    def resolve_model(self, path: str) -> tuple[Path | str, str]:
        """Where a model lies (a registered one is downloaded), and its name for good (an alias moves on)."""
        registry, cache = self.tracking.registry, self.home / "base_models"
        if is_registered_reference(path):
            version = registry.find(path)
            return registry.download(version, cache), version.reference
        resolved = registry.resolve_model(path, cache)
        return resolved, str(resolved)

    def register(self, tracker: RunTracker, folder: Path, stage: str, summary: dict[str, Any]) -> dict[str, Any]:
        """Make a stage's model a version of a registered model; what that adds to the stage's summary."""
        kind: Literal["policy", "reward_model"] = stage_registry.entry(stage).trains or "policy"
        name = f"{self.registered_model}-reward-model" if kind == "reward_model" else self.registered_model
        numbers = {key: value for key, value in (summary.get("metrics") or {}).items() if isinstance(value, float)}
        tags = {
            "stage": stage,
            "pipeline": self.settings.name,
            "model_sha256": digest_folder(folder),
            "config_digest": settings_digest(self.settings),
            "code_version": code_version(),
            "base_model": self.settings.model.path or f"preset {self.settings.model.preset}",
            **self._given_tags,
            **tags_of_records(self.data_record),
        }
        parent = self._start_of(stage)
        if parent is not None:
            tags["parent_version"] = str(parent.summary.get("model_version", ""))
        start = f" from version {tags['parent_version']}" if tags.get("parent_version") else ""
        story = f"{stage.replace('_', ' ')}{start}: {summary['note']}" if summary.get("note") else ""
        version = tracker.log_model(folder, kind, name, metrics=numbers, tags=tags, description=story)
        return {"registered_model": name, "model_version": version}

    def ensure_version(self, result: StageResult) -> int:
        """The registered version of a finished stage's model; registered now where the store does not know it."""
        wanted = digest_folder(result.model)
        for version in self.tracking.registry.versions(self.registered_model):
            if version.tags.get("model_sha256") == wanted:
                return int(version.version)
        return int(self.register(self.parent, result.model, result.stage, result.summary)["model_version"])

    def is_fresh(self, stage: str) -> bool:
        """Whether a finished folder of this stage is to be passed over."""
        return self.fresh and self.only in (None, stage)

    def open_stage_run(
        self, label: str, stage: str, journal: Path, settings: Any, digests: dict[str, str], key: str
    ) -> RunTracker:
        """The nested run of one stage. A folder that was tracked before stays the same run, so a resumed stage does."""
        return self.tracking.start_run(
            label.replace("_", " "),
            journal,
            parent_run_id=self.parent.run_id,
            parent_folder=self.parent.folder,
            tags={
                **self._tags(),
                "stage": stage,
                "stage_key": key,
                **self._parent_model(stage),
                **{f"input.{name}": digest[:16] for name, digest in digests.items()},
            },
            params=resolve(settings) if settings is not None else {},
            on_progress=[lambda done, total, message: self.progress(label, done, total, message)],
            system_metrics_seconds=self.settings.tracking.system_metrics_seconds,
        )

    def _parent_model(self, stage: str) -> dict[str, str]:
        """Tag with what a training stage starts from: a registered version, a path, a hub name or a preset."""
        if stage_registry.entry(stage).trains is None:
            return {}
        parent = self._start_of(stage)
        version = parent.summary.get("model_version") if parent is not None else None
        start = f"models:/{self.registered_model}/{version}" if version else self._base_model
        return {"parent_model_version": start}

    def _start_of(self, stage: str) -> StageResult | None:
        """The stage of this run whose model `stage` starts from; None = the pipeline's base model."""
        before = itertools.takewhile(lambda name: name != stage, stage_registry.names())
        earlier = [name for name in before if name in stage_registry.policy_stages() and name in self.results]
        return self.results[earlier[-1]] if earlier else None

    def tag_data(self, digests: Mapping[str, str]) -> None:
        """Note on the parent run which data a stage reads, whether the stage runs or was finished before."""
        tags = {f"input.{name}": digests[name][:16] for name in DATA_INPUTS if name in digests}
        if tags.items() - self._data_tags.items():
            self.parent.set_tags(tags)
            self._data_tags |= tags

    def progress(self, label: str, done: int, total: int, message: str = "") -> None:
        """Hand a stage's progress to whoever shows it."""
        self.fraction = done / total if total else 0.0
        if self._on_progress is not None:
            self._on_progress(label, done, total, message)

    def stage_cached(self, label: str, result: StageResult) -> None:
        """Note on the parent run that a stage was taken from an earlier run."""
        self.parent.set_tag(f"cached.{label}", result.run_id or result.key)
        self.progress(label, 1, 1, "finished before, not run again")
