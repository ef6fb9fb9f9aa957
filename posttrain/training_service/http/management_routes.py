"""Management interface of the service, described by /openapi.json: evaluations, runs, requests, queues, metrics.

Evaluations are accepted as durably as any request. /metrics uses Prometheus' text exposition format 0.0.4.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
from posttrain.training_service.wire.request_bodies import (
    ReferenceScoreBody,
    RequestBody,
    parse_request_body,
)
from posttrain.web.errors import HTTPError
from rl_core.errors import suggest_name
from rl_core.service.responses import (
    AcceptedEvaluation,
    AcceptedScores,
    CancelledRequest,
    ModelEvaluation,
    QueueStats,
    ReferenceInfo,
    ReferenceList,
    ReferenceScores,
    RequestList,
    RequestStatus,
    RunList,
    RunStatus,
    SavedPath,
    SavedPathList,
)
from rl_core.trackers.prometheus import format_prometheus_name

EVALUATION_SEQ_BITS = 52  # JSON readers keep integers of this size exactly
MAX_SAVED_PATHS_PER_RUN = 10_000
NUM_RECENT_REQUESTS = 1000  # finished requests over which quantiles are computed


@dataclass(frozen=True, slots=True)
class MetricSample:
    """Value of a metric."""

    name: str
    kind: str  # gauge or counter
    about: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def render_exposition(samples: Sequence[MetricSample]) -> str:
    """Render samples in exposition format 0.0.4, grouped by metric behind its help and type."""
    families: dict[str, Metric] = {}
    for sample in samples:
        family = families.setdefault(
            sample.name, Metric(_format_family_name(sample), sample.about, sample.kind)
        )
        family.add_sample(format_prometheus_name(sample.name), dict(sample.labels), sample.value)
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(list(families.values())))
    exposition: bytes = generate_latest(registry)
    return exposition.decode()


def _format_family_name(sample: MetricSample) -> str:
    """Return the name of a metric family; a counter's family name has no `_total`."""
    return format_prometheus_name(
        sample.name.removesuffix("_total") if sample.kind == "counter" else sample.name
    )


class _FamilyCollector(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _describe_request_body(body: type[RequestBody]) -> dict[str, Any]:
    """Describe the body for OpenAPI. The route reads it itself to bound its size, so FastAPI cannot derive it."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})
    for name, property_schema in schema["properties"].items():
        if "$ref" in property_schema:
            schema["properties"][name] = {
                **definitions[property_schema["$ref"].rpartition("/")[2]],
                "default": property_schema["default"],
            }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_evaluate_routes(router: APIRouter, server: ServiceServer) -> None:
    """Add the routes of evaluations."""

    @router.post(
        "/runs/{run_id}/evaluate",
        status_code=202,
        openapi_extra=_describe_request_body(EvaluateBody),
    )
    async def evaluate(request: Request, run_id: str) -> AcceptedEvaluation:
        """Queue an evaluation of saved weights or base models. The run's training is not affected."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        payload = await read_full_payload(server, request)
        body = parse_request_body(EvaluateBody, payload)
        for name in (body.model, body.against):
            if name is not None:
                await _check_evaluated_model(server, caller, name, is_second=name == body.against)
        evaluation_id = body.evaluation_id or f"e-{secrets.token_hex(12)}"
        seq = _hash_request_id(evaluation_id)
        facts = {"evaluation_id": evaluation_id}
        try:
            accepted = await accept_request(
                server, request, caller, "evaluate", run.model_id, seq, payload, facts
            )
        except SequenceIdReused:
            raise HTTPError(
                422,
                f"evaluation_id: '{evaluation_id}' was used before with another request; choose another",
            ) from None
        await server.record_audit_entry(caller, "evaluate", run.model_id, accepted.request_id)
        return AcceptedEvaluation(request_id=accepted.request_id, evaluation_id=evaluation_id)

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
        """Return the result of an evaluation, or status 202 after `wait` seconds without one."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        problem = f"request '{request_id[:100]}' is no evaluation of run '{run_id[:200]}'"
        place = ("evaluate", run.model_id)
        return await _wait_for_json_result(server, caller, request_id, wait, place, problem)


async def _wait_for_json_result(
    server: ServiceServer,
    caller: ApiKey,
    request_id: str,
    wait: float,
    place: tuple[str, str],
    problem: str,
) -> JSONResponse:
    """Return the JSON result of a request, or status 202 after `wait` seconds without one.

    Args:
        place: kind and target that the request must have.
        problem: message if it has others.
    Raises: HTTPError (403, 404, 410, 422, 500); BackendError.
    """
    with server.result_waiter.expect_result(request_id) as event:
        stored = await find_owned_request(server, caller, request_id)
        if (stored.kind, stored.target) != place:
            raise HTTPError(404, problem)
        waits = not stored.is_final and not server.result_waiter.is_closing and wait > 0
        timeout = min(wait, server.settings.server.poll_seconds)
        if waits and await wait_for_event(event, timeout):
            stored = await find_owned_request(server, caller, request_id)
    if not stored.is_final:
        return JSONResponse({"state": stored.state}, 202)
    if stored.state != "done":
        status = 422 if stored.category == "user" else 500
        raise HTTPError(status, stored.error or stored.state)
    if stored.answer is None:
        raise HTTPError(410, f"the result of {stored.request_id} has expired")
    return JSONResponse(json.loads(stored.answer))


def add_reference_routes(router: APIRouter, server: ServiceServer) -> None:
    """Add the routes of reference and reward models."""
    settings = server.settings
    kinds: dict[str, Literal["policy", "reward_model"]] = {
        **dict.fromkeys(settings.reference_models, "policy"),
        **dict.fromkeys(settings.reward_models, "reward_model"),
    }

    @router.get("/references")
    async def references(request: Request) -> ReferenceList:
        """List the frozen models that score rows."""
        await server.authenticate_caller(request)
        infos = [ReferenceInfo(name=name, kind=kind) for name, kind in sorted(kinds.items())]
        return ReferenceList(references=infos)

    @router.post(
        "/references/{name}/scores",
        status_code=202,
        openapi_extra=_describe_request_body(ReferenceScoreBody),
    )
    async def scores(request: Request, name: str) -> AcceptedScores:
        """Queue the log-probabilities (reference model) or scores (reward model) of token rows."""
        caller = await server.authenticate_caller(request)
        if name not in kinds:
            advice = suggest_name(name, kinds) if kinds else "the service's settings name none"
            raise HTTPError(404, f"references: there is no model '{name[:200]}' here; {advice}")
        payload = await read_full_payload(server, request)
        body = parse_request_body(ReferenceScoreBody, payload)
        scores_id = body.scores_id or f"s-{secrets.token_hex(12)}"
        # The model is part of the payload's identity: a repeated id means the same rows and model.
        seq = _hash_request_id(f"{name}\n{scores_id}")
        target = _format_reference_target(caller)
        try:
            accepted = await accept_request(
                server, request, caller, "score", target, seq, payload, {"model": name}
            )
        except SequenceIdReused:
            raise HTTPError(
                422,
                f"scores_id: '{scores_id}' was used before with other rows; choose another",
            ) from None
        await server.record_audit_entry(caller, "score", name, accepted.request_id)
        return AcceptedScores(request_id=accepted.request_id, scores_id=scores_id)

    @router.get(
        "/references/requests/{request_id}/result",
        response_model=ReferenceScores,
        responses={202: {"description": "not finished; ask again"}},
    )
    async def result(
        request: Request, request_id: str, wait: Annotated[float, Query(ge=0, le=40)] = 0.0
    ) -> Any:
        """Return the scores, or status 202 after `wait` seconds without them."""
        caller = await server.authenticate_caller(request)
        problem = f"request '{request_id[:100]}' is no request to a reference model"
        place = ("score", _format_reference_target(caller))
        return await _wait_for_json_result(server, caller, request_id, wait, place, problem)


def _format_reference_target(caller: ApiKey) -> str:
    """Return the target of a key's requests to reference models; no run has such an id."""
    return f"{caller.key_id}:references"


async def _check_evaluated_model(
    server: ServiceServer, caller: ApiKey, name: str, *, is_second: bool
) -> None:
    """Refuse a model that does not exist (HTTPError 404, 403) or an invalid path (ServiceError, user)."""
    if is_tinker_path(name):
        checkpoint = await find_readable_checkpoint(server, caller, name)
        if checkpoint.kind == "external_weights":
            raise HTTPError(
                422, f"{name} is for other programs; evaluate weights or sampler_weights"
            )
        return
    settings = server.settings
    known = [*settings.engine.bases, *(settings.reference_models if is_second else ())]
    if name not in known:
        raise HTTPError(404, f"there is no model '{name[:200]}' here; {suggest_name(name, known)}")


def _hash_request_id(request_id: str) -> int:
    """Derive the sequence number of a request among those of its target from an id that a client chose."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8]) >> (64 - EVALUATION_SEQ_BITS)


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
    """Add the routes of training runs, their saved paths, and cancellation."""

    @router.get("/runs")
    async def runs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> RunList:
        """List the key's training runs, newest first."""
        caller = await server.authenticate_caller(request)
        page = await server.call_store(server.store.list_runs, caller.key_id, limit, offset)
        await server.wait_until_durable()  # a reported number of updates must survive a crash
        return RunList(runs=[_format_run_status(run) for run in page.items], total=page.total)

    @router.get("/runs/{run_id}")
    async def run(request: Request, run_id: str) -> RunStatus:
        """Describe a training run."""
        caller = await server.authenticate_caller(request)
        record = await find_owned_run(server, caller, run_id)
        await server.wait_until_durable()
        return _format_run_status(record)

    @router.get("/runs/{run_id}/checkpoints")
    async def checkpoints(request: Request, run_id: str) -> SavedPathList:
        """List a training run's saved weights with their versions in the model registry."""
        caller = await server.authenticate_caller(request)
        record = await find_owned_run(server, caller, run_id)
        page = await server.call_store(
            server.store.list_checkpoints, None, MAX_SAVED_PATHS_PER_RUN, 0, record.model_id
        )
        paths = [_format_saved_path(checkpoint) for checkpoint in page.items]
        return SavedPathList(checkpoints=paths)

    @router.post("/runs/{run_id}/requests/{request_id}/cancel")
    async def cancel(request: Request, run_id: str, request_id: str) -> CancelledRequest:
        """Cancel a waiting request. The run's order skips it."""
        caller = await server.authenticate_caller(request)
        await _find_run_request(server, caller, run_id, request_id)
        is_cancelled = await server.call_store(server.store.cancel_request, request_id)
        detail = "" if is_cancelled else "too late"
        await server.record_audit_entry(caller, "request_cancel", request_id, detail)
        return CancelledRequest(request_id=request_id, cancelled=is_cancelled)


async def _find_run_request(
    server: ServiceServer, caller: ApiKey, run_id: str, request_id: str
) -> StoredRequest:
    """Return a request of the caller's run. Raises: HTTPError (403, 404, 410)."""
    run = await find_owned_run(server, caller, run_id)
    stored = await find_owned_request(server, caller, request_id)
    if stored.target != run.model_id:
        raise HTTPError(404, f"request '{request_id[:100]}' is not of run '{run_id[:200]}'")
    return stored


def format_request_status(request: StoredRequest) -> RequestStatus:
    """Format a request's state for the management interface."""
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
    """Add all management routes to the application."""
    key = APIKeyHeader(name="X-API-Key", auto_error=False)
    router = APIRouter(dependencies=[Security(key)], tags=["runs"])

    @router.get("/runs/{run_id}/requests/{request_id}/status")
    async def status(request: Request, run_id: str, request_id: str) -> RequestStatus:
        """Report the state of a request."""
        caller = await server.authenticate_caller(request)
        stored = await _find_run_request(server, caller, run_id, request_id)
        return format_request_status(stored)

    @router.get("/runs/{run_id}/requests")
    async def requests(
        request: Request,
        run_id: str,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=1 << 31)] = 0,
    ) -> RequestList:
        """List the requests of a training run, newest first."""
        caller = await server.authenticate_caller(request)
        run = await find_owned_run(server, caller, run_id)
        rows = await server.call_store(server.store.list_requests, run.model_id, limit, offset)
        await server.wait_until_durable()  # a reported state must survive a crash
        return RequestList(requests=[format_request_status(row) for row in rows])

    @router.get("/runs/{run_id}/queue/stats")
    async def stats(request: Request, run_id: str) -> QueueStats:
        """Report queue depth, waiting times and service times of a run's requests by kind."""
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
    add_reference_routes(router, server)
    add_run_routes(router, server)
    app.include_router(router)
    app.add_route("/metrics", _export_metrics, methods=["GET"])


async def _export_metrics(request: Request) -> Response:
    """Export metrics of the whole service for Prometheus. They name no user and no run, so no key is needed."""
    server = find_service_server(request)
    depths = await server.call_store(server.store.count_open_requests)
    timings = await server.call_store(server.store.list_request_timings, None, NUM_RECENT_REQUESTS)
    counters = await server.call_store(server.store.read_worker_counters)
    runs: Any = await server.call_store(server.store.list_runs, None, 1, 0)
    samples: list[MetricSample] = []

    def add_gauge(name: str, about: str, value: float, **labels: str) -> None:
        samples.append(MetricSample(name, "gauge", about, value, labels))

    add_gauge("service_training_runs", "Training runs in the store.", runs.total)
    num_waiting = len(server.result_waiter)
    add_gauge("service_waiting_polls", "Clients that wait for results.", num_waiting)
    for kind, stats in compute_kind_stats(depths, timings).items():
        add_gauge("service_requests", "Open requests.", stats.waiting, kind=kind, state="waiting")
        add_gauge("service_requests", "Open requests.", stats.running, kind=kind, state="running")
        for name, quantiles in (("wait", stats.waited_seconds), ("service", stats.served_seconds)):
            about = f"Quantiles of the {name} time of the newest {NUM_RECENT_REQUESTS} finished requests."
            for q, value in quantiles.items():
                add_gauge(f"service_{name}_seconds", about, value, kind=kind, quantile=q)
    about = "Counts of the worker since the store was made."
    for name, count in sorted(counters.items()):
        samples.append(
            MetricSample("service_worker_total", "counter", about, count, {"what": name})
        )
    return PlainTextResponse(
        render_exposition(samples), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
