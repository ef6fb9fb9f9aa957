"""Tools of a policy: call parsing, execution within limits, descriptions for prompts.

These call formats are always accepted:

    line     the last non-empty line starts with a tool's name:    zoom 2 3
    hermes   a JSON object in tags, as in Qwen and Hermes models:  <tool_call>{"name": "zoom", ...}</tool_call>
    native   the object alone, or after a model-specific marker:   {"name": "zoom", "parameters": {...}} (Llama 3.1)
             [TOOL_CALLS][{"name": "zoom", ...}] or [TOOL_CALLS]zoom[ARGS]{...} (Mistral)

Several calls of one turn follow one another: one <tool_call> tag each, or several objects in Mistral's list.

In the last two formats the object may also be an OpenAI-style call: {"type": "function", "function": {"name": ...,
"arguments": "{...}"}}, with the arguments as an object or a JSON string.
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

from rl_core.data.model_text import replace_unprintable, strip_thought
from rl_core.environments.tool_schemas import (
    JSON_TYPES,
    ArgumentType,
    build_argument_schema,
    check_against_schema,
    format_short_json,
    read_function_parameters,
)
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse, suggest_name
from rl_core.time_limits import CallTimeout, TooManyHungCalls, call_with_timeout
from rl_core.types import ToolCall

CallFormat = Literal["line", "hermes"]

PYTHON_TAG = "<|python_tag|>"  # Llama 3.1
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"  # Mistral
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
MAX_CALLS = 16  # of one turn

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # int() would also accept '1_000' and non-ASCII digits
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
    timeout_s: float | None = None  # None = pure and fast: runs on the caller's thread, unlimited
    max_output_chars: int = 2000  # a longer output is an error
    optional: tuple[str, ...] = ()  # arguments that may be left out
    waits: bool = (
        False  # True = blocks, and limits its time itself: calls of one turn run concurrently
    )
    is_visual: bool = (
        False  # True = a visual operation: it looks at an image (counted in tool/rapr)
    )

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
        """Build a tool from a function with type hints and a docstring; see `tool_schemas.read_function_parameters`."""
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

    def list_visual_tools(self) -> tuple[str, ...]:
        """List the tools that look at an image."""
        return tuple(name for name, tool in self.tools.items() if tool.is_visual)

    def session(self) -> Toolset:
        """Return the tools for one episode, with separate sessions where tools have them."""
        return self

    def close(self) -> None:
        """Close the episode's sessions, if any."""

    def bind(self, *context: Any) -> Toolset:
        """Return the same tools with `context` bound."""
        bound = Toolset.__new__(Toolset)
        bound._tools, bound._context = self._tools, context
        return bound

    def parse(self, text: str) -> ToolCall | None:
        """Return the tool call of an action; None if there is no call (an answer, or prose).

        Raises: ToolMisuse for a call with an unknown tool, invalid arguments or malformed JSON, and for several calls.
        """
        calls = self.parse_all(text, most=1)
        return calls[0] if calls else None

    def parse_all(self, text: str, most: int = MAX_CALLS) -> list[ToolCall]:
        """Return the tool calls of an action, in order; [] if there is none.

        Raises: ToolMisuse as `parse`, if any of the calls is wrong or there are more than `most`.
        """
        text = strip_thought(text)  # calls inside a reasoning model's thought do not count
        values = (
            _parse_hermes_values(text, most)
            if OPEN_TAG in text
            else self._parse_native_values(text.strip(), most)
        )
        if values:
            return [self._build_call(value) for value in values]
        lines = text.strip().splitlines()
        words = lines[-1].split(maxsplit=1) if lines else []
        if not words or words[0] not in self._tools:
            return []
        return [self._parse_line_call(self._tools[words[0]], words[1] if len(words) > 1 else "")]

    def run_all(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
        """Run the calls and return (observation, is_error) of each; concurrently if one of the tools may block."""
        tools = [self._tools[call.name] for call in calls if call.name in self._tools]
        if len(calls) < 2 or not any(tool.waits or tool.timeout_s is not None for tool in tools):
            return [self.run(call) for call in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(self.run, calls))

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """Run a call and return (observation, is_error).

        Failures of a tool become 'error: ...'. Raises: EnvironmentFault only.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool '{call.name}'; {suggest_name(call.name, self._tools)}", True
        if tool.timeout_s is None:
            return self._execute_tool(tool, call.arguments)
        return self._execute_tool_with_timeout(tool, call.arguments, tool.timeout_s)

    def schema(self) -> list[dict[str, Any]]:
        """Return the tool schemas for chat templates and OpenAI-style interfaces."""
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

    def instructions(self, style: CallFormat = "line", most: int = 1) -> str:
        """Describe the tools for the system message of a model not trained on them.

        Args:
            most: calls that the environment takes in one turn; only the style hermes can express several.
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
        """Format a call as text that `parse` reads as this call."""
        if style == "hermes":
            return f"{OPEN_TAG}{json.dumps({'name': call.name, 'arguments': call.arguments})}{CLOSE_TAG}"
        words = [call.name]
        for name in self._tools[call.name].parameters:
            if name in call.arguments:
                value = call.arguments[name]
                words.append(value if isinstance(value, str) else _format_line_argument(value))
        return " ".join(words)

    def _parse_line_call(self, tool: Tool, rest: str) -> ToolCall:
        kinds = list(tool.parameters.values())
        # A final text, list or object may contain spaces: calculator 3 + 4
        takes_rest = bool(kinds) and build_argument_schema(kinds[-1]).get("type") in (
            "string",
            "array",
            "object",
        )
        words = rest.split(maxsplit=len(kinds) - 1) if takes_rest else rest.split()
        min_words = len(kinds) - len(tool.optional)
        if not min_words <= len(words) <= len(kinds):
            count = str(min_words) if min_words == len(kinds) else f"{min_words} to {len(kinds)}"
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
        """Return JSON values of calls in a model-specific form; [] without one.

        A bare object counts if it names a tool.
        """
        for marker in (PYTHON_TAG, TOOL_CALLS):
            if marker in text:
                parts = [text.rpartition(marker)[2]]
                if marker == TOOL_CALLS:
                    parts = text.split(marker)[1:]
                values = [value for part in parts for value in _parse_marked_values(part.strip())]
                return _limit_calls(values, most)
        if text.startswith("{") and text.endswith("}"):
            with contextlib.suppress(ToolMisuse):  # an answer may look like JSON
                value = _parse_call_json(text)
                names_tool = str(value.get("name")) in self._tools
                if names_tool and ("parameters" in value or "arguments" in value):
                    return [value]
        return []

    def _build_call(self, value: Any) -> ToolCall:
        """Build the call that a JSON value describes. Raises: ToolMisuse."""
        # An OpenAI-style wrapper.
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
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
        converted = {}
        for name, kind in tool.parameters.items():
            # null for an optional argument means that it is left out, as in OpenAI's strict mode
            if name in required or arguments.get(name) is not None:
                converted[name] = _convert_json_argument(tool, name, kind, arguments[name])
        return ToolCall(tool.name, converted)

    def _execute_tool(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            output = str(tool.function(*self._context, **arguments))
        except EnvironmentFault:  # not caused by the policy
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
    """Return the JSON values within <tool_call> tags."""
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
    """Parse JSON values after a marker: an object, a list of them, or a name and [ARGS]."""
    name, arguments, body = text.partition(ARGS)
    if arguments:
        return [{"name": name.strip(), "arguments": _parse_call_json(body)}]
    value = _parse_call_json(text) if text else []
    return value if isinstance(value, list) and value else [value]


def _limit_calls(values: Any, most: int) -> Any:
    """Return the calls. Raises: ToolMisuse if there are more than `most`."""
    if len(values) <= most:
        return values
    if most == 1:
        raise ToolMisuse("more than one tool call in a turn; make one and wait for its result")
    raise ToolMisuse(f"{len(values)} tool calls in a turn; make at most {most}")


def _format_line_argument(value: Any) -> str:
    """Format one argument of the line format: JSON without white space except within its texts."""
    if isinstance(value, bool | list | dict) or value is None:
        return json.dumps(value, separators=(",", ":"))
    return str(value)


def _convert_line_argument(tool: Tool, name: str, kind: ArgumentType, word: str) -> Any:
    """Convert one argument of the line format; types other than text and numbers are JSON."""
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
        with contextlib.suppress(ToolMisuse):  # anything but JSON is text
            value = _parse_call_json(word.lower() if simple == "boolean" else word)
    return _convert_json_argument(tool, name, kind, value)


def _is_scalar_type(kind: ArgumentType) -> bool:
    return isinstance(kind, type) and kind in _TYPE_DESCRIPTIONS


def _convert_json_argument(tool: Tool, name: str, kind: ArgumentType, value: Any) -> Any:
    """Convert one argument of a JSON call; an integer is accepted for a float."""
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
        f"{tool.name}: {name} must be {_TYPE_DESCRIPTIONS[kind]}, not {format_short_json(value)}"
    )


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
