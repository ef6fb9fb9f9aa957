"""Writer of served answers and their labels to the experience log; decides what is stored."""

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
from rl_core.online.labels import Label, create_feedback_label
from rl_core.settings import OnlineSettings

logger = logging.getLogger(__name__)

_MAX_KNOWN_ANSWERS = 100_000  # requests whose answers are kept in memory for feedback
_MAX_LABELS_PER_ANSWER = 16  # limited, because every label counts towards the next update
_MAX_BYTES_READ_AT_START = 64 * 2**20  # of the newest segments, to restore the known answers


class ExperienceWriter:
    """Sink of answers and feedback (`AnswerSink`, `FeedbackSink`) over an `ExperienceLog`.

    A context manager; thread-safe. Stored are answers that can be learned from: sampled (not greedy) from the complete
    vocabulary, of the environment that is being learned (or conversations if there is none), and not of a canary
    episode.
    """

    def __init__(
        self,
        folder: Path | str,
        settings: OnlineSettings,
        environment: Environment | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Configure the writer.

        Args:
            environment: that is being learned; None = conversations.
        """
        self.settings, self.environment, self._clock = settings, environment, clock
        self.num_top_tokens = settings.service.record_top
        self.counts: Counter[str] = Counter()  # kept, labels, and excluded requests by reason
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

    def record_answers(self, answers: Sequence[ServedAnswer]) -> None:
        """Store the answers to one request; see `AnswerSink`."""
        reason = self._find_exclusion_reason(answers)
        if reason:
            self.counts[reason] += 1
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
                    "request %s is not stored for learning: %s", experience.request_id, error
                )
                return
            if number is None:
                self.counts["full"] += 1
                return
            self.counts["kept"] += 1
            self._remember_answers(experience.request_id, experience.returned_answers)

    def _find_exclusion_reason(self, answers: Sequence[ServedAnswer]) -> str:
        """Return the reason why these answers cannot be learned from; "" if they can."""
        first = answers[0]
        if first.temperature <= 0:
            return "greedy"
        if first.is_restricted:
            return "restricted"
        if not any(answer.completion_ids for answer in answers):
            return "empty"
        if len({answer.policy_version for answer in answers}) > 1:
            return "several_versions"
        trajectory = first.rollout.trajectory if first.rollout is not None else None
        name = trajectory.environment if trajectory is not None else CHAT_ENVIRONMENT
        learned = [CHAT_ENVIRONMENT]
        if self.environment is not None:
            learned = [part.name for part in self.environment.parts]
        if name not in learned:
            return "other_environment"
        if trajectory is None or self.environment is None:
            return ""
        level, seed = trajectory.level, trajectory.seed
        try:
            return "canary" if is_canary(self.environment, level, seed) else ""
        # If it cannot be determined, the answer is not learned from.
        except (SettingsError, EnvironmentFault) as error:
            logger.warning("level '%s', seed %d is not stored for learning: %s", level, seed, error)
            return "failed"

    def knows(self, answer_id: str) -> bool:
        """Return whether the answer is in the log and can be labelled."""
        with self._lock:
            return answer_id in self._returned_answers

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Store a label; see `FeedbackSink`."""
        with self._lock:
            answers = self._returned_answers.get(answer_id)
            if answers is None:
                raise UnknownAnswer(f"answer '{answer_id}' is not used for learning")
            if choice >= len(answers):
                raise DataError(
                    f"answer '{answer_id}' has {len(answers)} choices, none with index {choice}"
                )
            if self._label_counts[answer_id] >= _MAX_LABELS_PER_ANSWER:
                raise DataError(
                    f"answer '{answer_id}' has {_MAX_LABELS_PER_ANSWER} labels already; the last of them counts"
                )
            feedback = _create_label(answers[choice], label)
            if self._log.append_label(answer_id, feedback) is None:
                self.counts["labels_full"] += 1
            else:
                self.counts["labels"] += 1
                self._label_counts[answer_id] += 1

    def append_orders(self, orders: Sequence[Mapping[str, Any]]) -> None:
        """Append orders for the worker together. Raises: CheckpointError for a disk error or a full log."""
        with self._lock:
            if self._log.append([("control", dict(order)) for order in orders]) is None:
                raise CheckpointError(
                    f"{self._log.folder}: the log is full (buffer.max_bytes), so the worker receives no orders"
                )

    def collect_metrics(self) -> dict[str, float]:
        """Return the numbers of stored and excluded requests, by reason."""
        with self._lock:
            return {
                f"online/answers/{name}": float(count)
                for name, count in sorted(self.counts.items())
            }

    def _remember_answers(self, request_id: str, answers: tuple[str | None, ...]) -> None:
        self._returned_answers[request_id] = answers
        while len(self._returned_answers) > _MAX_KNOWN_ANSWERS:
            oldest_id, _ = self._returned_answers.popitem(last=False)
            self._label_counts.pop(oldest_id, None)

    def _load_known_answers(self) -> None:
        """Load the answers of the newest segments, so that they can be labelled after a restart."""
        size, first = 0, 1
        for number, path in reversed(list_segments(self._log.folder)):
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
            elif record.kind == "label":
                request_id = str(record.value.get("request_id"))
                if request_id in self._returned_answers:
                    self._label_counts[request_id] += 1


def _create_label(returned_answer: str | None, feedback: FeedbackLabel) -> Label:
    """Convert feedback to a label; an answer takes precedence over a score, a score over thumbs."""
    score, thumb = feedback.score, feedback.thumb
    if feedback.answer is not None:
        score = thumb = None
    elif score is not None:
        thumb = None
    return create_feedback_label(
        returned_answer,
        right_answer=feedback.answer,
        score=score,
        thumbs=cast("Literal['up', 'down'] | None", thumb),
        comment=feedback.comment,
    )
