"""Token ids of the rows of a data file, some at a time: the work of each process of `tokenising`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.chat import ChatRenderer
from rl_core.data.conversation import training_sequences
from rl_core.data.formats import Kind
from rl_core.data.preference_rows import row_sides
from rl_core.data.token_rows import TokenChunk, chunk_of
from rl_core.errors import DataError

__all__ = ["Job", "Refusals", "chunk_tokens"]

Row = dict[str, Any]
TOGETHER = 64  # rows whose texts are encoded together
Refusals = list[tuple[int, str]]  # (row, reason) of each row that has no tokens


@dataclass(frozen=True, slots=True)
class Job:
    """Purpose that rows are tokenised for."""

    kind: Kind
    loss_on: Literal["all", "last"] = "all"  # assistant turns of demonstrations with loss


def chunk_tokens(renderer: ChatRenderer, job: Job, rows: Sequence[Row], first: int) -> tuple[TokenChunk, Refusals]:
    """Sequences of consecutive rows, and the rows that the template refuses.

    Of a demonstration those of `training_sequences`; of a preference row its sides, chosen first; of a labelled
    completion itself. A row's `max_tokens` cuts each.
    Args:
        first: number of the first of these rows.
    Raises: SettingsError for tools that the template does not take.
    """
    refused: Refusals = []

    def sequences() -> Iterator[tuple[int, int, Sequence[int], Sequence[bool]]]:
        for start in range(0, len(rows), TOGETHER):
            works = [functools.partial(_sequences, renderer, job, row) for row in rows[start : start + TOGETHER]]
            for number, found in enumerate(renderer.encoder.together(works), start=first + start):
                if isinstance(found, DataError):
                    refused.append((number, str(found)))
                elif isinstance(found, Exception):
                    raise found
                else:
                    for prompt, ids, mask in found:
                        yield number, prompt, ids, mask

    return chunk_of(sequences()), refused


def _sequences(renderer: ChatRenderer, job: Job, row: Row) -> list[tuple[int, list[int], list[bool]]]:
    """Tokens of the prompt, ids and mask of each sequence of a row."""
    if job.kind == "demonstrations":
        limit = row.get("max_tokens")
        found = training_sequences(renderer, row["messages"], row.get("tools"), job.loss_on, limit)
        return [(0, ids, mask) for ids, mask in found]
    sides = [side for side, _ in row_sides(row, renderer)]
    return [(len(s.prompt_ids), s.ids, [False] * len(s.prompt_ids) + s.loss_mask) for s in sides]
