"""The plan behind `posttrain gc`: removals from a pipeline's folder and from the store, and the bytes they free.

Reachability is analysed in tasks/retention/graph.py; whatever is unreachable is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data.token_cache import entries_without_source
from rl_core.storage.folder_removal import TRASH
from rl_core.storage.manifest import read_manifest
from tasks.lifecycle.dead_runs import RunRecord
from tasks.retention.graph import KEY, RetentionGraph
from tasks.stages.part_tokens import CACHE
from tasks.tracking import Tracking
from tasks.tracking.removal import StoredModel, StoredRun, stored_models, traces_of, unfinished_removals

__all__ = ["Removal", "RetentionPlan", "make_plan"]


@dataclass(frozen=True)
class Removal:
    """One removal."""

    what: str  # run, sweep, stage, unfinished stage, journal, version, download, token ids, set aside
    label: str
    bytes: int  # that are free once all items of the plan are gone


@dataclass
class RetentionPlan:
    """Removals, and the bytes that they free."""

    items: list[Removal] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)  # of the pipeline's folder; artifacts whose removal was cut off
    runs: list[StoredRun] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    models: list[StoredModel] = field(default_factory=list)
    traces: dict[str, list[str]] = field(default_factory=dict)  # experiment -> ids
    kept_versions: list[str] = field(default_factory=list)
    kept_runs: int = 0
    kept_folders: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that the plan frees in all."""
        return sum(item.bytes for item in self.items)


def make_plan(tracking: Tracking, home: Path, keep: int) -> RetentionPlan:
    """Decide for one pipeline's folder; the caller holds its lock. Changes nothing.

    Args:
        keep: newest runs that stay with all they used.
    """
    graph = RetentionGraph(tracking, home)
    graph.need_newest(keep)
    graph.need_versions()
    graph.need_other_pipelines()
    graph.follow()
    return _Planner(tracking, home, graph).plan()


class _Planner:
    """Turns what is not needed into paths, runs and versions, with their sizes."""

    def __init__(self, tracking: Tracking, home: Path, graph: RetentionGraph) -> None:
        self.tracking, self.home, self.graph = tracking, home, graph
        self.sizes = _Sizes()
        self._items: list[tuple[str, str, list[Path]]] = []
        self._plan = RetentionPlan()

    def plan(self) -> RetentionPlan:
        """The whole plan."""
        graph, plan = self.graph, self._plan
        plan.kept_versions = [
            f"{name}/{number}" for name, number in sorted(graph.needed_versions & set(graph.versions))
        ]
        plan.kept_runs = len(graph.needed_runs & set(graph.trees))
        plan.kept_folders = len(graph.needed_folders)
        self._runs()
        self._versions()
        self._stages()
        self._downloads()
        self._tokens()
        for _, _, paths in self._items:
            for path in paths:
                self.sizes.add(path)
        plan.items = [Removal(what, label, sum(map(self.sizes.freed, paths))) for what, label, paths in self._items]
        return plan

    def _add(self, what: str, label: str, *paths: Path | None, own: bool = True) -> None:
        found = [path for path in paths if path is not None]
        self._items.append((what, label, found))
        if own:
            self._plan.paths += found

    def _runs(self) -> None:
        graph = self.graph
        records = {record.run_id: record for record in graph.records}
        gone = [tree for tree in graph.trees if tree not in graph.needed_runs]
        for tree in sorted(gone, key=lambda tree: graph.runs[tree].name if tree in graph.runs else tree):
            runs = [graph.runs[run_id] for run_id in graph.trees[tree]]
            traces = traces_of(self.tracking.store, runs)
            for experiment, ids in traces.items():
                self._plan.traces.setdefault(experiment, []).extend(ids)
            self._plan.runs += sorted(runs, key=lambda run: run.parent == "")  # stages first
            name = graph.runs[tree].name if tree in graph.runs else tree
            count = sum(map(len, traces.values()))
            label = f"{name} ({len(runs)} MLflow runs{f', {count} traces' if count else ''})"
            self._add("run", label, *(run.artifacts for run in runs), own=False)
            if tree in records:
                self._add(self._kind(records[tree]), records[tree].started, records[tree].folder)
        for record in graph.records:  # runs that the store never knew, or has lost
            if record.run_id not in graph.trees and record.run_id not in graph.needed_runs:
                self._add(self._kind(record), record.started, record.folder)

    def _kind(self, record: RunRecord) -> str:
        return "sweep" if record.folder in self.graph.sweeps else "journal"

    def _versions(self) -> None:
        """Versions, and logged models that belong to none that stays."""
        graph = self.graph
        kept = {version.run_id for key, version in graph.versions.items() if key in graph.needed_versions}
        experiments = {run.experiment_id for run in graph.runs.values()}
        models: dict[str, list[StoredModel]] = {}
        for model in stored_models(self.tracking.store, experiments):
            if model.run_id in graph.runs and model.run_id not in kept | graph.followed:
                models.setdefault(model.run_id, []).append(model)
        self._plan.models += [model for found in models.values() for model in found]
        for (name, number), version in sorted(graph.versions.items()):
            if (name, number) not in graph.needed_versions:
                self._plan.versions.append((name, number))
                found = models.pop(version.run_id or "", [])
                self._add("version", f"{name} version {number}", *(model.folder for model in found), own=False)
        for found in models.values():
            for model in found:
                self._add("logged model", model.model_id, model.folder, own=False)
        for path in unfinished_removals(self.tracking.store, experiments):
            self._add("set aside", path.name, path)

    def _stages(self) -> None:
        graph = self.graph
        live = {graph.runs[run_id].tags.get("stage_key", "") for run_id in graph.followed}
        live |= graph.live_keys | {path.name for path in graph.needed_folders}
        gone: dict[tuple[str, str], dict[str, Path]] = {}
        for path in sorted((self.home / "stages").glob("*/*")):
            key, _, kind = path.name.partition(".")
            if path.is_symlink():
                continue
            if path.name.startswith(TRASH) or kind.startswith("corrupt-"):
                self._add("set aside", f"{path.parent.name} {path.name}", path)
            elif not KEY.fullmatch(key) or key in live:
                continue
            elif path in graph.folders or kind in ("open", "tracking", "lock"):
                gone.setdefault((path.parent.name, key), {})[kind] = path
        for (stage, key), paths in gone.items():
            what = "stage" if "" in paths else "unfinished stage" if "open" in paths else "journal"
            self._add(what, f"{stage} {key}", *paths.values())

    def _downloads(self) -> None:
        """Copies of registered versions of which nothing needs the original."""
        kept = tuple(f"{name.replace(' ', '_')}-v{number}-" for name, number in self.graph.needed_versions)
        for place in ("champions", "base_models"):
            for path in sorted((self.home / place).glob("*-v*-*")):
                if path.is_dir() and not path.name.startswith(kept or ("\0",)):
                    self._add("download", path.name, path)

    def _tokens(self) -> None:
        """Token ids of rows that no data stage that stays has written; they can be made again."""
        data = {path for path in self.graph.needed_folders if path.parent.name == "prepare_data"}
        sources = {entry["sha256"] for path in data for entry in read_manifest(path)["files"].values()}
        for path in entries_without_source(self.home / "stages" / "prepare_data" / CACHE, sources):
            self._add("token ids", path.name, path)


class _Sizes:
    """Bytes that are free when all paths are gone: a file with a link elsewhere frees none, in two items once."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], int] = {}
        self._counted: set[tuple[int, int]] = set()

    def add(self, path: Path) -> None:
        """Note that a path goes."""
        for stat in _files(path):
            node = (stat.st_dev, stat.st_ino)
            self._links[node] = self._links.get(node, 0) + 1

    def freed(self, path: Path) -> int:
        """Bytes that a path frees, once every path was added."""
        total = 0
        for stat in _files(path):
            node = (stat.st_dev, stat.st_ino)
            if self._links[node] >= stat.st_nlink and node not in self._counted:
                self._counted.add(node)
                total += stat.st_size
        return total


def _files(path: Path) -> Iterable[Any]:
    places = path.rglob("*") if path.is_dir() else [path]
    return [place.lstat() for place in places if place.is_file() and not place.is_symlink()]
