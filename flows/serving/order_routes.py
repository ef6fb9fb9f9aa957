"""Routes of a trainer's orders, under the paths of vLLM's development mode; version and tokens beside them."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from flows.serving.chat_bodies import read_json_body
from flows.serving.chat_routes import whole_body
from flows.serving.chat_server import ChatServer, server_of
from flows.serving.completion_bodies import AdapterBody, AdapterNameBody, OrderBody, TokenizeBody
from flows.serving.refused import RefusedRequest
from flows.serving.rollout_orders import RolloutOrders

__all__ = ["ORDER_ROUTES"]


def _parts(request: Request) -> tuple[ChatServer, RolloutOrders]:
    """Server and orders of a caller with the key."""
    server = server_of(request)
    server.check_token(request)
    orders: RolloutOrders = request.app.state.orders
    return server, orders


async def _version(request: Request) -> Response:
    from importlib.metadata import version

    _parts(request)
    return JSONResponse({"version": version("posttrain"), "server": "posttrain"})


async def _tokenize(request: Request) -> Response:
    server, orders = _parts(request)
    body = read_json_body(TokenizeBody, await whole_body(server, request))
    if body.model != server.name:
        orders.check_name(body.model)
    if server.model is None:
        raise RefusedRequest(503, server.waits_for, code="not_ready", retry_after=5)
    tokenizer = server.model.renderer.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
    tokens = list(await server.render(encode, body.prompt))
    return JSONResponse({"count": len(tokens), "max_model_len": server.model.context, "tokens": tokens})


async def _collective_rpc(request: Request) -> Response:
    server, orders = _parts(request)
    body = read_json_body(OrderBody, await whole_body(server, request))
    return JSONResponse({"results": [await orders.take(body.method, body.args, body.kwargs, body.timeout)]})


async def _load_adapter(request: Request) -> Response:
    server, orders = _parts(request)
    body = read_json_body(AdapterBody, await whole_body(server, request))
    await orders.one_by_one(orders.load_adapter, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _unload_adapter(request: Request) -> Response:
    server, orders = _parts(request)
    body = read_json_body(AdapterNameBody, await whole_body(server, request))
    await orders.one_by_one(orders.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _sleep(request: Request) -> Response:
    _, orders = _parts(request)
    if (level := request.query_params.get("level", "1")) != "1":
        raise RefusedRequest(422, f"level: {level} is not supported; 1 keeps the weights in memory", param="level")
    await orders.one_by_one(orders.sleep)
    return Response()


async def _wake_up(request: Request) -> Response:
    _, orders = _parts(request)
    await orders.one_by_one(orders.wake)
    return Response()


async def _is_sleeping(request: Request) -> Response:
    _, orders = _parts(request)
    return JSONResponse({"is_sleeping": orders.is_asleep})


async def _reset_prefix_cache(request: Request) -> Response:
    """Success: nothing that was computed with earlier weights is used again anyway."""
    _, orders = _parts(request)
    orders.check_taken()
    return JSONResponse({"success": True})


ORDER_ROUTES = [
    Route("/version", _version, methods=["GET"]),
    Route("/tokenize", _tokenize, methods=["POST"]),
    Route("/collective_rpc", _collective_rpc, methods=["POST"]),
    Route("/v1/load_lora_adapter", _load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", _unload_adapter, methods=["POST"]),
    Route("/sleep", _sleep, methods=["POST"]),
    Route("/wake_up", _wake_up, methods=["POST"]),
    Route("/is_sleeping", _is_sleeping, methods=["GET"]),
    Route("/reset_prefix_cache", _reset_prefix_cache, methods=["POST"]),
]
