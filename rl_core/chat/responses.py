"""Responses in OpenAI's chat format: JSON bodies, chunks of streams, incremental text, log-probabilities."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.chat.prompts import ParsedAnswer, PromptBuilder, create_call_id
from rl_core.environments.tools import Toolset
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    RequestProgress,
    ServedRequest,
    TopTokens,
    cut_at_stop,
)
from rl_core.types import Conversation

MIN_LOGPROB = -9999.0  # OpenAI's log-probability of an impossible token
_THOUGHT_END = "</think>"
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
    # True = answers begin with a thought, which is sent apart from their content
    hides_thought: bool = False
    # False = the conversation does not hold all that the prompt was rendered from
    is_learnable: bool = True
    max_calls: int | None = None  # of an answer; None = no limit
    has_seeded_ids: bool = False  # True = ids of tool calls follow from the seed of their sequence
    created: int = field(default_factory=lambda: int(time.time()))

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode an answer's tokens, up to a stop text."""
        return cut_at_stop(self.prompts.renderer.action_text(ids), self.stops)

    def parse_answer(self, sequence: AnswerSequence) -> ParsedAnswer:
        """Parse an answer; one truncated at its token limit has no calls."""
        tools = None if sequence.hit_limit else self.tools
        create_id = create_call_id
        if self.has_seeded_ids:
            create_id = _build_seeded_ids(sequence.seed)
        text = self.decode_text(sequence.tokens)
        answer = self.prompts.parse_answer(text, tools, create_id, max_calls=self.max_calls)
        if self.hides_thought and answer.content is not None:
            thought, closing, content = answer.content.partition(_THOUGHT_END)
            return ParsedAnswer(content.lstrip(), [], answer.call_error, f"{thought}{closing}")
        return answer

    def format_response(
        self, requests: Sequence[ServedRequest], answers: Sequence[ParsedAnswer]
    ) -> dict[str, Any]:
        """Format the JSON body of a response."""
        choices = []
        for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            sequence = request.sequence
            assert isinstance(sequence, AnswerSequence)
            message = format_message(answer)
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


def format_message(answer: ParsedAnswer) -> dict[str, Any]:
    """Format the assistant message of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        message["tool_calls"] = answer.calls
    if answer.thought is not None:
        message["reasoning_content"] = answer.thought
    if answer.call_error is not None:
        message["tool_call_error"] = answer.call_error
    return message


def _build_seeded_ids(seed: int) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{compute_sequence_seed(seed, 'id', next(numbers)):032x}"[:29]


class ChunkFormatter:
    """Formatter of the chunks of one streamed response."""

    def __init__(self, formatter: ResponseFormatter, requests: Sequence[ServedRequest]) -> None:
        self._formatter = formatter
        self._texts = [formatter.create_text_stream() for _ in requests]
        self._indices = {request: index for index, request in enumerate(requests)}

    def find_index(self, request: ServedRequest) -> int:
        """Return the index of a request's choice."""
        return self._indices[request]

    def format_progress(self, event: RequestProgress) -> list[dict[str, Any]]:
        """Format new tokens of a choice: nothing if there may be a tool call, which is recognised at its end."""
        formatter, index = self._formatter, self._indices[event.request]
        if formatter.tools is not None or formatter.hides_thought:
            return []
        text = self._texts[index].add_tokens(event.tokens)
        logprobs = formatter.format_logprobs(event.tokens, event.logprobs, event.top)
        if not text and not logprobs:
            return []
        delta = {"role": "assistant", "content": text}
        return [formatter.format_chunk(event.request, index, delta, logprobs=logprobs)]

    def format_end(self, request: ServedRequest, answer: ParsedAnswer) -> list[dict[str, Any]]:
        """Format the rest of a choice."""
        formatter, index = self._formatter, self._indices[request]
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        chunks = []
        if formatter.tools is None and not formatter.hides_thought:
            if rest := self._texts[index].finish_text():
                delta: dict[str, Any] = {"role": "assistant", "content": rest}
                chunks.append(formatter.format_chunk(request, index, delta))
        else:
            delta = {"role": "assistant", "content": answer.content}
            if answer.calls:
                delta["tool_calls"] = [
                    {"index": call_index, **call} for call_index, call in enumerate(answer.calls)
                ]
            if answer.thought is not None:
                delta["reasoning_content"] = answer.thought
            if answer.call_error is not None:
                delta["tool_call_error"] = answer.call_error
            logprobs = formatter.format_logprobs(
                sequence.tokens, sequence.logprobs, request.top_tokens
            )
            chunks.append(formatter.format_chunk(request, index, delta, logprobs=logprobs))
        reason = resolve_finish_reason(sequence, answer)
        chunks.append(formatter.format_chunk(request, index, {}, reason))
        return chunks

    def format_usage(self, requests: Sequence[ServedRequest]) -> dict[str, Any]:
        """Format the last chunk of a stream with the option include_usage."""
        header = self._formatter.format_header("chat.completion.chunk", requests[0].policy_version)
        return header | {"choices": [], "usage": self._formatter.count_usage(requests)}
