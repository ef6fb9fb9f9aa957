"""Unfinished stages whose conditions changed: refused with the differences, resumed all the same, or begun anew.

    stages/<stage>/<key>.open/aside.json   its checkpoints were passed over on purpose; the old conditions resume them

A finished stage whose key changed runs anew, as in any DAG. Only what would lose a checkpoint is asked about.
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
from tasks.config import PipelineSettings
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_fingerprint import (
    FINGERPRINT_FILE,
    build_stage_fingerprint,
    compare_fingerprints,
    read_finished_fingerprint,
    read_stage_fingerprint,
)
from tasks.pipeline.stage_key import collect_stage_key

if TYPE_CHECKING:
    from rl_core.storage.checkpoint import NewestCheckpoint


logger = logging.getLogger(__name__)

ARCHIVED_FILE = "aside.json"
CHECKPOINTS_FOLDER = "checkpoints"

REMEDY = """\
  --allow-drift  resumes from the checkpoint under the new conditions
  --fresh        begins anew, finished stages too (`posttrain stage {stage} --fresh`: this one alone)
Under the old conditions the same command resumes as ever."""


@dataclass(frozen=True)
class UnfinishedStage:
    """A stage that was begun and not finished, with checkpoints."""

    folder: Path  # <key>.open
    fingerprint: dict[str, Any]  # {} = not noted: by an older version of posttrain
    iteration: int | None  # of the newest checkpoint; None = not known
    time: float  # of it

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
    """Unfinished stages with checkpoints in a stage's folder, the newest first; without those that were set aside."""
    found = []
    for path in folder.glob("*.open"):
        checkpoint = _find_newest_checkpoint(path)
        if checkpoint is None or ((path / ARCHIVED_FILE).exists() and not with_archived):
            continue
        found.append(
            UnfinishedStage(
                path, read_stage_fingerprint(path) or {}, checkpoint.iteration, checkpoint.time
            )
        )
    return sorted(found, key=lambda stage: stage.time, reverse=True)


def _find_newest_checkpoint(path: Path) -> NewestCheckpoint | None:
    """The newest checkpoint of an unfinished stage's folder."""
    if not (path / CHECKPOINTS_FOLDER).is_dir():
        return None
    from rl_core.storage.checkpoint import CheckpointStore  # here, as it loads torch

    return CheckpointStore(path / CHECKPOINTS_FOLDER).describe_newest()


# ------------------------------------------------------------------------------------------- before a pipeline begins


def build_current_fingerprint(settings: PipelineSettings, stage: str) -> dict[str, Any]:
    """Conditions of a stage as the settings and the code are now, without its inputs."""
    return build_stage_fingerprint(
        stage, collect_stage_key(stage, getattr(settings.stages, stage), settings, {}), {}, {}
    )


def check_unfinished_stages(
    stages_folder: Path, settings: PipelineSettings, options: RunOptions
) -> None:
    """Check, before anything is run, that settings and code are those of the stages that have only checkpoints.

    Inputs are not known yet; `adopt` compares them. Raises: ResumeRefused with every difference.
    """
    if options.on_drift != "refuse":
        return
    for stage in _list_requested_stages(settings, options):
        begun = list_unfinished_stages(stages_folder / stage)
        if not begun or (options.fresh and options.only in (None, stage)):
            continue
        now = build_current_fingerprint(settings, stage)
        if any(
            not _find_differences(stages_folder, settings, known, now)
            for known in _list_known_fingerprints(stages_folder / stage)
        ):
            continue  # finished under these conditions, or the very checkpoint to resume from
        raise _build_refusal(
            begun[0], _find_differences(stages_folder, settings, begun[0].fingerprint, now)
        )


def _list_requested_stages(settings: PipelineSettings, options: RunOptions) -> list[str]:
    """Training stages that the run may come to."""
    order = stage_registry.list_stage_names()
    last = order.index(options.only) if options.only in order else len(order)
    active = [
        name for name in order[: last + 1] if getattr(settings.stages, name, None) is not None
    ]
    return [name for name in active if name in stage_registry.list_training_stages()]


def _list_known_fingerprints(folder: Path) -> list[dict[str, Any]]:
    """Conditions of all that is there of a stage, finished or not, the newest first."""
    if not folder.is_dir():
        return []
    begun = [
        stage.fingerprint
        for stage in list_unfinished_stages(folder, with_archived=True)
        if stage.fingerprint
    ]
    finished = [path for path in folder.iterdir() if path.is_dir() and "." not in path.name]
    finished.sort(key=_read_change_time, reverse=True)  # of those of one second
    known = [*begun, *filter(None, map(read_finished_fingerprint, finished))]
    return sorted(known, key=lambda conditions: str(conditions.get("time", "")), reverse=True)


def _read_change_time(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # a run has just set it aside
        return 0


def _find_differences(
    stages_folder: Path, settings: PipelineSettings, old: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Differences of a stage's conditions from the present ones, in itself and in the stages before it."""
    found = _list_changes(old, now, with_inputs=False)
    for name, key in (old.get("before") or {}).items():
        earlier = read_finished_fingerprint(stages_folder / name / key)
        if earlier is not None and getattr(settings.stages, name, None) is not None:
            found += compare_fingerprints(
                earlier, build_current_fingerprint(settings, name), with_inputs=False
            )
    return found


def _list_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], *, with_inputs: bool = True
) -> list[str]:
    if not old:
        return [
            "posttrain itself: the checkpoint was written by a version that did not note its conditions"
        ]
    return compare_fingerprints(old, new, with_inputs=with_inputs)


def _build_refusal(stage: UnfinishedStage, found: Sequence[str]) -> ResumeRefused:
    lines = "\n  ".join(dict.fromkeys(found))
    is_upgrade = any(line.startswith("posttrain") for line in found)
    note = "\nan upgrade of posttrain counts as a change" if is_upgrade else ""
    return ResumeRefused(
        f"stage '{stage.stage}' is not finished, and its checkpoint ({stage}) was made under other conditions:\n"
        f"  {lines}{note}\n{REMEDY.format(stage=stage.stage)}"
    )


# -------------------------------------------------------------------------------------------------- when a stage begins


def resolve_checkpoints(final: Path, conditions: dict[str, Any], options: RunOptions) -> list[str]:
    """Settle what becomes of other checkpoints of a stage that is about to begin under these conditions.

    Args:
        final: the folder that the stage will have when it is finished; its own lock is held.
    Returns: differences under which the stage resumes, now or already since an earlier permission; [] = none.
    Raises: ResumeRefused where checkpoints of other conditions would be passed over without a word.
    """
    own = final.with_name(f"{final.name}.open")
    if _find_newest_checkpoint(own) is not None:
        (own / ARCHIVED_FILE).unlink(missing_ok=True)
        kept = (read_stage_fingerprint(own) or {}).get("drift") or []
        return [str(line) for line in kept]
    if options.on_drift == "beside":
        return []
    others = [stage for stage in list_unfinished_stages(final.parent) if stage.key != final.name]
    if not others:
        return []
    newest = others[0]
    found = _list_changes(newest.fingerprint, conditions)
    if options.on_drift == "anew":
        for stage in others:
            _archive_stage(stage, final.name)
        logger.warning(
            "%s begins anew: the checkpoint (%s) was made under other conditions, and is kept in %s:\n  %s",
            newest.stage,
            newest,
            newest.folder,
            "\n  ".join(found),
        )
        return []
    if options.on_drift == "refuse" and found:
        raise _build_refusal(newest, found)
    return _move_checkpoints(newest, final, conditions, found)


def _archive_stage(stage: UnfinishedStage, instead: str) -> None:
    _write_archived_marker(stage.folder, instead)


def _write_archived_marker(folder: Path, instead: str) -> None:
    write_json_atomic(
        folder / ARCHIVED_FILE, {"for": instead, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    )


def reserve_checkpoints(final: Path) -> None:
    """Note that a stage which begins is one of several side by side: its checkpoints are for its own key alone."""
    _write_archived_marker(final.with_name(f"{final.name}.open"), "a sweep")


def _move_checkpoints(
    stage: UnfinishedStage, final: Path, conditions: dict[str, Any], found: list[str]
) -> list[str]:
    """Make the checkpoints of a stage, and its run, those of this key."""
    drift = [*(stage.fingerprint.get("drift") or []), *found]
    own = final.with_name(f"{final.name}.open")
    with FolderLock(stage.folder.with_name(f"{stage.key}.lock")):
        # First, so that a kill between this and the renaming leaves a stage that needs no second permission.
        write_json_atomic(stage.folder / FINGERPRINT_FILE, {**conditions, "drift": drift})
        remove_folder(own)  # left without a checkpoint
        journal, mine = (final.with_name(f"{key}.tracking") for key in (stage.key, final.name))
        if journal.exists() and not mine.exists():
            move_folder(journal, mine)
        move_folder(stage.folder, own)
    if found:
        logger.warning(
            "%s resumes from its checkpoint (%s) although these changed:\n  %s",
            stage.stage,
            stage,
            "\n  ".join(found),
        )
    return drift


def archive_checkpoints(final: Path) -> None:
    """Pass over the checkpoints of other conditions from now on: the user wants the stage anew."""
    for stage in list_unfinished_stages(final.parent):
        if stage.key != final.name:
            _archive_stage(stage, final.name)


def list_finished_stages(stages_folder: Path, settings: PipelineSettings) -> list[str]:
    """The first stages, in their order, that are finished under the present settings and code, each after those before.

    A run takes these as they are unless content of their inputs, such as data files, has changed.
    """
    found: dict[str, list[str]] = {}  # stages and their keys
    for name in settings.stages.active:
        folder, now = stages_folder / name, build_current_fingerprint(settings, name)
        paths = (
            [path for path in folder.iterdir() if path.is_dir() and "." not in path.name]
            if folder.is_dir()
            else []
        )
        done = {
            path.name: conditions
            for path in paths
            if (conditions := read_finished_fingerprint(path))
        }
        done = {
            key: conditions
            for key, conditions in done.items()
            if _has_same_predecessors(conditions, found)
        }
        keys = [
            key
            for key, conditions in done.items()
            if not compare_fingerprints(conditions, now, with_inputs=False)
        ]
        if not keys:
            break
        found[name] = keys
    return list(found)


def _has_same_predecessors(
    conditions: Mapping[str, Any], found: Mapping[str, Sequence[str]]
) -> bool:
    """True = the run that finished the stage had exactly these before it; prepare_data may be made unasked."""
    before = conditions.get("before") or {}
    is_known = before.keys() <= {*found, "prepare_data"}
    return is_known and all(before.get(name) in keys for name, keys in found.items())


def read_newest_fingerprint(folder: Path) -> dict[str, Any] | None:
    """Conditions of what a stage's folder holds of the newest run, finished or not; None = nothing is known."""
    return next(iter(_list_known_fingerprints(folder)), None)


def find_current_differences(folder: Path, settings: PipelineSettings) -> list[str]:
    """Differences of a stage's present conditions, but for its inputs, from the nearest known ones, finished or not."""
    now = build_current_fingerprint(settings, folder.name)
    return min(
        (
            compare_fingerprints(known, now, with_inputs=False)
            for known in _list_known_fingerprints(folder)
        ),
        key=len,
        default=[],
    )
