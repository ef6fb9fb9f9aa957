"""Requests to a serving loop: a sequence, its sampling, the time that it has, and what was sampled for it.

K most likely tokens, T sampled tokens.

Interface of the slots in which one set of weights answers requests: `served_slots` and `served_rows` have it.

Records of served answers, and the interfaces of those that take them: for learning from what was served.

T sampled tokens.

Stop texts: the test for one among the newest tokens, and the text before it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rl_core.environments.step_pool import TurnOutcome
from rl_core.errors import BackendError, PosttrainError
from rl_core.inference.sampling import RolloutSequence
from rl_core.settings import SamplingSettings
from rl_core.types import Conversation, Rollout


class ServerOverloaded(PosttrainError):
    """The queue of a serving loop is full; `retry_after`: seconds until there is likely to be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(PosttrainError):
    """A request took longer than it may."""


class RequestCancelled(PosttrainError):
    """A request was taken back."""


class EngineFault(BackendError):
    """The engine failed under a request, which can be sent again."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at sampled positions, of the distribution that the tokens were drawn from."""

    ids_TK: np.ndarray  # int32 [T, K], the most likely first
    logprobs_TK: np.ndarray  # float32 [T, K], nats; -inf where fewer than K tokens were possible
    rest_T: np.ndarray  # float32 [T], probability of all others together

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> TopTokens | None:
        """Of (ids [K], log-probabilities [K], rest) of each token; None for no rows."""
        if not rows:
            return None
        ids, logprobs, rest = zip(*rows, strict=True)
        return cls(
            np.stack(ids).astype(np.int32),
            np.stack(logprobs).astype(np.float32),
            np.array(rest, dtype=np.float32),
        )


@dataclass(eq=False, slots=True)
class AnswerSequence:
    """A `RolloutSequence` of one turn: an answer to a prompt.

    `stops`: True = the newest of these tokens completes a stop text.
    """

    prompt_ids: list[int]
    seed: int
    has_stop_text: Callable[[list[int]], bool] | None = None
    tokens: list[int] = field(default_factory=list)  # sampled, the ending one included
    logprobs: list[float] = field(default_factory=list)  # theirs
    hit_limit: bool = False  # True = cut off by a limit of tokens

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Take the answer; see `RolloutSequence`."""
        self.tokens, self.logprobs, self.hit_limit = action_ids, logprobs, hit_limit
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """True = the newest token completes a stop text."""
        return self.has_stop_text is not None and self.has_stop_text(action_ids)


@functools.lru_cache(maxsize=4096)
def _create_drawing_settings(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> SamplingSettings:
    """One object for all requests whose tokens are drawn in the same way."""
    return SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@dataclass(eq=False, slots=True)
class ServedRequest:
    """One sequence to be sampled; a `RolloutSequence` itself, whose failure is its own alone."""

    sequence: RolloutSequence
    sampling: SamplingSettings  # temperature, top_p, top_k, min_p and max_completion_tokens of this request
    caller: str = ""  # callers take turns
    deadline: float = math.inf  # of the loop's clock
    limit: str = ""  # the deadline in words: what sets it, and how long it is
    top: int = 0  # most likely tokens that are kept for each sampled one
    streams: bool = False  # True = `Progress` is delivered while it runs
    has_stops: bool = False  # True = `should_stop` is asked after every token
    end_ids: frozenset[int] | None = None  # tokens that end an action; None = the model's
    # random numbers of the seed that earlier requests of the same sequence have used
    drawn: int = 0
    owner: Any = None  # of whoever submitted it
    policy_version: int | None = None  # of the weights that it runs on, from its first token on
    # see `TopTokens.stacked`
    top_rows: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)
    error: BaseException | None = None  # why it ended without an answer
    is_cancelled: bool = False
    has_ended: bool = False
    # tokens of a long prompt that the model has not read
    unread: list[int] = field(default_factory=list)
    num_reported_tokens: int = 0  # tokens of this turn that `Progress` has told
    num_sampled_at_start: int = 0  # tokens that it had sampled when it took its slot
    # what decides the draw of a token, and nothing else
    drawing: SamplingSettings = field(init=False)
    prompt_ids: list[int] = field(init=False)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_ids, self.seed = self.sequence.prompt_ids, self.sequence.seed
        own = self.sampling
        self.drawing = _create_drawing_settings(own.temperature, own.top_k, own.top_p, own.min_p)

    @property
    def allows_multiple_steps(self) -> bool:
        """True = nothing is to be done between one of its tokens and the next."""
        return not (
            self.top or self.has_stops or self.sampling.is_restricted or self.end_ids is not None
        )

    @property
    def top_tokens(self) -> TopTokens | None:
        """The most likely tokens at each sampled one; None unless `top`."""
        return TopTokens.from_rows(self.top_rows)

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """See `RolloutSequence`; an error ends the sequence, and is kept."""
        self.num_reported_tokens = 0
        if self.error is not None:
            return None
        try:
            return self.sequence.take_action(action_ids, logprobs, hit_limit)
        except Exception as error:
            self.error = error
            return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """See `RolloutSequence`."""
        try:
            return self.sequence.should_stop(action_ids)
        except Exception as error:
            self.error = error
            return True


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """New tokens of a request that streams."""

    request: ServedRequest
    tokens: list[int]
    logprobs: list[float]
    top: TopTokens | None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The end of a request; `request.error` is None where it was answered."""

    request: ServedRequest


class RequestSlots(Protocol):
    """Interface of `ContinuousBatcher` and `FallbackBatcher`: the requests that one set of weights answers."""

    capacity: int
    free: int
    is_empty: bool
    requests: list[ServedRequest]
    can_step: bool

    def list_held_requests(self) -> list[tuple[ServedRequest, int]]:
        """Requests in slots, with the tokens sampled since they took them."""

    def start_requests(self, requests: Sequence[ServedRequest]) -> None:
        """Begin requests."""

    def remove_request(self, request: ServedRequest) -> None:
        """Free a request's slot."""

    def pause_request(self, request: ServedRequest) -> None:
        """Free a request's slot and keep its place."""

    def resume_request(self, request: ServedRequest) -> None:
        """Take a parked request up again."""

    def can_resume(self, request: ServedRequest) -> bool:
        """False = a slot would be of no use to a parked request."""

    def step(self) -> tuple[list[ServedRequest], list[RequestProgress]]:
        """One decoding step."""

    def release_memory(self) -> None:
        """Let go of memory."""


# is given `wake`; opens slots over weights
SlotsFactory = Callable[[Callable[[], None]], RequestSlots]


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
    # the most likely tokens and the mass of the rest, where they were recorded
    top: TopTokens | None = None
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
        return {
            name: getattr(self, name) for name in ("answer", "score", "thumb", "comment", "caller")
        }


class AnswerSink(Protocol):
    """Taker of answers that were served."""

    num_top_tokens: int  # most likely tokens that are recorded for each sampled one; 0 = none

    def record_answers(self, answers: Sequence[ServedAnswer]) -> None:
        """Take all answers to one request. Called on a thread of its own, in their order; it may wait."""


class FeedbackSink(Protocol):
    """Taker of labels."""

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Take a label; it is durable when the call returns.

        Raises: UnknownAnswer for one that this sink does not know; DataError for a label that it cannot use;
            CheckpointError where the disk refuses.
        """


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop text in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def build_stop_test(
    decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> Callable[[list[int]], bool] | None:
    """The test for a stop text among the newest tokens; None = there are no such texts."""
    if not stops:
        return None
    # A token has at least one byte, a character at most four; decoding may strip the first of them.
    longest = 4 * max(map(len, stops)) + 8

    def has_stop(ids: list[int]) -> bool:
        text = decode(ids[-longest:])
        return any(stop in text for stop in stops)

    return has_stop
