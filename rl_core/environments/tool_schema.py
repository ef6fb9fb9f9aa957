"""JSON schemas of tool arguments: from Python types and functions, and checks of what a policy wrote against them.

Checked are type, enum, const, anyOf, oneOf, items, properties, required, additionalProperties, the bounds of numbers,
texts and lists, and local references ($ref: '#/...'); other keywords are for the tool itself to look at.
Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.errors import SettingsError, ToolMisuse

__all__ = ["JSON_TYPES", "Kind", "check_value", "example", "function_parameters", "schema_of"]

Kind = type | Mapping[str, Any]  # of an argument: int, float, str, bool, list, dict, or a JSON schema
JSON_TYPES: dict[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"
}  # fmt: skip
_WORDS = {
    "integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda value, limit: value >= limit, "at least"),
    ("maximum", lambda value, limit: value <= limit, "at most"),
    ("exclusiveMinimum", lambda value, limit: value > limit, "above"),
    ("exclusiveMaximum", lambda value, limit: value < limit, "below"),
)
_LENGTHS = {str: ("minLength", "maxLength", "characters"), list: ("minItems", "maxItems", "items")}
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.+)")


def schema_of(kind: Kind) -> dict[str, Any]:
    """JSON schema of an argument's kind."""
    return dict(kind) if isinstance(kind, Mapping) else {"type": JSON_TYPES[kind]}


def check_value(value: Any, schema: Any, place: str, root: Mapping[str, Any] | None = None) -> None:
    """Raise ToolMisuse, naming the place, where a value is not as the schema says.

    `root`: the schema that local references point into.
    """
    if not isinstance(schema, Mapping):
        if schema is False:
            raise ToolMisuse(f"{place} must not be given")
        return
    root = schema if root is None else root
    if "$ref" in schema:
        check_value(value, _referred(str(schema["$ref"]), root), place, root)
    if "const" in schema and value != schema["const"]:
        raise ToolMisuse(f"{place} must be {_shown(schema['const'])}, not {_shown(value)}")
    if "enum" in schema and not any(type(value) is type(each) and value == each for each in schema["enum"]):
        raise ToolMisuse(f"{place} must be one of {', '.join(map(_shown, schema['enum']))}, not {_shown(value)}")
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        _check_choices(value, choices, place, root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise ToolMisuse(f"{place} must be {' or '.join(_WORDS.get(k, str(k)) for k in kinds)}, not {_shown(value)}")
    _check_size(value, schema, place)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            check_value(item, schema["items"], f"{place}[{index}]", root)
    if isinstance(value, dict):
        _check_object(value, schema, place, root)


def _check_choices(value: Any, choices: Sequence[Any], place: str, root: Mapping[str, Any]) -> None:
    problems = []
    for choice in choices:
        try:
            return check_value(value, choice, place, root)
        except ToolMisuse as misuse:
            problems.append(str(misuse))
    raise ToolMisuse("; or ".join(dict.fromkeys(problems)))


def _check_size(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        for name, holds, words in _BOUNDS:
            if isinstance(schema.get(name), int | float) and not holds(value, schema[name]):
                raise ToolMisuse(f"{place} must be {words} {schema[name]}, not {_shown(value)}")
    for kind, (low, high, unit) in _LENGTHS.items():
        if isinstance(value, kind) and not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
            wanted = f"{schema.get(low, 0)} to {schema[high]}" if high in schema else f"at least {schema[low]}"
            raise ToolMisuse(f"{place} must have {wanted} {unit}, not {len(value)}")


def _check_object(value: dict[str, Any], schema: Mapping[str, Any], place: str, root: Mapping[str, Any]) -> None:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            raise ToolMisuse(f"{place} lacks '{name}'")
    for name, item in value.items():
        if name not in properties and others is False:
            raise ToolMisuse(f"{place} has no field '{name[:64]}', only {', '.join(properties) or 'none'}")
        check_value(item, properties.get(name, others), f"{place}.{name[:64]}", root)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a local reference names; anything is allowed where there is none."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return True if found is None or found is root else found


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):  # an int to Python
        return False
    if kind == "integer":
        return (isinstance(value, int) and abs(value) < 10**18) or (isinstance(value, float) and value.is_integer())
    if kind == "number":  # the comparison is False for NaN and infinity
        return isinstance(value, int | float) and abs(value) < 1e300
    return isinstance(value, {"string": str, "array": list, "object": dict}.get(kind, object))


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:40]
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__}"


def example(schema: Mapping[str, Any]) -> Any:
    """A value that fits the schema's type, to try a template out."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(properties.get(name, {})) for name in schema.get("required", ())}
    return {"integer": 1, "number": 1.0, "string": "1", "boolean": True, "array": [], "null": None}.get(kind, "1")


def function_parameters(function: Callable[..., Any]) -> tuple[str, dict[str, dict[str, Any]], tuple[str, ...]]:
    """Description, JSON schema by argument, and the names of optional arguments, of a function with type hints.

    The description is the docstring up to its first empty line; arguments are described under 'Args:'.
    Raises: SettingsError for an argument without a type hint, or one that JSON has not.
    """
    name = getattr(function, "__name__", type(function).__name__)
    docstring = inspect.getdoc(function) or ""
    about = {match[1]: match[2].strip() for line in docstring.splitlines() if (match := _ARGUMENT.match(line))}
    hints = typing.get_type_hints(function)
    schemas: dict[str, dict[str, Any]] = {}
    optional = []
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingsError(f"tool '{name}': takes *{argument}; name its arguments one by one")
        if argument not in hints:
            raise SettingsError(f"tool '{name}': the argument {argument} has no type hint")
        schema = _of_hint(hints[argument], f"tool '{name}': the argument {argument}")
        if argument in about:
            schema["description"] = about[argument]
        if parameter.default is not parameter.empty:
            optional.append(argument)
        schemas[argument] = schema
    return " ".join(docstring.partition("\n\n")[0].split()) or name, schemas, tuple(optional)


def _of_hint(hint: Any, place: str) -> dict[str, Any]:
    """JSON schema of a type hint. Raises: SettingsError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if hint is type(None):
        return {"type": "null"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_hint(argument, place) for argument in arguments]}
    if origin is list or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return {"type": "array", "items": _of_hint(arguments[0], place)}
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {"type": "object", "additionalProperties": _of_hint(arguments[1], place)}
    raise SettingsError(f"{place} has the type {hint}, which JSON has not")
