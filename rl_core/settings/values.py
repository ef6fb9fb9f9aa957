"""Values against type hints, as far as configs and settings express them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["comparison_hint", "fits", "words"]

# Comparisons by name, as other tools write them.
_COMPARISONS = {
    ">": ("greater", "greater_than", "gt", "above", "more"),
    ">=": ("greater_equal", "greater_or_equal", "greater_than_or_equal", "ge", "gte", "at_least", "min"),
    "<": ("less", "less_than", "lt", "below", "smaller", "lower"),
    "<=": ("less_equal", "less_or_equal", "less_than_or_equal", "le", "lte", "at_most", "max"),
}


def comparison_hint(value: Any, choices: Iterable[Any]) -> str:
    """The sign that a comparison's name stands for, as a remedy; "" where it is none or the sign is no choice."""
    name = str(value).strip().casefold().replace("-", "_").replace(" ", "_")
    signs = [sign for sign, names in _COMPARISONS.items() if name in names and sign in set(choices)]
    return f"; '{value}' is written '{signs[0]}'" if signs else ""


def fits(value: Any, hint: Any) -> bool:
    """True if a config value matches a type hint; hints that a config cannot express always match."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (list, tuple):
        items = [argument for argument in arguments if argument is not Ellipsis]
        return isinstance(value, list | tuple) and all(fits(item, items[0] if items else Any) for item in value)
    if origin is dict or origin is Mapping:
        return isinstance(value, Mapping) and all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if hint in (int, float):  # bool is an int to Python, not to a reader of a config; a whole number is a float
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if hint is None or hint is type(None):
        return value is None
    if isinstance(hint, type) and (hint in (str, bool) or dataclasses.is_dataclass(hint)):
        return isinstance(value, hint)
    return True


def words(hint: Any) -> str:
    """Description of a type hint, for messages."""
    if typing.get_origin(hint) is typing.Literal:
        choices = [repr(choice) for choice in typing.get_args(hint)]
        return ("one of " if len(choices) > 1 else "") + ", ".join(choices)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(words(argument) for argument in typing.get_args(hint))
    if hint is type(None):
        return "None"
    plain = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    if hint in plain:
        return plain[hint]
    return hint.__name__ if isinstance(hint, type) and not typing.get_origin(hint) else str(hint).replace("typing.", "")
