"""Tracking of a pipeline run: its parent run, the nested runs of its stages, their tags, and the models it registers.

For the table of runs it also describes the settings in which a run differs from its defaults and from the run before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import BackendError
from rl_core.storage.manifest import digest_folder
from tasks import stage_registry
from tasks.config import PipelineSettings, digest_settings, dump_settings
from tasks.config.displayed_settings import mask_secrets, non_default_settings
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_key import compute_code_version
from tasks.pipeline.stage_result import StageResult
from tasks.run_status import STOP_TIMEOUT_SECONDS
from tasks.tracking import (
    PARENT_PLACEHOLDER,
    ModelRegistry,
    RunTracker,
    Tracking,
    VersionByContent,
    is_registered_reference,
    shorten_result,
)
from tasks.tracking.extra_trackers import build_alert_tracker, build_extra_trackers
from tasks.tracking.journal import build_events_path, read_lines
from tasks.tracking.values import flatten_settings

logger = logging.getLogger(__name__)

# inputs of stages that are data, not models or results
DATA_INPUTS = ("data", "demonstrations", "preferences")
REPORT_INTERVAL_SECONDS = 20.0  # between updates of a running run in the table of runs

StageProgress = Callable[[str, int, int, str], None]  # stage, done, total, message

_LOCATION_SETTINGS = (
    "output",
    "name",
    "tracking.",
    "run.",
)  # prefixes of settings that affect no result
_MAX_CHANGES = 5  # settings in the text
_MAX_SETTINGS = 12  # settings that differ from their defaults
# Last parts of the settings that readers look for first. Others follow in the config's order.
_PRIORITY_SETTINGS = (
    "algorithm",
    "loss",
    "learning_rate",
    "iterations",
    "epochs",
    "group_size",
    "kl_coef",
    "rewards",
    "seed",
)
_MAX_VALUE_LENGTH = 32  # characters of a value


def describe_changed_settings(runs: Path, started: str, settings: Mapping[str, Any]) -> str:
    """Describe the differences from the newest earlier run: `learning_rate 0.001 → 0.0003`; "" if there is no such run.

    Args:
        runs: folder of the pipeline's runs.
        started: name of this run's folder in it.
        settings: of this run, resolved.
    """
    earlier = sorted(path.name for path in runs.glob("*") if path.name < started)
    if not earlier or (before := _read_recorded_settings(runs / earlier[-1])) is None:
        return ""
    then, now = flatten_settings(before), flatten_settings(settings)
    changed = [
        f"{key.rpartition('.')[2]} {_shorten_value(then.get(key))} → {_shorten_value(now.get(key))}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key) != now.get(key) and not key.startswith(_LOCATION_SETTINGS)
    ]
    suffix = f" and {len(changed) - _MAX_CHANGES} more" if len(changed) > _MAX_CHANGES else ""
    return "; ".join(changed[:_MAX_CHANGES]) + suffix or "nothing: settings as in the run before"


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Describe settings that differ from their defaults: `policy.algorithm=grpo, policy.iterations=400`.

    Args:
        settings: nested, as in a config.
    """
    flat = {
        key: text
        for key, text in flatten_settings(settings).items()
        if not key.startswith(_LOCATION_SETTINGS) and text != "{}"
    }
    ranks = {name: rank for rank, name in enumerate(_PRIORITY_SETTINGS)}
    ordered = sorted(flat, key=lambda key: ranks.get(key.rpartition(".")[2], len(ranks)))
    texts = [f"{key.removeprefix('stages.')}={_shorten_value(flat[key])}" for key in ordered]
    suffix = f" and {len(texts) - _MAX_SETTINGS} more" if len(texts) > _MAX_SETTINGS else ""
    return ", ".join(texts[:_MAX_SETTINGS]) + suffix or "defaults"


def _shorten_value(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 1] + "…"


def _read_recorded_settings(run: Path) -> dict[str, Any] | None:
    """Read the settings that a run recorded; None = it ended before recording them."""
    settings = None
    for event, _ in read_lines(build_events_path(run)):
        if event.get("op") == "text" and event.get("name") == "config.json":
            text = event.get("text")
            settings = _parse_json_object(text)
    return settings


def _parse_json_object(text: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(str(text))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def resolve_registered_name(settings: PipelineSettings) -> str:
    """Return the name of the pipeline's policy in the model registry."""
    return settings.tracking.registered_model or settings.name


class ModelVersions:
    """The models of one pipeline run: resolution of references and registration of versions."""

    def __init__(
        self,
        settings: PipelineSettings,
        registry: ModelRegistry,
        cache: Path,
        results: Mapping[str, StageResult],
        tags: Mapping[str, str],
        deliver: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare resolution and registration.

        Args:
            cache: folder for downloads.
            results: the run's finished stages, which may grow.
            tags: of every version.
            deliver: delivers what earlier runs and stages recorded; returns the number of undelivered records.
        """
        self._settings = settings
        self._registry = registry
        self._cache = cache
        self._results = results
        self._tags = dict(tags)
        self._deliver = deliver
        self._base = (
            f"preset {settings.model.preset}"  # for tags: the model that the pipeline starts from
        )
        self._resolved_references: dict[
            str, str
        ] = {}  # reference in the settings -> name of the version
        self.name = resolve_registered_name(settings)

    def resolve_base(self) -> Path | str | None:
        """Return the model to start from: a folder, a hub name, or None for a preset."""
        path = self._settings.model.path
        if path is None:
            return None
        resolved, self._base = self.resolve_model(path)
        return resolved

    def resolve_model(self, path: str) -> tuple[Path | str, str]:
        """Return a model's folder or hub name, and its permanent name.

        Download registered versions; aliases may move later.
        """
        if is_registered_reference(path):
            version = self._registry.find_version(path)
            self._resolved_references[path] = version.reference
            return self._registry.download_version(version, self._cache), version.reference
        resolved = self._registry.resolve_model(path, self._cache)
        return resolved, str(resolved)

    def find_resolved_version(self, path: str) -> str:
        """Return the number of the version that a registered reference was resolved to in this run; "" = none."""
        return self._resolved_references.get(path, "").rpartition("/")[2]

    def register_model(
        self, tracker: RunTracker, folder: Path, stage: str, summary: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Register a stage's model as a new version and return the fields to add to the stage's summary.

        `model_version` is missing while the tracking store is down: the version is created once it answers.
        """
        is_reward_model = stage_registry.find_stage(stage).trained_kind == "reward_model"
        kind: Literal["policy", "reward_model"] = "reward_model" if is_reward_model else "policy"
        name = f"{self.name}-reward-model" if kind == "reward_model" else self.name
        metrics = {
            key: value
            for key, value in (summary.get("metrics") or {}).items()
            if isinstance(value, float)
        }
        tags = {
            "stage": stage,
            "pipeline": self._settings.name,
            "model_sha256": digest_folder(folder),
            "config_digest": digest_settings(self._settings),
            "code_version": compute_code_version(),
            "base_model": self._settings.model.path or f"preset {self._settings.model.preset}",
            **self._tags,
        }
        if sampler := summary.get("sampler"):
            tags |= {f"rollouts.{key}": str(value) for key, value in sampler.items()}
        parent = self._find_parent_result(stage)
        parent_version = (
            str(parent.summary.get("model_version") or "") if parent is not None else ""
        )
        if parent_version:
            tags["parent_version"] = parent_version
        origin = (
            f" from version {parent_version or PARENT_PLACEHOLDER}" if parent is not None else ""
        )
        description = f"{stage.replace('_', ' ')}{origin or f' from {self._base}'}: {summary.get('note') or 'trained'}"
        sources = self._tags.get("data.sources", "none")
        description += f"; files: {sources}" if sources != "none" else ""
        unnumbered_parent = None
        if parent is not None and not parent_version:
            unnumbered_parent = self._build_content_reference(parent)
        version = tracker.log_model(
            folder,
            kind,
            name,
            metrics=metrics,
            tags=tags,
            description=description,
            parent=unnumbered_parent,
        )
        fields: dict[str, Any] = {"registered_model": name}
        if version is not None:
            fields["model_version"] = version
        return fields

    def _build_content_reference(self, result: StageResult) -> VersionByContent:
        """Build a reference by content to a finished stage's model, which the store has not numbered yet."""
        return VersionByContent(self.name, digest_folder(result.model))

    def ensure_version(self, result: StageResult, tracker: RunTracker) -> int:
        """Return the registered version of a finished stage's model; register it with `tracker` if the store lacks it.

        Raises: BackendError while the store is down.
        """
        self._deliver()  # its registration may wait in a journal
        model_digest = digest_folder(result.model)
        for version in self._registry.list_versions(self.name):
            if version.tags.get("model_sha256") == model_digest:
                return int(version.version)
        fields = self.register_model(tracker, result.model, result.stage, result.summary)
        if "model_version" not in fields:
            raise BackendError(
                f"the model of stage '{result.stage}' has no version yet: the tracking store is down"
            )
        return int(fields["model_version"])

    def build_parent_tags(self, stage: str) -> dict[str, str | VersionByContent]:
        """Build the tag with the model that a training stage starts from: a version, a path, a hub name or a preset."""
        if stage_registry.find_stage(stage).trained_kind in (None, "network"):
            return {}
        parent = self._find_parent_result(stage)
        if parent is None:
            return {"parent_model_version": self._base}
        version = parent.summary.get("model_version")
        if version:
            return {"parent_model_version": f"models:/{self.name}/{version}"}
        return {"parent_model_version": self._build_content_reference(parent)}

    def _find_parent_result(self, stage: str) -> StageResult | None:
        """Find the stage of this run whose model `stage` starts from; None = the pipeline's base model."""
        before = itertools.takewhile(lambda name: name != stage, stage_registry.list_stage_names())
        earlier = [
            name
            for name in before
            if name in stage_registry.list_policy_stages() and name in self._results
        ]
        return self._results[earlier[-1]] if earlier else None


def describe_progress(label: str, done: int, total: int, message: str = "") -> str:
    """Describe progress for the table of runs: `policy, 12 of 400: reward 0.61`."""
    count = f", {done:,} of {total:,}" if total > 1 else ""
    return f"{label.replace('_', ' ')}{count}{f': {message}' if message else ''}"


def read_git_commit() -> str:
    """Return the commit of the checkout that contains this code; "" if it is not a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def resolve_run_folder(home: Path, started: str) -> Path:
    """Return the folder of the pipeline run that began at `started`."""
    return home / "runs" / re.sub(r"[ :]", "-", started)


def choose_start_time(folder: Path) -> str:
    """Choose the start time of a new run, which names its folder; the caller holds the lock of the pipeline's folder.

    It is later than that of every existing run, even if the clock was set back or two runs begin within a second: runs
    never share a folder, and the newest is the last by name.
    """
    now = datetime.now().replace(microsecond=0)
    earlier = []
    for path in folder.glob("????-??-??-??-??-??"):
        with contextlib.suppress(ValueError):
            earlier.append(datetime.strptime(path.name, "%Y-%m-%d-%H-%M-%S"))
    if earlier and (newest := max(earlier)) >= now:
        if newest - now > timedelta(seconds=5):
            logger.warning(
                "the clock says %s, but a run began at %s; this run is dated after it", now, newest
            )
        now = newest + timedelta(seconds=1)
    return now.strftime("%Y-%m-%d %H:%M:%S")


class PipelineTracker:
    """The parent run of a pipeline run, and the runs of its stages."""

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
        """Open the parent run, or reopen that of the run which began at `started`.

        Args:
            home: folder that contains `runs/`.
        """
        self._tracking = tracking
        self._settings = settings
        self._on_progress = on_progress
        self._tags = _build_common_tags(settings, options)
        self._data_tags: dict[str, str] = {}  # already on the parent run
        self._stages: list[RunTracker] = []
        self._last_report = time.monotonic()
        self._trial = trial = options.trial
        self._shared = Path(settings.output).resolve() / settings.name
        kind = "stage" if options.only else "pipeline"
        if trial is not None:
            kind = "evaluation" if options.evaluated_models else "trial"
        all_settings = mask_secrets(dump_settings(settings))
        changed_settings = mask_secrets(non_default_settings(settings))
        folder = resolve_run_folder(home, started)
        differences = ""
        if trial is None and not options.only:
            differences = describe_changed_settings(folder.parent, folder.name, all_settings)
        self.parent = tracking.start_run(
            trial.name if trial is not None else f"{settings.name} · {started}",
            folder,
            tags={
                **self._tags,
                "kind": kind,
                **({"resumed": "true"} if resumed else {}),
                **({"changed": differences} if differences else {}),
                "settings": describe_settings(changed_settings),
            },
            params=changed_settings,
            description="The pipeline is running; its result will appear here.",
            system_metrics_seconds=settings.tracking.system_metrics_seconds,
            delivers_system_metrics=False,  # the runs of the stages have theirs
            parent_run_id=trial.parent_run_id if trial is not None else None,
            parent_folder=trial.parent_folder if trial is not None else None,
        )

    def log_settings(self, threads: int | None) -> None:
        """Log the resolved settings, the number of threads if known, and the environment with the run."""
        if threads is not None:
            self.parent.set_tag("threads", str(threads))
        self.parent.log_dict(mask_secrets(dump_settings(self._settings)), "config.json")
        self.parent.log_environment()

    def open_stage(
        self,
        label: str,
        stage: str,
        journal: Path,
        settings: Any,
        digests: Mapping[str, str],
        key: str,
        tags: Mapping[str, str | VersionByContent],
    ) -> RunTracker:
        """Open the nested run of one stage; a folder that was tracked before continues its run.

        Args:
            label: name of the run; `stage` is the stage's name.
            journal: folder of the run's journal.
            digests: of the stage's inputs by name; retention follows these tags.
            tags: further ones for this stage.
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
            params=non_default_settings(settings) if settings is not None else {},
            on_progress=[
                lambda done, total, message: self._report_progress(label, done, total, message)
            ],
            system_metrics_seconds=self._settings.tracking.system_metrics_seconds,
        )
        run.extra_trackers += build_extra_trackers(
            self._settings.tracking.sinks,
            self._shared,
            pipeline=self._settings.name,
            group=self.parent.name,
            folder=f"{stage}-{key[:8]}",
            run_id=f"{stage}-{key}",
            stage=stage,
        )
        run.extra_trackers.append(
            build_alert_tracker(self._settings.tracking.alerts, self._settings.name, stage)
        )
        for sink in run.extra_trackers:
            sink.begin(
                f"{self.parent.name} · {label}",
                dump_settings(settings) if settings is not None else {},
            )
        if self._trial is not None and (on_metrics := self._trial.on_metrics) is not None:
            run.on_metrics.append(lambda metrics, step: on_metrics(stage, metrics, step))
        self._stages.append(run)
        return run

    def _report_progress(self, label: str, done: int, total: int, message: str) -> None:
        """Record a stage's progress on the parent run, for the table of runs, and pass it on."""
        self.parent.record_elapsed_time()
        if self._trial is None and time.monotonic() - self._last_report >= REPORT_INTERVAL_SECONDS:
            self._last_report = time.monotonic()
            self.parent.set_tag(
                "result", shorten_result(describe_progress(label, done, total, message))
            )
        self._on_progress(label, done, total, message)

    def record_data_inputs(self, digests: Mapping[str, str]) -> None:
        """Record on the parent run which data a stage reads, whether it runs or was finished before."""
        tags = {f"input.{name}": digests[name][:16] for name in DATA_INPUTS if name in digests}
        if tags.items() - self._data_tags.items():
            self.parent.set_tags(tags)
            self._data_tags |= tags

    def record_cached_stage(self, label: str, source: str) -> None:
        """Record on the parent run that a stage was taken from an earlier run.

        Args:
            source: run ID or key of the earlier stage.
        """
        self.parent.set_tag(f"cached.{label}", source)
        self._on_progress(label, 1, 1, "already finished, not run again")

    def abandon_runs(self) -> None:
        """Mark every open run as killed in its journal, and deliver what can be delivered immediately."""
        for run in (*reversed(self._stages), self.parent):
            run.close("KILLED", timeout_s=0.2)

    def close(
        self, status: Literal["FINISHED", "FAILED", "KILLED"], error: BaseException | None = None
    ) -> None:
        """End the parent run; a failed one gets its error as a tag. After a stop, delivery waits only briefly."""
        if error is not None and status == "FAILED":
            message = f"{type(error).__name__}: {error}"
            self.parent.set_tags(
                {"error": message[:4000], "result": shorten_result(f"failed: {message}")}
            )
        elif status == "KILLED" and self._stages:
            last = self._stages[-1]
            self.parent.set_tag(
                "result",
                shorten_result(f"stopped in {describe_progress(last.name, last.done, last.total)}"),
            )
        self.parent.close(status, timeout_s=STOP_TIMEOUT_SECONDS if status == "KILLED" else 30.0)


def _build_common_tags(settings: PipelineSettings, options: RunOptions) -> dict[str, str]:
    """Build the tags of the parent run and of every stage's run; leave out empty ones."""
    tags = {
        **options.tags,
        "pipeline": settings.name,
        "config_digest": digest_settings(settings),
        "code_version": compute_code_version(),
        "git_commit": read_git_commit(),
        "prefect.flow_run_id": options.flow_run.id,
        "prefect.flow_run_url": options.flow_run.url,
    }
    return {name: value for name, value in tags.items() if value}
