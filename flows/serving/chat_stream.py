"""Answers as a stream of server-sent events, for as long as the client reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from flows.serving.answering import Pending
from flows.serving.chat_answers import AnswerForm, finish_reason
from flows.serving.chat_prompts import ReadAnswer
from flows.serving.chat_server import ChatServer
from flows.serving.refused import RefusedRequest, error_body
from rl_core.errors import PosttrainError
from rl_core.inference.served_requests import AnswerSequence, DeadlinePassed, Ended, Progress

__all__ = ["ChatStream", "gone"]


async def gone(receive: Callable[[], Any]) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ChatStream(Response):
    """The response to a request with `stream: true`."""

    def __init__(
        self, server: ChatServer, form: AnswerForm, pending: Pending, began: float, tells_usage: bool,
        recorded: Callable[[Sequence[ReadAnswer]], None],
    ) -> None:  # fmt: skip
        """`recorded` is given the answers once all have ended."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._server, self._form, self._pending = server, form, pending
        self._began, self._tells_usage, self._recorded = began, tells_usage, recorded
        self._texts = [form.stream() for _ in pending.requests]
        self._reads: list[ReadAnswer | None] = [None] * len(pending.requests)
        self._indices = {request: index for index, request in enumerate(pending.requests)}
        self._send: Any = None
        self._has_told = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send parts as they come; slots are freed when the client is gone, or does not read."""
        self._send = send
        assert self._server.answering is not None
        watch = asyncio.ensure_future(gone(receive))
        sending = asyncio.ensure_future(self._all())
        try:
            await asyncio.wait((watch, sending), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._server.metrics.gone.inc()
            else:
                sending.result()
        finally:
            self._server.answering.cancel(self._pending)
            for task in (watch, sending):
                task.cancel()

    async def _put(self, message: dict[str, Any]) -> None:
        """Send to the client. Raises: TimeoutError for one that does not read."""
        async with asyncio.timeout(self._server.settings.write_seconds):
            await self._send(message)

    async def _tell(self, *bodies: dict[str, Any]) -> None:
        if bodies:
            if not self._has_told:
                self._has_told = True
                self._server.metrics.first.observe(time.monotonic() - self._began)
            data = "".join(f"data: {json.dumps(body, ensure_ascii=False)}\n\n" for body in bodies)
            await self._put({"type": "http.response.body", "body": data.encode(), "more_body": True})

    async def _all(self) -> None:
        await self._put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        events = self._pending.events
        assert events is not None
        left = len(self._pending.requests)
        while left:
            event = await events.get()
            if isinstance(event, Progress):
                await self._progress(event)
            else:
                left -= 1
                if not await self._ended(event):
                    break
        else:
            await self._finish()
        await self._put({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _progress(self, event: Progress) -> None:
        index = self._indices[event.request]
        if self._form.tools is not None:  # a call is known as such at its end
            return
        text = self._texts[index].add(event.tokens)
        logprobs = self._form.token_logprobs(event.tokens, event.logprobs, event.top)
        if text or logprobs:
            delta = {"role": "assistant", "content": text}
            await self._tell(self._form.chunk(event.request, index, delta, logprobs=logprobs))

    async def _ended(self, event: Ended) -> bool:
        """The end of one choice; False = it failed, and the stream ends."""
        request, index = event.request, self._indices[event.request]
        if request.error is not None:
            is_late = isinstance(request.error, DeadlinePassed)
            status = 504 if is_late else 503 if isinstance(request.error, PosttrainError) else 500
            await self._tell(error_body(RefusedRequest(status, str(request.error))))
            return False
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        read = self._reads[index] = self._form.read(sequence)
        reason = finish_reason(sequence, read)
        parts = []
        if self._form.tools is None:
            if rest := self._texts[index].end():
                parts.append(self._form.chunk(request, index, {"role": "assistant", "content": rest}))
        else:
            delta: dict[str, Any] = {"role": "assistant", "content": read.content}
            if read.calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(read.calls)]
            logprobs = self._form.token_logprobs(sequence.tokens, sequence.logprobs, request.top_tokens)
            parts.append(self._form.chunk(request, index, delta, logprobs=logprobs))
        await self._tell(*parts, self._form.chunk(request, index, {}, reason))
        return True

    async def _finish(self) -> None:
        """Usage, counts and records, once every choice has ended."""
        requests, metrics = self._pending.requests, self._server.metrics
        usage = self._form.usage(requests)
        if self._tells_usage:
            head = self._form.head("chat.completion.chunk", requests[0].policy_version)
            await self._tell(head | {"choices": [], "usage": usage})
        metrics.answered(time.monotonic() - self._began, usage["prompt_tokens"], usage["completion_tokens"])
        self._recorded([read for read in self._reads if read is not None])
