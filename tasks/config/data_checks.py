"""Rows of the data files that a configuration names, checked before a run of theirs is made."""

from __future__ import annotations

import functools
from pathlib import Path

from rl_core.data.files import data_files
from rl_core.data.records import check_first_rows
from tasks.config.settings import PipelineSettings

__all__ = ["FIRST_ROWS", "checked_files", "refuse_bad_rows"]

FIRST_ROWS = 1000
WHOLE_BYTES = 64 * 2**20  # a file up to here is read whole, which takes seconds


def checked_files(settings: PipelineSettings) -> list[str]:
    """One line per data file, after a check of its first FIRST_ROWS rows, for people.

    Raises: DataError for bad rows among them, which a run would refuse as well.
    """
    lines = []
    for kind, path in _files(settings):
        rows = _check(settings, kind, path, FIRST_ROWS)
        checked = f"first {rows} rows" if rows == FIRST_ROWS else f"all {rows} rows"
        lines.append(f"{path} ({kind}, {checked} checked)")
    return lines


def refuse_bad_rows(settings: PipelineSettings) -> None:
    """Raise DataError for rows that the data stage would refuse, while no folder and no run have been made for it.

    Larger files are looked at up to their first FIRST_ROWS rows; with `on_bad_row: skip` nothing is refused here.
    """
    data = settings.stages.prepare_data
    if data is None or data.on_bad_row == "skip":
        return
    for kind, path in _files(settings):
        found = path.stat()
        uses = tuple(settings.stages.preference_uses) if kind == "preferences" else ()
        _refuse(kind, path, (found.st_mtime_ns, found.st_size, found.st_ino), uses)


@functools.lru_cache(maxsize=64)  # by a command, then by the flow that it runs
def _refuse(kind: str, path: Path, state: tuple[int, int, int], uses: tuple[str, ...]) -> None:
    check_first_rows(kind, path, 2**62 if state[1] <= WHOLE_BYTES else FIRST_ROWS, "stop", uses)


def _files(settings: PipelineSettings) -> list[tuple[str, Path]]:
    data = settings.stages.prepare_data
    if data is None:
        return []
    named = (("demonstrations", data.demonstrations), ("preferences", data.preferences))
    return [(kind, path) for kind, place in named if place for path in data_files(Path(place))]


def _check(settings: PipelineSettings, kind: str, path: Path, max_rows: int) -> int:
    data = settings.stages.prepare_data
    assert data is not None
    uses = settings.stages.preference_uses if kind == "preferences" else ()
    return check_first_rows(kind, path, max_rows, data.on_bad_row, uses)
