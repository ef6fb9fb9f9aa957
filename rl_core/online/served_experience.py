"""From served answers to an experience: ballots, rollouts, the recorded distribution.

T completion tokens, K recorded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_core.errors import DataError
from rl_core.inference.served_answers import ServedAnswer
from rl_core.inference.served_requests import TopTokens
from rl_core.online.experience import MAX_NAME, Experience, RecordedTop
from rl_core.online.voting import Ballot, VoteOutcome, tally
from rl_core.settings import VotingSettings
from rl_core.storage.manifest import digest_bytes
from rl_core.types import Rollout, StopReason, Trajectory, Turn

__all__ = ["CHAT", "answer_ballot", "count_votes", "served_experience", "served_rollout"]

CHAT = "chat"  # environment and level of a conversation that no environment plays


def answer_ballot(answer: ServedAnswer) -> Ballot:
    """The vote of one answer: a session votes with its final answer, a conversation with its text.

    An answer that was cut off votes for nothing. The check of a session is that the answer follows from what was seen.
    """
    rollout = answer.rollout
    if rollout is None:
        text = answer.text if answer.finish_reason != "length" else None
        logprobs = answer.sampler_logprobs
    else:
        text = rollout.trajectory.answer
        logprobs = [
            value for value, sampled in zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True) if sampled
        ]
    return Ballot(
        text if text and text.strip() else None,
        min(0.0, float(sum(logprobs))),
        max(1, len(logprobs)),
        rollout.trajectory.is_grounded if rollout is not None else None,
        answer.choice,
        answer.policy_version,
    )


def count_votes(ballots: Sequence[Ballot], settings: VotingSettings, max_samples: int) -> VoteOutcome:
    """`tally` with these settings."""
    return tally(
        ballots, max_samples=max_samples, weights=settings.weights, ties=settings.ties,
        confidence_level=settings.confidence_level,
    )  # fmt: skip


def served_experience(answers: Sequence[ServedAnswer], settings: VotingSettings, time: float) -> Experience:
    """The experience of one request with all answers that were sampled for it.

    Args:
        time: of the answers, seconds since 1970.
    Raises: DataError without answers, or for answers of several requests.
    """
    if len({answer.answer_id for answer in answers}) != 1:
        raise DataError(f"answers: {len(answers)} of one request are needed")
    first = answers[0]
    outcome = count_votes([answer_ballot(answer) for answer in answers], settings, first.max_votes or len(answers))
    rollouts = tuple(served_rollout(answer) for answer in answers)
    recorded = tuple(_recorded(answer.top, rollout) for answer, rollout in zip(answers, rollouts, strict=True))
    return Experience(
        first.answer_id, _caller_name(first.caller), time, rollouts, outcome, recorded,
        is_voted=first.max_votes > 0, conversation=first.conversation,
    )  # fmt: skip


def _caller_name(caller: str) -> str:
    """The caller's name within its bound; of a longer one its digest, which tells callers apart as well."""
    if len(caller) > MAX_NAME:
        return digest_bytes(caller.encode("utf-8", "surrogatepass"))
    return caller or "anonymous"


def served_rollout(answer: ServedAnswer) -> Rollout:
    """The session's rollout, or that of a conversation of one turn."""
    if answer.rollout is not None:
        return answer.rollout
    is_cut, count = answer.finish_reason == "length", len(answer.completion_ids)
    trajectory = Trajectory(
        environment=CHAT, level=CHAT, kind=CHAT, seed=0, prompt="", target="",
        turns=[Turn(answer.text, num_tokens=count)], answer=None if is_cut else answer.text, rewards={"task": 0.0},
        stop_reason=StopReason.MAX_TOKENS if is_cut else StopReason.TERMINATED,
        num_prompt_tokens=len(answer.prompt_ids), num_completion_tokens=count, num_action_tokens=count,
        mean_logprob=sum(answer.sampler_logprobs) / max(1, count), policy_version=answer.policy_version,
        sample=answer.choice, temperature=answer.temperature,
    )  # fmt: skip
    return Rollout(
        list(answer.prompt_ids), list(answer.completion_ids), [True] * count, list(answer.sampler_logprobs), trajectory,
        is_truncated=is_cut,
    )  # fmt: skip


def _recorded(top: TopTokens | None, rollout: Rollout) -> RecordedTop | None:
    """The recorded tokens at every token of the completion; zeros where the environment wrote it."""
    if top is None:
        return None
    mask_T = np.asarray(rollout.loss_mask, dtype=bool)
    if len(top.ids_TK) != mask_T.sum():
        return None
    shape = (len(mask_T), top.ids_TK.shape[1])
    ids_TK, logprobs_TK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    rest_T = np.zeros(len(mask_T), np.float32)
    ids_TK[mask_T], logprobs_TK[mask_T], rest_T[mask_T] = top.ids_TK, top.logprobs_TK, top.rest_T
    return RecordedTop(ids_TK, logprobs_TK, rest_T)
