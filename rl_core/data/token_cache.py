"""Token ids of rows kept on disk by their content, so that a text is tokenised once.

    <folder>/<name>/   tokens.arrow and refused.json: sequences of all rows of some data, and the rows without any
                       places.arrow: a part of such a table, as its train and held-out rows are
                       manifest.json with the SHA-256 of each

A name is a digest of everything that decides the content: rows, tokenizer, template, settings, versions and the code of
this room. An entry is verified before it is used; a damaged one is removed, with a warning, and made anew. Of two
processes that make the same one, the first to finish keeps it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import token_tables
from rl_core.data.chat import ChatRenderer
from rl_core.data.encoder import backend_of
from rl_core.data.row_tokens import Job, Refusals, Row
from rl_core.data.token_rows import TokenChunk, TokenRows
from rl_core.data.tokenising import processes_for, tokenised
from rl_core.errors import CheckpointError, CorruptError, FolderBusy
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, remove_folder
from rl_core.storage.folders import publish_folder, put_bytes
from rl_core.storage.manifest import read_manifest, verify_folder
from rl_core.storage.single_files import replacing

__all__ = ["TokenCache", "Tokens", "entries_without_source", "rows_digest", "text_size"]

logger = logging.getLogger(__name__)

TABLE, REFUSED, PLACES = "tokens.arrow", "refused.json", "places.arrow"


@dataclass(slots=True)
class Tokens:
    """Sequences of rows, and the rows that the template refuses."""

    rows: TokenRows
    refused: Refusals = field(default_factory=list)
    name: str = ""  # of the table in its folder; "" = kept nowhere

    def longest(self, num_rows: int) -> NDArray[np.int64]:
        """Tokens of the longest sequence of each row; 0 for one that was refused."""
        found, starts = np.zeros(num_rows, np.int64), self.rows.row_starts
        if len(starts):
            found[self.rows.rows[starts]] = np.maximum.reduceat(self.rows.lengths, starts)
        return found

    def reasons(self, num_rows: int, limit: int, holds: str) -> list[str]:
        """Why each row cannot be used, "" where it can: refused, or longer than `limit`, as `holds` says."""
        reasons = [""] * num_rows
        for row, reason in self.refused:
            reasons[row] = reason
        lengths = self.longest(num_rows)
        for row in np.flatnonzero(lengths > limit).tolist():
            reasons[row] = f"is {lengths[row]} tokens long, {holds}"
        return reasons


def rows_digest(rows: Iterable[Row]) -> str:
    """SHA-256 of rows as JSON."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def text_size(rows: Sequence[Row]) -> int:
    """About how many bytes of text rows are, by the first thousand."""
    some = rows[:1000]
    return sum(len(str(row)) for row in some) * len(rows) // max(1, len(some))


class TokenCache:
    """Tables of token ids in a folder.

    Without a folder, without pyarrow, or with a tokenizer that is more than a file says, they are made in memory each
    time; so they are where the disk refuses.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder if token_tables.is_available() else None
        self._open_tables: dict[str, Tokens] = {}
        if self.folder is not None:
            clear_leftovers(self.folder)  # of a process that died while it wrote

    def tokens(
        self, source: str, rows: Callable[[], Iterable[Row]], renderer: ChatRenderer, job: Job, num_bytes: int
    ) -> Tokens:
        """Token ids of rows, from the folder or made.

        Args:
            source: digest of the rows.
            rows: gives them, in order; called if they are not there, again if the disk refuses.
            num_bytes: about how much text they are; decides the number of processes.
        Raises: SettingsError for tools that the template does not take.
        """
        name = self._name(source, renderer, job)
        if (found := self._read(name)) is not None:
            logger.info("tokens: read from %s", found.name)
            return found

        def made() -> Iterator[tuple[TokenChunk, Refusals]]:
            return tokenised(rows(), renderer, job, processes_for(num_bytes))

        if name and self.folder is not None:
            try:
                return self._published(self.folder / name, source, made)
            except (CheckpointError, FolderBusy) as error:
                if (found := self._read(name)) is not None:  # another process was faster
                    return found
                logger.warning("token ids are not kept: %s", error)
        chunks, refused = [], []
        for chunk, some in made():
            chunks.append(chunk)
            refused += some
        return Tokens(TokenRows(chunks), refused)

    def keep_part(
        self, source: str, renderer: ChatRenderer, job: Job, whole: Tokens, places: NDArray[np.int64],
        max_tokens: int | None,
    ) -> None:  # fmt: skip
        """Note that the rows with the digest `source` are those sequences of a table, each cut at `max_tokens`."""
        name = self._name(source, renderer, job)
        if not (name and whole.name and self.folder is not None) or (self.folder / name).exists():
            return

        def write(folder: Path) -> None:
            with replacing(folder / PLACES, binary=True, synced=False) as file:
                token_tables.write_column(file, places)

        try:
            about = {"kind": "part", "table": whole.name, "max_tokens": max_tokens, "source": source}
            publish_folder(self.folder / name, write, about)
        except (CheckpointError, FolderBusy) as error:
            logger.warning("token ids of a part are not kept: %s", error)

    def _published(self, entry: Path, source: str, made: Callable[[], Iterator[tuple[TokenChunk, Refusals]]]) -> Tokens:
        refused: Refusals = []

        def chunks() -> Iterator[TokenChunk]:
            for chunk, some in made():
                refused.extend(some)
                yield chunk
            fault("data.tokenised")

        def write(folder: Path) -> None:
            with replacing(folder / TABLE, binary=True, synced=False) as file:
                token_tables.write_table(file, chunks())
            put_bytes(folder / REFUSED, json.dumps(refused).encode())

        publish_folder(entry, write, {"kind": "tokens", "source": source})
        return self._noted(entry.name, Tokens(token_tables.read_table(entry / TABLE), refused, entry.name))

    def _noted(self, name: str, tokens: Tokens) -> Tokens:
        self._open_tables[name] = tokens
        return tokens

    def _read(self, name: str) -> Tokens | None:
        """Content of an entry; None if there is none, or if it was damaged and has been removed."""
        if not name or self.folder is None or not (self.folder / name).is_dir():
            return None
        if name in self._open_tables:
            return self._open_tables[name]
        entry = self.folder / name
        try:
            manifest = verify_folder(entry)
            if manifest.get("kind") == "part":
                whole = self._read(str(manifest["table"]))
                if whole is None:
                    raise CorruptError(f"{entry}: its table is gone")
                places = token_tables.read_column(entry / PLACES)
                return Tokens(whole.rows.select(places, manifest["max_tokens"]), [], name)
            refused = [(int(row), str(reason)) for row, reason in json.loads((entry / REFUSED).read_bytes())]
            return self._noted(name, Tokens(token_tables.read_table(entry / TABLE), refused, name))
        except (CorruptError, KeyError, TypeError, ValueError) as error:
            logger.warning("token ids are damaged and made again: %s", error)
            remove_folder(entry)
        except CheckpointError as error:
            logger.warning("token ids cannot be read now: %s", error)
        return None

    def _name(self, source: str, renderer: ChatRenderer, job: Job) -> str:
        """32 hex digits; "" = nothing is kept."""
        if self.folder is None or (tokenizer := _tokenizer_digest(renderer)) is None:
            return ""
        decisive = [source, tokenizer, renderer.digest, job.kind, job.loss_on, _code(),
                    version("tokenizers"), version("transformers")]  # fmt: skip
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def entries_without_source(folder: Path, sources: Collection[str]) -> list[Path]:
    """Entries that are of none of these digests, nor the table of one that is; damaged ones too."""
    manifests: dict[Path, dict[str, Any]] = {}
    for entry in sorted(folder.glob("*")):
        if entry.is_dir() and not entry.is_symlink():
            try:
                manifests[entry] = read_manifest(entry)
            except CorruptError:
                manifests[entry] = {}
    kept = {entry for entry, manifest in manifests.items() if manifest.get("source") in sources}
    tables = {str(manifests[entry].get("table", "")) for entry in kept}
    return [entry for entry in manifests if entry not in kept and entry.name not in tables]


def _tokenizer_digest(renderer: ChatRenderer) -> str | None:
    """SHA-256 of what decides a tokenizer's ids; None where that is more than its backend."""
    tokenizer: Any = renderer.tokenizer
    backend = backend_of(tokenizer)
    if backend is None:
        return None
    content = json.loads(backend.to_str())
    for of_calls in ("truncation", "padding"):  # as the last call of the tokenizer left them
        content.pop(of_calls, None)
    names = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    decisive = [content, names, bool(getattr(tokenizer, "split_special_tokens", False))]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


@functools.cache
def _code() -> str:
    """SHA-256 of this room's files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
