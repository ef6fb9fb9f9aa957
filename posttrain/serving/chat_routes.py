"""Chat route, /v1/chat/completions: checks requests, samples answers, responds with JSON, a vote or a stream."""

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

from posttrain.serving.chat_responses import (
    ChatStreamResponse,
    build_chat_records,
    build_session_records,
    wait_for_disconnect,
)
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.environment_sessions import EnvironmentSession, build_session_report
from posttrain.serving.errors import ServingHTTPError, convert_engine_error
from posttrain.serving.request_bodies import ChatBody, convert_request_error, parse_json_body
from posttrain.serving.served_model import EngineThread, PendingAnswers
from posttrain.web.errors import HTTPError
from posttrain.web.request_body import read_request_payload
from rl_core.chat.answer_rules import RULE_PARAMETERS, AnswerRules, ChatRequestError
from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.responses import ResponseFormatter
from rl_core.environments.tools import Toolset
from rl_core.errors import PosttrainError
from rl_core.inference.sampling import RolloutSequence, compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    ServedAnswer,
    ServedRequest,
    build_stop_test,
)
from rl_core.inference.token_rules import TokenRules
from rl_core.online.experience import build_ballot, count_votes
from rl_core.online.voting import VoteOutcome, count_samples_to_draw
from rl_core.settings import SamplingSettings
from rl_core.types import Conversation, ImagePixels


@dataclass(slots=True)
class CheckedChatRequest:
    """A chat request that was checked; `build_requests` builds the sequences of its answers."""

    server: ChatServer
    body: ChatBody
    formatter: ResponseFormatter
    started_at: float  # seconds of the monotonic clock
    seed: int
    ids: list[int]  # of the prompt; empty with an environment
    max_answers: int  # `n` of the request, or the most samples of a vote
    rules: TokenRules | None = None
    images: Sequence[ImagePixels] = ()  # of the prompt

    async def build_requests(self, first: int, count: int) -> list[ServedRequest]:
        """Build the requests for `count` samples from index `first` on. Raises: ServingHTTPError."""
        samples = range(first, first + count)
        sequences: Sequence[RolloutSequence]
        if self.body.environment is not None:
            sequences = await _open_sessions(self.server, self.body, self.seed, samples)
            self.formatter.prompt_tokens += sum(len(sequence.prompt_ids) for sequence in sequences)
        else:
            decode = self.formatter.prompts.renderer.action_text
            stops = build_stop_test(decode, self.body.stop_texts)
            sequences = [
                AnswerSequence(
                    self.ids, compute_sequence_seed("chat", self.seed, i), stops, self.images
                )
                for i in samples
            ]
        return _build_requests(self.server, self.body, sequences, self.started_at, self.rules)


class ClientDisconnected(Exception):
    """The client disconnected before its answer."""


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat request; the route's handler."""
    return await count_response(request, functools.partial(_run_chat_completion, request))


async def count_response(
    request: Request,
    respond: Callable[[ChatServer, float], Awaitable[Response]],
    check_key: Callable[[Request], object] | None = None,
) -> Response:
    """Run the handler of a route and count its response by status; 499 if the client disconnected.

    Args:
        respond: builds the response from the server and the start of the request (monotonic clock, seconds); may
            raise ClientDisconnected.
        check_key: refuses a request without the right key; None = the server's.
    Raises: ServingHTTPError; its status is counted, too.
    """
    server, began, status = find_chat_server(request), time.monotonic(), 500
    try:
        (check_key or server.check_token)(request)
        try:
            response = await respond(server, began)
        except ClientDisconnected:
            server.metrics.client_disconnects.inc()
            response = Response(status_code=499)
        status = response.status_code
        return response
    except ServingHTTPError as error:
        status = error.status
        raise
    finally:
        server.metrics.requests.labels(str(status)).inc()


async def _run_chat_completion(request: Request, server: ChatServer, began: float) -> Response:
    body = parse_json_body(ChatBody, await read_full_body(server, request))
    server.check_model(body.model)
    engine, _ = server.require_ready()
    chat = await check_chat_request(server, body, began)
    if body.stream:
        requests = await chat.build_requests(0, chat.max_answers)
        pending = submit_requests(engine, requests, streams=True)
        return ChatStreamResponse(
            server,
            chat.formatter,
            pending,
            chat.started_at,
            body.stream_options is not None and body.stream_options.include_usage,
            functools.partial(record_chat_answers, server, chat, requests),
        )
    build_response = _build_voted_response if body.vote else _build_response
    return JSONResponse(await build_response(server, request, chat))


async def read_full_body(server: ChatServer, request: Request) -> bytes:
    """Read the body of a request within its limits. Raises: ServingHTTPError (400, 408, 413, 415)."""
    try:
        payload = await read_request_payload(
            request, server.settings.max_body_bytes, server.settings.idle_seconds
        )
    except HTTPError as error:
        raise ServingHTTPError(error.status, str(error)) from None
    if payload.rejection_reason:
        raise ServingHTTPError(413, payload.rejection_reason)
    return payload.body


async def check_chat_request(
    server: ChatServer, body: ChatBody, began: float
) -> CheckedChatRequest:
    """Check a chat request and render its prompt. Raises: ServingHTTPError (422)."""
    _, prompts = server.require_ready()
    count = _count_allowed_answers(server, body)
    if body.top_logprobs and not body.logprobs:
        raise ServingHTTPError(422, "top_logprobs: needs logprobs: true", param="top_logprobs")
    ids: list[int] = []
    images: list[ImagePixels] = []
    tools: Toolset | None = None
    conversation: Conversation | None = None
    rules = body.parse_rules()
    token_rules: TokenRules | None = None
    assert server.model is not None
    if body.environment is not None:
        _refuse_rules(rules)
    else:
        try:
            schemas = body.tool_schemas
            prompt = await server.run_on_prompt_thread(
                prompts.build_prompt, body.chat_messages, schemas, rules.reasoning_effort
            )
            if rules != AnswerRules():
                token_rules = await server.run_blocking(
                    prompts.compile_rules, rules, schemas, server.model.vocab_size
                )
        except ChatRequestError as error:
            raise convert_request_error(error) from None
        ids, tools, conversation = prompt.ids, prompt.tools, prompt.conversation
        images = prompt.images
    formatter = ResponseFormatter(
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
        hides_thought=rules.has_grammar and bool(prompts.renderer.opened_thought),
        is_learnable=rules.reasoning_effort is None,
        max_calls=1 if body.parallel_tool_calls is False else None,
    )
    seed = body.seed if body.seed is not None else secrets.randbits(64)
    return CheckedChatRequest(server, body, formatter, began, seed, ids, count, token_rules, images)


def _refuse_rules(rules: AnswerRules) -> None:
    """Refuse rules of one answer for an episode. Raises: ServingHTTPError (422)."""
    if rules != AnswerRules():
        raise ServingHTTPError(
            422,
            f"{', '.join(RULE_PARAMETERS)}: are not supported with environment",
            param="environment",
        )


def _count_allowed_answers(server: ChatServer, body: ChatBody) -> int:
    """Return how many answers may be sampled. Raises: ServingHTTPError (422)."""
    limit = min(server.settings.max_choices, server.settings.max_waiting)
    if not body.vote:
        count = body.n or 1
        if count > limit:
            raise ServingHTTPError(422, f"n: {count} choices; at most {limit}", param="n")
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
    return min(server.voting.max_samples, limit)


def _build_requests(
    server: ChatServer,
    body: ChatBody,
    sequences: Sequence[RolloutSequence],
    began: float,
    rules: TokenRules | None,
) -> list[ServedRequest]:
    assert server.model is not None
    sampling = _build_sampling(body, server.model.context)
    max_seconds = server.settings.request_seconds
    deadline_seconds = body.deadline_seconds or math.inf
    if deadline_seconds < max_seconds:
        limit = f"deadline_seconds: {deadline_seconds:g}"
    else:
        limit = f"the server's serving.request_seconds: {max_seconds:g}"
    num_top = max(server.num_top_tokens, (body.top_logprobs or 0) if body.logprobs else 0)
    return [
        ServedRequest(
            sequence,
            sampling,
            caller=body.user or "",
            deadline=began + min(max_seconds, deadline_seconds),
            limit=limit,
            top=num_top,
            streams=bool(body.stream),
            has_stops=bool(body.stop_texts),
            rules=rules,
        )
        for sequence in sequences
    ]


def _build_sampling(body: ChatBody, context: int) -> SamplingSettings:
    episode = body.environment
    return _create_sampling(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=float(body.top_p or 1.0),
        top_k=body.top_k or 0,
        min_p=float(body.min_p or 0.0),
        max_completion_tokens=min(body.max_answer_tokens or context, context),
        max_turns=1 if episode is None else episode.max_turns,
        stop=() if episode is None else body.stop_texts,
    )


_create_sampling = functools.lru_cache(maxsize=4096)(SamplingSettings)


async def _open_sessions(
    server: ChatServer, body: ChatBody, seed: int, samples: range
) -> list[EnvironmentSession]:
    """Begin the episodes of a request. Raises: ServingHTTPError."""
    model, renderer = server.model, server.session_renderer
    assert body.environment is not None and model is not None and renderer is not None
    for name in ("messages", "tools"):
        if getattr(body, name):
            raise ServingHTTPError(
                422, f"{name}: must be empty with environment, which provides them", param=name
            )
    for name in ("stream", "logprobs"):
        if getattr(body, name):
            raise ServingHTTPError(422, f"{name}: is not supported with environment", param=name)
    sampling, context = _build_sampling(body, model.context), model.context
    open_session = functools.partial(
        server.sessions.open_session, body.environment, renderer, sampling, seed
    )
    return [await server.run_blocking(open_session, sample, context) for sample in samples]


def submit_requests(
    engine: EngineThread, requests: Sequence[ServedRequest], *, streams: bool = False
) -> PendingAnswers:
    """Submit the requests of one HTTP request together. Raises: ServingHTTPError."""
    try:
        return engine.submit_requests(requests, streams)
    except PosttrainError as error:
        _close_sessions(requests)
        raise convert_engine_error(error) from None


async def wait_for_answers(
    server: ChatServer, request: Request, requests: Sequence[ServedRequest]
) -> None:
    """Wait until every request has ended. Free the slots if the client disconnects.

    Raises: ClientDisconnected; ServingHTTPError for the first request that failed.
    """
    engine, _ = server.require_ready()
    pending = submit_requests(engine, requests)
    watch = asyncio.ensure_future(wait_for_disconnect(request.receive))
    done = asyncio.ensure_future(pending.done.wait())
    try:
        await asyncio.wait((watch, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnected
    finally:
        engine.cancel_requests(pending)
        watch.cancel()
        if done.done():
            _close_sessions(requests)
        else:  # the engine may be in the middle of a step
            done.add_done_callback(lambda task: _close_sessions(requests))
    for ended in requests:
        if ended.error is not None:
            raise convert_engine_error(ended.error)


async def _build_response(
    server: ChatServer, request: Request, chat: CheckedChatRequest
) -> dict[str, Any]:
    """Build the body of a response once every choice has ended."""
    requests = await chat.build_requests(0, chat.max_answers)
    await wait_for_answers(server, request, requests)
    if chat.body.environment is not None:
        records = build_session_records(chat.formatter, requests)
        body = _format_episode_response(chat, requests, records)
        server.enqueue_answers(records)
    else:
        answers = parse_answers(chat.formatter, requests)
        body = chat.formatter.format_response(requests, answers)
        record_chat_answers(server, chat, requests, answers)
    record_answer_metrics(server, chat, body["usage"])
    return body


def parse_answers(
    formatter: ResponseFormatter, requests: Sequence[ServedRequest]
) -> list[ParsedAnswer]:
    """Parse the answers of requests that have ended."""
    answers = []
    for request in requests:
        assert isinstance(request.sequence, AnswerSequence)
        answers.append(formatter.parse_answer(request.sequence))
    return answers


async def _build_voted_response(
    server: ChatServer, request: Request, chat: CheckedChatRequest
) -> dict[str, Any]:
    """Build the body of a response by vote: draw samples until no further one could change the outcome.

    Only samples of one version vote: if new weights are published between two rounds, earlier samples do not count.
    """
    formatter, is_episode = chat.formatter, chat.body.environment is not None
    requests: list[ServedRequest] = []
    records: list[ServedAnswer] = []
    num_drawn = 0
    while True:
        num_wanted = _count_samples_to_draw(server, chat, records)
        num_wanted = min(num_wanted, 2 * chat.max_answers - num_drawn)
        if not num_wanted:
            break
        new_requests = await chat.build_requests(num_drawn, num_wanted)
        await wait_for_answers(server, request, new_requests)
        num_drawn += num_wanted
        requests = _filter_current_version([*requests, *new_requests])
        if is_episode:
            records = build_session_records(formatter, requests, chat.max_answers)
        else:
            answers = parse_answers(formatter, requests)
            records = build_chat_records(formatter, requests, answers, chat.max_answers)
    ballots = [build_ballot(record) for record in records]
    outcome = count_votes(ballots, server.voting, chat.max_answers)
    winner = outcome.supporters[0] if outcome.supporters else 0
    if is_episode:
        body = _format_episode_response(chat, [requests[winner]], [records[winner]])
        body["usage"] = _count_episode_usage(formatter.prompt_tokens, records)
    else:
        answer = ParsedAnswer(records[winner].text, [])
        body = formatter.format_response([requests[winner]], [answer])
        body["usage"] = formatter.count_usage(requests)
    body["choices"][0]["index"] = 0
    body["vote"] = _format_vote(outcome)
    server.enqueue_answers(records)
    record_answer_metrics(server, chat, body["usage"])
    return body


def _count_samples_to_draw(
    server: ChatServer, chat: CheckedChatRequest, records: Sequence[ServedAnswer]
) -> int:
    voting = server.voting
    return count_samples_to_draw(
        [build_ballot(record) for record in records],
        chat.max_answers,
        min_samples=min(voting.min_samples, chat.max_answers),
        weights=voting.weights,
        ties=voting.ties,
    )


def _filter_current_version(requests: list[ServedRequest]) -> list[ServedRequest]:
    """Return the requests answered by the current version; after a rollback its number is smaller."""
    version = requests[-1].policy_version
    return [request for request in requests if request.policy_version == version]


def _format_vote(outcome: VoteOutcome) -> dict[str, Any]:
    """Format the vote for its caller."""
    names = ("answer", "confidence", "low", "high", "num_ballots", "entropy", "is_tie", "is_early")
    return {name: getattr(outcome, name) for name in names}


def record_answer_metrics(
    server: ChatServer, chat: CheckedChatRequest, usage: dict[str, int]
) -> None:
    """Count an answered request."""
    server.metrics.count_answer(
        time.monotonic() - chat.started_at, usage["prompt_tokens"], usage["completion_tokens"]
    )


def _close_sessions(requests: Sequence[ServedRequest]) -> None:
    """Close the sessions of episodes."""
    for request in requests:
        if isinstance(request.sequence, EnvironmentSession):
            request.sequence.close()


def record_chat_answers(
    server: ChatServer,
    chat: CheckedChatRequest,
    requests: Sequence[ServedRequest],
    answers: Sequence[ParsedAnswer],
) -> None:
    """Queue the answers of a chat for the answer sink."""
    if server.answers is not None:
        server.enqueue_answers(build_chat_records(chat.formatter, requests, answers))


def _format_episode_response(
    chat: CheckedChatRequest, requests: Sequence[ServedRequest], records: Sequence[ServedAnswer]
) -> dict[str, Any]:
    """Format the JSON body of a response about episodes."""
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
    header = chat.formatter.format_header("chat.completion", records[0].policy_version)
    usage = _count_episode_usage(chat.formatter.prompt_tokens, records)
    return header | {"choices": choices, "usage": usage}


def _count_episode_usage(prompt_tokens: int, records: Sequence[ServedAnswer]) -> dict[str, int]:
    sampled = sum(sum(record.rollout.loss_mask) for record in records if record.rollout is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
