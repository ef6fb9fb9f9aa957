"""The route that copies saved weights into a training run of their own, which holds them and is not trained."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flows.service.http.callers import Server
from flows.service.http.promises import called_with
from flows.service.http.refusals import Refused
from flows.service.http.training_routes import model_name, readable_checkpoint
from flows.service.store import PROJECT, ApiKey, TrainingRunRecord
from flows.service.wire.directory_bodies import CopyWeights
from flows.service.wire.tinker_paths import TinkerPath, parse_path
from rl_core.storage.single_files import copy_tree

__all__ = ["COPY_ROUTES"]


async def _copy(request: Request) -> Response:
    """Repeated with the same X-Idempotency-Key it is the same copy."""
    server, caller, body, _ = await called_with(request, CopyWeights)
    if body.weights_access_token is not None or "x-tinker-weights-access-token" in request.headers:
        raise Refused(422, "copy_weights: weights_access_token is not supported; publish the checkpoint")
    source = await readable_checkpoint(server, caller, body.source_path)
    target = await _target_run(server, caller, request, body)
    place = parse_path(source.path)
    path = TinkerPath(target, place.kind, place.name)
    if await server.ask(server.store.checkpoint, str(path)) is not None:
        return JSONResponse({"tinker_path": str(path)})
    folder = path.folder(server.folder)
    await asyncio.to_thread(copy_tree, server.folder / source.folder, folder)
    now = server.store.now()
    run = await server.ask(server.store.run, source.model_id)
    facts: dict[str, Any] = dict(run.facts) if run is not None else {}
    session_id = target.partition(":")[0]
    held = TrainingRunRecord(
        model_id=target, owner=caller.key_id, session_id=session_id, created=now, touched=now, state="unloaded",
        base=source.base, steps=source.steps, facts=facts | {"copy_of": source.path}, info=source.facts,
    )  # fmt: skip
    copy = dataclasses.replace(
        source, path=str(path), model_id=target, owner=caller.key_id, created=now, public=False, version=None,
        folder=folder.relative_to(server.folder).as_posix(), registration="none",
        expires=None if body.ttl_seconds is None else now + body.ttl_seconds,
    )  # fmt: skip
    await server.ask(server.store.add_copy, held, copy)
    await server.note(caller, "checkpoint_copy", str(path), source.path)
    return JSONResponse({"tinker_path": str(path)})


async def _target_run(server: Server, caller: ApiKey, request: Request, body: CopyWeights) -> str:
    """Id of the run that gets the copy; its session is made where none is named. Raises: Refused (403, 404, 422)."""
    if body.session_id is not None and body.model_seq_id is not None:
        await server.own_session(caller, body.session_id)
        target = model_name(body.session_id, body.model_seq_id)
        run = await server.ask(server.store.run, target)
        if run is not None and run.facts.get("copy_of") != body.source_path:
            raise Refused(422, f"copy_weights: the training run {target} is there already")
        return target
    key = request.headers.get("x-idempotency-key") or secrets.token_hex(16)
    session_id = hashlib.sha256(f"{caller.key_id}\n{key}\n{body.source_path}".encode()).hexdigest()[:32]
    if await server.ask(server.store.session, session_id) is None:
        facts = {"project_id": body.destination_project_id or PROJECT, "display_name": "copied weights"}
        await server.ask(server.store.create_session, session_id, caller.key_id, facts)
    return model_name(session_id, 0)


COPY_ROUTES = [Route("/copy_weights", _copy, methods=["POST"])]
