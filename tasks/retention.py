"""What of a pipeline nobody needs any more: the plan behind `posttrain gc`.

Needed are the newest runs, every run that is open (it waits for approval, or lives on another machine), every version
with an alias, the champion before the present one (`posttrain promote` goes back to it), and what any of these came
from, all the way: the version and the model that training began with, the reward model, the data, and the runs that
made them. What is needed is followed along the inputs' digests that every stage run is tagged with. Where a stage's
inputs are not known any more, everything that might have been one stays.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptError
from rl_core.folders import digest_bytes, read_manifest
from tasks.repair import RunRecord, recorded_runs
from tasks.stage import content_digest
from tasks.tracking import ModelVersion, Tracking
from tasks.tracking.journal import events_path, read_lines
from tasks.tracking.removal import StoredModel, StoredRun, stored_models, stored_runs, traces_of

__all__ = ["Item", "Plan", "make_plan"]

logger = logging.getLogger(__name__)

_LOOKED = ("evaluate", "analyze", "promote")  # stages that nothing is made from
_KEY = re.compile(r"[0-9a-f]{16}")
_VERSION = re.compile(r"models:/(.+)/(\d+)")


@dataclass(frozen=True)
class Item:
    """One thing that goes."""

    what: str  # run, stage, unfinished stage, journal, version, download, set aside
    label: str
    bytes: int  # that are free once all items of the plan are gone


@dataclass
class Plan:
    """What goes, and what it frees."""

    items: list[Item] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)  # files and folders of the pipeline's folder
    runs: list[StoredRun] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    models: list[StoredModel] = field(default_factory=list)
    traces: dict[str, list[str]] = field(default_factory=dict)  # experiment -> ids
    kept_versions: list[str] = field(default_factory=list)
    kept_runs: int = 0
    kept_folders: int = 0

    @property
    def bytes(self) -> int:
        """That it frees in all."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class _Folder:
    """A finished stage."""

    path: Path
    stage: str
    key: str
    digests: frozenset[str]  # first 16 digits of what a later stage may name it by: its content, its model
    inputs: frozenset[str] | None  # first 16 digits; None = not known
    run_id: str


def make_plan(tracking: Tracking, home: Path, keep: int) -> Plan:
    """Decide for one pipeline's folder; the caller holds its lock. Changes nothing.

    Args:
        keep: newest runs that stay with all they used.
    """
    graph = _Graph(tracking, home)
    graph.need_newest(keep)
    graph.need_versions()
    graph.need_other_pipelines()
    graph.follow()
    return _Planner(tracking, home, graph).plan()


class _Graph:
    """Runs, versions and folders of one pipeline, and which of them are needed."""

    def __init__(self, tracking: Tracking, home: Path) -> None:
        self.tracking, self.home, self.name = tracking, home, home.name
        self.records = [record for record in recorded_runs(home.parent) if record.pipeline == home.name]
        quoted = home.name.replace("'", "")
        self.runs = {run.run_id: run for run in stored_runs(tracking.store, f"tags.pipeline = '{quoted}'")}
        self.trees: dict[str, list[str]] = {}
        for run in self.runs.values():
            self.trees.setdefault(run.parent or run.run_id, []).append(run.run_id)
        registry = tracking.registry
        self.versions: dict[tuple[str, int], ModelVersion] = {
            (name, version.version): version for name in registry.names() for version in registry.versions(name)
            if version.tags.get("pipeline") == home.name
        }  # fmt: skip
        self.folders = {folder.path: folder for folder in _finished(home, self.runs)}
        self.whole: set[str] = set()  # pipeline runs of which everything stays
        self.lineage: set[str] = set()  # stage runs that made something needed
        self.needed_versions: set[tuple[str, int]] = set()
        self.needed_folders: set[Path] = set()
        self.live_keys: set[str] = set()  # of stages that the newest runs are at, finished or not

    # -- where it starts ----------------------------------------------------------------------------------------

    def need_newest(self, keep: int) -> None:
        """The newest runs, those that go on elsewhere, and those that this folder knows nothing of."""
        ours = {record.run_id for record in self.records}
        for number, record in enumerate(self.records):
            if number < keep or record.status == "running":
                self.whole.add(record.run_id)
                self._need_recorded(record)
        for tree in self.trees:
            if tree not in ours:
                self.whole.add(tree)

    def _need_recorded(self, record: RunRecord) -> None:
        """What a run used as its own journals tell it: the store may have been away."""
        sources = {value for tag, value in _tags(record.folder).items() if tag.startswith("cached.")}
        for journal in (self.home / "stages").glob("*/*.tracking"):
            start = next((event for event, _ in read_lines(events_path(journal))), {})
            if start.get("parent_folder") == str(record.folder):
                sources.add(journal.name.partition(".")[0])
        self.live_keys |= sources
        self.needed_folders |= {p for p, folder in self.folders.items() if {folder.key, folder.run_id} & sources}

    def need_versions(self) -> None:
        """Versions with an alias, those that wait for approval, the champion before this one; with their runs."""
        for (name, number), version in self.versions.items():
            if version.aliases or version.tags.get("approval.state") == "waiting":
                self.needed_versions.add((name, number))
            before = version.tags.get("gate.champion_before", "")
            if "champion" in version.aliases and before.isdigit():
                self.needed_versions.add((name, int(before)))
        for key in self.needed_versions & set(self.versions):
            run = self.runs.get(self.versions[key].run_id or "")
            if run is not None:
                self.whole.add(run.parent or run.run_id)

    def need_other_pipelines(self) -> None:
        """What other pipelines start from: versions of ours, and folders that their settings name."""
        for run in stored_runs(self.tracking.store, "tags.parent_model_version LIKE 'models:/%'"):
            if run.run_id not in self.runs:
                self._need_reference(run.tags["parent_model_version"])
        for record in recorded_runs(self.home.parent):
            path = ((record.settings or {}).get("model") or {}).get("path")
            if record.pipeline != self.name and isinstance(path, str):
                self.needed_folders |= {folder for folder in self.folders if folder in Path(path).absolute().parents}

    # -- where it leads -----------------------------------------------------------------------------------------

    @property
    def needed_runs(self) -> set[str]:
        """Pipeline runs that stay in the store, with all their stage runs."""
        made = {self.runs[run_id].parent or run_id for run_id in self.lineage}
        return self.whole | made

    @property
    def followed(self) -> set[str]:
        """Runs of which everything stays that they used or made."""
        return self.lineage | {run_id for tree in self.whole for run_id in self.trees.get(tree, [])}

    def follow(self) -> None:
        """Add what the needed came from, until nothing is added."""
        size = -1
        while size != (size := len(self.lineage) + len(self.needed_versions) + len(self.needed_folders)):
            for run_id in self.followed:
                self._follow_run(self.runs[run_id])
            for key in list(self.needed_versions):
                self._follow_version(self.versions.get(key))
            for path in list(self.needed_folders):
                self._follow_folder(self.folders[path])

    def _follow_run(self, run: StoredRun) -> None:
        sources = {value for tag, value in run.tags.items() if tag.startswith("cached.")}
        sources |= {run.tags.get("stage_key", ""), run.run_id}
        self.needed_folders |= {path for path, folder in self.folders.items() if {folder.key, folder.run_id} & sources}
        self._need_reference(run.tags.get("parent_model_version", ""))
        self.needed_versions |= {key for key, version in self.versions.items() if version.run_id == run.run_id}

    def _follow_version(self, version: ModelVersion | None) -> None:
        if version is None:
            return
        self._need_run(version.run_id or "")
        parent = version.tags.get("parent_version", "")
        if parent.isdigit():
            self.needed_versions |= {key for key in self.versions if key[1] == int(parent)}

    def _follow_folder(self, folder: _Folder) -> None:
        self._need_run(folder.run_id)
        if folder.stage in _LOOKED:  # at models of other runs, the champion of that time among them
            return
        for path, other in self.folders.items():
            if folder.inputs is None or other.digests & folder.inputs:
                self.needed_folders.add(path)

    def _need_run(self, run_id: str) -> None:
        if run_id in self.runs:
            self.lineage.add(run_id)

    def _need_reference(self, reference: str) -> None:
        match = _VERSION.fullmatch(reference)
        if match and (match[1], int(match[2])) in self.versions:
            self.needed_versions.add((match[1], int(match[2])))


def _finished(home: Path, runs: dict[str, StoredRun]) -> Iterator[_Folder]:
    for path in sorted((home / "stages").glob("*/*")):
        if not _KEY.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
            continue
        try:
            manifest = read_manifest(path)
            summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
        except (CorruptError, OSError, ValueError) as error:
            logger.warning("%s is left alone: %s", path, error)
            continue
        run_id = str(summary.get("run_id", ""))
        tags = _tags(path.with_name(f"{path.name}.tracking")) or (runs[run_id].tags if run_id in runs else {})
        known = {value for tag, value in tags.items() if tag.startswith("input.")}
        digests = frozenset(digest[:16] for digest in (content_digest(manifest), _model_digest(manifest)))
        yield _Folder(path, path.parent.name, path.name, digests, frozenset(known) if tags else None, run_id)


def _model_digest(manifest: dict[str, Any]) -> str:
    """As `digest_folder` of the model folder within, from the manifest alone."""
    files = {
        name.removeprefix("model/"): entry
        for name, entry in manifest["files"].items()
        if name.startswith("model/") and name != "model/manifest.json"
    }
    lines = [f"{name}\0{files[name]['size']}\0{files[name]['sha256']}\n" for name in sorted(files)]
    return digest_bytes("".join(lines).encode())


def _tags(journal: Path) -> dict[str, str]:
    tags: dict[str, str] = {}
    for event, _ in read_lines(events_path(journal)):
        if event.get("op") == "tags":
            tags |= event.get("tags", {})
    return tags


class _Planner:
    """Turns what is not needed into paths, runs and versions, with their sizes."""

    def __init__(self, tracking: Tracking, home: Path, graph: _Graph) -> None:
        self.tracking, self.home, self.graph = tracking, home, graph
        self.sizes = _Sizes()
        self._items: list[tuple[str, str, list[Path]]] = []
        self._plan = Plan()

    def plan(self) -> Plan:
        """All of it."""
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
        for _, _, paths in self._items:
            for path in paths:
                self.sizes.add(path)
        plan.items = [Item(what, label, sum(map(self.sizes.freed, paths))) for what, label, paths in self._items]
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
                self._add("journal", records[tree].started, records[tree].folder)
        for record in graph.records:  # runs that the store never knew, or has lost
            if record.run_id not in graph.trees and record.run_id not in graph.needed_runs:
                self._add("journal", record.started, record.folder)

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

    def _stages(self) -> None:
        graph = self.graph
        live = {graph.runs[run_id].tags.get("stage_key", "") for run_id in graph.followed}
        live |= graph.live_keys | {path.name for path in graph.needed_folders}
        gone: dict[tuple[str, str], dict[str, Path]] = {}
        for path in sorted((self.home / "stages").glob("*/*")):
            key, _, kind = path.name.partition(".")
            if path.is_symlink():
                continue
            if path.name.startswith(".trash-") or kind.startswith("corrupt-"):
                self._add("set aside", f"{path.parent.name} {path.name}", path)
            elif not _KEY.fullmatch(key) or key in live:
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
        """What a path frees, once every path was added."""
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
