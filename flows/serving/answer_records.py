"""Answers as records for whoever takes them: `ServedAnswer`s of conversations and of sessions."""

from __future__ import annotations

from collections.abc import Sequence

from flows.serving.chat_answers import AnswerForm, finish_reason
from flows.serving.chat_prompts import ReadAnswer
from flows.serving.environment_sessions import Session
from flows.serving.refused import RefusedRequest
from rl_core.inference.served_answers import ServedAnswer
from rl_core.inference.served_requests import AnswerSequence, ServedRequest

__all__ = ["chat_records", "session_records"]


def chat_records(
    form: AnswerForm, requests: Sequence[ServedRequest], reads: Sequence[ReadAnswer], max_votes: int = 0
) -> list[ServedAnswer]:
    """Records of the answers to one request. `max_votes`: see `ServedAnswer`."""
    found = []
    for choice, (request, read) in enumerate(zip(requests, reads, strict=True)):
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence) and request.policy_version is not None
        found.append(ServedAnswer(
            answer_id=form.answer_id, choice=choice, policy_version=request.policy_version,
            prompt_ids=sequence.prompt_ids, completion_ids=sequence.tokens, sampler_logprobs=sequence.logprobs,
            temperature=request.sampling.temperature, text=form.text(sequence.tokens),
            finish_reason=finish_reason(sequence, read), caller=request.caller, top=request.top_tokens,
            seed=sequence.seed, is_restricted=request.sampling.is_restricted, max_votes=max_votes,
            conversation=form.conversation,
        ))  # fmt: skip
    return found


def session_records(form: AnswerForm, requests: Sequence[ServedRequest], max_votes: int = 0) -> list[ServedAnswer]:
    """The same for episodes. Raises: RefusedRequest (500) where an environment failed."""
    found = []
    for choice, request in enumerate(requests):
        session, version = request.sequence, request.policy_version
        assert isinstance(session, Session) and version is not None
        if session.fault:
            raise RefusedRequest(500, session.fault, param="environment")
        rollout = session.rollout(version)
        found.append(ServedAnswer(
            answer_id=form.answer_id, choice=choice, policy_version=version, prompt_ids=rollout.prompt_ids,
            completion_ids=rollout.completion_ids, sampler_logprobs=rollout.sampler_logprobs,
            temperature=rollout.temperature, text=rollout.trajectory.turns[-1].action,
            finish_reason="length" if rollout.is_truncated else "stop", caller=request.caller, top=request.top_tokens,
            rollout=rollout, seed=session.seed, is_restricted=request.sampling.is_restricted, max_votes=max_votes,
        ))  # fmt: skip
    return found
