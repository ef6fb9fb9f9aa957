"""Prompts of chat requests: messages and tools through the model's chat template, calls of tools out of its answers."""

from __future__ import annotations

import functools
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import ChatBody, ChatMessage
from rl_core.data.chat import ChatRenderer
from rl_core.data.chat_template import renders_tools
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import DataError, PosttrainError, SettingsError, ToolMisuse
from rl_core.types import Conversation, Message, ToolCall

_MAX_RENDERERS = 64  # with tools, that are kept
_MAX_REMEMBERED_CALLS = 10_000  # answers with calls whose text is remembered
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's tokens, the tools that its answer may call, and the messages that were rendered."""

    ids: list[int]
    tools: Toolset | None
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's text, or the calls in it; `calls` are in the dialect's form."""

    content: str | None
    calls: list[dict[str, Any]]


class PromptBuilder:
    """Prompts for one tokenizer. Any thread; one prompt at a time."""

    def __init__(
        self,
        renderer: ChatRenderer,
        context: int,
        style: Literal["template", "instructions", "read"] = "template",
    ) -> None:
        """`context`: tokens of a prompt and its answer. `style`: see `serving.tools`."""
        self.renderer, self._context, self._style = renderer, context, style
        self._takes_tools = renders_tools(renderer.template.with_tools(()))
        self._longest = max(
            map(len, renderer.tokenizer.get_vocab()), default=1
        )  # characters of a token
        self._lock = threading.Lock()
        self._call_texts: OrderedDict[str, str] = (
            OrderedDict()
        )  # id of a call -> the text in which the model wrote it
        self._tool_renderers = functools.lru_cache(maxsize=_MAX_RENDERERS)(
            self._build_tool_renderer
        )

    def build_prompt(self, body: ChatBody) -> ChatPrompt:
        """The prompt of a request. Raises: RefusedRequest (422)."""
        if sum(len(message.text) for message in body.messages) > self._context * self._longest:
            raise self._build_length_error(f"more than {self._context} tokens")
        try:
            with self._lock:
                return self._render_prompt(body)
        except (DataError, SettingsError) as error:
            raise ServingHTTPError(422, f"messages: {error}", param="messages") from None

    def _render_prompt(self, body: ChatBody) -> ChatPrompt:
        schemas = (
            [tool.model_dump() for tool in body.tools or ()] if body.tool_choice != "none" else []
        )
        tools = _build_toolset(schemas) if schemas else None
        messages = [self._convert_message(message, tools) for message in body.messages]
        renderer, described = self.renderer, list[dict[str, Any]]()
        if tools is not None and self._style == "template" and self._takes_tools:
            renderer, described = self._tool_renderers(json.dumps(schemas, sort_keys=True)), schemas
        elif tools is not None and self._style == "instructions":
            messages = _insert_tool_instructions(messages, tools.describe_tools())
        if not messages:
            raise ServingHTTPError(422, "messages: there are none", param="messages")
        ids = renderer.encode_history_prompt(messages)
        if len(ids) >= self._context:
            raise self._build_length_error(f"{len(ids)} tokens")
        return ChatPrompt(ids, tools, Conversation(messages, described))

    def _build_length_error(self, length: str) -> ServingHTTPError:
        return ServingHTTPError(
            422,
            f"messages: {length}; a prompt and its answer have {self._context} together (serving.context)",
            param="messages",
            code="context_length_exceeded",
        )

    def _build_tool_renderer(self, schemas: str) -> ChatRenderer:
        return ChatRenderer(
            self.renderer.tokenizer,
            self.renderer.settings,
            json.loads(schemas),
            self.renderer.encoder,
        )

    def _convert_message(self, message: ChatMessage, tools: Toolset | None) -> Message:
        """A message in the library's form; calls that were made here stand as the model wrote them."""
        role = "system" if message.role == "developer" else message.role
        plain = Message(role=role, content=message.text)
        if message.tool_call_id is not None and role == "tool":
            plain["tool_call_id"] = message.tool_call_id
        if message.name is not None and role == "tool":
            plain["name"] = message.name
        if not message.tool_calls or role != "assistant":
            return plain
        text = self._call_texts.get(message.tool_calls[0].id)
        if text is not None:
            plain["content"] = text
            return plain
        calls = [_parse_tool_call(call.model_dump()) for call in message.tool_calls]
        if (
            tools is not None and not self._takes_tools
        ):  # the server was started anew: as a policy trained here writes
            known = [
                ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in calls
            ]
            if all(call.name in tools.tools for call in known):
                plain["content"] = "\n".join(
                    [*filter(None, [message.text]), *(tools.format_call(call) for call in known)]
                )
                return plain
        plain["tool_calls"] = calls
        return plain

    def decode_token(self, token: int) -> str:
        """Text of one token by itself, with U+FFFD for what is no character: bytes alone, and lone surrogates."""
        return _SURROGATE.sub(
            "\ufffd", str(self.renderer.tokenizer.decode([token], skip_special_tokens=False))
        )

    def parse_answer(self, text: str, tools: Toolset | None) -> ParsedAnswer:
        """The calls in an answer, or its text where there is none, or none that can be made."""
        try:
            found = tools.parse_all(text) if tools is not None else []
        except ToolMisuse:
            found = []
        if not found:
            return ParsedAnswer(text, [])
        calls: list[dict[str, Any]] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in found
        ]
        with self._lock:
            self._call_texts[calls[0]["id"]] = text
            while len(self._call_texts) > _MAX_REMEMBERED_CALLS:
                self._call_texts.popitem(last=False)
        return ParsedAnswer(None, calls)


def _build_toolset(schemas: Sequence[Mapping[str, Any]]) -> Toolset:
    """Tools that are read from answers; the client runs them. Raises: SettingsError for schemas that are none."""
    made = []
    for schema in schemas:
        function = schema["function"]
        properties = function["parameters"].get("properties", {})
        required = function["parameters"].get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise SettingsError(
                f"tools: {function['name']}: parameters is no JSON schema of an object"
            )
        kinds = {name: _convert_property_schema(kind) for name, kind in properties.items()}
        optional = tuple(name for name in kinds if name not in required)
        made.append(
            Tool(
                function["name"],
                function["description"],
                kinds,
                _refuse_tool_call,
                optional=optional,
            )
        )
    return Toolset(made)


def _convert_property_schema(schema: Any) -> Any:
    """A plain type where the schema says no more than that, so that the line format reads it."""
    if not isinstance(schema, dict):
        raise SettingsError("tools: a property is no JSON schema")
    if set(schema) <= {"type", "description", "title"} and isinstance(schema.get("type"), str):
        return {"integer": int, "number": float, "string": str}.get(schema["type"], schema)
    return schema


def _refuse_tool_call(**arguments: Any) -> str:
    raise PosttrainError("tools of a request are run by its client")


def _parse_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object. Raises: DataError."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise DataError(f"tool_calls: arguments of {function['name']} are no JSON") from None
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _insert_tool_instructions(messages: list[Message], text: str) -> list[Message]:
    """With the description of the tools in the system message."""
    if messages and messages[0]["role"] == "system":
        return [
            Message(role="system", content=f"{messages[0]['content']}\n\n{text}"),
            *messages[1:],
        ]
    return [Message(role="system", content=text), *messages]
