"""Ratings in an append-only journal: each is on the disk before the page is told, and an undo is a line of its own.

ratings.jsonl   {"number": 1, "item": ..., "rater": "ann", "choice": "first", "left": 1, ..., "crc": ...}
                {"undo": 1, "rater": "ann", "time": ..., "crc": ...}
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_core.storage.checked_lines import read_checked, report_damage, sealed
from rl_core.storage.faults import fault
from rl_core.storage.single_files import append_bytes, make_folder, truncate_file

__all__ = ["CHOICES", "Rating", "RatingJournal"]

CHOICES = ("first", "second", "tie", "both_bad", "skip")  # of a pair; first = the item's first answer
MOST_TEXT = 2000  # characters of a comment


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
        self._last = 0
        self.version = 0  # grows with every line
        make_folder(path.parent)
        end = 0
        for line in read_checked(path):
            end = line.end
            if line.record is None:
                report_damage(path, line)
            else:
                self._take(line.record)
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

    def of(self, rater: str) -> list[Rating]:
        """A person's ratings, in order."""
        with self._lock:
            return [self._ratings[number] for number in self._by_rater.get(rater, [])]

    def count(self, rater: str) -> int:
        """Number of a person's ratings."""
        with self._lock:
            return len(self._by_rater.get(rater, []))

    def add(self, rating: Rating) -> Rating:
        """Keep a rating, with the next number. Raises: DataError for one that means nothing; CheckpointError."""
        if rating.choice not in (*CHOICES, "score") or (rating.choice == "score") != (rating.score is not None):
            raise DataError(f"choice: {rating.choice!r} with score {rating.score} is no rating")
        with self._lock:
            kept = dataclasses.replace(rating, number=self._last + 1, comment=rating.comment[:MOST_TEXT])
            self._append(dataclasses.asdict(kept))
        fault("rating.kept")
        return kept

    def undo(self, rater: str, time: float) -> Rating | None:
        """Take back a person's last rating; None = there is none. Raises: CheckpointError."""
        with self._lock:
            numbers = self._by_rater.get(rater, [])
            if not numbers:
                return None
            taken = self._ratings[numbers[-1]]
            self._append({"undo": taken.number, "rater": rater, "time": time})
        fault("rating.kept")
        return taken

    def _append(self, record: Mapping[str, Any]) -> None:
        append_bytes(self.path, sealed(record), synced=True)
        self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        self.version += 1
        if "undo" in record:
            gone = self._ratings.pop(record["undo"], None)
            if gone is not None:
                self._by_rater[gone.rater].remove(gone.number)
            return
        rating = Rating(**record)
        self._ratings[rating.number] = rating
        self._by_rater.setdefault(rating.rater, []).append(rating.number)
        self._last = max(self._last, rating.number)
