"""A JSON body of a request, with bounds; unknown keys are ignored, so newer clients can be served."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rl_core.errors import ServiceError

__all__ = [
    "Body", "Finite", "Id", "Metadata", "Number", "Seq", "Tags", "Text", "TrainingHead", "Ttl", "read_body",
]  # fmt: skip

MAX_ID = (1 << 63) - 1
MOST_METADATA = 1 << 16  # bytes as JSON: lists of runs and sessions carry it


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(metadata, allow_nan=False))
    except ValueError:
        raise ValueError("holds a number that is not finite; write it as text") from None
    if size > MOST_METADATA:
        raise ValueError(f"has {size} bytes as JSON; at most {MOST_METADATA} are kept")
    return metadata


Seq = Annotated[int, Field(ge=1, le=MAX_ID)]
Number = Annotated[int, Field(ge=0, le=MAX_ID)]
Id = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_without_nul)]
Text = Annotated[str, Field(max_length=10_000), AfterValidator(_without_nul)]
Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
Tags = Annotated[dict[str, str], Field(max_length=100)]
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class TrainingHead(Body):
    """Fields that give a request its place in a run's order."""

    model_id: Id
    seq_id: Seq


T = TypeVar("T", bound=Body)


def read_body(kind: type[T], payload: bytes) -> T:
    """A body as its class. Raises: ServiceError (user) with the first fault and its place."""
    try:
        return kind.model_validate_json(payload or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        is_said = first["type"] in ("missing", "value_error")  # the message says what was found
        found = "" if is_said else f", not {repr(first['input'])[:100]}"
        more = f" ({error.error_count()} faults in all)" if error.error_count() > 1 else ""
        raise ServiceError(f"{place}: {first['msg'].removeprefix('Value error, ')}{found}{more}", "user") from None
