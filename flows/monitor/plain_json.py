"""JSON for the browser of whatever runs have written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["plain_json"]


def plain_json(value: Any) -> bytes:
    """As orjson.dumps; half a surrogate pair becomes "?", an integer beyond 64 bits a text.

    Both may be in what a run has left: the name of a folder that is not UTF-8, an observation.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {_plain(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
