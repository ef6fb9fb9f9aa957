"""Ratings in an append-only journal: each is on the disk before the page is told, and an undo is a line of its own.

ratings.jsonl   {"number": 1, "item": ..., "rater": "ann", "choice": "first", "left": 1, ..., "crc": ...}
                {"undo": 1, "rater": "ann", "time": ..., "crc": ...}

Ratings as the rows of a data file: preferences with ties, or scored answers, with rater, time and models.
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
from rl_core.storage.atomic_files import append_bytes, make_folder, replace_file, truncate_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.line_logs import encode_checked_line, read_checked_lines, report_damaged_line

# of a pair; first = the item's first answer
CHOICES = (
    "first",
    "second",
    "tie",
    "both_bad",
    "skip",
)
MAX_COMMENT_CHARACTERS = 2000  # characters of a comment


@dataclass(frozen=True, slots=True)
class Rating:
    """One person's opinion of one item, once."""

    number: int  # from 1, in the order of the journal
    item: str
    rater: str
    choice: str  # one of CHOICES; "score" or "skip" of a single answer
    score: float | None = None  # 1 to 5, or 0 and 1 for thumbs
    left: int = 0  # answer that stood left: 0 = the item's first
    reason: str = ""
    comment: str = ""
    seconds: float = 0.0  # between showing and answering, by the page's clock
    time: float = 0.0  # seconds since 1970
    asked: int = 1  # how often this rater has been asked about the item, this time included

    @property
    def is_opinion(self) -> bool:
        """True = it says something about the answers."""
        return self.choice != "skip"

    @property
    def value(self) -> float:
        """Number for agreement: 1 first, 0 tie or both bad, -1 second; a score as it is."""
        if self.score is not None:
            return self.score
        return {"first": 1.0, "second": -1.0}.get(self.choice, 0.0)


class RatingJournal:
    """The ratings of a folder. Safe to use from several threads; one process writes."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a last line that a kill tore off, which nobody was told of, is cut off."""
        self.path = path
        self._lock = threading.Lock()
        self._ratings: dict[int, Rating] = {}
        self._by_rater: dict[str, list[int]] = {}
        self._last_number = 0
        self.version = 0  # grows with every line
        make_folder(path.parent)
        end = 0
        for line in read_checked_lines(path):
            end = line.end
            if line.record is None:
                report_damaged_line(path, line)
            else:
                self._apply_record(line.record)
        if path.is_file() and end < path.stat().st_size:
            truncate_file(path, end)

    def __iter__(self) -> Iterator[Rating]:
        """Ratings that were not taken back, in order."""
        with self._lock:
            return iter(list(self._ratings.values()))

    def __len__(self) -> int:
        return len(self._ratings)

    @property
    def raters(self) -> list[str]:
        """Names of those who rated something."""
        with self._lock:
            return sorted(name for name, numbers in self._by_rater.items() if numbers)

    def list_ratings_of(self, rater: str) -> list[Rating]:
        """A person's ratings, in order."""
        with self._lock:
            return [self._ratings[number] for number in self._by_rater.get(rater, [])]

    def count_ratings_of(self, rater: str) -> int:
        """Number of a person's ratings."""
        with self._lock:
            return len(self._by_rater.get(rater, []))

    def add_rating(self, rating: Rating) -> Rating:
        """Keep a rating, with the next number. Raises: DataError for one that means nothing; CheckpointError."""
        if rating.choice not in (*CHOICES, "score") or (rating.choice == "score") != (
            rating.score is not None
        ):
            raise DataError(f"choice: {rating.choice!r} with score {rating.score} is no rating")
        with self._lock:
            kept = dataclasses.replace(
                rating,
                number=self._last_number + 1,
                comment=rating.comment[:MAX_COMMENT_CHARACTERS],
            )
            self._append_record(dataclasses.asdict(kept))
        inject_fault("rating.kept")
        return kept

    def undo_last_rating(self, rater: str, time: float) -> Rating | None:
        """Take back a person's last rating; None = there is none. Raises: CheckpointError."""
        with self._lock:
            numbers = self._by_rater.get(rater, [])
            if not numbers:
                return None
            taken = self._ratings[numbers[-1]]
            self._append_record({"undo": taken.number, "rater": rater, "time": time})
        inject_fault("rating.kept")
        return taken

    def _append_record(self, record: Mapping[str, Any]) -> None:
        append_bytes(self.path, encode_checked_line(record), synced=True)
        self._apply_record(record)

    def _apply_record(self, record: Mapping[str, Any]) -> None:
        self.version += 1
        if "undo" in record:
            gone = self._ratings.pop(record["undo"], None)
            if gone is not None:
                self._by_rater[gone.rater].remove(gone.number)
            return
        rating = Rating(**record)
        self._ratings[rating.number] = rating
        self._by_rater.setdefault(rating.rater, []).append(rating.number)
        self._last_number = max(self._last_number, rating.number)


# Line ends within texts, which many readers of JSON lines would cut at
_ESCAPED_LINE_ENDS = {number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}


def build_rating_rows(
    items: Sequence[RatedItem], ratings: Iterable[Rating]
) -> Iterator[dict[str, Any]]:
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
            "judgement": _build_judgement(rating, [item.sources[place] for place in order]),
        }


def _unify_formats(prompt: RatedAnswer, *answers: RatedAnswer) -> list[RatedAnswer]:
    """All as texts, or all as messages."""
    if all(isinstance(part, str) for part in (prompt, *answers)):
        return [prompt, *answers]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
    return [asked, *said]


def _build_judgement(rating: Rating, sources: Sequence[str]) -> dict[str, Any]:
    """Rater, time and manner, and the models compared (the chosen one first)."""
    found: Mapping[str, Any] = {
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
    return {name: value for name, value in found.items() if value not in ("", [""], ["", ""])}


def write_rating_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Replace the data file; readers see the old or the new one. Returns the number of rows."""
    count = 0
    with replace_file(path, binary=True) as file:
        for row in rows:
            text = json.dumps(row, ensure_ascii=False).translate(_ESCAPED_LINE_ENDS)
            file.write(text.encode("utf-8", "replace") + b"\n")
            count += 1
    return count
