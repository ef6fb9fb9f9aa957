"""Folder of one stage: reopened, sealed under its final name with its metrics and a manifest, or discarded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.storage.checked_lines import copy_intact, read_checked
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, remove_folder
from rl_core.storage.folders import seal_folder
from rl_core.storage.single_files import make_folder
from tasks.config import resolve
from tasks.pipeline.conditions import CONDITIONS, read_conditions
from tasks.pipeline.drift import ASIDE
from tasks.pipeline.result import (
    EPOCH_MODELS,
    FAILED_EPISODES,
    HISTORY_LINES,
    RECENT_ROLLOUTS,
    SCHEDULE,
    StageResult,
    content_digest,
    journal_of,
)
from tasks.pipeline.stage_log import copy_log
from tasks.pipeline.threads import THREADS
from tasks.processes.launch import WORKERS

__all__ = ["REWARD_RECORD", "KeyedStage", "damaged_lines", "discard", "keep_checkpoints", "kept_epochs", "seal"]

REWARD_RECORD = "rewards.jsonl"  # grows with training, so an interrupted run's is kept


@dataclass(frozen=True)
class KeyedStage:
    """One stage that is asked for, with its key."""

    name: str
    label: str
    settings: Any
    inputs: Mapping[str, StageResult | Path | str]
    digests: dict[str, str]  # of the inputs
    key: str
    final: Path  # the folder when it has finished
    conditions: dict[str, Any]  # what the key is made of, for people (tasks/pipeline/conditions.py)

    @property
    def folder(self) -> Path:
        """The folder while the stage runs."""
        return self.final.with_name(f"{self.key}.open")

    @property
    def journal(self) -> Path:
        """Folder of the stage's run: metrics and their delivery."""
        return journal_of(self.final)


def seal(stage: KeyedStage) -> str:
    """Move the folder to its final name, with its metrics and a manifest; returns the digest of its content.

    Damaged lines of what grew with the run are not sealed in; `damaged_lines` of the summary counts them.
    """
    for path in _grown(stage):
        copy_intact(path, stage.folder / path.name)
    copy_log(stage.journal, stage.folder)
    fault("stage.copied")
    shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)
    (stage.folder / THREADS).unlink(missing_ok=True)  # in summary.json by now
    conditions = read_conditions(stage.folder) or stage.conditions
    for name in (CONDITIONS, ASIDE):
        (stage.folder / name).unlink(missing_ok=True)
    facts = {
        "stage": stage.name, "key": stage.key, "settings": resolve(stage.settings), "conditions": conditions
    }  # fmt: skip
    manifest = seal_folder(stage.folder, stage.final, extra=facts)
    fault("stage.sealed")
    return content_digest(manifest)


def _grown(stage: KeyedStage) -> list[Path]:
    """Files of lines that were written all along the run, and may have been damaged since."""
    names = REWARD_RECORD, FAILED_EPISODES, HISTORY_LINES
    paths = [stage.journal / "metrics.jsonl", *(stage.folder / name for name in names)]
    return [path for path in paths if path.is_file()]


def damaged_lines(stage: KeyedStage) -> dict[str, int]:
    """Number of damaged lines by file, where there are any."""
    counts = {path.name: sum(not line.is_intact for line in read_checked(path)) for path in _grown(stage)}
    return {name: count for name, count in counts.items() if count}


def kept_epochs(folder: Path) -> list[int]:
    """Epochs whose models lie in a stage's folder, ascending."""
    paths = (folder / EPOCH_MODELS).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def keep_checkpoints(folder: Path) -> None:
    """Keep the checkpoints of an interrupted run and what grows with them; everything else is written again."""
    make_folder(folder)
    kept = {"checkpoints", FAILED_EPISODES, REWARD_RECORD, WORKERS}  # recover_events reads and removes the latter
    if (folder / "checkpoints").is_dir():
        kept |= {THREADS, CONDITIONS, ASIDE, EPOCH_MODELS, HISTORY_LINES}
        kept |= {RECENT_ROLLOUTS}  # nothing may be played any more
        kept |= {SCHEDULE}  # a replay begins with the first iteration
        clear_leftovers(folder / EPOCH_MODELS, locked=True)
    for path in folder.iterdir():
        if path.name in kept:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def discard(final: Path) -> None:
    """Remove a finished or open folder and its journal; renamed first, so that no reader sees half of it."""
    for ending in ("", ".open", ".tracking"):
        remove_folder(final.with_name(f"{final.name}{ending}"))
        fault("stage.discarded")
