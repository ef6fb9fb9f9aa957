"""Notes and tags of runs, stored with the run: <output>/<pipeline>/runs/<started>/notes/notes.json.

    {"revision": 3, "note": "text", "tags": ["baseline"], "time": 1800000000.0}

A page sends the revision that it has shown. If another tab, browser or server has saved meanwhile, nothing is
overwritten: the page receives what is stored and asks.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.monitor.tail import read_json_object
from posttrain.web.errors import HTTPError
from rl_core.errors import PosttrainError
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.storage.locks import FolderLock

MAX_NOTE_CHARACTERS = 20_000
MAX_TAGS, MAX_TAG_CHARACTERS = 20, 40
MAX_BODY_BYTES = 200_000
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
        return RunNotes(
            str(values["note"]),
            tuple(map(str, values["tags"])),
            int(values["revision"]),
            float(values["time"]),
        )
    except (KeyError, TypeError, ValueError):
        return RunNotes()


def save_run_notes(
    run_folder: Path, note: str, tags: list[str], revision: int
) -> tuple[bool, RunNotes]:
    """Save note and tags if `revision` is the stored one; otherwise change nothing.

    Returns: whether this call saved them; what is stored now.
    Raises: HTTPError for a note or tags that are too long; CheckpointError if the file cannot be written.
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
    folder = run_folder / "notes"
    with FolderLock(folder, wait_s=_LOCK_SECONDS):
        stored = read_run_notes(run_folder)
        if stored.revision != revision:
            return False, stored
        saved = RunNotes(note, tuple(tags), revision + 1, round(time.time(), 3))
        write_text_atomic(folder / "notes.json", json.dumps(saved.to_json()) + "\n")
    return True, saved


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
        and 0 <= revision < 2**53
    )
    if not is_valid:
        raise HTTPError(400, "note must be text, tags a list of texts, and revision a number")
    # What UTF-8 cannot hold would fail every later answer of the page.
    clean = [text.encode("utf-8", "replace").decode() for text in (note, *tags)]
    return clean[0], clean[1:], revision
