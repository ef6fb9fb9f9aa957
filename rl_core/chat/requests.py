"""Chat requests in OpenAI's format: the messages and options that decide an answer.

The chat server parses bodies strictly (`posttrain/serving/request_bodies.py`). The recorder of agents uses
`parse_chat_request`, which ignores unknown parameters, as the clients of many frameworks send them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.chat.answer_rules import (
    AnswerRules,
    ChatRequestError,
    parse_answer_rules,
    select_callable_tools,
)
from rl_core.settings.common import MIN_TEMPERATURE

MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_MESSAGES, MAX_TOOLS, MAX_STOPS = 10_000, 128, 16
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"  # OpenAI's

# OpenAI parameters that would change the answer: only the values that change nothing are accepted.
_PARAMETERS_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
}
# OpenAI parameters about accounts and storage, which this server does not have.
_IGNORED_PARAMETERS = (
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a request. `tool_calls` are in OpenAI's format, with arguments as JSON text."""

    role: str
    text: str
    name: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tool_call_id: str | None = None
    images: list[str] = field(default_factory=list)  # addresses, in the order of the text's markers


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat request; None = not set."""

    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)  # that tool_choice allows
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    rules: AnswerRules = field(default_factory=AnswerRules)


def drop_ineffective_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Drop parameters that change nothing. Raises: ChatRequestError for unsupported ones that would."""
    effective = {}
    for name, value in parameters.items():
        if name in _PARAMETERS_WITHOUT_EFFECT:
            if value is not None and value not in _PARAMETERS_WITHOUT_EFFECT[name]:
                raise ChatRequestError(f"{name}: is not supported here; leave it out", param=name)
        elif name not in _IGNORED_PARAMETERS:
            effective[name] = value
    return effective


def parse_chat_request(body: bytes) -> ChatRequest:
    """Parse the body of a chat request; parameters that are not named in `ChatRequest` are ignored.

    Whether a `tool_choice` that demands a call is obeyed is decided by the session.
    Raises: ChatRequestError that names the field.
    """
    try:
        text = body.decode("utf-8")
        parameters = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatRequestError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(parameters, dict):
        raise ChatRequestError("the body must be a JSON object")
    if "\\u" in text:
        _refuse_surrogates(parameters)
    fields = _Fields(drop_ineffective_parameters(parameters))
    rules = parse_answer_rules(fields.values)
    tools = [_parse_tool(tool) for tool in fields.read_list("tools", MAX_TOOLS)]
    stream_options = fields.values.get("stream_options")
    max_tokens = fields.read_integer("max_completion_tokens", 1)
    if max_tokens is None:
        max_tokens = fields.read_integer("max_tokens", 1)
    messages = fields.read_list("messages", MAX_MESSAGES)
    return ChatRequest(
        model=fields.read_text("model"),
        messages=[_parse_message(message, index) for index, message in enumerate(messages)],
        tools=select_callable_tools(fields.values.get("tool_choice"), tools),
        stream=bool(fields.values.get("stream")),
        include_usage=isinstance(stream_options, dict)
        and bool(stream_options.get("include_usage")),
        n=fields.read_integer("n", 1, 128) or 1,
        logprobs=bool(fields.values.get("logprobs")),
        top_logprobs=fields.read_integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0,
        max_tokens=max_tokens,
        stop=fields.read_stops(),
        temperature=fields.read_temperature(),
        top_p=fields.read_share("top_p", above_zero=True),
        top_k=fields.read_integer("top_k", 0),
        min_p=fields.read_share("min_p"),
        rules=rules,
    )


def _refuse_surrogates(parameters: dict[str, Any]) -> None:
    try:
        json.dumps(parameters, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ChatRequestError(f"the body holds half of a surrogate pair ({half})") from None


class _Fields:
    """Parameters of a request, each read with its type and range. Raises: ChatRequestError."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def read_text(self, name: str) -> str:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise ChatRequestError(f"{name}: must be text", param=name)
        return value or ""

    def read_list(self, name: str, most: int) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise ChatRequestError(f"{name}: must be a list of at most {most}", param=name)
        return value

    def read_integer(self, name: str, least: int, most: int = 2**31) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ChatRequestError(f"{name}: must be an integer from {least} to {most}", param=name)
        return value

    def _read_number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ChatRequestError(f"{name}: must be a number", param=name)
        if not math.isfinite(value):
            raise ChatRequestError(f"{name}: must be finite", param=name)
        return float(value)

    def read_temperature(self) -> float | None:
        value = self._read_number("temperature")
        if value is not None and not (value == 0 or MIN_TEMPERATURE <= value <= 5):
            raise ChatRequestError(
                f"temperature: must be 0, or from {MIN_TEMPERATURE:g} to 5", param="temperature"
            )
        return value

    def read_share(self, name: str, *, above_zero: bool = False) -> float | None:
        value = self._read_number(name)
        if value is not None and not (0 <= value <= 1 and (value or not above_zero)):
            raise ChatRequestError(f"{name}: must be between 0 and 1", param=name)
        return value

    def read_stops(self) -> tuple[str, ...]:
        value = self.values.get("stop")
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        is_valid = isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)
        if not is_valid or len(stops) > MAX_STOPS:
            raise ChatRequestError(
                f"stop: must be a text or a list of at most {MAX_STOPS} texts", param="stop"
            )
        return tuple(stops)


def _parse_message(message: Any, index: int) -> ChatMessage:
    place = f"messages.{index}"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ChatRequestError(f"{place}.role: must be one of {', '.join(ROLES)}", param="messages")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise ChatRequestError(f"{place}.{name}: must be text", param="messages")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatRequestError(f"{place}.tool_calls: must be a list", param="messages")
    return ChatMessage(
        role=message["role"],
        text=_parse_content(message.get("content"), place),
        name=message.get("name"),
        tool_calls=[_parse_call(call, place) for call in calls],
        tool_call_id=message.get("tool_call_id"),
    )


def _parse_content(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        raise ChatRequestError(
            f"{place}.content: must be text, or parts of the type text", param="messages"
        )
    return "".join(part["text"] for part in content)


def _parse_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRequestError(f"{place}.tool_calls: a call needs function.name", param="messages")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str) or not isinstance(call.get("id", ""), str):
        raise ChatRequestError(
            f"{place}.tool_calls: id and function.arguments must be text", param="messages"
        )
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parse_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ChatRequestError(
            "tools: only tools of the type function are supported", param="tools"
        )
    name, parameters = function.get("name"), function.get("parameters") or {}
    if not isinstance(name, str) or re.fullmatch(TOOL_NAME_PATTERN, name) is None:
        raise ChatRequestError("tools: function.name must be a name", param="tools")
    description = function.get("description") or ""
    if not isinstance(parameters, dict) or not isinstance(description, str):
        raise ChatRequestError(
            f"tools: {name}: parameters must be an object, description text", param="tools"
        )
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def build_message_key(message: ChatMessage) -> str:
    """Build a text that is equal for equal messages, whatever the ids of their calls."""
    role = "system" if message.role == "developer" else message.role
    calls = [_build_call_key(call) for call in message.tool_calls]
    return json.dumps([role, message.text, calls])


def build_reply_key(reply: dict[str, Any]) -> str:
    """Build the key of a reply once the agent sends it back as a message."""
    calls = [_build_call_key(call) for call in reply.get("tool_calls", ())]
    return json.dumps(["assistant", reply["content"] or "", calls])


def _build_call_key(call: dict[str, Any]) -> list[Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return [function["name"], json.dumps(arguments, sort_keys=True)]


def export_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message of a request to OpenAI's format."""
    exported: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        exported["tool_calls"] = message.tool_calls
    if message.tool_call_id is not None:
        exported["tool_call_id"] = message.tool_call_id
    return exported
