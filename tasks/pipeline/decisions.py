"""Decisions about stages: why one was run, resumed, or taken from an earlier run.

<output>/<pipeline>/stages/<stage>/decisions.jsonl   a line each, the newest last
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.storage.checked_lines import read_checked, sealed
from rl_core.storage.single_files import write_text_atomic
from tasks.pipeline.conditions import changes, finished_conditions

__all__ = ["StageDecision", "decisions", "note_decision"]

DECISIONS = "decisions.jsonl"
_KEPT = 100  # of a stage


@dataclass(frozen=True)
class StageDecision:
    """Why a stage was run, or was not."""

    time: str
    key: str
    kind: str  # cached, first, changed, resumed, drifted, damaged, fresh
    changes: tuple[str, ...] = ()  # against `compared`
    compared: str = ""  # another key of the stage

    def __str__(self) -> str:
        """The decision as a clause, without its changes."""
        return {
            "cached": "not run again: finished before with the same settings, inputs and code",
            "first": "run for the first time",
            "changed": f"run, since this changed against {self.compared}",
            "resumed": "resumed from its checkpoint",
            "drifted": "resumed from its checkpoint although this changed",
            "damaged": "run again, since the finished folder was damaged (it is set aside)",
            "fresh": "run again, as asked for (--fresh)",
        }.get(self.kind, self.kind)


def note_decision(final: Path, kind: str, conditions: Mapping[str, Any], drift: Sequence[str] = ()) -> StageDecision:
    """Note why a stage is run or taken as it is; of one that is run anew, against the newest finished one."""
    compared, found = "", list(drift)
    if kind == "first":
        earlier = _newest_finished(final)
        if earlier is not None:
            kind, compared = "changed", str(earlier.get("key", ""))
            found = changes(earlier, conditions) or ["nothing that was noted"]
    decision = StageDecision(time.strftime("%Y-%m-%d %H:%M:%S"), final.name, kind, tuple(found), compared)
    lines = [sealed({**vars(kept), "changes": list(kept.changes)}) for kept in (*decisions(final.parent), decision)]
    with contextlib.suppress(OSError):  # for people alone
        write_text_atomic(final.parent / DECISIONS, b"".join(lines[-_KEPT:]).decode())
    return decision


def _newest_finished(final: Path) -> dict[str, Any] | None:
    """Conditions of the stage that was finished last, under another key."""
    folders = [path for path in final.parent.iterdir() if path.is_dir() and "." not in path.name and path != final]
    newest = max(folders, key=lambda path: os.stat(path).st_mtime, default=None)
    return None if newest is None else finished_conditions(newest)


def decisions(folder: Path) -> list[StageDecision]:
    """Decisions about a stage, the oldest first; damaged lines are passed over."""
    found = []
    for line in read_checked(folder / DECISIONS):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row: Any = line.record
            found.append(StageDecision(**{**row, "changes": tuple(row["changes"])}))
    return found
