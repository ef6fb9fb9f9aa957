"""Unfinished stages whose conditions changed: refused with the differences, resumed anyway, or started over.

    stages/<stage>/<key>.open/aside.json   its checkpoints were archived on purpose; the old conditions resume them

A finished stage whose key changed runs again, as in any DAG. The user is asked only where a checkpoint would be lost.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ResumeRefused
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.folders import move_folder, remove_folder
from rl_core.storage.locks import FolderLock
from tasks import stage_registry
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_fingerprint import (
    FINGERPRINT_FILE,
    build_stage_fingerprint,
    compare_fingerprints,
    list_side_models,
    read_finished_fingerprint,
    read_stage_fingerprint,
)
from tasks.pipeline.stage_key import StageKeys

if TYPE_CHECKING:
    from rl_core.storage.checkpoint import NewestCheckpoint

logger = logging.getLogger(__name__)

ARCHIVED_FILE = "aside.json"
CHECKPOINTS_FOLDER = "checkpoints"

REMEDY = """\
  --allow-drift  resumes from the checkpoint under the new conditions
  --fresh        starts over, including finished stages (`posttrain run CONFIG --only {stage} --fresh`: only this one)
Under the old conditions the same command resumes as usual."""


@dataclass(frozen=True)
class UnfinishedStage:
    """A stage that was started but not finished, and has checkpoints."""

    folder: Path  # <key>.open
    fingerprint: dict[str, Any]  # {} = not recorded, by an older version of posttrain
    iteration: int | None  # of the newest checkpoint; None = unknown
    time: float  # of the newest checkpoint

    @property
    def key(self) -> str:
        """The stage's key."""
        return self.folder.name.removesuffix(".open")

    @property
    def stage(self) -> str:
        """The stage's name."""
        return self.folder.parent.name

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"iteration {self.iteration}, {when}" if self.iteration is not None else when


def list_unfinished_stages(folder: Path, *, with_archived: bool = False) -> list[UnfinishedStage]:
    """List the unfinished stages with checkpoints in a folder, newest first; leave archived ones out by default."""
    stages = []
    for path in folder.glob("*.open"):
        checkpoint = _find_newest_checkpoint(path)
        if checkpoint is None or ((path / ARCHIVED_FILE).exists() and not with_archived):
            continue
        stages.append(
            UnfinishedStage(
                path, read_stage_fingerprint(path) or {}, checkpoint.iteration, checkpoint.time
            )
        )
    return sorted(stages, key=lambda stage: stage.time, reverse=True)


def _find_newest_checkpoint(path: Path) -> NewestCheckpoint | None:
    """Find the newest checkpoint in an unfinished stage's folder."""
    if not (path / CHECKPOINTS_FOLDER).is_dir():
        return None
    from rl_core.storage.checkpoint import CheckpointStore  # imported here because it loads torch

    return CheckpointStore(path / CHECKPOINTS_FOLDER).describe_newest()


def _build_current_fingerprint(keys: StageKeys, stage: str) -> dict[str, Any]:
    """Build the fingerprint of a stage under the current settings and code, without its inputs."""
    return build_stage_fingerprint(stage, keys.collect_key(stage), {}, {})


def check_unfinished_stages(stages_folder: Path, keys: StageKeys, options: RunOptions) -> None:
    """Check, before anything runs, that settings and code match those of the stages that only have checkpoints.

    Inputs are not known yet; `resolve_checkpoints` compares them. Raises: ResumeRefused with every difference.
    """
    if options.on_drift != "refuse":
        return
    for stage in _list_requested_stages(keys, options):
        unfinished = list_unfinished_stages(stages_folder / stage)
        if not unfinished or (options.fresh and options.only in (None, stage)):
            continue
        current = _build_current_fingerprint(keys, stage)
        if any(
            not _find_differences(stages_folder, keys, known, current)
            for known in _list_known_fingerprints(stages_folder / stage)
        ):
            continue  # finished under these conditions, or the very checkpoint to resume from
        newest = unfinished[0]
        differences = _find_differences(stages_folder, keys, newest.fingerprint, current)
        raise _build_refusal(newest, differences)


def _list_requested_stages(keys: StageKeys, options: RunOptions) -> list[str]:
    """List the training stages that the run may reach."""
    order = stage_registry.list_stage_names()
    last = order.index(options.only) if options.only in order else len(order)
    active = [
        name for name in order[: last + 1] if getattr(keys.pipeline.stages, name, None) is not None
    ]
    return [name for name in active if name in stage_registry.list_training_stages()]


def _list_known_fingerprints(folder: Path) -> list[dict[str, Any]]:
    """List the fingerprints of everything in a stage's folder, finished or not, newest first."""
    if not folder.is_dir():
        return []
    unfinished = [
        stage.fingerprint
        for stage in list_unfinished_stages(folder, with_archived=True)
        if stage.fingerprint
    ]
    finished = [path for path in folder.iterdir() if path.is_dir() and "." not in path.name]
    finished.sort(key=_read_change_time, reverse=True)  # decides among those of the same second
    known = [*unfinished, *filter(None, map(read_finished_fingerprint, finished))]
    return sorted(known, key=lambda fingerprint: str(fingerprint.get("time", "")), reverse=True)


def _read_change_time(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # another run has just moved it aside
        return 0


def _find_differences(
    stages_folder: Path,
    keys: StageKeys,
    old: Mapping[str, Any],
    current: Mapping[str, Any],
) -> list[str]:
    """List how a stage's fingerprint differs from the current one, in itself and in the stages before it."""
    differences = _list_changes(old, current, with_inputs=False)
    for name, key in (old.get("before") or {}).items():
        earlier = read_finished_fingerprint(stages_folder / name / key)
        if earlier is not None and getattr(keys.pipeline.stages, name, None) is not None:
            differences += compare_fingerprints(
                earlier, _build_current_fingerprint(keys, name), with_inputs=False
            )
    return differences


def _list_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, with_inputs: bool = True
) -> list[str]:
    """List the differences of two fingerprints, or that the old one was not recorded."""
    if not old:
        return [
            "posttrain itself: the checkpoint was written by a version that did not record its conditions"
        ]
    return compare_fingerprints(old, new, with_inputs=with_inputs)


def _build_refusal(stage: UnfinishedStage, differences: Sequence[str]) -> ResumeRefused:
    lines = "\n  ".join(dict.fromkeys(differences))
    is_upgrade = any(line.startswith("posttrain") for line in differences)
    note = "\nan upgrade of posttrain counts as a change" if is_upgrade else ""
    return ResumeRefused(
        f"stage '{stage.stage}' is not finished, and its checkpoint ({stage}) was made under other conditions:\n"
        f"  {lines}{note}\n{REMEDY.format(stage=stage.stage)}"
    )


def resolve_checkpoints(final: Path, fingerprint: dict[str, Any], options: RunOptions) -> list[str]:
    """Decide what happens to other checkpoints of a stage that is about to start under these conditions.

    Args:
        final: the folder of the stage when it is finished; its lock is held.
    Returns: differences under which the stage resumes, permitted now or earlier; [] = none.
    Raises: ResumeRefused if checkpoints of other conditions would be ignored silently.
    """
    open_folder = final.with_name(f"{final.name}.open")
    if _find_newest_checkpoint(open_folder) is not None:
        (open_folder / ARCHIVED_FILE).unlink(missing_ok=True)
        earlier_drift = (read_stage_fingerprint(open_folder) or {}).get("drift") or []
        return [str(line) for line in earlier_drift]
    if options.on_drift == "beside":
        return []
    others = [stage for stage in list_unfinished_stages(final.parent) if stage.key != final.name]
    if not others:
        return []
    newest = others[0]
    differences = _list_changes(newest.fingerprint, fingerprint)
    if options.on_drift == "anew":
        for stage in others:
            _write_archived_marker(stage.folder, final.name)
        logger.warning(
            "%s starts over: the checkpoint (%s) was made under other conditions and stays in %s:\n  %s",
            newest.stage,
            newest,
            newest.folder,
            "\n  ".join(differences),
        )
        return []
    if options.on_drift == "refuse" and differences:
        raise _build_refusal(newest, differences)
    return _move_checkpoints(newest, final, fingerprint, differences)


def _write_archived_marker(folder: Path, replacement: str) -> None:
    """Mark the checkpoints in an open folder as not to be resumed by others.

    Args:
        replacement: key of the stage that starts instead, for readers of the file.
    """
    write_json_atomic(
        folder / ARCHIVED_FILE, {"for": replacement, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    )


def reserve_checkpoints(final: Path) -> None:
    """Mark a starting stage as one of several that run side by side: only its own key may resume its checkpoints."""
    _write_archived_marker(final.with_name(f"{final.name}.open"), "a sweep")


def _move_checkpoints(
    stage: UnfinishedStage, final: Path, fingerprint: dict[str, Any], differences: list[str]
) -> list[str]:
    """Move the checkpoints of a stage, and its tracking journal, to this key. Return the differences so far."""
    drift = [*(stage.fingerprint.get("drift") or []), *differences]
    open_folder = final.with_name(f"{final.name}.open")
    with FolderLock(stage.folder.with_name(f"{stage.key}.lock")):
        # First, so that a kill before the renaming leaves a stage that needs no second permission.
        write_json_atomic(stage.folder / FINGERPRINT_FILE, {**fingerprint, "drift": drift})
        remove_folder(open_folder)  # it has no checkpoint
        old_journal = final.with_name(f"{stage.key}.tracking")
        new_journal = final.with_name(f"{final.name}.tracking")
        if old_journal.exists() and not new_journal.exists():
            move_folder(old_journal, new_journal)
        move_folder(stage.folder, open_folder)
    if differences:
        logger.warning(
            "%s resumes from its checkpoint (%s) although these changed:\n  %s",
            stage.stage,
            stage,
            "\n  ".join(differences),
        )
    return drift


def archive_checkpoints(final: Path) -> None:
    """Archive the checkpoints of other conditions: the user wants the stage from the beginning."""
    for stage in list_unfinished_stages(final.parent):
        if stage.key != final.name:
            _write_archived_marker(stage.folder, final.name)


def list_finished_stages(stages_folder: Path, keys: StageKeys) -> list[str]:
    """List the leading stages, in order, that are finished under the current settings and code.

    Each was finished after those before it. A run reuses them unless the content of their inputs, such as data files,
    has changed.
    """
    keys_by_stage: dict[str, list[str]] = {}
    for name in keys.pipeline.stages.active:
        folder = stages_folder / name
        current = _build_current_fingerprint(keys, name)
        paths = list(folder.iterdir()) if folder.is_dir() else []
        fingerprints = {
            path.name: fingerprint
            for path in paths
            if path.is_dir()
            and "." not in path.name
            and (fingerprint := read_finished_fingerprint(path))
        }
        trains = any(stage in keys_by_stage for stage in stage_registry.list_policy_stages())
        matching_keys = [
            key
            for key, fingerprint in fingerprints.items()
            if not (trains and list_side_models(fingerprint))
            and _has_same_predecessors(fingerprint, keys_by_stage)
            and not compare_fingerprints(fingerprint, current, with_inputs=False)
        ]
        if not matching_keys:
            break
        keys_by_stage[name] = matching_keys
    return list(keys_by_stage)


def _has_same_predecessors(
    fingerprint: Mapping[str, Any], keys_by_stage: Mapping[str, Sequence[str]]
) -> bool:
    """Return whether the run that finished the stage had exactly these stages before it.

    prepare_data may be among them although the settings do not name it.
    """
    before = fingerprint.get("before") or {}
    is_known = before.keys() <= {*keys_by_stage, "prepare_data"}
    return is_known and all(before.get(name) in keys for name, keys in keys_by_stage.items())


def read_newest_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Read the newest fingerprint in a stage's folder, finished or not; None = nothing is known."""
    return next(iter(_list_known_fingerprints(folder)), None)


def find_current_differences(folder: Path, keys: StageKeys) -> list[str]:
    """List how a stage's current conditions, without inputs, differ from the nearest known ones, finished or not."""
    current = _build_current_fingerprint(keys, folder.name)
    return min(
        (
            compare_fingerprints(known, current, with_inputs=False)
            for known in _list_known_fingerprints(folder)
        ),
        key=len,
        default=[],
    )
