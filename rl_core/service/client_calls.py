"""Plain data classes from JSON, for clients: standard library only.

Calls of the training service's own interface: what is sent, and what the answer becomes. No input or output.
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

RecordT = TypeVar("RecordT")


def parse_record(kind: type[RecordT], data: Any, json_path: str = "answer") -> RecordT:
    """A data class of decoded JSON. Unknown keys are ignored, so newer servers can be read; types are checked.

    Raises: DataError with the place of the first key that is missing, or of another type.
    """
    if not isinstance(data, dict):
        raise DataError(f"{json_path}: {type(data).__name__}, expected an object")
    values = {}
    for name, hint, is_needed in _list_record_fields(typing.cast(Any, kind)):
        if name in data:
            values[name] = _parse_field_value(hint, data[name], f"{json_path}.{name}")
        elif is_needed:
            raise DataError(f"{json_path}.{name}: is missing; is the server of another version?")
    return kind(**values)


@functools.cache
def _list_record_fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, True = has no default) of each field."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(kind)
    )


def _parse_field_value(hint: Any, value: Any, json_path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (one for one in arguments if one is not type(None))
        return _parse_field_value(hint, value, json_path)
    if origin is typing.Literal:
        return _require_type(
            value in arguments, value, json_path, f"one of {', '.join(map(str, arguments))}"
        )
    if origin is list:
        _require_type(isinstance(value, list), value, json_path, "a list")
        return [
            _parse_field_value(arguments[0], one, f"{json_path}[{index}]")
            for index, one in enumerate(value)
        ]
    if origin is dict:
        _require_type(isinstance(value, dict), value, json_path, "an object")
        return {
            name: _parse_field_value(arguments[1], one, f"{json_path}.{name}")
            for name, one in value.items()
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


T = TypeVar("T")

LONG_POLL_SECONDS: Final = 20.0  # of one question for a result


@dataclass(frozen=True, slots=True)
class ServiceCall(Generic[T]):
    """One HTTP request and the reading of its answer."""

    method: str
    path: str
    parse_response: Callable[[Any], T]  # of decoded JSON, or of text where the answer is none
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    server_wait_seconds: float = 0.0  # seconds that the server may hold it


@dataclass(frozen=True, slots=True)
class ServiceMetric:
    """One value of the service's metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Samples of an evaluation."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = -1  # below 1 = all tokens
    top_p: float = 1.0
    stop: Sequence[str] | Sequence[int] | None = None  # None = end-of-sequence tokens


class EvaluationArguments(TypedDict, total=False):
    """Arguments of an evaluation; all but `model` may be left out."""

    model: Required[str]  # a saved path (tinker://...), or a base model
    against: str | None  # one of these, or a reference model, beside it
    texts: Sequence[str | Sequence[int]]  # texts, or token ids
    prompts: Sequence[str | Sequence[int]]
    num_samples: int  # of each prompt; 8
    sampling: Sampling
    seed: int  # of samples and intervals; 0
    confidence: float  # of intervals; 0.95
    resamples: int  # of the bootstrap over texts or prompts; 2000
    # the same id again is the same evaluation, after a crash of either side, too
    evaluation_id: str | None


def _build_record_parser(kind: type[T]) -> Callable[[Any], T]:
    return lambda data: parse_record(kind, data)


def _format_run_path(run_id: str, *parts: str) -> str:
    return "/".join(["/runs", *(quote(part, safe=":") for part in (run_id, *parts))])


def check_health() -> ServiceCall[bool]:
    """True where the server answers."""
    return ServiceCall("GET", "/api/v1/healthz", lambda data: bool(data.get("status") == "ok"))


def list_runs(limit: int = 100, offset: int = 0) -> ServiceCall[RunList]:
    """Training runs of the key, the newest first."""
    return ServiceCall(
        "GET", "/runs", _build_record_parser(RunList), params={"limit": limit, "offset": offset}
    )


def fetch_run(run_id: str) -> ServiceCall[RunStatus]:
    """A training run."""
    return ServiceCall("GET", _format_run_path(run_id), _build_record_parser(RunStatus))


def list_checkpoints(run_id: str) -> ServiceCall[list[SavedPath]]:
    """Saved weights of a run, the newest first, with their versions in the model registry."""
    return ServiceCall(
        "GET",
        _format_run_path(run_id) + "/checkpoints",
        lambda data: parse_record(SavedPathList, data).checkpoints,
    )


def list_requests(
    run_id: str, limit: int = 100, offset: int = 0
) -> ServiceCall[list[RequestStatus]]:
    """Requests of a run, the newest first."""
    params = {"limit": limit, "offset": offset}
    return ServiceCall(
        "GET",
        _format_run_path(run_id) + "/requests",
        lambda data: parse_record(RequestList, data).requests,
        params=params,
    )


def fetch_request_status(run_id: str, request_id: str) -> ServiceCall[RequestStatus]:
    """State of a request."""
    return ServiceCall(
        "GET",
        _format_run_path(run_id) + f"/requests/{quote(request_id, safe='')}/status",
        _build_record_parser(RequestStatus),
    )


def cancel_request(run_id: str, request_id: str) -> ServiceCall[bool]:
    """Cancel a request that waits. False = it runs, or is final."""
    path = _format_run_path(run_id) + f"/requests/{quote(request_id, safe='')}/cancel"
    return ServiceCall(
        "POST", path, lambda data: parse_record(CancelledRequest, data).cancelled, body={}
    )


def fetch_queue_stats(run_id: str) -> ServiceCall[QueueStats]:
    """Depth of a run's queue, and quantiles of waiting and service times, by kind."""
    return ServiceCall(
        "GET", _format_run_path(run_id) + "/queue/stats", _build_record_parser(QueueStats)
    )


def submit_evaluation(
    run_id: str, **arguments: Unpack[EvaluationArguments]
) -> ServiceCall[AcceptedEvaluation]:
    """Queue an evaluation and return at once; it is computed although this program ends.

    Its id is drawn here, so that sending it twice is one evaluation. Args: see `ServiceClient.evaluate`.
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
        body[name] = [one if isinstance(one, str) else list(one) for one in body.get(name, ())]
    return ServiceCall(
        "POST",
        _format_run_path(run_id) + "/evaluate",
        _build_record_parser(AcceptedEvaluation),
        body=body,
    )


def fetch_evaluation(
    run_id: str, request_id: str, wait: float = 0.0
) -> ServiceCall[ModelEvaluation | None]:
    """The result of an evaluation; None = not finished within `wait` seconds (at most 40)."""

    def read(data: Any) -> ModelEvaluation | None:
        return None if set(data) == {"state"} else parse_record(ModelEvaluation, data)

    path = _format_run_path(run_id) + f"/requests/{quote(request_id, safe='')}/result"
    return ServiceCall("GET", path, read, params={"wait": wait}, server_wait_seconds=wait)


def run_evaluation(
    run_id: str, timeout: float | None, arguments: EvaluationArguments
) -> Generator[ServiceCall[Any], Any, ModelEvaluation]:
    """The calls of an evaluation one after the other, until its result is there: takes the answer to each.

    Raises: BackendError after `timeout` seconds (None = never).
    """
    promise: AcceptedEvaluation = yield submit_evaluation(run_id, **arguments)
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        hold = max(0.0, min(LONG_POLL_SECONDS, end - time.monotonic()))
        found: ModelEvaluation | None = yield fetch_evaluation(run_id, promise.request_id, hold)
        if found is not None:
            return found
        if time.monotonic() >= end:
            raise BackendError(
                f"the evaluation {promise.request_id} is not finished after {timeout} s; it goes on, and "
                "evaluation(run, request_id) asks for it again"
            )


def list_metrics() -> ServiceCall[list[ServiceMetric]]:
    """Metrics of the service as a whole."""
    return ServiceCall("GET", "/metrics", parse_prometheus_metrics)


_METRIC_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_METRIC_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED_CHARACTER = re.compile(r"\\(.)")


def parse_prometheus_metrics(text: str) -> list[ServiceMetric]:
    """Metrics of Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#") and (match := _METRIC_LINE.match(line)):
            labels = {
                name: _ESCAPED_CHARACTER.sub(lambda one: "\n" if one[1] == "n" else one[1], value)
                for name, value in _METRIC_LABEL.findall(match[2] or "")
            }
            found.append(ServiceMetric(match[1], labels, float(match[3])))
    return found
