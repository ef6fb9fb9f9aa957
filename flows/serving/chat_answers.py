"""Answers in the dialect's form: whole ones, parts of a stream, log-probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.serving.chat_prompts import PromptMaker, ReadAnswer
from flows.serving.text_stream import TextStream
from rl_core.environments.tools import Toolset
from rl_core.inference.served_requests import AnswerSequence, ServedRequest, TopTokens
from rl_core.inference.stop_texts import cut_at_stop
from rl_core.types import Conversation

__all__ = ["AnswerForm", "finish_reason"]

_IMPOSSIBLE = -9999.0  # the dialect's number for the log-probability of a token that cannot come


def finish_reason(sequence: AnswerSequence, read: ReadAnswer) -> str:
    """stop, length or tool_calls."""
    if sequence.hit_limit:
        return "length"
    return "tool_calls" if read.calls else "stop"


@dataclass(slots=True)
class AnswerForm:
    """Form of the answers to one request."""

    answer_id: str
    model: str
    prompts: PromptMaker
    tools: Toolset | None
    stops: tuple[str, ...]
    logprobs: bool
    num_top: int
    prompt_tokens: int
    base: int | None = None  # see `ServedModel.base`
    conversation: Conversation | None = None  # None = episodes of an environment
    created: int = field(default_factory=lambda: int(time.time()))

    def text(self, ids: Sequence[int]) -> str:
        """Text of an answer's tokens, up to a stop text."""
        return cut_at_stop(self.prompts.renderer.action_text(ids), self.stops)

    def read(self, sequence: AnswerSequence) -> ReadAnswer:
        """Text or calls of an answer; a cut off one has no calls."""
        return self.prompts.read(self.text(sequence.tokens), None if sequence.hit_limit else self.tools)

    def whole(self, requests: Sequence[ServedRequest], reads: Sequence[ReadAnswer]) -> dict[str, Any]:
        """The body of a response."""
        choices = []
        for index, (request, read) in enumerate(zip(requests, reads, strict=True)):
            sequence = request.sequence
            assert isinstance(sequence, AnswerSequence)
            message: dict[str, Any] = {"role": "assistant", "content": read.content, "refusal": None}
            if read.calls:
                message["tool_calls"] = read.calls
            choices.append({
                "index": index, "message": message, "finish_reason": finish_reason(sequence, read),
                "logprobs": self.token_logprobs(sequence.tokens, sequence.logprobs, request.top_tokens),
                "policy_version": request.policy_version,
            })  # fmt: skip
        return self.head("chat.completion", requests[0].policy_version) | {
            "choices": choices, "usage": self.usage(requests)
        }  # fmt: skip

    def head(self, kind: str, version: int | None) -> dict[str, Any]:
        """Fields that every body has."""
        return {
            "id": self.answer_id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": f"version-{self.weights_name(version)}", "policy_version": version,
            "model_version": self.weights_name(version),
        }  # fmt: skip

    def weights_name(self, version: int | None) -> str:
        """Name of the weights behind an answer; see `ServedModel.name`."""
        return str(version) if self.base is None else f"{self.base}+{version}"

    def usage(self, requests: Sequence[ServedRequest]) -> dict[str, int]:
        """Numbers of tokens."""
        sampled = sum(len(getattr(request.sequence, "tokens", ())) for request in requests)
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }  # fmt: skip

    def chunk(
        self, request: ServedRequest, index: int, delta: dict[str, Any], reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """One part of a stream."""
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs,
                  "policy_version": request.policy_version}  # fmt: skip
        return self.head("chat.completion.chunk", request.policy_version) | {"choices": [choice]}

    def stream(self) -> TextStream:
        """The text of one choice, piece by piece."""
        return TextStream(self.prompts.renderer.action_text, self.stops)

    def token_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: TopTokens | None
    ) -> dict[str, Any] | None:
        """The dialect's log-probabilities; None unless they were asked for."""
        if not self.logprobs:
            return None
        content = []
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            others = [] if top is None or not self.num_top else [
                self._token(other, value)
                for other, value in zip(
                    top.ids_TK[place][: self.num_top].tolist(), top.logprobs_TK[place][: self.num_top].tolist(),
                    strict=True,
                )
            ]  # fmt: skip
            content.append(self._token(token, logprob) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.prompts.token_text(token)
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob if math.isfinite(logprob) else _IMPOSSIBLE, "bytes": known}
