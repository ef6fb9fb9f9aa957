"""Routes for a trainer that uses the server as its inference server, under vLLM's paths.

/v1/completions takes and returns token ids and log-probabilities; the others report the version, tokenize text, and
control weights, adapters and sleep.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version as read_package_version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

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
from rl_core.chat.prompts import PromptBuilder
from rl_core.chat.responses import MIN_LOGPROB
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import (
    AnswerSequence,
    ServedRequest,
    build_stop_test,
    cut_at_stop,
)
from rl_core.settings import SamplingSettings


async def create_completion(request: Request) -> Response:
    """Answer a completion request; the route's handler."""
    return await count_response(request, partial(_run_completion, request))


async def _run_completion(request: Request, server: ChatServer, began: float) -> Response:
    controller: WeightController = request.app.state.weight_controller
    body = parse_json_body(CompletionBody, await read_full_body(server, request))
    controller.check_model_name(body.model)
    _, prompts = server.require_ready()
    requests = _build_requests(server, prompts, body, began)
    await wait_for_answers(server, request, requests)
    response = _format_completion(controller, prompts, body, requests)
    server.metrics.count_answer(
        time.monotonic() - began, len(body.prompt), response["usage"]["completion_tokens"]
    )
    return JSONResponse(response)


def _build_requests(
    server: ChatServer, prompts: PromptBuilder, body: CompletionBody, began: float
) -> list[ServedRequest]:
    """Build the requests for the engine. Raises: ServingHTTPError (422)."""
    assert server.model is not None
    context = server.model.context
    _check_completion_body(server, body, context, server.model.vocab_size)
    sampling = SamplingSettings(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        max_turns=1,
        max_completion_tokens=min(body.max_tokens, context),
    )
    # A trainer has a time limit itself, and cancels a turn by disconnecting.
    seconds = math.inf if server.settings.rollouts else server.settings.request_seconds
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


def _check_completion_body(
    server: ChatServer, body: CompletionBody, context: int, vocab_size: int
) -> None:
    """Refuse a request that the model or the server cannot answer. Raises: ServingHTTPError (422)."""
    if len(body.prompt) >= context:
        raise ServingHTTPError(
            422,
            f"prompt: {len(body.prompt)} tokens leave no room in a context of {context}",
            param="prompt",
        )
    for name in ("prompt", "stop_token_ids"):
        unknown_tokens = [token for token in getattr(body, name) if token >= vocab_size]
        if unknown_tokens:
            raise ServingHTTPError(
                422,
                f"{name}: token {unknown_tokens[0]} is not in the vocabulary of {vocab_size}",
                param=name,
            )
    limit = min(server.settings.max_choices, server.settings.max_waiting)
    if body.n > limit:
        raise ServingHTTPError(422, f"n: {body.n} choices; at most {limit}", param="n")
    if body.n > 1 and body.drawn:
        raise ServingHTTPError(422, "drawn: needs n 1, one continued sequence", param="drawn")


def _compute_seeds(body: CompletionBody) -> list[int]:
    """Compute a seed per choice: the request's for the first one, as a rollout engine uses it."""
    seed = body.seed if body.seed is not None else secrets.randbits(127)
    further = (compute_sequence_seed("completions", seed, choice) for choice in range(1, body.n))
    return [seed, *further]


def _read_sampled_tokens(request: ServedRequest) -> list[int]:
    assert isinstance(request.sequence, AnswerSequence)
    return request.sequence.tokens


def _format_completion(
    controller: WeightController,
    prompts: PromptBuilder,
    body: CompletionBody,
    requests: Sequence[ServedRequest],
) -> dict[str, Any]:
    """Format the JSON body of a response."""
    sampled = sum(len(_read_sampled_tokens(request)) for request in requests)
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": controller.instance,
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
    stop_reason: int | str | None = None
    if not sequence.hit_limit:
        stop_reason = _find_stop_reason(prompts, body, sequence.tokens, text)
    logprobs = None
    if body.logprobs is not None:
        logprobs = _format_logprobs(prompts, body, request, sequence)
    return {
        "index": index,
        "text": text if body.include_stop_str_in_output else cut_at_stop(text, body.stop),
        "finish_reason": "length" if sequence.hit_limit else "stop",
        "stop_reason": stop_reason,
        "logprobs": logprobs,
        "token_ids": sequence.tokens if body.return_token_ids else None,
        "prompt_token_ids": body.prompt if body.return_token_ids else None,
        "policy_version": request.policy_version,
    }


def _find_stop_reason(
    prompts: PromptBuilder, body: CompletionBody, tokens: list[int], text: str
) -> int | str | None:
    """Return the token or text of the request that ended the answer; None = the model's end token."""
    if tokens[-1] in body.stop_token_ids:
        return tokens[-1]
    if tokens[-1] in prompts.renderer.eos_ids and not body.ignore_eos:
        return None
    return next((stop for stop in body.stop if stop in text), None)


def _format_logprobs(
    prompts: PromptBuilder, body: CompletionBody, request: ServedRequest, sequence: AnswerSequence
) -> dict[str, Any]:
    """Format the log-probabilities of the sampled tokens and of the most likely ones."""

    def format_token(token: int) -> str:
        if body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return prompts.decode_token(token)

    top_logprobs: list[dict[str, float]] = []
    if (top := request.top_tokens) is not None:
        for ids, values in zip(top.ids_TK.tolist(), top.logprobs_TK.tolist(), strict=True):
            pairs = zip(ids, values, strict=True)
            top_logprobs.append({format_token(i): max(value, MIN_LOGPROB) for i, value in pairs})
    return {
        "token_logprobs": [max(value, MIN_LOGPROB) for value in sequence.logprobs],
        "tokens": [format_token(token) for token in sequence.tokens],
        "top_logprobs": top_logprobs or [{} for _ in sequence.tokens],
        "text_offset": [0] * len(sequence.tokens),
    }


def _authenticate_trainer(request: Request) -> tuple[ChatServer, WeightController]:
    """Check the API key; return the server and its weight controller."""
    server = find_chat_server(request)
    server.check_token(request)
    controller: WeightController = request.app.state.weight_controller
    return server, controller


async def _report_version(request: Request) -> Response:
    _authenticate_trainer(request)
    return JSONResponse({"version": read_package_version("posttrain"), "server": "posttrain"})


async def _tokenize_prompt(request: Request) -> Response:
    server, controller = _authenticate_trainer(request)
    body = parse_json_body(TokenizeBody, await read_full_body(server, request))
    if body.model != server.name:
        controller.check_model_name(body.model)
    if server.model is None:
        raise ServingHTTPError(503, server.not_ready_reason, code="not_ready", retry_after=5)
    tokenizer = server.model.renderer.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
    tokens = list(await server.run_on_prompt_thread(encode, body.prompt))
    return JSONResponse(
        {"count": len(tokens), "max_model_len": server.model.context, "tokens": tokens}
    )


async def _call_collective_rpc(request: Request) -> Response:
    server, controller = _authenticate_trainer(request)
    body = parse_json_body(CollectiveRpcBody, await read_full_body(server, request))
    result = await controller.run_command(body.method, body.args, body.kwargs, body.timeout)
    return JSONResponse({"results": [result]})


async def _load_adapter(request: Request) -> Response:
    server, controller = _authenticate_trainer(request)
    body = parse_json_body(LoadAdapterBody, await read_full_body(server, request))
    await controller.run_exclusively(controller.load_adapter, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _unload_adapter(request: Request) -> Response:
    server, controller = _authenticate_trainer(request)
    body = parse_json_body(UnloadAdapterBody, await read_full_body(server, request))
    await controller.run_exclusively(controller.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _start_sleep(request: Request) -> Response:
    _, controller = _authenticate_trainer(request)
    if (level := request.query_params.get("level", "1")) != "1":
        raise ServingHTTPError(
            422, f"level: {level} is not supported; 1 keeps the weights in memory", param="level"
        )
    await controller.run_exclusively(controller.release_engine)
    return Response()


async def _wake_up(request: Request) -> Response:
    _, controller = _authenticate_trainer(request)
    await controller.run_exclusively(controller.restore_engine)
    return Response()


async def _report_sleeping(request: Request) -> Response:
    _, controller = _authenticate_trainer(request)
    return JSONResponse({"is_sleeping": controller.is_asleep})


async def _reset_prefix_cache(request: Request) -> Response:
    """Report success: nothing computed with earlier weights is ever reused."""
    _, controller = _authenticate_trainer(request)
    controller.check_commands_enabled()
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
