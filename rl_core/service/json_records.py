"""Plain data classes from JSON, for clients: standard library only."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from rl_core.errors import DataError

__all__ = ["record"]

T = TypeVar("T")


def record(kind: type[T], data: Any, place: str = "answer") -> T:
    """A data class of decoded JSON. Unknown keys are ignored, so newer servers can be read; types are checked.

    Raises: DataError with the place of the first key that is missing, or of another type.
    """
    if not isinstance(data, dict):
        raise DataError(f"{place}: {type(data).__name__}, expected an object")
    values = {}
    for name, hint, is_needed in _fields(typing.cast(Any, kind)):
        if name in data:
            values[name] = _value(hint, data[name], f"{place}.{name}")
        elif is_needed:
            raise DataError(f"{place}.{name}: is missing; is the server of another version?")
    return kind(**values)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, True = has no default) of each field."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return tuple(
        (field.name, hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    )


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (one for one in arguments if one is not type(None))
        return _value(hint, value, place)
    if origin is typing.Literal:
        return _checked(value in arguments, value, place, f"one of {', '.join(map(str, arguments))}")
    if origin is list:
        _checked(isinstance(value, list), value, place, "a list")
        return [_value(arguments[0], one, f"{place}[{index}]") for index, one in enumerate(value)]
    if origin is dict:
        _checked(isinstance(value, dict), value, place, "an object")
        return {name: _value(arguments[1], one, f"{place}.{name}") for name, one in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return record(hint, value, place)
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_checked(is_number, value, place, "a number"))
    fits = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    return _checked(fits, value, place, hint.__name__)


def _checked(fits: bool, value: Any, place: str, expected: str) -> Any:
    if not fits:
        raise DataError(f"{place}: {str(value)[:60]!r}, expected {expected}")
    return value
