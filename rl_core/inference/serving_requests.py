"""Requests to a serving loop: their sampling, deadlines and sampled tokens, and protocols around them.

`RequestSlots` is the interface of the two batchers (`continuous_batching.py`, `fallback_batching.py`); `AnswerSink`
and `FeedbackSink` receive served answers and their labels for learning.

K most likely tokens, T sampled tokens.
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
from rl_core.inference.token_rules import LogitsEditor, TokenRules
from rl_core.settings import SamplingSettings
from rl_core.types import Conversation, ImagePixels, Rollout


class ServerOverloaded(PosttrainError):
    """Error: the queue of a serving loop is full; `retry_after` estimates the seconds until it has room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(PosttrainError):
    """Error: a request exceeded its time limit."""


class RequestCancelled(PosttrainError):
    """Error: a request was cancelled."""


class EngineFault(BackendError):
    """Error: the engine failed during a request; the client may retry it."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at sampled positions, under the sampling distribution."""

    ids_TK: np.ndarray  # int32 [T, K], the most likely first
    logprobs_TK: np.ndarray  # float32 [T, K], nats; -inf where fewer than K tokens were possible
    rest_T: np.ndarray  # float32 [T], total probability of all other tokens

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> TopTokens | None:
        """Stack (ids [K], log-probabilities [K], rest) of each token; return None without rows."""
        if not rows:
            return None
        ids, logprobs, rest = zip(*rows, strict=True)
        return cls(
            np.stack(ids).astype(np.int32),
            np.stack(logprobs).astype(np.float32),
            np.array(rest, dtype=np.float32),
        )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens after the first, under softmax(logits); S tokens of the prompt."""

    logprobs: list[float]  # [S - 1], nats
    top: TopTokens | None  # of the same positions


@dataclass(eq=False, slots=True)
class AnswerSequence:
    """A `RolloutSequence` of one turn: an answer to a prompt.

    `has_stop_text` returns whether the newest of some tokens completes a stop text.
    """

    prompt_ids: list[int]
    seed: int
    has_stop_text: Callable[[list[int]], bool] | None = None
    images: Sequence[ImagePixels] = ()  # of the prompt
    tokens: list[int] = field(default_factory=list)  # sampled, including the ending one
    logprobs: list[float] = field(default_factory=list)  # of the tokens, nats
    hit_limit: bool = False  # True = cut off by a token limit

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Store the answer; see `RolloutSequence`."""
        self.tokens, self.logprobs, self.hit_limit = action_ids, logprobs, hit_limit
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """Return whether the newest token completes a stop text."""
        return self.has_stop_text is not None and self.has_stop_text(action_ids)


@functools.lru_cache(maxsize=4096)
def _create_drawing_settings(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> SamplingSettings:
    """Create one shared object for all requests whose tokens are drawn the same way."""
    return SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


@dataclass(eq=False, slots=True)
class ServedRequest:
    """One sequence to sample; itself a `RolloutSequence` whose errors affect no other sequence."""

    sequence: RolloutSequence
    sampling: (
        SamplingSettings  # of this request: temperature, top_p, top_k, min_p, max_completion_tokens
    )
    caller: str = ""  # callers take turns
    deadline: float = math.inf  # of the loop's clock
    limit: str = ""  # describes the deadline: the setting and its value
    top: int = 0  # most likely tokens to record for each sampled one
    streams: bool = False  # True = deliver `RequestProgress` while it runs
    has_stops: bool = False  # True = call `should_stop` after every token
    end_ids: frozenset[int] | None = None  # tokens that end an action; None = the model's
    # random numbers of the seed used by earlier requests of the same sequence
    drawn: int = 0
    rules: TokenRules | None = None  # of one answer, not of an episode
    # most likely tokens to record for each token of the prompt; None = the prompt is not scored
    prompt_top: int | None = None
    prompt_scores: PromptScores | None = None  # set before the first token
    owner: Any = None  # opaque data of the submitter
    policy_version: int | None = None  # of its weights, set at the first token
    # see `TopTokens.from_rows`
    top_rows: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)
    error: BaseException | None = None  # set if it ended without an answer
    is_cancelled: bool = False
    has_ended: bool = False
    # rest of a long prompt that the model has not read
    unread: list[int] = field(default_factory=list)
    num_reported_tokens: int = 0  # tokens of this turn already delivered as `RequestProgress`
    num_sampled_at_start: int = 0  # tokens sampled before it took its slot
    # only the settings that decide the draw of a token
    drawing: SamplingSettings = field(init=False)
    prompt_ids: list[int] = field(init=False)
    seed: int = field(init=False)
    editor: LogitsEditor | None = field(init=False)  # applies `rules`

    def __post_init__(self) -> None:
        self.editor = None if self.rules is None else LogitsEditor(self.rules)
        self.prompt_ids, self.seed = self.sequence.prompt_ids, self.sequence.seed
        sampling = self.sampling
        self.drawing = _create_drawing_settings(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )

    @property
    def images(self) -> Sequence[ImagePixels]:
        """Images of the sequence's tokens so far."""
        return getattr(self.sequence, "images", ())

    @property
    def allows_multiple_steps(self) -> bool:
        """True if nothing has to happen between two of its tokens."""
        return not (self.top or self.has_stops or self.is_restricted or self.end_ids is not None)

    @property
    def is_restricted(self) -> bool:
        """True = not drawn from the policy's distribution: from part of the vocabulary, or by rules."""
        return self.sampling.is_restricted or self.rules is not None

    @property
    def top_tokens(self) -> TopTokens | None:
        """The most likely tokens at each sampled position; None unless `top`."""
        return TopTokens.from_rows(self.top_rows)

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """See `RolloutSequence`; an error ends the sequence and is stored."""
        self.num_reported_tokens = 0
        if self.error is not None:
            return None
        try:
            return self.sequence.take_action(action_ids, logprobs, hit_limit)
        except Exception as error:
            self.error = error
            return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """See `RolloutSequence`; an error ends the sequence and is stored."""
        try:
            return self.sequence.should_stop(action_ids)
        except Exception as error:
            self.error = error
            return True


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """New tokens of a streaming request."""

    request: ServedRequest
    tokens: list[int]
    logprobs: list[float]
    top: TopTokens | None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The end of a request; `request.error` is None if it was answered."""

    request: ServedRequest


class RequestSlots(Protocol):
    """Interface of `ContinuousBatcher` and `FallbackBatcher`: the requests that one set of weights answers."""

    capacity: int
    free: int
    is_empty: bool
    requests: list[ServedRequest]
    can_step: bool
    is_batch_independent: bool

    def list_held_requests(self) -> list[tuple[ServedRequest, int]]:
        """List requests in slots with the tokens sampled since each took its slot."""

    def start_requests(self, requests: Sequence[ServedRequest]) -> None:
        """Start requests."""

    def remove_request(self, request: ServedRequest) -> None:
        """Free a request's slot."""

    def pause_request(self, request: ServedRequest) -> None:
        """Free a request's slot and save its state."""

    def resume_request(self, request: ServedRequest) -> None:
        """Resume a paused request."""

    def can_resume(self, request: ServedRequest) -> bool:
        """Return whether a paused request can use a slot."""

    def step(self) -> tuple[list[ServedRequest], list[RequestProgress]]:
        """Run one decoding step; return ended requests and progress."""

    def release_memory(self) -> None:
        """Release the memory."""


# opens slots over weights; the argument is the `wake` callback
SlotsFactory = Callable[[Callable[[], None]], RequestSlots]


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One sampled answer."""

    answer_id: str  # as sent to the client
    choice: int  # index among the answers to one request
    policy_version: int  # of the weights that sampled all of its tokens
    prompt_ids: list[int]
    completion_ids: list[int]  # [T], including the ending token
    sampler_logprobs: list[float]  # [T] nats, under the sampling distribution
    temperature: float  # of the sampling distribution; 0 = greedy
    text: str
    finish_reason: str  # stop, length or tool_calls
    caller: str = ""
    # the most likely tokens and the mass of the rest, if recorded
    top: TopTokens | None = None
    rollout: Rollout | None = None  # of a session with an environment
    seed: int = 0  # of its sampling
    is_restricted: bool = False  # see `ServedRequest.is_restricted`
    conversation: Conversation | None = None  # None = a session with an environment
    max_votes: int = 0  # most samples of the vote; 0 = no vote


@dataclass(frozen=True, slots=True)
class FeedbackLabel:
    """A reader's judgement of an answer; at least one of answer, score and thumb is set."""

    answer: str | None = None  # the right answer
    score: float | None = None
    thumb: str | None = None  # up or down
    comment: str = ""
    caller: str = ""

    def to_json(self) -> Mapping[str, Any]:
        """Return the label as a dict."""
        return {
            name: getattr(self, name) for name in ("answer", "score", "thumb", "comment", "caller")
        }


class AnswerSink(Protocol):
    """Receiver of served answers."""

    num_top_tokens: int  # most likely tokens to record for each sampled one; 0 = none

    def record_answers(self, answers: Sequence[ServedAnswer]) -> None:
        """Record all answers to one request. Called in order on a dedicated thread; may block."""


class FeedbackSink(Protocol):
    """Receiver of labels."""

    def accept_label(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """Store a label durably.

        Raises: UnknownAnswer if this sink does not know the answer; DataError for a label that it cannot use;
            CheckpointError if the label cannot be written to disk.
        """


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop text in it."""
    positions = [text.find(stop) for stop in stops if stop in text]
    return text[: min(positions)] if positions else text


def build_stop_test(
    decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> Callable[[list[int]], bool] | None:
    """Build the test for a stop text among the newest tokens; return None without stop texts."""
    if not stops:
        return None
    # A token has at least one byte, a character at most four; decoding may strip the first bytes.
    longest = 4 * max(map(len, stops)) + 8

    def has_stop(ids: list[int]) -> bool:
        text = decode(ids[-longest:])
        return any(stop in text for stop in stops)

    return has_stop
