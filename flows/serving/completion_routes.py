"""/v1/completions: tokens in, tokens and log-probabilities out, as an inference server of a trainer answers."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flows.serving.chat_bodies import read_json_body
from flows.serving.chat_prompts import PromptMaker
from flows.serving.chat_routes import answered, counted, whole_body
from flows.serving.chat_server import ChatServer
from flows.serving.completion_bodies import CompletionBody
from flows.serving.refused import RefusedRequest
from flows.serving.rollout_orders import RolloutOrders
from rl_core.inference.sampling import sequence_seed
from rl_core.inference.served_requests import AnswerSequence, ServedRequest
from rl_core.inference.stop_texts import cut_at_stop, stop_test
from rl_core.settings import SamplingSettings

__all__ = ["completions"]

_IMPOSSIBLE = -9999.0  # the dialect's number for the log-probability of a token that cannot come


async def completions(request: Request) -> Response:
    """The route."""
    return await counted(request, functools.partial(_completed, request))


async def _completed(request: Request, server: ChatServer, began: float) -> Response:
    orders: RolloutOrders = request.app.state.orders
    body = read_json_body(CompletionBody, await whole_body(server, request))
    orders.check_name(body.model)
    _, prompts = server.ready()
    requests = _requests(server, prompts, body, began)
    await answered(server, request, requests)
    response = JSONResponse(_answer(orders, prompts, body, requests))
    server.metrics.answered(time.monotonic() - began, len(body.prompt), sum(len(_tokens(one)) for one in requests))
    return response


def _requests(server: ChatServer, prompts: PromptMaker, body: CompletionBody, began: float) -> list[ServedRequest]:
    """The sequences to sample. Raises: RefusedRequest (422)."""
    assert server.model is not None
    context, vocabulary = server.model.context, server.model.vocab_size
    if len(body.prompt) >= context:
        raise RefusedRequest(
            422, f"prompt: {len(body.prompt)} tokens leave no room in a context of {context}", param="prompt"
        )
    for name in ("prompt", "stop_token_ids"):
        if beyond := [token for token in getattr(body, name) if token >= vocabulary]:
            raise RefusedRequest(
                422, f"{name}: token {beyond[0]} is not in the vocabulary of {vocabulary}", param=name
            )  # fmt: skip
    most = min(server.settings.max_choices, server.settings.max_waiting)
    if body.n > most:
        raise RefusedRequest(422, f"n: {body.n} choices; at most {most}", param="n")
    if body.n > 1 and body.drawn:
        raise RefusedRequest(422, "drawn: goes with n 1, one sequence that goes on", param="drawn")
    sampling = SamplingSettings(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p, max_turns=1,
        max_completion_tokens=min(body.max_tokens, context),
    )  # fmt: skip
    seconds = server.settings.request_seconds
    if server.settings.rollouts:  # a trainer has a limit of its own, and gives a turn up by hanging up
        seconds = math.inf
    model_ends = frozenset(prompts.renderer.eos_ids)
    ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model_ends)
    stops = stop_test(prompts.renderer.action_text, body.stop)
    return [
        ServedRequest(
            AnswerSequence(body.prompt, seed, stops), sampling, caller=body.user,
            deadline=began + seconds, limit=f"the server's serving.request_seconds: {seconds:g}",
            top=body.logprobs or 0, has_stops=bool(body.stop), end_ids=None if ends == model_ends else ends,
            drawn=body.drawn,
        )
        for seed in _seeds(body)
    ]  # fmt: skip


def _seeds(body: CompletionBody) -> list[int]:
    """Keys of the random numbers: the seed itself for the first choice, as a rollout engine takes it."""
    seed = body.seed if body.seed is not None else secrets.randbits(127)
    return [seed, *(sequence_seed("completions", seed, choice) for choice in range(1, body.n))]


def _tokens(request: ServedRequest) -> list[int]:
    assert isinstance(request.sequence, AnswerSequence)
    return request.sequence.tokens


def _answer(
    orders: RolloutOrders, prompts: PromptMaker, body: CompletionBody, requests: Sequence[ServedRequest]
) -> dict[str, Any]:
    """The body of a response."""
    sampled = sum(len(_tokens(request)) for request in requests)
    return {
        "id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
        "model": body.model, "system_fingerprint": orders.instance,
        "choices": [_choice(prompts, body, request, index) for index, request in enumerate(requests)],
        "usage": {"prompt_tokens": len(body.prompt), "completion_tokens": sampled,
                  "total_tokens": len(body.prompt) + sampled},
    }  # fmt: skip


def _choice(prompts: PromptMaker, body: CompletionBody, request: ServedRequest, index: int) -> dict[str, Any]:
    sequence = request.sequence
    assert isinstance(sequence, AnswerSequence)
    text = prompts.renderer.action_text(sequence.tokens)
    reason = None if sequence.hit_limit else _stop_reason(prompts, body, sequence.tokens, text)
    return {
        "index": index, "text": text if body.include_stop_str_in_output else cut_at_stop(text, body.stop),
        "finish_reason": "length" if sequence.hit_limit else "stop", "stop_reason": reason,
        "logprobs": None if body.logprobs is None else _logprobs(prompts, body, request, sequence),
        "token_ids": sequence.tokens if body.return_token_ids else None,
        "prompt_token_ids": body.prompt if body.return_token_ids else None,
        "policy_version": request.policy_version,
    }  # fmt: skip


def _stop_reason(prompts: PromptMaker, body: CompletionBody, tokens: list[int], text: str) -> int | str | None:
    """Token or text that ended the answer; None = the model's own end."""
    if tokens[-1] in body.stop_token_ids:
        return tokens[-1]
    is_own = tokens[-1] in prompts.renderer.eos_ids and not body.ignore_eos
    return None if is_own else next((stop for stop in body.stop if stop in text), None)


def _logprobs(
    prompts: PromptMaker, body: CompletionBody, request: ServedRequest, sequence: AnswerSequence
) -> dict[str, Any]:
    """The dialect's log-probabilities: of the sampled tokens, and of the most likely ones."""

    def named(token: int) -> str:
        return f"token_id:{token}" if body.return_tokens_as_token_ids else prompts.token_text(token)

    top = request.top_tokens
    told = [] if top is None else zip(top.ids_TK.tolist(), top.logprobs_TK.tolist(), strict=True)
    return {
        "token_logprobs": [max(value, _IMPOSSIBLE) for value in sequence.logprobs],
        "tokens": [named(token) for token in sequence.tokens],
        "top_logprobs": [
            {named(token): max(value, _IMPOSSIBLE) for token, value in zip(ids, values, strict=True)}
            for ids, values in told
        ] or [{} for _ in sequence.tokens],
        "text_offset": [0] * len(sequence.tokens),
    }  # fmt: skip
