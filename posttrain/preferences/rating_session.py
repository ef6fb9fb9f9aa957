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
from rl_core.preferences.agreement import Agreement, measure_agreement
from rl_core.preferences.items import RatedItem, build_prompt_messages
from rl_core.preferences.question_order import QuestionOrder, RatingQuestion, RewardPosterior
from rl_core.preferences.rating_journal import (
    Rating,
    RatingJournal,
    build_rating_rows,
    write_rating_rows,
)
from rl_core.settings import RatingSettings

log = logging.getLogger(__name__)

QUESTIONS = {
    "pairs": "Which answer is better?",
    "scores": "How good is this answer, from 1 (bad) to 5 (good)?",
    "thumbs": "Is this answer good?",
}
SCORES = {"scores": (1.0, 2.0, 3.0, 4.0, 5.0), "thumbs": (0.0, 1.0)}
# Journal and data file of each kind of question: opinions on different scales are never counted together.
JOURNAL_AND_DATA_FILES = {
    "pairs": ("ratings.jsonl", "preferences.jsonl"),
    "scores": ("score_ratings.jsonl", "scores.jsonl"),
    "thumbs": ("thumb_ratings.jsonl", "thumbs.jsonl"),
}
WRITE_SECONDS = 3.0  # between two looks whether the data file is behind the journal
WRITE_SHARE = 0.05  # of the time is spent writing it, at most


def filter_ratable_items(items: Sequence[RatedItem], settings: RatingSettings) -> list[RatedItem]:
    """Items with as many answers as `settings.ask` compares."""
    return [item for item in items if len(item.answers) == (2 if settings.ask == "pairs" else 1)]


class OutdatedQuestion(DataError):
    """The rated question is not the person's open one: a second tab, or a request that was sent twice."""


class RatingSession:
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
        self.folder, self.items, self.settings = (
            folder,
            filter_ratable_items(items, settings),
            settings,
        )
        self.journal = RatingJournal(folder / JOURNAL_AND_DATA_FILES[settings.ask][0])
        self.order = QuestionOrder(
            self.items,
            self.journal,
            overlap=settings.overlap,
            repeat=settings.repeat,
            seed=seed,
            posterior=posterior if settings.choose == "uncertainty" else None,
        )
        self._written_version = -1  # version of the journal that the data file has
        self._lock = threading.Lock()
        self._cached_agreement: tuple[int, Agreement] | None = None
        self._stop_event = threading.Event()
        self._writer = threading.Thread(
            target=self._write_periodically, name="rating-rows", daemon=True
        )

    @property
    def rows_file(self) -> Path:
        """The data file: preference rows, or scored answers."""
        return self.folder / JOURNAL_AND_DATA_FILES[self.settings.ask][1]

    def __enter__(self) -> RatingSession:
        self.write_data_file()
        self._writer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_event.set()
        self._writer.join()
        self.write_data_file()

    def write_data_file(self) -> None:
        """Bring the data file up to the journal."""
        version = self.journal.version
        if version == self._written_version:
            return
        write_rating_rows(self.rows_file, build_rating_rows(self.items, self.journal))
        self._written_version = version

    def _write_periodically(self) -> None:
        pause = WRITE_SECONDS
        while not self._stop_event.wait(pause):
            started = time.monotonic()
            try:
                self.write_data_file()
            except PosttrainError as error:
                log.warning("%s; the ratings are in the journal", error)
            pause = max(WRITE_SECONDS, (time.monotonic() - started) / WRITE_SHARE)

    # -- questions and ratings -----------------------------------------------------------------------------------------

    def describe_question(self, rater: str) -> dict[str, Any]:
        """The person's question and progress, for the page."""
        found = self.order.choose_next_question(rater)
        return {
            "question": None if found is None else self._format_question(found),
            "rated": self.journal.count_ratings_of(rater),
            "items": len(self.items),
            "total": len(self.journal),
            "raters": len(self.journal.raters),
        }

    def record_rating(self, rater: str, answer: dict[str, Any], now: float) -> Rating:
        """Keep a rating of the person's open question; on the disk when this returns.

        Args:
            given: item, count (the person's ratings so far), choice ("left", "right", "tie", "both_bad", "skip"), or a
                score; reason, comment, seconds.
        Raises: OutdatedQuestion; DataError for a choice or score that is none; CheckpointError.
        """
        with self._lock:
            question = self.order.choose_next_question(rater)
            is_open = question is not None and self.items[question.item_index].id == answer["item"]
            if (
                question is None
                or not is_open
                or answer["count"] != self.journal.count_ratings_of(rater)
            ):
                raise OutdatedQuestion(
                    "this question was answered already, or is not the one that is open"
                )
            choice, score = self._resolve_choice(answer, question)
            if answer.get("reason") and answer["reason"] not in self.settings.reasons:
                raise DataError(
                    f"reason: {answer['reason']!r} is not one of those that can be chosen"
                )
            rating = Rating(
                number=0,
                item=answer["item"],
                rater=rater,
                choice=choice,
                score=score,
                left=question.left,
                reason=answer.get("reason", ""),
                comment=answer.get("comment", ""),
                seconds=round(answer.get("seconds", 0.0), 3),
                time=now,
                asked=question.times_asked,
            )
            kept = self.journal.add_rating(rating)
            self.order.record_rating(kept)
            return kept

    def undo_rating(self, rater: str, now: float) -> Rating | None:
        """Take back the person's last rating; its question is open again."""
        with self._lock:
            taken = self.journal.undo_last_rating(rater, now)
            if taken is not None:
                self.order.undo_rating(taken)
            return taken

    def _resolve_choice(
        self, answer: dict[str, Any], question: RatingQuestion
    ) -> tuple[str, float | None]:
        """Choice and score that a key stands for."""
        choice, score = answer.get("choice"), answer.get("score")
        if choice == "skip":
            return "skip", None
        if self.settings.ask != "pairs":
            if choice is not None or score not in SCORES[self.settings.ask]:
                raise DataError(
                    f"score: {score} is none of {', '.join(f'{s:g}' for s in SCORES[self.settings.ask])}"
                )
            return "score", float(score)
        if choice in ("left", "right") and score is None:
            return ("first" if (choice == "left") == (question.left == 0) else "second"), None
        if choice not in ("tie", "both_bad") or score is not None:
            raise DataError(f"choice: {choice!r} must be left, right, tie, both_bad or skip")
        return choice, None

    def _format_question(self, question: RatingQuestion) -> dict[str, Any]:
        """The question as the page draws it: nothing tells which model wrote an answer."""
        item = self.items[question.item_index]
        answers = list(item.answers)
        if question.left == 1:
            answers.reverse()
        turns = [
            [{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers
        ]
        return {
            "item": item.id,
            "prompt": build_prompt_messages(item),
            "answers": turns,
            "asked": question.times_asked,
        }

    # -- agreement -----------------------------------------------------------------------------------------------------

    def compute_agreement(self) -> Agreement:
        """Agreement of all ratings so far; computed anew where there are new ones."""
        version = self.journal.version
        known = self._cached_agreement
        if known is None or known[0] != version:
            known = (version, measure_agreement(self.journal))
            self._cached_agreement = known
        return known[1]
