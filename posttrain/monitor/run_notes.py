"""Notes and tags of runs, stored with the run: <output>/<pipeline>/runs/<started>/notes/notes.json.

    {"revision": 3, "note": "text", "tags": ["baseline"], "time": 1800000000.0}

A page sends the revision that it has shown. If another tab, browser or server has saved meanwhile, nothing is
overwritten: the page receives what is stored and asks. A damaged file is renamed before the next save.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.monitor.tail import read_json_object
from posttrain.web.errors import HTTPError
from rl_core.errors import PosttrainError
from rl_core.storage.atomic_files import move_into_place, write_text_atomic
from rl_core.storage.locks import FolderLock

MAX_NOTE_CHARACTERS = 20_000
MAX_TAGS, MAX_TAG_CHARACTERS = 20, 40
MAX_BODY_BYTES = 200_000
MAX_REVISION = 2**53  # a browser's numbers are exact up to here
_LOCK_SECONDS = 5.0  # another page's save takes milliseconds


@dataclass(frozen=True)
class RunNotes:
    """Note and tags of one run."""

    note: str = ""
    tags: tuple[str, ...] = ()
    revision: int = 0  # 0 = never saved
    time: float = 0.0  # of the last save, seconds since the epoch

    def to_json(self) -> dict[str, Any]:
        """Return the fields as stored and sent."""
        return {
            "revision": self.revision,
            "note": self.note,
            "tags": list(self.tags),
            "time": self.time,
        }


def read_run_notes(run_folder: Path) -> RunNotes:
    """Read note and tags of a run; an unreadable file counts as none."""
    values = read_json_object(run_folder / "notes" / "notes.json")
    try:
        notes = RunNotes(
            str(values["note"]),
            tuple(map(str, values["tags"])),
            int(values["revision"]),
            float(values["time"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return RunNotes()
    is_valid = 0 < notes.revision < MAX_REVISION and math.isfinite(notes.time)
    return notes if is_valid else RunNotes()


def save_run_notes(
    run_folder: Path, note: str, tags: list[str], revision: int
) -> tuple[bool, RunNotes]:
    """Save note and tags if `revision` is the stored one; otherwise change nothing.

    Returns: whether this call saved them; what is stored now.
    Raises: HTTPError for a note or tags that are too long, or a run whose folder was removed; CheckpointError if the
        file cannot be written.
    """
    if len(note) > MAX_NOTE_CHARACTERS:
        raise HTTPError(400, f"note: {len(note):,} characters; up to {MAX_NOTE_CHARACTERS:,} fit")
    tags = list(dict.fromkeys(" ".join(tag.split()) for tag in tags if tag.strip()))
    if len(tags) > MAX_TAGS:
        raise HTTPError(400, f"tags: {len(tags)} tags; up to {MAX_TAGS} fit")
    for tag in tags:
        if len(tag) > MAX_TAG_CHARACTERS:
            raise HTTPError(
                400,
                f"tags: '{tag[:20]}…' has {len(tag)} characters; up to {MAX_TAG_CHARACTERS} fit",
            )
    if not run_folder.is_dir():  # the lock would create it
        raise HTTPError(
            404, "the files of this run were removed, so notes cannot be stored with it"
        )
    folder = run_folder / "notes"
    with FolderLock(folder, wait_s=_LOCK_SECONDS):
        stored = read_run_notes(run_folder)
        if stored.revision != revision:
            return False, stored
        if stored.revision == 0:
            _rename_damaged_file(folder / "notes.json")
        saved = RunNotes(note, tuple(tags), revision + 1, round(time.time(), 3))
        write_text_atomic(folder / "notes.json", json.dumps(saved.to_json()) + "\n")
    return True, saved


def _rename_damaged_file(path: Path) -> None:
    """Rename a file that cannot be read, so that the next save does not overwrite it."""
    if path.exists():
        move_into_place(path, path.with_name(f"notes.damaged-{time.time_ns()}.json"))


def handle_notes_request(run_folder: Path | None, body: bytes) -> tuple[int, dict[str, Any]]:
    """Answer a page that saves: (HTTP status, JSON). 409 = changed elsewhere since the page showed it."""
    try:
        if run_folder is None:
            raise HTTPError(404, "this run has no folder here, so notes cannot be stored with it")
        if len(body) > MAX_BODY_BYTES:
            raise HTTPError(413, f"the request has more than {MAX_BODY_BYTES:,} bytes")
        note, tags, revision = _parse_body(body)
        is_saved, stored = save_run_notes(run_folder, note, tags, revision)
        return (200 if is_saved else 409), stored.to_json()
    except HTTPError as error:
        return error.status, {"error": str(error)}
    except (PosttrainError, OSError) as error:
        return 503, {"error": f"the note was not saved: {error}"}


def _parse_body(body: bytes) -> tuple[str, list[str], int]:
    """Parse {"note", "tags", "revision"}. Raises: HTTPError."""
    try:
        values = json.loads(body)
        note, tags, revision = values["note"], values["tags"], values["revision"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise HTTPError(400, "expected a JSON object with note, tags and revision") from None
    is_valid = (
        isinstance(note, str)
        and isinstance(tags, list)
        and all(isinstance(tag, str) for tag in tags)
        and type(revision) is int
        and 0 <= revision < MAX_REVISION
    )
    if not is_valid:
        raise HTTPError(400, "note must be text, tags a list of texts, and revision a number")
    # What UTF-8 cannot hold would fail every later answer of the page.
    clean = [text.encode("utf-8", "replace").decode() for text in (note, *tags)]
    return clean[0], clean[1:], revision
