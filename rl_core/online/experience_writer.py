"""Served answers and their labels into the experience log: what is kept, and what is not."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from rl_core.environments.environment import Environment
from rl_core.errors import (
    CheckpointError,
    DataError,
    EnvironmentFault,
    SettingsError,
    UnknownAnswer,
)
from rl_core.inference.serving_requests import FeedbackLabel, ServedAnswer
from rl_core.online.canary_gate import is_canary
from rl_core.online.experience import CHAT_ENVIRONMENT, build_served_experience
from rl_core.online.experience_log import ExperienceLog, ExperienceLogReader, list_segments
from rl_core.online.labels import create_feedback_label
from rl_core.settings import OnlineSettings

logger = logging.getLogger(__name__)

_MAX_KNOWN_ANSWERS = 100_000  # requests whose answers are remembered for their feedback
_MAX_LABELS_PER_ANSWER = 16  # of one answer: every label counts towards the next update
_MAX_BYTES_READ_AT_START = 64 * 2**20  # of the newest segments, read at the start for the same


class ExperienceWriter:
    """`AnswerSink` and `FeedbackSink` over an `ExperienceLog`; a context manager. Any thread.

    Kept are answers that something can be learned from: sampled (not greedy) from the whole vocabulary, of the
    environment that is learned (of conversations where there is none), and of no canary episode.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: OnlineSettings,
        environment: Environment | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """environment: that is learned; None = conversations."""
        self.settings, self.environment, self._clock = settings, environment, clock
        self.num_top_tokens = settings.service.record_top
        self.counts: Counter[str] = Counter()  # kept, labels, and requests left out by reason
        self._log = ExperienceLog(
            folder, segment_bytes=settings.buffer.segment_bytes, max_bytes=settings.buffer.max_bytes
        )
        self._returned_answers: OrderedDict[str, tuple[str | None, ...]] = OrderedDict()
        self._label_counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> ExperienceWriter:
        self._log.__enter__()
        try:
            self._load_known_answers()
        except BaseException:
            self._log.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.__exit__(kind, error, traceback)

    # Answers

    def record_answers(self, answers: Sequence[ServedAnswer]) -> None:
        """Keep the answers to one request; see `AnswerSink`."""
        why = self._find_exclusion_reason(answers)
        if why:
            self.counts[why] += 1
            return
        experience = build_served_experience(answers, self.settings.voting, self._clock())
        if experience.num_tokens > self.settings.buffer.max_tokens:
            self.counts["too_long"] += 1
            return
        with self._lock:
            try:
                number = self._log.append_experience(experience)
            except CheckpointError as error:
                self.counts["disk"] += 1
                logger.warning(
                    "request %s is not kept for learning: %s", experience.request_id, error
                )
                return
            if number is None:
                self.counts["full"] += 1
                return
            self.counts["kept"] += 1
            self._remember_answers(experience.request_id, experience.returned_answers)

    def _find_exclusion_reason(self, answers: Sequence[ServedAnswer]) -> str:
        """Reason for which nothing is learned from these answers; "" = something is."""
        first = answers[0]
        if first.temperature <= 0:
            return "greedy"
        if first.is_restricted:
            return "restricted"
        if not any(answer.completion_ids for answer in answers):
            return "empty"
        if len({answer.policy_version for answer in answers}) > 1:
            return "several_versions"
        played = first.rollout.trajectory if first.rollout is not None else None
        wanted = self.environment.name if self.environment is not None else CHAT_ENVIRONMENT
        if (played.environment if played is not None else CHAT_ENVIRONMENT) != wanted:
            return "other_environment"
        if played is not None and self.environment is not None:
            try:
                return "canary" if is_canary(self.environment, played.level, played.seed) else ""
            except (
                SettingsError,
                EnvironmentFault,
            ) as error:  # never learned from where it cannot be told
                logger.warning(
                    "level '%s', seed %d is not kept for learning: %s",
                    played.level,
                    played.seed,
                    error,
                )
                return "failed"
        return ""

    # Labels

    def knows(self, answer_id: str) -> bool:
        """True = the answer is in the log, and can be labelled."""
        with self._lock:
            return answer_id in self._returned_answers

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Keep a label; see `FeedbackSink`."""
        with self._lock:
            given = self._returned_answers.get(answer_id)
            if given is None:
                raise UnknownAnswer(f"nothing is learned from answer '{answer_id}'")
            if choice >= len(given):
                raise DataError(
                    f"answer '{answer_id}' has {len(given)} choices, none with index {choice}"
                )
            if self._label_counts[answer_id] >= _MAX_LABELS_PER_ANSWER:
                raise DataError(
                    f"answer '{answer_id}' has {_MAX_LABELS_PER_ANSWER} labels already; the last of them counts"
                )
            has_answer, has_score = label.answer is not None, label.score is not None
            found = create_feedback_label(
                given[choice],
                right_answer=label.answer,
                score=label.score if not has_answer else None,
                thumbs=cast("Literal['up', 'down'] | None", label.thumb)
                if not (has_answer or has_score)
                else None,
                comment=label.comment,
            )
            if self._log.append_label(answer_id, found) is None:
                self.counts["labels_full"] += 1
            else:
                self.counts["labels"] += 1
                self._label_counts[answer_id] += 1

    # Orders

    def append_orders(self, orders: Sequence[Mapping[str, Any]]) -> None:
        """Write orders to the worker, together. Raises: CheckpointError where the disk refuses or the log is full."""
        with self._lock:
            if self._log.append([("control", dict(order)) for order in orders]) is None:
                raise CheckpointError(
                    f"{self._log.folder}: the log is full (buffer.max_bytes), so the worker gets no orders"
                )

    def collect_metrics(self) -> dict[str, float]:
        """Requests kept and left out, by reason."""
        with self._lock:
            return {
                f"online/answers/{name}": float(count)
                for name, count in sorted(self.counts.items())
            }

    def _remember_answers(self, request_id: str, given: tuple[str | None, ...]) -> None:
        self._returned_answers[request_id] = given
        while len(self._returned_answers) > _MAX_KNOWN_ANSWERS:
            self._label_counts.pop(self._returned_answers.popitem(last=False)[0], None)

    def _load_known_answers(self) -> None:
        """Answers of the newest segments, so that their labels are taken after a restart as well."""
        found, size, first = list_segments(self._log.folder), 0, 1
        for number, path in reversed(found):
            size, first = size + path.stat().st_size, number
            if size > _MAX_BYTES_READ_AT_START:
                break
        for record in ExperienceLogReader(self._log.folder, after=first - 1).read_records():
            if record.kind == "experience":
                try:
                    experience = record.parse_experience()
                except DataError:
                    continue
                self._remember_answers(experience.request_id, experience.returned_answers)
            elif (
                record.kind == "label"
                and (request := str(record.value.get("request_id"))) in self._returned_answers
            ):
                self._label_counts[request] += 1
