"""Completion route, /v1/completions, in OpenAI's format and vLLM's: prompts as text or token ids, alone or in batches.

Each prompt is answered as if it were sent alone. With `echo` and `logprobs` the prompt is scored, too.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from posttrain.serving.chat_responses import ChatStreamResponse
from posttrain.serving.chat_routes import (
    count_response,
    read_full_body,
    submit_requests,
    wait_for_answers,
)
from posttrain.serving.chat_server import ChatServer
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import (
    CompletionBody,
    convert_request_error,
    parse_json_body,
)
from posttrain.serving.weight_control import WeightController
from rl_core.chat.answer_rules import AnswerRules, ChatRequestError
from rl_core.chat.prompts import ParsedAnswer, PromptBuilder
from rl_core.chat.responses import MIN_LOGPROB, TextStream
from rl_core.data.images import list_image_ids
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    RequestProgress,
    ServedRequest,
    TopTokens,
    build_stop_test,
    cut_at_stop,
)
from rl_core.inference.token_rules import TokenRules
from rl_core.settings import SamplingSettings


async def create_completion(request: Request) -> Response:
    """Answer a completion request; the route's handler."""
    return await count_response(request, partial(_run_completion, request))


async def _run_completion(request: Request, server: ChatServer, began: float) -> Response:
    controller: WeightController = request.app.state.weight_controller
    body = parse_json_body(CompletionBody, await read_full_body(server, request))
    controller.check_model_name(body.model)
    engine, builder = server.require_ready()
    prompts = await server.run_on_prompt_thread(_read_prompts, server, builder, body)
    requests = _build_requests(server, builder, body, prompts, began)
    formatter = CompletionFormatter(builder, body, prompts, controller.instance)
    if body.stream:
        return ChatStreamResponse(
            server,
            formatter,
            submit_requests(engine, requests, streams=True),
            began,
            body.stream_options is not None and body.stream_options.include_usage,
            _record_nothing,
            CompletionChunks(formatter, requests),
        )
    await wait_for_answers(server, request, requests)
    usage = formatter.count_usage(requests)
    server.metrics.count_answer(
        time.monotonic() - began, usage["prompt_tokens"], usage["completion_tokens"]
    )
    return JSONResponse(formatter.format_response(requests))


def _record_nothing(answers: Sequence[ParsedAnswer]) -> None:
    """Record nothing: completions have no conversation to learn from."""


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt of a request."""

    ids: list[int]
    text: str | None  # None = sent as token ids


def _read_prompts(
    server: ChatServer, builder: PromptBuilder, body: CompletionBody
) -> list[CompletionPrompt]:
    """Read the prompts of a request, tokenise texts. Raises: ServingHTTPError (422)."""
    assert server.model is not None
    value = body.prompt
    is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    values = value if is_batch else [value]
    limit = min(server.settings.max_choices, server.settings.max_waiting)
    if len(values) * body.n > limit:
        raise ServingHTTPError(
            422,
            f"prompt, n: {len(values)} prompts, {body.n} choices each; at most {limit}",
            param="n",
        )
    prompts = [_read_prompt(builder, body, value) for value in values]
    image_ids = list_image_ids(server.model.renderer.tokenizer)
    for prompt in prompts:
        _check_tokens(server, "prompt", prompt.ids)
        if not image_ids.isdisjoint(prompt.ids):
            raise ServingHTTPError(
                422, "prompt: has tokens of images, which only chat requests send", param="prompt"
            )
        if len(prompt.ids) >= server.model.context:
            raise ServingHTTPError(
                422,
                f"prompt: {len(prompt.ids)} tokens leave no room in a context of {server.model.context}",
                param="prompt",
                code="context_length_exceeded",
            )
    _check_tokens(server, "stop_token_ids", body.stop_token_ids)
    if body.drawn and (body.n > 1 or len(prompts) > 1):
        raise ServingHTTPError(422, "drawn: needs n 1, one continued sequence", param="drawn")
    return prompts


def _read_prompt(builder: PromptBuilder, body: CompletionBody, value: Any) -> CompletionPrompt:
    if isinstance(value, list) and value:
        if all(type(token) is int and 0 <= token < 2**31 for token in value):
            return CompletionPrompt(value, None)
    elif isinstance(value, str):
        if len(value) > builder.max_characters:
            raise ServingHTTPError(
                422,
                f"prompt: {len(value)} characters are too long for the context (serving.context)",
                param="prompt",
                code="context_length_exceeded",
            )
        ids = builder.renderer.tokenizer.encode(value, add_special_tokens=body.add_special_tokens)
        if ids:
            return CompletionPrompt(list(ids), value)
    raise ServingHTTPError(
        422, "prompt: must be text, token ids, or a list of them, none empty", param="prompt"
    )


def _check_tokens(server: ChatServer, name: str, tokens: Sequence[int]) -> None:
    assert server.model is not None
    vocab_size = server.model.vocab_size
    for token in tokens:
        if token >= vocab_size:
            raise ServingHTTPError(
                422, f"{name}: token {token} is not in the vocabulary of {vocab_size}", param=name
            )


def _build_requests(
    server: ChatServer,
    builder: PromptBuilder,
    body: CompletionBody,
    prompts: Sequence[CompletionPrompt],
    began: float,
) -> list[ServedRequest]:
    """Build the requests for the engine, the choices of each prompt in order. Raises: ServingHTTPError (422)."""
    assert server.model is not None
    sampling = SamplingSettings(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_turns=1,
        # A token is sampled in any case; formatting drops it if none is wanted.
        max_completion_tokens=min(max(body.max_tokens, 1), server.model.context),
    )
    # A trainer has a time limit itself, and cancels a turn by disconnecting.
    seconds = math.inf if server.settings.rollouts else server.settings.request_seconds
    model_ends = frozenset(builder.renderer.eos_ids)
    ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model_ends)
    stops = build_stop_test(builder.renderer.action_text, body.stop_texts)
    rules = _compile_rules(server, builder, body)
    return [
        ServedRequest(
            AnswerSequence(prompt.ids, seed, stops),
            sampling,
            caller=body.user,
            deadline=began + seconds,
            limit=f"the server's serving.request_seconds: {seconds:g}",
            top=body.logprobs or 0,
            has_stops=bool(body.stop_texts),
            end_ids=None if ends == model_ends else ends,
            drawn=body.drawn,
            streams=body.stream,
            rules=rules,
            prompt_top=body.logprobs if body.echo else None,
        )
        for prompt in prompts
        for seed in _compute_seeds(body)
    ]


def _compile_rules(
    server: ChatServer, builder: PromptBuilder, body: CompletionBody
) -> TokenRules | None:
    assert server.model is not None
    try:
        rules = body.parse_rules()
        if rules == AnswerRules():
            return None
        return builder.compile_rules(rules, [], server.model.vocab_size)
    except ChatRequestError as error:
        raise convert_request_error(error) from None


def _compute_seeds(body: CompletionBody) -> list[int]:
    """Compute a seed per choice: the request's for the first one, as a rollout engine uses it."""
    seed = body.seed if body.seed is not None else secrets.randbits(127)
    if seed < 0:
        seed = compute_sequence_seed("completions", seed)
    further = (compute_sequence_seed("completions", seed, choice) for choice in range(1, body.n))
    return [seed, *further]


@dataclass(slots=True)
class CompletionFormatter:
    """Formatter of the choices of one request."""

    builder: PromptBuilder
    body: CompletionBody
    prompts: list[CompletionPrompt]
    instance: str  # of the server's weights
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode sampled tokens."""
        renderer = self.builder.renderer
        return renderer.action_text(ids).removeprefix(renderer.opened_thought)

    def list_tokens(self, request: ServedRequest) -> list[int]:
        """Return the sampled tokens that were asked for."""
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        return sequence.tokens if self.body.max_tokens else []

    def parse_answer(self, sequence: AnswerSequence) -> ParsedAnswer:
        """Return the text of a choice."""
        return ParsedAnswer(self.decode_text(sequence.tokens), [])

    def count_usage(self, requests: Sequence[ServedRequest]) -> dict[str, int]:
        """Count the tokens of prompts and choices."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        sampled = sum(len(self.list_tokens(request)) for request in requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        }

    def format_header(self) -> dict[str, Any]:
        """Format the fields that every body has."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": self.instance,
        }

    def format_response(self, requests: Sequence[ServedRequest]) -> dict[str, Any]:
        """Format the JSON body of a response."""
        choices = [self._format_choice(request, index) for index, request in enumerate(requests)]
        return self.format_header() | {"choices": choices, "usage": self.count_usage(requests)}

    def _format_choice(self, request: ServedRequest, index: int) -> dict[str, Any]:
        body, sequence = self.body, request.sequence
        assert isinstance(sequence, AnswerSequence)
        tokens = self.list_tokens(request)
        full_text = self.decode_text(tokens)
        text = full_text
        if not body.include_stop_str_in_output:
            text = cut_at_stop(full_text, body.stop_texts)
        logprobs = None
        if body.logprobs is not None:
            logprobs = self.format_logprobs(
                tokens, sequence.logprobs[: len(tokens)], request.top_tokens
            )
        if body.echo:
            echoed, echoed_logprobs = self.format_echo(request, index)
            text = echoed + text
            logprobs = join_logprobs(echoed_logprobs, logprobs, len(echoed))
        return {
            "index": index,
            "text": text,
            "finish_reason": self.find_finish_reason(request),
            "stop_reason": self._find_stop_reason(request, full_text),
            "logprobs": logprobs,
            "token_ids": tokens if body.return_token_ids else None,
            "prompt_token_ids": request.prompt_ids if body.return_token_ids else None,
            "policy_version": request.policy_version,
        }

    def format_echo(
        self, request: ServedRequest, index: int
    ) -> tuple[str, dict[str, list[Any]] | None]:
        """Return the text of a choice's prompt, and the log-probabilities of its tokens if they were asked for."""
        prompt = self.prompts[index // self.body.n]
        decode = partial(self.builder.renderer.decode_ids, is_start=True)
        text = decode(prompt.ids) if prompt.text is None else prompt.text
        scores = request.prompt_scores
        if scores is None:
            return text, None
        logprobs = self.format_logprobs(prompt.ids[1:], scores.logprobs, scores.top, prompt.ids[0])
        logprobs["tokens"].insert(0, self._format_token(prompt.ids[0]))
        logprobs["token_logprobs"].insert(0, None)
        logprobs["top_logprobs"].insert(0, None)
        logprobs["text_offset"].insert(0, 0)
        return text, logprobs

    def find_finish_reason(self, request: ServedRequest) -> str:
        """Return stop or length."""
        sequence = request.sequence
        assert isinstance(sequence, AnswerSequence)
        return "length" if sequence.hit_limit or not self.body.max_tokens else "stop"

    def _find_stop_reason(self, request: ServedRequest, text: str) -> int | str | None:
        """Return the token or text of the request that ended the answer; None = the model's end token."""
        body, tokens = self.body, self.list_tokens(request)
        if self.find_finish_reason(request) == "length":
            return None
        if tokens[-1] in body.stop_token_ids:
            return tokens[-1]
        if tokens[-1] in self.builder.renderer.eos_ids and not body.ignore_eos:
            return None
        return next((stop for stop in body.stop_texts if stop in text), None)

    def _format_token(self, token: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.builder.decode_token(token)

    def format_logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: TopTokens | None,
        first: int | None = None,
    ) -> dict[str, list[Any]]:
        """Format the log-probabilities of tokens and of the most likely ones.

        Args:
            first: token in front of them, from which on the offsets of their texts count; None = none.
        """
        top_logprobs: list[dict[str, float]] = []
        if top is not None:
            for ids, values in zip(top.ids_TK.tolist(), top.logprobs_TK.tolist(), strict=True):
                row: dict[str, float] = {}
                for token, value in zip(ids, values, strict=True):
                    # several tokens may have one text; the most likely comes first
                    row.setdefault(self._format_token(token), max(value, MIN_LOGPROB))
                top_logprobs.append(row)
        offsets = _measure_offsets(self.builder, [*([] if first is None else [first]), *tokens])
        return {
            "token_logprobs": [max(value, MIN_LOGPROB) for value in logprobs],
            "tokens": [self._format_token(token) for token in tokens],
            "top_logprobs": list[Any](top_logprobs[: len(tokens)]) or [{} for _ in tokens],
            "text_offset": offsets[len(offsets) - len(tokens) :],
        }


def _measure_offsets(builder: PromptBuilder, tokens: Sequence[int]) -> list[int]:
    """Return how many complete characters precede each token."""
    stream, offsets, length = TextStream(builder.renderer.decode_ids), list[int](), 0
    for token in tokens:
        offsets.append(length)
        length += len(stream.add_tokens([token]))
    return offsets


def join_logprobs(
    echoed: dict[str, list[Any]] | None, sampled: dict[str, list[Any]] | None, offset: int
) -> dict[str, list[Any]] | None:
    """Join the log-probabilities of a prompt and of the text after it, which begins at `offset`."""
    if echoed is None or sampled is None:
        return sampled
    shifted = sampled | {"text_offset": [offset + value for value in sampled["text_offset"]]}
    return {name: [*values, *shifted[name]] for name, values in echoed.items()}


class CompletionChunks:
    """Formatter of the chunks of one streamed response; the counterpart of `ChunkFormatter`."""

    def __init__(self, formatter: CompletionFormatter, requests: Sequence[ServedRequest]) -> None:
        self._formatter = formatter
        body = formatter.body
        stops = () if body.include_stop_str_in_output else body.stop_texts
        self._texts = [TextStream(formatter.decode_text, stops) for _ in requests]
        self._indices = {request: index for index, request in enumerate(requests)}
        self._lengths = [0] * len(requests)  # characters sent
        self._has_echoed: set[int] = set()

    def find_index(self, request: ServedRequest) -> int:
        """Return the index of a request's choice."""
        return self._indices[request]

    def format_progress(self, event: RequestProgress) -> list[dict[str, Any]]:
        """Format new tokens of a choice."""
        formatter, index = self._formatter, self._indices[event.request]
        chunks = self._format_echo(event.request)
        if not formatter.body.max_tokens:
            return chunks
        text, logprobs = self._texts[index].add_tokens(event.tokens), None
        if formatter.body.logprobs is not None:
            logprobs = formatter.format_logprobs(event.tokens, event.logprobs, event.top)
            start = self._lengths[index]
            logprobs["text_offset"] = [start + value for value in logprobs["text_offset"]]
        if text or logprobs:
            chunks.append(self._format_chunk(event.request, text, logprobs=logprobs))
        return chunks

    def format_end(self, request: ServedRequest, answer: ParsedAnswer) -> list[dict[str, Any]]:
        """Format the rest of a choice."""
        formatter, chunks = self._formatter, self._format_echo(request)
        rest = self._texts[self._indices[request]].finish_text()
        if rest and formatter.body.max_tokens:
            chunks.append(self._format_chunk(request, rest))
        reason = formatter.find_finish_reason(request)
        chunks.append(self._format_chunk(request, "", reason))
        return chunks

    def format_usage(self, requests: Sequence[ServedRequest]) -> dict[str, Any]:
        """Format the last chunk of a stream with the option include_usage."""
        usage = self._formatter.count_usage(requests)
        return self._formatter.format_header() | {"choices": [], "usage": usage}

    def _format_echo(self, request: ServedRequest) -> list[dict[str, Any]]:
        index = self._indices[request]
        if not self._formatter.body.echo or index in self._has_echoed:
            return []
        self._has_echoed.add(index)
        text, logprobs = self._formatter.format_echo(request, index)
        return [self._format_chunk(request, text, logprobs=logprobs)]

    def _format_chunk(
        self,
        request: ServedRequest,
        text: str,
        reason: str | None = None,
        logprobs: dict[str, list[Any]] | None = None,
    ) -> dict[str, Any]:
        index = self._indices[request]
        self._lengths[index] += len(text)
        choice = {
            "index": index,
            "text": text,
            "finish_reason": reason,
            "logprobs": logprobs,
            "policy_version": request.policy_version,
        }
        return self._formatter.format_header() | {"choices": [choice]}
