"""Requests to a serving loop: a sequence, its sampling, the time that it has, and what was sampled for it.

K most likely tokens, T sampled tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_core.environments.step_pool import Turnover
from rl_core.errors import BackendError, PosttrainError
from rl_core.inference.sampling import RolloutSequence
from rl_core.settings import SamplingSettings

__all__ = ["AnswerSequence", "Cancelled", "DeadlinePassed", "Ended", "Overloaded", "Progress", "ServedRequest",
           "ServingFault", "TopTokens"]  # fmt: skip


class Overloaded(PosttrainError):
    """The queue of a serving loop is full; `retry_after`: seconds until there is likely to be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlinePassed(PosttrainError):
    """A request took longer than it may."""


class Cancelled(PosttrainError):
    """A request was taken back."""


class ServingFault(BackendError):
    """The engine failed under a request, which can be sent again."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at sampled positions, of the distribution that the tokens were drawn from."""

    ids_TK: np.ndarray  # int32 [T, K], the most likely first
    logprobs_TK: np.ndarray  # float32 [T, K], nats; -inf where fewer than K tokens were possible
    rest_T: np.ndarray  # float32 [T], probability of all others together

    @classmethod
    def stacked(cls, rows: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> TopTokens | None:
        """Of (ids [K], log-probabilities [K], rest) of each token; None for no rows."""
        if not rows:
            return None
        ids, logprobs, rest = zip(*rows, strict=True)
        return cls(
            np.stack(ids).astype(np.int32), np.stack(logprobs).astype(np.float32), np.array(rest, dtype=np.float32)
        )


@dataclass(eq=False, slots=True)
class AnswerSequence:
    """A `RolloutSequence` of one turn: an answer to a prompt.

    `stops`: True = the newest of these tokens completes a stop text.
    """

    prompt_ids: list[int]
    seed: int
    stops: Callable[[list[int]], bool] | None = None
    tokens: list[int] = field(default_factory=list)  # sampled, the ending one included
    logprobs: list[float] = field(default_factory=list)  # theirs
    hit_limit: bool = False  # True = cut off by a limit of tokens

    def advance(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> Turnover:
        """Take the answer; see `RolloutSequence`."""
        self.tokens, self.logprobs, self.hit_limit = action_ids, logprobs, hit_limit
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """True = the newest token completes a stop text."""
        return self.stops is not None and self.stops(action_ids)


@functools.lru_cache(maxsize=4096)
def _drawing(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingSettings:
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
    drawn: int = 0  # random numbers of the seed that earlier requests of the same sequence have used
    owner: Any = None  # of whoever submitted it
    policy_version: int | None = None  # of the weights that it runs on, from its first token on
    top_rows: list[tuple[np.ndarray, np.ndarray, float]] = field(default_factory=list)  # see `TopTokens.stacked`
    error: BaseException | None = None  # why it ended without an answer
    is_cancelled: bool = False
    has_ended: bool = False
    unread: list[int] = field(default_factory=list)  # tokens of a long prompt that the model has not read
    told: int = 0  # tokens of this turn that `Progress` has told
    held_since: int = 0  # tokens that it had sampled when it took its slot
    drawing: SamplingSettings = field(init=False)  # what decides the draw of a token, and nothing else
    prompt_ids: list[int] = field(init=False)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_ids, self.seed = self.sequence.prompt_ids, self.sequence.seed
        own = self.sampling
        self.drawing = _drawing(own.temperature, own.top_k, own.top_p, own.min_p)

    @property
    def is_plain(self) -> bool:
        """True = nothing is to be done between one of its tokens and the next."""
        return not (self.top or self.has_stops or self.sampling.is_restricted or self.end_ids is not None)

    @property
    def top_tokens(self) -> TopTokens | None:
        """The most likely tokens at each sampled one; None unless `top`."""
        return TopTokens.stacked(self.top_rows)

    def advance(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> Turnover:
        """See `RolloutSequence`; an error ends the sequence, and is kept."""
        self.told = 0
        if self.error is not None:
            return None
        try:
            return self.sequence.advance(action_ids, logprobs, hit_limit)
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
class Progress:
    """New tokens of a request that streams."""

    request: ServedRequest
    tokens: list[int]
    logprobs: list[float]
    top: TopTokens | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a request; `request.error` is None where it was answered."""

    request: ServedRequest
