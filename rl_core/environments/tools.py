"""Tools of a policy: call parsing, execution within limits, descriptions for prompts.

A call is read in any of these forms:

    line     the last non-empty line starts with a tool's name:    zoom 2 3
    family   as a model family writes it (`tool_dialects.py`):     <tool_call>{"name": "zoom", ...}</tool_call>
    bare     the JSON object alone, or in Python's notation:       [zoom(row=2, column=3)]

Several calls of one turn follow one another, or stand in a list. A text with the marks of a call that cannot be read is
an error, which the policy reads.
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
from rl_core.environments.tool_dialects import (
    CLOSE_TAG,
    OPEN_TAG,
    find_template_dialects,
    normalize_name,
    read_calls,
)
from rl_core.environments.tool_functions import (
    accept_named_arguments,
    call_tool_function,
    check_tool_function,
    is_async_tool,
    read_function_parameters,
)
from rl_core.environments.tool_notations import CALL_FORM, WrittenCall, parse_call_json
from rl_core.environments.tool_schemas import (
    JSON_TYPES,
    ArgumentType,
    build_argument_schema,
    check_against_schema,
    convert_written_text,
    format_short_json,
)
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse, suggest_name
from rl_core.time_limits import CallTimeout, TooManyHungCalls, call_with_timeout
from rl_core.types import ToolCall
from rl_core.user_code.checks import USER_CODE_ERRORS

CallFormat = Literal["line", "hermes"]

MAX_CALLS = 16  # of one turn

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
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
                f"tool name {self.name!r} must be 1 to 64 letters, digits, '_' or '-'"
            )
        check_tool_function(self.name, self.function)
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
        """Build a tool from a function with type hints and a docstring; see `tool_functions.read_function_parameters`.

        An `async def`, a partial and an object with `__call__` are functions, too.
        """
        name, description, parameters, optional = read_function_parameters(function)
        return cls(
            name,
            description,
            parameters,
            accept_named_arguments(function),
            timeout_s,
            optional=optional,
            **options,
        )

    @property
    def may_wait(self) -> bool:
        """True = a call may take long: those of one turn run concurrently."""
        return self.waits or self.timeout_s is not None or is_async_tool(self.function)

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
        self._dialects: list[str] = []  # shared with what `bind` and `session` return
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
        bound._dialects = self._dialects
        return bound

    def follow_template(self, template: str) -> None:
        """Try the dialects of this chat template before others, in this toolset and all bound ones."""
        self._dialects[:] = find_template_dialects(template)

    def parse(self, text: str) -> ToolCall | None:
        """Return the tool call of an action; None if there is no call (an answer, or prose).

        Raises: ToolMisuse for a call with an unknown tool, invalid arguments or malformed JSON, and for several calls.
        """
        calls = self.parse_all(text, most=1)
        return calls[0] if calls else None

    def parse_all(self, text: str, most: int = MAX_CALLS) -> list[ToolCall]:
        """Return the tool calls of an action, in order; [] if there is none, or no tool to call.

        Raises: ToolMisuse as `parse`, if any of the calls is wrong or there are more than `most`.
        """
        text = strip_thought(text)  # calls inside a reasoning model's thought do not count
        if not self._tools:
            return []
        written = read_calls(text, self._tools, self._dialects)
        if written:
            return [self._build_call(call) for call in _limit_calls(written, most)]
        lines = text.strip().splitlines()
        words = lines[-1].split(maxsplit=1) if lines else []
        if not words or words[0] not in self._tools:
            return []
        return [self._parse_line_call(self._tools[words[0]], words[1] if len(words) > 1 else "")]

    def run_all(self, calls: Sequence[ToolCall]) -> list[tuple[str, bool]]:
        """Run the calls and return (observation, is_error) of each; concurrently if one of the tools may block."""
        tools = [self._tools[call.name] for call in calls if call.name in self._tools]
        if len(calls) < 2 or not any(tool.may_wait for tool in tools):
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

    def _build_call(self, written: WrittenCall) -> ToolCall:
        """Build the call of a tool from what was written. Raises: ToolMisuse."""
        if not isinstance(written.name, str):
            raise ToolMisuse(f"the tool call must be {CALL_FORM}")
        name = normalize_name(written.name, self._tools)
        tool = self._tools.get(name)
        if tool is None:
            raise ToolMisuse(f"no tool '{name[:64]}'; {suggest_name(name[:64], self._tools)}")
        arguments = {} if written.arguments is None else written.arguments
        if isinstance(arguments, str):  # OpenAI-style encoding
            arguments = parse_call_json(arguments)
        elif written.is_positional:
            arguments = _name_positional_arguments(tool, written)
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
                value = convert_written_text(arguments[name], build_argument_schema(kind))
                if name in required or value is not None:
                    converted[name] = _convert_json_argument(tool, name, kind, value)
        return ToolCall(tool.name, converted)

    def _execute_tool(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            output = call_tool_function(tool.function, *self._context, **arguments)
        except EnvironmentFault:  # not caused by the policy
            raise
        except USER_CODE_ERRORS as error:  # SystemExit: a tool must not end the run
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


def _name_positional_arguments(tool: Tool, written: WrittenCall) -> dict[str, Any]:
    if len(written.arguments) > len(tool.parameters):
        raise ToolMisuse(f"{tool.name} takes the arguments {list(tool.parameters)}")
    arguments = dict(zip(tool.parameters, written.arguments, strict=False))
    if repeated := sorted(set(arguments) & set(dict(written.named))):
        raise ToolMisuse(f"{tool.name}: {repeated[0]} is repeated")
    return {**arguments, **dict(written.named)}


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
            value = parse_call_json(word.lower() if simple == "boolean" else word)
    return _convert_json_argument(tool, name, kind, value)


def _is_scalar_type(kind: ArgumentType) -> bool:
    return isinstance(kind, type) and kind in _TYPE_DESCRIPTIONS


def _convert_json_argument(tool: Tool, name: str, kind: ArgumentType, value: Any) -> Any:
    """Convert one argument of a JSON call; an integer is accepted for a float."""
    if not _is_scalar_type(kind):
        check_against_schema(value, build_argument_schema(kind), f"{tool.name}: {name}")
        is_integer = build_argument_schema(kind).get("type") == "integer"
        return int(value) if is_integer and isinstance(value, float) else value
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
