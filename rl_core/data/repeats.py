"""Rows that repeat or contradict earlier rows of the same data: counted and said, and trained on all the same."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Repeats", "digest_of", "find_repeats"]

logger = logging.getLogger(__name__)

_SHOWN = 3  # examples in a message


@dataclass(slots=True)
class Repeats:
    """Pairs (index of a row, index of the first row that it repeats or contradicts)."""

    copies: list[tuple[int, int]] = field(default_factory=list)  # equal in every column
    # A preference the other way round, or a completion with the other label, for the same prompt
    contradictions: list[tuple[int, int]] = field(default_factory=list)

    def say(self, source: str, num_rows: int, lines: Sequence[int]) -> None:
        """Warn of both, with the places of the first ones. `lines`: line of each row, 0 = rows in memory."""

        def places(pairs: Sequence[tuple[int, int]]) -> str:
            shown = [f"{_place(row, lines)} and {_place(first, lines)}" for row, first in pairs[:_SHOWN]]
            return "; ".join(shown) + (f"; and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else "")

        if self.copies:
            logger.warning(
                "%s: %d of %d rows are exact copies of earlier ones and count more than once in training (%s)",
                source, len(self.copies), num_rows, places(self.copies),
            )  # fmt: skip
        if self.contradictions:
            logger.warning(
                "%s: %d of %d rows contradict earlier ones: they prefer what those reject, or label one completion "
                "both ways (%s)",
                source, len(self.contradictions), num_rows, places(self.contradictions),
            )  # fmt: skip


def find_repeats(rows: Sequence[Mapping[str, Any]]) -> Repeats:
    """Copies among the rows, and contradictions among preferences (chosen, rejected) or labelled completions."""
    found = Repeats()
    whole: dict[bytes, int] = {}
    judged: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        first = whole.setdefault(digest_of(row), index)
        if first != index:
            found.copies.append((index, first))
        if row.get("tie"):
            continue
        if "chosen" in row:
            own, other = (row["chosen"], row["rejected"]), (row["rejected"], row["chosen"])
        elif "label" in row:
            own, other = (row["completion"], row["label"]), (row["completion"], not row["label"])
        else:
            continue
        prompt = str(row["prompt"])
        judged.setdefault(digest_of((prompt, own)), index)
        if (against := judged.get(digest_of((prompt, other)))) is not None:
            found.contradictions.append((index, against))
    return found


def digest_of(value: object) -> bytes:
    """16 bytes that stand for a value: the texts of a million rows are not held twice."""
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _place(index: int, lines: Sequence[int]) -> str:
    return f"line {lines[index]}" if lines[index] else f"row {index}"
