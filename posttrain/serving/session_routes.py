"""Routes of recorded sessions (`posttrain serve --record`).

    POST   /v1/sessions                         {"task": "17", "seed": 0}: id, base_url and api_key of a session
    GET    /v1/sessions                         open sessions, and counts since the start
    POST   /v1/sessions/ID/chat/completions     the agent's requests, with the session's key
    GET    /v1/sessions/ID/models
    POST   /v1/sessions/ID/score                {"reward": 1.0}: the episode is on the disk before the answer
    GET    /v1/sessions/ID                      numbers of calls and tokens
    DELETE /v1/sessions/ID                      no record

Sessions are opened, scored and dropped with the server's key; an agent knows only its session's.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.serving.chat_responses import ChatStreamResponse
from posttrain.serving.chat_routes import (
    count_response,
    parse_answers,
    read_full_body,
    wait_for_answers,
)
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.errors import ServingHTTPError, convert_engine_error
from posttrain.serving.recorded_sessions import RecordedSession, RecordedSessions
from posttrain.serving.request_bodies import (
    FiniteFloat,
    StrictBody,
    convert_request_error,
    parse_json_body,
)
from posttrain.web.tokens import split_authorization
from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.requests import ChatRequestError, parse_chat_request
from rl_core.errors import PosttrainError
from rl_core.inference.serving_requests import ServedRequest
from rl_core.rollouts.agent_calls import (
    build_call_formatter,
    build_call_requests,
    list_sampled_choices,
)
from rl_core.rollouts.agent_recorder import EpisodeLimitReached

_MAX_INFO_CHARACTERS = 100_000
_DEFAULT_TENANT = "default"


class SessionBody(StrictBody):
    """A session to open."""

    task: Annotated[str, Field(min_length=1, max_length=1000)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tenant: Annotated[str, Field(min_length=1, max_length=100)] = _DEFAULT_TENANT
    seconds: Annotated[FiniteFloat, Field(gt=0)] | None = None


class ScoreBody(StrictBody):
    """The score of a session."""

    reward: FiniteFloat
    success: bool | None = None
    info: Annotated[dict[str, Any], Field(default_factory=dict)]


def _find_sessions(request: Request) -> RecordedSessions:
    sessions = find_chat_server(request).recorded
    if sessions is None:
        raise ServingHTTPError(
            404, "sessions are not recorded: start with posttrain serve --record"
        )
    return sessions


async def _open_session(request: Request) -> Response:
    server = find_chat_server(request)
    server.check_token(request)
    sessions = _find_sessions(request)
    body = parse_json_body(SessionBody, await read_full_body(server, request))
    _, prompts = server.require_ready()
    assert server.model is not None
    session = sessions.open_session(
        prompts,
        server.model.context,
        server.model.name,
        task=body.task,
        seed=body.seed,
        tenant=body.tenant,
        seconds=body.seconds,
    )
    report = _describe_session(session) | {
        "base_url": f"{request.base_url}v1/sessions/{session.id}",
        "api_key": sessions.build_key(session.id),
    }
    return JSONResponse(report, 201)


async def _list_sessions(request: Request) -> Response:
    find_chat_server(request).check_token(request)
    sessions = _find_sessions(request)
    report = {
        "object": "list",
        "data": [_describe_session(session) for session in sessions.list_open_sessions()],
        "num_episodes": sessions.file.num_episodes,
        "counts": dict(sessions.counts),
    }
    return JSONResponse(report)


def _describe_session(session: RecordedSession) -> dict[str, Any]:
    answers = session.record.answers
    return {
        "id": session.id,
        "object": "session",
        "task": session.task,
        "seed": session.seed,
        "tenant": session.tenant,
        "num_answers": len(answers),
        "num_tokens": sum(len(answer.tokens) for answer in answers),
        "limit": session.record.limit,
        "seconds_left": round(max(0.0, session.deadline - time.monotonic()), 3),
    }


async def _report_session(request: Request) -> Response:
    find_chat_server(request).check_token(request)
    return JSONResponse(
        _describe_session(_find_sessions(request).find_session(request.path_params["id"]))
    )


async def _drop_session(request: Request) -> Response:
    find_chat_server(request).check_token(request)
    session_id = request.path_params["id"]
    _find_sessions(request).drop_session(session_id)
    return JSONResponse({"id": session_id, "object": "session", "deleted": True})


async def _score_session(request: Request) -> Response:
    server = find_chat_server(request)
    server.check_token(request)
    sessions, session_id = _find_sessions(request), request.path_params["id"]
    body = parse_json_body(ScoreBody, await read_full_body(server, request))
    score = {"reward": body.reward, "success": body.success, "info": body.info}
    if len(str(body.info)) > _MAX_INFO_CHARACTERS:
        raise ServingHTTPError(422, f"info: at most {_MAX_INFO_CHARACTERS} characters")
    try:
        is_new = await sessions.record_score(session_id, score)
    except PosttrainError as error:
        raise ServingHTTPError(503, str(error), retry_after=5) from None
    return JSONResponse({"id": session_id, "object": "session.score", "repeated": not is_new})


def _find_keyed_session(request: Request) -> RecordedSession:
    """Return the session whose key the request has. Raises: ServingHTTPError (401, 404)."""
    sessions, session_id = _find_sessions(request), request.path_params["id"]
    scheme, key = split_authorization(request)
    if scheme != "bearer" or not sessions.is_key(session_id, key):
        raise ServingHTTPError(
            401,
            "the key is not that of this session; use the api_key that opened with it",
            code="invalid_api_key",
        )
    session = sessions.find_session(session_id)
    if session.record.is_closed:
        raise ServingHTTPError(409, "the session's score is being recorded", code="session_scored")
    return session


async def _list_session_models(request: Request) -> Response:
    _find_keyed_session(request)
    name = find_chat_server(request).name
    model = {"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}
    return JSONResponse({"object": "list", "data": [model]})


async def _create_session_completion(request: Request) -> Response:
    respond = functools.partial(_answer_session, request)
    return await count_response(request, respond, lambda _: _find_keyed_session(request))


async def _answer_session(request: Request, server: ChatServer, began: float) -> Response:
    body = await read_full_body(server, request)
    session = _find_keyed_session(request)
    engine, _ = server.require_ready()
    record = session.record
    try:
        chat = parse_chat_request(body)
        if chat.n > server.settings.max_choices:
            raise ChatRequestError(f"n: at most {server.settings.max_choices} choices", param="n")
        call = await server.run_on_prompt_thread(record.begin_call, chat)
    except EpisodeLimitReached as error:
        raise ServingHTTPError(400, str(error), param=error.param, code=error.code) from None
    except ChatRequestError as error:
        raise convert_request_error(error) from None
    end_call: Callable[[], None] = functools.partial(record.abandon_call, call)
    try:
        requests = build_call_requests(record, call, caller=f"session {session.tenant}")
        _limit_time(requests, server, session, began)
        formatter = build_call_formatter(record, call, server.name)

        def finish_call(answers: Sequence[ParsedAnswer]) -> None:
            record.finish_call(call, list_sampled_choices(formatter, requests, answers))

        if chat.stream:
            try:
                pending = engine.submit_requests(requests, True)
            except PosttrainError as error:
                raise convert_engine_error(error) from None
            response = _SessionStreamResponse(
                server, formatter, pending, began, chat.include_usage, finish_call
            )
            response.on_end, end_call = end_call, _do_nothing
            return response
        await wait_for_answers(server, request, requests)
        answers = parse_answers(formatter, requests)
        finish_call(answers)
        content = formatter.format_response(requests, answers)
        usage = content["usage"]
        server.metrics.count_answer(
            time.monotonic() - began, usage["prompt_tokens"], usage["completion_tokens"]
        )
        return JSONResponse(content)
    finally:
        end_call()


def _limit_time(
    requests: Sequence[ServedRequest], server: ChatServer, session: RecordedSession, began: float
) -> None:
    """Set the deadline of a call: that of a request, or of its session."""
    seconds = server.settings.request_seconds
    for request in requests:
        request.deadline = min(began + seconds, session.deadline, math.inf)
        request.limit = f"serving.request_seconds ({seconds:g}) or the session's time"


def _do_nothing() -> None:
    """Leave the end of a call to its stream."""


class _SessionStreamResponse(ChatStreamResponse):
    """The stream of a session's call; the call ends with the stream."""

    on_end: Callable[[], None] = staticmethod(_do_nothing)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_end()


SESSION_ROUTES = [
    Route("/v1/sessions", _open_session, methods=["POST"]),
    Route("/v1/sessions", _list_sessions, methods=["GET"]),
    Route("/v1/sessions/{id}", _report_session, methods=["GET"]),
    Route("/v1/sessions/{id}", _drop_session, methods=["DELETE"]),
    Route("/v1/sessions/{id}/score", _score_session, methods=["POST"]),
    Route("/v1/sessions/{id}/models", _list_session_models, methods=["GET"]),
    Route("/v1/sessions/{id}/chat/completions", _create_session_completion, methods=["POST"]),
]
