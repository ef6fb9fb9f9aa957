"""Tool calls as model families write them: one table of dialects, all read by the same reader of a call's body.

A dialect is an opening and a closing text; the first to open in a turn decides, those of the model's chat template
before others. Between them stands JSON (an object, or a list of them), XML (Qwen3-Coder, GLM, MiniMax, DeepSeek), calls
in Python's notation (Llama, LFM2, Gemma, Olmo), or a name with its arguments (Mistral, Kimi, gpt-oss, Functionary).
A text with the marks of a call that none of them can read is an error, never an answer.
Sources: the chat templates and model cards of the families; the parsers of vLLM, vllm/tool_parsers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.environments.tool_notations import (
    ARGUMENT_KEYS,
    CALL_FORM,
    INVOKE,
    NAME,
    PYTHON_START,
    WrittenCall,
    convert_json_call,
    find_json_name,
    flatten_calls,
    parse_call_json,
    read_call_body,
    read_function_tags,
    read_invocations,
    read_json_values,
    read_python_calls,
    strip_fence,
)
from rl_core.errors import ToolMisuse

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
_B = "[|\uff5c]"  # DeepSeek's bar is a wide one
_TYPOGRAPHIC = "\u2581"  # DeepSeek's underscore


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
    openings = {
        dialect: opened.start()
        for dialect in DIALECTS
        if (opened := re.search(dialect.opening, text)) is not None
    }
    if text.lstrip()[:1] in ("[", "{"):  # a bare call, whose texts may hold any marks
        try:
            if calls := _read_bare_candidate(text.strip(), tool_names):
                return calls
        except ToolMisuse:
            if not openings:
                raise
    if openings:
        return _read_marked_calls(text, openings, preferred)
    calls = _read_bare_calls(text, tool_names)
    if not calls and (mark := _UNREAD_MARK.search(text)) is not None:
        raise ToolMisuse(
            f"the tool call after {mark.group()[:40]!r} is not understood; write "
            f"{OPEN_TAG}{CALL_FORM}{CLOSE_TAG}"
        )
    return calls


def _read_marked_calls(
    text: str, openings: Mapping[Dialect, int], preferred: Collection[str]
) -> list[WrittenCall]:
    """Read the calls of the template's dialect, otherwise those of the one that opens first."""
    first = min(openings, key=lambda dialect: openings[dialect])
    chosen = next((dialect for dialect in openings if dialect.name in preferred), first)
    try:
        calls = _read_dialect(chosen, text)
    except ToolMisuse:
        if chosen is first:
            raise
        with contextlib.suppress(ToolMisuse):  # the template's marks may stand in another's text
            return _read_dialect(first, text)
        raise
    if not calls:
        raise ToolMisuse(f"the tool call is empty; it must be {CALL_FORM}")
    return calls


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


# -- other notations ---------------------------------------------------------------------------------------------------


def _read_wrapped_calls(text: str) -> list[WrittenCall]:
    """Read <tool_calls> with JSON (Jamba, MiniMax M1), or with a <tool_call> for each (Hunyuan)."""
    if OPEN_TAG in text:
        return _read_dialect(DIALECTS[0], text)
    body = text.partition("<tool_calls>")[2].partition("</tool_calls>")[0]
    return read_call_body(body)


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
            calls.append(WrittenCall(head.strip(), strip_fence(rest[0].strip()) or {}))
    return calls


_SECTION_CALL = rf"<{_B}tool[{_TYPOGRAPHIC}_]call[{_TYPOGRAPHIC}_]begin{_B}>"
_SECTION_SEPARATOR = rf"<{_B}tool[{_TYPOGRAPHIC}_]sep{_B}>|<{_B}tool_call_argument_begin{_B}>"
_HARMONY = rf"\bto=functions\.{NAME}|(?<=commentary )to={NAME}|(?<=assistant )to={NAME}"


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
            values, _ = read_json_values(message)
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
            calls.append(WrittenCall(name.strip(), strip_fence(body.strip()) or {}))
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


# -- without marks -----------------------------------------------------------------------------------------------------


def _read_bare_calls(text: str, tool_names: Collection[str]) -> list[WrittenCall]:
    """Read calls without marks: the whole text, a fenced block at its end, or its last lines.

    An answer may be JSON, code or prose too, so a call counts if it names a tool, or if it can only be a call.
    """
    text = text.strip()
    candidates = [text]
    if text.startswith("<code>") and text.endswith("</code>"):  # SmolLM3
        candidates.append(text[len("<code>") : -len("</code>")].strip())
    if text.endswith("```") and (start := text.rfind("```", 0, len(text) - 3)) >= 0:
        candidates.append(text[start:])
    lines = [match.start() + 1 for match in re.finditer(r"\n(?=[{\[]|[A-Za-z_][\w.-]*\()", text)]
    candidates += [text[place:] for place in dict.fromkeys([*lines[:1], *lines[-1:]])]
    for candidate in candidates:
        calls = _read_bare_candidate(strip_fence(candidate), tool_names)
        if calls:
            return calls
    return []


def _read_bare_candidate(text: str, tool_names: Collection[str]) -> list[WrittenCall]:
    if (start := PYTHON_START.match(text)) is not None:
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
        calls = read_python_calls(text)
    except ToolMisuse:
        if names_tool:
            raise
        return []
    is_call = names_tool or all(call.arguments and not call.is_positional for call in calls)
    return calls if is_call else []


def _read_bare_json(text: str, tool_names: Collection[str]) -> list[WrittenCall]:
    try:
        values, rest = read_json_values(text)
    except ToolMisuse:
        names = re.match(r'[\[\s]*\{\s*"(?:name|tool_name)"\s*:\s*"([^"\n]*)"', text)
        if names is not None and normalize_name(names[1], tool_names) in tool_names:
            raise
        return []
    items = [item for value in values for item in flatten_calls(value)]
    calls = [
        convert_json_call(item) for item in items if _is_call_object(item, tool_names, bool(rest))
    ]
    return calls if len(calls) == len(items) else []


def _is_call_object(value: Any, tool_names: Collection[str], has_rest: bool) -> bool:
    """Return whether a JSON value names a tool with arguments, or has nothing but a name and arguments."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = find_json_name(value)
    has_arguments = any(key in value for key in ARGUMENT_KEYS)
    if not isinstance(name, str) or not has_arguments:
        return False
    if normalize_name(name, tool_names) in tool_names:
        return True
    arguments = next(value[key] for key in ARGUMENT_KEYS if key in value)
    is_exact = set(value) <= {"name", "tool_name", *ARGUMENT_KEYS, "id", "type", "tool_call_id"}
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
    Dialect("phi", r"\bfunctools(?=\[)"),
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
    Dialect("tool_calls", r"<tool_calls>", read=_read_wrapped_calls),
    Dialect("function_calls", r"<function_calls>", r"</function_calls>"),  # Olmo 3
    Dialect("function_call", r"<function_?call>", r"</function_?call>"),  # Granite 20B, Glaive
    Dialect("function_tags", r"<function=", read=read_function_tags),  # Llama 3.1, Functionary 3.1
    Dialect("invoke", INVOKE.pattern, read=read_invocations),
    Dialect("harmony", _HARMONY, template_mark=r"<\|channel\|>", read=_read_harmony_calls),
    Dialect("gemma", r"```tool_(?:code|call)\b", r"```"),
    Dialect("action", _ACTION, read=_read_action_calls),
    Dialect(
        "functionary", _RECIPIENT, template_mark=r">>>|<\|recipient\|>", read=_read_recipient_calls
    ),
)
