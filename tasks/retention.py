"""Garbage collection behind `posttrain store gc`: what is still needed, what to remove, and the bytes that this frees.

A pipeline's runs, versions and finished stages form a graph. Needed are: the newest runs (a sweep with its trials
counts as one); every open run (waiting for approval, or running on another machine); every version with an alias; the
previous champion, to which `posttrain promote` can go back; and all their ancestors: the version and the model with
which training began, the reward model, the data, and the runs that made them. Edges are the digests of inputs with
which every stage run is tagged. If a stage's inputs are unknown, everything that may have been an input is kept.
Everything else is removed from the pipeline's folder and from the store.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data.token_cache import find_orphaned_entries
from rl_core.errors import CorruptError
from rl_core.storage.folders import TRASH_PREFIX
from rl_core.storage.manifest import digest_bytes, read_manifest
from tasks.lifecycle.crashed_runs import PipelineRunRecord, list_recorded_runs, list_recorded_sweeps
from tasks.pipeline.stage_folder import list_saved_epochs
from tasks.pipeline.stage_result import EPOCH_MODELS, compute_content_digest
from tasks.stage_registry import list_result_stages
from tasks.stages.data_rows import TOKEN_CACHE_FOLDER
from tasks.tracking import ModelVersion, Tracking
from tasks.tracking.journal import build_events_path, read_lines
from tasks.tracking.removal import (
    StoredModel,
    StoredRun,
    list_run_traces,
    list_stored_models,
    list_stored_runs,
    list_unfinished_removals,
)
from tasks.tracking.replay import read_start_record

logger = logging.getLogger(__name__)

STAGE_KEY_PATTERN = re.compile(r"[0-9a-f]{16}")
_VERSION_REFERENCE = re.compile(r"models:/(.+)/(\d+)")
_SHORT_DIGEST_LENGTH = 16  # hexadecimal digits with which run tags name inputs


@dataclass(frozen=True)
class _FinishedStageFolder:
    """Folder of a finished stage."""

    path: Path
    stage: str
    key: str
    # short digests by which later stages name it: of its content and its models
    digests: frozenset[str]
    inputs: frozenset[str] | None  # short digests; None = unknown
    run_id: str


class RetentionGraph:
    """Runs, versions and folders of one pipeline, and which of them are needed."""

    def __init__(self, tracking: Tracking, home: Path) -> None:
        self.tracking, self.home, self.name = tracking, home, home.name
        recorded = list_recorded_runs(home.parent)
        records = [record for record in recorded if record.pipeline == home.name]
        sweeps = list_recorded_sweeps(home)
        self.sweeps = {record.folder for record in sweeps}
        self.records = sorted([*records, *sweeps], key=lambda record: record.started, reverse=True)
        quoted = home.name.replace("'", "")
        stored = list_stored_runs(tracking.store, f"tags.pipeline = '{quoted}'")
        self.runs = {run.run_id: run for run in stored}
        self.trees: dict[str, list[str]] = {}  # root run -> its runs
        for run in self.runs.values():
            self.trees.setdefault(self._find_root_run(run.run_id), []).append(run.run_id)
        registry = tracking.registry
        self.versions: dict[tuple[str, int], ModelVersion] = {
            (name, version.version): version
            for name in registry.list_model_names()
            for version in registry.list_versions(name)
            if version.tags.get("pipeline") == home.name
        }
        self.folders = {folder.path: folder for folder in _list_finished_stages(home, self.runs)}
        self.retained_run_trees: set[str] = set()  # pipeline runs and sweeps retained completely
        self.needed_stage_runs: set[str] = set()  # stage runs that made something needed
        self.needed_versions: set[tuple[str, int]] = set()
        self.needed_folders: set[Path] = set()
        self.live_keys: set[str] = set()  # keys of the newest runs' stages, finished or not

    def mark_newest_runs(self, keep: int) -> None:
        """Mark the newest runs, those that are still running, and those without a record in this folder."""
        recorded_ids = {record.run_id for record in self.records}
        for number, record in enumerate(self.records):
            if number < keep or record.status == "running":
                self.retained_run_trees.add(record.run_id)
                self._mark_recorded_run(record)
        for tree in self.trees:
            if tree not in recorded_ids:
                self.retained_run_trees.add(tree)

    def _mark_recorded_run(self, record: PipelineRunRecord) -> None:
        """Mark the stages that a run used, by its journals, because the store may have been unreachable."""
        folders = [record.folder]
        if record.folder in self.sweeps:
            trials = record.folder.glob("trials/*/runs/*/.tracking/events.jsonl")
            folders = [path.parent.parent for path in trials]
        sources: set[str] = set()
        for folder in folders:
            sources |= _select_cached_keys(_read_journal_tags(folder))
        parents = set(map(str, folders))
        for journal in (self.home / "stages").glob("*/*.tracking"):
            if read_start_record(journal).get("parent_folder") in parents:
                sources.add(journal.name.partition(".")[0])
        self.live_keys |= sources
        self.needed_folders |= self._find_folders(sources)

    def _find_folders(self, sources: set[str]) -> set[Path]:
        """Find the finished stages whose key or run is in `sources`."""
        return {
            path for path, folder in self.folders.items() if {folder.key, folder.run_id} & sources
        }

    def mark_needed_versions(self) -> None:
        """Mark versions with an alias, those that wait for approval, and the previous champion, with their runs."""
        for (name, number), version in self.versions.items():
            if version.aliases or version.tags.get("approval.state") == "waiting":
                self.needed_versions.add((name, number))
            previous = version.tags.get("gate.champion_before", "")
            if "champion" in version.aliases and previous.isdigit():
                self.needed_versions.add((name, int(previous)))
        for key in self.needed_versions & set(self.versions):
            run = self.runs.get(self.versions[key].run_id or "")
            if run is not None:
                self.retained_run_trees.add(self._find_root_run(run.run_id))

    def mark_used_by_other_pipelines(self) -> None:
        """Mark the starting points of other pipelines: versions of this one, and folders that their settings name."""
        condition = "tags.parent_model_version LIKE 'models:/%'"
        for run in list_stored_runs(self.tracking.store, condition):
            if run.run_id not in self.runs:
                self._mark_referenced_version(run.tags["parent_model_version"])
        for record in list_recorded_runs(self.home.parent):
            path = ((record.settings or {}).get("model") or {}).get("path")
            if record.pipeline != self.name and isinstance(path, str):
                parents = Path(path).absolute().parents
                self.needed_folders |= {folder for folder in self.folders if folder in parents}

    def _find_root_run(self, run_id: str) -> str:
        """Return the pipeline run or sweep to which a run belongs."""
        while run_id in self.runs and self.runs[run_id].parent:
            run_id = self.runs[run_id].parent
        return run_id

    @property
    def needed_runs(self) -> set[str]:
        """Pipeline runs that stay in the store, with all their stage runs."""
        roots = {self._find_root_run(run_id) for run_id in self.needed_stage_runs}
        return self.retained_run_trees | roots

    @property
    def retained_runs(self) -> set[str]:
        """Runs whose inputs and outputs all stay."""
        runs = set(self.needed_stage_runs)
        for tree in self.retained_run_trees:
            runs.update(self.trees.get(tree, []))
        return runs

    def mark_ancestors(self) -> None:
        """Mark the ancestors of everything needed, until nothing is added."""
        size = -1
        while size != (new_size := self._count_needed()):
            size = new_size
            for run_id in self.retained_runs:
                self._mark_run_inputs(self.runs[run_id])
            for key in list(self.needed_versions):
                self._mark_version_ancestors(self.versions.get(key))
            for path in list(self.needed_folders):
                self._mark_folder_inputs(self.folders[path])

    def _count_needed(self) -> int:
        return len(self.needed_stage_runs) + len(self.needed_versions) + len(self.needed_folders)

    def _mark_run_inputs(self, run: StoredRun) -> None:
        sources = _select_cached_keys(run.tags) | {run.tags.get("stage_key", ""), run.run_id}
        self.needed_folders |= self._find_folders(sources)
        self._mark_referenced_version(run.tags.get("parent_model_version", ""))
        self.needed_versions |= {
            key for key, version in self.versions.items() if version.run_id == run.run_id
        }

    def _mark_version_ancestors(self, version: ModelVersion | None) -> None:
        if version is None:
            return
        self._mark_run(version.run_id or "")
        parent = version.tags.get("parent_version", "")
        if parent.isdigit():
            self.needed_versions |= {key for key in self.versions if key[1] == int(parent)}

    def _mark_folder_inputs(self, folder: _FinishedStageFolder) -> None:
        self._mark_run(folder.run_id)
        # Result stages read models of other runs, such as the champion of that time; these are not retained.
        if folder.stage in list_result_stages():
            return
        for path, other in self.folders.items():
            if folder.inputs is None or other.digests & folder.inputs:
                self.needed_folders.add(path)

    def _mark_run(self, run_id: str) -> None:
        if run_id in self.runs:
            self.needed_stage_runs.add(run_id)

    def _mark_referenced_version(self, reference: str) -> None:
        match = _VERSION_REFERENCE.fullmatch(reference)
        if match and (match[1], int(match[2])) in self.versions:
            self.needed_versions.add((match[1], int(match[2])))


def _list_finished_stages(home: Path, runs: dict[str, StoredRun]) -> Iterator[_FinishedStageFolder]:
    for path in sorted((home / "stages").glob("*/*")):
        if not STAGE_KEY_PATTERN.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
            continue
        try:
            manifest = read_manifest(path)
            summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
        except (CorruptError, OSError, ValueError) as error:
            logger.warning("%s is skipped: %s", path, error)
            continue
        run_id = str(summary.get("run_id", ""))
        tags = _read_journal_tags(path.with_name(f"{path.name}.tracking"))
        if not tags and run_id in runs:
            tags = runs[run_id].tags
        inputs = frozenset(value for tag, value in tags.items() if tag.startswith("input."))
        digests = [compute_content_digest(manifest), compute_model_digest(manifest)]
        digests += [
            compute_model_digest(manifest, f"{EPOCH_MODELS}/{epoch}/")
            for epoch in list_saved_epochs(path)
        ]
        yield _FinishedStageFolder(
            path=path,
            stage=path.parent.name,
            key=path.name,
            digests=frozenset(digest[:_SHORT_DIGEST_LENGTH] for digest in digests),
            inputs=inputs if tags else None,
            run_id=run_id,
        )


def compute_model_digest(manifest: dict[str, Any], prefix: str = "model/") -> str:
    """Compute `digest_folder` of a model folder within a stage, from the stage's manifest alone."""
    files = {
        name.removeprefix(prefix): entry
        for name, entry in manifest["files"].items()
        if name.startswith(prefix) and name != f"{prefix}manifest.json"
    }
    lines = [f"{name}\0{files[name]['size']}\0{files[name]['sha256']}\n" for name in sorted(files)]
    return digest_bytes("".join(lines).encode())


def _read_journal_tags(journal: Path) -> dict[str, str]:
    tags: dict[str, str] = {}
    for event, _ in read_lines(build_events_path(journal)):
        if event.get("op") == "tags":
            tags |= event.get("tags", {})
    return tags


def _select_cached_keys(tags: dict[str, str]) -> set[str]:
    """Select the keys of the cached stages that a run used."""
    return {value for tag, value in tags.items() if tag.startswith("cached.")}


@dataclass(frozen=True)
class PlannedRemoval:
    """Removal of one item."""

    # run, sweep, stage, unfinished stage, journal, version, download, token ids, set aside
    kind: str
    label: str
    bytes: int  # freed once all items of the plan are removed


@dataclass
class RetentionPlan:
    """Removals, and the bytes that they free."""

    items: list[PlannedRemoval] = field(default_factory=list)
    # in the pipeline's folder; interrupted removals of artifacts
    paths: list[Path] = field(default_factory=list)
    runs: list[StoredRun] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    models: list[StoredModel] = field(default_factory=list)
    traces: dict[str, list[str]] = field(default_factory=dict)  # experiment -> ids
    retained_versions: list[str] = field(default_factory=list)
    num_retained_runs: int = 0
    num_retained_folders: int = 0

    @property
    def bytes(self) -> int:
        """Total number of bytes that the plan frees."""
        return sum(item.bytes for item in self.items)


def plan_retention(tracking: Tracking, home: Path, keep: int) -> RetentionPlan:
    """Plan the removals from one pipeline. The caller holds the folder's lock. Changes nothing.

    Args:
        keep: number of newest runs that stay with everything they used.
    """
    graph = RetentionGraph(tracking, home)
    graph.mark_newest_runs(keep)
    graph.mark_needed_versions()
    graph.mark_used_by_other_pipelines()
    graph.mark_ancestors()
    return _RetentionPlanner(tracking, home, graph).build_plan()


class _RetentionPlanner:
    """Planner that converts unneeded objects to paths, runs and versions, with their sizes."""

    def __init__(self, tracking: Tracking, home: Path, graph: RetentionGraph) -> None:
        self.tracking, self.home, self.graph = tracking, home, graph
        self.sizes = _DiskUsage()
        self._items: list[tuple[str, str, list[Path]]] = []
        self._plan = RetentionPlan()

    def build_plan(self) -> RetentionPlan:
        """Build the complete plan."""
        graph, plan = self.graph, self._plan
        plan.retained_versions = [
            f"{name}/{number}"
            for name, number in sorted(graph.needed_versions & set(graph.versions))
        ]
        plan.num_retained_runs = len(graph.needed_runs & set(graph.trees))
        plan.num_retained_folders = len(graph.needed_folders)
        self._plan_runs()
        self._plan_versions()
        self._plan_stages()
        self._plan_downloads()
        self._plan_token_caches()
        for _, _, paths in self._items:
            for path in paths:
                self.sizes.add_path(path)
        plan.items = [
            PlannedRemoval(kind, label, sum(map(self.sizes.count_freed_bytes, paths)))
            for kind, label, paths in self._items
        ]
        return plan

    def _add_removal(
        self, kind: str, label: str, *paths: Path | None, in_folder: bool = True
    ) -> None:
        """Add an item. `in_folder`: its paths are removed as files; otherwise the store removes them."""
        known = [path for path in paths if path is not None]
        self._items.append((kind, label, known))
        if in_folder:
            self._plan.paths += known

    def _plan_runs(self) -> None:
        graph = self.graph
        records = {record.run_id: record for record in graph.records}
        names = {
            tree: graph.runs[tree].name if tree in graph.runs else tree for tree in graph.trees
        }
        unneeded = [tree for tree in graph.trees if tree not in graph.needed_runs]
        for tree in sorted(unneeded, key=lambda tree: names[tree]):
            runs = [graph.runs[run_id] for run_id in graph.trees[tree]]
            traces = list_run_traces(self.tracking.store, runs)
            for experiment, ids in traces.items():
                self._plan.traces.setdefault(experiment, []).extend(ids)
            self._plan.runs += sorted(runs, key=lambda run: run.parent == "")  # stages first
            num_traces = sum(map(len, traces.values()))
            traces_text = f", {num_traces} traces" if num_traces else ""
            label = f"{names[tree]} ({len(runs)} MLflow runs{traces_text})"
            self._add_removal("run", label, *(run.artifacts for run in runs), in_folder=False)
            if tree in records:
                self._add_record_removal(records[tree])
        for record in graph.records:  # runs that the store never had, or has lost
            if record.run_id not in graph.trees and record.run_id not in graph.needed_runs:
                self._add_record_removal(record)

    def _add_record_removal(self, record: PipelineRunRecord) -> None:
        kind = "sweep" if record.folder in self.graph.sweeps else "journal"
        self._add_removal(kind, record.started, record.folder)

    def _plan_versions(self) -> None:
        """Plan the removal of versions, and of logged models that belong to no retained version."""
        graph = self.graph
        retained_runs = graph.retained_runs | {
            version.run_id
            for key, version in graph.versions.items()
            if key in graph.needed_versions
        }
        experiments = {run.experiment_id for run in graph.runs.values()}
        models: dict[str, list[StoredModel]] = {}  # by run
        for model in list_stored_models(self.tracking.store, experiments):
            if model.run_id in graph.runs and model.run_id not in retained_runs:
                models.setdefault(model.run_id, []).append(model)
                self._plan.models.append(model)
        for (name, number), version in sorted(graph.versions.items()):
            if (name, number) not in graph.needed_versions:
                self._plan.versions.append((name, number))
                folders = [model.folder for model in models.pop(version.run_id or "", [])]
                label = f"{name} version {number}"
                self._add_removal("version", label, *folders, in_folder=False)
        for run_models in models.values():
            for model in run_models:
                self._add_removal("logged model", model.model_id, model.folder, in_folder=False)
        for path in list_unfinished_removals(self.tracking.store, experiments):
            self._add_removal("set aside", path.name, path)

    def _plan_stages(self) -> None:
        graph = self.graph
        live = {graph.runs[run_id].tags.get("stage_key", "") for run_id in graph.retained_runs}
        live |= graph.live_keys | {path.name for path in graph.needed_folders}
        unneeded: dict[tuple[str, str], dict[str, Path]] = {}
        for path in sorted((self.home / "stages").glob("*/*")):
            key, _, suffix = path.name.partition(".")
            if path.is_symlink():
                continue
            if path.name.startswith(TRASH_PREFIX) or suffix.startswith("corrupt-"):
                self._add_removal("set aside", f"{path.parent.name} {path.name}", path)
            elif not STAGE_KEY_PATTERN.fullmatch(key) or key in live:
                continue
            elif path in graph.folders or suffix in ("open", "tracking", "lock"):
                unneeded.setdefault((path.parent.name, key), {})[suffix] = path
        for (stage, key), paths in unneeded.items():
            kind = "unfinished stage" if "open" in paths else "journal"
            if "" in paths:
                kind = "stage"
            self._add_removal(kind, f"{stage} {key}", *paths.values())

    def _plan_downloads(self) -> None:
        """Plan the removal of copies of registered versions that nothing needs."""
        needed = tuple(
            f"{name.replace(' ', '_')}-v{number}-" for name, number in self.graph.needed_versions
        )
        for folder in ("champions", "base_models"):
            for path in sorted((self.home / folder).glob("*-v*-*")):
                if path.is_dir() and not path.name.startswith(needed):
                    self._add_removal("download", path.name, path)

    def _plan_token_caches(self) -> None:
        """Plan the removal of token ids of rows that no retained data stage has written. They can be recomputed."""
        sources = {
            entry["sha256"]
            for path in self.graph.needed_folders
            if path.parent.name == "prepare_data"
            for entry in read_manifest(path)["files"].values()
        }
        cache = self.home / "stages" / "prepare_data" / TOKEN_CACHE_FOLDER
        for path in find_orphaned_entries(cache, sources):
            self._add_removal("token ids", path.name, path)


class _DiskUsage:
    """Bytes that are freed by removing all added paths.

    A file with a hard link elsewhere frees nothing; a file in two items counts once.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], int] = {}
        self._counted: set[tuple[int, int]] = set()

    def add_path(self, path: Path) -> None:
        """Add a path that will be removed."""
        for stat in _stat_files(path):
            node = (stat.st_dev, stat.st_ino)
            self._links[node] = self._links.get(node, 0) + 1

    def count_freed_bytes(self, path: Path) -> int:
        """Count the bytes that a path frees, after all paths were added."""
        total = 0
        for stat in _stat_files(path):
            node = (stat.st_dev, stat.st_ino)
            if self._links[node] >= stat.st_nlink and node not in self._counted:
                self._counted.add(node)
                total += stat.st_size
        return total


def _stat_files(path: Path) -> Iterable[Any]:
    paths = path.rglob("*") if path.is_dir() else [path]
    return [file.lstat() for file in paths if file.is_file() and not file.is_symlink()]
