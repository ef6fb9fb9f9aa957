"""Rows that an earlier stage wrote as JSON lines, and their token ids, from the data stage's cache where possible."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import RowKind
from rl_core.data.token_cache import TokenCache
from rl_core.data.tokenising import TokenisationJob
from rl_core.data.training_sequences import TokenRows
from rl_core.errors import DataError
from rl_core.storage.manifest import digest_file

# Next to the data stage's keys: runs with another seed or split reuse the same texts.
TOKEN_CACHE_FOLDER = "tokens.cache"


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def load_split_tokens(
    data: Path, kind: RowKind, renderer: ChatRenderer, loss_on: Literal["all", "last"] = "all"
) -> list[TokenRows]:
    """Load the sequences of the training rows and of the held-out rows that the data stage wrote.

    Raises: DataError for a row that the chat template refuses.
    """
    cache, job = TokenCache(data.parent / TOKEN_CACHE_FOLDER), TokenisationJob(kind, loss_on)
    parts = []
    for path in list_split_files(data, kind):
        tokenized = cache.load_or_tokenize(
            digest_file(path),
            functools.partial(read_json_rows, path),
            renderer,
            job,
            path.stat().st_size,
        )
        if tokenized.refused:
            row, reason = tokenized.refused[0]
            raise DataError(f"{path}:{row + 1}: {reason}")
        parts.append(tokenized.rows)
    return parts


def list_split_files(data: Path, kind: RowKind) -> list[Path]:
    """List the files of training and of held-out rows in the data stage's folder."""
    return [data / f"{kind}_{split}.jsonl" for split in ("train", "heldout")]
