"""Streams of server-sent events, and records of answers for the sink."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from starlette.responses import Response

from posttrain.serving.chat_server import ChatServer
from posttrain.serving.environment_sessions import EnvironmentSession
from posttrain.serving.errors import (
    ServingHTTPError,
    convert_engine_error,
    format_error_body,
)
from posttrain.serving.served_model import PendingAnswers
from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.responses import ChunkFormatter, ResponseFormatter, resolve_finish_reason
from rl_core.inference.serving_requests import (
    AnswerSequence,
    RequestEnded,
    RequestProgress,
    ServedAnswer,
    ServedRequest,
)


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
                is_restricted=request.is_restricted or not formatter.is_learnable,
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
                is_restricted=request.is_restricted,
                max_votes=max_votes,
            )
        )
    return records


class AnswerFormatter(Protocol):
    """Parser and token counter of a stream's answers."""

    def parse_answer(self, sequence: AnswerSequence) -> ParsedAnswer:
        """Parse the answer of a sequence that has ended."""

    def count_usage(self, requests: Sequence[ServedRequest]) -> dict[str, int]:
        """Count tokens."""


class StreamChunks(Protocol):
    """Formatter of the events of a stream, as `ChunkFormatter`."""

    def find_index(self, request: ServedRequest) -> int:
        """Return the index of a request's choice."""

    def format_progress(self, event: RequestProgress) -> list[dict[str, Any]]:
        """Format new tokens."""

    def format_end(self, request: ServedRequest, answer: ParsedAnswer) -> list[dict[str, Any]]:
        """Format the rest of a choice."""

    def format_usage(self, requests: Sequence[ServedRequest]) -> dict[str, Any]:
        """Format the usage at the end of a stream."""


async def wait_for_disconnect(receive: Callable[[], Any]) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ChatStreamResponse(Response):
    """The response to a request with `stream: true`: server-sent events for as long as the client reads."""

    final_data = b"data: [DONE]\n\n"

    def __init__(
        self,
        server: ChatServer,
        formatter: AnswerFormatter,
        pending: PendingAnswers,
        began: float,
        include_usage: bool,
        record_answers: Callable[[Sequence[ParsedAnswer]], None],
        chunks: StreamChunks | None = None,
    ) -> None:
        """Prepare the stream.

        Args:
            record_answers: called with the answers once all have ended.
            chunks: formatter of the events; None = of a chat.
        """
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._server, self._formatter, self._pending = server, formatter, pending
        self._began, self._include_usage = began, include_usage
        self._record_answers = record_answers
        if chunks is None:
            assert isinstance(formatter, ResponseFormatter)
            chunks = ChunkFormatter(formatter, pending.requests)
        self._chunks = chunks
        self._answers: list[ParsedAnswer | None] = [None] * len(pending.requests)
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

    def _encode_event(self, body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    async def _send_events(self, *bodies: dict[str, Any]) -> None:
        if not bodies:
            return
        if not self._has_sent_event:
            self._has_sent_event = True
            self._server.metrics.first_part_seconds.observe(time.monotonic() - self._began)
        data = "".join(map(self._encode_event, bodies))
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
                await self._send_events(*self._chunks.format_progress(event))
            else:
                num_open -= 1
                if not await self._send_choice_end(event, is_last=not num_open):
                    break
        else:
            await self._finish_stream()
        await self._send_message(
            {"type": "http.response.body", "body": self.final_data, "more_body": False}
        )

    async def _send_choice_end(self, event: RequestEnded, *, is_last: bool) -> bool:
        """Send the end of one choice; return False if it failed, which ends the stream.

        All answers are recorded before the last end is sent: the client's next request may follow at once.
        """
        request = event.request
        if request.error is not None:
            await self._send_events(format_error_body(convert_engine_error(request.error)))
            return False
        assert isinstance(request.sequence, AnswerSequence)
        answer = self._formatter.parse_answer(request.sequence)
        self._answers[self._chunks.find_index(request)] = answer
        if is_last:
            self._record_answers([answer for answer in self._answers if answer is not None])
        await self._send_events(*self._chunks.format_end(request, answer))
        return True

    async def _finish_stream(self) -> None:
        """Send the usage and count the answers, once every choice has ended."""
        requests = self._pending.requests
        usage = self._formatter.count_usage(requests)
        if self._include_usage:
            await self._send_events(self._chunks.format_usage(requests))
        self._server.metrics.count_answer(
            time.monotonic() - self._began, usage["prompt_tokens"], usage["completion_tokens"]
        )
