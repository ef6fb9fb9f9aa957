"""Rows of the store as plain data. Times are seconds since 1970."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rl_core.errors import ServiceError

RequestKind = Literal[
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "create_sampler",
    "sample",
    "unload_model",
    "evaluate",
    "score",
]
RequestState = Literal["waiting", "running", "done", "failed", "cancelled"]
ContentType = Literal["json", "protobuf"]
_LINE_BY_KIND = {
    "create_sampler": "sampler",
    "sample": "sample",
    "evaluate": "evaluate",
    "score": "score",
}


def resolve_request_line(kind: str) -> str:
    """Return the line in which a target's requests queue.

    The line `training` is computed in the order of seq, the other lines in any order.
    """
    return _LINE_BY_KIND.get(kind, "training")


def replace_unstorable(text: str) -> str:
    """Replace characters that some database refuses: NUL (PostgreSQL) and lone surrogates (not valid UTF-8)."""
    return text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


class SequenceIdReused(ServiceError):
    """Sequence id that was used before with another payload."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "user")


class RequestForgotten(ServiceError):
    """Repeated request whose answer was fetched, or expired, and has been dropped."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "user")


class KeyLimitExceeded(ServiceError):
    """Limit of an API key that has been reached; the request may be repeated later."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, "user")
        self.retry_after = retry_after  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """Request as the server accepts it."""

    kind: RequestKind
    owner: str  # id of the API key
    session_id: str
    target: str  # model_id of training; sampling_session_id of sample and create_sampler
    seq: int  # training: from 1 without gaps, 0 = the creation; otherwise any number, once
    payload: bytes  # body, decompressed
    content_type: ContentType
    facts: Mapping[str, Any] = field(
        default_factory=dict
    )  # JSON decided at acceptance: seed, ids, path
    deadline: float | None = None  # cancelled if not started by then

    @property
    def digest(self) -> str:
        """SHA-256 that identifies a repeated request."""
        head = f"{self.kind}\0{self.content_type}\0".encode()
        return hashlib.sha256(head + self.payload).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest(NewRequest):
    """Accepted request, with its answer if it has one."""

    request_id: str
    place: int  # in the order of acceptance
    state: RequestState
    accepted: float
    started: float | None = None
    finished: float | None = None
    answer: bytes | None = None
    answer_type: ContentType | None = None
    answer_digest: str | None = None  # SHA-256 of the answer; stays when the answer is dropped
    error: str | None = None  # of failed and cancelled requests
    category: Literal["user", "server"] | None = None
    forgotten: bool = False  # the answer was fetched or has expired, and was dropped
    deaths: int = 0  # number of workers that crashed while computing it

    @property
    def is_final(self) -> bool:
        """True if the request is done, failed or cancelled."""
        return self.finished is not None


@dataclass(frozen=True, slots=True)
class ResultBody:
    """Body of a successful answer."""

    body: bytes
    content_type: ContentType


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """Session of a client."""

    session_id: str
    owner: str
    created: float
    touched: float  # newest heartbeat
    finished: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # tags, user_metadata, sdk_version, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRunRecord:
    """Training run. The record exists from the acceptance of its creation on."""

    model_id: str
    owner: str
    session_id: str
    created: float
    touched: float  # newest accepted request
    state: Literal["creating", "live", "failed", "unloaded"] = "creating"
    base: str = ""  # name of the base model, known when it is live
    steps: int = 0  # updates
    next_seq: int = 0  # the request to be computed next
    covered: int = -1  # last request contained in the newest snapshot
    covered_before: int = -1  # last request contained in the snapshot before it
    published: str | None = None  # folder of the weights that in-flight samplers use
    facts: Mapping[str, Any] = field(default_factory=dict)  # decided at acceptance
    info: Mapping[str, Any] = field(
        default_factory=dict
    )  # adapter, optimizer, num_trained of the live run


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """Sampler of a base model or of saved weights."""

    sampler_id: str
    owner: str
    session_id: str
    created: float
    touched: float
    base: str = ""
    path: str | None = None  # tinker:// path of its weights
    model_id: str | None = None  # run of its weights
    folder: str | None = (
        None  # of its weights, below the service's; None = base model, or in flight
    )
    kind: Literal["snapshot", "inflight"] = "snapshot"
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    """Distributions that a sample recorded for one of its sequences."""

    sequence_id: str
    session_id: str
    touched: float  # sampling, or the newest training request that used it
    temperature: float  # of the recorded distributions
    content: bytes  # safetensors; see `worker.recorded_sequences`


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """Saved weights under a tinker:// path."""

    path: str
    model_id: str
    owner: str
    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str
    folder: str  # below the service's folder
    created: float
    steps: int = 0  # updates of the run
    bytes: int = 0
    expires: float | None = None
    public: bool = False
    base: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # user_metadata, and the run's info
    version: str | None = None  # NAME/NUMBER in the model registry
    registration: Literal["none", "waiting", "done", "failed"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """API key without its secret. None = no limit."""

    key_id: str
    name: str
    created: float
    requests_per_minute: int | None = None
    queue: int | None = None  # requests that wait or run
    revoked: float | None = None
    used: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Action of a key or of an operator."""

    place: int
    time: float
    owner: str
    action: str
    subject: str
    detail: str = ""


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Part of a list."""

    items: list[Item]
    total: int
