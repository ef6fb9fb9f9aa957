"""Routes for a trainer that uses the server as its inference server, under vLLM's paths.

They report the version, tokenize text, and control weights, adapters and sleep; `/v1/completions` is in
`completion_routes.py`.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version as read_package_version

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from posttrain.serving.chat_routes import read_full_body
from posttrain.serving.chat_server import ChatServer, find_chat_server
from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import (
    CollectiveRpcBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
    parse_json_body,
)
from posttrain.serving.weight_control import WeightController


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
