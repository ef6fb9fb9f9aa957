"""Reader of an output folder, shared by any number of open pages.

Reading is incremental and bounded: files are checked on request, at most once a second; each byte of a journal is read
once; a metric keeps a bounded number of points; runs not viewed recently are evicted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from flows.monitor.folder_listing import FolderListing
from flows.monitor.runs import NOT_RUN, TO_COME, RunJournal, RunView, StageView, answered, judge, seconds_left
from flows.monitor.series import SeriesTable
from flows.monitor.store import MlflowRunRow, MlflowStore
from flows.monitor.tail import read_json
from rl_core.errors import SettingsError, nearest
from tasks.run_status import run_status

__all__ = ["Reader"]

PROMOTE = "promote"
PAUSE_SECONDS = 1.0  # minimum interval between file checks, over all pages
LOADED = 8  # runs with metrics in memory, least recently viewed evicted first
NEW_STAGE_SECONDS = 2.0  # interval between folder listings


class Reader:
    """Incremental reader of an output folder; thread-safe."""

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.store = MlflowStore(self.output / "mlflow" / "mlflow.db")
        self.lock = threading.RLock()  # held by readers of tables that a refresh may change
        self._parents: dict[Path, RunJournal] = {}
        self._stages: dict[Path, RunJournal] = {}
        self._tables: OrderedDict[str, tuple[tuple[str, float | None], SeriesTable]] = OrderedDict()  # from the store
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._views: dict[str, tuple[float, RunView]] = {}
        self._listed = 0.0
        self._list: list[RunView] = []
        self._nested: dict[tuple[Path, str], list[RunJournal]] = {}  # (pipeline's folder, name of the run's) -> stages
        self._folders = FolderListing()

    # -- runs ---------------------------------------------------------------------------------------------------

    def runs(self) -> list[RunView]:
        """All runs, newest first, without metrics; runs without files come from MLflow's store."""
        with self.lock:
            now = time.monotonic()
            if now - self._listed >= NEW_STAGE_SECONDS or not self._listed:
                self._list, self._listed = self._find(), now
            return list(self._list)

    def _find(self) -> list[RunView]:
        found = []
        present: set[Path] = set()
        for home in self._folders.subfolders(self.output):
            kinds = self._folders.subfolders(home / "stages")
            stages = [path for kind in kinds for path in self._folders.subfolders(kind) if _is_journal(path)]
            for path in stages:
                _journal(self._stages, path).events.refresh()
            present |= set(stages)
            self._nest(home, stages)
            record, written = read_json(home / "run.json"), _written(home / "run.json")
            for path in self._folders.subfolders(home / "runs"):
                present.add(path)
                journal = _journal(self._parents, path)
                journal.events.refresh()
                if journal.events.started:
                    found.append(self._head(home, journal, record, written))
        for known in (self._parents, self._stages):
            for path in [path for path in known if path not in present]:
                del known[path]
        local = {view.run_id for view in found if view.run_id}
        stored = (run for run in self.store.runs() if _is_pipeline(run) and run.run_id not in local)
        found += [_stored_head(run, self.output) for run in stored]
        return sorted(found, key=lambda view: view.started, reverse=True)

    def _head(self, home: Path, journal: RunJournal, record: dict[str, Any], written: float) -> RunView:
        """A run without its stages.

        record, written: run.json of the pipeline and the time of its last change.
        """
        events = journal.events
        started_text = events.name.rpartition(" · ")[2] or journal.folder.name
        if record.get("started") != started_text:
            record = {}  # describes a later run
        signs = (journal, *(() if events.status else self._members(journal)))  # of one that is over, its own end
        modified = max(max(found.modified, _written(found.tail.path)) for found in signs)
        status, why = judge(events, record, written, modified)
        shipped = read_json(journal.folder / ".tracking" / "shipped.json")
        answer = read_json(journal.folder / "run.json").get("answer")
        answer = answer if isinstance(answer, dict) else {}
        return RunView(
            id=f"{home.name}/{journal.folder.name}",
            pipeline=home.name,
            started_text=started_text,
            status=status,
            why=why,
            started=events.started,
            ended=events.ended,
            seconds=journal.seconds(is_live=status in ("running", "silent")),
            modified=modified,
            pid=int(record.get("pid") or 0),
            run_id=str(shipped.get("run_id") or ""),
            result=answered(events.tags.get("result", ""), answer),
            answer=answer,
            config=events.texts.get("config.json", {}),
            output=home.parent,
        )

    def _nest(self, home: Path, stages: list[Path]) -> None:
        """Sort the stages of a pipeline by the run in which they began."""
        for key in [key for key in self._nested if key[0] == home]:
            del self._nested[key]
        for path in stages:
            journal = self._stages[path]
            self._nested.setdefault((home, os.path.basename(journal.events.parent)), []).append(journal)

    def _members(self, parent: RunJournal) -> list[RunJournal]:
        """Journals of the stages that began in this run, matched by name, as the output folder may have been moved."""
        return self._nested.get((parent.folder.parent.parent, parent.folder.name), [])

    def choose(self, name: str) -> str:
        """Run id for `name`: an id, a prefix of an id, or a pipeline's name (its newest run).

        Raises: SettingsError for an unknown name, with suggestions.
        """
        runs = self.runs()
        fits = [run.id for run in runs if name in (run.id, run.pipeline, run.started_text, run.run_id)]
        fits = fits or [run.id for run in runs if run.id.startswith(name)]
        if fits:
            return fits[0]
        known = [run.id for run in runs]
        raise SettingsError(
            f"--run: no run '{name}' in {self.output}: {nearest(name, [*known, *(run.pipeline for run in runs)])}"
        )

    # -- one run ------------------------------------------------------------------------------------------------

    def run(self, identity: str) -> RunView | None:
        """One run with its stages and metrics; "" = the newest. None if it does not exist (any more)."""
        with self.lock:
            head = next((view for view in self.runs() if identity in ("", view.id)), None)
            if head is None:
                return None
            kept = self._views.get(head.id)
            now = time.monotonic()
            if kept is not None and now - kept[0] < PAUSE_SECONDS:
                return kept[1]
            self._remember(head.id)
            view = self._stored_view(head) if head.source == "mlflow" else self._file_view(head)
            self._views[head.id] = (now, view)
            return view

    def _remember(self, identity: str) -> None:
        """Keep the metrics of recently viewed runs and evict others."""
        self._loaded[identity] = None
        self._loaded.move_to_end(identity)
        while len(self._loaded) > LOADED:
            gone, _ = self._loaded.popitem(last=False)
            self._views.pop(gone, None)
            home, _, started = gone.partition("/")
            parent = self._parents.get(self.output / home / "runs" / started)
            if parent is not None:
                for journal in (parent, *self._members(parent)):
                    (self._parents if journal is parent else self._stages).pop(journal.folder, None)
                self._listed = 0.0  # forces a new listing, without metrics

    def _file_view(self, view: RunView) -> RunView:
        home, _, started = view.id.partition("/")
        parent = self._parents[self.output / home / "runs" / started]
        parent.refresh_metrics()
        view.system = parent.table
        view.stages = []
        folder = self.output / home
        everyone = [journal for (at, _), found in self._nested.items() if at == folder for journal in found]
        members = {_key_of(journal): journal for journal in everyone}
        by_run: dict[Any, RunJournal] = {}
        if any(origin not in members for _, origin in parent.events.cached.values()):
            by_run = {read_json(j.folder / ".tracking" / "shipped.json").get("run_id"): j for j in everyone}
        placed: list[tuple[float, StageView]] = []
        for journal in self._members(parent):
            placed.append((journal.events.started, self._stage_view(view, journal, "")))
        for label, (when, origin) in parent.events.cached.items():
            found = members.get(origin) or by_run.get(origin)
            if found is None:
                placed.append((when, StageView(label, "cached", note="its files are gone")))
            elif label == PROMOTE != found.folder.parent.name:  # of a champion: there was nothing to decide
                note = parent.events.tags.get("gate.reason", "")
                placed.append((when, StageView(label, "cached", done=1.0, total=1.0, note=note)))
            elif found not in self._members(parent):
                placed.append((when, self._stage_view(view, found, label)))
        view.stages = [stage for _, stage in sorted(placed, key=lambda item: item[0])]
        self._fill_from_store(view)
        known = {stage.label for stage in view.stages}
        to_come = [name for name in _planned(view, parent.events.params) if name not in known]
        view.stages += [StageView(name, NOT_RUN if view.is_over else TO_COME) for name in to_come]
        return view

    def _stage_view(self, run: RunView, journal: RunJournal, cached_as: str) -> StageView:
        journal.refresh_metrics()
        events = journal.events
        finished = journal.folder.with_name(_key_of(journal))
        being_written = finished.with_name(f"{finished.name}.open")
        folder = finished if finished.is_dir() else being_written if being_written.is_dir() else None
        summary = read_json(finished / "summary.json") if folder == finished else {}
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
            seconds=journal.seconds(is_live=status == "running"),
            done=done,
            total=total,
            message=message,
            note=answered(
                str(summary.get("note") or events.tags.get("error") or events.tags.get("result") or ""), run.answer
            ),
            table=table,
            params=events.params,
            curriculum=_moves(summary.get("curriculum") or events.texts.get("curriculum.json", {}).get("history")),
        )
        if not total:
            stage.done, stage.total = _progress_from(stage)
        if status == "finished":
            last = table.series["train/loss"].last_step if "train/loss" in table.series else 0.0
            stage.done = stage.total = float(summary.get("iterations") or (total or last or 1.0))
        stage.seconds_left = seconds_left(stage, time.time())
        return stage

    # -- from MLflow --------------------------------------------------------------------------------------------

    def _fill_from_store(self, view: RunView) -> None:
        """Add stages without journals (as after --fresh) from MLflow."""
        if not view.run_id:
            return
        known = {stage.label for stage in view.stages}
        for stored in reversed(self.store.runs()):
            label = stored.tags.get("stage", stored.name).replace(" ", "_")
            if stored.parent == view.run_id and label not in known:
                view.stages.append(self._stored_stage(stored, label))

    def _stored_view(self, view: RunView) -> RunView:
        view.stages = []
        for stored in reversed(self.store.runs()):
            if stored.parent == view.run_id:
                view.stages.append(self._stored_stage(stored, stored.tags.get("stage", stored.name).replace(" ", "_")))
        view.system = self._stored_table(view.run_id, view.ended)
        return view

    def _stored_stage(self, stored: MlflowRunRow, label: str) -> StageView:
        status = _stored_status(stored)
        return StageView(
            label=label,
            status=status,
            started=stored.started,
            ended=stored.ended or 0.0,
            done=float(status == "finished"),
            total=1.0,
            note=stored.tags.get("result") or stored.tags.get("error", ""),
            table=self._stored_table(stored.run_id, stored.ended),
        )

    def _stored_table(self, run_id: str, ended: float | None) -> SeriesTable:
        seen = (run_id, ended)
        kept = self._tables.get(run_id)
        if kept is not None and kept[0] == seen:
            self._tables.move_to_end(run_id)
            return kept[1]
        table = SeriesTable()
        table.extend(self.store.metrics(run_id))
        self._tables[run_id] = (seen, table)
        while len(self._tables) > 4 * LOADED:
            self._tables.popitem(last=False)
        return table


def _is_pipeline(run: MlflowRunRow) -> bool:
    """False for stages, and for services, which have pages of their own."""
    return run.parent is None and not run.tags.keys() & {"online.service", "service.run"}


def _stored_status(run: MlflowRunRow) -> str:
    """Status of a run without files; one that has no end cannot be alive any more."""
    return "killed" if run.status == "RUNNING" else run_status(run.status, run.tags)


def _stored_head(run: MlflowRunRow, output: Path) -> RunView:
    status = _stored_status(run)
    pipeline = run.tags.get("pipeline") or run.experiment
    return RunView(
        id=f"mlflow:{run.run_id}",
        pipeline=pipeline,
        started_text=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started)),
        status=status,
        why="its files are gone; this is what MLflow keeps of it",
        started=run.started,
        ended=run.ended or 0.0,
        modified=run.ended or run.started,
        run_id=run.run_id,
        result=run.tags.get("result", ""),
        source="mlflow",
        output=output,
    )


def _written(path: Path) -> float:
    """Modification time of a file, in seconds since the epoch; 0 = absent."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _journal(known: dict[Path, RunJournal], path: Path) -> RunJournal:
    """The folder's journal, made where it is not known yet."""
    found = known.get(path)
    if found is None:
        found = known[path] = RunJournal(path)
    return found


def _is_journal(path: Path) -> bool:
    return path.name.endswith(".tracking")


def _key_of(journal: RunJournal) -> str:
    return journal.folder.name.removesuffix(".tracking")


def _planned(view: RunView, params: dict[str, str]) -> list[str]:
    """Stages of the settings, in order."""
    stages = view.config.get("stages")
    if isinstance(stages, dict):
        planned = [name for name, value in stages.items() if value is not None and name != "own"]
        return [*planned, *(stages.get("own") or {})]  # those of the user's have names of their own
    names = [name.split(".")[1] for name, value in params.items() if name.startswith("stages.") and value != "null"]
    return list(dict.fromkeys(names))


def _moves(history: object) -> list[dict[str, object]]:
    return [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []


def _progress_from(stage: StageView) -> tuple[float, float]:
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
