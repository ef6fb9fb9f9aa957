"""Rating session: items, ratings, the next question, and the data file built from the ratings."""

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
# Journal and data file of each kind of question: ratings on different scales are never counted together.
JOURNAL_AND_DATA_FILES = {
    "pairs": ("ratings.jsonl", "preferences.jsonl"),
    "scores": ("score_ratings.jsonl", "scores.jsonl"),
    "thumbs": ("thumb_ratings.jsonl", "thumbs.jsonl"),
}
WRITE_SECONDS = 3.0  # between two checks whether the data file lags behind the journal
WRITE_SHARE = 0.05  # the largest share of time spent on writing it


def filter_ratable_items(items: Sequence[RatedItem], settings: RatingSettings) -> list[RatedItem]:
    """Return the items with as many answers as `settings.ask` compares."""
    num_answers = 2 if settings.ask == "pairs" else 1
    return [item for item in items if len(item.answers) == num_answers]


class OutdatedQuestion(DataError):
    """The rated question is not the rater's open one: a second tab, or a request that was sent twice."""


class RatingSession:
    """State behind the page; a context manager, thread-safe."""

    def __init__(
        self,
        folder: Path,
        items: Sequence[RatedItem],
        settings: RatingSettings,
        *,
        seed: int = 0,
        posterior: RewardPosterior | None = None,
    ) -> None:
        """Open the journal.

        Args:
            folder: of the journal and the data file; locked by the caller.
            items: those that `settings.ask` can use are rated.
        """
        self.folder, self.settings = folder, settings
        self.items = filter_ratable_items(items, settings)
        self.journal = RatingJournal(folder / JOURNAL_AND_DATA_FILES[settings.ask][0])
        self.order = QuestionOrder(
            self.items,
            self.journal,
            overlap=settings.overlap,
            repeat=settings.repeat,
            seed=seed,
            posterior=posterior if settings.choose == "uncertainty" else None,
        )
        self._written_version = -1  # version of the journal in the data file
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
        """Write the data file if the journal has changed."""
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

    def describe_question(self, rater: str) -> dict[str, Any]:
        """Describe the rater's question and progress, for the page."""
        question = self.order.choose_next_question(rater)
        return {
            "question": None if question is None else self._format_question(question),
            "rated": self.journal.count_ratings_of(rater),
            "items": len(self.items),
            "total": len(self.journal),
            "raters": len(self.journal.raters),
        }

    def record_rating(self, rater: str, answer: dict[str, Any], now: float) -> Rating:
        """Record a rating of the rater's open question; it is on the disk when this returns.

        Args:
            answer: item, count (the rater's ratings so far), choice ("left", "right", "tie", "both_bad", "skip"), or a
                score; reason, comment, seconds.
        Raises: OutdatedQuestion; DataError for an invalid choice or score; CheckpointError.
        """
        with self._lock:
            question = self.order.choose_next_question(rater)
            is_open = question is not None and self.items[question.item_index].id == answer["item"]
            is_next = answer["count"] == self.journal.count_ratings_of(rater)
            if question is None or not is_open or not is_next:
                raise OutdatedQuestion("this question was answered already, or is not the open one")
            choice, score = self._resolve_choice(answer, question)
            if answer.get("reason") and answer["reason"] not in self.settings.reasons:
                raise DataError(f"reason: {answer['reason']!r} is not one of the choices")
            rating = self.journal.add_rating(
                Rating(
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
            )
            self.order.record_rating(rating)
            return rating

    def undo_rating(self, rater: str, now: float) -> Rating | None:
        """Undo the rater's last rating; its question is open again."""
        with self._lock:
            rating = self.journal.undo_last_rating(rater, now)
            if rating is not None:
                self.order.undo_rating(rating)
            return rating

    def _resolve_choice(
        self, answer: dict[str, Any], question: RatingQuestion
    ) -> tuple[str, float | None]:
        """Return choice and score of an answer. Raises: DataError."""
        choice, score = answer.get("choice"), answer.get("score")
        if choice == "skip":
            return "skip", None
        if self.settings.ask != "pairs":
            scores = SCORES[self.settings.ask]
            if choice is not None or score not in scores:
                names = ", ".join(f"{value:g}" for value in scores)
                raise DataError(f"score: {score} is none of {names}")
            return "score", float(score)
        if choice in ("left", "right") and score is None:
            is_first = (choice == "left") == (question.left == 0)
            return ("first" if is_first else "second"), None
        if choice not in ("tie", "both_bad") or score is not None:
            raise DataError(f"choice: {choice!r} must be left, right, tie, both_bad or skip")
        return choice, None

    def _format_question(self, question: RatingQuestion) -> dict[str, Any]:
        """Format the question for the page; nothing reveals which model wrote an answer."""
        item = self.items[question.item_index]
        answers = list(item.answers)
        if question.left == 1:
            answers.reverse()
        turns = [
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            for answer in answers
        ]
        return {
            "item": item.id,
            "prompt": build_prompt_messages(item),
            "answers": turns,
            "asked": question.times_asked,
        }

    def compute_agreement(self) -> Agreement:
        """Compute the agreement of all ratings so far; recomputed only if there are new ones."""
        version = self.journal.version
        cached = self._cached_agreement
        if cached is None or cached[0] != version:
            cached = (version, measure_agreement(self.journal))
            self._cached_agreement = cached
        return cached[1]
