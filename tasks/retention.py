"""Reachability analysis for garbage collection: a pipeline's runs, versions and finished stages as a graph.

Reachable are the newest runs (a sweep with its trials is one), every run that is open (it waits for approval, or lives
on another machine), every version with an alias, the champion before the present one (`posttrain promote` goes back to
it), and the ancestors of all of these: the version and the model that training began with, the reward model, the data,
and the runs that made them. Edges are the inputs' digests that every stage run is tagged with. If a stage's inputs are
no longer known, everything that might have been one is kept.

The plan behind `posttrain gc`: removals from a pipeline's folder and from the store, and the bytes they free.

Reachability is analysed in tasks/retention.py; whatever is unreachable is removed.
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

logger = logging.getLogger(__name__)

STAGE_KEY_PATTERN = re.compile(r"[0-9a-f]{16}")
_VERSION_REFERENCE = re.compile(r"models:/(.+)/(\d+)")


@dataclass(frozen=True)
class _FinishedStageFolder:
    """A finished stage."""

    path: Path
    stage: str
    key: str
    # first 16 digits of what a later stage may name it by: its content, its models
    digests: frozenset[str]
    inputs: frozenset[str] | None  # first 16 digits; None = not known
    run_id: str


class RetentionGraph:
    """Runs, versions and folders of one pipeline, and which of them are needed."""

    def __init__(self, tracking: Tracking, home: Path) -> None:
        self.tracking, self.home, self.name = tracking, home, home.name
        records = [
            record for record in list_recorded_runs(home.parent) if record.pipeline == home.name
        ]
        sweeps = list_recorded_sweeps(home)
        self.sweeps = {record.folder for record in sweeps}
        self.records = sorted([*records, *sweeps], key=lambda record: record.started, reverse=True)
        quoted = home.name.replace("'", "")
        self.runs = {
            run.run_id: run
            for run in list_stored_runs(tracking.store, f"tags.pipeline = '{quoted}'")
        }
        self.trees: dict[str, list[str]] = {}
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
        # pipeline runs and sweeps of which everything stays
        self.retained_run_trees: set[str] = set()
        self.needed_stage_runs: set[str] = set()  # stage runs that made something needed
        self.needed_versions: set[tuple[str, int]] = set()
        self.needed_folders: set[Path] = set()
        self.live_keys: set[str] = set()  # of stages that the newest runs are at, finished or not

    def mark_newest_runs(self, keep: int) -> None:
        """The newest runs, those that go on elsewhere, and those that this folder knows nothing of."""
        ours = {record.run_id for record in self.records}
        for number, record in enumerate(self.records):
            if number < keep or record.status == "running":
                self.retained_run_trees.add(record.run_id)
                self._mark_recorded_run(record)
        for tree in self.trees:
            if tree not in ours:
                self.retained_run_trees.add(tree)

    def _mark_recorded_run(self, record: PipelineRunRecord) -> None:
        """Follow a run's inputs by its own journals, since the store may have been away."""
        folders = [record.folder]
        if record.folder in self.sweeps:
            folders = [
                path.parent.parent
                for path in record.folder.glob("trials/*/runs/*/.tracking/events.jsonl")
            ]
        sources = {
            value
            for folder in folders
            for tag, value in _read_journal_tags(folder).items()
            if tag.startswith("cached.")
        }
        parents = set(map(str, folders))
        for journal in (self.home / "stages").glob("*/*.tracking"):
            start = next((event for event, _ in read_lines(build_events_path(journal))), {})
            if start.get("parent_folder") in parents:
                sources.add(journal.name.partition(".")[0])
        self.live_keys |= sources
        self.needed_folders |= {
            p for p, folder in self.folders.items() if {folder.key, folder.run_id} & sources
        }

    def mark_needed_versions(self) -> None:
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
                self.retained_run_trees.add(self._find_root_run(run.run_id))

    def mark_used_by_other_pipelines(self) -> None:
        """Mark the starting points of other pipelines: versions of this one, and folders that their settings name."""
        for run in list_stored_runs(
            self.tracking.store, "tags.parent_model_version LIKE 'models:/%'"
        ):
            if run.run_id not in self.runs:
                self._mark_referenced_version(run.tags["parent_model_version"])
        for record in list_recorded_runs(self.home.parent):
            path = ((record.settings or {}).get("model") or {}).get("path")
            if record.pipeline != self.name and isinstance(path, str):
                self.needed_folders |= {
                    folder for folder in self.folders if folder in Path(path).absolute().parents
                }

    def _find_root_run(self, run_id: str) -> str:
        """The pipeline run that a run is of, or the sweep."""
        while run_id in self.runs and self.runs[run_id].parent:
            run_id = self.runs[run_id].parent
        return run_id

    @property
    def needed_runs(self) -> set[str]:
        """Pipeline runs that stay in the store, with all their stage runs."""
        return self.retained_run_trees | {
            self._find_root_run(run_id) for run_id in self.needed_stage_runs
        }

    @property
    def retained_runs(self) -> set[str]:
        """Runs of which everything stays that they used or made."""
        return self.needed_stage_runs | {
            run_id for tree in self.retained_run_trees for run_id in self.trees.get(tree, [])
        }

    def mark_ancestors(self) -> None:
        """Add what the needed came from, until nothing is added."""
        size = -1
        while size != (
            size := len(self.needed_stage_runs)
            + len(self.needed_versions)
            + len(self.needed_folders)
        ):
            for run_id in self.retained_runs:
                self._mark_run_inputs(self.runs[run_id])
            for key in list(self.needed_versions):
                self._mark_version_ancestors(self.versions.get(key))
            for path in list(self.needed_folders):
                self._mark_folder_inputs(self.folders[path])

    def _mark_run_inputs(self, run: StoredRun) -> None:
        sources = {value for tag, value in run.tags.items() if tag.startswith("cached.")}
        sources |= {run.tags.get("stage_key", ""), run.run_id}
        self.needed_folders |= {
            path for path, folder in self.folders.items() if {folder.key, folder.run_id} & sources
        }
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
        # at models of other runs, the champion of that time among them
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
            logger.warning("%s is left alone: %s", path, error)
            continue
        run_id = str(summary.get("run_id", ""))
        tags = _read_journal_tags(path.with_name(f"{path.name}.tracking")) or (
            runs[run_id].tags if run_id in runs else {}
        )
        known = {value for tag, value in tags.items() if tag.startswith("input.")}
        models = [
            compute_model_digest(manifest, f"{EPOCH_MODELS}/{epoch}/")
            for epoch in list_saved_epochs(path)
        ]
        digests = frozenset(
            digest[:16]
            for digest in (
                compute_content_digest(manifest),
                compute_model_digest(manifest),
                *models,
            )
        )
        yield _FinishedStageFolder(
            path, path.parent.name, path.name, digests, frozenset(known) if tags else None, run_id
        )


def compute_model_digest(manifest: dict[str, Any], prefix: str = "model/") -> str:
    """As `digest_folder` of a model folder within, from the manifest alone."""
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


@dataclass(frozen=True)
class PlannedRemoval:
    """One removal."""

    # run, sweep, stage, unfinished stage, journal, version, download, token ids, set aside
    kind: str
    label: str
    bytes: int  # that are free once all items of the plan are gone


@dataclass
class RetentionPlan:
    """Removals, and the bytes that they free."""

    items: list[PlannedRemoval] = field(default_factory=list)
    # of the pipeline's folder; artifacts whose removal was cut off
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
        """Bytes that the plan frees in all."""
        return sum(item.bytes for item in self.items)


def plan_retention(tracking: Tracking, home: Path, keep: int) -> RetentionPlan:
    """Decide for one pipeline's folder; the caller holds its lock. Changes nothing.

    Args:
        keep: newest runs that stay with all they used.
    """
    graph = RetentionGraph(tracking, home)
    graph.mark_newest_runs(keep)
    graph.mark_needed_versions()
    graph.mark_used_by_other_pipelines()
    graph.mark_ancestors()
    return _RetentionPlanner(tracking, home, graph).build_plan()


class _RetentionPlanner:
    """Turns what is not needed into paths, runs and versions, with their sizes."""

    def __init__(self, tracking: Tracking, home: Path, graph: RetentionGraph) -> None:
        self.tracking, self.home, self.graph = tracking, home, graph
        self.sizes = _DiskUsage()
        self._items: list[tuple[str, str, list[Path]]] = []
        self._plan = RetentionPlan()

    def build_plan(self) -> RetentionPlan:
        """The whole plan."""
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
            PlannedRemoval(what, label, sum(map(self.sizes.count_freed_bytes, paths)))
            for what, label, paths in self._items
        ]
        return plan

    def _add_removal(self, what: str, label: str, *paths: Path | None, own: bool = True) -> None:
        found = [path for path in paths if path is not None]
        self._items.append((what, label, found))
        if own:
            self._plan.paths += found

    def _plan_runs(self) -> None:
        graph = self.graph
        records = {record.run_id: record for record in graph.records}
        gone = [tree for tree in graph.trees if tree not in graph.needed_runs]
        for tree in sorted(
            gone, key=lambda tree: graph.runs[tree].name if tree in graph.runs else tree
        ):
            runs = [graph.runs[run_id] for run_id in graph.trees[tree]]
            traces = list_run_traces(self.tracking.store, runs)
            for experiment, ids in traces.items():
                self._plan.traces.setdefault(experiment, []).extend(ids)
            self._plan.runs += sorted(runs, key=lambda run: run.parent == "")  # stages first
            name = graph.runs[tree].name if tree in graph.runs else tree
            count = sum(map(len, traces.values()))
            label = f"{name} ({len(runs)} MLflow runs{f', {count} traces' if count else ''})"
            self._add_removal("run", label, *(run.artifacts for run in runs), own=False)
            if tree in records:
                self._add_removal(
                    self._classify_record(records[tree]),
                    records[tree].started,
                    records[tree].folder,
                )
        for record in graph.records:  # runs that the store never knew, or has lost
            if record.run_id not in graph.trees and record.run_id not in graph.needed_runs:
                self._add_removal(self._classify_record(record), record.started, record.folder)

    def _classify_record(self, record: PipelineRunRecord) -> str:
        return "sweep" if record.folder in self.graph.sweeps else "journal"

    def _plan_versions(self) -> None:
        """Versions, and logged models that belong to none that stays."""
        graph = self.graph
        kept = {
            version.run_id
            for key, version in graph.versions.items()
            if key in graph.needed_versions
        }
        experiments = {run.experiment_id for run in graph.runs.values()}
        models: dict[str, list[StoredModel]] = {}
        for model in list_stored_models(self.tracking.store, experiments):
            if model.run_id in graph.runs and model.run_id not in kept | graph.retained_runs:
                models.setdefault(model.run_id, []).append(model)
        self._plan.models += [model for found in models.values() for model in found]
        for (name, number), version in sorted(graph.versions.items()):
            if (name, number) not in graph.needed_versions:
                self._plan.versions.append((name, number))
                found = models.pop(version.run_id or "", [])
                self._add_removal(
                    "version",
                    f"{name} version {number}",
                    *(model.folder for model in found),
                    own=False,
                )
        for found in models.values():
            for model in found:
                self._add_removal("logged model", model.model_id, model.folder, own=False)
        for path in list_unfinished_removals(self.tracking.store, experiments):
            self._add_removal("set aside", path.name, path)

    def _plan_stages(self) -> None:
        graph = self.graph
        live = {graph.runs[run_id].tags.get("stage_key", "") for run_id in graph.retained_runs}
        live |= graph.live_keys | {path.name for path in graph.needed_folders}
        gone: dict[tuple[str, str], dict[str, Path]] = {}
        for path in sorted((self.home / "stages").glob("*/*")):
            key, _, kind = path.name.partition(".")
            if path.is_symlink():
                continue
            if path.name.startswith(TRASH_PREFIX) or kind.startswith("corrupt-"):
                self._add_removal("set aside", f"{path.parent.name} {path.name}", path)
            elif not STAGE_KEY_PATTERN.fullmatch(key) or key in live:
                continue
            elif path in graph.folders or kind in ("open", "tracking", "lock"):
                gone.setdefault((path.parent.name, key), {})[kind] = path
        for (stage, key), paths in gone.items():
            what = "stage" if "" in paths else "unfinished stage" if "open" in paths else "journal"
            self._add_removal(what, f"{stage} {key}", *paths.values())

    def _plan_downloads(self) -> None:
        """Copies of registered versions of which nothing needs the original."""
        kept = tuple(
            f"{name.replace(' ', '_')}-v{number}-" for name, number in self.graph.needed_versions
        )
        for place in ("champions", "base_models"):
            for path in sorted((self.home / place).glob("*-v*-*")):
                if path.is_dir() and not path.name.startswith(kept or ("\0",)):
                    self._add_removal("download", path.name, path)

    def _plan_token_caches(self) -> None:
        """Token ids of rows that no data stage that stays has written; they can be made again."""
        data = {path for path in self.graph.needed_folders if path.parent.name == "prepare_data"}
        sources = {
            entry["sha256"] for path in data for entry in read_manifest(path)["files"].values()
        }
        for path in find_orphaned_entries(
            self.home / "stages" / "prepare_data" / TOKEN_CACHE_FOLDER, sources
        ):
            self._add_removal("token ids", path.name, path)


class _DiskUsage:
    """Bytes that are free when all paths are gone: a file with a link elsewhere frees none, in two items once."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], int] = {}
        self._counted: set[tuple[int, int]] = set()

    def add_path(self, path: Path) -> None:
        """Note that a path goes."""
        for stat in _stat_files(path):
            node = (stat.st_dev, stat.st_ino)
            self._links[node] = self._links.get(node, 0) + 1

    def count_freed_bytes(self, path: Path) -> int:
        """Bytes that a path frees, once every path was added."""
        total = 0
        for stat in _stat_files(path):
            node = (stat.st_dev, stat.st_ino)
            if self._links[node] >= stat.st_nlink and node not in self._counted:
                self._counted.add(node)
                total += stat.st_size
        return total


def _stat_files(path: Path) -> Iterable[Any]:
    places = path.rglob("*") if path.is_dir() else [path]
    return [place.lstat() for place in places if place.is_file() and not place.is_symlink()]
