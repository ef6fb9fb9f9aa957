"""Reader of an output folder, shared by any number of open pages.

Reading is incremental and bounded: files are checked on request, at most once a second; each byte of a journal is read
once; a metric keeps a bounded number of points; runs not viewed recently are evicted.

Runs whose files no longer exist come from MLflow's store (`mlflow_store.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Set
from pathlib import Path
from typing import Any

from posttrain.monitor.mlflow_store import MlflowRunRow, MlflowStore
from posttrain.monitor.run_notes import read_run_notes
from posttrain.monitor.runs import (
    STATUS_NOT_RUN,
    STATUS_PENDING,
    RunJournal,
    RunView,
    StageView,
    build_run_folder,
    build_run_id,
    determine_run_status,
    estimate_seconds_left,
    insert_approval_answer,
    read_run_path,
)
from posttrain.monitor.seed_groups import MAX_SEEDS
from posttrain.monitor.series import MetricSeriesTable
from posttrain.monitor.tail import read_json_object
from rl_core.errors import SettingsError, suggest_name
from tasks.run_status import describe_run_status
from tasks.tracking.run_ids import list_named_runs

MIN_CACHED_AGE_NS = 2_000_000_000  # a listing is cached if the folder has not changed for this long
PROMOTE_STAGE = "promote"
MIN_REFRESH_SECONDS = 1.0  # minimum interval between file checks, over all pages
# Runs with metrics in memory, least recently viewed evicted first: more than one chart compares.
MAX_LOADED_RUNS = MAX_SEEDS + 8
LISTING_SECONDS = 2.0  # interval between folder listings


class FolderListingCache:
    """Subfolders of any number of folders, listed again only if an entry was added or removed; not thread-safe."""

    def __init__(self) -> None:
        # Folder -> (time of its last change in ns, subfolders).
        self._listings: dict[Path, tuple[int, list[Path]]] = {}

    def list_subfolders(self, path: Path) -> list[Path]:
        """List subfolders by name, without hidden ones; [] if the folder does not exist."""
        try:
            changed = path.stat().st_mtime_ns
            cached = self._listings.get(path)
            if cached is not None and cached[0] == changed:
                return cached[1]
            with os.scandir(
                path
            ) as entries:  # knows which entries are folders without a stat of each
                names = sorted(
                    entry.name for entry in entries if entry.name[0] != "." and _is_folder(entry)
                )
        except OSError:
            self._listings.pop(path, None)
            return []
        subfolders = [path / name for name in names]
        # Of a younger change, another entry of the same clock tick might be missed.
        if time.time_ns() - changed > MIN_CACHED_AGE_NS:
            self._listings[path] = (changed, subfolders)
        return subfolders


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that this user may not read
        return False


class RunReader:
    """Incremental reader of an output folder; thread-safe."""

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.store = MlflowStore(self.output / "mlflow" / "mlflow.db")
        self.lock = threading.RLock()  # held by readers of tables that a refresh may change
        self._parents: dict[Path, RunJournal] = {}
        self._stages: dict[Path, RunJournal] = {}
        # Tables from the store: run id -> (run id and end, table).
        self._tables: OrderedDict[str, tuple[tuple[str, float | None], MetricSeriesTable]] = (
            OrderedDict()
        )
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._views: dict[str, tuple[float, RunView]] = {}
        self._listing_time = 0.0
        self._run_list: list[RunView] = []
        # (pipeline folder, path of the run in it) -> stages.
        self._stages_by_run: dict[tuple[Path, tuple[str, ...]], list[RunJournal]] = {}
        self._folders = FolderListingCache()
        self._short_ids: dict[Path, str] = {}  # by folder of the run

    def list_runs(self) -> list[RunView]:
        """List all runs, newest first, without metrics; runs without files come from MLflow's store."""
        with self.lock:
            now = time.monotonic()
            if now - self._listing_time >= LISTING_SECONDS or not self._listing_time:
                self._run_list, self._listing_time = self._find_runs(), now
            return list(self._run_list)

    def _find_runs(self) -> list[RunView]:
        views = []
        present: set[Path] = set()
        for pipeline_folder in self._folders.list_subfolders(self.output):
            stage_folders = [
                path
                for kind in self._folders.list_subfolders(pipeline_folder / "stages")
                for path in self._folders.list_subfolders(kind)
                if path.name.endswith(".tracking")
            ]
            for path in stage_folders:
                _find_or_create_journal(self._stages, path).events.read_new_events()
            present |= set(stage_folders)
            self._group_stages_by_run(pipeline_folder, stage_folders)
            record = read_json_object(pipeline_folder / "run.json")
            record_modified = _read_modification_time(pipeline_folder / "run.json")
            homes = [(pipeline_folder, record, record_modified)]
            for trial in self._list_trial_folders(pipeline_folder):
                record_path = trial / "run.json"
                homes.append(
                    (trial, read_json_object(record_path), _read_modification_time(record_path))
                )
            for home, record, record_modified in homes:
                for path in self._folders.list_subfolders(home / "runs"):
                    present.add(path)
                    journal = _find_or_create_journal(self._parents, path)
                    journal.events.read_new_events()
                    if journal.events.started:
                        views.append(
                            self._build_run_summary(
                                pipeline_folder, journal, record, record_modified
                            )
                        )
        for journals in (self._parents, self._stages):
            for path in [path for path in journals if path not in present]:
                del journals[path]
        local_ids = {view.run_id for view in views if view.run_id}
        views += [
            _build_stored_run_summary(run, self.output)
            for run in self.store.list_runs()
            if _is_pipeline_run(run) and run.run_id not in local_ids
        ]
        return sorted(views, key=lambda view: view.started, reverse=True)

    def _list_trial_folders(self, pipeline_folder: Path) -> list[Path]:
        """List the homes of the trials of a pipeline's sweeps; their stages are those of the pipeline."""
        return [
            trial
            for sweep in self._folders.list_subfolders(pipeline_folder / "sweeps")
            for trial in self._folders.list_subfolders(sweep / "trials")
        ]

    def _build_run_summary(
        self,
        pipeline_folder: Path,
        journal: RunJournal,
        record: dict[str, Any],
        record_modified: float,
    ) -> RunView:
        """Build the view of a run without its stages.

        Args:
            record: run.json of the pipeline.
            record_modified: time of its last change.
        """
        events = journal.events
        started_text = events.name.rpartition(" · ")[2] or journal.folder.name
        if record.get("started") != started_text:
            record = {}  # describes a later run
        journals = [journal]
        if not events.status:  # of a run that is over, only its end counts
            journals += self._list_stage_journals(journal)
        modified = max(
            max(part.modified, _read_modification_time(part.tail.path)) for part in journals
        )
        status, reason = determine_run_status(events, record, record_modified, modified)
        shipped = read_json_object(journal.folder / ".tracking" / "shipped.json")
        answer = read_json_object(journal.folder / "run.json").get("answer")
        answer = answer if isinstance(answer, dict) else {}
        return RunView(
            id=build_run_id(journal.folder),
            group=" · ".join((pipeline_folder.name, *read_run_path(journal.folder)[:-1])),
            started_text=started_text,
            status=status,
            status_reason=reason,
            started=events.started,
            ended=events.ended,
            seconds=journal.read_elapsed_seconds(is_live=status in ("running", "silent")),
            modified=modified,
            pid=int(record.get("pid") or 0),
            run_id=str(shipped.get("run_id") or ""),
            result=insert_approval_answer(events.tags.get("result", ""), answer),
            approval_answer=answer,
            flow_run_id=events.tags.get("prefect.flow_run_id", ""),
            short_id=self._find_short_id(journal.folder),
            config=events.texts.get("config.json", {}),
            output=pipeline_folder.parent,
            folder=journal.folder,
            notes=read_run_notes(journal.folder),
        )

    def _find_short_id(self, folder: Path) -> str:
        """Return the short id of a run; runs are listed again only if this one is new."""
        if folder not in self._short_ids:
            named = list_named_runs(self.output)
            self._short_ids = {run.folder: run.short_id for run in named if run.folder is not None}
            self._short_ids.setdefault(folder, "")
        return self._short_ids[folder]

    def _group_stages_by_run(self, pipeline_folder: Path, stage_folders: list[Path]) -> None:
        """Group the stages of a pipeline by the run in which they began."""
        for key in [key for key in self._stages_by_run if key[0] == pipeline_folder]:
            del self._stages_by_run[key]
        for path in stage_folders:
            journal = self._stages[path]
            key = (pipeline_folder, read_run_path(Path(journal.events.parent)))
            self._stages_by_run.setdefault(key, []).append(journal)

    def _list_stage_journals(self, parent: RunJournal) -> list[RunJournal]:
        """List the journals of the stages that began in a run, by name, as the output folder may have been moved."""
        key = read_run_path(parent.folder)
        pipeline_folder = parent.folder.parents[1 if len(key) == 1 else 5]
        return self._stages_by_run.get((pipeline_folder, key), [])

    def resolve_run_id(self, name: str) -> str:
        """Return the run id for an id, a prefix of an id, or a pipeline's name (its newest run).

        Raises: SettingsError for an unknown name, with suggestions.
        """
        runs = self.list_runs()
        matches = [
            run.id
            for run in runs
            if name in (run.short_id, run.id, run.group, run.started_text, run.run_id)
        ]
        matches = matches or [run.id for run in runs if run.id.startswith(name)]
        if matches:
            return matches[0]
        names = [run.id for run in runs] + [run.group for run in runs]
        raise SettingsError(f"no run '{name}' in {self.output}: {suggest_name(name, names)}")

    def load_run(self, identity: str) -> RunView | None:
        """Load a run with its stages and metrics; "" = the newest. Return None if it does not exist (any more)."""
        with self.lock:
            summary = next((view for view in self.list_runs() if identity in ("", view.id)), None)
            if summary is None:
                return None
            cached = self._views.get(summary.id)
            now = time.monotonic()
            if cached is not None and now - cached[0] < MIN_REFRESH_SECONDS:
                return cached[1]
            self._evict_old_runs(summary.id)
            if summary.source == "mlflow":
                view = self._load_run_from_store(summary)
            else:
                view = self._load_run_from_files(summary)
            self._views[summary.id] = (now, view)
            return view

    def _evict_old_runs(self, identity: str) -> None:
        """Keep the metrics of recently viewed runs and evict others."""
        self._loaded[identity] = None
        self._loaded.move_to_end(identity)
        while len(self._loaded) > MAX_LOADED_RUNS:
            evicted, _ = self._loaded.popitem(last=False)
            self._views.pop(evicted, None)
            parent = self._parents.get(build_run_folder(self.output, evicted))
            if parent is not None:
                for stage in self._list_stage_journals(parent):
                    self._stages.pop(stage.folder, None)
                self._parents.pop(parent.folder, None)
                self._listing_time = 0.0  # forces a new listing, without metrics

    def _load_run_from_files(self, view: RunView) -> RunView:
        folder = self.output / view.id.partition("/")[0]
        parent = self._parents[build_run_folder(self.output, view.id)]
        parent.read_new_metrics()
        view.system = parent.table
        view.stages = []
        # Stages with the time at which they began or were reused.
        timed_stages = [
            (journal.events.started, self._build_stage_view(view, journal, ""))
            for journal in self._list_stage_journals(parent)
        ]
        timed_stages += self._build_cached_stages(view, parent, folder)
        view.stages = [stage for _, stage in sorted(timed_stages, key=lambda item: item[0])]
        self._add_stages_from_store(view)
        known = {stage.label for stage in view.stages}
        status = STATUS_NOT_RUN if view.is_over else STATUS_PENDING
        view.stages += [
            StageView(name, status)
            for name in _list_planned_stages(view, parent.events.params)
            if name not in known
        ]
        return view

    def _build_cached_stages(
        self, view: RunView, parent: RunJournal, folder: Path
    ) -> list[tuple[float, StageView]]:
        """Build the stages that a run reused, each with the time of its reuse."""
        journals = [
            journal
            for (pipeline_folder, _), members in self._stages_by_run.items()
            if pipeline_folder == folder
            for journal in members
        ]
        by_origin: dict[Any, RunJournal] = {
            _read_stage_key(journal): journal for journal in journals
        }
        if any(origin not in by_origin for _, origin in parent.events.cached.values()):
            # Some are named by their MLflow run.
            by_run_id = {
                read_json_object(journal.folder / ".tracking" / "shipped.json").get(
                    "run_id"
                ): journal
                for journal in journals
            }
            by_origin = by_run_id | by_origin
        timed_stages: list[tuple[float, StageView]] = []
        for label, (time_s, origin) in parent.events.cached.items():
            journal = by_origin.get(origin)
            if journal is None:
                stage = StageView(label, "cached", result="its files no longer exist")
            elif label == PROMOTE_STAGE != journal.folder.parent.name:
                # The champion itself: there was nothing to decide.
                reason = parent.events.tags.get("gate.reason", "")
                stage = StageView(label, "cached", done=1.0, total=1.0, result=reason)
            elif journal in self._list_stage_journals(parent):
                continue
            else:
                stage = self._build_stage_view(view, journal, label)
            timed_stages.append((time_s, stage))
        return timed_stages

    def _build_stage_view(self, run: RunView, journal: RunJournal, cached_as: str) -> StageView:
        journal.read_new_metrics()
        events, table = journal.events, journal.table
        finished_folder = journal.folder.with_name(_read_stage_key(journal))
        open_folder = finished_folder.with_name(f"{finished_folder.name}.open")
        folder, summary = None, {}
        if finished_folder.is_dir():
            folder, summary = finished_folder, read_json_object(finished_folder / "summary.json")
        elif open_folder.is_dir():
            folder = open_folder
        status = events.status or ("running" if run.status in ("running", "silent") else "killed")
        done, total, message = journal.progress
        result = summary.get("note") or events.tags.get("error") or events.tags.get("result") or ""
        moves = summary.get("curriculum") or events.texts.get("curriculum.json", {}).get("history")
        stage = StageView(
            label=cached_as or events.name.replace(" ", "_"),
            status="cached" if cached_as else status,
            journal=journal,
            folder=folder,
            started=events.started,
            ended=events.ended,
            seconds=journal.read_elapsed_seconds(is_live=status == "running"),
            done=done,
            total=total,
            message=message,
            result=insert_approval_answer(str(result), run.approval_answer),
            table=table,
            params=events.params,
            curriculum=_select_moves(moves),
        )
        if not total:
            stage.done, stage.total = _estimate_progress(stage)
        if status == "finished":
            last = table.series["train/loss"].last_step if "train/loss" in table.series else 0.0
            stage.done = stage.total = float(summary.get("iterations") or (total or last or 1.0))
        stage.seconds_left = estimate_seconds_left(stage, time.time())
        return stage

    def _add_stages_from_store(self, view: RunView) -> None:
        """Add stages without journals (as after --fresh) from MLflow's store."""
        if not view.run_id:
            return
        known = {stage.label for stage in view.stages}
        view.stages += self._load_stored_stages(view.run_id, known)

    def _load_run_from_store(self, view: RunView) -> RunView:
        view.stages = self._load_stored_stages(view.run_id)
        view.system = self._load_stored_table(view.run_id, view.ended)
        return view

    def _load_stored_stages(self, run_id: str, known: Set[str] = frozenset()) -> list[StageView]:
        """Load the stages of a run from MLflow's store, oldest first, except `known` ones."""
        stages = []
        for stored in reversed(self.store.list_runs()):
            label = stored.tags.get("stage", stored.name).replace(" ", "_")
            if stored.parent != run_id or label in known:
                continue
            status = _determine_stored_status(stored)
            stages.append(
                StageView(
                    label=label,
                    status=status,
                    started=stored.started,
                    ended=stored.ended or 0.0,
                    done=float(status == "finished"),
                    total=1.0,
                    result=stored.tags.get("result") or stored.tags.get("error", ""),
                    table=self._load_stored_table(stored.run_id, stored.ended),
                )
            )
        return stages

    def _load_stored_table(self, run_id: str, ended: float | None) -> MetricSeriesTable:
        version = (run_id, ended)
        cached = self._tables.get(run_id)
        if cached is not None and cached[0] == version:
            self._tables.move_to_end(run_id)
            return cached[1]
        table = MetricSeriesTable()
        table.add_rows(self.store.read_metrics(run_id))
        self._tables[run_id] = (version, table)
        while len(self._tables) > 4 * MAX_LOADED_RUNS:
            self._tables.popitem(last=False)
        return table


def _is_pipeline_run(run: MlflowRunRow) -> bool:
    """Return False for stages, and for services, which have their own tabs."""
    return run.parent is None and not run.tags.keys() & {"online.service", "service.run"}


def _determine_stored_status(run: MlflowRunRow) -> str:
    """Determine the status of a run without files; one without an end cannot be alive any more."""
    return "killed" if run.status == "RUNNING" else describe_run_status(run.status, run.tags)


def _build_stored_run_summary(run: MlflowRunRow, output: Path) -> RunView:
    return RunView(
        id=f"mlflow:{run.run_id}",
        group=run.tags.get("pipeline") or run.experiment,
        started_text=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started)),
        status=_determine_stored_status(run),
        status_reason="its files no longer exist; this is what MLflow's store has of it",
        started=run.started,
        ended=run.ended or 0.0,
        modified=run.ended or run.started,
        run_id=run.run_id,
        result=run.tags.get("result", ""),
        source="mlflow",
        output=output,
    )


def _read_modification_time(path: Path) -> float:
    """Read the modification time of a file, in seconds since the epoch; 0 = missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _find_or_create_journal(journals: dict[Path, RunJournal], path: Path) -> RunJournal:
    """Return the journal of a folder; create it if it is unknown."""
    journal = journals.get(path)
    if journal is None:
        journal = journals[path] = RunJournal(path)
    return journal


def _read_stage_key(journal: RunJournal) -> str:
    return journal.folder.name.removesuffix(".tracking")


def _list_planned_stages(view: RunView, params: dict[str, str]) -> list[str]:
    """List the stages of the settings, in order."""
    stages = view.config.get("stages")
    if isinstance(stages, dict):
        blocks = ("custom", "own")  # of the user's stages; `own` until 0.2
        planned = [
            name for name, value in stages.items() if value is not None and name not in blocks
        ]
        return [*planned, *(name for block in blocks for name in stages.get(block) or {})]
    names = [
        name.split(".")[1]
        for name, value in params.items()
        if name.startswith("stages.") and value != "null"
    ]
    return list(dict.fromkeys(names))


def _select_moves(history: object) -> list[dict[str, Any]]:
    return [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []


def _estimate_progress(stage: StageView) -> tuple[float, float]:
    """Estimate (done, total) from metrics, for runs without recorded progress; (0, 0) = unknown."""
    series = stage.table.series
    try:
        if "iterations" in stage.params and "reward/mean" in series:
            return float(series["reward/mean"].count), float(stage.params["iterations"])
        steps = float(stage.params.get("max_steps", "null"))
        return series["train/loss"].last_step, steps
    except (KeyError, ValueError):
        pass
    try:
        return series["train/epoch"].last, float(stage.params["epochs"])
    except (KeyError, ValueError):
        return 0.0, 0.0
