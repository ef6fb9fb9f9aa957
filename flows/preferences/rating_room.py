"""State of the page: items, ratings, what is asked next, and the data file that follows from them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_core.errors import DataError, PosttrainError
from rl_core.preferences.agreement import Agreement, agreement
from rl_core.preferences.items import RatedItem, opening
from rl_core.preferences.question_order import QuestionOrder, RatingQuestion
from rl_core.preferences.rating_journal import Rating, RatingJournal
from rl_core.preferences.rating_rows import rating_rows, write_rows
from rl_core.preferences.reward_posterior import RewardPosterior
from rl_core.settings import RatingSettings

__all__ = ["OutdatedQuestion", "RatingRoom", "fitting_items"]

log = logging.getLogger(__name__)

QUESTIONS = {
    "pairs": "Which answer is better?",
    "scores": "How good is this answer, from 1 (bad) to 5 (good)?",
    "thumbs": "Is this answer good?",
}
SCORES = {"scores": (1.0, 2.0, 3.0, 4.0, 5.0), "thumbs": (0.0, 1.0)}
# Journal and data file of each kind of question: opinions on different scales are never counted together.
FILES = {
    "pairs": ("ratings.jsonl", "preferences.jsonl"),
    "scores": ("score_ratings.jsonl", "scores.jsonl"),
    "thumbs": ("thumb_ratings.jsonl", "thumbs.jsonl"),
}
WRITE_SECONDS = 3.0  # between two looks whether the data file is behind the journal
WRITE_SHARE = 0.05  # of the time is spent writing it, at most


def fitting_items(items: Sequence[RatedItem], settings: RatingSettings) -> list[RatedItem]:
    """Items with as many answers as `settings.ask` compares."""
    return [item for item in items if len(item.answers) == (2 if settings.ask == "pairs" else 1)]


class OutdatedQuestion(DataError):
    """The rated question is not the person's open one: a second tab, or a request that was sent twice."""


class RatingRoom:
    """Everything behind the page; a context manager. Safe to use from several threads."""

    def __init__(
        self,
        folder: Path,
        items: Sequence[RatedItem],
        settings: RatingSettings,
        *,
        seed: int = 0,
        posterior: RewardPosterior | None = None,
    ) -> None:
        """`folder`: of the journal and the data file; locked by the caller. Of the items, those that fit are rated."""
        self.folder, self.items, self.settings = folder, fitting_items(items, settings), settings
        self.journal = RatingJournal(folder / FILES[settings.ask][0])
        self.order = QuestionOrder(
            self.items, self.journal, overlap=settings.overlap, repeat=settings.repeat, seed=seed,
            posterior=posterior if settings.choose == "uncertainty" else None,
        )  # fmt: skip
        self._written = -1  # version of the journal that the data file has
        self._lock = threading.Lock()
        self._agreement: tuple[int, Agreement] | None = None
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write_on, name="rating-rows", daemon=True)

    @property
    def rows_file(self) -> Path:
        """The data file: preference rows, or scored answers."""
        return self.folder / FILES[self.settings.ask][1]

    def __enter__(self) -> RatingRoom:
        self.write()
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._writer.join()
        self.write()

    def write(self) -> None:
        """Bring the data file up to the journal."""
        version = self.journal.version
        if version == self._written:
            return
        write_rows(self.rows_file, rating_rows(self.items, self.journal))
        self._written = version

    def _write_on(self) -> None:
        pause = WRITE_SECONDS
        while not self._stop.wait(pause):
            started = time.monotonic()
            try:
                self.write()
            except PosttrainError as error:
                log.warning("%s; the ratings are in the journal", error)
            pause = max(WRITE_SECONDS, (time.monotonic() - started) / WRITE_SHARE)

    # -- questions and ratings -----------------------------------------------------------------------------------------

    def question(self, rater: str) -> dict[str, Any]:
        """The person's question and progress, for the page."""
        found = self.order.next(rater)
        return {
            "question": None if found is None else self._shown(found),
            "rated": self.journal.count(rater),
            "items": len(self.items),
            "total": len(self.journal),
            "raters": len(self.journal.raters),
        }

    def rate(self, rater: str, given: dict[str, Any], now: float) -> Rating:
        """Keep a rating of the person's open question; on the disk when this returns.

        Args:
            given: item, count (the person's ratings so far), choice ("left", "right", "tie", "both_bad", "skip"), or a
                score; reason, comment, seconds.
        Raises: OutdatedQuestion; DataError for a choice or score that is none; CheckpointError.
        """
        with self._lock:
            question = self.order.next(rater)
            is_open = question is not None and self.items[question.place].id == given["item"]
            if question is None or not is_open or given["count"] != self.journal.count(rater):
                raise OutdatedQuestion("this question was answered already, or is not the one that is open")
            choice, score = self._meaning(given, question)
            if given.get("reason") and given["reason"] not in self.settings.reasons:
                raise DataError(f"reason: {given['reason']!r} is not one of those that can be chosen")
            rating = Rating(
                number=0, item=given["item"], rater=rater, choice=choice, score=score, left=question.left,
                reason=given.get("reason", ""), comment=given.get("comment", ""),
                seconds=round(given.get("seconds", 0.0), 3), time=now, asked=question.asked,
            )  # fmt: skip
            kept = self.journal.add(rating)
            self.order.take(kept)
            return kept

    def undo(self, rater: str, now: float) -> Rating | None:
        """Take back the person's last rating; its question is open again."""
        with self._lock:
            taken = self.journal.undo(rater, now)
            if taken is not None:
                self.order.take_back(taken)
            return taken

    def _meaning(self, given: dict[str, Any], question: RatingQuestion) -> tuple[str, float | None]:
        """Choice and score that a key stands for."""
        choice, score = given.get("choice"), given.get("score")
        if choice == "skip":
            return "skip", None
        if self.settings.ask != "pairs":
            if choice is not None or score not in SCORES[self.settings.ask]:
                raise DataError(f"score: {score} is none of {', '.join(f'{s:g}' for s in SCORES[self.settings.ask])}")
            return "score", float(score)
        if choice in ("left", "right") and score is None:
            return ("first" if (choice == "left") == (question.left == 0) else "second"), None
        if choice not in ("tie", "both_bad") or score is not None:
            raise DataError(f"choice: {choice!r} must be left, right, tie, both_bad or skip")
        return choice, None

    def _shown(self, question: RatingQuestion) -> dict[str, Any]:
        """The question as the page draws it: nothing tells which model wrote an answer."""
        item = self.items[question.place]
        answers = list(item.answers)
        if question.left == 1:
            answers.reverse()
        turns = [[{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers]
        return {"item": item.id, "prompt": opening(item), "answers": turns, "asked": question.asked}

    # -- agreement -----------------------------------------------------------------------------------------------------

    def agreement(self) -> Agreement:
        """Agreement of all ratings so far; computed anew where there are new ones."""
        version = self.journal.version
        known = self._agreement
        if known is None or known[0] != version:
            known = (version, agreement(self.journal))
            self._agreement = known
        return known[1]
