"""JSON schemas of tool arguments: built from Python types, and checked against what a policy wrote.

Checked are type, enum, const, anyOf, oneOf, items, properties, required, additionalProperties, the bounds of numbers,
texts and lists, and local references ($ref: '#/...'); other keywords are left to the tool.
Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.errors import ToolMisuse

ArgumentType = type | Mapping[str, Any]  # int, float, str, bool, list, dict, or a JSON schema
JSON_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_JSON_TYPE_DESCRIPTIONS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda value, limit: value >= limit, "at least"),
    ("maximum", lambda value, limit: value <= limit, "at most"),
    ("exclusiveMinimum", lambda value, limit: value > limit, "above"),
    ("exclusiveMaximum", lambda value, limit: value < limit, "below"),
)
_LENGTHS = {str: ("minLength", "maxLength", "characters"), list: ("minItems", "maxItems", "items")}


def build_argument_schema(argument_type: ArgumentType) -> dict[str, Any]:
    """Build the JSON schema of an argument type."""
    if isinstance(argument_type, Mapping):
        return dict(argument_type)
    return {"type": JSON_TYPES[argument_type]}


def check_against_schema(
    value: Any, schema: Any, path: str, root: Mapping[str, Any] | None = None
) -> None:
    """Raise ToolMisuse, naming the path, if a value does not match the schema.

    Args:
        root: the schema that local references point into.
    """
    if not isinstance(schema, Mapping):
        if schema is False:
            raise ToolMisuse(f"{path} must not be given")
        return
    root = schema if root is None else root
    if "$ref" in schema:
        check_against_schema(value, _resolve_reference(str(schema["$ref"]), root), path, root)
    if "const" in schema and value != schema["const"]:
        raise ToolMisuse(
            f"{path} must be {format_short_json(schema['const'])}, not {format_short_json(value)}"
        )
    if "enum" in schema and not any(
        type(value) is type(each) and value == each for each in schema["enum"]
    ):
        choices_text = ", ".join(map(format_short_json, schema["enum"]))
        raise ToolMisuse(f"{path} must be one of {choices_text}, not {format_short_json(value)}")
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        _check_choices(value, choices, path, root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_json_type(value, kind) for kind in kinds):
        kinds_text = " or ".join(_JSON_TYPE_DESCRIPTIONS.get(kind, str(kind)) for kind in kinds)
        raise ToolMisuse(f"{path} must be {kinds_text}, not {format_short_json(value)}")
    _check_size(value, schema, path)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            check_against_schema(item, schema["items"], f"{path}[{index}]", root)
    if isinstance(value, dict):
        _check_object(value, schema, path, root)


def _check_choices(value: Any, choices: Sequence[Any], path: str, root: Mapping[str, Any]) -> None:
    problems = []
    for choice in choices:
        try:
            return check_against_schema(value, choice, path, root)
        except ToolMisuse as misuse:
            problems.append(str(misuse))
    raise ToolMisuse("; or ".join(dict.fromkeys(problems)))


def _check_size(value: Any, schema: Mapping[str, Any], path: str) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        for name, holds, words in _BOUNDS:
            if isinstance(schema.get(name), int | float) and not holds(value, schema[name]):
                raise ToolMisuse(
                    f"{path} must be {words} {schema[name]}, not {format_short_json(value)}"
                )
    for kind, (low, high, unit) in _LENGTHS.items():
        if not isinstance(value, kind):
            continue
        if not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
            allowed = f"at least {schema.get(low)}"
            if high in schema:
                allowed = f"{schema.get(low, 0)} to {schema[high]}"
            raise ToolMisuse(f"{path} must have {allowed} {unit}, not {len(value)}")


def _check_object(
    value: dict[str, Any], schema: Mapping[str, Any], path: str, root: Mapping[str, Any]
) -> None:
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            raise ToolMisuse(f"{path} lacks '{name}'")
    for name, item in value.items():
        if name not in properties and additional is False:
            raise ToolMisuse(
                f"{path} has no field '{name[:64]}', only {', '.join(properties) or 'none'}"
            )
        check_against_schema(item, properties.get(name, additional), f"{path}.{name[:64]}", root)


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema that a local reference names; True (anything) if there is none."""
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return True if node is None or node is root else node


def _is_json_type(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):  # an int to Python
        return False
    if kind == "integer":
        return (isinstance(value, int) and abs(value) < 10**18) or (
            isinstance(value, float) and value.is_integer()
        )
    if kind == "number":  # the comparison is False for NaN and infinity
        return isinstance(value, int | float) and abs(value) < 1e300
    return isinstance(value, {"string": str, "array": list, "object": dict}.get(kind, object))


def convert_written_text(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for where the schema takes no text: "3" for an integer, "true", "[1]".

    Families that write arguments in XML have no other values than texts. A text that does not fit is returned as it is.
    """
    if not isinstance(value, str) or _accepts_text(value, schema):
        return value
    text = value.strip()
    for candidate in (text, _PYTHON_CONSTANTS.get(text.lower(), text)):
        try:
            converted = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if not isinstance(converted, str):
            return _convert_fitting(converted, value, schema)
    if text[:1] in ("[", "{"):  # Qwen3-Coder writes lists and objects in Python's notation, too
        try:
            return _convert_fitting(ast.literal_eval(text), value, schema)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return value
    return value


_PYTHON_CONSTANTS = {"true": "true", "false": "false", "none": "null"}


def _convert_fitting(converted: Any, text: str, schema: Mapping[str, Any]) -> Any:
    """Return the converted value if it fits the schema, otherwise the text."""
    try:
        check_against_schema(converted, schema, "")
    except ToolMisuse:
        return text
    return converted


def _accepts_text(value: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema takes this text as it is."""
    try:
        check_against_schema(value, schema, "")
    except ToolMisuse:
        return False
    return True


def format_short_json(value: Any) -> str:
    """Format a value as JSON of at most 40 characters, for messages."""
    try:
        return json.dumps(value)[:40]
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__}"


def build_example_value(schema: Mapping[str, Any]) -> Any:
    """Build a value that fits the schema's type, for trying out a chat template."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {
            name: build_example_value(properties.get(name, {}))
            for name in schema.get("required", ())
        }
    return {
        "integer": 1,
        "number": 1.0,
        "string": "1",
        "boolean": True,
        "array": [],
        "null": None,
    }.get(kind, "1")
