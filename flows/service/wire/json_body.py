"""A JSON body of a request, with bounds; unknown keys are ignored, so newer clients can be served."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rl_core.errors import ServiceError

__all__ = ["Body", "Finite", "Id", "Metadata", "Number", "Seq", "Tags", "Text", "TrainingHead", "Ttl", "read_body"]

MAX_ID = (1 << 63) - 1
Seq = Annotated[int, Field(ge=1, le=MAX_ID)]
Number = Annotated[int, Field(ge=0, le=MAX_ID)]
Id = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=10_000)]
Tags = Annotated[dict[str, str], Field(max_length=100)]
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _without_infinities(found: dict[str, Any]) -> dict[str, Any]:
    """Refuse what JSON has no word for, though parsers take it: no database and no answer could hold it."""
    left: list[Any] = [found]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("NaN and infinite numbers are no JSON")
    return found


Metadata = Annotated[dict[str, Any], AfterValidator(_without_infinities)]  # of a client, kept and given back as it is


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
        found = "" if first["type"] == "missing" else f", not {repr(first['input'])[:100]}"
        more = f" ({error.error_count()} faults in all)" if error.error_count() > 1 else ""
        raise ServiceError(f"{place}: {first['msg']}{found}{more}", "user") from None
