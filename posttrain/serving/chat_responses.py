"""Responses in OpenAI's format: JSON bodies, log-probabilities, streams of server-sent events, records for the sink."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from posttrain.serving.chat_prompts import ParsedAnswer, PromptBuilder
from posttrain.serving.chat_server import ChatServer
from posttrain.serving.environment_sessions import EnvironmentSession
from posttrain.serving.errors import ServingHTTPError, format_error_body
from posttrain.serving.served_model import PendingAnswers
from rl_core.environments.tools import Toolset
from rl_core.errors import PosttrainError
from rl_core.inference.serving_requests import (
    AnswerSequence,
    DeadlineExceeded,
    RequestEnded,
    RequestProgress,
    ServedAnswer,
    ServedRequest,
    TopTokens,
    cut_at_stop,
)
from rl_core.types import Conversation

MIN_LOGPROB = -9999.0  # OpenAI's log-probability of an impossible token
_REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes that are not, or not yet, a character


class TextStream:
    """Incremental text of one answer: complete characters only, and no text that may begin a stop text.

    Decodes a few tokens at a time together with those before them, because in some tokenizers the text of a token
    depends on its predecessors. The parts joined are the text of all tokens, cut at a stop text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        # The text of the first `_num_decoded` tokens is known; tokens from `_context_start` on are decoded again
        # with new ones.
        self._context_start = self._num_decoded = 0
        self._pending_text = ""  # decoded text that may begin a stop text
        self._emitted_text = ""
        self._has_ended = False

    def add_tokens(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that has become final."""
        self._ids += ids
        known = self._decode(self._ids[self._context_start : self._num_decoded])
        text = self._decode(self._ids[self._context_start :])
        if not text.startswith(known) or text.endswith(_REPLACEMENT_CHARACTER):
            return ""
        self._context_start, self._num_decoded = self._num_decoded, len(self._ids)
        return self._extract_final_text(text[len(known) :])

    def finish_text(self) -> str:
        """Return the remaining text once all tokens were added."""
        if self._has_ended:
            return ""
        text = cut_at_stop(self._decode(self._ids), self._stops)
        rest = text.removeprefix(self._emitted_text) if text.startswith(self._emitted_text) else ""
        self._emitted_text, self._has_ended = self._emitted_text + rest, True
        return rest

    def _extract_final_text(self, new_text: str) -> str:
        if self._has_ended:
            return ""
        text = self._pending_text + new_text
        final = cut_at_stop(text, self._stops)
        if len(final) < len(text):
            self._has_ended, self._pending_text = True, ""
        else:
            overlap = max((_measure_stop_overlap(text, stop) for stop in self._stops), default=0)
            end = len(text) - overlap
            final, self._pending_text = text[:end], text[end:]
        self._emitted_text += final
        return final


def _measure_stop_overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that begins the stop text."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


def resolve_finish_reason(sequence: AnswerSequence, answer: ParsedAnswer) -> str:
    """Return stop, length or tool_calls."""
    if sequence.hit_limit:
        return "length"
    return "tool_calls" if answer.calls else "stop"


@dataclass(slots=True)
class ResponseFormatter:
    """Formatter of the answers to one request."""

    answer_id: str
    model: str
    prompts: PromptBuilder
    tools: Toolset | None
    stops: tuple[str, ...]
    logprobs: bool
    num_top: int
    prompt_tokens: int
    base: int | None = None  # see `ServedModel.base_version`
    conversation: Conversation | None = None  # None = episodes of an environment
    created: int = field(default_factory=lambda: int(time.time()))

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode an answer's tokens, up to a stop text."""
        return cut_at_stop(self.prompts.renderer.action_text(ids), self.stops)

    def parse_answer(self, sequence: AnswerSequence) -> ParsedAnswer:
        """Parse an answer; one truncated at its token limit has no calls."""
        tools = None if sequence.hit_limit else self.tools
        return self.prompts.parse_answer(self.decode_text(sequence.tokens), tools)

    def format_response(
        self, requests: Sequence[ServedRequest], answers: Sequence[ParsedAnswer]
    ) -> dict[str, Any]:
        """Format the JSON body of a response."""
        choices = []
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            sequence = request.sequence
            assert isinstance(sequence, AnswerSequence)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.content,
                "refusal": None,
            }
            if answer.calls:
                message["tool_calls"] = answer.calls
            if answer.call_error is not None:
                message["tool_call_error"] = answer.call_error
            logprobs = self.format_logprobs(sequence.tokens, sequence.logprobs, request.top_tokens)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": resolve_finish_reason(sequence, answer),
                    "logprobs": logprobs,
                    "policy_version": request.policy_version,
                }
            )
        header = self.format_header("chat.completion", requests[0].policy_version)
        return header | {"choices": choices, "usage": self.count_usage(requests)}

    def format_header(self, kind: str, version: int | None) -> dict[str, Any]:
        """Format the fields that every body has."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"version-{self.format_weights_name(version)}",
            "policy_version": version,
            "model_version": self.format_weights_name(version),
        }

    def format_weights_name(self, version: int | None) -> str:
        """Format the name of the weights behind an answer; see `ServedModel.name`."""
        return str(version) if self.base is None else f"{self.base}+{version}"

    def count_usage(self, requests: Sequence[ServedRequest]) -> dict[str, int]:
        """Count the tokens of prompt and answers."""
        sampled = sum(len(getattr(request.sequence, "tokens", ())) for request in requests)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }

    def format_chunk(
        self,
        request: ServedRequest,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Format one event of a stream."""
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": reason,
            "logprobs": logprobs,
            "policy_version": request.policy_version,
        }
        header = self.format_header("chat.completion.chunk", request.policy_version)
        return header | {"choices": [choice]}

    def create_text_stream(self) -> TextStream:
        """Create the incremental text of one choice."""
        return TextStream(self.prompts.renderer.action_text, self.stops)

    def format_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: TopTokens | None
    ) -> dict[str, Any] | None:
        """Format log-probabilities; return None unless the request asked for them."""
        if not self.logprobs:
            return None
        content = []
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            top_logprobs = []
            if top is not None and self.num_top:
                top_ids = top.ids_TK[index][: self.num_top].tolist()
                top_values = top.logprobs_TK[index][: self.num_top].tolist()
                top_logprobs = [
                    self._format_token(top_id, value)
                    for top_id, value in zip(top_ids, top_values, strict=True)
                ]
            content.append(self._format_token(token, logprob) | {"top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}

    def _format_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.prompts.decode_token(token)
        return {
            "token": text,
            "logprob": logprob if math.isfinite(logprob) else MIN_LOGPROB,
            "bytes": None if _REPLACEMENT_CHARACTER in text else list(text.encode()),
        }


def build_chat_records(
    formatter: ResponseFormatter,
    requests: Sequence[ServedRequest],
    answers: Sequence[ParsedAnswer],
    max_votes: int = 0,
) -> list[ServedAnswer]:
    """Build the records of the answers to one request. `max_votes`: see `ServedAnswer`."""
    records = []
    for choice, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence) and request.policy_version is not None
        records.append(
            ServedAnswer(
                answer_id=formatter.answer_id,
                choice=choice,
                policy_version=request.policy_version,
                prompt_ids=sequence.prompt_ids,
                completion_ids=sequence.tokens,
                sampler_logprobs=sequence.logprobs,
                temperature=request.sampling.temperature,
                text=formatter.decode_text(sequence.tokens),
                finish_reason=resolve_finish_reason(sequence, answer),
                caller=request.caller,
                top=request.top_tokens,
                seed=sequence.seed,
                is_restricted=request.sampling.is_restricted,
                max_votes=max_votes,
                conversation=formatter.conversation,
            )
        )
    return records


def build_session_records(
    formatter: ResponseFormatter, requests: Sequence[ServedRequest], max_votes: int = 0
) -> list[ServedAnswer]:
    """Build the records of episodes. Raises: ServingHTTPError (500) if an environment failed."""
    records = []
    for choice, request in enumerate(requests):
        session, version = request.sequence, request.policy_version
        assert isinstance(session, EnvironmentSession) and version is not None
        if session.failure_reason:
            raise ServingHTTPError(500, session.failure_reason, param="environment")
        rollout = session.build_rollout(version)
        records.append(
            ServedAnswer(
                answer_id=formatter.answer_id,
                choice=choice,
                policy_version=version,
                prompt_ids=rollout.prompt_ids,
                completion_ids=rollout.completion_ids,
                sampler_logprobs=rollout.sampler_logprobs,
                temperature=rollout.temperature,
                text=rollout.trajectory.turns[-1].action,
                finish_reason="length" if rollout.is_truncated else "stop",
                caller=request.caller,
                top=request.top_tokens,
                rollout=rollout,
                seed=session.seed,
                is_restricted=request.sampling.is_restricted,
                max_votes=max_votes,
            )
        )
    return records


async def wait_for_disconnect(receive: Callable[[], Any]) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ChatStreamResponse(Response):
    """The response to a request with `stream: true`: server-sent events for as long as the client reads."""

    def __init__(
        self,
        server: ChatServer,
        formatter: ResponseFormatter,
        pending: PendingAnswers,
        began: float,
        include_usage: bool,
        record_answers: Callable[[Sequence[ParsedAnswer]], None],
    ) -> None:
        """Prepare the stream. `record_answers` is called with the answers once all have ended."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._server, self._formatter, self._pending = server, formatter, pending
        self._began, self._include_usage = began, include_usage
        self._record_answers = record_answers
        self._texts = [formatter.create_text_stream() for _ in pending.requests]
        self._answers: list[ParsedAnswer | None] = [None] * len(pending.requests)
        self._indices = {request: index for index, request in enumerate(pending.requests)}
        self._send: Any = None
        self._has_sent_event = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send events as they come; free the slots when the client disconnects or stops reading."""
        self._send = send
        assert self._server.engine is not None
        watch = asyncio.ensure_future(wait_for_disconnect(receive))
        sending = asyncio.ensure_future(self._stream_answers())
        try:
            await asyncio.wait((watch, sending), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._server.metrics.client_disconnects.inc()
            else:
                sending.result()
        finally:
            self._server.engine.cancel_requests(self._pending)
            for task in (watch, sending):
                task.cancel()

    async def _send_message(self, message: dict[str, Any]) -> None:
        """Send an ASGI message. Raises: TimeoutError if the client does not read."""
        async with asyncio.timeout(self._server.settings.write_seconds):
            await self._send(message)

    async def _send_events(self, *bodies: dict[str, Any]) -> None:
        if not bodies:
            return
        if not self._has_sent_event:
            self._has_sent_event = True
            self._server.metrics.first_part_seconds.observe(time.monotonic() - self._began)
        data = "".join(f"data: {json.dumps(body, ensure_ascii=False)}\n\n" for body in bodies)
        await self._send_message(
            {"type": "http.response.body", "body": data.encode(), "more_body": True}
        )

    async def _stream_answers(self) -> None:
        await self._send_message(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        events = self._pending.events
        assert events is not None
        num_open = len(self._pending.requests)
        while num_open:
            event = await events.get()
            if isinstance(event, RequestProgress):
                await self._send_progress(event)
            else:
                num_open -= 1
                if not await self._send_choice_end(event):
                    break
        else:
            await self._finish_stream()
        await self._send_message(
            {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        )

    async def _send_progress(self, event: RequestProgress) -> None:
        formatter, index = self._formatter, self._indices[event.request]
        if formatter.tools is not None:  # a call is recognised only at its end
            return
        text = self._texts[index].add_tokens(event.tokens)
        logprobs = formatter.format_logprobs(event.tokens, event.logprobs, event.top)
        if text or logprobs:
            delta = {"role": "assistant", "content": text}
            chunk = formatter.format_chunk(event.request, index, delta, logprobs=logprobs)
            await self._send_events(chunk)

    async def _send_choice_end(self, event: RequestEnded) -> bool:
        """Send the end of one choice; return False if it failed, which ends the stream."""
        formatter, request = self._formatter, event.request
        index = self._indices[request]
        if request.error is not None:
            is_late = isinstance(request.error, DeadlineExceeded)
            status = 504 if is_late else 503 if isinstance(request.error, PosttrainError) else 500
            await self._send_events(format_error_body(ServingHTTPError(status, str(request.error))))
            return False
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        answer = self._answers[index] = formatter.parse_answer(sequence)
        chunks = []
        if formatter.tools is None:
            if rest := self._texts[index].finish_text():
                delta: dict[str, Any] = {"role": "assistant", "content": rest}
                chunks.append(formatter.format_chunk(request, index, delta))
        else:
            delta = {"role": "assistant", "content": answer.content}
            if answer.calls:
                delta["tool_calls"] = [
                    {"index": call_index, **call} for call_index, call in enumerate(answer.calls)
                ]
            if answer.call_error is not None:
                delta["tool_call_error"] = answer.call_error
            logprobs = formatter.format_logprobs(
                sequence.tokens, sequence.logprobs, request.top_tokens
            )
            chunks.append(formatter.format_chunk(request, index, delta, logprobs=logprobs))
        reason = resolve_finish_reason(sequence, answer)
        chunks.append(formatter.format_chunk(request, index, {}, reason))
        await self._send_events(*chunks)
        return True

    async def _finish_stream(self) -> None:
        """Send the usage, count and record the answers, once every choice has ended."""
        requests = self._pending.requests
        usage = self._formatter.count_usage(requests)
        if self._include_usage:
            version = requests[0].policy_version
            header = self._formatter.format_header("chat.completion.chunk", version)
            await self._send_events(header | {"choices": [], "usage": usage})
        self._server.metrics.count_answer(
            time.monotonic() - self._began, usage["prompt_tokens"], usage["completion_tokens"]
        )
        self._record_answers([answer for answer in self._answers if answer is not None])
