"""Append-only journal of ratings, and their conversion to training rows.

ratings.jsonl   {"number": 1, "item": ..., "rater": "ann", "choice": "first", "left": 1, ..., "crc": ...}
                {"undo": 1, "rater": "ann", "time": ..., "crc": ...}

Each rating is on the disk before it is acknowledged; an undo is a separate line. Rows are preferences with ties, or
scored answers, with rater, time and models.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_core.preferences.items import RatedAnswer, RatedItem
from rl_core.storage.append_log import AppendLog
from rl_core.storage.atomic_files import make_folder, replace_file
from rl_core.storage.faults import inject_fault

CHOICES = ("first", "second", "tie", "both_bad", "skip")  # for a pair; first = the first answer
MAX_COMMENT_CHARACTERS = 2000
# Line ends within texts, at which many readers of JSON lines would split.
_ESCAPED_LINE_ENDS = {number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}


@dataclass(frozen=True, slots=True)
class Rating:
    """Opinion of one rater on one item."""

    number: int  # from 1, in the order of the journal
    item: str
    rater: str
    choice: str  # one of CHOICES; "score" or "skip" for a single answer
    score: float | None = None  # 1 to 5, or 0 and 1 for thumbs
    left: int = 0  # answer shown on the left: 0 = the item's first
    reason: str = ""
    comment: str = ""
    seconds: float = 0.0  # from display to answer, by the page's clock
    time: float = 0.0  # seconds since 1970
    asked: int = 1  # times this rater was asked about the item, including now

    @property
    def is_opinion(self) -> bool:
        """True if it expresses an opinion of the answers."""
        return self.choice != "skip"

    @property
    def value(self) -> float:
        """Value for agreement: 1 first, 0 tie or both bad, -1 second; a score unchanged."""
        if self.score is not None:
            return self.score
        return {"first": 1.0, "second": -1.0}.get(self.choice, 0.0)


class RatingJournal:
    """Ratings of a folder. Thread-safe; only one process writes."""

    def __init__(self, path: Path) -> None:
        """Read the journal; truncate a torn last line, which was never acknowledged."""
        self.path = path
        self._log = AppendLog(path, synced=True)
        self._lock = threading.Lock()
        self._ratings: dict[int, Rating] = {}
        self._by_rater: dict[str, list[int]] = {}
        self._last_number = 0
        self.version = 0  # increases with every line
        make_folder(path.parent)
        for line in self._log.recover_lines():
            if line.record is not None:
                self._apply_record(line.record)

    def __iter__(self) -> Iterator[Rating]:
        """Iterate over the ratings that were not undone, in order."""
        with self._lock:
            return iter(list(self._ratings.values()))

    def __len__(self) -> int:
        return len(self._ratings)

    @property
    def raters(self) -> list[str]:
        """Names of the raters with ratings."""
        with self._lock:
            return sorted(name for name, numbers in self._by_rater.items() if numbers)

    def list_ratings_of(self, rater: str) -> list[Rating]:
        """Return a rater's ratings in order."""
        with self._lock:
            return [self._ratings[number] for number in self._by_rater.get(rater, [])]

    def count_ratings_of(self, rater: str) -> int:
        """Return the number of a rater's ratings."""
        with self._lock:
            return len(self._by_rater.get(rater, []))

    def add_rating(self, rating: Rating) -> Rating:
        """Store a rating under the next number. Raises: DataError for an invalid one; CheckpointError."""
        has_score, needs_score = rating.score is not None, rating.choice == "score"
        if rating.choice not in (*CHOICES, "score") or has_score != needs_score:
            raise DataError(f"choice: {rating.choice!r} with score {rating.score} is not a rating")
        with self._lock:
            stored = dataclasses.replace(
                rating,
                number=self._last_number + 1,
                comment=rating.comment[:MAX_COMMENT_CHARACTERS],
            )
            self._append_record(dataclasses.asdict(stored))
        inject_fault("rating.kept")
        return stored

    def undo_last_rating(self, rater: str, time: float) -> Rating | None:
        """Undo a rater's last rating and return it; None without ratings. Raises: CheckpointError."""
        with self._lock:
            numbers = self._by_rater.get(rater, [])
            if not numbers:
                return None
            undone = self._ratings[numbers[-1]]
            self._append_record({"undo": undone.number, "rater": rater, "time": time})
        inject_fault("rating.kept")
        return undone

    def _append_record(self, record: Mapping[str, Any]) -> None:
        self._log.append_record(record)
        self._apply_record(record)

    def _apply_record(self, record: Mapping[str, Any]) -> None:
        self.version += 1
        if "undo" in record:
            undone = self._ratings.pop(record["undo"], None)
            if undone is not None:
                self._by_rater[undone.rater].remove(undone.number)
            return
        rating = Rating(**record)
        self._ratings[rating.number] = rating
        self._by_rater.setdefault(rating.rater, []).append(rating.number)
        self._last_number = max(self._last_number, rating.number)


def build_rating_rows(
    items: Sequence[RatedItem], ratings: Iterable[Rating]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each opinion, in the order of the ratings; skipped and unknown items are left out.

    Pairs give {"prompt", "chosen", "rejected"}, with "tie": true if neither is better (including both bad); single
    answers
    give {"prompt", "completion", "score"}. If one part is messages, all are: formats are not mixed within a row.
    `judgement` holds all other data, which training does not read.
    """
    items_by_id = {item.id: item for item in items}
    for rating in ratings:
        item = items_by_id.get(rating.item)
        if item is None or not rating.is_opinion:
            continue
        if rating.score is not None:
            prompt, answer = _unify_formats(item.prompt, *item.answers)
            yield {
                "prompt": prompt,
                "completion": answer,
                "score": rating.score,
                "judgement": _build_judgement(rating, item.sources),
            }
            continue
        order = (1, 0) if rating.choice == "second" else (0, 1)
        tie = {"tie": True} if rating.choice in ("tie", "both_bad") else {}
        prompt, *answers = _unify_formats(item.prompt, *item.answers)
        yield {
            "prompt": prompt,
            "chosen": answers[order[0]],
            "rejected": answers[order[1]],
            **tie,
            "judgement": _build_judgement(rating, [item.sources[index] for index in order]),
        }


def _unify_formats(prompt: RatedAnswer, *answers: RatedAnswer) -> list[RatedAnswer]:
    """Return all parts as texts, or all as messages."""
    if all(isinstance(part, str) for part in (prompt, *answers)):
        return [prompt, *answers]

    def to_messages(part: RatedAnswer, role: str) -> RatedAnswer:
        return [{"role": role, "content": part}] if isinstance(part, str) else part

    return [to_messages(prompt, "user"), *(to_messages(part, "assistant") for part in answers)]


def _build_judgement(rating: Rating, sources: Sequence[str]) -> dict[str, Any]:
    """Return rater, time and manner, and the compared models (the chosen one first)."""
    fields: Mapping[str, Any] = {
        "rater": rating.rater,
        "time": rating.time,
        "seconds": rating.seconds,
        "number": rating.number,
        "choice": rating.choice,
        "sources": list(sources),
        "reason": rating.reason,
        "comment": rating.comment,
        "asked": rating.asked,
        "shown_left": rating.left,
    }
    return {name: value for name, value in fields.items() if value not in ("", [""], ["", ""])}


def write_rating_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Replace the data file atomically; return the number of rows."""
    count = 0
    with replace_file(path, binary=True) as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False).translate(_ESCAPED_LINE_ENDS)
            file.write(text.encode("utf-8", "replace") + b"\n")
            count += 1
    return count
