"""JSON schemas of tool arguments: from Python types and functions, and checks of what a policy wrote against them.

Checked are type, enum, const, anyOf, oneOf, items, properties, required, additionalProperties, the bounds of numbers,
texts and lists, and local references ($ref: '#/...'); other keywords are for the tool itself to look at.
Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12/json-schema-validation.

Tools of a policy: call parsing, execution within limits, descriptions for prompts.

These call formats are always accepted:

    line     the last non-empty line starts with a tool's name:    zoom 2 3
    hermes   a JSON object in tags, as in Qwen and Hermes models:  <tool_call>{"name": "zoom", ...}</tool_call>
    native   the object alone, or after a model's own marker:      {"name": "zoom", "parameters": {...}} (Llama 3.1)
             [TOOL_CALLS][{"name": "zoom", ...}] or [TOOL_CALLS]zoom[ARGS]{...} (Mistral)

Several calls of one turn are written one after the other: as many <tool_call> tags, or objects in Mistral's list.

In the last two the object may also be an OpenAI-style call: {"type": "function", "function": {"name": ..., "arguments":
"{...}"}}, with the arguments as an object or a JSON string.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.model_text import replace_unprintable, strip_thought
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse, suggest_name
from rl_core.time_limits import CallTimeout, TooManyHungCalls, call_with_timeout
from rl_core.types import ToolCall

ArgumentType = (
    type | Mapping[str, Any]
)  # of an argument: int, float, str, bool, list, dict, or a JSON schema
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
_ARGUMENT_DOC_LINE = re.compile(r"^\s+\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.+)")


def build_argument_schema(argument_type: ArgumentType) -> dict[str, Any]:
    """JSON schema of an argument's kind."""
    return (
        dict(argument_type)
        if isinstance(argument_type, Mapping)
        else {"type": JSON_TYPES[argument_type]}
    )


def check_against_schema(
    value: Any, schema: Any, path: str, root: Mapping[str, Any] | None = None
) -> None:
    """Raise ToolMisuse, naming the place, where a value is not as the schema says.

    `root`: the schema that local references point into.
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
            f"{path} must be {_format_short_json(schema['const'])}, not {_format_short_json(value)}"
        )
    if "enum" in schema and not any(
        type(value) is type(each) and value == each for each in schema["enum"]
    ):
        raise ToolMisuse(
            f"{path} must be one of {', '.join(map(_format_short_json, schema['enum']))}, not {_format_short_json(value)}"
        )
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        _check_choices(value, choices, path, root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_json_type(value, kind) for kind in kinds):
        raise ToolMisuse(
            f"{path} must be {' or '.join(_JSON_TYPE_DESCRIPTIONS.get(k, str(k)) for k in kinds)}, not {_format_short_json(value)}"
        )
    _check_size(value, schema, path)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            check_against_schema(item, schema["items"], f"{path}[{index}]", root)
    if isinstance(value, dict):
        _check_object(value, schema, path, root)


def _check_choices(value: Any, choices: Sequence[Any], place: str, root: Mapping[str, Any]) -> None:
    problems = []
    for choice in choices:
        try:
            return check_against_schema(value, choice, place, root)
        except ToolMisuse as misuse:
            problems.append(str(misuse))
    raise ToolMisuse("; or ".join(dict.fromkeys(problems)))


def _check_size(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        for name, holds, words in _BOUNDS:
            if isinstance(schema.get(name), int | float) and not holds(value, schema[name]):
                raise ToolMisuse(
                    f"{place} must be {words} {schema[name]}, not {_format_short_json(value)}"
                )
    for kind, (low, high, unit) in _LENGTHS.items():
        if isinstance(value, kind) and not schema.get(low, 0) <= len(value) <= schema.get(
            high, len(value)
        ):
            wanted = (
                f"{schema.get(low, 0)} to {schema[high]}"
                if high in schema
                else f"at least {schema[low]}"
            )
            raise ToolMisuse(f"{place} must have {wanted} {unit}, not {len(value)}")


def _check_object(
    value: dict[str, Any], schema: Mapping[str, Any], place: str, root: Mapping[str, Any]
) -> None:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            raise ToolMisuse(f"{place} lacks '{name}'")
    for name, item in value.items():
        if name not in properties and others is False:
            raise ToolMisuse(
                f"{place} has no field '{name[:64]}', only {', '.join(properties) or 'none'}"
            )
        check_against_schema(item, properties.get(name, others), f"{place}.{name[:64]}", root)


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a local reference names; anything is allowed where there is none."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = (
            found.get(part.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, Mapping)
            else None
        )
    return True if found is None or found is root else found


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


def _format_short_json(value: Any) -> str:
    try:
        return json.dumps(value)[:40]
    except (ValueError, RecursionError, TypeError):
        return f"a {type(value).__name__}"


def build_example_value(schema: Mapping[str, Any]) -> Any:
    """A value that fits the schema's type, to try a template out."""
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


def read_function_parameters(
    function: Callable[..., Any],
) -> tuple[str, dict[str, dict[str, Any]], tuple[str, ...]]:
    """Description, JSON schema by argument, and the names of optional arguments, of a function with type hints.

    The description is the docstring up to its first empty line; arguments are described under 'Args:'.
    Raises: SettingsError for an argument without a type hint, or one that JSON has not.
    """
    name = getattr(function, "__name__", type(function).__name__)
    docstring = inspect.getdoc(function) or ""
    about = {
        match[1]: match[2].strip()
        for line in docstring.splitlines()
        if (match := _ARGUMENT_DOC_LINE.match(line))
    }
    hints = typing.get_type_hints(function)
    schemas: dict[str, dict[str, Any]] = {}
    optional = []
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingsError(f"tool '{name}': takes *{argument}; name its arguments one by one")
        if argument not in hints:
            raise SettingsError(f"tool '{name}': the argument {argument} has no type hint")
        schema = _build_hint_schema(hints[argument], f"tool '{name}': the argument {argument}")
        if argument in about:
            schema["description"] = about[argument]
        if parameter.default is not parameter.empty:
            optional.append(argument)
        schemas[argument] = schema
    return " ".join(docstring.partition("\n\n")[0].split()) or name, schemas, tuple(optional)


def _build_hint_schema(hint: Any, description: str) -> dict[str, Any]:
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
        return {"anyOf": [_build_hint_schema(argument, description) for argument in arguments]}
    if origin is list or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return {"type": "array", "items": _build_hint_schema(arguments[0], description)}
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {
            "type": "object",
            "additionalProperties": _build_hint_schema(arguments[1], description),
        }
    raise SettingsError(f"{description} has the type {hint}, which JSON has not")


CallFormat = Literal["line", "hermes"]

PYTHON_TAG, TOOL_CALLS, ARGS = (
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
)  # of Llama 3.1 and Mistral
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
MAX_CALLS = 16  # of one turn

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_INTEGER = re.compile(
    r"[+-]?[0-9]{1,18}"
)  # int() alone would also accept '1_000' and non-ASCII digits
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_TYPE_DESCRIPTIONS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool; its function takes the context of `Toolset.bind`, then keyword arguments."""

    name: str
    description: str
    # Argument name -> int, float, str, bool, list, dict or a JSON schema, in the order of the line format.
    parameters: Mapping[str, ArgumentType]
    function: Callable[..., Any]  # its result is shown to the policy as str()
    timeout_s: float | None = (
        None  # None = pure and fast: runs on the caller's thread, without a limit
    )
    max_output_chars: int = 2000  # a longer output is an error
    optional: tuple[str, ...] = ()  # arguments that may be left out
    is_blocking: bool = False  # True = it waits for something, with a limit of its own: calls of one turn run at once

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SettingsError(
                f"tool name {self.name!r} must be letters, digits, '_' or '-', starting with a letter"
            )
        for parameter, kind in self.parameters.items():
            is_named = (
                bool(parameter.split()) if isinstance(kind, Mapping) else parameter.isidentifier()
            )
            if not (isinstance(kind, Mapping) or kind in JSON_TYPES) or not is_named:
                raise SettingsError(
                    f"tool '{self.name}': {parameter!r} must have a name and int, float, str, bool, list, dict or a "
                    "JSON schema"
                )
        for parameter in self.optional:
            if parameter not in self.parameters:
                raise SettingsError(
                    f"tool '{self.name}': optional: {suggest_name(parameter, self.parameters)}"
                )
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise SettingsError(
                f"tool '{self.name}': timeout_s {self.timeout_s} must be above 0 and finite, or None"
            )
        if self.max_output_chars < 1:
            raise SettingsError(
                f"tool '{self.name}': max_output_chars {self.max_output_chars} must be at least 1"
            )

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], timeout_s: float | None = None, **options: Any
    ) -> Tool:
        """Tool of a function with type hints and a docstring; see `tool_schema.read_function_parameters`."""
        description, parameters, optional = read_function_parameters(function)
        return cls(
            function.__name__,
            description,
            parameters,
            function,
            timeout_s,
            optional=optional,
            **options,
        )

    @property
    def usage(self) -> str:
        """Call syntax of the line format, as in 'zoom ROW [COLUMN]'."""
        names = ((name.upper(), name in self.optional) for name in self.parameters)
        return " ".join(
            [self.name, *(f"[{name}]" if is_optional else name for name, is_optional in names)]
        )


class Toolset:
    """The tools of one environment.

    `bind(context)` returns the same tools bound to the hidden state of one episode (its grid, its database), passed to
    every function as its first positional arguments.
    """

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        tools = list(tools)
        self._tools = {tool.name: tool for tool in tools}
        self._context: tuple[Any, ...] = ()
        if len(self._tools) != len(tools):
            raise SettingsError(f"two tools share a name: {sorted(tool.name for tool in tools)}")

    @property
    def tools(self) -> dict[str, Tool]:
        """Tools by name."""
        return dict(self._tools)

    def open_session(self) -> Toolset:
        """The tools for one episode; those with sessions get one of their own."""
        return self

    def close(self) -> None:
        """End the episode's sessions, where there are some."""

    def bind(self, *context: Any) -> Toolset:
        """The same tools with `context` bound."""
        bound = Toolset.__new__(Toolset)
        bound._tools, bound._context = self._tools, context
        return bound

    def parse(self, text: str) -> ToolCall | None:
        """Tool call of an action; None if there is no call (an answer, or prose).

        Raises: ToolMisuse for a call with an unknown tool, invalid arguments, or malformed JSON, and for several calls.
        """
        calls = self.parse_all(text, max_calls=1)
        return calls[0] if calls else None

    def parse_all(self, text: str, max_calls: int = MAX_CALLS) -> list[ToolCall]:
        """Tool calls of an action, in order; [] if there is none.

        Raises: ToolMisuse as `parse`, if any of the calls is wrong or they are more than `most`.
        """
        text = strip_thought(text)  # calls inside a reasoning model's thought do not count
        values = (
            _parse_hermes_values(text, max_calls)
            if OPEN_TAG in text
            else self._parse_native_values(text.strip(), max_calls)
        )
        if values:
            return [self._build_call(value) for value in values]
        lines = text.strip().splitlines()
        words = lines[-1].split(maxsplit=1) if lines else []
        if not words or words[0] not in self._tools:
            return []
        return [self._parse_line_call(self._tools[words[0]], words[1] if len(words) > 1 else "")]

    def run_all(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
        """(observation, is_error) of each call, in order; run at once where one of the tools may wait."""
        tools = [self._tools[call.name] for call in calls if call.name in self._tools]
        if len(calls) < 2 or not any(
            tool.is_blocking or tool.timeout_s is not None for tool in tools
        ):
            return [self.run(call) for call in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(self.run, calls))

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """(observation, is_error) of a call. Failures of a tool become 'error: ...'; raises EnvironmentFault alone."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool '{call.name}'; {suggest_name(call.name, self._tools)}", True
        if tool.timeout_s is None:
            return self._execute_tool(tool, call.arguments)
        return self._execute_tool_with_timeout(tool, call.arguments, tool.timeout_s)

    def schema(self) -> list[dict[str, Any]]:
        """Tool schemas for chat templates and OpenAI-style interfaces."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": {
                        "type": "object",
                        "properties": {
                            name: build_argument_schema(kind)
                            for name, kind in tool.parameters.items()
                        },
                        "required": [name for name in tool.parameters if name not in tool.optional],
                    },
                },
            }
            for tool in self._tools.values()
        ]

    def describe_tools(self, style: CallFormat = "line", max_calls: int = 1) -> str:
        """Description of the tools for the system message of a model not trained on them.

        `most`: calls that the environment takes in one turn; several are written in the style hermes alone.
        """
        if style == "hermes":
            schemas = "\n".join(json.dumps(entry) for entry in self.schema())
            example = f'{OPEN_TAG}{{"name": NAME, "arguments": {{...}}}}{CLOSE_TAG}'
            if max_calls > 1:
                return f"You may call tools, several in a turn:\n{schemas}\nFor each call write: {example}"
            return f"You may call one tool per turn:\n{schemas}\nTo call it, write: {example}"
        lines = [f"{tool.usage}: {tool.description}" for tool in self._tools.values()]
        return "\n".join(["You may call one tool per turn, on the last line of your turn:", *lines])

    def format_call(self, call: ToolCall, style: CallFormat = "line") -> str:
        """Text that `parse` reads as this call."""
        if style == "hermes":
            return f"{OPEN_TAG}{json.dumps({'name': call.name, 'arguments': call.arguments})}{CLOSE_TAG}"
        given = [
            call.arguments[name]
            for name in self._tools[call.name].parameters
            if name in call.arguments
        ]
        return " ".join(
            [call.name, *(v if isinstance(v, str) else _format_line_argument(v) for v in given)]
        )

    def _parse_line_call(self, tool: Tool, rest: str) -> ToolCall:
        kinds = list(tool.parameters.values())
        # A final text, list or object may contain spaces: calculator 3 + 4
        takes_rest = bool(kinds) and build_argument_schema(kinds[-1]).get("type") in (
            "string",
            "array",
            "object",
        )
        words = rest.split(maxsplit=len(kinds) - 1) if takes_rest else rest.split()
        least = len(kinds) - len(tool.optional)
        if not least <= len(words) <= len(kinds):
            count = str(least) if least == len(kinds) else f"{least} to {len(kinds)}"
            raise ToolMisuse(
                f"{tool.name} takes {count} arguments, not {len(words)}; usage: {tool.usage}"
            )
        pairs = zip(tool.parameters.items(), words, strict=False)
        return ToolCall(
            tool.name,
            {
                name: _convert_line_argument(tool, name, kind, word.strip())
                for (name, kind), word in pairs
            },
        )

    def _parse_native_values(self, text: str, most: int) -> list[Any]:
        """JSON values of calls in a model's own form; [] without one. A bare object counts if it names a tool."""
        for marker in (PYTHON_TAG, TOOL_CALLS):
            if marker in text:
                parts = (
                    text.split(marker)[1:] if marker == TOOL_CALLS else [text.rpartition(marker)[2]]
                )
                values = [value for part in parts for value in _parse_marked_values(part.strip())]
                return _limit_calls(values, most)
        if text.startswith("{") and text.endswith("}"):
            with contextlib.suppress(ToolMisuse):  # an answer may look like JSON
                value = _parse_call_json(text)
                if str(value.get("name")) in self._tools and (
                    "parameters" in value or "arguments" in value
                ):
                    return [value]
        return []

    def _build_call(self, value: Any) -> ToolCall:
        """The call that a JSON value describes. Raises: ToolMisuse."""
        if isinstance(value, dict) and isinstance(
            value.get("function"), dict
        ):  # OpenAI-style wrapper
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ToolMisuse('the tool call must be {"name": ..., "arguments": {...}}')
        tool = self._tools.get(value["name"])
        if tool is None:
            raise ToolMisuse(
                f"no tool '{value['name'][:64]}'; {suggest_name(value['name'][:64], self._tools)}"
            )
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # OpenAI-style encoding
            arguments = _parse_call_json(arguments)
        required = set(tool.parameters) - set(tool.optional)
        if not isinstance(arguments, dict) or not required <= set(arguments) <= set(
            tool.parameters
        ):
            optional = f", of which {list(tool.optional)} may be left out" if tool.optional else ""
            raise ToolMisuse(f"{tool.name} takes the arguments {list(tool.parameters)}{optional}")
        # null where an argument may be left out is that, as OpenAI's strict mode writes it
        given = {n: v for n, v in arguments.items() if v is not None or n in required}
        kinds = ((name, kind) for name, kind in tool.parameters.items() if name in given)
        return ToolCall(
            tool.name,
            {name: _convert_json_argument(tool, name, kind, given[name]) for name, kind in kinds},
        )

    def _execute_tool(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            output = str(tool.function(*self._context, **arguments))
        except EnvironmentFault:  # nothing that the policy did
            raise
        except (Exception, SystemExit) as error:  # SystemExit: a tool must not end the run
            message = str(error) or type(error).__name__
            return replace_unprintable(f"error: {message[: tool.max_output_chars]}"), True
        if len(output) > tool.max_output_chars:
            return (
                f"error: {tool.name} gave {len(output)} characters; at most {tool.max_output_chars} are shown",
                True,
            )
        return replace_unprintable(output), False

    def _execute_tool_with_timeout(
        self, tool: Tool, arguments: dict[str, Any], timeout_s: float
    ) -> tuple[str, bool]:
        try:
            return call_with_timeout(
                timeout_s, f"tool {tool.name}", self._execute_tool, tool, arguments
            )
        except TooManyHungCalls as error:
            return f"error: {str(error).removeprefix('tool ')}", True
        except CallTimeout:
            return f"error: {tool.name} did not answer within {timeout_s:g} seconds", True


def _parse_hermes_values(text: str, most: int) -> list[Any]:
    """JSON values within <tool_call> tags."""
    if text.count(OPEN_TAG) > most:
        _limit_calls(range(text.count(OPEN_TAG)), most)
    values = []
    for part in text.split(OPEN_TAG)[1:]:
        body, closed, _ = part.partition(CLOSE_TAG)
        if not closed:
            raise ToolMisuse(f"the tool call is not closed by {CLOSE_TAG}")
        values.append(_parse_call_json(body))
    return values


def _parse_marked_values(text: str) -> list[Any]:
    """JSON values after a marker: an object, a list of them, or a name and [ARGS]."""
    name, arguments, body = text.partition(ARGS)
    if arguments:
        return [{"name": name.strip(), "arguments": _parse_call_json(body)}]
    value = _parse_call_json(text) if text else []
    return value if isinstance(value, list) and value else [value]


def _limit_calls(values: Any, most: int) -> Any:
    if len(values) <= most:
        return values
    if most == 1:
        raise ToolMisuse("more than one tool call in a turn; make one and wait for its result")
    raise ToolMisuse(f"{len(values)} tool calls in a turn; make at most {most}")


def _format_line_argument(value: Any) -> str:
    """One argument of the line format, written: JSON without white space, but within its texts."""
    if isinstance(value, bool | list | dict) or value is None:
        return json.dumps(value, separators=(",", ":"))
    return str(value)


def _convert_line_argument(tool: Tool, name: str, kind: ArgumentType, word: str) -> Any:
    """One argument of the line format, converted; other kinds than text and numbers are JSON."""
    simple = build_argument_schema(kind).get("type")
    if kind is str:
        return word
    if kind is int and _INTEGER.fullmatch(word):
        return int(word)
    if kind is float and _DECIMAL.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    if _is_scalar_type(kind):
        raise ToolMisuse(
            f"{tool.name}: {name} must be {_TYPE_DESCRIPTIONS[kind]}, not '{word[:40]}'; usage: {tool.usage}"
        )
    value: Any = word
    if simple != "string":
        with contextlib.suppress(ToolMisuse):  # what is no JSON is text
            value = _parse_call_json(word.lower() if simple == "boolean" else word)
    return _convert_json_argument(tool, name, kind, value)


def _is_scalar_type(kind: ArgumentType) -> bool:
    return isinstance(kind, type) and kind in _TYPE_DESCRIPTIONS


def _convert_json_argument(tool: Tool, name: str, kind: ArgumentType, value: Any) -> Any:
    """One argument of a JSON call, converted; an integer is accepted for a float."""
    if not _is_scalar_type(kind):
        check_against_schema(value, build_argument_schema(kind), f"{tool.name}: {name}")
        return value
    if kind is str:
        fits = isinstance(value, str)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18
    else:  # the comparison is False for NaN and infinity
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if fits:
        return float(value) if kind is float else value
    raise ToolMisuse(
        f"{tool.name}: {name} must be {_TYPE_DESCRIPTIONS[kind]}, not {_format_value(value)}"
    )


def _format_value(value: Any) -> str:
    try:
        return json.dumps(value)[:40]
    except (ValueError, RecursionError):  # nested or long beyond what the encoder takes
        return f"a {type(value).__name__}"


def _parse_call_json(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_json_constant)
        # A lone half of a surrogate pair (RFC 8259, section 8.2) could not be tokenised or stored.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise ToolMisuse(
            "the tool call is not valid JSON: it holds half of a surrogate pair"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ToolMisuse(f"the tool call is not valid JSON: {str(error)[:100]}") from None


def _refuse_json_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
