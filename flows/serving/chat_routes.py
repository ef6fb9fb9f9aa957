"""/v1/chat/completions: from a body to answers, whole, voted on, or as a stream."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flows.service.http.payloads import read_payload
from flows.service.http.refusals import Refused
from flows.serving.answer_records import chat_records, session_records
from flows.serving.answering import Answering, Pending
from flows.serving.chat_bodies import ChatBody, read_json_body
from flows.serving.chat_prompts import ReadAnswer
from flows.serving.chat_requests import CheckedChat, check_chat
from flows.serving.chat_server import ChatServer, server_of
from flows.serving.chat_stream import ChatStream, gone
from flows.serving.environment_sessions import Session, session_report
from flows.serving.refused import RefusedRequest
from rl_core.errors import PosttrainError
from rl_core.inference.served_answers import ServedAnswer
from rl_core.inference.served_requests import Cancelled, DeadlinePassed, Overloaded, ServedRequest
from rl_core.online.served_experience import answer_ballot, count_votes
from rl_core.online.voting import VoteOutcome, samples_to_draw

__all__ = ["CheckedChat", "answered", "chat_completions", "counted", "refusal_of", "whole_body"]


class ClientGone(Exception):
    """The client has left before its answer."""


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


async def counted(request: Request, respond: Callable[[ChatServer, float], Awaitable[Response]]) -> Response:
    """The response of a route that answers, counted by its status; 499 for a client that has left before.

    Args:
        respond: gives it, from the server and the time at which the request began (of the monotonic clock, seconds);
            may raise ClientGone.
    Raises: RefusedRequest, of which the status is counted, too.
    """
    server, began, code = server_of(request), time.monotonic(), 500
    try:
        server.check_token(request)
        try:
            response = await respond(server, began)
        except ClientGone:
            server.metrics.gone.inc()
            response = Response(status_code=499)
        code = response.status_code
        return response
    except RefusedRequest as refused:
        code = refused.status
        raise
    finally:
        server.metrics.requests.labels(str(code)).inc()


async def chat_completions(request: Request) -> Response:
    """The route."""
    return await counted(request, functools.partial(_completed, request))


async def _completed(request: Request, server: ChatServer, began: float) -> Response:
    body = read_json_body(ChatBody, await whole_body(server, request))
    server.check_model(body.model)
    answering, _ = server.ready()
    asked = await check_chat(server, body, began)
    if body.stream:
        requests = await asked.more(0, asked.count)
        pending = _submitted(answering, requests, streams=True)
        return ChatStream(server, asked.form, pending, asked.began, _told_usage(body), functools.partial(
            _recorded, server, asked, requests
        ))  # fmt: skip
    return JSONResponse(await (_voted if body.vote else _whole)(server, request, asked))


def _told_usage(body: ChatBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _submitted(answering: Answering, requests: Sequence[ServedRequest], *, streams: bool = False) -> Pending:
    try:
        return answering.submit(requests, streams)
    except PosttrainError as error:
        _close(requests)
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


# -- from answers to a response ----------------------------------------------------------------------------------------


async def answered(server: ChatServer, request: Request, requests: Sequence[ServedRequest]) -> None:
    """Wait until every request has ended; a client that is gone frees its slots.

    Raises: ClientGone; RefusedRequest for the first one that failed.
    """
    answering, _ = server.ready()
    pending = _submitted(answering, requests)
    watch = asyncio.ensure_future(gone(request.receive))
    done = asyncio.ensure_future(pending.done.wait())
    try:
        await asyncio.wait((watch, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientGone
    finally:
        answering.cancel(pending)
        watch.cancel()
        if done.done():
            _close(requests)
        else:  # the engine may be in the middle of a step
            done.add_done_callback(lambda task: _close(requests))
    for one in requests:
        if one.error is not None:
            raise refusal_of(one.error)


async def _whole(server: ChatServer, request: Request, asked: CheckedChat) -> dict[str, Any]:
    """The body of a response, once every choice has ended."""
    requests = await asked.more(0, asked.count)
    await answered(server, request, requests)
    if asked.body.environment is not None:
        records = session_records(asked.form, requests)
        body = _played(asked, requests, records)
    else:
        reads = [asked.form.read(one.sequence) for one in requests]  # type: ignore[arg-type]
        body = asked.form.whole(requests, reads)
        records = chat_records(asked.form, requests, reads) if server.answers is not None else []
    server.record(records)
    _count(server, asked, body["usage"])
    return body


async def _voted(server: ChatServer, request: Request, asked: CheckedChat) -> dict[str, Any]:
    """The body of a response with the vote's answer: as many samples as it takes until none could change it.

    Samples of one version vote: where new weights came between two rounds, those of the old ones do not count.
    """
    form, options = asked.form, server.voting
    requests: list[ServedRequest] = []
    records: list[ServedAnswer] = []
    drawn = 0
    while wanted := min(_samples_to_draw(server, asked, records), 2 * asked.count - drawn):
        more = await asked.more(drawn, wanted)
        await answered(server, request, more)
        drawn += wanted
        requests = _of_one_version([*requests, *more])
        records = _voters(form, asked, requests)
    outcome = count_votes([answer_ballot(record) for record in records], options, asked.count)
    chosen = outcome.supporters[0] if outcome.supporters else 0
    if asked.body.environment is not None:
        body = _played(asked, [requests[chosen]], [records[chosen]])
    else:
        body = form.whole([requests[chosen]], [ReadAnswer(records[chosen].text, [])])
    body["choices"][0]["index"] = 0
    body["usage"] = form.usage(requests) if asked.body.environment is None else _usage(form.prompt_tokens, records)
    body["vote"] = _told_vote(outcome)
    server.record(records)
    _count(server, asked, body["usage"])
    return body


def _samples_to_draw(server: ChatServer, asked: CheckedChat, records: Sequence[ServedAnswer]) -> int:
    options = server.voting
    return samples_to_draw(
        [answer_ballot(record) for record in records], asked.count, min_samples=min(options.min_samples, asked.count),
        weights=options.weights, ties=options.ties,
    )  # fmt: skip


def _of_one_version(requests: list[ServedRequest]) -> list[ServedRequest]:
    """Those of the version that answers by now, which is a smaller one after a rollback."""
    now = requests[-1].policy_version
    return [request for request in requests if request.policy_version == now]


def _voters(form: Any, asked: CheckedChat, requests: Sequence[ServedRequest]) -> list[ServedAnswer]:
    if asked.body.environment is not None:
        return session_records(form, requests, asked.count)
    return chat_records(form, requests, [form.read(one.sequence) for one in requests], asked.count)


def _told_vote(outcome: VoteOutcome) -> dict[str, Any]:
    """The vote as its caller sees it."""
    names = ("answer", "confidence", "low", "high", "num_ballots", "entropy", "is_tie", "is_early")
    return {name: getattr(outcome, name) for name in names}


def _count(server: ChatServer, asked: CheckedChat, usage: dict[str, int]) -> None:
    server.metrics.answered(time.monotonic() - asked.began, usage["prompt_tokens"], usage["completion_tokens"])


def _close(requests: Sequence[ServedRequest]) -> None:
    """End the sessions of episodes."""
    for request in requests:
        if isinstance(request.sequence, Session):
            request.sequence.close()


def _recorded(
    server: ChatServer, asked: CheckedChat, requests: Sequence[ServedRequest], reads: Sequence[ReadAnswer]
) -> None:
    """Hand the answers of a stream to their taker."""
    if server.answers is not None:
        server.record(chat_records(asked.form, requests, reads))


def _played(asked: CheckedChat, requests: Sequence[ServedRequest], records: Sequence[ServedAnswer]) -> dict[str, Any]:
    """The body of a response about episodes."""
    choices = []
    for index, (request, record) in enumerate(zip(requests, records, strict=True)):
        assert isinstance(request.sequence, Session)
        choices.append({
            "index": index, "message": {"role": "assistant", "content": record.text, "refusal": None},
            "finish_reason": record.finish_reason, "logprobs": None, "policy_version": record.policy_version,
            "session": session_report(request.sequence, record.policy_version),
        })  # fmt: skip
    head = asked.form.head("chat.completion", records[0].policy_version)
    return head | {"choices": choices, "usage": _usage(asked.form.prompt_tokens, records)}


def _usage(prompt_tokens: int, records: Sequence[ServedAnswer]) -> dict[str, int]:
    sampled = sum(sum(record.rollout.loss_mask) for record in records if record.rollout is not None)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
