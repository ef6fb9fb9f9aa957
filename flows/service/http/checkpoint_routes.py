"""Routes of training runs and saved weights: lists, life, publication."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import Server, called
from flows.service.http.promises import called_with, json_body
from flows.service.http.refusals import Refused
from flows.service.http.session_routes import iso, page_bounds, texts
from flows.service.http.training_routes import readable_checkpoint
from flows.service.store import ApiKey, CheckpointRecord, TrainingRunRecord
from flows.service.store.records import storable
from flows.service.wire.directory_bodies import SetTtl, WeightsInfo
from flows.service.wire.tinker_paths import CHECKPOINT_TYPES, parse_path

__all__ = ["CHECKPOINT_ROUTES", "ONE_CHECKPOINT", "own_checkpoint", "own_run"]

MOST_OF_ONE_RUN = 10_000
FIRST_WITH_EXPORTS = 30  # minor version of the public client


def _as_checkpoint(found: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{found.kind}/{found.name}",
        "checkpoint_type": CHECKPOINT_TYPES[found.kind],
        "time": iso(found.created),
        "tinker_path": found.path,
        "size_bytes": found.bytes,
        "public": found.public,
        "user_metadata": texts(found.facts.get("user_metadata")),
        "expires_at": None if found.expires is None else iso(found.expires),
    }


def _listed(request: Request, found: list[CheckpointRecord]) -> list[dict[str, Any]]:
    """Saved weights; clients before 0.30 do not know exported ones, and refuse a list that has some."""
    version = re.search(r"Tinker/Python 0\.(\d+)", request.headers.get("user-agent", ""))
    is_old = version is not None and int(version[1]) < FIRST_WITH_EXPORTS
    return [_as_checkpoint(one) for one in found if not (is_old and one.kind == "external_weights")]


async def _as_run(server: Server, run: TrainingRunRecord, *, is_own: bool) -> dict[str, Any]:
    lora = run.facts.get("lora")
    saved = (await server.ask(server.store.checkpoints, None, MOST_OF_ONE_RUN, 0, run.model_id)).items
    saved = [one for one in saved if is_own or one.public]
    newest = {
        kind: next((_as_checkpoint(one) for one in saved if one.kind == kind), None)
        for kind in ("weights", "sampler_weights")
    }
    return {
        "training_run_id": run.model_id,
        "base_model": str(run.facts.get("base") or run.base),
        "model_owner": run.owner,
        "is_lora": lora is not None,
        "lora_rank": lora["rank"] if lora else None,
        "corrupted": run.state == "failed",
        "last_request_time": iso(run.touched),
        "last_checkpoint": newest["weights"],
        "last_sampler_checkpoint": newest["sampler_weights"],
        "user_metadata": texts(run.facts.get("user_metadata")),
    }


async def own_run(server: Server, caller: ApiKey, model_id: str) -> TrainingRunRecord:
    """Raises: Refused (404, 403)."""
    await server.own_target(caller, model_id)
    found = await server.ask(server.store.run, model_id)
    if found is None:
        raise Refused(404, f"there is no training run '{model_id[:200]}'")
    return found


def _with_published(request: Request) -> bool:
    """True = those of others that have published weights, too. Raises: Refused (422)."""
    scope = request.query_params.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise Refused(422, f"access_scope: {scope[:40]!r}, expected owned or accessible")
    return scope == "accessible"


async def _runs(request: Request) -> Response:
    server, caller = await called(request)
    limit, offset = page_bounds(request)
    project = request.query_params.get("project_id")
    page = await server.ask(
        server.store.runs, caller.key_id, limit, offset, project=None if project is None else storable(project),
        with_published=_with_published(request),
    )  # fmt: skip
    cursor = {"offset": offset, "limit": limit, "total_count": page.total}
    runs = [await _as_run(server, run, is_own=run.owner == caller.key_id) for run in page.items]
    return JSONResponse({"training_runs": runs, "cursor": cursor})


async def _run(request: Request) -> Response:
    server, caller = await called(request)
    model_id = request.path_params["model_id"]
    run = await server.ask(server.store.run, model_id) if _with_published(request) and "\0" not in model_id else None
    if run is None or not await server.ask(server.store.is_published, model_id):
        run = await own_run(server, caller, model_id)
    return JSONResponse(await _as_run(server, run, is_own=run.owner == caller.key_id))


async def _checkpoints_of_run(request: Request) -> Response:
    server, caller = await called(request)
    run = await own_run(server, caller, request.path_params["model_id"])
    page = await server.ask(server.store.checkpoints, None, MOST_OF_ONE_RUN, 0, run.model_id)
    return JSONResponse({"checkpoints": _listed(request, page.items)})


async def _checkpoints(request: Request) -> Response:
    server, caller = await called(request)
    limit, offset = page_bounds(request)
    page = await server.ask(server.store.checkpoints, caller.key_id, limit, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": page.total}
    return JSONResponse({"checkpoints": _listed(request, page.items), "cursor": cursor})


async def own_checkpoint(request: Request) -> tuple[Server, ApiKey, CheckpointRecord]:
    """The saved weights that an address names. Raises: Refused (404, 403)."""
    server, caller = await called(request)
    parts = request.path_params
    path = str(parse_path(f"tinker://{parts['model_id']}/{parts['kind']}/{parts['name']}"))
    found = await server.ask(server.store.checkpoint, path)
    if found is None:
        raise Refused(404, f"there are no saved weights {path}")
    if found.owner != caller.key_id:
        raise Refused(403, f"{path} belongs to another API key")
    return server, caller, found


async def _delete(request: Request) -> Response:
    server, caller, found = await own_checkpoint(request)
    await server.ask(server.store.delete_checkpoint, found.path)
    await server.note(caller, "checkpoint_delete", found.path)
    return Response(status_code=204)


async def _set_public(request: Request) -> Response:
    server, caller, found = await own_checkpoint(request)
    is_public = request.method == "POST"
    await server.ask(server.store.change_checkpoint, found.path, public=is_public)
    await server.note(caller, "checkpoint_publish" if is_public else "checkpoint_unpublish", found.path)
    return Response(status_code=204)


async def _set_ttl(request: Request) -> Response:
    server, caller, found = await own_checkpoint(request)
    body = await json_body(server, request, SetTtl)
    expires = None if body.ttl_seconds is None else server.store.now() + body.ttl_seconds
    await server.ask(server.store.change_checkpoint, found.path, expires=expires)
    await server.note(caller, "checkpoint_ttl", found.path, str(body.ttl_seconds))
    return Response(status_code=204)


async def _weights_info(request: Request) -> Response:
    server, caller, body, _ = await called_with(request, WeightsInfo)
    found = await readable_checkpoint(server, caller, body.tinker_path)
    run = await server.ask(server.store.run, found.model_id)
    facts = found.facts if run is None else run.facts
    lora = facts.get("lora")
    trained = {name: lora[name] if lora else None for name in ("train_unembed", "train_mlp", "train_attn")}
    return JSONResponse(
        {
            "base_model": found.base or facts.get("base"),
            "is_lora": lora is not None,
            "lora_rank": lora["rank"] if lora else None,
            "optimizer_config": facts.get("optimizer") or {"type": "adamw"},
            **trained,
        }
    )


ONE_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
CHECKPOINT_ROUTES = [
    Route("/training_runs", _runs, methods=["GET"]),
    Route("/training_runs/{model_id}", _run, methods=["GET"]),
    Route("/training_runs/{model_id}/checkpoints", _checkpoints_of_run, methods=["GET"]),
    Route("/checkpoints", _checkpoints, methods=["GET"]),
    Route(ONE_CHECKPOINT, _delete, methods=["DELETE"]),
    Route(f"{ONE_CHECKPOINT}/publish", _set_public, methods=["POST", "DELETE"]),
    Route(f"{ONE_CHECKPOINT}/ttl", _set_ttl, methods=["PUT"]),
    Route("/weights_info", _weights_info, methods=["POST"]),
]
