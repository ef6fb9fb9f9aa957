"""Token ids of the data stage's rows, from its cache where it made them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from rl_core.data.chat import ChatRenderer
from rl_core.data.formats import Kind
from rl_core.data.row_tokens import Job
from rl_core.data.token_cache import TokenCache
from rl_core.data.token_rows import TokenRows
from rl_core.errors import DataError
from rl_core.storage.manifest import digest_file
from tasks.stages.row_files import rows_of

__all__ = ["CACHE", "part_files", "part_tokens"]

CACHE = "tokens.cache"  # beside the data stage's keys: another seed or share finds the same texts again


def part_tokens(
    data: Path, kind: Kind, renderer: ChatRenderer, loss_on: Literal["all", "last"] = "all"
) -> list[TokenRows]:
    """Sequences of the training and of the held-out rows that the data stage wrote.

    Raises: DataError for a row that the template refuses.
    """
    cache, job = TokenCache(data.parent / CACHE), Job(kind, loss_on)
    parts = []
    for path in part_files(data, kind):
        found = cache.tokens(digest_file(path), functools.partial(rows_of, path), renderer, job, path.stat().st_size)
        if found.refused:
            row, reason = found.refused[0]
            raise DataError(f"{path}:{row + 1}: {reason}")
        parts.append(found.rows)
    return parts


def part_files(data: Path, kind: Kind) -> list[Path]:
    """The files of training and of held-out rows in the data stage's folder."""
    return [data / f"{kind}_{split}.jsonl" for split in ("train", "heldout")]
