"""/v1/completions: tokens in, tokens and log-probabilities out, as an inference server of a trainer answers.

Routes of a trainer's orders, under the paths of vLLM's development mode; version and tokens beside them.
"""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from posttrain.serving.chat_prompts import PromptBuilder
from posttrain.serving.chat_routes import count_response, read_full_body, wait_for_answers
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import (
    CollectiveRpcBody,
    CompletionBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
    parse_json_body,
)
from posttrain.serving.weight_control import WeightController
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    ServedRequest,
    build_stop_test,
    cut_at_stop,
)
from rl_core.settings import SamplingSettings

_MIN_LOGPROB = -9999.0  # the dialect's number for the log-probability of a token that cannot come


async def create_completion(request: Request) -> Response:
    """The route."""
    return await count_response(request, functools.partial(_run_completion, request))


async def _run_completion(request: Request, server: ChatServer, began: float) -> Response:
    orders: WeightController = request.app.state.orders
    body = parse_json_body(CompletionBody, await read_full_body(server, request))
    orders.check_model_name(body.model)
    _, prompts = server.require_ready()
    requests = _build_requests(server, prompts, body, began)
    await wait_for_answers(server, request, requests)
    response = JSONResponse(_format_completion(orders, prompts, body, requests))
    server.metrics.count_answer(
        time.monotonic() - began,
        len(body.prompt),
        sum(len(_read_sampled_tokens(one)) for one in requests),
    )
    return response


def _build_requests(
    server: ChatServer, prompts: PromptBuilder, body: CompletionBody, began: float
) -> list[ServedRequest]:
    """The sequences to sample. Raises: RefusedRequest (422)."""
    assert server.model is not None
    context, vocabulary = server.model.context, server.model.vocab_size
    if len(body.prompt) >= context:
        raise ServingHTTPError(
            422,
            f"prompt: {len(body.prompt)} tokens leave no room in a context of {context}",
            param="prompt",
        )
    for name in ("prompt", "stop_token_ids"):
        if beyond := [token for token in getattr(body, name) if token >= vocabulary]:
            raise ServingHTTPError(
                422,
                f"{name}: token {beyond[0]} is not in the vocabulary of {vocabulary}",
                param=name,
            )
    most = min(server.settings.max_choices, server.settings.max_waiting)
    if body.n > most:
        raise ServingHTTPError(422, f"n: {body.n} choices; at most {most}", param="n")
    if body.n > 1 and body.drawn:
        raise ServingHTTPError(
            422, "drawn: goes with n 1, one sequence that goes on", param="drawn"
        )
    sampling = SamplingSettings(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_turns=1,
        max_completion_tokens=min(body.max_tokens, context),
    )
    seconds = server.settings.request_seconds
    if (
        server.settings.rollouts
    ):  # a trainer has a limit of its own, and gives a turn up by hanging up
        seconds = math.inf
    model_ends = frozenset(prompts.renderer.eos_ids)
    ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model_ends)
    stops = build_stop_test(prompts.renderer.action_text, body.stop)
    return [
        ServedRequest(
            AnswerSequence(body.prompt, seed, stops),
            sampling,
            caller=body.user,
            deadline=began + seconds,
            limit=f"the server's serving.request_seconds: {seconds:g}",
            top=body.logprobs or 0,
            has_stops=bool(body.stop),
            end_ids=None if ends == model_ends else ends,
            drawn=body.drawn,
        )
        for seed in _compute_seeds(body)
    ]


def _compute_seeds(body: CompletionBody) -> list[int]:
    """Keys of the random numbers: the seed itself for the first choice, as a rollout engine takes it."""
    seed = body.seed if body.seed is not None else secrets.randbits(127)
    return [
        seed,
        *(compute_sequence_seed("completions", seed, choice) for choice in range(1, body.n)),
    ]


def _read_sampled_tokens(request: ServedRequest) -> list[int]:
    assert isinstance(request.sequence, AnswerSequence)
    return request.sequence.tokens


def _format_completion(
    orders: WeightController,
    prompts: PromptBuilder,
    body: CompletionBody,
    requests: Sequence[ServedRequest],
) -> dict[str, Any]:
    """The body of a response."""
    sampled = sum(len(_read_sampled_tokens(request)) for request in requests)
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": orders.instance,
        "choices": [
            _format_choice(prompts, body, request, index) for index, request in enumerate(requests)
        ],
        "usage": {
            "prompt_tokens": len(body.prompt),
            "completion_tokens": sampled,
            "total_tokens": len(body.prompt) + sampled,
        },
    }


def _format_choice(
    prompts: PromptBuilder, body: CompletionBody, request: ServedRequest, index: int
) -> dict[str, Any]:
    sequence = request.sequence
    assert isinstance(sequence, AnswerSequence)
    text = prompts.renderer.action_text(sequence.tokens)
    reason = None if sequence.hit_limit else _find_stop_reason(prompts, body, sequence.tokens, text)
    return {
        "index": index,
        "text": text if body.include_stop_str_in_output else cut_at_stop(text, body.stop),
        "finish_reason": "length" if sequence.hit_limit else "stop",
        "stop_reason": reason,
        "logprobs": None
        if body.logprobs is None
        else _format_logprobs(prompts, body, request, sequence),
        "token_ids": sequence.tokens if body.return_token_ids else None,
        "prompt_token_ids": body.prompt if body.return_token_ids else None,
        "policy_version": request.policy_version,
    }


def _find_stop_reason(
    prompts: PromptBuilder, body: CompletionBody, tokens: list[int], text: str
) -> int | str | None:
    """Token or text that ended the answer; None = the model's own end."""
    if tokens[-1] in body.stop_token_ids:
        return tokens[-1]
    is_own = tokens[-1] in prompts.renderer.eos_ids and not body.ignore_eos
    return None if is_own else next((stop for stop in body.stop if stop in text), None)


def _format_logprobs(
    prompts: PromptBuilder, body: CompletionBody, request: ServedRequest, sequence: AnswerSequence
) -> dict[str, Any]:
    """The dialect's log-probabilities: of the sampled tokens, and of the most likely ones."""

    def named(token: int) -> str:
        return (
            f"token_id:{token}" if body.return_tokens_as_token_ids else prompts.decode_token(token)
        )

    top = request.top_tokens
    told = [] if top is None else zip(top.ids_TK.tolist(), top.logprobs_TK.tolist(), strict=True)
    return {
        "token_logprobs": [max(value, _MIN_LOGPROB) for value in sequence.logprobs],
        "tokens": [named(token) for token in sequence.tokens],
        "top_logprobs": [
            {
                named(token): max(value, _MIN_LOGPROB)
                for token, value in zip(ids, values, strict=True)
            }
            for ids, values in told
        ]
        or [{} for _ in sequence.tokens],
        "text_offset": [0] * len(sequence.tokens),
    }


def _authenticate_trainer(request: Request) -> tuple[ChatServer, WeightController]:
    """Server and orders of a caller with the key."""
    server = find_chat_server(request)
    server.check_token(request)
    orders: WeightController = request.app.state.orders
    return server, orders


async def _report_version(request: Request) -> Response:
    from importlib.metadata import version

    _authenticate_trainer(request)
    return JSONResponse({"version": version("posttrain"), "server": "posttrain"})


async def _tokenize_prompt(request: Request) -> Response:
    server, orders = _authenticate_trainer(request)
    body = parse_json_body(TokenizeBody, await read_full_body(server, request))
    if body.model != server.name:
        orders.check_model_name(body.model)
    if server.model is None:
        raise ServingHTTPError(503, server.not_ready_reason, code="not_ready", retry_after=5)
    tokenizer = server.model.renderer.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
    tokens = list(await server.run_on_prompt_thread(encode, body.prompt))
    return JSONResponse(
        {"count": len(tokens), "max_model_len": server.model.context, "tokens": tokens}
    )


async def _call_collective_rpc(request: Request) -> Response:
    server, orders = _authenticate_trainer(request)
    body = parse_json_body(CollectiveRpcBody, await read_full_body(server, request))
    return JSONResponse(
        {"results": [await orders.run_command(body.method, body.args, body.kwargs, body.timeout)]}
    )


async def _load_adapter(request: Request) -> Response:
    server, orders = _authenticate_trainer(request)
    body = parse_json_body(LoadAdapterBody, await read_full_body(server, request))
    await orders.run_exclusively(orders.load_adapter, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _unload_adapter(request: Request) -> Response:
    server, orders = _authenticate_trainer(request)
    body = parse_json_body(UnloadAdapterBody, await read_full_body(server, request))
    await orders.run_exclusively(orders.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _start_sleep(request: Request) -> Response:
    _, orders = _authenticate_trainer(request)
    if (level := request.query_params.get("level", "1")) != "1":
        raise ServingHTTPError(
            422, f"level: {level} is not supported; 1 keeps the weights in memory", param="level"
        )
    await orders.run_exclusively(orders.release_engine)
    return Response()


async def _wake_up(request: Request) -> Response:
    _, orders = _authenticate_trainer(request)
    await orders.run_exclusively(orders.restore_engine)
    return Response()


async def _report_sleeping(request: Request) -> Response:
    _, orders = _authenticate_trainer(request)
    return JSONResponse({"is_sleeping": orders.is_asleep})


async def _reset_prefix_cache(request: Request) -> Response:
    """Success: nothing that was computed with earlier weights is used again anyway."""
    _, orders = _authenticate_trainer(request)
    orders.check_commands_enabled()
    return JSONResponse({"success": True})


TRAINER_ROUTES = [
    Route("/version", _report_version, methods=["GET"]),
    Route("/tokenize", _tokenize_prompt, methods=["POST"]),
    Route("/collective_rpc", _call_collective_rpc, methods=["POST"]),
    Route("/v1/load_lora_adapter", _load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", _unload_adapter, methods=["POST"]),
    Route("/sleep", _start_sleep, methods=["POST"]),
    Route("/wake_up", _wake_up, methods=["POST"]),
    Route("/is_sleeping", _report_sleeping, methods=["GET"]),
    Route("/reset_prefix_cache", _reset_prefix_cache, methods=["POST"]),
]
