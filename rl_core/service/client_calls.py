"""Calls of the training service's management API: what is sent, and how the response is parsed. No I/O.

Responses become plain data classes. Uses only the standard library.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import secrets
import time
import types
import typing
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Required, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from rl_core.errors import BackendError, DataError
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

T = TypeVar("T")
RecordT = TypeVar("RecordT")

LONG_POLL_SECONDS: Final = 20.0  # that one request waits for a result

_METRIC_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_METRIC_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED_CHARACTER = re.compile(r"\\(.)")


def parse_record(kind: type[RecordT], data: Any, json_path: str = "answer") -> RecordT:
    """Build a data class from decoded JSON. Types are checked; unknown keys are ignored, so newer servers can be read.

    Raises: DataError with the path of the first key that is missing or has the wrong type.
    """
    if not isinstance(data, dict):
        raise DataError(f"{json_path}: {type(data).__name__}, expected an object")
    values = {}
    for name, hint, is_required in _list_record_fields(typing.cast(Any, kind)):
        if name in data:
            values[name] = _parse_field_value(hint, data[name], f"{json_path}.{name}")
        elif is_required:
            raise DataError(f"{json_path}.{name}: is missing; is the server of another version?")
    return kind(**values)


@functools.cache
def _list_record_fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return (name, type, whether it is required) for each field."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    records = []
    for field_ in dataclasses.fields(kind):
        is_required = field_.default is missing and field_.default_factory is missing
        records.append((field_.name, hints[field_.name], is_required))
    return tuple(records)


def _parse_field_value(hint: Any, value: Any, json_path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _parse_field_value(hint, value, json_path)
    if origin is typing.Literal:
        expected = f"one of {', '.join(map(str, arguments))}"
        return _require_type(value in arguments, value, json_path, expected)
    if origin is list:
        _require_type(isinstance(value, list), value, json_path, "a list")
        return [
            _parse_field_value(arguments[0], item, f"{json_path}[{index}]")
            for index, item in enumerate(value)
        ]
    if origin is dict:
        _require_type(isinstance(value, dict), value, json_path, "an object")
        return {
            name: _parse_field_value(arguments[1], item, f"{json_path}.{name}")
            for name, item in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return parse_record(hint, value, json_path)
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_require_type(is_number, value, json_path, "a number"))
    fits = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    return _require_type(fits, value, json_path, hint.__name__)


def _require_type(fits: bool, value: Any, json_path: str, expected: str) -> Any:
    if not fits:
        raise DataError(f"{json_path}: {str(value)[:60]!r}, expected {expected}")
    return value


@dataclass(frozen=True, slots=True)
class ServiceCall(Generic[T]):
    """HTTP request and the parser of its response."""

    method: str
    path: str
    parse_response: Callable[[Any], T]  # takes decoded JSON, or text if the response is not JSON
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    server_wait_seconds: float = 0.0  # seconds that the server may hold it


@dataclass(frozen=True, slots=True)
class ServiceMetric:
    """Value of one of the service's metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of an evaluation."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = -1  # below 1 = all tokens
    top_p: float = 1.0
    stop: Sequence[str] | Sequence[int] | None = None  # None = end-of-sequence tokens


class EvaluationArguments(TypedDict, total=False):
    """Arguments of an evaluation; only `model` is required."""

    model: Required[str]  # a saved path (tinker://...), or a base model
    against: str | None  # compare with another one of these, or with a reference model
    texts: Sequence[str | Sequence[int]]  # texts, or token ids
    prompts: Sequence[str | Sequence[int]]
    num_samples: int  # of each prompt; 8
    sampling: Sampling
    seed: int  # of samples and intervals; 0
    confidence: float  # of intervals; 0.95
    resamples: int  # of the bootstrap over texts or prompts; 2000
    # Repeating an id refers to the same evaluation, even after a crash of client or server.
    evaluation_id: str | None


def _build_record_parser(kind: type[T]) -> Callable[[Any], T]:
    return lambda data: parse_record(kind, data)


def _format_run_path(run_id: str, *parts: str) -> str:
    return "/".join(["/runs", *(quote(part, safe=":") for part in (run_id, *parts))])


def check_health() -> ServiceCall[bool]:
    """Describe the health check; its result is True if the server is up."""
    return ServiceCall("GET", "/api/v1/healthz", lambda data: bool(data.get("status") == "ok"))


def list_runs(limit: int = 100, offset: int = 0) -> ServiceCall[RunList]:
    """Describe the listing of the key's training runs, newest first."""
    return ServiceCall(
        "GET", "/runs", _build_record_parser(RunList), params={"limit": limit, "offset": offset}
    )


def fetch_run(run_id: str) -> ServiceCall[RunStatus]:
    """Describe the query for a training run."""
    return ServiceCall("GET", _format_run_path(run_id), _build_record_parser(RunStatus))


def list_checkpoints(run_id: str) -> ServiceCall[list[SavedPath]]:
    """Describe the listing of a run's saved weights, newest first, with their versions in the model registry."""
    return ServiceCall(
        "GET",
        _format_run_path(run_id) + "/checkpoints",
        lambda data: parse_record(SavedPathList, data).checkpoints,
    )


def list_requests(
    run_id: str, limit: int = 100, offset: int = 0
) -> ServiceCall[list[RequestStatus]]:
    """Describe the listing of a run's requests, newest first."""
    params = {"limit": limit, "offset": offset}
    return ServiceCall(
        "GET",
        _format_run_path(run_id) + "/requests",
        lambda data: parse_record(RequestList, data).requests,
        params=params,
    )


def fetch_request_status(run_id: str, request_id: str) -> ServiceCall[RequestStatus]:
    """Describe the query for the state of a request."""
    return ServiceCall(
        "GET",
        _format_run_path(run_id) + f"/requests/{quote(request_id, safe='')}/status",
        _build_record_parser(RequestStatus),
    )


def cancel_request(run_id: str, request_id: str) -> ServiceCall[bool]:
    """Describe the cancellation of a waiting request; its result is False if the request is running or final."""
    path = _format_run_path(run_id) + f"/requests/{quote(request_id, safe='')}/cancel"
    return ServiceCall(
        "POST", path, lambda data: parse_record(CancelledRequest, data).cancelled, body={}
    )


def fetch_queue_stats(run_id: str) -> ServiceCall[QueueStats]:
    """Describe the query for the depth of a run's queue, and quantiles of waiting and service times by kind."""
    return ServiceCall(
        "GET", _format_run_path(run_id) + "/queue/stats", _build_record_parser(QueueStats)
    )


def submit_evaluation(
    run_id: str, **arguments: Unpack[EvaluationArguments]
) -> ServiceCall[AcceptedEvaluation]:
    """Describe the submission of an evaluation, which is computed even if this program ends.

    Its id is chosen here, so that sending it twice starts one evaluation. Args: see `ServiceClient.evaluate`.
    """
    sampling = arguments.get("sampling", Sampling())
    body: dict[str, Any] = {
        **arguments,
        "evaluation_id": arguments.get("evaluation_id") or f"e-{secrets.token_hex(12)}",
        "sampling": {
            **{
                name: getattr(sampling, name)
                for name in ("max_tokens", "temperature", "top_k", "top_p")
            },
            "stop": None if sampling.stop is None else list(sampling.stop),
        },
    }
    for name in ("texts", "prompts"):
        rows = body.get(name, ())
        body[name] = [row if isinstance(row, str) else list(row) for row in rows]
    return ServiceCall(
        "POST",
        _format_run_path(run_id) + "/evaluate",
        _build_record_parser(AcceptedEvaluation),
        body=body,
    )


def fetch_evaluation(
    run_id: str, request_id: str, wait: float = 0.0
) -> ServiceCall[ModelEvaluation | None]:
    """Describe the query for an evaluation; its result is None if not finished within `wait` seconds (at most 40)."""

    def parse(data: Any) -> ModelEvaluation | None:
        return None if set(data) == {"state"} else parse_record(ModelEvaluation, data)

    path = _format_run_path(run_id) + f"/requests/{quote(request_id, safe='')}/result"
    return ServiceCall("GET", path, parse, params={"wait": wait}, server_wait_seconds=wait)


def run_evaluation(
    run_id: str, timeout: float | None, arguments: EvaluationArguments
) -> Generator[ServiceCall[Any], Any, ModelEvaluation]:
    """Yield the calls of an evaluation until its result is available, receiving the result of each call.

    Raises: BackendError after `timeout` seconds (None = never).
    """
    accepted: AcceptedEvaluation = yield submit_evaluation(run_id, **arguments)
    fetch = functools.partial(fetch_evaluation, run_id, accepted.request_id)
    late = f"the evaluation {accepted.request_id} is not finished after {timeout} s; it continues, and "
    late += "evaluation(run, request_id) fetches its result"
    return (yield from _poll_result(fetch, timeout, late))


def _poll_result(
    fetch: Callable[[float], ServiceCall[T | None]], timeout: float | None, late: str
) -> Generator[ServiceCall[Any], Any, T]:
    """Yield queries until one has a result. Raises: BackendError with the message `late`."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        wait_s = max(0.0, min(LONG_POLL_SECONDS, deadline - time.monotonic()))
        result: T | None = yield fetch(wait_s)
        if result is not None:
            return result
        if time.monotonic() >= deadline:
            raise BackendError(late)


def list_references() -> ServiceCall[list[ReferenceInfo]]:
    """Describe the listing of the frozen models that score rows."""
    return ServiceCall(
        "GET", "/references", lambda data: parse_record(ReferenceList, data).references
    )


def submit_scores(
    model: str,
    rows: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    scores_id: str | None = None,
) -> ServiceCall[AcceptedScores]:
    """Describe the submission of token rows to a reference model or reward model.

    Its id is chosen here, so that sending it twice starts one computation. Args: see `ServiceClient.score`.
    """
    body = {
        "rows": [[int(token) for token in row] for row in rows],
        "temperature": temperature,
        "scores_id": scores_id or f"s-{secrets.token_hex(12)}",
    }
    path = f"/references/{quote(model, safe='')}/scores"
    return ServiceCall("POST", path, _build_record_parser(AcceptedScores), body=body)


def fetch_scores(request_id: str, wait: float = 0.0) -> ServiceCall[ReferenceScores | None]:
    """Describe the query for scores; its result is None if not finished within `wait` seconds (at most 40)."""

    def parse(data: Any) -> ReferenceScores | None:
        return None if set(data) == {"state"} else parse_record(ReferenceScores, data)

    path = f"/references/requests/{quote(request_id, safe='')}/result"
    return ServiceCall("GET", path, parse, params={"wait": wait}, server_wait_seconds=wait)


def run_scores(
    model: str,
    rows: Sequence[Sequence[int]],
    temperature: float,
    scores_id: str | None,
    timeout: float | None,
) -> Generator[ServiceCall[Any], Any, ReferenceScores]:
    """Yield the calls of a scoring request until its result is available, receiving the result of each call.

    Raises: BackendError after `timeout` seconds (None = never).
    """
    accepted: AcceptedScores = yield submit_scores(
        model, rows, temperature=temperature, scores_id=scores_id
    )
    fetch = functools.partial(fetch_scores, accepted.request_id)
    late = f"the scores {accepted.request_id} are not finished after {timeout} s; the request continues, and "
    late += "scores(request_id) fetches its result"
    return (yield from _poll_result(fetch, timeout, late))


def list_metrics() -> ServiceCall[list[ServiceMetric]]:
    """Describe the query for the metrics of the whole service."""
    return ServiceCall("GET", "/metrics", parse_prometheus_metrics)


def parse_prometheus_metrics(text: str) -> list[ServiceMetric]:
    """Parse metrics in Prometheus's text format."""
    metrics = []
    for line in text.splitlines():
        match = _METRIC_LINE.match(line)
        if line.startswith("#") or match is None:
            continue
        labels = {
            name: _ESCAPED_CHARACTER.sub(_unescape_character, value)
            for name, value in _METRIC_LABEL.findall(match[2] or "")
        }
        metrics.append(ServiceMetric(match[1], labels, float(match[3])))
    return metrics


def _unescape_character(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
