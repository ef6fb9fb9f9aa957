"""Routes of training: creating, computing, saving and loading. All but `get_info` answer with a promise."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import Server, called, server_of, session_of
from flows.service.http.payloads import read_payload
from flows.service.http.promises import accept, accept_training, called_with, new_seed, promise
from flows.service.http.refusals import Refused
from flows.service.store import ApiKey, CheckpointRecord
from flows.service.wire.bodies import (
    CreateModelBody,
    GetInfo,
    LoadWeightsBody,
    OptimizerFamily,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from flows.service.wire.heads import forward_backward_head
from flows.service.wire.json_body import read_body
from flows.service.wire.tinker_paths import parse_path
from rl_core.errors import ServiceError

__all__ = ["TRAINING_ROUTES", "readable_checkpoint"]

PROTOBUF = "application/x-protobuf"


def model_name(session_id: str, number: int) -> str:
    """Id of a session's training run, which clients form as well."""
    return f"{session_id}:train:{number}"


def sampler_name(session_id: str, number: int) -> str:
    """Id of a session's sampling session."""
    return f"{session_id}:sample:{number}"


def _optimizer(given: OptimizerFamily) -> dict[str, Any]:
    """As the client's types have it: AdamW has no versions."""
    return given.model_dump(exclude={"version"} if given.type == "adamw" else None)


async def _create_model(request: Request) -> Response:
    server, caller, body, payload = await called_with(request, CreateModelBody)
    await server.own_session(caller, body.session_id)
    server.known_base(body.base_model)
    facts = {
        "base": body.base_model,
        "lora": None if body.lora_config is None else body.lora_config.model_dump(),
        "optimizer": _optimizer(body.optimizer_config),
        "user_metadata": body.user_metadata or {},
        "seed": new_seed(),
    }
    target = model_name(body.session_id, body.model_seq_id)
    taken = await accept(server, request, caller, "create_model", target, 0, payload, facts)
    await server.note(caller, "run_create", target, body.base_model)
    return promise(taken, model_id=target)


async def _get_info(request: Request) -> Response:
    server, caller, body, _ = await called_with(request, GetInfo)
    await server.own_target(caller, body.model_id)
    run = await server.ask(server.store.run, body.model_id)
    if run is None:
        raise Refused(404, f"there is no training run '{body.model_id}'")
    base, lora = str(run.facts.get("base") or run.base), run.facts.get("lora")
    data = {"arch": None, "model_name": base, "tokenizer_id": str(server.settings.engine.bases.get(base, base))}
    return JSONResponse(
        {
            "type": "get_info",
            "model_id": run.model_id,
            "model_data": data,
            "model_name": base,
            "is_lora": lora is not None,
            "lora_rank": lora["rank"] if lora else None,
            "optimizer_config": run.facts.get("optimizer") or {"type": "adamw"},
        }
    )


async def _forward_backward(request: Request) -> Response:
    server, caller = await called(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != PROTOBUF:
        raise Refused(415, f"forward_backward takes {PROTOBUF} (SDK 0.25 and newer)")
    payload = await read_payload(request, server.settings.server.max_body_bytes)
    try:
        model_id, seq = forward_backward_head(payload.body, is_whole=not payload.refused)
    except ServiceError as error:
        raise Refused(413 if payload.refused else 400, payload.refused or str(error)) from None
    await server.own_target(caller, model_id)
    facts = {"refused": payload.refused} if payload.refused else {}
    body = b"" if payload.refused else payload.body
    taken = await accept(server, request, caller, "forward_backward", model_id, seq, body, facts, is_protobuf=True)
    return promise(taken, model_id=model_id)


async def _forward(request: Request) -> Response:
    raise Refused(404, "there is no /forward; send forward_backward with forward_only (SDK 0.25 and newer)")


async def _optim_step(request: Request) -> Response:
    taken = await accept_training(server_of(request), request, "optim_step")
    return promise(taken, model_id=taken.target)


def _saved_facts(payload: bytes, model_id: str) -> dict[str, Any]:
    """Metadata of a saved path; a fault of the body is found by the worker."""
    try:
        return {"user_metadata": read_body(SaveWeightsBody, payload).user_metadata or {}}
    except ServiceError:
        return {}


async def _save_weights(request: Request) -> Response:
    taken = await accept_training(server_of(request), request, "save_weights", _saved_facts)
    return promise(taken, model_id=taken.target)


async def _save_external(request: Request) -> Response:
    taken = await accept_training(server_of(request), request, "save_weights_external")
    return promise(taken, model_id=taken.target)


def _sampler_facts(payload: bytes, model_id: str) -> dict[str, Any]:
    """The sampling session that a save without a name makes; a fault of the body is found by the worker."""
    try:
        body = read_body(SaveForSamplerBody, payload)
    except ServiceError:
        return {}
    if body.path is not None:
        return {"user_metadata": body.user_metadata or {}}
    if body.sampling_session_seq_id is None:
        return {"refused": "save_weights_for_sampler: neither path nor sampling_session_seq_id is given"}
    return {"sampling_session_id": sampler_name(session_of(model_id), body.sampling_session_seq_id)}


async def _save_for_sampler(request: Request) -> Response:
    taken = await accept_training(server_of(request), request, "save_weights_for_sampler", _sampler_facts)
    return promise(taken, model_id=taken.target)


async def readable_checkpoint(server: Server, caller: ApiKey, path: str) -> CheckpointRecord:
    """Saved weights that the caller may read. Raises: Refused (404, 403); ServiceError for a path that is none."""
    found = await server.ask(server.store.checkpoint, str(parse_path(path)))
    if found is None:
        raise Refused(404, f"there are no saved weights {path[:300]}")
    if found.owner != caller.key_id and not found.public:
        raise Refused(403, f"{path} belongs to another API key, and is not published")
    return found


async def _load_weights(request: Request) -> Response:
    server, caller, body, payload = await called_with(request, LoadWeightsBody)
    is_new = body.session_id is not None and body.model_seq_id is not None
    if is_new == (body.model_id is not None and body.seq_id is not None):
        raise Refused(422, "load_weights: give either session_id and model_seq_id, or model_id and seq_id")
    target = model_name(str(body.session_id), int(body.model_seq_id or 0)) if is_new else str(body.model_id)
    await server.own_target(caller, target)
    facts: dict[str, Any] = {"path": body.path}
    try:
        facts |= await _of_checkpoint(server, caller, body, None if is_new else target)
    except (Refused, ServiceError) as error:
        if is_new:
            raise
        facts["refused"] = str(error)  # as the result: the number is used
    seq = 0 if is_new else int(body.seq_id or 0)
    taken = await accept(server, request, caller, "load_weights", target, seq, payload, facts)
    await server.note(caller, "checkpoint_load", body.path[:600], target)
    return promise(taken, model_id=target)


async def _of_checkpoint(server: Server, caller: ApiKey, body: LoadWeightsBody, target: str | None) -> dict[str, Any]:
    """Facts of a run that is made from saved weights. `target`: one that is there. Raises: Refused, ServiceError."""
    if body.weights_access_token is not None:
        raise Refused(422, "load_weights: weights_access_token is not supported; publish the checkpoint")
    found = await readable_checkpoint(server, caller, body.path)
    source = await server.ask(server.store.run, found.model_id)
    made = {} if source is None else source.facts
    base = found.base or str(made.get("base", ""))
    if body.base_model is not None and body.base_model != base:
        raise Refused(422, f"base_model: {body.path} is of '{base}', not '{body.base_model[:200]}'")
    asked = None if body.optimizer_config is None else _optimizer(body.optimizer_config)
    optimizer = made.get("optimizer") or {"type": "adamw"}
    if target is not None and not body.optimizer:
        own = await server.ask(server.store.run, target)
        optimizer = (own.facts.get("optimizer") if own is not None else None) or {"type": "adamw"}
    elif not body.optimizer:
        optimizer = asked or {"type": "adamw"}  # moments are not loaded, so it may be any
    if asked is not None and asked["type"] != optimizer["type"]:
        has = optimizer["type"]
        why = f"{body.path} has {has}, and its state is loaded" if body.optimizer else f"the run was made with {has}"
        raise Refused(422, f"optimizer_config: {why}")
    metadata = body.user_metadata if body.user_metadata is not None else {}
    return {"base": base, "lora": made.get("lora"), "optimizer": optimizer, "user_metadata": metadata,
            "seed": made.get("seed", 0)}  # fmt: skip


TRAINING_ROUTES = [
    Route("/create_model", _create_model, methods=["POST"]),
    Route("/get_info", _get_info, methods=["POST"]),
    Route("/forward_backward", _forward_backward, methods=["POST"]),
    Route("/forward", _forward, methods=["POST"]),
    Route("/optim_step", _optim_step, methods=["POST"]),
    Route("/save_weights", _save_weights, methods=["POST"]),
    Route("/save_weights_for_sampler", _save_for_sampler, methods=["POST"]),
    Route("/save_weights_external", _save_external, methods=["POST"]),
    Route("/load_weights", _load_weights, methods=["POST"]),
]
