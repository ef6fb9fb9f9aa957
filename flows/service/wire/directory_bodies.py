"""JSON bodies about sessions, results and saved weights. Names of classes are those of the routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flows.service.wire.json_body import Body, Id, Metadata, Number, Tags, Text, Ttl

__all__ = [
    "CancelFuture", "CopyWeights", "CreateSession", "FinishSession", "FuturesTarget", "Heartbeat", "RetrieveFuture",
    "RetrieveFutures", "SearchSessions", "SetProject", "SetTtl", "StatusQuery", "WeightsInfo",
]  # fmt: skip


class CreateSession(Body):
    """A client's session."""

    tags: list[Text] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class Heartbeat(Body):
    """A client that lives."""

    session_id: Id


class FinishReason(Body):
    """Type of an end."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(Body):
    """The end of a client."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class SetProject(Body):
    """The project of a session."""

    project_id: Text


class SearchOwner(Body):
    """Owners of sessions; nobody but their own key may list them."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Text] | None = None


class StatusQuery(Body):
    """A state of sessions."""

    type: Text
    reasons: list[Text] | None = None


class SearchCursor(Body):
    """The last session of the page before."""

    last_session_id: Id


class SearchSessions(Body):
    """Sessions with some properties."""

    session_id: Id | None = None
    project_ids: list[Text] | None = None
    user_metadata: Tags = Field(default_factory=dict)
    display_name: Text | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class RequestNamed(Body):
    """A request by its id."""

    request_id: Id


class RetrieveFuture(RequestNamed):
    """A question about one result."""

    allow_metadata_only: bool = False


class FuturesTarget(Body):
    """A sampling session, or a copy of it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=1 << 32)] = 0  # numbers of its samples stay below 2^63


class RetrieveFutures(Body):
    """A question about all results of a sampling session."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = Field(default_factory=list)


class CancelFuture(RequestNamed):
    """A result that nobody wants."""


class WeightsInfo(Body):
    """A question about saved weights."""

    tinker_path: Text


class CopyWeights(Body):
    """A copy of saved weights."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None


class SetTtl(Body):
    """The life of saved weights; None = for ever."""

    ttl_seconds: Ttl | None = None
