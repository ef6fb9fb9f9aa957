"""Routes of training runs and saved weights: listing, lifetime, publication, files and copies.

File addresses are signed, so they work without an API key for a while. A copy creates a training run that holds the
copied weights and cannot be trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import re
import secrets
from pathlib import Path
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.training_service.http.compute_routes import find_readable_checkpoint, format_model_id
from posttrain.training_service.http.server_state import (
    ServiceServer,
    authenticate_request,
    find_service_server,
    read_json_body,
    read_json_request,
)
from posttrain.training_service.http.session_routes import (
    format_metadata,
    format_timestamp,
    parse_page_bounds,
)
from posttrain.training_service.paths import CHECKPOINT_TYPES, TinkerPath, parse_tinker_path
from posttrain.training_service.store import (
    DEFAULT_PROJECT,
    ApiKey,
    CheckpointRecord,
    TrainingRunRecord,
)
from posttrain.training_service.store.records import replace_unstorable
from posttrain.training_service.wire.request_bodies import CopyWeights, SetTtl, WeightsInfo
from posttrain.web.errors import HTTPError
from posttrain.web.signed_urls import list_regular_files, stream_tar_archive
from rl_core.storage.atomic_files import copy_tree

MAX_CHECKPOINTS_PER_RUN = 10_000
FIRST_CLIENT_WITH_EXPORTS = 30  # minor version of the public client
ARCHIVE_NAME = "archive.tar"  # requests all files instead of a single one


def _format_checkpoint(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": CHECKPOINT_TYPES[record.kind],
        "time": format_timestamp(record.created),
        "tinker_path": record.path,
        "size_bytes": record.bytes,
        "public": record.public,
        "user_metadata": format_metadata(record.facts.get("user_metadata")),
        "expires_at": None if record.expires is None else format_timestamp(record.expires),
    }


def _format_checkpoints(request: Request, records: list[CheckpointRecord]) -> list[dict[str, Any]]:
    """Format saved weights, without exports for clients before 0.30, which refuse a list that contains them."""
    version = re.search(r"Tinker/Python 0\.(\d+)", request.headers.get("user-agent", ""))
    is_old = version is not None and int(version[1]) < FIRST_CLIENT_WITH_EXPORTS
    return [
        _format_checkpoint(record)
        for record in records
        if not (is_old and record.kind == "external_weights")
    ]


async def _format_training_run(
    server: ServiceServer, run: TrainingRunRecord, *, is_owner: bool
) -> dict[str, Any]:
    lora = run.facts.get("lora")
    page = await server.call_store(
        server.store.list_checkpoints, None, MAX_CHECKPOINTS_PER_RUN, 0, run.model_id
    )
    visible = [record for record in page.items if is_owner or record.public]
    newest = {
        kind: next((_format_checkpoint(record) for record in visible if record.kind == kind), None)
        for kind in ("weights", "sampler_weights")
    }
    return {
        "training_run_id": run.model_id,
        "base_model": str(run.facts.get("base") or run.base),
        "model_owner": run.owner,
        "is_lora": lora is not None,
        "lora_rank": lora["rank"] if lora else None,
        "corrupted": run.state == "failed",
        "last_request_time": format_timestamp(run.touched),
        "last_checkpoint": newest["weights"],
        "last_sampler_checkpoint": newest["sampler_weights"],
        "user_metadata": format_metadata(run.facts.get("user_metadata")),
    }


async def find_owned_run(server: ServiceServer, caller: ApiKey, model_id: str) -> TrainingRunRecord:
    """Return a training run of the caller. Raises: HTTPError (404, 403)."""
    await server.check_target_owner(caller, model_id)
    run = await server.call_store(server.store.find_run, model_id)
    if run is None:
        raise HTTPError(404, f"there is no training run '{model_id[:200]}'")
    return run


def _should_include_published(request: Request) -> bool:
    """Return whether runs of other keys with published weights are listed too. Raises: HTTPError (422)."""
    scope = request.query_params.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise HTTPError(422, f"access_scope: {scope[:40]!r}, expected owned or accessible")
    return scope == "accessible"


async def _list_training_runs(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    limit, offset = parse_page_bounds(request)
    project = request.query_params.get("project_id")
    page = await server.call_store(
        server.store.list_runs,
        caller.key_id,
        limit,
        offset,
        project=None if project is None else replace_unstorable(project),
        with_published=_should_include_published(request),
    )
    cursor = {"offset": offset, "limit": limit, "total_count": page.total}
    runs = [
        await _format_training_run(server, run, is_owner=run.owner == caller.key_id)
        for run in page.items
    ]
    return JSONResponse({"training_runs": runs, "cursor": cursor})


async def _describe_training_run(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    model_id = request.path_params["model_id"]
    run = (
        await server.call_store(server.store.find_run, model_id)
        if _should_include_published(request) and "\0" not in model_id
        else None
    )
    if run is None or not await server.call_store(server.store.is_published, model_id):
        run = await find_owned_run(server, caller, model_id)
    return JSONResponse(
        await _format_training_run(server, run, is_owner=run.owner == caller.key_id)
    )


async def _list_run_checkpoints(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    run = await find_owned_run(server, caller, request.path_params["model_id"])
    page = await server.call_store(
        server.store.list_checkpoints, None, MAX_CHECKPOINTS_PER_RUN, 0, run.model_id
    )
    return JSONResponse({"checkpoints": _format_checkpoints(request, page.items)})


async def _list_checkpoints(request: Request) -> Response:
    server, caller = await authenticate_request(request)
    limit, offset = parse_page_bounds(request)
    page = await server.call_store(server.store.list_checkpoints, caller.key_id, limit, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": page.total}
    return JSONResponse({"checkpoints": _format_checkpoints(request, page.items), "cursor": cursor})


async def find_owned_checkpoint(request: Request) -> tuple[ServiceServer, ApiKey, CheckpointRecord]:
    """Return server, caller and the caller's saved weights that the address names. Raises: HTTPError (404, 403)."""
    server, caller = await authenticate_request(request)
    parts = request.path_params
    if parts["kind"] not in CHECKPOINT_TYPES:
        _refuse_missing_kind(parts["kind"])
    path = str(parse_tinker_path(f"tinker://{parts['model_id']}/{parts['kind']}/{parts['name']}"))
    checkpoint = await server.call_store(server.store.find_checkpoint, path)
    if checkpoint is None:
        raise HTTPError(404, f"there are no saved weights {path}")
    if checkpoint.owner != caller.key_id:
        raise HTTPError(403, f"{path} belongs to another API key")
    return server, caller, checkpoint


async def _delete_checkpoint(request: Request) -> Response:
    server, caller, checkpoint = await find_owned_checkpoint(request)
    await server.call_store(server.store.delete_checkpoint, checkpoint.path)
    await server.record_audit_entry(caller, "checkpoint_delete", checkpoint.path)
    return Response(status_code=204)


async def _set_public(request: Request) -> Response:
    server, caller, checkpoint = await find_owned_checkpoint(request)
    is_public = request.method == "POST"
    await server.call_store(server.store.update_checkpoint, checkpoint.path, public=is_public)
    await server.record_audit_entry(
        caller, "checkpoint_publish" if is_public else "checkpoint_unpublish", checkpoint.path
    )
    return Response(status_code=204)


async def _set_ttl(request: Request) -> Response:
    server, caller, checkpoint = await find_owned_checkpoint(request)
    body = await read_json_body(server, request, SetTtl)
    expires = None if body.ttl_seconds is None else server.store.read_clock() + body.ttl_seconds
    await server.call_store(server.store.update_checkpoint, checkpoint.path, expires=expires)
    await server.record_audit_entry(
        caller, "checkpoint_ttl", checkpoint.path, str(body.ttl_seconds)
    )
    return Response(status_code=204)


async def _describe_weights(request: Request) -> Response:
    server, caller, body, _ = await read_json_request(request, WeightsInfo)
    checkpoint = await find_readable_checkpoint(server, caller, body.tinker_path)
    run = await server.call_store(server.store.find_run, checkpoint.model_id)
    facts = checkpoint.facts if run is None else run.facts
    lora = facts.get("lora")
    adapted_layers = {
        name: lora[name] if lora else None for name in ("train_unembed", "train_mlp", "train_attn")
    }
    return JSONResponse(
        {
            "base_model": checkpoint.base or facts.get("base"),
            "is_lora": lora is not None,
            "lora_rank": lora["rank"] if lora else None,
            "optimizer_config": facts.get("optimizer") or {"type": "adamw"},
            **adapted_layers,
        }
    )


async def _refuse_untyped_checkpoint(request: Request) -> NoReturn:
    await authenticate_request(request)
    _refuse_missing_kind(request.path_params["name"])


def _refuse_missing_kind(checkpoint_id: str) -> NoReturn:
    """Raise HTTPError for an id without its kind: weights and sampler weights may share a name."""
    name = checkpoint_id[:200]
    kinds = " or ".join(f"{kind}/{name}" for kind in CHECKPOINT_TYPES)
    raise HTTPError(400, f"checkpoint_id: '{name}' does not say which kind; write {kinds}")


_UNTYPED_PATH = "/training_runs/{model_id}/checkpoints/{name}"
CHECKPOINT_PATH = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
CHECKPOINT_ROUTES = [
    Route("/training_runs", _list_training_runs, methods=["GET"]),
    Route("/training_runs/{model_id}", _describe_training_run, methods=["GET"]),
    Route("/training_runs/{model_id}/checkpoints", _list_run_checkpoints, methods=["GET"]),
    Route("/checkpoints", _list_checkpoints, methods=["GET"]),
    Route(CHECKPOINT_PATH, _delete_checkpoint, methods=["DELETE"]),
    Route(f"{CHECKPOINT_PATH}/publish", _set_public, methods=["POST", "DELETE"]),
    Route(f"{CHECKPOINT_PATH}/ttl", _set_ttl, methods=["PUT"]),
    Route(_UNTYPED_PATH, _refuse_untyped_checkpoint, methods=["DELETE"]),
    Route(f"{_UNTYPED_PATH}/publish", _refuse_untyped_checkpoint, methods=["POST"]),
    Route(f"{_UNTYPED_PATH}/ttl", _refuse_untyped_checkpoint, methods=["PUT"]),
    Route("/weights_info", _describe_weights, methods=["POST"]),
]


def _sign_file_url(request: Request, server: ServiceServer, subject: str, expires: int) -> str:
    signature = server.signer.sign_subject(subject, expires)
    return f"{str(request.base_url).rstrip('/')}/api/v1/files/{expires}/{signature}/{subject}"


async def _list_file_urls(request: Request) -> Response:
    """Return a signed address for each file of exported weights."""
    server, caller, checkpoint = await find_owned_checkpoint(request)
    if checkpoint.kind != "external_weights":
        raise HTTPError(
            422,
            f"{checkpoint.path} is for this service; save_weights_external writes files for other programs",
        )
    expires = math.ceil(server.store.read_clock() + server.settings.server.url_seconds)
    subject = checkpoint.path.removeprefix("tinker://")
    names = await asyncio.to_thread(list_regular_files, server.folder / checkpoint.folder)
    urls = {name: _sign_file_url(request, server, f"{subject}/{name}", expires) for name in names}
    await server.record_audit_entry(caller, "checkpoint_read", checkpoint.path)
    return JSONResponse({"urls": urls, "expires": format_timestamp(expires)})


async def _send_archive_url(request: Request) -> Response:
    """Return one signed address for all files as a tar archive. Clients before 0.36 ask for it."""
    server, caller, checkpoint = await find_owned_checkpoint(request)
    expires = math.ceil(server.store.read_clock() + server.settings.server.url_seconds)
    subject = f"{checkpoint.path.removeprefix('tinker://')}/{ARCHIVE_NAME}"
    await server.record_audit_entry(caller, "checkpoint_read", checkpoint.path)
    return JSONResponse(
        {
            "url": _sign_file_url(request, server, subject, expires),
            "expires": format_timestamp(expires),
        }
    )


async def _send_file(request: Request) -> Response:
    server, parts = find_service_server(request), request.path_params
    subject = parts["subject"]
    if not server.signer.is_valid_signature(
        subject, parts["expires"], parts["signature"], server.store.read_clock()
    ):
        raise HTTPError(
            403, "the address is not signed by this service, or has expired; ask for a new one"
        )
    model_id, kind, name, file = subject.split("/", 3)
    path = parse_tinker_path(f"tinker://{model_id}/{kind}/{name}")
    checkpoint = await server.call_store(server.store.find_checkpoint, str(path))
    if checkpoint is None:
        raise HTTPError(404, f"there are no saved weights {path}")
    folder: Path = server.folder / checkpoint.folder
    names = await asyncio.to_thread(list_regular_files, folder)
    if file == ARCHIVE_NAME:
        return StreamingResponse(stream_tar_archive(folder, names), media_type="application/x-tar")
    if file not in names:
        raise HTTPError(404, f"{path} has no file {file[:200]!r}")
    return FileResponse(folder / file)


FILE_ROUTES = [
    Route(f"{CHECKPOINT_PATH}/external_weights_urls", _list_file_urls, methods=["GET"]),
    Route(f"{CHECKPOINT_PATH}/archive", _send_archive_url, methods=["GET"]),
    Route("/files/{expires:int}/{signature}/{subject:path}", _send_file, methods=["GET"]),
]


async def _copy_weights(request: Request) -> Response:
    """Copy saved weights into a new run. A request repeated with the same X-Idempotency-Key returns the same copy."""
    server, caller, body, _ = await read_json_request(request, CopyWeights)
    if body.weights_access_token is not None or "x-tinker-weights-access-token" in request.headers:
        raise HTTPError(
            422, "copy_weights: weights_access_token is not supported; publish the checkpoint"
        )
    source = await find_readable_checkpoint(server, caller, body.source_path)
    target = await _resolve_target_run(server, caller, request, body)
    source_path = parse_tinker_path(source.path)
    path = TinkerPath(target, source_path.kind, source_path.name)
    if await server.call_store(server.store.find_checkpoint, str(path)) is not None:
        return JSONResponse({"tinker_path": str(path)})
    folder = path.resolve_folder(server.folder)
    await asyncio.to_thread(copy_tree, server.folder / source.folder, folder)
    now = server.store.read_clock()
    run = await server.call_store(server.store.find_run, source.model_id)
    facts: dict[str, Any] = dict(run.facts) if run is not None else {}
    session_id = target.partition(":")[0]
    copy_run = TrainingRunRecord(
        model_id=target,
        owner=caller.key_id,
        session_id=session_id,
        created=now,
        touched=now,
        state="unloaded",
        base=source.base,
        steps=source.steps,
        facts=facts | {"copy_of": source.path},
        info=source.facts,
    )
    copy = dataclasses.replace(
        source,
        path=str(path),
        model_id=target,
        owner=caller.key_id,
        created=now,
        public=False,
        version=None,
        folder=folder.relative_to(server.folder).as_posix(),
        registration="none",
        expires=None if body.ttl_seconds is None else now + body.ttl_seconds,
    )
    await server.call_store(server.store.add_checkpoint_copy, copy_run, copy)
    await server.record_audit_entry(caller, "checkpoint_copy", str(path), source.path)
    return JSONResponse({"tinker_path": str(path)})


async def _resolve_target_run(
    server: ServiceServer, caller: ApiKey, request: Request, body: CopyWeights
) -> str:
    """Return the id of the run that receives the copy. Create a session for it if the request names none.

    Raises: HTTPError (403, 404, 422).
    """
    if body.session_id is not None and body.model_seq_id is not None:
        await server.check_session_owner(caller, body.session_id)
        target = format_model_id(body.session_id, body.model_seq_id)
        run = await server.call_store(server.store.find_run, target)
        if run is not None and run.facts.get("copy_of") != body.source_path:
            raise HTTPError(422, f"copy_weights: the training run {target} already exists")
        return target
    key = request.headers.get("x-idempotency-key") or secrets.token_hex(16)
    identity = f"{caller.key_id}\n{key}\n{body.source_path}"
    session_id = hashlib.sha256(identity.encode()).hexdigest()[:32]
    if await server.call_store(server.store.find_session, session_id) is None:
        facts = {
            "project_id": body.destination_project_id or DEFAULT_PROJECT,
            "display_name": "copied weights",
        }
        await server.call_store(server.store.create_session, session_id, caller.key_id, facts)
    return format_model_id(session_id, 0)


COPY_ROUTES = [Route("/copy_weights", _copy_weights, methods=["POST"])]
