"""Experience: one answered request with all its samples, as the buffer keeps it and the worker learns from it.

The samples of a request stay together: they are the group whose rewards are compared, and one record of the buffer, so
that a crash leaves all of them or none.

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
from rl_core.online.voting import VoteOutcome
from rl_core.types import Conversation, Rollout, Trajectory

__all__ = ["Experience", "RecordedTop", "check_experience", "rollout_from_json", "rollout_to_json"]

MAX_NAME = 256  # characters of a request's id or a caller's name
MASS_TOLERANCE = 1e-3  # of recorded probabilities, which are float32


@dataclass(frozen=True, slots=True)
class RecordedTop:
    """The sampler's most likely tokens at each completion token, and the mass of all others."""

    ids_TK: NDArray[np.int32]
    logprobs_TK: NDArray[np.float32]  # nats, at the sampling temperature
    rest_T: NDArray[np.float32]  # 1 - sum of exp(logprobs)

    def to_json(self) -> dict[str, Any]:
        """Shape and bytes in base64."""
        return {
            "shape": list(self.ids_TK.shape),
            "ids": _encoded(self.ids_TK, "<i4"),
            "logprobs": _encoded(self.logprobs_TK, "<f4"),
            "rest": _encoded(self.rest_T, "<f4"),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RecordedTop:
        """Inverse of `to_json`. Raises: DataError."""
        try:
            tokens, kept = (int(size) for size in row["shape"])
            return cls(
                _decoded(row["ids"], "<i4").reshape(tokens, kept),
                _decoded(row["logprobs"], "<f4").reshape(tokens, kept),
                _decoded(row["rest"], "<f4").reshape(tokens),
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DataError(f"recorded top tokens: {error}") from error


def _encoded(array: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode()


def _decoded(text: str, kind: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)


@dataclass(frozen=True, slots=True)
class Experience:
    """One answered request: the samples that voted, the vote, and where it came from."""

    request_id: str
    caller: str
    time: float  # of the answer, seconds since 1970
    rollouts: tuple[Rollout, ...]  # [G] the samples, in the order of the ballots
    vote: VoteOutcome
    recorded: tuple[RecordedTop | None, ...]  # [G] the sampler's distribution; None = not recorded
    is_voted: bool = False  # True = the caller got the vote's answer alone, else all of them
    conversation: Conversation | None = None  # None = a session, or a record of before it was kept

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled it: a request is answered by one."""
        return self.rollouts[0].trajectory.policy_version

    @property
    def given(self) -> tuple[str | None, ...]:
        """Answers that the caller got, by choice; None = a choice without one."""
        return (self.vote.answer,) if self.is_voted else tuple(ballot.answer for ballot in self.vote.ballots)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return sum(len(r.prompt_ids) + len(r.completion_ids) for r in self.rollouts)

    @property
    def place(self) -> tuple[str, str]:
        """(environment, level): requests that are compared with one running mean."""
        return self.rollouts[0].trajectory.environment, self.rollouts[0].trajectory.level

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the inverse, to the last bit."""
        kept = self.conversation
        return {
            "request_id": self.request_id,
            "caller": self.caller,
            "time": self.time,
            "rollouts": [rollout_to_json(rollout) for rollout in self.rollouts],
            "vote": self.vote.to_json(),
            "recorded": [top.to_json() if top is not None else None for top in self.recorded],
            "is_voted": self.is_voted,
            "conversation": {"messages": kept.messages, "tools": kept.tools} if kept is not None else None,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Experience:
        """Inverse of `to_json`. Raises: DataError for a row that is none."""
        try:
            return cls(
                row["request_id"],
                row["caller"],
                row["time"],
                tuple(rollout_from_json(rollout) for rollout in row["rollouts"]),
                VoteOutcome.from_json(row["vote"]),
                tuple(RecordedTop.from_json(top) if top is not None else None for top in row["recorded"]),
                bool(row.get("is_voted", False)),
                Conversation(**kept) if (kept := row.get("conversation")) is not None else None,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"experience: {type(error).__name__}: {error}") from error


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """Plain values of a rollout, tokens and log-probs as they are."""
    return {
        "prompt_ids": list(rollout.prompt_ids),
        "completion_ids": list(rollout.completion_ids),
        "loss_mask": [int(counts) for counts in rollout.loss_mask],
        "sampler_logprobs": list(rollout.sampler_logprobs),
        "trajectory": rollout.trajectory.to_json(),
        "is_truncated": rollout.is_truncated,
        "context_starts": list(rollout.context_starts),
    }


def rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    """Inverse of `rollout_to_json`."""
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
        vocab_size: tokens of the model. max_tokens: of all samples together, prompts included.
    """
    for name in ("request_id", "caller"):
        value = getattr(experience, name)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            raise DataError(f"{name}: {str(value)[:40]!r} must be a text of 1 to {MAX_NAME} characters")
    if not _is_number(experience.time) or not 0 <= experience.time < 1e11:
        raise DataError(f"time: {experience.time!r} is no time in seconds since 1970")
    count = len(experience.rollouts)
    if not count or count != len(experience.recorded) or count != len(experience.vote.ballots):
        raise DataError(
            f"rollouts: {count}, with {len(experience.vote.ballots)} ballots and {len(experience.recorded)} recorded "
            "distributions; there must be one of each for every sample, and at least one"
        )
    if experience.num_tokens > max_tokens:
        raise DataError(f"rollouts: {experience.num_tokens} tokens; at most {max_tokens} (buffer.max_tokens)")
    versions = {rollout.trajectory.policy_version for rollout in experience.rollouts}
    if len(versions) != 1 or min(versions) < 0:
        raise DataError(f"policy_version: {sorted(versions)}; all samples of a request come from one version")
    if len({experience_place(rollout) for rollout in experience.rollouts}) != 1:
        raise DataError("trajectory: the samples of a request are of one environment and level")
    for index, (rollout, top) in enumerate(zip(experience.rollouts, experience.recorded, strict=True)):
        _check_rollout(rollout, index, vocab_size)
        if top is not None:
            _check_recorded(top, rollout, index, vocab_size)


def experience_place(rollout: Rollout) -> tuple[str, str]:
    """(environment, level)."""
    return rollout.trajectory.environment, rollout.trajectory.level


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_rollout(rollout: Rollout, index: int, vocab_size: int) -> None:
    count = len(rollout.completion_ids)
    for name in ("loss_mask", "sampler_logprobs"):
        if len(getattr(rollout, name)) != count:
            raise DataError(f"rollouts.{index}.{name}: {len(getattr(rollout, name))} entries for {count} tokens")
    if not rollout.prompt_ids:
        raise DataError(f"rollouts.{index}.prompt_ids: empty; the first token would follow from nothing")
    for name in ("prompt_ids", "completion_ids"):
        _check_ids(getattr(rollout, name), f"rollouts.{index}.{name}", vocab_size)
    if True not in rollout.loss_mask:
        raise DataError(f"rollouts.{index}.loss_mask: no token was sampled")
    for place, (value, counts) in enumerate(zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)):
        if not _is_number(value) or (counts and value > 1e-6):
            raise DataError(f"rollouts.{index}.sampler_logprobs.{place}: {value!r} is no log-probability")
    temperature = rollout.temperature
    if not _is_number(temperature) or temperature <= 0:
        raise DataError(f"rollouts.{index}: temperature {temperature!r}; greedy answers carry no learning signal")
    starts = list(rollout.context_starts)
    if any(not 0 <= b < count for b in starts) or starts != sorted(set(starts)):
        raise DataError(f"rollouts.{index}.context_starts: {starts} must rise within {count} tokens")


def _check_ids(ids: Sequence[Any], name: str, vocab_size: int) -> None:
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DataError(f"{name}.{place}: {token!r} is no token of a vocabulary of {vocab_size}")


def _check_recorded(top: RecordedTop, rollout: Rollout, index: int, vocab_size: int) -> None:
    name, tokens = f"recorded.{index}", len(rollout.completion_ids)
    shape = top.ids_TK.shape
    if (
        len(shape) != 2
        or shape[0] != tokens
        or shape[1] < 1
        or top.logprobs_TK.shape != shape
        or top.rest_T.shape != (tokens,)
    ):
        raise DataError(f"{name}: shapes {shape}, {top.logprobs_TK.shape}, {top.rest_T.shape} for {tokens} tokens")
    mask_T = np.asarray(rollout.loss_mask, dtype=bool)
    ids, logprobs, rest = top.ids_TK[mask_T], top.logprobs_TK[mask_T].astype(np.float64), top.rest_T[mask_T]
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(f"{name}.ids: {int(ids.min())} to {int(ids.max())}; the vocabulary has {vocab_size} tokens")
    ordered = np.sort(ids, axis=1)
    if shape[1] > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise DataError(f"{name}.ids: a token occurs twice at one place")
    if not np.isfinite(logprobs).all() or not np.isfinite(rest).all() or bool((rest < -MASS_TOLERANCE).any()):
        raise DataError(f"{name}: a log-probability or a mass is not finite, or below 0")
    mass = np.exp(logprobs).sum(1) + rest
    if bool((np.abs(mass - 1) > MASS_TOLERANCE).any()):
        raise DataError(f"{name}: probabilities and rest add up to {float(mass[np.abs(mass - 1).argmax()]):.6f}, not 1")
