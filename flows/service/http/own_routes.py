"""The service's own interface, described by /openapi.json: states of requests, queues, metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Security
from fastapi.security import APIKeyHeader
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from flows.service.http.callers import Server, server_of
from flows.service.http.checkpoint_routes import own_run
from flows.service.http.evaluate_routes import add_evaluate_routes
from flows.service.http.exposition import MetricSample, exposition
from flows.service.http.future_routes import own_result
from flows.service.http.refusals import Refused
from flows.service.http.run_routes import add_run_routes
from flows.service.queue_stats import kind_stats
from flows.service.store import StoredRequest
from rl_core.service.status_answers import QueueStats, RequestList, RequestStatus

__all__ = ["add_own_routes"]

RECENT = 1000  # finished requests that quantiles are taken over


def status_of(found: StoredRequest) -> RequestStatus:
    """A request for people and programs."""
    waited = None if found.started is None else found.started - found.accepted
    served = None if found.started is None or found.finished is None else found.finished - found.started
    return RequestStatus(
        request_id=found.request_id, kind=found.kind, seq=found.seq, state=found.state, accepted=found.accepted,
        started=found.started, finished=found.finished, waited_seconds=waited, served_seconds=served,
        answer_bytes=len(found.answer or b""), error=found.error, category=found.category,
    )  # fmt: skip


def add_own_routes(app: FastAPI, server: Server) -> None:
    """Add the routes to the application."""
    key = APIKeyHeader(name="X-API-Key", auto_error=False)
    router = APIRouter(dependencies=[Security(key)], tags=["runs"])

    @router.get("/runs/{run_id}/requests/{request_id}/status")
    async def status(request: Request, run_id: str, request_id: str) -> RequestStatus:
        """State of a request."""
        caller = await server.caller(request)
        run = await own_run(server, caller, run_id)
        found = await own_result(server, caller, request_id)
        if found.target != run.model_id:
            raise Refused(404, f"request '{request_id[:100]}' is not of run '{run_id[:200]}'")
        return status_of(found)

    @router.get("/runs/{run_id}/requests")
    async def requests(
        request: Request, run_id: str, limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> RequestList:  # fmt: skip
        """Requests of a training run, the newest first."""
        caller = await server.caller(request)
        run = await own_run(server, caller, run_id)
        found = await server.ask(server.store.requests_of, run.model_id, limit, offset)
        await server.synced()  # a state that is told stays
        return RequestList(requests=[status_of(one) for one in found])

    @router.get("/runs/{run_id}/queue/stats")
    async def stats(request: Request, run_id: str) -> QueueStats:
        """Depth, waiting and service times of a run's requests, by kind."""
        caller = await server.caller(request)
        run = await own_run(server, caller, run_id)
        depths = await server.ask(server.store.depths, run.model_id)
        timings = await server.ask(server.store.timings, run.model_id, RECENT)
        await server.synced()
        depth = sum(sum(states.values()) for states in depths.values())
        return QueueStats(run_id=run.model_id, depth=depth, kinds=kind_stats(depths, timings))

    add_evaluate_routes(router, server)
    add_run_routes(router, server)
    app.include_router(router)
    app.add_route("/metrics", _metrics, methods=["GET"])


async def _metrics(request: Request) -> Response:
    """Prometheus text about the service as a whole; it names no user and no run, and so needs no key."""
    server = server_of(request)
    depths = await server.ask(server.store.depths)
    timings = await server.ask(server.store.timings, None, RECENT)
    counts = await server.ask(server.store.counts)
    runs: Any = await server.ask(server.store.runs, None, 1, 0)
    samples = [
        MetricSample("service_training_runs", "gauge", "Training runs in the store.", runs.total),
        MetricSample("service_waiting_polls", "gauge", "Clients that wait for results.", len(server.room)),
    ]
    for kind, stats in kind_stats(depths, timings).items():
        for state in ("waiting", "running"):
            samples.append(
                MetricSample("service_requests", "gauge", "Open requests.", getattr(stats, state),
                       {"kind": kind, "state": state})
            )  # fmt: skip
        for name, values in (("wait", stats.waited_seconds), ("service", stats.served_seconds)):
            for q, value in values.items():
                about = f"Quantiles of the {name} time of the newest {RECENT} finished requests."
                samples.append(
                    MetricSample(f"service_{name}_seconds", "gauge", about, value, {"kind": kind, "quantile": q})
                )
    for name, value in sorted(counts.items()):
        samples.append(
            MetricSample("service_worker_total", "counter", "Counts of the worker since the store was made.", value,
                   {"what": name})
        )  # fmt: skip
    return PlainTextResponse(exposition(samples), media_type="text/plain; version=0.0.4; charset=utf-8")
