"""Prometheus' text format.

Evaluations over HTTP: accepted as durably as any request, their result held for until it is there.

Training runs, their saved paths, and cancelling, in the service's own interface.

The service's own interface, described by /openapi.json: states of requests, queues, metrics.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Security
from fastapi.security import APIKeyHeader
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from posttrain.training_service.http.checkpoint_routes import find_owned_run
from posttrain.training_service.http.compute_routes import (
    find_owned_request,
    find_readable_checkpoint,
    wait_for_event,
)
from posttrain.training_service.http.server_state import (
    ServiceServer,
    accept_request,
    find_service_server,
    read_full_payload,
)
from posttrain.training_service.paths import is_tinker_path
from posttrain.training_service.store import (
    ApiKey,
    CheckpointRecord,
    SequenceIdReused,
    StoredRequest,
    TrainingRunRecord,
)
from posttrain.training_service.store.overview import compute_kind_stats
from posttrain.training_service.wire.codec import EvaluateBody
from posttrain.training_service.wire.request_bodies import parse_request_body
from posttrain.web.errors import HTTPError
from rl_core.errors import suggest_name
from rl_core.service.responses import (
    AcceptedEvaluation,
    CancelledRequest,
    ModelEvaluation,
    QueueStats,
    RequestList,
    RequestStatus,
    RunList,
    RunStatus,
    SavedPath,
    SavedPathList,
)
from rl_core.trackers.prometheus import format_prometheus_name


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric."""

    name: str
    kind: str  # gauge or counter
    about: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def render_exposition(samples: Sequence[MetricSample]) -> str:
    """All samples, those of one metric together behind its help and type (exposition format 0.0.4)."""
    families: dict[str, Metric] = {}
    for sample in samples:
        family = families.setdefault(
            sample.name, Metric(_format_family_name(sample), sample.about, sample.kind)
        )
        family.add_sample(format_prometheus_name(sample.name), dict(sample.labels), sample.value)
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(list(families.values())))
    found: bytes = generate_latest(registry)
    return found.decode()


def _format_family_name(sample: MetricSample) -> str:
    """Name of the family: a counter's has no ending."""
    return format_prometheus_name(
        sample.name.removesuffix("_total") if sample.kind == "counter" else sample.name
    )


class _FamilyCollector(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


EVALUATION_SEQ_BITS = 52  # of an evaluation's number, which JSON's readers keep exactly


def _describe_request_body() -> dict[str, Any]:
    """The body for OpenAPI; it is read within bounds by the route itself, so the framework does not know it."""
    schema = EvaluateBody.model_json_schema()
    parts = schema.pop("$defs")
    for name, described in schema["properties"].items():
        if "$ref" in described:
            schema["properties"][name] = {
                **parts[described["$ref"].rpartition("/")[2]],
                "default": described["default"],
            }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_evaluate_routes(router: APIRouter, server: ServiceServer) -> None:
    """Add the routes."""

    @router.post("/runs/{run_id}/evaluate", status_code=202, openapi_extra=_describe_request_body())
    async def evaluate(request: Request, run_id: str) -> AcceptedEvaluation:
        """Queue an evaluation of saved weights or base models; the run's training is left as it is."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        payload = await read_full_payload(server, request)
        body = parse_request_body(EvaluateBody, payload)
        for name in (body.model, body.against):
            if name is not None:
                await _check_evaluated_model(server, caller, name, is_second=name == body.against)
        evaluation_id = body.evaluation_id or f"e-{secrets.token_hex(12)}"
        facts = {"evaluation_id": evaluation_id}
        try:
            taken = await accept_request(
                server,
                request,
                caller,
                "evaluate",
                run.model_id,
                _hash_evaluation_id(evaluation_id),
                payload,
                facts,
            )
        except SequenceIdReused:
            raise HTTPError(
                422,
                f"evaluation_id: '{evaluation_id}' was used before with another request; choose another",
            ) from None
        await server.record_audit_entry(caller, "evaluate", run.model_id, taken.request_id)
        return AcceptedEvaluation(request_id=taken.request_id, evaluation_id=evaluation_id)

    @router.get(
        "/runs/{run_id}/requests/{request_id}/result",
        response_model=ModelEvaluation,
        responses={202: {"description": "not finished; ask again"}},
    )
    async def result(
        request: Request,
        run_id: str,
        request_id: str,
        wait: Annotated[float, Query(ge=0, le=40)] = 0.0,
    ) -> Any:
        """The result of an evaluation, or 202 after `wait` seconds without one."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        with server.result_waiter.expect_result(request_id) as event:
            found = await find_owned_request(server, caller, request_id)
            if found.target != run.model_id or found.kind != "evaluate":
                raise HTTPError(
                    404, f"request '{request_id[:100]}' is no evaluation of run '{run_id[:200]}'"
                )
            waits = not found.is_final and not server.result_waiter.is_closing and wait > 0
            if waits and await wait_for_event(
                event, min(wait, server.settings.server.poll_seconds)
            ):
                found = await find_owned_request(server, caller, request_id)
        if not found.is_final:
            return JSONResponse({"state": found.state}, 202)
        if found.state != "done":
            raise HTTPError(422 if found.category == "user" else 500, found.error or found.state)
        if found.answer is None:
            raise HTTPError(410, f"the result of {found.request_id} has expired and is forgotten")
        return JSONResponse(json.loads(found.answer))


async def _check_evaluated_model(
    server: ServiceServer, caller: ApiKey, name: str, *, is_second: bool
) -> None:
    """Raises: Refused (404, 403) for a model that is not there; ServiceError (user) for a path that is none."""
    if is_tinker_path(name):
        found = await find_readable_checkpoint(server, caller, name)
        if found.kind == "external_weights":
            raise HTTPError(
                422, f"{name} is for other programs; evaluate weights or sampler_weights"
            )
        return
    settings = server.settings
    known = [*settings.engine.bases, *(settings.reference_models if is_second else ())]
    if name not in known:
        raise HTTPError(404, f"there is no model '{name[:200]}' here; {suggest_name(name, known)}")


def _hash_evaluation_id(evaluation_id: str) -> int:
    """The evaluation's number among those of its run."""
    return int.from_bytes(hashlib.sha256(evaluation_id.encode()).digest()[:8]) >> (
        64 - EVALUATION_SEQ_BITS
    )


MAX_SAVED_PATHS_PER_RUN = 10_000


def _format_run_status(run: TrainingRunRecord) -> RunStatus:
    lora = run.facts.get("lora")
    return RunStatus(
        run_id=run.model_id,
        base_model=str(run.facts.get("base") or run.base),
        state=run.state,
        steps=run.steps,
        lora_rank=lora["rank"] if lora else None,
        created=run.created,
        last_request=run.touched,
        user_metadata=run.facts.get("user_metadata") or {},
    )


def _format_saved_path(record: CheckpointRecord) -> SavedPath:
    return SavedPath(
        path=record.path,
        kind=record.kind,
        steps=record.steps,
        bytes=record.bytes,
        created=record.created,
        expires=record.expires,
        public=record.public,
        registration=record.registration,
        version=record.version,
        data_digest=str(record.facts.get("data_digest") or ""),
    )


def add_run_routes(router: APIRouter, server: ServiceServer) -> None:
    """Add the routes."""

    @router.get("/runs")
    async def runs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> RunList:
        """Training runs of the key, the newest first."""
        caller = await server.authenticate_caller(request)
        page = await server.call_store(server.store.list_runs, caller.key_id, limit, offset)
        await server.wait_until_durable()  # counts of updates that are told stay
        return RunList(runs=[_format_run_status(run) for run in page.items], total=page.total)

    @router.get("/runs/{run_id}")
    async def run(request: Request, run_id: str) -> RunStatus:
        """A training run."""
        caller = await server.authenticate_caller(request)
        found = await find_owned_run(server, caller, run_id)
        await server.wait_until_durable()
        return _format_run_status(found)

    @router.get("/runs/{run_id}/checkpoints")
    async def checkpoints(request: Request, run_id: str) -> SavedPathList:
        """Saved weights of a training run, with their versions in the model registry."""
        caller = await server.authenticate_caller(request)
        found = await find_owned_run(server, caller, run_id)
        page = await server.call_store(
            server.store.list_checkpoints, None, MAX_SAVED_PATHS_PER_RUN, 0, found.model_id
        )
        return SavedPathList(checkpoints=[_format_saved_path(one) for one in page.items])

    @router.post("/runs/{run_id}/requests/{request_id}/cancel")
    async def cancel(request: Request, run_id: str, request_id: str) -> CancelledRequest:
        """Cancel a request that waits; its place in the run's order is passed over."""
        caller = await server.authenticate_caller(request)
        found = await find_owned_run(server, caller, run_id)
        asked = await find_owned_request(server, caller, request_id)
        if asked.target != found.model_id:
            raise HTTPError(404, f"request '{request_id[:100]}' is not of run '{run_id[:200]}'")
        done = await server.call_store(server.store.cancel_request, request_id)
        await server.record_audit_entry(
            caller, "request_cancel", request_id, "" if done else "too late"
        )
        return CancelledRequest(request_id=request_id, cancelled=done)


NUM_RECENT_REQUESTS = 1000  # finished requests that quantiles are taken over


def format_request_status(request: StoredRequest) -> RequestStatus:
    """A request for people and programs."""
    waited = None if request.started is None else request.started - request.accepted
    served = (
        None
        if request.started is None or request.finished is None
        else request.finished - request.started
    )
    return RequestStatus(
        request_id=request.request_id,
        kind=request.kind,
        seq=request.seq,
        state=request.state,
        accepted=request.accepted,
        started=request.started,
        finished=request.finished,
        waited_seconds=waited,
        served_seconds=served,
        answer_bytes=len(request.answer or b""),
        error=request.error,
        category=request.category,
    )


def add_management_routes(app: FastAPI, server: ServiceServer) -> None:
    """Add the routes to the application."""
    key = APIKeyHeader(name="X-API-Key", auto_error=False)
    router = APIRouter(dependencies=[Security(key)], tags=["runs"])

    @router.get("/runs/{run_id}/requests/{request_id}/status")
    async def status(request: Request, run_id: str, request_id: str) -> RequestStatus:
        """State of a request."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        found = await find_owned_request(server, caller, request_id)
        if found.target != run.model_id:
            raise HTTPError(404, f"request '{request_id[:100]}' is not of run '{run_id[:200]}'")
        return format_request_status(found)

    @router.get("/runs/{run_id}/requests")
    async def requests(
        request: Request,
        run_id: str,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> RequestList:
        """Requests of a training run, the newest first."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        found = await server.call_store(server.store.list_requests, run.model_id, limit, offset)
        await server.wait_until_durable()  # a state that is told stays
        return RequestList(requests=[format_request_status(one) for one in found])

    @router.get("/runs/{run_id}/queue/stats")
    async def stats(request: Request, run_id: str) -> QueueStats:
        """Depth, waiting and service times of a run's requests, by kind."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        depths = await server.call_store(server.store.count_open_requests, run.model_id)
        timings = await server.call_store(
            server.store.list_request_timings, run.model_id, NUM_RECENT_REQUESTS
        )
        await server.wait_until_durable()
        depth = sum(sum(states.values()) for states in depths.values())
        return QueueStats(
            run_id=run.model_id, depth=depth, kinds=compute_kind_stats(depths, timings)
        )

    add_evaluate_routes(router, server)
    add_run_routes(router, server)
    app.include_router(router)
    app.add_route("/metrics", _export_metrics, methods=["GET"])


async def _export_metrics(request: Request) -> Response:
    """Prometheus text about the service as a whole; it names no user and no run, and so needs no key."""
    server = find_service_server(request)
    depths = await server.call_store(server.store.count_open_requests)
    timings = await server.call_store(server.store.list_request_timings, None, NUM_RECENT_REQUESTS)
    counts = await server.call_store(server.store.read_worker_counters)
    runs: Any = await server.call_store(server.store.list_runs, None, 1, 0)
    samples = [
        MetricSample("service_training_runs", "gauge", "Training runs in the store.", runs.total),
        MetricSample(
            "service_waiting_polls",
            "gauge",
            "Clients that wait for results.",
            len(server.result_waiter),
        ),
    ]
    for kind, stats in compute_kind_stats(depths, timings).items():
        for state in ("waiting", "running"):
            samples.append(
                MetricSample(
                    "service_requests",
                    "gauge",
                    "Open requests.",
                    getattr(stats, state),
                    {"kind": kind, "state": state},
                )
            )
        for name, values in (("wait", stats.waited_seconds), ("service", stats.served_seconds)):
            for q, value in values.items():
                about = f"Quantiles of the {name} time of the newest {NUM_RECENT_REQUESTS} finished requests."
                samples.append(
                    MetricSample(
                        f"service_{name}_seconds",
                        "gauge",
                        about,
                        value,
                        {"kind": kind, "quantile": q},
                    )
                )
    for name, value in sorted(counts.items()):
        samples.append(
            MetricSample(
                "service_worker_total",
                "counter",
                "Counts of the worker since the store was made.",
                value,
                {"what": name},
            )
        )
    return PlainTextResponse(
        render_exposition(samples), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
