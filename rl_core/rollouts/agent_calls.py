"""Calls of an agent as requests to the serving loop, and their answers for the record and the response."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.responses import ResponseFormatter, format_message, resolve_finish_reason
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest, build_stop_test
from rl_core.rollouts.agent_recorder import AgentSession, PreparedCall, SampledChoice


def build_call_requests(
    session: AgentSession, call: PreparedCall, *, caller: str
) -> list[ServedRequest]:
    """Build one request for each choice of a call.

    Args:
        caller: callers take turns.
    """
    request = call.request
    stops = (*request.stop, *session.sampling.stop)
    has_stop = build_stop_test(session.prompts.renderer.action_text, stops)
    return [
        ServedRequest(
            AnswerSequence(call.prompt_ids, call.compute_choice_seed(choice), has_stop),
            call.sampling,
            caller=caller,
            top=request.top_logprobs,
            streams=request.stream,
            has_stops=bool(stops),
            rules=call.token_rules,
        )
        for choice in range(request.n)
    ]


def build_call_formatter(
    session: AgentSession, call: PreparedCall, model: str
) -> ResponseFormatter:
    """Build the formatter of a call's answers; ids follow from the call's seed."""
    request = call.request
    return ResponseFormatter(
        answer_id=f"chatcmpl-{call.seed:032x}",
        model=model,
        prompts=session.prompts,
        tools=call.rendered.tools,
        stops=request.stop,
        logprobs=request.logprobs,
        num_top=request.top_logprobs,
        prompt_tokens=len(call.prompt_ids),
        hides_thought=call.has_grammar and bool(session.prompts.renderer.opened_thought),
        has_seeded_ids=True,
    )


def list_sampled_choices(
    formatter: ResponseFormatter, requests: Sequence[ServedRequest], answers: Sequence[ParsedAnswer]
) -> list[SampledChoice]:
    """List the choices of a call whose requests have ended."""
    choices = []
    for request, answer in zip(requests, answers, strict=True):
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        choices.append(
            SampledChoice(
                sequence,
                answer,
                formatter.decode_text(sequence.tokens),
                format_message(answer),
                resolve_finish_reason(sequence, answer),
                request.policy_version,
                request.rules is not None,
            )
        )
    return choices
