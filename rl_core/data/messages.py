"""Validation of chat messages in data files: OpenAI's fields, with tool calls, tool results, thoughts and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.data.files import BadRow, describe, read_json, read_text, refuse_unstorable

__all__ = ["checked_messages", "checked_tools"]

_ROLES = ("system", "user", "assistant", "tool")
_ALIASES = {"developer": "system"}  # OpenAI's newer name
_REASONING = ("reasoning_content", "reasoning", "thinking")  # as they are called by APIs
_OF_ROLE = {
    "assistant": (*_REASONING, "tool_calls", "weight", "train"),
    "tool": ("tool_call_id", "name"),
}
_HINTS = {
    "function_call": "write it as tool_calls: [{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}]",
    "from": "ShareGPT's name for role",
    "value": "ShareGPT's name for content",
}


def checked_messages(found: object, name: str) -> list[dict[str, Any]]:
    """Messages with role and content, and OpenAI's other fields where they say something.

    Content parts of type text are joined, arguments of calls become objects, the role developer is system, `train` is a
    weight, and fields that are null are left out, except within JSON text. Every other field is refused: nothing of a
    message is dropped.
    Raises: BadRow naming the field.
    """
    if not isinstance(found, list):
        raise BadRow(name, f"must be a list of objects, found {describe(found)}")
    if not found:
        raise BadRow(name, "is empty")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(found)]


def checked_tools(found: object, name: str = "tools") -> list[dict[str, Any]]:
    """Tool schemas of a row: a list of {"type": "function", "function": {...}}, or its JSON text.

    Bare functions {"name", "parameters", ...}, as in Glaive's data, are taken as such schemas.
    Raises: BadRow naming the field.
    """
    value = read_json(found, name) if isinstance(found, str) else found
    if not isinstance(value, list):
        raise BadRow(name, f"must be a list of tool schemas, found {describe(found)}")
    tools = []
    for index, tool in enumerate(value):
        if isinstance(tool, Mapping) and "name" in tool and "function" not in tool:
            tool = {"function": tool}
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name}[{index}]", "must be {'type': 'function', 'function': {'name': ..., ...}}")
        refuse_unstorable(tool, f"{name}[{index}]")
        tools.append({"type": "function", **(tool if isinstance(found, str) else _without_nulls(tool))})
    return tools


def _message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRow(place, f"must be an object with role and content, found {describe(message)}")
    fields = {name: value for name, value in message.items() if value is not None}  # Parquet fills in nulls
    role = read_text(fields, "role", f"{place}.role")
    role = _ALIASES.get(role, role)
    if role not in _ROLES:
        raise BadRow(f"{place}.role", f"must be one of {', '.join(_ROLES)}, found {describe(role)}")
    allowed = ("role", "content", *_OF_ROLE.get(role, ()))
    unknown = next((name for name in fields if name not in allowed), None)
    if unknown is not None:
        hint = _HINTS.get(str(unknown), f"known for {role}: {', '.join(allowed)}")
        raise BadRow(f"{place}.{unknown}", f"is not understood and would be lost; {hint}")
    others = (
        _assistant_fields(fields, place) if role == "assistant" else {n: fields[n] for n in allowed[2:] if n in fields}
    )
    for name in ("tool_call_id", "name"):
        if name in others:
            read_text(others, name, f"{place}.{name}")
    may_be_empty = role == "tool" or "tool_calls" in others
    return {"role": role, "content": _content(message, f"{place}.content", may_be_empty), **others}


def _content(fields: Mapping[str, Any], place: str, may_be_empty: bool) -> str:
    """Text of a message; parts of type text joined."""
    content = fields.get("content")
    if may_be_empty and content is None:
        return ""
    if not isinstance(content, list):
        return read_text(fields, "content", place, may_be_empty=may_be_empty)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            found = f"a part of type {kind!r}" if isinstance(kind, str) else describe(part)
            raise BadRow(f"{place}[{index}]", f"must be {{'type': 'text', 'text': ...}}, found {found}")
        texts.append(part["text"])
    return read_text({"content": "".join(texts)}, "content", place, may_be_empty=may_be_empty)


def _assistant_fields(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    thoughts = {
        name: read_text(fields, name, f"{place}.{name}", may_be_empty=True) for name in _REASONING if name in fields
    }
    if len(set(thoughts.values())) > 1:
        raise BadRow(f"{place}.{list(thoughts)[1]}", f"differs from {next(iter(thoughts))}; keep one of them")
    thought = next(iter(thoughts.values()), "").strip()
    if thought:
        kept["reasoning_content"] = thought
    if "tool_calls" in fields:
        kept["tool_calls"] = _calls(fields["tool_calls"], f"{place}.tool_calls")
        if not kept["tool_calls"]:
            del kept["tool_calls"]
    weight = _weight(fields, place)
    return kept if weight == 1 else {**kept, "weight": 0}


def _weight(fields: Mapping[str, Any], place: str) -> int:
    """1 = the message carries loss, 0 = it does not."""
    weights = {name: fields[name] for name in ("weight", "train") if name in fields}
    for name, value in weights.items():
        if value not in (0, 1):  # True and False equal 1 and 0
            raise BadRow(f"{place}.{name}", f"must be 0 or 1, found {describe(value)}")
    if len({int(value) for value in weights.values()}) > 1:
        raise BadRow(f"{place}.train", "contradicts weight; keep one of them")
    return int(next(iter(weights.values()), 1))


def _calls(found: object, place: str) -> list[dict[str, Any]]:
    value = read_json(found, place) if isinstance(found, str) else found
    if not isinstance(value, list):
        raise BadRow(place, f"must be a list of calls, found {describe(found)}")
    calls = []
    for index, call in enumerate(value):
        where, is_text = f"{place}[{index}]", isinstance(found, str)
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRow(where, "must be {'type': 'function', 'function': {'name': ..., 'arguments': {...}}}")
        unknown = [n for n, v in call.items() if v is not None and n not in ("type", "id", "function", "index")]
        unknown += [f"function.{n}" for n, v in function.items() if v is not None and n not in ("name", "arguments")]
        if unknown:
            raise BadRow(f"{where}.{unknown[0]}", "is not understood and would be lost; remove it")
        name = read_text(function, "name", f"{where}.function.name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments, is_text = read_json(arguments, f"{where}.function.arguments"), True
        if not isinstance(arguments, Mapping):
            raise BadRow(
                f"{where}.function.arguments", f"must be an object or its JSON text, found {describe(arguments)}"
            )
        refuse_unstorable(arguments, f"{where}.function.arguments")
        arguments = arguments if is_text else _without_nulls(arguments)  # JSON text says what it means
        kept = {"type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append(kept | ({"id": str(call["id"])} if call.get("id") is not None else {}))
    return calls


def _without_nulls(value: Any) -> Any:
    """A plain copy. Objects of a Parquet column share their fields, so those of other rows stand in it as nulls."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
