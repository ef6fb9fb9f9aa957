"""Records of served answers, and the interfaces of those that take them: for learning from what was served.

T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.inference.served_requests import TopTokens
from rl_core.types import Conversation, Rollout

__all__ = ["AnswerSink", "FeedbackLabel", "FeedbackSink", "ServedAnswer"]


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer as it was sampled."""

    answer_id: str  # as the client knows it
    choice: int  # index among the answers to one request
    policy_version: int  # of the weights that every one of its tokens comes from
    prompt_ids: list[int]
    completion_ids: list[int]  # [T], the ending token included
    sampler_logprobs: list[float]  # [T] nats, of the distribution that the tokens were drawn from
    temperature: float  # of that distribution; 0 = greedy
    text: str
    finish_reason: str  # stop, length or tool_calls
    caller: str = ""
    top: TopTokens | None = None  # the most likely tokens and the mass of the rest, where they were recorded
    rollout: Rollout | None = None  # of a session with an environment
    seed: int = 0  # of its samples
    is_restricted: bool = False  # True = drawn from a part of the vocabulary
    conversation: Conversation | None = None  # None = a session with an environment
    max_votes: int = 0  # samples that the vote could have drawn; 0 = the answers were not voted on


@dataclass(frozen=True, slots=True)
class FeedbackLabel:
    """Judgement of an answer by its reader; at least one of answer, score and thumb is given."""

    answer: str | None = None  # the right answer
    score: float | None = None
    thumb: str | None = None  # up or down
    comment: str = ""
    caller: str = ""

    def to_json(self) -> Mapping[str, Any]:
        """A plain dict."""
        return {name: getattr(self, name) for name in ("answer", "score", "thumb", "comment", "caller")}


class AnswerSink(Protocol):
    """Taker of answers that were served."""

    top: int  # most likely tokens that are recorded for each sampled one; 0 = none

    def record(self, answers: Sequence[ServedAnswer]) -> None:
        """Take all answers to one request. Called on a thread of its own, in their order; it may wait."""


class FeedbackSink(Protocol):
    """Taker of labels."""

    def accept(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Take a label; it is durable when the call returns.

        Raises: UnknownAnswer for one that this sink does not know; DataError for a label that it cannot use;
            CheckpointError where the disk refuses.
        """
