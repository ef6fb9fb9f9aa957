"""Tool calls as model families write them: one table of dialects, all read by the same reader of a call's body.

A dialect is an opening and a closing text; the first to open in a turn decides, those of the model's chat template
before others. Between them stands JSON (an object, or a list of them), XML (Qwen3-Coder, GLM, MiniMax, DeepSeek), calls
in Python's notation (Llama, LFM2, Gemma, Olmo), or a name with its arguments (Mistral, Kimi, gpt-oss, Functionary).
A text with the marks of a call that none of them can read is an error, never an answer.
Sources: the chat templates and model cards of the families; the parsers of vLLM, vllm/tool_parsers.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.errors import ToolMisuse

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
CALL_FORM = '{"name": ..., "arguments": {...}}'
_MAX_PYTHON = 20_000  # characters of calls in Python's notation
_B = "[|\uff5c]"  # DeepSeek's bar is a wide one
_NAME = r"[A-Za-z_][\w.-]{0,127}"
_TYPOGRAPHIC = "\u2581"  # DeepSeek's underscore


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it was written, not compared with the tools yet."""

    name: Any
    arguments: Any  # an object, its JSON text, or a list of values
    is_positional: bool = False  # the list stands for arguments in the tool's order
    named: tuple[tuple[str, Any], ...] = ()  # arguments after those of the list


@dataclass(frozen=True, slots=True)
class Dialect:
    """The texts around a family's calls."""

    name: str
    opening: str  # regular expression
    closing: str = ""  # of one call or list of calls; "" = up to the next opening
    must_close: bool = False
    template_mark: str = ""  # text in the chat templates of the family, if the opening is none
    read: Callable[[str], list[WrittenCall]] | None = None  # of the text from the opening on


def find_template_dialects(template: str) -> tuple[str, ...]:
    """Return the names of the dialects whose marks a chat template holds, in the order of the table."""
    return tuple(
        dialect.name
        for dialect in DIALECTS
        if re.search(dialect.template_mark or dialect.opening, template)
    )


def read_calls(
    text: str, tool_names: Collection[str], preferred: Collection[str] = ()
) -> list[WrittenCall]:
    """Return the calls in an action's text; [] if it is an answer.

    Args:
        text: without its thought.
        tool_names: without marks around it, only a call of one of these tools, or JSON that can only be a call, counts.
        preferred: names of dialects that are tried first.
    Raises: ToolMisuse for a call that cannot be read.
    """
    found: list[tuple[bool, int, int, Dialect]] = []
    for place, dialect in enumerate(DIALECTS):
        opened = re.search(dialect.opening, text)
        if opened is not None:
            found.append((dialect.name not in preferred, opened.start(), place, dialect))
    if text.lstrip()[:1] in ("[", "{"):  # a bare call, whose texts may hold any marks
        try:
            if calls := _read_bare_candidate(text.strip(), tool_names):
                return calls
        except ToolMisuse:
            if not found:
                raise
    if found:
        dialect = min(found, key=lambda entry: entry[:3])[3]
        calls = _read_dialect(dialect, text)
        if not calls:
            raise ToolMisuse(f"the tool call is empty; it must be {CALL_FORM}")
        return calls
    calls = _read_bare_calls(text, tool_names)
    if not calls and (mark := _UNREAD_MARK.search(text)) is not None:
        raise ToolMisuse(
            f"the tool call after {mark.group()[:40]!r} is not understood; write "
            f"{OPEN_TAG}{CALL_FORM}{CLOSE_TAG}"
        )
    return calls


def parse_call_json(text: str) -> Any:
    """Parse the JSON of a call. Raises: ToolMisuse."""
    try:
        value = json.loads(text, parse_constant=_refuse_json_constant)
        _check_surrogates(text, value)
        return value
    except (ValueError, RecursionError) as error:
        raise _build_json_error(error) from None


def _read_dialect(dialect: Dialect, text: str) -> list[WrittenCall]:
    if dialect.read is not None:
        return dialect.read(text)
    calls: list[WrittenCall] = []
    for part in re.split(dialect.opening, text)[1:]:
        body = part
        if dialect.closing:
            pieces = re.split(dialect.closing, part, maxsplit=1)
            if len(pieces) < 2 and dialect.must_close:
                raise ToolMisuse(
                    f"the tool call is not closed by {dialect.closing.replace(chr(92), '')}"
                )
            body = pieces[0]
        calls += read_call_body(body)
    return calls


def read_call_body(text: str) -> list[WrittenCall]:
    """Read what stands between the marks of a call. Raises: ToolMisuse."""
    body = _strip_fence(text.strip())
    if OPEN_TAG in body:  # within <tool_calls>
        return _read_dialect(DIALECTS[0], body)
    if "<function=" in body:
        return _read_function_tags(body)
    if _INVOKE.search(body):
        return _read_invocations(body)
    if "<arg_key>" in body:
        return [_read_argument_pairs(body)]
    if body.startswith("call:"):
        return _read_braced_calls(body)
    if body[:1] in "{[" and not _PYTHON_START.match(body):
        return [call for value in _read_all_json(body) for call in _list_json_calls(value)]
    if _PYTHON_START.match(body):
        return _read_python_calls(body)
    if (named := _NAME_AND_ARGUMENTS.match(body)) is not None:
        rest = _strip_fence(body[named.end() :].strip())
        return [WrittenCall(named[1], rest or {})]
    return [WrittenCall(None, parse_call_json(body))]


# -- JSON --------------------------------------------------------------------------------------------------------------


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


def _read_json_values(text: str) -> tuple[list[Any], str]:
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
    values, rest = _read_json_values(text)
    return values if not rest else [parse_call_json(text)]  # raises with the reason


def _list_json_calls(value: Any) -> list[WrittenCall]:
    """List the calls that a JSON value describes: one, or a list of them."""
    values = value if isinstance(value, list) and value else [value]
    return [_convert_json_call(each) for each in values]


def _convert_json_call(value: Any) -> WrittenCall:
    if not isinstance(value, dict):
        return WrittenCall(None, {})
    if isinstance(value.get("function"), dict):  # OpenAI's wrapper
        value = value["function"]
    name = next((value[key] for key in _NAME_KEYS if key in value), None)
    if name is None and len(value) == 1 and not {"function", *_ARGUMENT_KEYS} & set(value):
        [(name, arguments)] = value.items()  # Apertus: {"weather": {...}}
        return WrittenCall(name if isinstance(arguments, dict) else None, arguments)
    return WrittenCall(name, next((value[key] for key in _ARGUMENT_KEYS if key in value), {}))


_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_SEPARATORS = re.compile(r"[\s;,]*")

# -- XML ---------------------------------------------------------------------------------------------------------------

_INVOKE = re.compile(r"<(?:\w+:)?invoke\s+name=[\"']?([^\"'>]+)[\"']?\s*>")
_INVOKE_PARAMETER = re.compile(r"<(?:\w+:)?parameter\s+name=[\"']?([^\"'>\s]+)[\"']?[^>]*>")
_INVOKE_PARAMETER_END = re.compile(r"</(?:\w+:)?parameter>")


def _read_function_tags(text: str) -> list[WrittenCall]:
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


def _read_invocations(text: str) -> list[WrittenCall]:
    """Read <invoke name="NAME"> with <parameter name="NAME">VALUE</parameter> (MiniMax M2, DeepSeek V3.2, Step 3)."""
    pieces = _INVOKE.split(text)
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

_PYTHON_START = re.compile(rf"\[?\s*{_NAME}\(")
_JSON_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}


def _read_python_calls(text: str) -> list[WrittenCall]:
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
            raise ValueError("an argument is given twice")
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

_NAME_AND_ARGUMENTS = re.compile(rf"({_NAME}(?::\d+)?)\s*(?=[{{`]|$)")
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


def _read_mistral_calls(text: str) -> list[WrittenCall]:
    """Read [TOOL_CALLS] before a list of calls, or before NAME, [CALL_ID]ID and [ARGS]{...} each."""
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        body = part.strip().removesuffix("</s>").strip()
        head, marked, arguments = body.partition("[ARGS]")
        if marked:
            name = head.partition("[CALL_ID]")[0].strip()
            calls.append(WrittenCall(name, parse_call_json(arguments.strip())))
        else:
            calls += read_call_body(body)
    return calls


def _read_section_calls(text: str) -> list[WrittenCall]:
    """Read calls of DeepSeek V3 (type, separator, name, fenced JSON), V3.1 (name, separator, JSON) and Kimi K2."""
    calls = []
    for part in re.split(_SECTION_CALL, text)[1:]:
        body = re.split(
            rf"<{_B}tool[{_TYPOGRAPHIC}_]call[{_TYPOGRAPHIC}_]end{_B}>", part, maxsplit=1
        )[0]
        head, *rest = re.split(_SECTION_SEPARATOR, body, maxsplit=1)
        if not rest:
            calls += read_call_body(body)
        elif head.strip() == "function":
            calls += read_call_body(rest[0])
        else:
            calls.append(WrittenCall(head.strip(), _strip_fence(rest[0].strip()) or {}))
    return calls


_SECTION_CALL = rf"<{_B}tool[{_TYPOGRAPHIC}_]call[{_TYPOGRAPHIC}_]begin{_B}>"
_SECTION_SEPARATOR = rf"<{_B}tool[{_TYPOGRAPHIC}_]sep{_B}>|<{_B}tool_call_argument_begin{_B}>"
_HARMONY = rf"\bto=functions\.{_NAME}|(?<=commentary )to={_NAME}|(?<=assistant )to={_NAME}"


def _read_harmony_calls(text: str) -> list[WrittenCall]:
    """Read messages of gpt-oss to a function; its marks may be missing, as they are control tokens."""
    calls = []
    matches = list(re.finditer(_HARMONY, text))
    ends = [*(match.start() for match in matches[1:]), len(text)]
    for match, end in zip(matches, ends, strict=True):
        name = match.group().removeprefix("to=")
        body = text[match.end() : end]
        body = re.split(r"<\|(?:call|end|return|start)\|>", body, maxsplit=1)[0]
        _, marked, message = body.rpartition("<|message|>")
        if not marked:  # 'commentary json{...}'
            message = body[body.find("{") :] if "{" in body else ""
        message = message.strip()
        if message.startswith("{"):
            values, _ = _read_json_values(message)
            calls.append(WrittenCall(name, values[0]))
        else:
            calls.append(WrittenCall(name, message or {}))
    return calls


def _read_action_calls(text: str) -> list[WrittenCall]:
    """Read 'Action: NAME' and 'Action Input: {...}' (ReAct), Qwen-Agent's marks, or Command R's fenced list."""
    calls = []
    for part in re.split(_ACTION, text)[1:]:
        name, *rest = re.split(_ACTION_INPUT, part, maxsplit=1)
        if rest:
            body = re.split(r"\n(?:Observation:|\u273fRESULT\u273f)", rest[0], maxsplit=1)[0]
            calls.append(WrittenCall(name.strip(), _strip_fence(body.strip()) or {}))
        else:
            calls += read_call_body(part)
    return calls


_ACTION = r"(?:^|(?<=\n))Action:(?=\s*(?:```|\S+[ \t]*\n\s*Action Input:))|\u273fFUNCTION\u273f:"
_ACTION_INPUT = r"\n\s*Action Input:|\n?\s*\u273fARGS\u273f:"


def _read_recipient_calls(text: str) -> list[WrittenCall]:
    """Read Functionary's '>>>NAME' and arguments, or <|recipient|>NAME<|content|>; 'all' is a message to the user."""
    calls = []
    for part in re.split(_RECIPIENT, text)[1:]:
        name, body = re.split(r"\n?<\|content\|>|\n", part + "\n", maxsplit=1)
        if name.strip() != "all":
            body = re.split(r"<\|(?:stop|from|eot_id)\|>", body, maxsplit=1)[0]
            calls.append(WrittenCall(name.strip(), body.strip() or {}))
    return calls


_RECIPIENT = r"(?:^|(?<=\n))>>>|<\|recipient\|>\s*"


def _strip_fence(text: str) -> str:
    """Return the content of a fenced code block that is the whole text, or the text."""
    fence = re.match(r"```[\w-]*\n?", text)
    if fence is None or not text.endswith("```") or len(text) < fence.end() + 3:
        return text
    return text[fence.end() : -3].strip()


# -- without marks -----------------------------------------------------------------------------------------------------


def _read_bare_calls(text: str, tool_names: Collection[str]) -> list[WrittenCall]:
    """Read calls without marks: the whole text, a fenced block at its end, or its last lines.

    An answer may be JSON, code or prose too, so a call counts if it names a tool, or if it can only be a call.
    """
    text = text.strip()
    candidates = [text]
    if text.endswith("```") and (start := text.rfind("```", 0, len(text) - 3)) >= 0:
        candidates.append(text[start:])
    lines = [match.start() + 1 for match in re.finditer(r"\n(?=[{\[]|[A-Za-z_][\w.-]*\()", text)]
    candidates += [text[place:] for place in dict.fromkeys([*lines[:1], *lines[-1:]])]
    for candidate in candidates:
        calls = _read_bare_candidate(_strip_fence(candidate), tool_names)
        if calls:
            return calls
    return []


def _read_bare_candidate(text: str, tool_names: Collection[str]) -> list[WrittenCall]:
    if (start := _PYTHON_START.match(text)) is not None:
        name = normalize_name(start.group().strip("[( \t\n"), tool_names)
        return _read_bare_python(text, name in tool_names)
    if text[:1] in ("{", "["):
        return _read_bare_json(text, tool_names)
    # ChatGLM and Functionary: the name on a line, then its arguments
    name, _, arguments = text.partition("\n")
    name = name.strip()
    if arguments.lstrip().startswith("{") and normalize_name(name, tool_names) in tool_names:
        return [WrittenCall(name, arguments.strip())]
    return []


def _read_bare_python(text: str, names_tool: bool) -> list[WrittenCall]:
    is_list = text.startswith("[")
    if not (is_list or (names_tool and text.endswith(")"))):
        return []
    try:
        calls = _read_python_calls(text)
    except ToolMisuse:
        if names_tool:
            raise
        return []
    is_call = names_tool or all(call.arguments and not call.is_positional for call in calls)
    return calls if is_call else []


def _read_bare_json(text: str, tool_names: Collection[str]) -> list[WrittenCall]:
    try:
        values, rest = _read_json_values(text)
    except ToolMisuse:
        names = re.match(r'[\[\s]*\{\s*"(?:name|tool_name)"\s*:\s*"([^"\n]*)"', text)
        if names is not None and normalize_name(names[1], tool_names) in tool_names:
            raise
        return []
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    calls = [
        _convert_json_call(item) for item in items if _is_call_object(item, tool_names, bool(rest))
    ]
    return calls if len(calls) == len(items) else []


def _is_call_object(value: Any, tool_names: Collection[str], has_rest: bool) -> bool:
    """Return whether a JSON value names a tool with arguments, or has nothing but a name and arguments."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in _NAME_KEYS if key in value), None)
    has_arguments = any(key in value for key in _ARGUMENT_KEYS)
    if not isinstance(name, str) or not has_arguments:
        return False
    if normalize_name(name, tool_names) in tool_names:
        return True
    arguments = next(value[key] for key in _ARGUMENT_KEYS if key in value)
    is_exact = set(value) <= {*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "tool_call_id"}
    return bool(tool_names) and not has_rest and is_exact and isinstance(arguments, dict)


def normalize_name(name: str, tool_names: Collection[str]) -> str:
    """Return a tool's name without what families write around it: 'functions.NAME:0', 'NAME.call'."""
    if name in tool_names:
        return name
    bare = re.sub(r":\d+$", "", name.strip())
    for prefix in ("functions.", "tools.", "default_api."):
        bare = bare.removeprefix(prefix)
    return bare if bare in tool_names else bare.removesuffix(".call")


_UNREAD_MARK = re.compile(
    rf"<{_B}?/?[\w:\uff5c]{{0,40}}(?:tool|function)[{_TYPOGRAPHIC}_ -]?(?:calls?|use)"
    rf"[\w{_TYPOGRAPHIC}]{{0,40}}{_B}?>"
    r"|\[/?TOOL_(?:CALLS?|REQUEST)\]|<\|python_tag\|>|<\|(?:action|tools?)_\w+\|>|```tool_\w+",
    re.IGNORECASE,
)

DIALECTS: tuple[Dialect, ...] = (
    # Hermes, Qwen, Qwen3-Coder, GLM 4.5, Granite 4, SmolLM3, Hunyuan
    Dialect("hermes", re.escape(OPEN_TAG), re.escape(CLOSE_TAG), must_close=True),
    Dialect("mistral", r"\[TOOL_CALLS\]", read=_read_mistral_calls),
    Dialect("deepseek_kimi", _SECTION_CALL, read=_read_section_calls),
    Dialect("llama_python_tag", r"<\|python_tag\|>", r"<\|eo[mt]_id\|>"),
    Dialect("llama4", r"<\|python_start\|>", r"<\|python_end\|>"),
    Dialect("gemma4", r"<\|tool_call>", r"<tool_call\|>"),
    Dialect("function_gemma", r"<start_function_call>", r"<end_function_call>"),
    Dialect("phi_granite", r"<\|tool_call\|>", r"<\|/tool_call\|>|<\|end_of_text\|>"),
    Dialect("lfm2", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
    Dialect("nemotron", r"<TOOLCALL>", r"</TOOLCALL>"),
    Dialect("apertus", r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
    Dialect("command", r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    Dialect("internlm", r"<\|action_start\|>\s*(?:<\|plugin\|>)?", r"<\|action_end\|>"),
    Dialect(
        "dsml",
        rf"<{_B}DSML{_B}(?:function|tool)_calls>",
        read=lambda text: read_call_body(re.sub(rf"{_B}DSML{_B}", "", text)),
    ),
    Dialect("minimax", r"<minimax:tool_call>", r"</minimax:tool_call>"),
    Dialect("seed", r"<seed:tool_call>", r"</seed:tool_call>"),
    Dialect("longcat", r"<longcat_tool_call>", r"</longcat_tool_call>"),
    Dialect("tool_calls", r"<tool_calls>", r"</tool_calls>"),  # Jamba, Hunyuan, MiniMax M1
    Dialect("function_calls", r"<function_calls>", r"</function_calls>"),  # Olmo 3
    Dialect("function_call", r"<function_?call>", r"</function_?call>"),  # Granite 20B, Glaive
    Dialect("function_tags", r"<function=", read=_read_function_tags),  # Llama 3.1, Functionary 3.1
    Dialect("invoke", _INVOKE.pattern, read=_read_invocations),
    Dialect("harmony", _HARMONY, template_mark=r"<\|channel\|>", read=_read_harmony_calls),
    Dialect("gemma", r"```tool_(?:code|call)\b", r"```"),
    Dialect("action", _ACTION, read=_read_action_calls),
    Dialect(
        "functionary", _RECIPIENT, template_mark=r">>>|<\|recipient\|>", read=_read_recipient_calls
    ),
)
