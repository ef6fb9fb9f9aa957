"""Tools of a policy: call parsing, execution within limits, descriptions for prompts.

These call formats are always accepted:

    line     the last non-empty line starts with a tool's name:    zoom 2 3
    hermes   a JSON object in tags, as in Qwen and Hermes models:  <tool_call>{"name": "zoom", ...}</tool_call>
    native   the object alone, or after a model's own marker:      {"name": "zoom", "parameters": {...}} (Llama 3.1)
             [TOOL_CALLS][{"name": "zoom", ...}] or [TOOL_CALLS]zoom[ARGS]{...} (Mistral)

In the last two the object may also be an OpenAI-style call: {"type": "function", "function": {"name": ..., "arguments":
"{...}"}}, with the arguments as an object or a JSON string.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.model_text import printable
from rl_core.data.reasoning import after_thought
from rl_core.errors import SettingsError, ToolMisuse, nearest
from rl_core.time_limits import CallTimeout, TooManyHung, call_within
from rl_core.types import ToolCall

__all__ = ["CallFormat", "Tool", "ToolMisuse", "Toolset"]

CallFormat = Literal["line", "hermes"]

PYTHON_TAG, TOOL_CALLS, ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"  # of Llama 3.1 and Mistral
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")  # int() alone would also accept '1_000' and non-ASCII digits
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_JSON_TYPES = {int: "integer", float: "number", str: "string"}
_WORDS = {int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool; its function takes the context of `Toolset.bind`, then keyword arguments."""

    name: str
    description: str
    parameters: Mapping[str, type]  # argument name -> int, float or str, in the order of the line format
    function: Callable[..., Any]  # its result is shown to the policy as str()
    timeout_s: float | None = None  # None = pure and fast: runs on the caller's thread, without a limit
    max_output_chars: int = 2000  # a longer output is an error

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SettingsError(f"tool name {self.name!r} must be letters, digits, '_' or '-', starting with a letter")
        for parameter, kind in self.parameters.items():
            if kind not in _JSON_TYPES or not parameter.isidentifier():
                raise SettingsError(f"tool '{self.name}': {parameter!r} must have a name and int, float or str")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise SettingsError(f"tool '{self.name}': timeout_s {self.timeout_s} must be above 0 and finite, or None")
        if self.max_output_chars < 1:
            raise SettingsError(f"tool '{self.name}': max_output_chars {self.max_output_chars} must be at least 1")

    @property
    def usage(self) -> str:
        """Call syntax of the line format, as in 'zoom ROW COLUMN'."""
        return " ".join([self.name, *(parameter.upper() for parameter in self.parameters)])


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

    def bind(self, *context: Any) -> Toolset:
        """The same tools with `context` bound."""
        bound = Toolset.__new__(Toolset)
        bound._tools, bound._context = self._tools, context
        return bound

    def parse(self, text: str) -> ToolCall | None:
        """Tool call of an action; None if there is no call (an answer, or prose).

        Raises: ToolMisuse for a call with an unknown tool, invalid arguments, or malformed JSON.
        """
        text = after_thought(text)  # calls inside a reasoning model's thought do not count
        if OPEN_TAG in text:
            return self._parse_hermes(text)
        native = self._native_call(text.strip())
        if native is not None:
            return self._call_of(native)
        lines = text.strip().splitlines()
        words = lines[-1].split(maxsplit=1) if lines else []
        if not words or words[0] not in self._tools:
            return None
        return self._parse_line(self._tools[words[0]], words[1] if len(words) > 1 else "")

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """(observation, is_error) of a call. Never raises: failures of a tool become 'error: ...'."""
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
                        "properties": {name: {"type": _JSON_TYPES[kind]} for name, kind in tool.parameters.items()},
                        "required": list(tool.parameters),
                    },
                },
            }
            for tool in self._tools.values()
        ]

    def instructions(self, style: CallFormat = "line") -> str:
        """Description of the tools for the system message of a model not trained on them."""
        if style == "hermes":
            schemas = "\n".join(json.dumps(entry) for entry in self.schema())
            example = f'{OPEN_TAG}{{"name": NAME, "arguments": {{...}}}}{CLOSE_TAG}'
            return f"You may call one tool per turn:\n{schemas}\nTo call it, write: {example}"
        lines = [f"{tool.usage}: {tool.description}" for tool in self._tools.values()]
        return "\n".join(["You may call one tool per turn, on the last line of your turn:", *lines])

    def format(self, call: ToolCall, style: CallFormat = "line") -> str:
        """Text that `parse` reads as this call."""
        if style == "hermes":
            return f"{OPEN_TAG}{json.dumps({'name': call.name, 'arguments': call.arguments})}{CLOSE_TAG}"
        return " ".join([call.name, *(str(call.arguments[name]) for name in self._tools[call.name].parameters)])

    def _parse_line(self, tool: Tool, rest: str) -> ToolCall:
        kinds = list(tool.parameters.values())
        takes_rest = bool(kinds) and kinds[-1] is str  # a final string argument may contain spaces: calculator 3 + 4
        words = rest.split(maxsplit=len(kinds) - 1) if takes_rest else rest.split()
        if len(words) != len(kinds):
            raise ToolMisuse(f"{tool.name} takes {len(kinds)} arguments, not {len(words)}; usage: {tool.usage}")
        pairs = zip(tool.parameters.items(), words, strict=True)
        return ToolCall(tool.name, {name: _from_word(tool, name, kind, word.strip()) for (name, kind), word in pairs})

    def _parse_hermes(self, text: str) -> ToolCall:
        if text.count(OPEN_TAG) > 1:
            raise ToolMisuse("more than one tool call in a turn; make one and wait for its result")
        body, closed, _ = text.partition(OPEN_TAG)[2].partition(CLOSE_TAG)
        if not closed:
            raise ToolMisuse(f"the tool call is not closed by {CLOSE_TAG}")
        return self._call_of(_read_json(body))

    def _native_call(self, text: str) -> Any:
        """JSON value of a call in a model's own form; None without one. A bare object counts if it names a tool."""
        for marker in (PYTHON_TAG, TOOL_CALLS):
            if marker in text:
                text = text.rpartition(marker)[2].strip()
                name, arguments, body = text.partition(ARGS)
                if arguments:
                    return {"name": name.strip(), "arguments": _read_json(body)}
                value = _read_json(text)
                if isinstance(value, list) and len(value) > 1:
                    raise ToolMisuse("more than one tool call in a turn; make one and wait for its result")
                return value[0] if isinstance(value, list) and value else value
        if text.startswith("{") and text.endswith("}"):
            with contextlib.suppress(ToolMisuse):  # an answer may look like JSON
                value = _read_json(text)
                if str(value.get("name")) in self._tools and ("parameters" in value or "arguments" in value):
                    return value
        return None

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
        if not isinstance(arguments, dict) or set(arguments) != set(tool.parameters):
            raise ToolMisuse(f"{tool.name} takes the arguments {list(tool.parameters)}")
        kinds = tool.parameters.items()
        return ToolCall(tool.name, {name: _from_json(tool, name, kind, arguments[name]) for name, kind in kinds})

    def _call(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            output = str(tool.function(*self._context, **arguments))
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


def _from_word(tool: Tool, name: str, kind: type, word: str) -> Any:
    """One argument of the line format, converted."""
    if kind is str:
        return word
    if kind is int and _INTEGER.fullmatch(word):
        return int(word)
    if kind is float and _DECIMAL.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    raise ToolMisuse(f"{tool.name}: {name} must be {_WORDS[kind]}, not '{word[:40]}'; usage: {tool.usage}")


def _from_json(tool: Tool, name: str, kind: type, value: Any) -> Any:
    """One argument of a JSON call, converted; an integer is accepted for a float."""
    if kind is str:
        fits = isinstance(value, str)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18
    else:  # the comparison is False for NaN and infinity
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    if fits:
        return kind(value)
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
