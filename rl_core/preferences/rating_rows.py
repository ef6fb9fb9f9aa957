"""Ratings as the rows of a data file: preferences with ties, or scored answers, with rater, time and models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.preferences.items import Answer, RatedItem
from rl_core.preferences.rating_journal import Rating
from rl_core.storage.single_files import replacing

__all__ = ["rating_rows", "write_rows"]

# Line ends within texts, which many readers of JSON lines would cut at
_LINE_ENDS = {number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}


def rating_rows(items: Sequence[RatedItem], ratings: Iterable[Rating]) -> Iterator[dict[str, Any]]:
    """A row for each opinion, in the order of the ratings; skipped items and unknown ones give none.

    Of a pair {"prompt", "chosen", "rejected"}, with "tie": true where neither is better (both bad included); of a
    single answer {"prompt", "completion", "score"}. Where one part is messages, all are: formats are not mixed within a
    row. `judgement` has the rest, which training does not read.
    """
    known = {item.id: item for item in items}
    for rating in ratings:
        item = known.get(rating.item)
        if item is None or not rating.is_opinion:
            continue
        if rating.score is not None:
            prompt, answer = _alike(item.prompt, *item.answers)
            yield {
                "prompt": prompt, "completion": answer, "score": rating.score,
                "judgement": _judgement(rating, item.sources),
            }  # fmt: skip
            continue
        order = (1, 0) if rating.choice == "second" else (0, 1)
        tie = {"tie": True} if rating.choice in ("tie", "both_bad") else {}
        prompt, *answers = _alike(item.prompt, *item.answers)
        yield {
            "prompt": prompt, "chosen": answers[order[0]], "rejected": answers[order[1]], **tie,
            "judgement": _judgement(rating, [item.sources[place] for place in order]),
        }  # fmt: skip


def _alike(prompt: Answer, *answers: Answer) -> list[Answer]:
    """All as texts, or all as messages."""
    if all(isinstance(part, str) for part in (prompt, *answers)):
        return [prompt, *answers]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    return [asked, *said]


def _judgement(rating: Rating, sources: Sequence[str]) -> dict[str, Any]:
    """Rater, time and manner, and the models compared (the chosen one first)."""
    found: Mapping[str, Any] = {
        "rater": rating.rater, "time": rating.time, "seconds": rating.seconds, "number": rating.number,
        "choice": rating.choice, "sources": list(sources), "reason": rating.reason, "comment": rating.comment,
        "asked": rating.asked, "shown_left": rating.left,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value not in ("", [""], ["", ""])}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Replace the data file; readers see the old or the new one. Returns the number of rows."""
    count = 0
    with replacing(path, binary=True) as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False).translate(_LINE_ENDS)
            file.write(text.encode("utf-8", "replace") + b"\n")
            count += 1
    return count
