"""Training runs, their saved paths, and cancelling, in the service's own interface."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request

from flows.service.http.callers import Server
from flows.service.http.checkpoint_routes import own_run
from flows.service.http.future_routes import own_result
from flows.service.http.refusals import Refused
from flows.service.store import CheckpointRecord, TrainingRunRecord
from rl_core.service.status_answers import CancelledRequest, RunList, RunStatus, SavedPath, SavedPathList

__all__ = ["add_run_routes"]

MOST_OF_ONE_RUN = 10_000


def _status(run: TrainingRunRecord) -> RunStatus:
    lora = run.facts.get("lora")
    return RunStatus(
        run_id=run.model_id, base_model=str(run.facts.get("base") or run.base), state=run.state, steps=run.steps,
        lora_rank=lora["rank"] if lora else None, created=run.created, last_request=run.touched,
        user_metadata=run.facts.get("user_metadata") or {},
    )  # fmt: skip


def _saved(found: CheckpointRecord) -> SavedPath:
    return SavedPath(
        path=found.path, kind=found.kind, steps=found.steps, bytes=found.bytes, created=found.created,
        expires=found.expires, public=found.public, registration=found.registration, version=found.version,
        data_digest=str(found.facts.get("data_digest") or ""),
    )  # fmt: skip


def add_run_routes(router: APIRouter, server: Server) -> None:
    """Add the routes."""

    @router.get("/runs")
    async def runs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> RunList:
        """Training runs of the key, the newest first."""
        caller = await server.caller(request)
        page = await server.ask(server.store.runs, caller.key_id, limit, offset)
        await server.synced()  # counts of updates that are told stay
        return RunList(runs=[_status(run) for run in page.items], total=page.total)

    @router.get("/runs/{run_id}")
    async def run(request: Request, run_id: str) -> RunStatus:
        """A training run."""
        caller = await server.caller(request)
        found = await own_run(server, caller, run_id)
        await server.synced()
        return _status(found)

    @router.get("/runs/{run_id}/checkpoints")
    async def checkpoints(request: Request, run_id: str) -> SavedPathList:
        """Saved weights of a training run, with their versions in the model registry."""
        caller = await server.caller(request)
        found = await own_run(server, caller, run_id)
        page = await server.ask(server.store.checkpoints, None, MOST_OF_ONE_RUN, 0, found.model_id)
        return SavedPathList(checkpoints=[_saved(one) for one in page.items])

    @router.post("/runs/{run_id}/requests/{request_id}/cancel")
    async def cancel(request: Request, run_id: str, request_id: str) -> CancelledRequest:
        """Cancel a request that waits; its place in the run's order is passed over."""
        caller = await server.caller(request)
        found = await own_run(server, caller, run_id)
        asked = await own_result(server, caller, request_id)
        if asked.target != found.model_id:
            raise Refused(404, f"request '{request_id[:100]}' is not of run '{run_id[:200]}'")
        done = await server.ask(server.store.cancel, request_id)
        await server.note(caller, "request_cancel", request_id, "" if done else "too late")
        return CancelledRequest(request_id=request_id, cancelled=done)
