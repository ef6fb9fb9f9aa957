"""Labels: the truth that the reward assumes, where it came from, and how often pseudo-labels were right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl_core.analysis.statistics import wilson_interval
from rl_core.errors import DataError
from rl_core.online.voting import VoteOutcome, normalise_answer

LabelSource = Literal["consensus", "environment", "feedback"]
_SOURCE_RANK = {"environment": 0, "consensus": 1, "feedback": 2}
MAX_TEXT_CHARACTERS = 65_536  # of an answer or a comment


@dataclass(frozen=True, slots=True)
class Label:
    """Right answer, or score of one answer.

    answer: `text` is the right answer to the request. score: `score` is the reward of the answers that equal `text`
    (None = the returned answer); nothing is known about the others. played: the environment's reward is used.
    """

    kind: Literal["answer", "score", "played"]
    source: LabelSource
    text: str | None = None
    score: float | None = None
    confidence: float = 1.0
    comment: str = ""

    def check_content(self) -> None:
        """Raise DataError for a label without content, or with too much."""
        if self.source not in _SOURCE_RANK or self.kind not in ("answer", "score", "played"):
            raise DataError(f"label: kind {self.kind!r} of source {self.source!r} is unknown")
        if self.kind == "answer" and (self.text is None or not self.text.strip()):
            raise DataError("label: an answer needs a text")
        has_score = self.score is not None and math.isfinite(self.score) and abs(self.score) <= 1
        if self.kind == "score" and not has_score:
            raise DataError(f"label: score {self.score} must be a number from -1 to 1")
        if not 0 <= self.confidence <= 1:
            raise DataError(f"label: confidence {self.confidence} must lie between 0 and 1")
        for name, value in (("text", self.text), ("comment", self.comment)):
            if value is not None and len(value) > MAX_TEXT_CHARACTERS:
                raise DataError(
                    f"label: {name} of {len(value)} characters; at most {MAX_TEXT_CHARACTERS}"
                )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Label:
        """Parse the output of `to_json`. Raises: DataError."""
        try:
            label = cls(**row)
            label.check_content()
        except TypeError as error:
            raise DataError(f"label: {error}") from error
        return label


def create_pseudo_label(
    vote: VoteOutcome,
    *,
    min_confidence: float,
    min_votes: int,
    confidence: Literal["share", "wilson"] = "share",
) -> Label | None:
    """Return the vote's answer as a label if at least `min_votes` ballots with enough confidence were cast, else None.

    A ballot of weight 0, which the environment's check refused, does not count as cast.
    Args:
        confidence: compare the winner's share, or the lower bound of its Wilson interval.
    """
    vote_confidence = vote.confidence if confidence == "share" else vote.low
    num_cast = sum(weight > 0 for weight in vote.weights)
    if vote.answer is None or not vote.answer.strip():
        return None
    if num_cast < min_votes or vote_confidence < min_confidence:
        return None
    return Label("answer", "consensus", text=vote.answer, confidence=vote.confidence)


def create_feedback_label(
    returned_answer: str | None,
    *,
    right_answer: str | None = None,
    score: float | None = None,
    thumbs: Literal["up", "down"] | None = None,
    comment: str = "",
) -> Label:
    """Convert a caller's feedback on an answer to a label.

    Args:
        returned_answer: the answer that the caller got, or None.
        right_answer: the right answer.
        score: of the returned answer, -1 to 1.
        thumbs: up = it is right, down = it is worth 0.
    Raises: DataError unless exactly one of the last three is set.
    """
    if sum(value is not None for value in (right_answer, score, thumbs)) != 1:
        raise DataError(
            "feedback: needs exactly one of a right answer, a score, and thumbs up or down"
        )
    if thumbs not in (None, "up", "down"):
        raise DataError(f"feedback: thumbs {thumbs!r} must be up or down")
    if right_answer is not None:
        label = Label("answer", "feedback", text=right_answer, comment=comment)
    elif thumbs == "up" and returned_answer is not None and returned_answer.strip():
        label = Label("answer", "feedback", text=returned_answer, comment=comment)
    else:
        value = score if score is not None else float(thumbs == "up")
        label = Label("score", "feedback", text=returned_answer, score=value, comment=comment)
    label.check_content()
    return label


def choose_prevailing_label(old: Label | None, new: Label) -> Label:
    """Return the label that counts: feedback before consensus before the environment's reward; the later of equals."""
    return new if old is None or _SOURCE_RANK[new.source] >= _SOURCE_RANK[old.source] else old


@dataclass(slots=True)
class PseudoLabelPrecision:
    """Share of pseudo-labels that feedback on the same request confirms; each request counts by its latest feedback."""

    agreed: int = 0
    disagreed: int = 0

    def observe(
        self, pseudo: Label, feedback: Label, normalise: Callable[[str], str] = normalise_answer
    ) -> bool | None:
        """Count one pair and return whether they agree; None if the feedback is about another answer.

        A right answer agrees if it has the same normal form. A score of the consensus agrees at 0.5 or more.
        """
        verdict = _check_agreement(pseudo, feedback, normalise)
        if verdict is not None:
            self.agreed += verdict
            self.disagreed += not verdict
        return verdict

    def remove_observation(self, verdict: bool | None) -> None:
        """Remove a pair whose feedback has been replaced."""
        if verdict is not None:
            self.agreed -= verdict
            self.disagreed -= not verdict

    def is_at_least(self, share: float) -> bool:
        """Return False if the upper bound of the precision's 95% Wilson interval lies below `share`."""
        count = self.agreed + self.disagreed
        return not count or wilson_interval(self.agreed, count)[1] >= share

    def compute_metrics(self) -> dict[str, float]:
        """Return the precision with its 95% Wilson interval and the number of pairs; {} without a pair."""
        count = self.agreed + self.disagreed
        if not count:
            return {}
        low, high = wilson_interval(self.agreed, count)
        return {
            "online/pseudo_label_precision": self.agreed / count,
            "online/pseudo_label_precision_low": low,
            "online/pseudo_label_precision_high": high,
            "online/pseudo_labels_checked": float(count),
        }


def _check_agreement(
    pseudo: Label, feedback: Label, normalise: Callable[[str], str]
) -> bool | None:
    assert pseudo.text is not None, "a consensus has an answer"
    if feedback.kind == "answer" and feedback.text is not None:
        return normalise(feedback.text) == normalise(pseudo.text)
    if feedback.kind != "score" or feedback.text is None:
        return None
    if normalise(feedback.text) != normalise(pseudo.text):
        return None
    return feedback.score is not None and feedback.score >= 0.5
