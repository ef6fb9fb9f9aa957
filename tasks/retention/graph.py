"""Reachability analysis for garbage collection: a pipeline's runs, versions and finished stages as a graph.

Reachable are the newest runs (a sweep with its trials is one), every run that is open (it waits for approval, or lives
on another machine), every version with an alias, the champion before the present one (`posttrain promote` goes back to
it), and the ancestors of all of these: the version and the model that training began with, the reward model, the data,
and the runs that made them. Edges are the inputs' digests that every stage run is tagged with. If a stage's inputs are
no longer known, everything that might have been one is kept.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptError
from rl_core.storage.manifest import digest_bytes, read_manifest
from tasks.lifecycle.dead_runs import RunRecord, recorded_runs, recorded_sweeps
from tasks.pipeline.result import EPOCH_MODELS, content_digest
from tasks.pipeline.stage_folder import kept_epochs
from tasks.stage_registry import result_stages
from tasks.tracking import ModelVersion, Tracking
from tasks.tracking.journal import events_path, read_lines
from tasks.tracking.removal import StoredRun, stored_runs

__all__ = ["KEY", "RetentionGraph", "model_digest"]

logger = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{16}")
_VERSION = re.compile(r"models:/(.+)/(\d+)")


@dataclass(frozen=True)
class _Folder:
    """A finished stage."""

    path: Path
    stage: str
    key: str
    digests: frozenset[str]  # first 16 digits of what a later stage may name it by: its content, its models
    inputs: frozenset[str] | None  # first 16 digits; None = not known
    run_id: str


class RetentionGraph:
    """Runs, versions and folders of one pipeline, and which of them are needed."""

    def __init__(self, tracking: Tracking, home: Path) -> None:
        self.tracking, self.home, self.name = tracking, home, home.name
        records = [record for record in recorded_runs(home.parent) if record.pipeline == home.name]
        sweeps = recorded_sweeps(home)
        self.sweeps = {record.folder for record in sweeps}
        self.records = sorted([*records, *sweeps], key=lambda record: record.started, reverse=True)
        quoted = home.name.replace("'", "")
        self.runs = {run.run_id: run for run in stored_runs(tracking.store, f"tags.pipeline = '{quoted}'")}
        self.trees: dict[str, list[str]] = {}
        for run in self.runs.values():
            self.trees.setdefault(self._root(run.run_id), []).append(run.run_id)
        registry = tracking.registry
        self.versions: dict[tuple[str, int], ModelVersion] = {
            (name, version.version): version for name in registry.names() for version in registry.versions(name)
            if version.tags.get("pipeline") == home.name
        }  # fmt: skip
        self.folders = {folder.path: folder for folder in _finished(home, self.runs)}
        self.whole: set[str] = set()  # pipeline runs and sweeps of which everything stays
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
        """Follow a run's inputs by its own journals, since the store may have been away."""
        folders = [record.folder]
        if record.folder in self.sweeps:
            folders = [path.parent.parent for path in record.folder.glob("trials/*/runs/*/.tracking/events.jsonl")]
        sources = {value for folder in folders for tag, value in _tags(folder).items() if tag.startswith("cached.")}
        parents = set(map(str, folders))
        for journal in (self.home / "stages").glob("*/*.tracking"):
            start = next((event for event, _ in read_lines(events_path(journal))), {})
            if start.get("parent_folder") in parents:
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
                self.whole.add(self._root(run.run_id))

    def need_other_pipelines(self) -> None:
        """Mark the starting points of other pipelines: versions of this one, and folders that their settings name."""
        for run in stored_runs(self.tracking.store, "tags.parent_model_version LIKE 'models:/%'"):
            if run.run_id not in self.runs:
                self._need_reference(run.tags["parent_model_version"])
        for record in recorded_runs(self.home.parent):
            path = ((record.settings or {}).get("model") or {}).get("path")
            if record.pipeline != self.name and isinstance(path, str):
                self.needed_folders |= {folder for folder in self.folders if folder in Path(path).absolute().parents}

    def _root(self, run_id: str) -> str:
        """The pipeline run that a run is of, or the sweep."""
        while run_id in self.runs and self.runs[run_id].parent:
            run_id = self.runs[run_id].parent
        return run_id

    # -- where it leads -----------------------------------------------------------------------------------------

    @property
    def needed_runs(self) -> set[str]:
        """Pipeline runs that stay in the store, with all their stage runs."""
        return self.whole | {self._root(run_id) for run_id in self.lineage}

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
        if folder.stage in result_stages():  # at models of other runs, the champion of that time among them
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
        if not KEY.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
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
        models = [model_digest(manifest, f"{EPOCH_MODELS}/{epoch}/") for epoch in kept_epochs(path)]
        digests = frozenset(digest[:16] for digest in (content_digest(manifest), model_digest(manifest), *models))
        yield _Folder(path, path.parent.name, path.name, digests, frozenset(known) if tags else None, run_id)


def model_digest(manifest: dict[str, Any], place: str = "model/") -> str:
    """As `digest_folder` of a model folder within, from the manifest alone."""
    files = {
        name.removeprefix(place): entry
        for name, entry in manifest["files"].items()
        if name.startswith(place) and name != f"{place}manifest.json"
    }
    lines = [f"{name}\0{files[name]['size']}\0{files[name]['sha256']}\n" for name in sorted(files)]
    return digest_bytes("".join(lines).encode())


def _tags(journal: Path) -> dict[str, str]:
    tags: dict[str, str] = {}
    for event, _ in read_lines(events_path(journal)):
        if event.get("op") == "tags":
            tags |= event.get("tags", {})
    return tags
