"""Routes that compute: training runs, saving and loading, sampling, and retrieval of results.

Training and sampling requests are only accepted here; the client retrieves the result later.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.training_service.http.server_state import (
    ServiceServer,
    accept_request,
    accept_training_request,
    accepted_response,
    authenticate_request,
    draw_seed,
    find_service_server,
    parse_session_id,
    read_json_request,
)
from posttrain.training_service.paths import parse_tinker_path
from posttrain.training_service.store import ApiKey, CheckpointRecord, StoredRequest
from posttrain.training_service.wire.request_bodies import (
    CancelFuture,
    CreateModelBody,
    CreateSamplingSessionBody,
    FuturesTarget,
    GetInfoBody,
    JoinSamplingSessionBody,
    LoadWeightsBody,
    OptimizerFamily,
    RetrieveFuture,
    RetrieveFutures,
    SampleBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    parse_request_body,
)
from posttrain.training_service.wire.request_header import read_request_header
from posttrain.web.errors import HTTPError
from posttrain.web.request_body import read_request_payload
from rl_core.errors import ServiceError

PROTOBUF_MEDIA_TYPE = "application/x-protobuf"
SEQS_PER_CLONE = 1_000_000_000  # sequence numbers reserved for each copy of a sampling client
MAX_INLINE_BYTES = 1 << 20  # larger results are announced first if the client allows it
_TRY_AGAIN = {"type": "try_again", "queue_state": "active"}
_MEDIA_TYPES = {"json": "application/json", "protobuf": PROTOBUF_MEDIA_TYPE}
_DEFAULT_OPTIMIZER = {"type": "adamw"}


def format_model_id(session_id: str, number: int) -> str:
    """Return the id of a session's training run. Clients build the same id."""
    return f"{session_id}:train:{number}"


def format_sampler_id(session_id: str, number: int) -> str:
    """Return the id of a session's sampling session."""
    return f"{session_id}:sample:{number}"


def _dump_optimizer(family: OptimizerFamily) -> dict[str, Any]:
    """Dump an optimizer as the client's types expect it: AdamW has no version."""
    return family.model_dump(exclude={"version"} if family.type == "adamw" else None)


async def _create_model(request: Request) -> Response:
    server, caller, body, payload = await read_json_request(request, CreateModelBody)
    await server.check_session_owner(caller, body.session_id)
    server.check_base_model(body.base_model)
    facts = {
        "base": body.base_model,
        "lora": None if body.lora_config is None else body.lora_config.model_dump(),
        "optimizer": _dump_optimizer(body.optimizer_config),
        "user_metadata": body.user_metadata or {},
        "seed": draw_seed(),
    }
    target = format_model_id(body.session_id, body.model_seq_id)
    accepted = await accept_request(
        server, request, caller, "create_model", target, 0, payload, facts
    )
    await server.record_audit_entry(caller, "run_create", target, body.base_model)
    return accepted_response(accepted, model_id=target)


async def _describe_model(request: Request) -> Response:
    server, caller, body, _ = await read_json_request(request, GetInfoBody)
    await server.check_target_owner(caller, body.model_id)
    run = await server.call_store(server.store.find_run, body.model_id)
    if run is None:
        raise HTTPError(404, f"there is no training run '{body.model_id}'")
    base, lora = str(run.facts.get("base") or run.base), run.facts.get("lora")
    data = {
        "arch": None,
        "model_name": base,
        "tokenizer_id": str(server.settings.engine.bases.get(base, base)),
    }
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


async def _accept_forward_backward(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != PROTOBUF_MEDIA_TYPE:
        raise HTTPError(415, f"forward_backward takes {PROTOBUF_MEDIA_TYPE} (SDK 0.25 and newer)")
    limits = server.settings.server
    payload = await read_request_payload(request, limits.max_body_bytes, limits.body_seconds)
    rejection = payload.rejection_reason
    try:
        model_id, seq = read_request_header(payload.body, is_complete=not rejection)
    except ServiceError as error:
        raise HTTPError(413 if rejection else 400, rejection or str(error)) from None
    await server.check_target_owner(caller, model_id)
    facts = {"refused": rejection} if rejection else {}
    body = b"" if rejection else payload.body
    accepted = await accept_request(
        server, request, caller, "forward_backward", model_id, seq, body, facts, is_protobuf=True
    )
    return accepted_response(accepted, model_id=model_id)


async def _refuse_forward(request: Request) -> Response:
    raise HTTPError(
        404, "there is no /forward; send forward_backward with forward_only (SDK 0.25 and newer)"
    )


async def _accept_optim_step(request: Request) -> Response:
    accepted = await accept_training_request(find_service_server(request), request, "optim_step")
    return accepted_response(accepted, model_id=accepted.target)


def _read_save_facts(payload: bytes, model_id: str) -> dict[str, Any]:
    """Read the metadata of a saved path. The worker reports an invalid body."""
    try:
        return {"user_metadata": parse_request_body(SaveWeightsBody, payload).user_metadata or {}}
    except ServiceError:
        return {}


async def _save_weights(request: Request) -> Response:
    accepted = await accept_training_request(
        find_service_server(request), request, "save_weights", _read_save_facts
    )
    return accepted_response(accepted, model_id=accepted.target)


async def _save_external_weights(request: Request) -> Response:
    accepted = await accept_training_request(
        find_service_server(request), request, "save_weights_external"
    )
    return accepted_response(accepted, model_id=accepted.target)


def _read_sampler_facts(payload: bytes, model_id: str) -> dict[str, Any]:
    """Read which sampling session a save without a name creates. The worker reports an invalid body."""
    try:
        body = parse_request_body(SaveForSamplerBody, payload)
    except ServiceError:
        return {}
    if body.path is not None:
        return {"user_metadata": body.user_metadata or {}}
    if body.sampling_session_seq_id is None:
        return {
            "refused": "save_weights_for_sampler: neither path nor sampling_session_seq_id is set"
        }
    return {
        "sampling_session_id": format_sampler_id(
            parse_session_id(model_id), body.sampling_session_seq_id
        )
    }


async def _save_sampler_weights(request: Request) -> Response:
    accepted = await accept_training_request(
        find_service_server(request), request, "save_weights_for_sampler", _read_sampler_facts
    )
    return accepted_response(accepted, model_id=accepted.target)


async def find_readable_checkpoint(
    server: ServiceServer, caller: ApiKey, path: str
) -> CheckpointRecord:
    """Return saved weights that the caller may read. Raises: HTTPError (404, 403); ServiceError for an invalid path."""
    checkpoint = await server.call_store(server.store.find_checkpoint, str(parse_tinker_path(path)))
    if checkpoint is None:
        raise HTTPError(404, f"there are no saved weights {path[:300]}")
    if checkpoint.owner != caller.key_id and not checkpoint.public:
        raise HTTPError(403, f"{path} belongs to another API key, and is not published")
    return checkpoint


async def _load_weights(request: Request) -> Response:
    server, caller, body, payload = await read_json_request(request, LoadWeightsBody)
    is_new = body.session_id is not None and body.model_seq_id is not None
    if is_new == (body.model_id is not None and body.seq_id is not None):
        raise HTTPError(
            422, "load_weights: give either session_id and model_seq_id, or model_id and seq_id"
        )
    target = (
        format_model_id(str(body.session_id), int(body.model_seq_id or 0))
        if is_new
        else str(body.model_id)
    )
    await server.check_target_owner(caller, target)
    facts: dict[str, Any] = {"path": body.path}
    try:
        facts |= await _resolve_loaded_facts(server, caller, body, None if is_new else target)
    except (HTTPError, ServiceError) as error:
        if is_new:
            raise
        # The client has used the sequence number, so the error becomes the request's result.
        facts["refused"] = str(error)
    seq = 0 if is_new else int(body.seq_id or 0)
    accepted = await accept_request(
        server, request, caller, "load_weights", target, seq, payload, facts
    )
    await server.record_audit_entry(caller, "checkpoint_load", body.path[:600], target)
    return accepted_response(accepted, model_id=target)


async def _resolve_loaded_facts(
    server: ServiceServer, caller: ApiKey, body: LoadWeightsBody, target: str | None
) -> dict[str, Any]:
    """Return the facts of a run that loads saved weights.

    Args:
        target: an existing run; None = a new one.
    Raises: HTTPError, ServiceError.
    """
    if body.weights_access_token is not None:
        raise HTTPError(
            422, "load_weights: weights_access_token is not supported; publish the checkpoint"
        )
    checkpoint = await find_readable_checkpoint(server, caller, body.path)
    source = await server.call_store(server.store.find_run, checkpoint.model_id)
    source_facts = {} if source is None else source.facts
    base = checkpoint.base or str(source_facts.get("base", ""))
    if body.base_model is not None and body.base_model != base:
        raise HTTPError(
            422, f"base_model: {body.path} is of '{base}', not '{body.base_model[:200]}'"
        )
    requested = None if body.optimizer_config is None else _dump_optimizer(body.optimizer_config)
    optimizer = source_facts.get("optimizer") or _DEFAULT_OPTIMIZER
    if target is not None and not body.optimizer:
        run = await server.call_store(server.store.find_run, target)
        optimizer = (run.facts.get("optimizer") if run is not None else None) or _DEFAULT_OPTIMIZER
    elif not body.optimizer:
        # The optimizer's moments are not loaded, so a new run may use any optimizer.
        optimizer = requested or _DEFAULT_OPTIMIZER
    if requested is not None and requested["type"] != optimizer["type"]:
        name = optimizer["type"]
        if body.optimizer:
            raise HTTPError(
                422, f"optimizer_config: {body.path} has {name}, and its state is loaded"
            )
        raise HTTPError(422, f"optimizer_config: the run was created with {name}")
    return {
        "base": base,
        "lora": source_facts.get("lora"),
        "optimizer": optimizer,
        "user_metadata": body.user_metadata if body.user_metadata is not None else {},
        "seed": source_facts.get("seed", 0),
    }


TRAINING_ROUTES = [
    Route("/create_model", _create_model, methods=["POST"]),
    Route("/get_info", _describe_model, methods=["POST"]),
    Route("/forward_backward", _accept_forward_backward, methods=["POST"]),
    Route("/forward", _refuse_forward, methods=["POST"]),
    Route("/optim_step", _accept_optim_step, methods=["POST"]),
    Route("/save_weights", _save_weights, methods=["POST"]),
    Route("/save_weights_for_sampler", _save_sampler_weights, methods=["POST"]),
    Route("/save_weights_external", _save_external_weights, methods=["POST"]),
    Route("/load_weights", _load_weights, methods=["POST"]),
]


async def _create_sampling_session(request: Request) -> Response:
    server, caller, body, payload = await read_json_request(request, CreateSamplingSessionBody)
    await server.check_session_owner(caller, body.session_id)
    if body.model_path is not None:
        checkpoint = await find_readable_checkpoint(server, caller, body.model_path)
        if checkpoint.kind == "external_weights":
            raise HTTPError(
                422,
                f"{body.model_path} is for other programs; sample from weights or sampler_weights",
            )
        base = checkpoint.base
        if body.base_model is not None and body.base_model != base:
            raise HTTPError(
                422, f"base_model: {body.model_path} is of '{base}', not '{body.base_model[:200]}'"
            )
    elif body.base_model is None:
        raise HTTPError(422, "create_sampling_session: give model_path or base_model")
    else:
        base = body.base_model
    server.check_base_model(base)
    target = format_sampler_id(body.session_id, body.sampling_session_seq_id)
    facts = {"base": base, "path": body.model_path}
    await accept_request(server, request, caller, "create_sampler", target, 0, payload, facts)
    await server.record_audit_entry(caller, "sampler_create", target, body.model_path or base)
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": target})


async def _describe_sampler(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    sampler_id = request.path_params["sampler_id"]
    await server.check_target_owner(caller, sampler_id)
    sampler = await server.call_store(server.store.find_sampler, sampler_id)
    if sampler is not None and sampler.base:
        base, path = sampler.base, sampler.path
    else:  # not created yet
        creation = await server.call_store(server.store.find_sampler_creation, sampler_id)
        if creation is None:
            raise HTTPError(404, f"there is no sampler '{sampler_id[:200]}'")
        base, path = creation.facts["base"], creation.facts["path"]
    return JSONResponse({"sampler_id": sampler_id, "base_model": base, "model_path": path})


async def _join_sampling_session(request: Request) -> Response:
    server, caller, body, _ = await read_json_request(request, JoinSamplingSessionBody)
    await server.check_target_owner(caller, body.sampling_session_id)
    number = await server.call_store(server.store.next_clone_number, body.sampling_session_id)
    return JSONResponse({"client_counter": number})


async def _accept_sample(request: Request) -> Response:
    server, caller, body, payload = await read_json_request(request, SampleBody)
    await server.check_target_owner(caller, body.sampling_session_id)
    id_prefix = secrets.token_hex(8)
    facts = {
        "seed": draw_seed(),
        "sample_sequence_ids": [f"{id_prefix}-{index}" for index in range(body.num_samples)],
    }
    target = body.sampling_session_id
    accepted = await accept_request(
        server, request, caller, "sample", target, body.seq_id, payload, facts
    )
    return accepted_response(accepted, sample_sequence_ids=accepted.facts["sample_sequence_ids"])


SAMPLING_ROUTES = [
    Route("/create_sampling_session", _create_sampling_session, methods=["POST"]),
    Route("/join_sampling_session", _join_sampling_session, methods=["POST"]),
    Route("/samplers/{sampler_id}", _describe_sampler, methods=["GET"]),
    Route("/asample", _accept_sample, methods=["POST"]),
]


async def find_owned_request(
    server: ServiceServer, caller: ApiKey, request_id: str
) -> StoredRequest:
    """Return a request of the caller, with its result if it has one. A final result is on disk when this returns.

    Raises: HTTPError (410, 403); BackendError.
    """
    request = server.result_waiter.find_cached_result(request_id)
    if request is None or _has_expired(server, request):
        request = None
        if "\0" not in request_id:
            request = await server.call_store(server.store.find_result, request_id)
        if request is None:
            raise HTTPError(
                410,
                f"request '{request_id[:100]}' is unknown; its result was fetched or has expired",
            )
        if request.is_final and not server.result_waiter.is_durably_final(request_id):
            await server.wait_until_durable()
    _check_owner(caller, request.owner, request_id)
    return request


def _has_expired(server: ServiceServer, request: StoredRequest) -> bool:
    lifetime = server.settings.worker.result_seconds
    return (request.finished or 0.0) + lifetime <= server.store.read_clock()


def _check_owner(caller: ApiKey, owner: str, request_id: str) -> None:
    if owner != caller.key_id:
        raise HTTPError(403, f"request '{request_id[:100]}' belongs to another API key")


async def _wait_for_result(request: Request) -> Response:
    """Hold the call until the result is available. Status 408 = ask again."""
    server, caller, body, _ = await read_json_request(request, RetrieveFuture)
    waiter, request_id, stored = server.result_waiter, body.request_id, None
    with waiter.expect_result(request_id) as event:
        owner = waiter.find_open_owner(request_id)
        if owner is not None:
            _check_owner(caller, owner, request_id)
        else:
            stored = await find_owned_request(server, caller, request_id)
        waits = (stored is None or not stored.is_final) and not waiter.is_closing
        if waits and await wait_for_event(event, server.settings.server.poll_seconds):
            stored = await find_owned_request(server, caller, request_id)
        elif stored is None:
            waiter.untrack_request(request_id)
    if stored is None:
        return JSONResponse(_TRY_AGAIN, 408)
    return _format_result(server, stored, body)


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most so many seconds. Return whether it was set."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _format_result(
    server: ServiceServer, request: StoredRequest, query: RetrieveFuture
) -> Response:
    if not request.is_final:
        return JSONResponse(_TRY_AGAIN, 408)
    if request.state != "done":
        return JSONResponse(
            {"error": request.error or request.state, "category": request.category or "server"}
        )
    if request.answer is None or request.answer_type is None:
        raise HTTPError(410, f"the result of {request.request_id} was fetched or has expired")
    if query.allow_metadata_only and len(request.answer) > MAX_INLINE_BYTES:
        return JSONResponse(
            {"status": "complete_metadata", "response_payload_size": len(request.answer)}
        )
    server.fetched_at[request.request_id] = time.monotonic()
    return Response(request.answer, media_type=_MEDIA_TYPES[request.answer_type])


async def _wait_for_results(request: Request) -> Response:
    """Hold the call until a request of the sampling session becomes final; return all that did since the cursor."""
    server, caller, body, _ = await read_json_request(request, RetrieveFutures)
    target = body.target
    await server.check_target_owner(caller, target.sampling_session_id)
    if body.retrieved_request_ids:
        await server.drop_results(body.retrieved_request_ids, caller.key_id)
    seconds = server.settings.server.poll_seconds
    end = time.monotonic() + (seconds if body.timeout is None else min(seconds, body.timeout))
    with server.result_waiter.expect_result(target.sampling_session_id) as event:
        while True:
            event.clear()
            completions, cursor = await _list_completions(server, target, body.prev_cursor)
            remaining = end - time.monotonic()
            if (
                completions
                or remaining <= 0
                or server.result_waiter.is_closing
                or not await wait_for_event(event, remaining)
            ):
                return JSONResponse({"completions": completions, "cursor": cursor})


async def _list_completions(
    server: ServiceServer, target: FuturesTarget, cursor: int
) -> tuple[list[dict[str, Any]], int]:
    first = target.cloned_sampler_id * SEQS_PER_CLONE
    finished, cursor = await server.call_store(
        server.store.list_finished_samples,
        target.sampling_session_id,
        first,
        first + SEQS_PER_CLONE - 1,
        cursor,
    )
    if cursor > server.result_waiter.durable_cursor:
        await server.wait_until_durable()
    completions = []
    for request_id, state, size in finished:
        if state == "done":
            completions.append(
                {
                    "state": "finished",
                    "request_id": request_id,
                    "response_payload_uncompressed_size": size,
                }
            )
        else:
            completions.append({"state": "failed", "request_id": request_id})
    return completions, cursor


async def _cancel_request(request: Request) -> Response:
    server, caller, body, _ = await read_json_request(request, CancelFuture)
    await find_owned_request(server, caller, body.request_id)
    is_cancelled = await server.call_store(server.store.cancel_request, body.request_id)
    await server.record_audit_entry(
        caller, "request_cancel", body.request_id, "" if is_cancelled else "too late"
    )
    return JSONResponse({"type": "cancel_future", "cancelled": is_cancelled})


FUTURE_ROUTES = [
    Route("/retrieve_future", _wait_for_result, methods=["POST"]),
    Route("/retrieve_futures", _wait_for_results, methods=["POST"]),
    Route("/cancel_future", _cancel_request, methods=["POST"]),
]
