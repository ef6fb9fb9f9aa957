"""Notations of a tool call's body, whatever its family writes around it: JSON, XML, Python's, a name with arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.errors import ToolMisuse

CALL_FORM = '{"name": ..., "arguments": {...}}'
NAME = r"[A-Za-z_][\w.-]{0,127}"  # of a tool, as a regular expression
_MAX_PYTHON = 20_000  # characters of calls in Python's notation


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it was written, not compared with the tools yet."""

    name: Any
    arguments: Any  # an object, its JSON text, or a list of values
    is_positional: bool = False  # the list stands for arguments in the tool's order
    named: tuple[tuple[str, Any], ...] = ()  # arguments after those of the list


def read_call_body(text: str) -> list[WrittenCall]:
    """Read what stands between the marks of a call. Raises: ToolMisuse."""
    body = strip_fence(text.strip())
    # JSON and Python's notation first, as their texts may hold anything
    if PYTHON_START.match(body):
        return read_python_calls(body)
    if body.startswith(("{", "[")):
        return [call for value in _read_all_json(body) for call in _list_json_calls(value)]
    if body.startswith("call:"):
        return _read_braced_calls(body)
    if "<function=" in body:
        return read_function_tags(body)
    if INVOKE.search(body):
        return read_invocations(body)
    if "<arg_key>" in body:
        return [_read_argument_pairs(body)]
    if (named := _NAME_AND_ARGUMENTS.match(body)) is not None:
        rest = strip_fence(body[named.end() :].strip())
        return [WrittenCall(named[1], rest or {})]
    return [WrittenCall(None, parse_call_json(body))]


# -- JSON --------------------------------------------------------------------------------------------------------------


def parse_call_json(text: str) -> Any:
    """Parse the JSON of a call. Raises: ToolMisuse."""
    try:
        value = json.loads(text, parse_constant=_refuse_json_constant)
        _check_surrogates(text, value)
        return value
    except (ValueError, RecursionError) as error:
        raise _build_json_error(error) from None


def _refuse_json_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_json_constant)


def _build_json_error(error: Exception) -> ToolMisuse:
    reason = str(error)[:100]
    if isinstance(error, UnicodeEncodeError):
        reason = "it holds half of a surrogate pair"
    return ToolMisuse(f"the tool call is not valid JSON: {reason}")


def _check_surrogates(text: str, value: Any) -> None:
    # A lone half of a surrogate pair (RFC 8259, section 8.2) could not be tokenised or stored.
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")


def read_json_values(text: str) -> tuple[list[Any], str]:
    """Return the JSON values that a text begins with, separated by white space, commas or semicolons, and the rest."""
    values: list[Any] = []
    place = 0
    while (start := _SEPARATORS.match(text, place)) is not None and start.end() < len(text):
        try:
            value, end = _DECODER.raw_decode(text, start.end())
            _check_surrogates(text[start.end() : end], value)
        except (ValueError, RecursionError) as error:
            if not values:
                raise _build_json_error(error) from None
            break
        values.append(value)
        place = end
    return values, text[place:].strip(" \t\r\n;,")


def _read_all_json(text: str) -> list[Any]:
    if text.startswith("[") or text.count("{") < 2:
        return [parse_call_json(text)]
    values, rest = read_json_values(text)
    return values if not rest else [parse_call_json(text)]  # raises with the reason


def _list_json_calls(value: Any) -> list[WrittenCall]:
    """List the calls that a JSON value describes: one, or a list of them."""
    return [convert_json_call(each) for each in flatten_calls(value) or [value]]


def flatten_calls(value: Any) -> list[Any]:
    """List the values of a list, or of OpenAI's {"tool_calls": [...]}; a single value is a list of one."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    return value if isinstance(value, list) else [value]


def convert_json_call(value: Any) -> WrittenCall:
    """Convert a JSON object in any family's names of its fields; anything else becomes a call without a name."""
    if not isinstance(value, dict):
        return WrittenCall(None, {})
    if isinstance(value.get("function"), dict):  # OpenAI's wrapper
        value = value["function"]
    name = find_json_name(value)
    if name is None and len(value) == 1 and not {"function", *ARGUMENT_KEYS} & set(value):
        [(name, arguments)] = value.items()  # Apertus: {"weather": {...}}
        return WrittenCall(name if isinstance(arguments, dict) else None, arguments)
    return WrittenCall(name, next((value[key] for key in ARGUMENT_KEYS if key in value), {}))


def find_json_name(value: Mapping[str, Any]) -> Any:
    """Find the tool's name in the JSON object of a call; None = there is none."""
    keys: tuple[str, ...] = _NAME_KEYS
    if any(key in value for key in ARGUMENT_KEYS):
        keys = (*_NAME_KEYS, "function", "tool", "action")
    return next((value[key] for key in keys if key in value), None)


_NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "action_input")
_SEPARATORS = re.compile(r"[\s;,]*")

# -- XML ---------------------------------------------------------------------------------------------------------------

INVOKE = re.compile(r"<(?:\w+:)?invoke\s+name=[\"']?([^\"'>]+)[\"']?\s*>")
_INVOKE_PARAMETER = re.compile(r"<(?:\w+:)?parameter\s+name=[\"']?([^\"'>\s]+)[\"']?[^>]*>")
_INVOKE_PARAMETER_END = re.compile(r"</(?:\w+:)?parameter>")


def read_function_tags(text: str) -> list[WrittenCall]:
    """Read <function=NAME> with <parameter=NAME>VALUE</parameter> (Qwen3-Coder), or with JSON (Llama, Functionary)."""
    calls = []
    for part in text.split("<function=")[1:]:
        name, opened, body = part.partition(">")
        if not opened:
            raise ToolMisuse("the tool call is not closed: '<function=NAME>' lacks its '>'")
        body = body.partition("</function>")[0]
        name = name.strip().strip("\"'")
        if "<parameter=" not in body:
            calls.append(WrittenCall(name, body.strip() or {}))
            continue
        arguments: dict[str, Any] = {}
        for each in body.split("<parameter=")[1:]:
            argument, opened, value = each.partition(">")
            value, closed, _ = value.partition("</parameter>")
            if not opened or not closed:
                raise ToolMisuse("the tool call is not closed: a parameter lacks </parameter>")
            arguments[argument.strip().strip("\"'")] = _strip_line_breaks(value)
        calls.append(WrittenCall(name, arguments))
    return calls


def read_invocations(text: str) -> list[WrittenCall]:
    """Read <invoke name="NAME"> with <parameter name="NAME">VALUE</parameter> (MiniMax M2, DeepSeek V3.2, Step 3)."""
    pieces = INVOKE.split(text)
    calls = []
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body = re.split(r"</(?:\w+:)?invoke>", body, maxsplit=1)[0]
        parts = _INVOKE_PARAMETER.split(body)
        arguments = {}
        for argument, rest in zip(parts[1::2], parts[2::2], strict=True):
            value = _INVOKE_PARAMETER_END.split(rest, maxsplit=1)
            if len(value) < 2:
                raise ToolMisuse("the tool call is not closed: a parameter lacks </parameter>")
            arguments[argument] = _strip_line_breaks(value[0])
        calls.append(WrittenCall(name.strip(), arguments))
    return calls


def _read_argument_pairs(text: str) -> WrittenCall:
    """Read NAME, then <arg_key>NAME</arg_key><arg_value>VALUE</arg_value> (GLM 4.5)."""
    name, *pairs = text.split("<arg_key>")
    arguments = {}
    for pair in pairs:
        argument, closed_key, rest = pair.partition("</arg_key>")
        _, opened, value = rest.partition("<arg_value>")
        value, closed_value, _ = value.partition("</arg_value>")
        if not (closed_key and opened and closed_value):
            raise ToolMisuse("the tool call needs <arg_value>...</arg_value> after each <arg_key>")
        arguments[argument.strip()] = _strip_line_breaks(value)
    return WrittenCall(name.strip(), arguments)


def _strip_line_breaks(text: str) -> str:
    """Drop the line break after an opening tag and the one before its closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


# -- Python's notation -------------------------------------------------------------------------------------------------

PYTHON_START = re.compile(rf"\[?\s*{NAME}\(")
_JSON_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}


def read_python_calls(text: str) -> list[WrittenCall]:
    """Read NAME(argument=VALUE, ...), several of them in a list, on lines, or after semicolons."""
    if len(text) > _MAX_PYTHON:
        raise ToolMisuse(f"the tool call is longer than {_MAX_PYTHON} characters")
    try:
        statements = ast.parse(text).body
        return [call for statement in statements for call in _convert_statement(statement)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise ToolMisuse(
            f"the tool call is not of the form name(argument=value): {reason[:100]}"
        ) from None


def _convert_statement(statement: ast.stmt) -> Iterator[WrittenCall]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("only calls are read")
    value = statement.value
    for node in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        if not isinstance(node, ast.Call):
            raise ValueError("only calls are read")
        name = ast.unparse(node.func)
        if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
            node = node.args[0]  # Gemma's templates ask for print(call)
            name = ast.unparse(node.func)
        named = []
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError("arguments must be named one by one")
            named.append((keyword.arg, _convert_literal(keyword.value)))
        if len({key for key, _ in named}) < len(named):
            raise ValueError("an argument is repeated")
        positional = [_convert_literal(argument) for argument in node.args]
        if positional:
            yield WrittenCall(name, positional, True, tuple(named))
        else:
            yield WrittenCall(name, dict(named))


def _convert_literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_convert_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_convert_literal(key) for key in node.keys if key is not None]
        return {
            str(key): _convert_literal(value) for key, value in zip(keys, node.values, strict=True)
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _convert_literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("values must be texts, numbers, lists or dicts")


# -- other notations ---------------------------------------------------------------------------------------------------

_NAME_AND_ARGUMENTS = re.compile(rf"({NAME}(?::\d+)?)\s*(?=[{{`]|$)")
_QUOTE_TOKENS = re.compile(r'<\|"\|>|<escape>')


def _read_braced_calls(text: str) -> list[WrittenCall]:
    """Read call:NAME{argument:VALUE, ...} with texts between <escape> or <|"|> (FunctionGemma, Gemma 4)."""
    quoted = _QUOTE_TOKENS.split(text)
    if len(quoted) % 2 == 0:
        raise ToolMisuse("the tool call has a text that is not closed")
    plain = [re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)\s*:", r'\1"\2":', part) for part in quoted[::2]]
    texts = [json.dumps(part) for part in quoted[1::2]]
    whole = "".join(part for pair in zip(plain, [*texts, ""], strict=True) for part in pair)
    calls = []
    for part in re.split(r"(?:^|(?<=\}))\s*call:", whole)[1:]:
        name, _, arguments = part.partition("{")
        calls.append(WrittenCall(name.strip(), "{" + arguments if arguments else {}))
    return calls


def strip_fence(text: str) -> str:
    """Return the content of a fenced code block that is the whole text, or the text."""
    fence = re.match(r"```[\w-]*\n?", text)
    if fence is None or not text.endswith("```") or len(text) < fence.end() + 3:
        return text
    return text[fence.end() : -3].strip()
