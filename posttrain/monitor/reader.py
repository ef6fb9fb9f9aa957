"""Subfolders of folders, listed again only where an entry was added or removed.

Runs from MLflow's sqlite store, read without MLflow and without locks, for runs whose files are gone.

The file is opened as immutable, so that writers are never blocked. A read during a write may be inconsistent; sqlite
then raises, and the previous result is kept until the next refresh.

Reader of an output folder, shared by any number of open pages.

Reading is incremental and bounded: files are checked on request, at most once a second; each byte of a journal is read
once; a metric keeps a bounded number of points; runs not viewed recently are evicted.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from posttrain.monitor.runs import (
    STATUS_NOT_RUN,
    STATUS_PENDING,
    RunJournal,
    RunView,
    StageView,
    determine_run_status,
    estimate_seconds_left,
    insert_approval_answer,
)
from posttrain.monitor.series import MetricSeriesTable
from posttrain.monitor.tail import read_json_object
from rl_core.errors import SettingsError, suggest_name
from tasks.run_status import describe_run_status

MIN_CACHED_AGE_NS = 2_000_000_000  # age of a folder's last change after which its listing is kept


class FolderListingCache:
    """Listings of any number of folders; not thread-safe."""

    def __init__(self) -> None:
        self._listings: dict[
            Path, tuple[int, list[Path]]
        ] = {}  # folder -> time of its last change, its subfolders

    def list_subfolders(self, path: Path) -> list[Path]:
        """By name, without hidden ones; [] if the folder is gone."""
        try:
            changed = path.stat().st_mtime_ns
            kept = self._listings.get(path)
            if kept is not None and kept[0] == changed:
                return kept[1]
            with os.scandir(path) as entries:  # it says what is a folder, without a look at each
                names = sorted(
                    one.name for one in entries if one.name[0] != "." and _is_folder(one)
                )
        except OSError:
            self._listings.pop(path, None)
            return []
        found = [path / name for name in names]
        if (
            time.time_ns() - changed > MIN_CACHED_AGE_NS
        ):  # else an entry of the same tick of the clock might be missed
            self._listings[path] = (changed, found)
        return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where this user may not look
        return False


MAX_STORE_RUNS = 300  # pipeline runs, the newest
MAX_STORE_POINTS = 500_000  # metric values of one run


@dataclass
class MlflowRunRow:
    """One run of the store."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    started: float  # seconds since the epoch
    ended: float | None
    parent: str | None
    experiment: str
    tags: dict[str, str] = field(default_factory=dict)


class MlflowStore:
    """Store of an output folder; empty if there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_version: tuple[int, float] | None = None
        self._runs: list[MlflowRunRow] = []

    @contextmanager
    def _open_connection(self) -> Iterator[sqlite3.Connection]:
        uri = f"file:{quote(str(self.path))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True, timeout=0.1)) as connection:
            yield connection

    def list_runs(self) -> list[MlflowRunRow]:
        """Latest pipeline runs and their stages, newest first; read again only if the file has changed."""
        try:
            found = self.path.stat()
            seen = (found.st_size, found.st_mtime)
            if seen != self._file_version:
                with self._open_connection() as connection:
                    self._runs = _query_runs(connection)
                self._file_version = seen
        except FileNotFoundError:
            self._runs, self._file_version = [], None
        except (OSError, sqlite3.Error):
            pass  # being written: keep the previous result
        return self._runs

    def read_metrics(self, run_id: str) -> list[dict[str, Any]]:
        """Rows as in metrics.jsonl; [] if they cannot be read now."""
        query = (
            "SELECT key, value, timestamp, step FROM metrics WHERE run_uuid = ? AND is_nan = 0 "
            "ORDER BY timestamp, step LIMIT ?"
        )
        try:
            with self._open_connection() as connection:
                rows = connection.execute(query, (run_id, MAX_STORE_POINTS)).fetchall()
        except (OSError, sqlite3.Error):
            return []
        return [
            {"step": step, "time": when, "metrics": {name: value}}
            for name, value, when, step in rows
        ]


def _query_runs(connection: sqlite3.Connection) -> list[MlflowRunRow]:
    rows = connection.execute(
        "SELECT r.run_uuid, r.name, r.status, r.start_time, r.end_time, e.name FROM runs r "
        "JOIN experiments e ON e.experiment_id = r.experiment_id WHERE r.lifecycle_stage = 'active' "
        "ORDER BY r.start_time DESC LIMIT ?",
        (20 * MAX_STORE_RUNS,),
    ).fetchall()
    tags: dict[str, dict[str, str]] = {}
    wanted = (
        "('mlflow.parentRunId', 'pipeline', 'stage', 'stage_key', 'result', 'error', 'interrupted', 'approval', "
        "'curriculum.moves', 'online.service', 'service.run')"
    )
    for run_id, key, value in connection.execute(
        f"SELECT run_uuid, key, value FROM tags WHERE key IN {wanted} OR key LIKE 'cached.%'"
    ):
        tags.setdefault(run_id, {})[key] = value
    return [
        MlflowRunRow(
            run_id=run_id,
            name=name or run_id,
            status=status,
            started=(started or 0) / 1000,
            ended=ended / 1000 if ended else None,
            parent=tags.get(run_id, {}).get("mlflow.parentRunId"),
            experiment=experiment,
            tags=tags.get(run_id, {}),
        )
        for run_id, name, status, started, ended, experiment in rows
    ]


PROMOTE_STAGE = "promote"
MIN_REFRESH_SECONDS = 1.0  # minimum interval between file checks, over all pages
MAX_LOADED_RUNS = 8  # runs with metrics in memory, least recently viewed evicted first
LISTING_SECONDS = 2.0  # interval between folder listings


class RunReader:
    """Incremental reader of an output folder; thread-safe."""

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.store = MlflowStore(self.output / "mlflow" / "mlflow.db")
        self.lock = threading.RLock()  # held by readers of tables that a refresh may change
        self._parents: dict[Path, RunJournal] = {}
        self._stages: dict[Path, RunJournal] = {}
        self._tables: OrderedDict[str, tuple[tuple[str, float | None], MetricSeriesTable]] = (
            OrderedDict()
        )  # from the store
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._views: dict[str, tuple[float, RunView]] = {}
        self._listing_time = 0.0
        self._run_list: list[RunView] = []
        self._stages_by_run: dict[
            tuple[Path, str], list[RunJournal]
        ] = {}  # (pipeline's folder, name of the run's) -> stages
        self._folders = FolderListingCache()

    # -- runs ---------------------------------------------------------------------------------------------------

    def list_runs(self) -> list[RunView]:
        """All runs, newest first, without metrics; runs without files come from MLflow's store."""
        with self.lock:
            now = time.monotonic()
            if now - self._listing_time >= LISTING_SECONDS or not self._listing_time:
                self._run_list, self._listing_time = self._find_runs(), now
            return list(self._run_list)

    def _find_runs(self) -> list[RunView]:
        found = []
        present: set[Path] = set()
        for home in self._folders.list_subfolders(self.output):
            kinds = self._folders.list_subfolders(home / "stages")
            stages = [
                path
                for kind in kinds
                for path in self._folders.list_subfolders(kind)
                if _is_journal(path)
            ]
            for path in stages:
                _find_or_create_journal(self._stages, path).events.read_new_events()
            present |= set(stages)
            self._group_stages_by_run(home, stages)
            record, written = (
                read_json_object(home / "run.json"),
                _read_modification_time(home / "run.json"),
            )
            for path in self._folders.list_subfolders(home / "runs"):
                present.add(path)
                journal = _find_or_create_journal(self._parents, path)
                journal.events.read_new_events()
                if journal.events.started:
                    found.append(self._build_run_summary(home, journal, record, written))
        for known in (self._parents, self._stages):
            for path in [path for path in known if path not in present]:
                del known[path]
        local = {view.run_id for view in found if view.run_id}
        stored = (
            run
            for run in self.store.list_runs()
            if _is_pipeline_run(run) and run.run_id not in local
        )
        found += [_build_stored_run_summary(run, self.output) for run in stored]
        return sorted(found, key=lambda view: view.started, reverse=True)

    def _build_run_summary(
        self, home: Path, journal: RunJournal, record: dict[str, Any], written: float
    ) -> RunView:
        """A run without its stages.

        record, written: run.json of the pipeline and the time of its last change.
        """
        events = journal.events
        started_text = events.name.rpartition(" · ")[2] or journal.folder.name
        if record.get("started") != started_text:
            record = {}  # describes a later run
        signs = (
            journal,
            *(() if events.status else self._list_stage_journals(journal)),
        )  # of one that is over, its own end
        modified = max(
            max(found.modified, _read_modification_time(found.tail.path)) for found in signs
        )
        status, why = determine_run_status(events, record, written, modified)
        shipped = read_json_object(journal.folder / ".tracking" / "shipped.json")
        answer = read_json_object(journal.folder / "run.json").get("answer")
        answer = answer if isinstance(answer, dict) else {}
        return RunView(
            id=f"{home.name}/{journal.folder.name}",
            pipeline=home.name,
            started_text=started_text,
            status=status,
            status_reason=why,
            started=events.started,
            ended=events.ended,
            seconds=journal.read_elapsed_seconds(is_live=status in ("running", "silent")),
            modified=modified,
            pid=int(record.get("pid") or 0),
            run_id=str(shipped.get("run_id") or ""),
            result=insert_approval_answer(events.tags.get("result", ""), answer),
            approval_answer=answer,
            config=events.texts.get("config.json", {}),
            output=home.parent,
        )

    def _group_stages_by_run(self, home: Path, stages: list[Path]) -> None:
        """Sort the stages of a pipeline by the run in which they began."""
        for key in [key for key in self._stages_by_run if key[0] == home]:
            del self._stages_by_run[key]
        for path in stages:
            journal = self._stages[path]
            self._stages_by_run.setdefault(
                (home, os.path.basename(journal.events.parent)), []
            ).append(journal)

    def _list_stage_journals(self, parent: RunJournal) -> list[RunJournal]:
        """Journals of the stages that began in this run, matched by name, as the output folder may have been moved."""
        return self._stages_by_run.get((parent.folder.parent.parent, parent.folder.name), [])

    def resolve_run_id(self, name: str) -> str:
        """Run id for `name`: an id, a prefix of an id, or a pipeline's name (its newest run).

        Raises: SettingsError for an unknown name, with suggestions.
        """
        runs = self.list_runs()
        fits = [
            run.id for run in runs if name in (run.id, run.pipeline, run.started_text, run.run_id)
        ]
        fits = fits or [run.id for run in runs if run.id.startswith(name)]
        if fits:
            return fits[0]
        known = [run.id for run in runs]
        raise SettingsError(
            f"--run: no run '{name}' in {self.output}: {suggest_name(name, [*known, *(run.pipeline for run in runs)])}"
        )

    # -- one run ------------------------------------------------------------------------------------------------

    def load_run(self, identity: str) -> RunView | None:
        """One run with its stages and metrics; "" = the newest. None if it does not exist (any more)."""
        with self.lock:
            head = next((view for view in self.list_runs() if identity in ("", view.id)), None)
            if head is None:
                return None
            kept = self._views.get(head.id)
            now = time.monotonic()
            if kept is not None and now - kept[0] < MIN_REFRESH_SECONDS:
                return kept[1]
            self._evict_old_runs(head.id)
            view = (
                self._load_run_from_store(head)
                if head.source == "mlflow"
                else self._load_run_from_files(head)
            )
            self._views[head.id] = (now, view)
            return view

    def _evict_old_runs(self, identity: str) -> None:
        """Keep the metrics of recently viewed runs and evict others."""
        self._loaded[identity] = None
        self._loaded.move_to_end(identity)
        while len(self._loaded) > MAX_LOADED_RUNS:
            gone, _ = self._loaded.popitem(last=False)
            self._views.pop(gone, None)
            home, _, started = gone.partition("/")
            parent = self._parents.get(self.output / home / "runs" / started)
            if parent is not None:
                for journal in (parent, *self._list_stage_journals(parent)):
                    (self._parents if journal is parent else self._stages).pop(journal.folder, None)
                self._listing_time = 0.0  # forces a new listing, without metrics

    def _load_run_from_files(self, view: RunView) -> RunView:
        home, _, started = view.id.partition("/")
        parent = self._parents[self.output / home / "runs" / started]
        parent.read_new_metrics()
        view.system = parent.table
        view.stages = []
        folder = self.output / home
        everyone = [
            journal
            for (at, _), found in self._stages_by_run.items()
            if at == folder
            for journal in found
        ]
        members = {_read_stage_key(journal): journal for journal in everyone}
        by_run: dict[Any, RunJournal] = {}
        if any(origin not in members for _, origin in parent.events.cached.values()):
            by_run = {
                read_json_object(j.folder / ".tracking" / "shipped.json").get("run_id"): j
                for j in everyone
            }
        placed: list[tuple[float, StageView]] = []
        for journal in self._list_stage_journals(parent):
            placed.append((journal.events.started, self._build_stage_view(view, journal, "")))
        for label, (when, origin) in parent.events.cached.items():
            found = members.get(origin) or by_run.get(origin)
            if found is None:
                placed.append((when, StageView(label, "cached", result="its files are gone")))
            elif (
                label == PROMOTE_STAGE != found.folder.parent.name
            ):  # of a champion: there was nothing to decide
                note = parent.events.tags.get("gate.reason", "")
                placed.append((when, StageView(label, "cached", done=1.0, total=1.0, result=note)))
            elif found not in self._list_stage_journals(parent):
                placed.append((when, self._build_stage_view(view, found, label)))
        view.stages = [stage for _, stage in sorted(placed, key=lambda item: item[0])]
        self._add_stages_from_store(view)
        known = {stage.label for stage in view.stages}
        to_come = [
            name for name in _list_planned_stages(view, parent.events.params) if name not in known
        ]
        view.stages += [
            StageView(name, STATUS_NOT_RUN if view.is_over else STATUS_PENDING) for name in to_come
        ]
        return view

    def _build_stage_view(self, run: RunView, journal: RunJournal, cached_as: str) -> StageView:
        journal.read_new_metrics()
        events = journal.events
        finished = journal.folder.with_name(_read_stage_key(journal))
        being_written = finished.with_name(f"{finished.name}.open")
        folder = (
            finished if finished.is_dir() else being_written if being_written.is_dir() else None
        )
        summary = read_json_object(finished / "summary.json") if folder == finished else {}
        status = events.status or ("running" if run.status in ("running", "silent") else "killed")
        done, total, message = journal.progress
        table = journal.table
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
            result=insert_approval_answer(
                str(
                    summary.get("note")
                    or events.tags.get("error")
                    or events.tags.get("result")
                    or ""
                ),
                run.approval_answer,
            ),
            table=table,
            params=events.params,
            curriculum=_select_moves(
                summary.get("curriculum") or events.texts.get("curriculum.json", {}).get("history")
            ),
        )
        if not total:
            stage.done, stage.total = _estimate_progress(stage)
        if status == "finished":
            last = table.series["train/loss"].last_step if "train/loss" in table.series else 0.0
            stage.done = stage.total = float(summary.get("iterations") or (total or last or 1.0))
        stage.seconds_left = estimate_seconds_left(stage, time.time())
        return stage

    # -- from MLflow --------------------------------------------------------------------------------------------

    def _add_stages_from_store(self, view: RunView) -> None:
        """Add stages without journals (as after --fresh) from MLflow."""
        if not view.run_id:
            return
        known = {stage.label for stage in view.stages}
        for stored in reversed(self.store.list_runs()):
            label = stored.tags.get("stage", stored.name).replace(" ", "_")
            if stored.parent == view.run_id and label not in known:
                view.stages.append(self._build_stored_stage(stored, label))

    def _load_run_from_store(self, view: RunView) -> RunView:
        view.stages = []
        for stored in reversed(self.store.list_runs()):
            if stored.parent == view.run_id:
                view.stages.append(
                    self._build_stored_stage(
                        stored, stored.tags.get("stage", stored.name).replace(" ", "_")
                    )
                )
        view.system = self._load_stored_table(view.run_id, view.ended)
        return view

    def _build_stored_stage(self, stored: MlflowRunRow, label: str) -> StageView:
        status = _determine_stored_status(stored)
        return StageView(
            label=label,
            status=status,
            started=stored.started,
            ended=stored.ended or 0.0,
            done=float(status == "finished"),
            total=1.0,
            result=stored.tags.get("result") or stored.tags.get("error", ""),
            table=self._load_stored_table(stored.run_id, stored.ended),
        )

    def _load_stored_table(self, run_id: str, ended: float | None) -> MetricSeriesTable:
        seen = (run_id, ended)
        kept = self._tables.get(run_id)
        if kept is not None and kept[0] == seen:
            self._tables.move_to_end(run_id)
            return kept[1]
        table = MetricSeriesTable()
        table.add_rows(self.store.read_metrics(run_id))
        self._tables[run_id] = (seen, table)
        while len(self._tables) > 4 * MAX_LOADED_RUNS:
            self._tables.popitem(last=False)
        return table


def _is_pipeline_run(run: MlflowRunRow) -> bool:
    """False for stages, and for services, which have pages of their own."""
    return run.parent is None and not run.tags.keys() & {"online.service", "service.run"}


def _determine_stored_status(run: MlflowRunRow) -> str:
    """Status of a run without files; one that has no end cannot be alive any more."""
    return "killed" if run.status == "RUNNING" else describe_run_status(run.status, run.tags)


def _build_stored_run_summary(run: MlflowRunRow, output: Path) -> RunView:
    status = _determine_stored_status(run)
    pipeline = run.tags.get("pipeline") or run.experiment
    return RunView(
        id=f"mlflow:{run.run_id}",
        pipeline=pipeline,
        started_text=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started)),
        status=status,
        status_reason="its files are gone; this is what MLflow keeps of it",
        started=run.started,
        ended=run.ended or 0.0,
        modified=run.ended or run.started,
        run_id=run.run_id,
        result=run.tags.get("result", ""),
        source="mlflow",
        output=output,
    )


def _read_modification_time(path: Path) -> float:
    """Modification time of a file, in seconds since the epoch; 0 = absent."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _find_or_create_journal(known: dict[Path, RunJournal], path: Path) -> RunJournal:
    """The folder's journal, made where it is not known yet."""
    found = known.get(path)
    if found is None:
        found = known[path] = RunJournal(path)
    return found


def _is_journal(path: Path) -> bool:
    return path.name.endswith(".tracking")


def _read_stage_key(journal: RunJournal) -> str:
    return journal.folder.name.removesuffix(".tracking")


def _list_planned_stages(view: RunView, params: dict[str, str]) -> list[str]:
    """Stages of the settings, in order."""
    stages = view.config.get("stages")
    if isinstance(stages, dict):
        planned = [name for name, value in stages.items() if value is not None and name != "own"]
        return [*planned, *(stages.get("own") or {})]  # those of the user's have names of their own
    names = [
        name.split(".")[1]
        for name, value in params.items()
        if name.startswith("stages.") and value != "null"
    ]
    return list(dict.fromkeys(names))


def _select_moves(history: object) -> list[dict[str, object]]:
    return [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []


def _estimate_progress(stage: StageView) -> tuple[float, float]:
    """(done, total) derived from metrics, for runs without recorded progress; (0, 0) = unknown."""
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
