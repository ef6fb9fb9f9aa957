"""Text of tokens that come one after the other.

Answers in the dialect's form: whole ones, parts of a stream, log-probabilities.

Answers as records for whoever takes them: `ServedAnswer`s of conversations and of sessions.

Answers as a stream of server-sent events, for as long as the client reads.
"""

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

_REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes that are no character, or not yet


class TextStream:
    """Parts of a text as soon as they are certain: whole characters, and no beginning of a stop text.

    Decoded a few tokens at a time, with those before them, because what a token stands for depends on them in some
    tokenizers. The parts together are the text of all tokens, cut at a stop text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._context_start = self._num_decoded = (
            0  # tokens whose text is known; those from `before` on are decoded with new ones
        )
        self._pending_text = ""  # known text that may begin a stop text
        self._emitted_text = ""
        self._has_ended = False

    def add_tokens(self, ids: Sequence[int]) -> str:
        """The part that further tokens make certain."""
        self._ids += ids
        known = self._decode(self._ids[self._context_start : self._num_decoded])
        text = self._decode(self._ids[self._context_start :])
        if not text.startswith(known) or text.endswith(_REPLACEMENT_CHARACTER):
            return ""
        self._context_start, self._num_decoded = self._num_decoded, len(self._ids)
        return self._extract_certain_text(text[len(known) :])

    def finish_text(self) -> str:
        """The rest, once all tokens are known."""
        if self._has_ended:
            return ""
        whole = cut_at_stop(self._decode(self._ids), self._stops)
        rest = (
            whole.removeprefix(self._emitted_text) if whole.startswith(self._emitted_text) else ""
        )
        self._emitted_text, self._has_ended = self._emitted_text + rest, True
        return rest

    def _extract_certain_text(self, new: str) -> str:
        if self._has_ended:
            return ""
        text = self._pending_text + new
        cut = cut_at_stop(text, self._stops)
        if len(cut) < len(text):
            self._has_ended, self._pending_text = True, ""
        else:
            held = max((_measure_stop_overlap(text, stop) for stop in self._stops), default=0)
            cut, self._pending_text = text[: len(text) - held], text[len(text) - held :]
        self._emitted_text += cut
        return cut


def _measure_stop_overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop text."""
    return next(
        (
            size
            for size in range(min(len(text), len(stop) - 1), 0, -1)
            if stop.startswith(text[-size:])
        ),
        0,
    )


_MIN_LOGPROB = -9999.0  # the dialect's number for the log-probability of a token that cannot come


def resolve_finish_reason(sequence: AnswerSequence, read: ParsedAnswer) -> str:
    """stop, length or tool_calls."""
    if sequence.hit_limit:
        return "length"
    return "tool_calls" if read.calls else "stop"


@dataclass(slots=True)
class ResponseFormatter:
    """Form of the answers to one request."""

    answer_id: str
    model: str
    prompts: PromptBuilder
    tools: Toolset | None
    stops: tuple[str, ...]
    logprobs: bool
    num_top: int
    prompt_tokens: int
    base: int | None = None  # see `ServedModel.base`
    conversation: Conversation | None = None  # None = episodes of an environment
    created: int = field(default_factory=lambda: int(time.time()))

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of an answer's tokens, up to a stop text."""
        return cut_at_stop(self.prompts.renderer.action_text(ids), self.stops)

    def parse_answer(self, sequence: AnswerSequence) -> ParsedAnswer:
        """Text or calls of an answer; a cut off one has no calls."""
        return self.prompts.parse_answer(
            self.decode_text(sequence.tokens), None if sequence.hit_limit else self.tools
        )

    def format_response(
        self, requests: Sequence[ServedRequest], reads: Sequence[ParsedAnswer]
    ) -> dict[str, Any]:
        """The body of a response."""
        choices = []
        for index, (request, read) in enumerate(zip(requests, reads, strict=True)):
            sequence = request.sequence
            assert isinstance(sequence, AnswerSequence)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": read.content,
                "refusal": None,
            }
            if read.calls:
                message["tool_calls"] = read.calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": resolve_finish_reason(sequence, read),
                    "logprobs": self.format_logprobs(
                        sequence.tokens, sequence.logprobs, request.top_tokens
                    ),
                    "policy_version": request.policy_version,
                }
            )
        return self.format_header("chat.completion", requests[0].policy_version) | {
            "choices": choices,
            "usage": self.count_usage(requests),
        }

    def format_header(self, kind: str, version: int | None) -> dict[str, Any]:
        """Fields that every body has."""
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
        """Name of the weights behind an answer; see `ServedModel.name`."""
        return str(version) if self.base is None else f"{self.base}+{version}"

    def count_usage(self, requests: Sequence[ServedRequest]) -> dict[str, int]:
        """Numbers of tokens."""
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
        """One part of a stream."""
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": reason,
            "logprobs": logprobs,
            "policy_version": request.policy_version,
        }
        return self.format_header("chat.completion.chunk", request.policy_version) | {
            "choices": [choice]
        }

    def create_text_stream(self) -> TextStream:
        """The text of one choice, piece by piece."""
        return TextStream(self.prompts.renderer.action_text, self.stops)

    def format_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: TopTokens | None
    ) -> dict[str, Any] | None:
        """The dialect's log-probabilities; None unless they were asked for."""
        if not self.logprobs:
            return None
        content = []
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            others = (
                []
                if top is None or not self.num_top
                else [
                    self._format_token(other, value)
                    for other, value in zip(
                        top.ids_TK[place][: self.num_top].tolist(),
                        top.logprobs_TK[place][: self.num_top].tolist(),
                        strict=True,
                    )
                ]
            )
            content.append(self._format_token(token, logprob) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _format_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.prompts.decode_token(token)
        known = None if "\ufffd" in text else list(text.encode())
        return {
            "token": text,
            "logprob": logprob if math.isfinite(logprob) else _MIN_LOGPROB,
            "bytes": known,
        }


def build_chat_records(
    formatter: ResponseFormatter,
    requests: Sequence[ServedRequest],
    reads: Sequence[ParsedAnswer],
    max_votes: int = 0,
) -> list[ServedAnswer]:
    """Records of the answers to one request. `max_votes`: see `ServedAnswer`."""
    found = []
    for choice, (request, read) in enumerate(zip(requests, reads, strict=True)):
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence) and request.policy_version is not None
        found.append(
            ServedAnswer(
                answer_id=formatter.answer_id,
                choice=choice,
                policy_version=request.policy_version,
                prompt_ids=sequence.prompt_ids,
                completion_ids=sequence.tokens,
                sampler_logprobs=sequence.logprobs,
                temperature=request.sampling.temperature,
                text=formatter.decode_text(sequence.tokens),
                finish_reason=resolve_finish_reason(sequence, read),
                caller=request.caller,
                top=request.top_tokens,
                seed=sequence.seed,
                is_restricted=request.sampling.is_restricted,
                max_votes=max_votes,
                conversation=formatter.conversation,
            )
        )
    return found


def build_session_records(
    formatter: ResponseFormatter, requests: Sequence[ServedRequest], max_votes: int = 0
) -> list[ServedAnswer]:
    """The same for episodes. Raises: RefusedRequest (500) where an environment failed."""
    found = []
    for choice, request in enumerate(requests):
        session, version = request.sequence, request.policy_version
        assert isinstance(session, EnvironmentSession) and version is not None
        if session.failure_reason:
            raise ServingHTTPError(500, session.failure_reason, param="environment")
        rollout = session.build_rollout(version)
        found.append(
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
    return found


async def wait_for_disconnect(receive: Callable[[], Any]) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ChatStreamResponse(Response):
    """The response to a request with `stream: true`."""

    def __init__(
        self,
        server: ChatServer,
        formatter: ResponseFormatter,
        pending: PendingAnswers,
        began: float,
        include_usage: bool,
        record_answers: Callable[[Sequence[ParsedAnswer]], None],
    ) -> None:
        """`recorded` is given the answers once all have ended."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._server, self._formatter, self._pending = server, formatter, pending
        self._began, self._include_usage, self._record_answers = (
            began,
            include_usage,
            record_answers,
        )
        self._texts = [formatter.create_text_stream() for _ in pending.requests]
        self._reads: list[ParsedAnswer | None] = [None] * len(pending.requests)
        self._indices = {request: index for index, request in enumerate(pending.requests)}
        self._send: Any = None
        self._has_sent_event = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send parts as they come; slots are freed when the client is gone, or does not read."""
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
        """Send to the client. Raises: TimeoutError for one that does not read."""
        async with asyncio.timeout(self._server.settings.write_seconds):
            await self._send(message)

    async def _send_events(self, *bodies: dict[str, Any]) -> None:
        if bodies:
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
        left = len(self._pending.requests)
        while left:
            event = await events.get()
            if isinstance(event, RequestProgress):
                await self._send_progress(event)
            else:
                left -= 1
                if not await self._send_choice_end(event):
                    break
        else:
            await self._finish_stream()
        await self._send_message(
            {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        )

    async def _send_progress(self, event: RequestProgress) -> None:
        index = self._indices[event.request]
        if self._formatter.tools is not None:  # a call is known as such at its end
            return
        text = self._texts[index].add_tokens(event.tokens)
        logprobs = self._formatter.format_logprobs(event.tokens, event.logprobs, event.top)
        if text or logprobs:
            delta = {"role": "assistant", "content": text}
            await self._send_events(
                self._formatter.format_chunk(event.request, index, delta, logprobs=logprobs)
            )

    async def _send_choice_end(self, event: RequestEnded) -> bool:
        """The end of one choice; False = it failed, and the stream ends."""
        request, index = event.request, self._indices[event.request]
        if request.error is not None:
            is_late = isinstance(request.error, DeadlineExceeded)
            status = 504 if is_late else 503 if isinstance(request.error, PosttrainError) else 500
            await self._send_events(format_error_body(ServingHTTPError(status, str(request.error))))
            return False
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        read = self._reads[index] = self._formatter.parse_answer(sequence)
        reason = resolve_finish_reason(sequence, read)
        parts = []
        if self._formatter.tools is None:
            if rest := self._texts[index].finish_text():
                parts.append(
                    self._formatter.format_chunk(
                        request, index, {"role": "assistant", "content": rest}
                    )
                )
        else:
            delta: dict[str, Any] = {"role": "assistant", "content": read.content}
            if read.calls:
                delta["tool_calls"] = [
                    {"index": place, **call} for place, call in enumerate(read.calls)
                ]
            logprobs = self._formatter.format_logprobs(
                sequence.tokens, sequence.logprobs, request.top_tokens
            )
            parts.append(self._formatter.format_chunk(request, index, delta, logprobs=logprobs))
        await self._send_events(*parts, self._formatter.format_chunk(request, index, {}, reason))
        return True

    async def _finish_stream(self) -> None:
        """Usage, counts and records, once every choice has ended."""
        requests, metrics = self._pending.requests, self._server.metrics
        usage = self._formatter.count_usage(requests)
        if self._include_usage:
            head = self._formatter.format_header(
                "chat.completion.chunk", requests[0].policy_version
            )
            await self._send_events(head | {"choices": [], "usage": usage})
        metrics.count_answer(
            time.monotonic() - self._began, usage["prompt_tokens"], usage["completion_tokens"]
        )
        self._record_answers([read for read in self._reads if read is not None])
