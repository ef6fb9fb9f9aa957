"""Token ids of rows cached on disk by their content, so that a text is tokenised once.

    <folder>/<name>/   tokens.arrow and refused.json: sequences of all rows of some data, and the rows without any
                       places.arrow: a part of such a table, as its train and held-out rows are
                       manifest.json with the SHA-256 of each

A name is a digest of everything that decides the content: rows, tokenizer, template, settings, versions and the code of
this package. An entry is verified before it is used; a damaged one is removed, with a warning, and rebuilt. If two
processes build the same entry, the first to finish stores it.
"""

from __future__ import annotations

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

from rl_core.data import training_sequences
from rl_core.data.chat import ChatRenderer, compute_tokenizer_digest
from rl_core.data.tokenising import (
    RefusedRows,
    Row,
    TokenisationJob,
    choose_num_processes,
    tokenize_rows,
)
from rl_core.data.training_sequences import TokenChunk, TokenRows
from rl_core.errors import CheckpointError, CorruptError, FolderBusy
from rl_core.storage.atomic_files import replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import (
    clear_leftovers,
    publish_folder,
    remove_folder,
    write_folder_file,
)
from rl_core.storage.manifest import read_manifest, verify_folder

logger = logging.getLogger(__name__)

TABLE_FILE, REFUSED_FILE, INDICES_FILE = "tokens.arrow", "refused.json", "places.arrow"


@dataclass(slots=True)
class TokenizedRows:
    """Sequences of rows, and the rows that the template refuses."""

    rows: TokenRows
    refused: RefusedRows = field(default_factory=list)
    name: str = ""  # of the table in its folder; "" = not stored

    def compute_longest(self, num_rows: int) -> NDArray[np.int64]:
        """Compute the tokens of each row's longest sequence; 0 for a refused row."""
        longest, starts = np.zeros(num_rows, np.int64), self.rows.row_starts
        if len(starts):
            longest[self.rows.rows[starts]] = np.maximum.reduceat(self.rows.lengths, starts)
        return longest

    def list_refusal_reasons(self, num_rows: int, limit: int, limit_description: str) -> list[str]:
        """Return why each row cannot be used, "" if it can: refused, or longer than `limit`, which `limit_description`
        names.
        """
        reasons = [""] * num_rows
        for row, reason in self.refused:
            reasons[row] = reason
        lengths = self.compute_longest(num_rows)
        for row in np.flatnonzero(lengths > limit).tolist():
            reasons[row] = f"is {lengths[row]} tokens long, {limit_description}"
        return reasons


def compute_rows_digest(rows: Iterable[Row]) -> str:
    """Compute the SHA-256 of rows as JSON."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def estimate_text_bytes(rows: Sequence[Row]) -> int:
    """Estimate the bytes of text in rows, from the first thousand."""
    some = rows[:1000]
    return sum(len(str(row)) for row in some) * len(rows) // max(1, len(some))


class TokenCache:
    """Tables of token ids in a folder.

    Without a folder, without pyarrow, or with a tokenizer that is more than a file says, they are made in memory each
    time; so they are where the disk refuses.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder if training_sequences.is_pyarrow_available() else None
        self._open_tables: dict[str, TokenizedRows] = {}
        if self.folder is not None:
            clear_leftovers(self.folder)  # of a process that died while it wrote

    def load_or_tokenize(
        self,
        source: str,
        rows: Callable[[], Iterable[Row]],
        renderer: ChatRenderer,
        job: TokenisationJob,
        num_bytes: int,
    ) -> TokenizedRows:
        """Return the token ids of rows, from the folder or tokenised now.

        Args:
            source: digest of the rows.
            rows: yields them in order; called if they are not cached, again if they cannot be stored.
            num_bytes: approximate size of the text; decides the number of processes.
        Raises: SettingsError for tools that the template does not take.
        """
        name = self._compute_entry_name(source, renderer, job)
        cached = self._read_entry(name)
        if cached is not None:
            logger.info("token ids of %d sequences: read from the cache", len(cached.rows.lengths))
            return cached

        def tokenize() -> Iterator[tuple[TokenChunk, RefusedRows]]:
            return tokenize_rows(rows(), renderer, job, choose_num_processes(num_bytes))

        if name and self.folder is not None:
            try:
                return self._publish_tokens(self.folder / name, source, tokenize)
            except (CheckpointError, FolderBusy) as error:
                cached = self._read_entry(name)
                if cached is not None:  # another process was faster
                    return cached
                logger.warning("token ids are not cached: %s", error)
        chunks, refused = [], []
        for chunk, some in tokenize():
            chunks.append(chunk)
            refused += some
        return TokenizedRows(TokenRows(chunks), refused)

    def store_subset(
        self,
        source: str,
        renderer: ChatRenderer,
        job: TokenisationJob,
        table: TokenizedRows,
        indices: NDArray[np.int64],
        max_tokens: int | None,
    ) -> None:
        """Record that the rows with the digest `source` are those sequences of a table, each cut at `max_tokens`."""
        name = self._compute_entry_name(source, renderer, job)
        if not (name and table.name and self.folder is not None) or (self.folder / name).exists():
            return

        def write(folder: Path) -> None:
            with replace_file(folder / INDICES_FILE, binary=True, synced=False) as file:
                training_sequences.write_integer_column(file, indices)

        try:
            about = {
                "kind": "part",
                "table": table.name,
                "max_tokens": max_tokens,
                "source": source,
            }
            publish_folder(self.folder / name, write, about)
        except (CheckpointError, FolderBusy) as error:
            logger.warning("token ids of a part are not cached: %s", error)

    def _publish_tokens(
        self, entry: Path, source: str, made: Callable[[], Iterator[tuple[TokenChunk, RefusedRows]]]
    ) -> TokenizedRows:
        refused: RefusedRows = []

        def chunks() -> Iterator[TokenChunk]:
            for chunk, some in made():
                refused.extend(some)
                yield chunk
            inject_fault("data.tokenised")

        def write(folder: Path) -> None:
            with replace_file(folder / TABLE_FILE, binary=True, synced=False) as file:
                training_sequences.write_token_table(file, chunks())
            write_folder_file(folder / REFUSED_FILE, json.dumps(refused).encode())

        publish_folder(entry, write, {"kind": "tokens", "source": source})
        return self._remember_table(
            entry.name,
            TokenizedRows(
                training_sequences.read_token_table(entry / TABLE_FILE), refused, entry.name
            ),
        )

    def _remember_table(self, name: str, tokens: TokenizedRows) -> TokenizedRows:
        self._open_tables[name] = tokens
        return tokens

    def _read_entry(self, name: str) -> TokenizedRows | None:
        """Return the content of an entry; None if there is none, or if it was damaged and has been removed."""
        if not name or self.folder is None or not (self.folder / name).is_dir():
            return None
        if name in self._open_tables:
            return self._open_tables[name]
        entry = self.folder / name
        try:
            manifest = verify_folder(entry)
            if manifest.get("kind") == "part":
                table = self._read_entry(str(manifest["table"]))
                if table is None:
                    raise CorruptError(f"{entry}: its table is missing")
                places = training_sequences.read_integer_column(entry / INDICES_FILE)
                return TokenizedRows(
                    table.rows.select_sequences(places, manifest["max_tokens"]), [], name
                )
            refused = [
                (int(row), str(reason))
                for row, reason in json.loads((entry / REFUSED_FILE).read_bytes())
            ]
            return self._remember_table(
                name,
                TokenizedRows(
                    training_sequences.read_token_table(entry / TABLE_FILE), refused, name
                ),
            )
        except (CorruptError, KeyError, TypeError, ValueError) as error:
            logger.warning("token ids are damaged and made again: %s", error)
            remove_folder(entry)
        except CheckpointError as error:
            logger.warning("token ids cannot be read now: %s", error)
        return None

    def _compute_entry_name(self, source: str, renderer: ChatRenderer, job: TokenisationJob) -> str:
        """Compute a name of 32 hex digits; "" = do not cache."""
        if (
            self.folder is None
            or (tokenizer := compute_tokenizer_digest(renderer.tokenizer)) is None
        ):
            return ""
        decisive = [
            source,
            tokenizer,
            renderer.digest,
            job.kind,
            job.loss_on,
            _compute_code_digest(),
            version("tokenizers"),
            version("transformers"),
        ]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def find_orphaned_entries(folder: Path, sources: Collection[str]) -> list[Path]:
    """Find entries that belong to none of these digests, nor to a table of one; damaged ones too."""
    manifests: dict[Path, dict[str, Any]] = {}
    for entry in sorted(folder.glob("*")):
        if entry.is_dir() and not entry.is_symlink():
            try:
                manifests[entry] = read_manifest(entry)
            except CorruptError:
                manifests[entry] = {}
    used = {entry for entry, manifest in manifests.items() if manifest.get("source") in sources}
    tables = {str(manifests[entry].get("table", "")) for entry in used}
    return [entry for entry in manifests if entry not in used and entry.name not in tables]


def _compute_code_digest() -> str:
    """Compute the SHA-256 of this package's files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
