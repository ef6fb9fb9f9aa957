"""States of runs, requests, queue and saved paths as plain data, which the server describes and the client reads.

Standard library only: clients import it without torch. Times are seconds since 1970, durations seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "CancelledRequest",
    "EvaluationPromise",
    "KindStats",
    "QueueStats",
    "RequestList",
    "RequestState",
    "RequestStatus",
    "RunList",
    "RunStatus",
    "SavedPath",
    "SavedPathList",
]

RequestState = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """State of one request."""

    request_id: str
    kind: str
    seq: int  # place in the order of its run; of an evaluation a number made of its id
    state: RequestState
    accepted: float
    started: float | None
    finished: float | None
    waited_seconds: float | None
    served_seconds: float | None
    answer_bytes: int
    error: str | None
    category: str | None  # whose fault: user or server


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """Requests of a training run, the newest first."""

    requests: list[RequestStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledRequest:
    """Answer to a cancellation."""

    request_id: str
    cancelled: bool  # False = it runs, or is final


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPromise:
    """An accepted evaluation; its result is at `/runs/{run}/requests/{request_id}/result`."""

    request_id: str
    evaluation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStats:
    """Requests of one kind: how many wait and run, and quantiles (0.5, 0.9, 0.99) over the newest finished ones."""

    waiting: int
    running: int
    finished: int
    waited_seconds: dict[str, float]
    served_seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The queue of one training run."""

    run_id: str
    depth: int
    kinds: dict[str, KindStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A training run."""

    run_id: str
    base_model: str
    state: Literal["creating", "live", "failed", "unloaded"]
    steps: int  # updates up to its newest answered one
    lora_rank: int | None  # None = all weights are trained
    created: float
    last_request: float
    user_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """Training runs of the caller, the newest first."""

    runs: list[RunStatus]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPath:
    """Saved weights."""

    path: str  # tinker://RUN/KIND/NAME
    kind: Literal["weights", "sampler_weights", "external_weights"]
    steps: int  # updates of the run
    bytes: int
    created: float
    expires: float | None
    public: bool
    registration: Literal["none", "waiting", "done", "failed"]
    version: str | None  # NAME/NUMBER in the model registry: what `posttrain promote` takes
    data_digest: str = ""  # SHA-256 of the data that the weights were trained on, in order; "" = none, or not known


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPathList:
    """Saved weights of a training run, the newest first."""

    checkpoints: list[SavedPath]
