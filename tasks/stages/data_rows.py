"""Rows that an earlier stage wrote as lines of JSON.

Token ids of the data stage's rows, from its cache where it made them.
"""

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


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


TOKEN_CACHE_FOLDER = (
    "tokens.cache"  # beside the data stage's keys: another seed or share finds the same texts again
)


def load_split_tokens(
    data: Path, kind: RowKind, renderer: ChatRenderer, loss_on: Literal["all", "last"] = "all"
) -> list[TokenRows]:
    """Sequences of the training and of the held-out rows that the data stage wrote.

    Raises: DataError for a row that the template refuses.
    """
    cache, job = TokenCache(data.parent / TOKEN_CACHE_FOLDER), TokenisationJob(kind, loss_on)
    parts = []
    for path in list_split_files(data, kind):
        found = cache.load_or_tokenize(
            digest_file(path),
            functools.partial(read_json_rows, path),
            renderer,
            job,
            path.stat().st_size,
        )
        if found.refused:
            row, reason = found.refused[0]
            raise DataError(f"{path}:{row + 1}: {reason}")
        parts.append(found.rows)
    return parts


def list_split_files(data: Path, kind: RowKind) -> list[Path]:
    """The files of training and of held-out rows in the data stage's folder."""
    return [data / f"{kind}_{split}.jsonl" for split in ("train", "heldout")]
