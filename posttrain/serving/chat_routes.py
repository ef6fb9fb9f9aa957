"""From the body of a request to sequences for the engine, checked.

/v1/chat/completions: from a body to answers, whole, voted on, or as a stream.
"""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from posttrain.serving.chat_prompts import ParsedAnswer
from posttrain.serving.chat_responses import (
    ChatStreamResponse,
    ResponseFormatter,
    build_chat_records,
    build_session_records,
    wait_for_disconnect,
)
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.environment_sessions import EnvironmentSession, build_session_report
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import ChatBody, parse_json_body
from posttrain.serving.served_model import EngineThread, PendingAnswers
from posttrain.web.errors import HTTPError
from posttrain.web.request_body import read_request_payload
from rl_core.environments.tools import Toolset
from rl_core.errors import PosttrainError
from rl_core.inference.sampling import RolloutSequence, compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    DeadlineExceeded,
    RequestCancelled,
    ServedAnswer,
    ServedRequest,
    ServerOverloaded,
    build_stop_test,
)
from rl_core.online.experience import build_ballot, count_votes
from rl_core.online.voting import VoteOutcome, count_samples_to_draw
from rl_core.settings import SamplingSettings
from rl_core.types import Conversation


@dataclass(slots=True)
class CheckedChatRequest:
    """A request for answers that was checked; `more` makes sequences for its answers."""

    server: ChatServer
    body: ChatBody
    formatter: ResponseFormatter
    started_at: float  # seconds of the monotonic clock
    seed: int
    ids: list[int]  # of the prompt; empty with an environment
    max_answers: int  # answers that are asked for: n, or of a vote the most that are sampled

    async def build_requests(self, first: int, count: int) -> list[ServedRequest]:
        """Requests for the samples from index `first` on. Raises: RefusedRequest."""
        samples = range(first, first + count)
        sequences: Sequence[RolloutSequence]
        if self.body.environment is not None:
            sequences = await _open_sessions(self.server, self.body, self.seed, samples)
            self.formatter.prompt_tokens += sum(len(sequence.prompt_ids) for sequence in sequences)
        else:
            stops = build_stop_test(
                self.formatter.prompts.renderer.action_text, self.body.stop_texts
            )
            sequences = [
                AnswerSequence(self.ids, compute_sequence_seed("chat", self.seed, i), stops)
                for i in samples
            ]
        return _build_requests(self.server, self.body, sequences, self.started_at)


async def check_chat_request(
    server: ChatServer, body: ChatBody, began: float
) -> CheckedChatRequest:
    """The checked request. Raises: RefusedRequest (422)."""
    _, prompts = server.require_ready()
    count = _count_allowed_answers(server, body)
    if body.top_logprobs and not body.logprobs:
        raise ServingHTTPError(422, "top_logprobs: needs logprobs: true", param="top_logprobs")
    ids: list[int] = []
    tools: Toolset | None = None
    conversation: Conversation | None = None
    if body.environment is None:
        made = await server.run_on_prompt_thread(prompts.build_prompt, body)
        ids, tools, conversation = made.ids, made.tools, made.conversation
    assert server.model is not None
    form = ResponseFormatter(
        answer_id=server.create_answer_id(),
        model=server.name,
        prompts=prompts,
        tools=tools,
        stops=body.stop_texts,
        logprobs=bool(body.logprobs),
        num_top=body.top_logprobs or 0,
        prompt_tokens=len(ids),
        base=server.model.base_version,
        conversation=conversation,
    )
    seed = body.seed if body.seed is not None else secrets.randbits(64)
    return CheckedChatRequest(server, body, form, began, seed, ids, count)


def _count_allowed_answers(server: ChatServer, body: ChatBody) -> int:
    """Number of answers that may be sampled."""
    most = min(server.settings.max_choices, server.settings.max_waiting)
    if not body.vote:
        count = body.n or 1
        if count > most:
            raise ServingHTTPError(422, f"n: {count} choices; at most {most}", param="n")
        return count
    for name in ("stream", "n", "tools", "logprobs"):
        if getattr(body, name) and (name, body.n) != ("n", 1):
            raise ServingHTTPError(
                422, f"{name}: is not supported with vote, which gives one answer", param=name
            )
    if body.temperature == 0:
        raise ServingHTTPError(
            422, "vote: needs a temperature above 0; greedy answers are all the same", param="vote"
        )
    return min(server.voting.max_samples, most)


def _build_requests(
    server: ChatServer, body: ChatBody, sequences: Sequence[RolloutSequence], began: float
) -> list[ServedRequest]:
    assert server.model is not None
    sampling = _build_sampling(body, server.model.context)
    most, asked = server.settings.request_seconds, body.deadline_seconds or math.inf
    seconds = min(most, asked)
    limit = (
        f"deadline_seconds: {asked:g}"
        if asked < most
        else f"the server's serving.request_seconds: {most:g}"
    )
    top = max(server.num_top_tokens, (body.top_logprobs or 0) if body.logprobs else 0)
    return [
        ServedRequest(
            sequence,
            sampling,
            caller=body.user or "",
            deadline=began + seconds,
            limit=limit,
            top=top,
            streams=bool(body.stream),
            has_stops=bool(body.stop_texts),
        )
        for sequence in sequences
    ]


def _build_sampling(body: ChatBody, context: int) -> SamplingSettings:
    return _create_sampling(
        1.0 if body.temperature is None else float(body.temperature),
        float(body.top_p or 1.0),
        body.top_k or 0,
        float(body.min_p or 0.0),
        min(body.max_answer_tokens or context, context),
        body.environment.max_turns if body.environment is not None else 1,
        body.stop_texts if body.environment is not None else (),
    )


@functools.lru_cache(maxsize=4096)
def _create_sampling(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    most: int,
    turns: int,
    stops: tuple[str, ...],
) -> SamplingSettings:
    return SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_completion_tokens=most,
        max_turns=turns,
        stop=stops,
    )


async def _open_sessions(
    server: ChatServer, body: ChatBody, seed: int, samples: range
) -> list[EnvironmentSession]:
    """Episodes that have begun. Raises: RefusedRequest (422)."""
    assert (
        body.environment is not None
        and server.model is not None
        and server.session_renderer is not None
    )
    for name in ("messages", "tools"):
        if getattr(body, name):
            raise ServingHTTPError(
                422, f"{name}: has to be empty with environment, which brings its own", param=name
            )
    for name in ("stream", "logprobs"):
        if getattr(body, name):
            raise ServingHTTPError(422, f"{name}: is not supported with environment", param=name)
    sampling = _build_sampling(body, server.model.context)
    renderer, context = server.session_renderer, server.model.context
    return [
        await server.run_blocking(
            server.sessions.open_session,
            body.environment,
            renderer,
            sampling,
            seed,
            sample,
            context,
        )
        for sample in samples
    ]


class ClientDisconnected(Exception):
    """The client has left before its answer."""


async def read_full_body(server: ChatServer, request: Request) -> bytes:
    """The body of a request, within its bounds. Raises: RefusedRequest (408, 413)."""
    try:
        async with asyncio.timeout(server.settings.idle_seconds):
            payload = await read_request_payload(request, server.settings.max_body_bytes)
    except TimeoutError:
        raise ServingHTTPError(
            408, f"the body was not complete in {server.settings.idle_seconds:g} s"
        ) from None
    except HTTPError as refused:
        raise ServingHTTPError(refused.status, str(refused)) from None
    if payload.rejection_reason:
        raise ServingHTTPError(413, payload.rejection_reason)
    return payload.body


async def count_response(
    request: Request, respond: Callable[[ChatServer, float], Awaitable[Response]]
) -> Response:
    """The response of a route that answers, counted by its status; 499 for a client that has left before.

    Args:
        respond: gives it, from the server and the time at which the request began (of the monotonic clock, seconds);
            may raise ClientGone.
    Raises: RefusedRequest, of which the status is counted, too.
    """
    server, began, code = find_chat_server(request), time.monotonic(), 500
    try:
        server.check_token(request)
        try:
            response = await respond(server, began)
        except ClientDisconnected:
            server.metrics.client_disconnects.inc()
            response = Response(status_code=499)
        code = response.status_code
        return response
    except ServingHTTPError as refused:
        code = refused.status
        raise
    finally:
        server.metrics.requests.labels(str(code)).inc()


async def create_chat_completion(request: Request) -> Response:
    """The route."""
    return await count_response(request, functools.partial(_run_chat_completion, request))


async def _run_chat_completion(request: Request, server: ChatServer, began: float) -> Response:
    body = parse_json_body(ChatBody, await read_full_body(server, request))
    server.check_model(body.model)
    answering, _ = server.require_ready()
    asked = await check_chat_request(server, body, began)
    if body.stream:
        requests = await asked.build_requests(0, asked.max_answers)
        pending = _submit_requests(answering, requests, streams=True)
        return ChatStreamResponse(
            server,
            asked.formatter,
            pending,
            asked.started_at,
            _wants_usage(body),
            functools.partial(_record_streamed_answers, server, asked, requests),
        )
    return JSONResponse(
        await (_build_voted_response if body.vote else _build_response)(server, request, asked)
    )


def _wants_usage(body: ChatBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _submit_requests(
    answering: EngineThread, requests: Sequence[ServedRequest], *, streams: bool = False
) -> PendingAnswers:
    try:
        return answering.submit_requests(requests, streams)
    except PosttrainError as error:
        _close_sessions(requests)
        raise convert_engine_error(error) from None


def convert_engine_error(error: BaseException) -> ServingHTTPError:
    """The response to an error of the serving loop."""
    if isinstance(error, ServerOverloaded):
        return ServingHTTPError(
            429, f"overloaded: {error}", code="overloaded", retry_after=error.retry_after
        )
    if isinstance(error, DeadlineExceeded):
        return ServingHTTPError(504, str(error), code="deadline")
    if isinstance(error, RequestCancelled):
        return ServingHTTPError(499, str(error))
    if isinstance(error, PosttrainError):
        return ServingHTTPError(503, str(error), code="engine", retry_after=1)
    return ServingHTTPError(500, f"{type(error).__name__}: {error}"[:500])


# -- from answers to a response ----------------------------------------------------------------------------------------


async def wait_for_answers(
    server: ChatServer, request: Request, requests: Sequence[ServedRequest]
) -> None:
    """Wait until every request has ended; a client that is gone frees its slots.

    Raises: ClientGone; RefusedRequest for the first one that failed.
    """
    answering, _ = server.require_ready()
    pending = _submit_requests(answering, requests)
    watch = asyncio.ensure_future(wait_for_disconnect(request.receive))
    done = asyncio.ensure_future(pending.done.wait())
    try:
        await asyncio.wait((watch, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnected
    finally:
        answering.cancel_requests(pending)
        watch.cancel()
        if done.done():
            _close_sessions(requests)
        else:  # the engine may be in the middle of a step
            done.add_done_callback(lambda task: _close_sessions(requests))
    for one in requests:
        if one.error is not None:
            raise convert_engine_error(one.error)


async def _build_response(
    server: ChatServer, request: Request, chat: CheckedChatRequest
) -> dict[str, Any]:
    """The body of a response, once every choice has ended."""
    requests = await chat.build_requests(0, chat.max_answers)
    await wait_for_answers(server, request, requests)
    if chat.body.environment is not None:
        records = build_session_records(chat.formatter, requests)
        body = _format_episode_response(chat, requests, records)
    else:
        reads = [chat.formatter.parse_answer(one.sequence) for one in requests]  # type: ignore[arg-type]
        body = chat.formatter.format_response(requests, reads)
        records = (
            build_chat_records(chat.formatter, requests, reads)
            if server.answers is not None
            else []
        )
    server.enqueue_answers(records)
    _record_answer_metrics(server, chat, body["usage"])
    return body


async def _build_voted_response(
    server: ChatServer, request: Request, chat: CheckedChatRequest
) -> dict[str, Any]:
    """The body of a response with the vote's answer: as many samples as it takes until none could change it.

    Samples of one version vote: where new weights came between two rounds, those of the old ones do not count.
    """
    form, options = chat.formatter, server.voting
    requests: list[ServedRequest] = []
    records: list[ServedAnswer] = []
    drawn = 0
    while wanted := min(
        _count_samples_to_draw(server, chat, records), 2 * chat.max_answers - drawn
    ):
        more = await chat.build_requests(drawn, wanted)
        await wait_for_answers(server, request, more)
        drawn += wanted
        requests = _filter_current_version([*requests, *more])
        records = _build_vote_records(form, chat, requests)
    outcome = count_votes([build_ballot(record) for record in records], options, chat.max_answers)
    chosen = outcome.supporters[0] if outcome.supporters else 0
    if chat.body.environment is not None:
        body = _format_episode_response(chat, [requests[chosen]], [records[chosen]])
    else:
        body = form.format_response([requests[chosen]], [ParsedAnswer(records[chosen].text, [])])
    body["choices"][0]["index"] = 0
    body["usage"] = (
        form.count_usage(requests)
        if chat.body.environment is None
        else _count_episode_usage(form.prompt_tokens, records)
    )
    body["vote"] = _format_vote(outcome)
    server.enqueue_answers(records)
    _record_answer_metrics(server, chat, body["usage"])
    return body


def _count_samples_to_draw(
    server: ChatServer, chat: CheckedChatRequest, records: Sequence[ServedAnswer]
) -> int:
    options = server.voting
    return count_samples_to_draw(
        [build_ballot(record) for record in records],
        chat.max_answers,
        min_samples=min(options.min_samples, chat.max_answers),
        weights=options.weights,
        ties=options.ties,
    )


def _filter_current_version(requests: list[ServedRequest]) -> list[ServedRequest]:
    """Those of the version that answers by now, which is a smaller one after a rollback."""
    now = requests[-1].policy_version
    return [request for request in requests if request.policy_version == now]


def _build_vote_records(
    formatter: Any, chat: CheckedChatRequest, requests: Sequence[ServedRequest]
) -> list[ServedAnswer]:
    if chat.body.environment is not None:
        return build_session_records(formatter, requests, chat.max_answers)
    return build_chat_records(
        formatter, requests, [formatter.read(one.sequence) for one in requests], chat.max_answers
    )


def _format_vote(outcome: VoteOutcome) -> dict[str, Any]:
    """The vote as its caller sees it."""
    names = ("answer", "confidence", "low", "high", "num_ballots", "entropy", "is_tie", "is_early")
    return {name: getattr(outcome, name) for name in names}


def _record_answer_metrics(
    server: ChatServer, chat: CheckedChatRequest, usage: dict[str, int]
) -> None:
    server.metrics.count_answer(
        time.monotonic() - chat.started_at, usage["prompt_tokens"], usage["completion_tokens"]
    )


def _close_sessions(requests: Sequence[ServedRequest]) -> None:
    """End the sessions of episodes."""
    for request in requests:
        if isinstance(request.sequence, EnvironmentSession):
            request.sequence.close()


def _record_streamed_answers(
    server: ChatServer,
    chat: CheckedChatRequest,
    requests: Sequence[ServedRequest],
    reads: Sequence[ParsedAnswer],
) -> None:
    """Hand the answers of a stream to their taker."""
    if server.answers is not None:
        server.enqueue_answers(build_chat_records(chat.formatter, requests, reads))


def _format_episode_response(
    chat: CheckedChatRequest, requests: Sequence[ServedRequest], records: Sequence[ServedAnswer]
) -> dict[str, Any]:
    """The body of a response about episodes."""
    choices = []
    for index, (request, record) in enumerate(zip(requests, records, strict=True)):
        assert isinstance(request.sequence, EnvironmentSession)
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": record.text, "refusal": None},
                "finish_reason": record.finish_reason,
                "logprobs": None,
                "policy_version": record.policy_version,
                "session": build_session_report(request.sequence, record.policy_version),
            }
        )
    head = chat.formatter.format_header("chat.completion", records[0].policy_version)
    return head | {
        "choices": choices,
        "usage": _count_episode_usage(chat.formatter.prompt_tokens, records),
    }


def _count_episode_usage(prompt_tokens: int, records: Sequence[ServedAnswer]) -> dict[str, int]:
    sampled = sum(sum(record.rollout.loss_mask) for record in records if record.rollout is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
