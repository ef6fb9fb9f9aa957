"""Calls of the training service's own interface: what is sent, and what the answer becomes. No input or output."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Required, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from rl_core.errors import BackendError
from rl_core.service.evaluation_answers import ModelEvaluation
from rl_core.service.json_records import record
from rl_core.service.status_answers import (
    CancelledRequest,
    EvaluationPromise,
    QueueStats,
    RequestList,
    RequestStatus,
    RunList,
    RunStatus,
    SavedPath,
    SavedPathList,
)

__all__ = ["ServiceCall", "ServiceMetric", "EvaluationQuestion", "Sampling"]

T = TypeVar("T")

HOLD_SECONDS: Final = 20.0  # of one question for a result


@dataclass(frozen=True, slots=True)
class ServiceCall(Generic[T]):
    """One HTTP request and the reading of its answer."""

    method: str
    path: str
    read: Callable[[Any], T]  # of decoded JSON, or of text where the answer is none
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    held: float = 0.0  # seconds that the server may hold it


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


class EvaluationQuestion(TypedDict, total=False):
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
    evaluation_id: str | None  # the same id again is the same evaluation, after a crash of either side, too


def _of(kind: type[T]) -> Callable[[Any], T]:
    return lambda data: record(kind, data)


def _run(run_id: str, *more: str) -> str:
    return "/".join(["/runs", *(quote(part, safe=":") for part in (run_id, *more))])


def healthy() -> ServiceCall[bool]:
    """True where the server answers."""
    return ServiceCall("GET", "/api/v1/healthz", lambda data: bool(data.get("status") == "ok"))


def runs(limit: int = 100, offset: int = 0) -> ServiceCall[RunList]:
    """Training runs of the key, the newest first."""
    return ServiceCall("GET", "/runs", _of(RunList), params={"limit": limit, "offset": offset})


def run(run_id: str) -> ServiceCall[RunStatus]:
    """A training run."""
    return ServiceCall("GET", _run(run_id), _of(RunStatus))


def checkpoints(run_id: str) -> ServiceCall[list[SavedPath]]:
    """Saved weights of a run, the newest first, with their versions in the model registry."""
    return ServiceCall("GET", _run(run_id) + "/checkpoints", lambda data: record(SavedPathList, data).checkpoints)


def requests(run_id: str, limit: int = 100, offset: int = 0) -> ServiceCall[list[RequestStatus]]:
    """Requests of a run, the newest first."""
    params = {"limit": limit, "offset": offset}
    return ServiceCall(
        "GET", _run(run_id) + "/requests", lambda data: record(RequestList, data).requests, params=params
    )


def status(run_id: str, request_id: str) -> ServiceCall[RequestStatus]:
    """State of a request."""
    return ServiceCall("GET", _run(run_id) + f"/requests/{quote(request_id, safe='')}/status", _of(RequestStatus))


def cancel(run_id: str, request_id: str) -> ServiceCall[bool]:
    """Cancel a request that waits. False = it runs, or is final."""
    path = _run(run_id) + f"/requests/{quote(request_id, safe='')}/cancel"
    return ServiceCall("POST", path, lambda data: record(CancelledRequest, data).cancelled, body={})


def queue_stats(run_id: str) -> ServiceCall[QueueStats]:
    """Depth of a run's queue, and quantiles of waiting and service times, by kind."""
    return ServiceCall("GET", _run(run_id) + "/queue/stats", _of(QueueStats))


def submit_evaluation(run_id: str, **question: Unpack[EvaluationQuestion]) -> ServiceCall[EvaluationPromise]:
    """Queue an evaluation and return at once; it is computed although this program ends.

    Its id is drawn here, so that sending it twice is one evaluation. Args: see `ServiceClient.evaluate`.
    """
    sampling = question.get("sampling", Sampling())
    body: dict[str, Any] = {
        **question,
        "evaluation_id": question.get("evaluation_id") or f"e-{secrets.token_hex(12)}",
        "sampling": {
            **{name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_k", "top_p")},
            "stop": None if sampling.stop is None else list(sampling.stop),
        },
    }
    for name in ("texts", "prompts"):
        body[name] = [one if isinstance(one, str) else list(one) for one in body.get(name, ())]
    return ServiceCall("POST", _run(run_id) + "/evaluate", _of(EvaluationPromise), body=body)


def evaluation(run_id: str, request_id: str, wait: float = 0.0) -> ServiceCall[ModelEvaluation | None]:
    """The result of an evaluation; None = not finished within `wait` seconds (at most 40)."""

    def read(data: Any) -> ModelEvaluation | None:
        return None if set(data) == {"state"} else record(ModelEvaluation, data)

    path = _run(run_id) + f"/requests/{quote(request_id, safe='')}/result"
    return ServiceCall("GET", path, read, params={"wait": wait}, held=wait)


def evaluate(
    run_id: str, timeout: float | None, question: EvaluationQuestion
) -> Generator[ServiceCall[Any], Any, ModelEvaluation]:
    """The calls of an evaluation one after the other, until its result is there: takes the answer to each.

    Raises: BackendError after `timeout` seconds (None = never).
    """
    promise: EvaluationPromise = yield submit_evaluation(run_id, **question)
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        hold = max(0.0, min(HOLD_SECONDS, end - time.monotonic()))
        found: ModelEvaluation | None = yield evaluation(run_id, promise.request_id, hold)
        if found is not None:
            return found
        if time.monotonic() >= end:
            raise BackendError(
                f"the evaluation {promise.request_id} is not finished after {timeout} s; it goes on, and "
                "evaluation(run, request_id) asks for it again"
            )


def metrics() -> ServiceCall[list[ServiceMetric]]:
    """Metrics of the service as a whole."""
    return ServiceCall("GET", "/metrics", parsed_metrics)


_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def parsed_metrics(text: str) -> list[ServiceMetric]:
    """Metrics of Prometheus' text format."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#") and (match := _LINE.match(line)):
            labels = {
                name: _ESCAPED.sub(lambda one: "\n" if one[1] == "n" else one[1], value)
                for name, value in _LABEL.findall(match[2] or "")
            }
            found.append(ServiceMetric(match[1], labels, float(match[3])))
    return found
