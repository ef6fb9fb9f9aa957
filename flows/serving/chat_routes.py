"""/v1/chat/completions: from a body to answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flows.service.http.payloads import read_payload
from flows.service.http.refusals import Refused
from flows.serving.answering import Answering, Pending
from flows.serving.chat_answers import AnswerForm, finish_reason
from flows.serving.chat_bodies import ChatBody, read_json_body
from flows.serving.chat_prompts import ReadAnswer
from flows.serving.chat_server import ChatServer, server_of
from flows.serving.chat_stream import ChatStream, gone
from flows.serving.environment_sessions import Session, session_report
from flows.serving.refused import RefusedRequest
from flows.serving.text_stream import stop_test
from rl_core.errors import PosttrainError
from rl_core.inference.sampling import RolloutSequence, sequence_seed
from rl_core.inference.served_answers import ServedAnswer
from rl_core.inference.served_requests import (
    AnswerSequence,
    Cancelled,
    DeadlinePassed,
    Overloaded,
    ServedRequest,
)
from rl_core.settings import SamplingSettings

__all__ = ["CheckedChat", "chat_completions", "refusal_of", "whole_body"]


@dataclass(slots=True)
class CheckedChat:
    """A request for answers that was checked."""

    body: ChatBody
    form: AnswerForm
    requests: list[ServedRequest]
    began: float


async def whole_body(server: ChatServer, request: Request) -> bytes:
    """The body of a request, within its bounds. Raises: RefusedRequest (408, 413)."""
    try:
        async with asyncio.timeout(server.settings.idle_seconds):
            payload = await read_payload(request, server.settings.max_body_bytes)
    except TimeoutError:
        raise RefusedRequest(408, f"the body was not complete in {server.settings.idle_seconds:g} s") from None
    except Refused as refused:
        raise RefusedRequest(refused.status, str(refused)) from None
    if payload.refused:
        raise RefusedRequest(413, payload.refused)
    return payload.body


async def chat_completions(request: Request) -> Response:
    """The route."""
    server, began = server_of(request), time.monotonic()
    code = 500
    try:
        server.check_token(request)
        body = read_json_body(ChatBody, await whole_body(server, request))
        server.check_model(body.model)
        answering, _ = server.ready()
        asked = await _asked(server, body, began)
        pending = _submitted(answering, asked)
        if body.stream:
            code = 200
            return ChatStream(server, asked.form, pending, asked.began, _told_usage(body), functools.partial(
                _recorded, server, asked
            ))  # fmt: skip
        response = await _whole(server, request, asked, pending)
        code = response.status_code
        return response
    except RefusedRequest as refused:
        code = refused.status
        raise
    finally:
        server.metrics.requests.labels(str(code)).inc()


def _told_usage(body: ChatBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _submitted(answering: Answering, asked: CheckedChat) -> Pending:
    try:
        return answering.submit(asked.requests, bool(asked.body.stream))
    except PosttrainError as error:
        _close(asked.requests)
        raise refusal_of(error) from None


def refusal_of(error: BaseException) -> RefusedRequest:
    """The response to an error of the serving loop."""
    if isinstance(error, Overloaded):
        return RefusedRequest(429, f"overloaded: {error}", code="overloaded", retry_after=error.retry_after)
    if isinstance(error, DeadlinePassed):
        return RefusedRequest(504, str(error), code="deadline")
    if isinstance(error, Cancelled):
        return RefusedRequest(499, str(error))
    if isinstance(error, PosttrainError):
        return RefusedRequest(503, str(error), code="engine", retry_after=1)
    return RefusedRequest(500, f"{type(error).__name__}: {error}"[:500])


# -- from a body to requests -------------------------------------------------------------------------------------------


async def _asked(server: ChatServer, body: ChatBody, began: float) -> CheckedChat:
    """The checked request. Raises: RefusedRequest (422)."""
    _, prompts = server.ready()
    count = body.n or 1
    if count > (most := min(server.settings.max_choices, server.settings.max_waiting)):
        raise RefusedRequest(422, f"n: {count} choices; at most {most}", param="n")
    if body.top_logprobs and not body.logprobs:
        raise RefusedRequest(422, "top_logprobs: needs logprobs: true", param="top_logprobs")
    ids: list[int] = []
    tools = None
    if body.environment is None:
        made = await server.render(prompts.make, body)
        ids, tools = made.ids, made.tools
    form = AnswerForm(
        answer_id=server.new_id(), model=server.name, prompts=prompts, tools=tools, stops=body.stops,
        logprobs=bool(body.logprobs), num_top=body.top_logprobs or 0, prompt_tokens=len(ids),
    )  # fmt: skip
    sequences: Sequence[RolloutSequence]
    seed = body.seed if body.seed is not None else secrets.randbits(64)
    if body.environment is not None:
        sequences = await _sessions(server, body, seed, count)
        form.prompt_tokens = sum(len(sequence.prompt_ids) for sequence in sequences)
    else:
        stops = stop_test(prompts.renderer.action_text, body.stops)
        sequences = [AnswerSequence(ids, sequence_seed("chat", seed, index), stops) for index in range(count)]
    return CheckedChat(body, form, _requests(server, body, sequences, began), began)


def _requests(
    server: ChatServer, body: ChatBody, sequences: Sequence[RolloutSequence], began: float
) -> list[ServedRequest]:
    assert server.model is not None
    sampling = _sampling(body, server.model.context)
    seconds = min(server.settings.request_seconds, body.deadline_seconds or server.settings.request_seconds)
    top = max(server.top, (body.top_logprobs or 0) if body.logprobs else 0)
    return [
        ServedRequest(
            sequence, sampling, caller=body.user or "", deadline=began + seconds, top=top, streams=bool(body.stream),
            has_stops=bool(body.stops),
        )
        for sequence in sequences
    ]  # fmt: skip


def _sampling(body: ChatBody, context: int) -> SamplingSettings:
    return _made_sampling(
        1.0 if body.temperature is None else float(body.temperature), float(body.top_p or 1.0), body.top_k or 0,
        float(body.min_p or 0.0), min(body.most_tokens or context, context),
        body.environment.max_turns if body.environment is not None else 1,
        body.stops if body.environment is not None else (),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _made_sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, most: int, turns: int, stops: tuple[str, ...]
) -> SamplingSettings:
    return SamplingSettings(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_completion_tokens=most, max_turns=turns,
        stop=stops,
    )  # fmt: skip


async def _sessions(server: ChatServer, body: ChatBody, seed: int, count: int) -> list[Session]:
    """Episodes that have begun. Raises: RefusedRequest (422)."""
    assert body.environment is not None and server.model is not None and server.session_renderer is not None
    for name in ("messages", "tools"):
        if getattr(body, name):
            raise RefusedRequest(422, f"{name}: has to be empty with environment, which brings its own", param=name)
    for name in ("stream", "logprobs"):
        if getattr(body, name):
            raise RefusedRequest(422, f"{name}: is not supported with environment", param=name)
    sampling = _sampling(body, server.model.context)
    renderer, context = server.session_renderer, server.model.context
    return [
        await server.wait_for(
            server.sessions.open, body.environment, renderer, sampling, seed, sample, context
        )
        for sample in range(count)
    ]  # fmt: skip


# -- from answers to a response ----------------------------------------------------------------------------------------


async def _whole(server: ChatServer, request: Request, asked: CheckedChat, pending: Pending) -> Response:
    """The response once every choice has ended; a client that is gone frees its slots."""
    assert server.answering is not None
    watch = asyncio.ensure_future(gone(request.receive))
    done = asyncio.ensure_future(pending.done.wait())
    try:
        await asyncio.wait((watch, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            server.metrics.gone.inc()
            return Response(status_code=499)
    finally:
        server.answering.cancel(pending)
        watch.cancel()
        if done.done():
            _close(asked.requests)
        else:  # the engine may be in the middle of a step
            done.add_done_callback(lambda task: _close(asked.requests))
    for one in asked.requests:
        if one.error is not None:
            raise refusal_of(one.error)
    if asked.body.environment is not None:
        body = _played(server, asked)
    else:
        reads = [asked.form.read(one.sequence) for one in asked.requests]  # type: ignore[arg-type]
        body = asked.form.whole(asked.requests, reads)
        _recorded(server, asked, reads)
    usage = body["usage"]
    server.metrics.tokens.labels("prompt").inc(usage["prompt_tokens"])
    server.metrics.tokens.labels("completion").inc(usage["completion_tokens"])
    server.metrics.seconds.observe(time.monotonic() - asked.began)
    return JSONResponse(body)


def _close(requests: Sequence[ServedRequest]) -> None:
    """End the sessions of episodes."""
    for request in requests:
        if isinstance(request.sequence, Session):
            request.sequence.close()


def _recorded(server: ChatServer, asked: CheckedChat, reads: Sequence[ReadAnswer]) -> None:
    """Hand answers to their taker."""
    if server.answers is None:
        return
    for choice, (request, read) in enumerate(zip(asked.requests, reads, strict=True)):
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence) and request.policy_version is not None
        server.record(ServedAnswer(
            answer_id=asked.form.answer_id, choice=choice, policy_version=request.policy_version,
            prompt_ids=sequence.prompt_ids, completion_ids=sequence.tokens, sampler_logprobs=sequence.logprobs,
            temperature=request.sampling.temperature, text=asked.form.text(sequence.tokens),
            finish_reason=finish_reason(sequence, read), caller=request.caller, top=request.top_tokens,
            seed=sequence.seed,
        ))  # fmt: skip


def _played(server: ChatServer, asked: CheckedChat) -> dict[str, Any]:
    """The body of a response about episodes. Raises: RefusedRequest (500) where an environment failed."""
    choices = []
    sampled = 0
    for index, request in enumerate(asked.requests):
        session, version = request.sequence, request.policy_version
        assert isinstance(session, Session) and version is not None
        if session.fault:
            raise RefusedRequest(500, session.fault, param="environment")
        rollout = session.rollout(version)
        sampled += sum(rollout.loss_mask)
        last = rollout.trajectory.turns[-1].action
        reason = "length" if rollout.is_truncated else "stop"
        choices.append({
            "index": index, "message": {"role": "assistant", "content": last, "refusal": None},
            "finish_reason": reason, "logprobs": None, "policy_version": version,
            "session": session_report(session, version),
        })  # fmt: skip
        server.record(ServedAnswer(
            answer_id=asked.form.answer_id, choice=index, policy_version=version, prompt_ids=rollout.prompt_ids,
            completion_ids=rollout.completion_ids, sampler_logprobs=rollout.sampler_logprobs,
            temperature=rollout.temperature, text=last, finish_reason=reason, caller=request.caller,
            top=request.top_tokens, rollout=rollout, seed=session.seed,
        ))  # fmt: skip
    usage = {"prompt_tokens": asked.form.prompt_tokens, "completion_tokens": sampled,
             "total_tokens": asked.form.prompt_tokens + sampled}  # fmt: skip
    head = asked.form.head("chat.completion", asked.requests[0].policy_version)
    return head | {"choices": choices, "usage": usage}
