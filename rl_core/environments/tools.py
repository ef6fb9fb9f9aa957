"""Tools of a policy: call parsing, execution within limits, descriptions for prompts.

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
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.model_text import printable
from rl_core.data.reasoning import after_thought
from rl_core.environments.tool_schema import JSON_TYPES, Kind, check_value, function_parameters, schema_of
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse, nearest
from rl_core.time_limits import CallTimeout, TooManyHung, call_within
from rl_core.types import ToolCall

__all__ = ["CallFormat", "Tool", "ToolMisuse", "Toolset"]

CallFormat = Literal["line", "hermes"]

PYTHON_TAG, TOOL_CALLS, ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"  # of Llama 3.1 and Mistral
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
MAX_CALLS = 16  # of one turn

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # int() alone would also accept '1_000' and non-ASCII digits
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool; its function takes the context of `Toolset.bind`, then keyword arguments."""

    name: str
    description: str
    # Argument name -> int, float, str, bool, list, dict or a JSON schema, in the order of the line format.
    parameters: Mapping[str, Kind]
    function: Callable[..., Any]  # its result is shown to the policy as str()
    timeout_s: float | None = None  # None = pure and fast: runs on the caller's thread, without a limit
    max_output_chars: int = 2000  # a longer output is an error
    optional: tuple[str, ...] = ()  # arguments that may be left out
    waits: bool = False  # True = it waits for something, with a limit of its own: calls of one turn run at once

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SettingsError(f"tool name {self.name!r} must be letters, digits, '_' or '-', starting with a letter")
        for parameter, kind in self.parameters.items():
            is_named = bool(parameter.split()) if isinstance(kind, Mapping) else parameter.isidentifier()
            if not (isinstance(kind, Mapping) or kind in JSON_TYPES) or not is_named:
                raise SettingsError(
                    f"tool '{self.name}': {parameter!r} must have a name and int, float, str, bool, list, dict or a "
                    "JSON schema"
                )
        for parameter in self.optional:
            if parameter not in self.parameters:
                raise SettingsError(f"tool '{self.name}': optional: {nearest(parameter, self.parameters)}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise SettingsError(f"tool '{self.name}': timeout_s {self.timeout_s} must be above 0 and finite, or None")
        if self.max_output_chars < 1:
            raise SettingsError(f"tool '{self.name}': max_output_chars {self.max_output_chars} must be at least 1")

    @classmethod
    def from_function(cls, function: Callable[..., Any], timeout_s: float | None = None, **options: Any) -> Tool:
        """Tool of a function with type hints and a docstring; see `tool_schema.function_parameters`."""
        description, parameters, optional = function_parameters(function)
        return cls(function.__name__, description, parameters, function, timeout_s, optional=optional, **options)

    @property
    def usage(self) -> str:
        """Call syntax of the line format, as in 'zoom ROW [COLUMN]'."""
        names = ((name.upper(), name in self.optional) for name in self.parameters)
        return " ".join([self.name, *(f"[{name}]" if is_optional else name for name, is_optional in names)])


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

    def session(self) -> Toolset:
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
        calls = self.parse_all(text, most=1)
        return calls[0] if calls else None

    def parse_all(self, text: str, most: int = MAX_CALLS) -> list[ToolCall]:
        """Tool calls of an action, in order; [] if there is none.

        Raises: ToolMisuse as `parse`, if any of the calls is wrong or they are more than `most`.
        """
        text = after_thought(text)  # calls inside a reasoning model's thought do not count
        values = _hermes_values(text, most) if OPEN_TAG in text else self._native_values(text.strip(), most)
        if values:
            return [self._call_of(value) for value in values]
        lines = text.strip().splitlines()
        words = lines[-1].split(maxsplit=1) if lines else []
        if not words or words[0] not in self._tools:
            return []
        return [self._parse_line(self._tools[words[0]], words[1] if len(words) > 1 else "")]

    def run_all(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
        """(observation, is_error) of each call, in order; run at once where one of the tools may wait."""
        tools = [self._tools[call.name] for call in calls if call.name in self._tools]
        if len(calls) < 2 or not any(tool.waits or tool.timeout_s is not None for tool in tools):
            return [self.run(call) for call in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(self.run, calls))

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """(observation, is_error) of a call. Failures of a tool become 'error: ...'; raises EnvironmentFault alone."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool '{call.name}'; {nearest(call.name, self._tools)}", True
        if tool.timeout_s is None:
            return self._call(tool, call.arguments)
        return self._call_in_thread(tool, call.arguments, tool.timeout_s)

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
                        "properties": {name: schema_of(kind) for name, kind in tool.parameters.items()},
                        "required": [name for name in tool.parameters if name not in tool.optional],
                    },
                },
            }
            for tool in self._tools.values()
        ]

    def instructions(self, style: CallFormat = "line", most: int = 1) -> str:
        """Description of the tools for the system message of a model not trained on them.

        `most`: calls that the environment takes in one turn; several are written in the style hermes alone.
        """
        if style == "hermes":
            schemas = "\n".join(json.dumps(entry) for entry in self.schema())
            example = f'{OPEN_TAG}{{"name": NAME, "arguments": {{...}}}}{CLOSE_TAG}'
            if most > 1:
                return f"You may call tools, several in a turn:\n{schemas}\nFor each call write: {example}"
            return f"You may call one tool per turn:\n{schemas}\nTo call it, write: {example}"
        lines = [f"{tool.usage}: {tool.description}" for tool in self._tools.values()]
        return "\n".join(["You may call one tool per turn, on the last line of your turn:", *lines])

    def format(self, call: ToolCall, style: CallFormat = "line") -> str:
        """Text that `parse` reads as this call."""
        if style == "hermes":
            return f"{OPEN_TAG}{json.dumps({'name': call.name, 'arguments': call.arguments})}{CLOSE_TAG}"
        given = [call.arguments[name] for name in self._tools[call.name].parameters if name in call.arguments]
        return " ".join([call.name, *(v if isinstance(v, str) else _word(v) for v in given)])

    def _parse_line(self, tool: Tool, rest: str) -> ToolCall:
        kinds = list(tool.parameters.values())
        # A final text, list or object may contain spaces: calculator 3 + 4
        takes_rest = bool(kinds) and schema_of(kinds[-1]).get("type") in ("string", "array", "object")
        words = rest.split(maxsplit=len(kinds) - 1) if takes_rest else rest.split()
        least = len(kinds) - len(tool.optional)
        if not least <= len(words) <= len(kinds):
            count = str(least) if least == len(kinds) else f"{least} to {len(kinds)}"
            raise ToolMisuse(f"{tool.name} takes {count} arguments, not {len(words)}; usage: {tool.usage}")
        pairs = zip(tool.parameters.items(), words, strict=False)
        return ToolCall(tool.name, {name: _from_word(tool, name, kind, word.strip()) for (name, kind), word in pairs})

    def _native_values(self, text: str, most: int) -> list[Any]:
        """JSON values of calls in a model's own form; [] without one. A bare object counts if it names a tool."""
        for marker in (PYTHON_TAG, TOOL_CALLS):
            if marker in text:
                parts = text.split(marker)[1:] if marker == TOOL_CALLS else [text.rpartition(marker)[2]]
                values = [value for part in parts for value in _marked_values(part.strip())]
                return _at_most(values, most)
        if text.startswith("{") and text.endswith("}"):
            with contextlib.suppress(ToolMisuse):  # an answer may look like JSON
                value = _read_json(text)
                if str(value.get("name")) in self._tools and ("parameters" in value or "arguments" in value):
                    return [value]
        return []

    def _call_of(self, value: Any) -> ToolCall:
        """The call that a JSON value describes. Raises: ToolMisuse."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI-style wrapper
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ToolMisuse('the tool call must be {"name": ..., "arguments": {...}}')
        tool = self._tools.get(value["name"])
        if tool is None:
            raise ToolMisuse(f"no tool '{value['name'][:64]}'; {nearest(value['name'][:64], self._tools)}")
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # OpenAI-style encoding
            arguments = _read_json(arguments)
        required = set(tool.parameters) - set(tool.optional)
        if not isinstance(arguments, dict) or not required <= set(arguments) <= set(tool.parameters):
            optional = f", of which {list(tool.optional)} may be left out" if tool.optional else ""
            raise ToolMisuse(f"{tool.name} takes the arguments {list(tool.parameters)}{optional}")
        # null where an argument may be left out is that, as OpenAI's strict mode writes it
        given = {n: v for n, v in arguments.items() if v is not None or n in required}
        kinds = ((name, kind) for name, kind in tool.parameters.items() if name in given)
        return ToolCall(tool.name, {name: _from_json(tool, name, kind, given[name]) for name, kind in kinds})

    def _call(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            output = str(tool.function(*self._context, **arguments))
        except EnvironmentFault:  # nothing that the policy did
            raise
        except (Exception, SystemExit) as error:  # SystemExit: a tool must not end the run
            message = str(error) or type(error).__name__
            return printable(f"error: {message[: tool.max_output_chars]}"), True
        if len(output) > tool.max_output_chars:
            return f"error: {tool.name} gave {len(output)} characters; at most {tool.max_output_chars} are shown", True
        return printable(output), False

    def _call_in_thread(self, tool: Tool, arguments: dict[str, Any], timeout_s: float) -> tuple[str, bool]:
        try:
            return call_within(timeout_s, f"tool {tool.name}", self._call, tool, arguments)
        except TooManyHung as error:
            return f"error: {str(error).removeprefix('tool ')}", True
        except CallTimeout:
            return f"error: {tool.name} did not answer within {timeout_s:g} seconds", True


def _hermes_values(text: str, most: int) -> list[Any]:
    """JSON values within <tool_call> tags."""
    if text.count(OPEN_TAG) > most:
        _at_most(range(text.count(OPEN_TAG)), most)
    values = []
    for part in text.split(OPEN_TAG)[1:]:
        body, closed, _ = part.partition(CLOSE_TAG)
        if not closed:
            raise ToolMisuse(f"the tool call is not closed by {CLOSE_TAG}")
        values.append(_read_json(body))
    return values


def _marked_values(text: str) -> list[Any]:
    """JSON values after a marker: an object, a list of them, or a name and [ARGS]."""
    name, arguments, body = text.partition(ARGS)
    if arguments:
        return [{"name": name.strip(), "arguments": _read_json(body)}]
    value = _read_json(text) if text else []
    return value if isinstance(value, list) and value else [value]


def _at_most(values: Any, most: int) -> Any:
    if len(values) <= most:
        return values
    if most == 1:
        raise ToolMisuse("more than one tool call in a turn; make one and wait for its result")
    raise ToolMisuse(f"{len(values)} tool calls in a turn; make at most {most}")


def _word(value: Any) -> str:
    """One argument of the line format, written: JSON without white space, but within its texts."""
    if isinstance(value, bool | list | dict) or value is None:
        return json.dumps(value, separators=(",", ":"))
    return str(value)


def _from_word(tool: Tool, name: str, kind: Kind, word: str) -> Any:
    """One argument of the line format, converted; other kinds than text and numbers are JSON."""
    simple = schema_of(kind).get("type")
    if kind is str:
        return word
    if kind is int and _INTEGER.fullmatch(word):
        return int(word)
    if kind is float and _DECIMAL.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    if _is_plain(kind):
        raise ToolMisuse(f"{tool.name}: {name} must be {_WORDS[kind]}, not '{word[:40]}'; usage: {tool.usage}")
    value: Any = word
    if simple != "string":
        with contextlib.suppress(ToolMisuse):  # what is no JSON is text
            value = _read_json(word.lower() if simple == "boolean" else word)
    return _from_json(tool, name, kind, value)


def _is_plain(kind: Kind) -> bool:
    return isinstance(kind, type) and kind in _WORDS


def _from_json(tool: Tool, name: str, kind: Kind, value: Any) -> Any:
    """One argument of a JSON call, converted; an integer is accepted for a float."""
    if not _is_plain(kind):
        check_value(value, schema_of(kind), f"{tool.name}: {name}")
        return value
    if kind is str:
        fits = isinstance(value, str)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18
    else:  # the comparison is False for NaN and infinity
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if fits:
        return float(value) if kind is float else value
    raise ToolMisuse(f"{tool.name}: {name} must be {_WORDS[kind]}, not {_shown(value)}")


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:40]
    except (ValueError, RecursionError):  # nested or long beyond what the encoder takes
        return f"a {type(value).__name__}"


def _read_json(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # A lone half of a surrogate pair (RFC 8259, section 8.2) could not be tokenised or stored.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise ToolMisuse("the tool call is not valid JSON: it holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise ToolMisuse(f"the tool call is not valid JSON: {str(error)[:100]}") from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
