"""Evaluations over HTTP: accepted as durably as any request, their result held for until it is there."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse

from flows.service.http.callers import Server
from flows.service.http.checkpoint_routes import own_run
from flows.service.http.future_routes import own_result, within
from flows.service.http.promises import accept, whole_payload
from flows.service.http.refusals import Refused
from flows.service.http.training_routes import readable_checkpoint
from flows.service.store import ApiKey, SeqReused
from flows.service.wire.evaluate_bodies import EvaluateBody
from flows.service.wire.json_body import read_body
from flows.service.wire.tinker_paths import is_path
from rl_core.errors import nearest
from rl_core.service.evaluation_answers import ModelEvaluation
from rl_core.service.status_answers import EvaluationPromise

__all__ = ["add_evaluate_routes"]

SEQ_BITS = 52  # of an evaluation's number, which JSON's readers keep exactly


def _described() -> dict[str, Any]:
    """The body for OpenAPI; it is read within bounds by the route itself, so the framework does not know it."""
    schema = EvaluateBody.model_json_schema()
    parts = schema.pop("$defs")
    for name, field in schema["properties"].items():
        if "$ref" in field:
            schema["properties"][name] = {**parts[field["$ref"].rpartition("/")[2]], "default": field["default"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_evaluate_routes(router: APIRouter, server: Server) -> None:
    """Add the routes."""

    @router.post("/runs/{run_id}/evaluate", status_code=202, openapi_extra=_described())
    async def evaluate(request: Request, run_id: str) -> EvaluationPromise:
        """Queue an evaluation of saved weights or base models; the run's training is left as it is."""
        caller = await server.caller(request)
        run = await own_run(server, caller, run_id)
        payload = await whole_payload(server, request)
        body = read_body(EvaluateBody, payload)
        for name in (body.model, body.against):
            if name is not None:
                await _check_model(server, caller, name, is_second=name == body.against)
        evaluation_id = body.evaluation_id or f"e-{secrets.token_hex(12)}"
        facts = {"evaluation_id": evaluation_id}
        try:
            taken = await accept(server, request, caller, "evaluate", run.model_id, _seq(evaluation_id), payload, facts)
        except SeqReused:
            raise Refused(
                422, f"evaluation_id: '{evaluation_id}' was used before with another request; choose another"
            ) from None
        await server.note(caller, "evaluate", run.model_id, taken.request_id)
        return EvaluationPromise(request_id=taken.request_id, evaluation_id=evaluation_id)

    @router.get(
        "/runs/{run_id}/requests/{request_id}/result", response_model=ModelEvaluation,
        responses={202: {"description": "not finished; ask again"}},
    )  # fmt: skip
    async def result(
        request: Request, run_id: str, request_id: str, wait: Annotated[float, Query(ge=0, le=40)] = 0.0
    ) -> Any:
        """The result of an evaluation, or 202 after `wait` seconds without one."""
        caller = await server.caller(request)
        run = await own_run(server, caller, run_id)
        with server.room.expecting(request_id) as event:
            found = await own_result(server, caller, request_id)
            if found.target != run.model_id or found.kind != "evaluate":
                raise Refused(404, f"request '{request_id[:100]}' is no evaluation of run '{run_id[:200]}'")
            waits = not found.is_final and not server.room.is_over and wait > 0
            if waits and await within(event, min(wait, server.settings.server.poll_seconds)):
                found = await own_result(server, caller, request_id)
        if not found.is_final:
            return JSONResponse({"state": found.state}, 202)
        if found.state != "done":
            raise Refused(422 if found.category == "user" else 500, found.error or found.state)
        if found.answer is None:
            raise Refused(410, f"the result of {found.request_id} has expired and is forgotten")
        return JSONResponse(json.loads(found.answer))


async def _check_model(server: Server, caller: ApiKey, name: str, *, is_second: bool) -> None:
    """Raises: Refused (404, 403) for a model that is not there; ServiceError (user) for a path that is none."""
    if is_path(name):
        found = await readable_checkpoint(server, caller, name)
        if found.kind == "external_weights":
            raise Refused(422, f"{name} is for other programs; evaluate weights or sampler_weights")
        return
    settings = server.settings
    known = [*settings.engine.bases, *(settings.reference_models if is_second else ())]
    if name not in known:
        raise Refused(404, f"there is no model '{name[:200]}' here; {nearest(name, known)}")


def _seq(evaluation_id: str) -> int:
    """The evaluation's number among those of its run."""
    return int.from_bytes(hashlib.sha256(evaluation_id.encode()).digest()[:8]) >> (64 - SEQ_BITS)
