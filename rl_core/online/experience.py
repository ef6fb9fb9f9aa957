"""Experiences: answered requests with all their samples, as the buffer stores them and the worker learns from them.

The samples of a request stay together: they are the group whose rewards are compared, and they form one record of the
buffer, so that a crash leaves all of them or none. Served answers become ballots, rollouts and the recorded
distribution.

Suffixes: T completion tokens, K recorded tokens.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.inference.serving_requests import ServedAnswer, TopTokens
from rl_core.online.voting import Ballot, VoteOutcome, tally_votes
from rl_core.settings import VotingSettings
from rl_core.storage.manifest import digest_bytes
from rl_core.types import Conversation, Rollout, StopReason, Trajectory, Turn

CHAT_ENVIRONMENT = "chat"  # environment and level of a conversation outside any environment
MAX_NAME_CHARACTERS = 256  # of a request's id or a caller's name
MASS_TOLERANCE = 1e-3  # of recorded probabilities, which are float32


@dataclass(frozen=True, slots=True)
class RecordedTopK:
    """The sampler's most likely tokens at each completion token, and the probability mass of all others."""

    ids_TK: NDArray[np.int32]
    logprobs_TK: NDArray[np.float32]  # nats, at the sampling temperature
    rest_T: NDArray[np.float32]  # 1 - sum of exp(logprobs)

    def to_json(self) -> dict[str, Any]:
        """Return shapes and bytes in base64."""
        return {
            "shape": list(self.ids_TK.shape),
            "ids": _encode_array(self.ids_TK, "<i4"),
            "logprobs": _encode_array(self.logprobs_TK, "<f4"),
            "rest": _encode_array(self.rest_T, "<f4"),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RecordedTopK:
        """Parse the output of `to_json`. Raises: DataError."""
        try:
            num_tokens, num_recorded = (int(size) for size in row["shape"])
            return cls(
                _decode_array(row["ids"], "<i4").reshape(num_tokens, num_recorded),
                _decode_array(row["logprobs"], "<f4").reshape(num_tokens, num_recorded),
                _decode_array(row["rest"], "<f4").reshape(num_tokens),
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DataError(f"recorded top tokens: {error}") from error


def _encode_array(array: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode()


def _decode_array(text: str, kind: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)


@dataclass(frozen=True, slots=True)
class Experience:
    """Answered request: the samples that voted, the vote, and its origin."""

    request_id: str
    caller: str
    time: float  # of the answer, seconds since 1970
    rollouts: tuple[Rollout, ...]  # [G] the samples, in the order of the ballots
    vote: VoteOutcome
    recorded: tuple[RecordedTopK | None, ...]  # [G] the sampler's distribution; None = not recorded
    is_voted: bool = False  # the caller got only the vote's answer, otherwise all of them
    conversation: Conversation | None = None  # None for a session, or a record of an older version

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled it; one version answers a request."""
        return self.rollouts[0].trajectory.policy_version

    @property
    def temperature(self) -> float:
        """Temperature that all samples were drawn at."""
        return self.rollouts[0].temperature

    @property
    def returned_answers(self) -> tuple[str | None, ...]:
        """Answers that the caller got, by choice; None for a choice without an answer."""
        if self.is_voted:
            return (self.vote.answer,)
        return tuple(ballot.answer for ballot in self.vote.ballots)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all samples, including prompts."""
        return sum(len(r.prompt_ids) + len(r.completion_ids) for r in self.rollouts)

    @property
    def environment_level(self) -> tuple[str, str]:
        """(environment, level): requests that share one running mean of rewards."""
        return self.rollouts[0].trajectory.environment, self.rollouts[0].trajectory.level

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` is the exact inverse."""
        conversation = None
        if self.conversation is not None:
            messages, tools = self.conversation.messages, self.conversation.tools
            conversation = {"messages": messages, "tools": tools}
        return {
            "request_id": self.request_id,
            "caller": self.caller,
            "time": self.time,
            "rollouts": [encode_rollout(rollout) for rollout in self.rollouts],
            "vote": self.vote.to_json(),
            "recorded": [top.to_json() if top is not None else None for top in self.recorded],
            "is_voted": self.is_voted,
            "conversation": conversation,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Experience:
        """Parse the output of `to_json`. Raises: DataError for an invalid row."""
        try:
            recorded = tuple(
                RecordedTopK.from_json(top) if top is not None else None for top in row["recorded"]
            )
            conversation = row.get("conversation")
            return cls(
                row["request_id"],
                row["caller"],
                row["time"],
                tuple(decode_rollout(rollout) for rollout in row["rollouts"]),
                VoteOutcome.from_json(row["vote"]),
                recorded,
                bool(row.get("is_voted", False)),
                Conversation(**conversation) if conversation is not None else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"experience: {type(error).__name__}: {error}") from error


def encode_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as plain values, with tokens and log-probs unchanged."""
    return {
        "prompt_ids": list(rollout.prompt_ids),
        "completion_ids": list(rollout.completion_ids),
        "loss_mask": [int(counts) for counts in rollout.loss_mask],
        "sampler_logprobs": list(rollout.sampler_logprobs),
        "trajectory": rollout.trajectory.to_json(),
        "is_truncated": rollout.is_truncated,
        "context_starts": list(rollout.context_starts),
    }


def decode_rollout(row: Mapping[str, Any]) -> Rollout:
    """Parse the output of `encode_rollout`."""
    return Rollout(
        prompt_ids=row["prompt_ids"],
        completion_ids=row["completion_ids"],
        loss_mask=[bool(counts) for counts in row["loss_mask"]],
        sampler_logprobs=row["sampler_logprobs"],
        trajectory=Trajectory.from_json(row["trajectory"]),
        is_truncated=row["is_truncated"],
        context_starts=row["context_starts"],
    )


def check_experience(experience: Experience, *, vocab_size: int, max_tokens: int) -> None:
    """Raise DataError, naming field and sample, for an experience that cannot be learned from.

    Args:
        vocab_size: of the model.
        max_tokens: of all samples together, including prompts.
    """
    for name in ("request_id", "caller"):
        value = getattr(experience, name)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS:
            raise DataError(
                f"{name}: {str(value)[:40]!r} must be a string of 1 to {MAX_NAME_CHARACTERS} characters"
            )
    if not _is_number(experience.time) or not 0 <= experience.time < 1e11:
        raise DataError(f"time: {experience.time!r} is not a time in seconds since 1970")
    count = len(experience.rollouts)
    if not count or count != len(experience.recorded) or count != len(experience.vote.ballots):
        raise DataError(
            f"rollouts: {count}, with {len(experience.vote.ballots)} ballots and {len(experience.recorded)} recorded "
            "distributions; there must be one of each for every sample, and at least one"
        )
    if experience.num_tokens > max_tokens:
        raise DataError(
            f"rollouts: {experience.num_tokens} tokens; at most {max_tokens} (buffer.max_tokens)"
        )
    versions = {rollout.trajectory.policy_version for rollout in experience.rollouts}
    if len(versions) != 1 or min(versions) < 0:
        raise DataError(
            f"policy_version: {sorted(versions)}; all samples of a request must have the same version"
        )
    if len({read_environment_level(rollout) for rollout in experience.rollouts}) != 1:
        raise DataError(
            "trajectory: all samples of a request must have the same environment and level"
        )
    for index, (rollout, top) in enumerate(
        zip(experience.rollouts, experience.recorded, strict=True)
    ):
        _check_rollout(rollout, index, vocab_size)
        if top is not None:
            _check_recorded_top_k(top, rollout, index, vocab_size)


def read_environment_level(rollout: Rollout) -> tuple[str, str]:
    """Return (environment, level)."""
    return rollout.trajectory.environment, rollout.trajectory.level


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_rollout(rollout: Rollout, index: int, vocab_size: int) -> None:
    count = len(rollout.completion_ids)
    for name in ("loss_mask", "sampler_logprobs"):
        if len(getattr(rollout, name)) != count:
            raise DataError(
                f"rollouts.{index}.{name}: {len(getattr(rollout, name))} entries for {count} tokens"
            )
    if not rollout.prompt_ids:
        raise DataError(f"rollouts.{index}.prompt_ids: empty; the first token needs a context")
    for name in ("prompt_ids", "completion_ids"):
        _check_token_ids(getattr(rollout, name), f"rollouts.{index}.{name}", vocab_size)
    if True not in rollout.loss_mask:
        raise DataError(f"rollouts.{index}.loss_mask: no token was sampled")
    pairs = zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    for position, (value, is_counted) in enumerate(pairs):
        if not _is_number(value) or (is_counted and value > 1e-6):
            raise DataError(
                f"rollouts.{index}.sampler_logprobs.{position}: {value!r} is not a log-probability"
            )
    temperature = rollout.temperature
    if not _is_number(temperature) or temperature <= 0:
        raise DataError(
            f"rollouts.{index}: temperature {temperature!r}; greedy answers carry no learning signal"
        )
    starts = list(rollout.context_starts)
    if any(not 0 <= b < count for b in starts) or starts != sorted(set(starts)):
        raise DataError(
            f"rollouts.{index}.context_starts: {starts} must be ascending and below {count}"
        )


def _check_token_ids(ids: Sequence[Any], name: str, vocab_size: int) -> None:
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DataError(
                f"{name}.{position}: {token!r} is not a token of a vocabulary of {vocab_size}"
            )


def _check_recorded_top_k(top: RecordedTopK, rollout: Rollout, index: int, vocab_size: int) -> None:
    name, num_tokens = f"recorded.{index}", len(rollout.completion_ids)
    shape = top.ids_TK.shape
    is_matrix = len(shape) == 2 and shape[0] == num_tokens and shape[1] >= 1
    if not is_matrix or top.logprobs_TK.shape != shape or top.rest_T.shape != (num_tokens,):
        raise DataError(
            f"{name}: shapes {shape}, {top.logprobs_TK.shape}, {top.rest_T.shape} for {num_tokens} tokens"
        )
    mask_T = np.asarray(rollout.loss_mask, dtype=bool)
    ids, rest = top.ids_TK[mask_T], top.rest_T[mask_T]
    logprobs = top.logprobs_TK[mask_T].astype(np.float64)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(
            f"{name}.ids: {int(ids.min())} to {int(ids.max())}; the vocabulary has {vocab_size} tokens"
        )
    ordered = np.sort(ids, axis=1)
    if shape[1] > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise DataError(f"{name}.ids: a token occurs twice at one position")
    is_finite = np.isfinite(logprobs).all() and np.isfinite(rest).all()
    if not is_finite or bool((rest < -MASS_TOLERANCE).any()):
        raise DataError(f"{name}: a log-probability or a mass is not finite, or below 0")
    mass = np.exp(logprobs).sum(1) + rest
    if bool((np.abs(mass - 1) > MASS_TOLERANCE).any()):
        raise DataError(
            f"{name}: probabilities and rest add up to {float(mass[np.abs(mass - 1).argmax()]):.6f}, not 1"
        )


def build_ballot(answer: ServedAnswer) -> Ballot:
    """Return the vote of one answer: of a session its final answer, of a conversation its text.

    A truncated answer votes for nothing. For a session, the check is whether the answer follows from the observations.
    """
    rollout = answer.rollout
    if rollout is None:
        text = answer.text if answer.finish_reason != "length" else None
        logprobs = answer.sampler_logprobs
    else:
        text = rollout.trajectory.answer
        pairs = zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
        logprobs = [value for value, is_sampled in pairs if is_sampled]
    return Ballot(
        text if text and text.strip() else None,
        min(0.0, float(sum(logprobs))),
        max(1, len(logprobs)),
        rollout.trajectory.is_grounded if rollout is not None else None,
        answer.choice,
        answer.policy_version,
    )


def count_votes(
    ballots: Sequence[Ballot], settings: VotingSettings, max_samples: int
) -> VoteOutcome:
    """Tally the votes with these settings; see `tally_votes`."""
    return tally_votes(
        ballots,
        max_samples=max_samples,
        weights=settings.weights,
        ties=settings.ties,
        confidence_level=settings.confidence_level,
    )


def build_served_experience(
    answers: Sequence[ServedAnswer], settings: VotingSettings, time: float
) -> Experience:
    """Build the experience of one request from all answers that were sampled for it.

    Args:
        time: of the answers, seconds since 1970.
    Raises: DataError without answers, or for answers of several requests.
    """
    if len({answer.answer_id for answer in answers}) != 1:
        raise DataError(f"answers: expected one or more of one request, got {len(answers)}")
    first = answers[0]
    ballots = [build_ballot(answer) for answer in answers]
    outcome = count_votes(ballots, settings, first.max_votes or len(answers))
    rollouts = tuple(build_served_rollout(answer) for answer in answers)
    recorded = tuple(
        _align_recorded_top_k(answer.top, rollout)
        for answer, rollout in zip(answers, rollouts, strict=True)
    )
    return Experience(
        first.answer_id,
        _limit_caller_name(first.caller),
        time,
        rollouts,
        outcome,
        recorded,
        is_voted=first.max_votes > 0,
        conversation=first.conversation,
    )


def _limit_caller_name(caller: str) -> str:
    """Return the caller's name; a name that is too long is replaced by its digest, which also distinguishes callers."""
    if len(caller) > MAX_NAME_CHARACTERS:
        return digest_bytes(caller.encode("utf-8", "surrogatepass"))
    return caller or "anonymous"


def build_served_rollout(answer: ServedAnswer) -> Rollout:
    """Return the session's rollout, or build that of a conversation with one turn."""
    if answer.rollout is not None:
        return answer.rollout
    is_truncated, count = answer.finish_reason == "length", len(answer.completion_ids)
    trajectory = Trajectory(
        environment=CHAT_ENVIRONMENT,
        level=CHAT_ENVIRONMENT,
        kind=CHAT_ENVIRONMENT,
        seed=0,
        prompt="",
        target="",
        turns=[Turn(answer.text, num_tokens=count)],
        answer=None if is_truncated else answer.text,
        rewards={"task": 0.0},
        stop_reason=StopReason.MAX_TOKENS if is_truncated else StopReason.TERMINATED,
        num_prompt_tokens=len(answer.prompt_ids),
        num_completion_tokens=count,
        num_action_tokens=count,
        mean_logprob=sum(answer.sampler_logprobs) / max(1, count),
        policy_version=answer.policy_version,
        sample=answer.choice,
        temperature=answer.temperature,
    )
    return Rollout(
        list(answer.prompt_ids),
        list(answer.completion_ids),
        [True] * count,
        list(answer.sampler_logprobs),
        trajectory,
        is_truncated=is_truncated,
    )


def _align_recorded_top_k(top: TopTokens | None, rollout: Rollout) -> RecordedTopK | None:
    """Return the recorded tokens at every completion token, with zeros for tokens written by the environment."""
    if top is None:
        return None
    mask_T = np.asarray(rollout.loss_mask, dtype=bool)
    if len(top.ids_TK) != mask_T.sum():
        return None
    shape = (len(mask_T), top.ids_TK.shape[1])
    ids_TK, logprobs_TK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    rest_T = np.zeros(len(mask_T), np.float32)
    ids_TK[mask_T], logprobs_TK[mask_T], rest_T[mask_T] = top.ids_TK, top.logprobs_TK, top.rest_T
    return RecordedTopK(ids_TK, logprobs_TK, rest_T)
