"""Prompts of chat requests: renders messages and tools with the model's chat template, parses tool calls in answers."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_core.chat.answer_rules import AnswerRules, ChatRequestError
from rl_core.chat.grammars import GrammarCompiler, compile_answer_rules
from rl_core.chat.requests import ChatMessage
from rl_core.data.chat import ChatRenderer
from rl_core.data.chat_template import renders_tools
from rl_core.data.images import find_image_reader, load_image, resolve_inside
from rl_core.environments.tool_dialects import OPEN_TAG
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import DataError, PosttrainError, SettingsError, ToolMisuse
from rl_core.inference.token_rules import TokenRules
from rl_core.types import Conversation, ImagePixels, Message, ToolCall

_MAX_RENDERERS = 64  # cached renderers with tools
_MAX_REMEMBERED_CALLS = 10_000  # answers with calls whose text is remembered
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages of a request as the chat template gets them, and the renderer that has the request's tools."""

    renderer: ChatRenderer
    tools: Toolset | None  # that the answer may call
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt's tokens, the tools that its answer may call, and the messages that were rendered."""

    ids: list[int]
    tools: Toolset | None
    conversation: Conversation
    images: list[ImagePixels] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer's text or its tool calls; `calls` are in OpenAI's format."""

    content: str | None
    calls: list[dict[str, Any]]
    call_error: str | None = None  # the text is a call that could not be read: why
    thought: str | None = None  # of an answer whose content is without it


def create_call_id() -> str:
    """Create a random id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


class PromptBuilder:
    """Builder of prompts for one tokenizer; thread-safe, one prompt at a time."""

    def __init__(
        self,
        renderer: ChatRenderer,
        context: int,
        style: Literal["template", "instructions", "read"] = "template",
        setting: str = "serving.context",
        images_folder: Path | None = None,
    ) -> None:
        """Prepare the renderer.

        Args:
            context: the most tokens of prompt plus answer.
            style: see `serving.tools`.
            setting: that sets the context, for messages.
            images_folder: whose files messages may name as images; None = only data URLs are read.
        """
        self.renderer, self._context, self._style = renderer, context, style
        self._setting, self._images_folder = setting, images_folder
        self._takes_tools = renders_tools(renderer.template.with_tools(()))
        # Characters of the longest token.
        self._longest = max(map(len, renderer.tokenizer.get_vocab()), default=1)
        self._lock = threading.Lock()
        self._grammars = GrammarCompiler(
            renderer.tokenizer, renderer.eos_ids, opens_thought=bool(renderer.opened_thought)
        )
        # Id of a call -> the text in which the model wrote it.
        self._call_texts: OrderedDict[str, str] = OrderedDict()
        self._tool_renderers = functools.lru_cache(maxsize=_MAX_RENDERERS)(
            self._build_tool_renderer
        )

    def build_prompt(
        self,
        messages: Sequence[ChatMessage],
        schemas: Sequence[Mapping[str, Any]],
        reasoning_effort: str | None = None,
    ) -> ChatPrompt:
        """Build the prompt of a request.

        Args:
            schemas: of the tools that the answer may call.
            reasoning_effort: variable of the chat template; None = not set.
        Raises: ChatRequestError.
        """
        rendered = self.render_messages(messages, schemas, reasoning_effort)
        ids = self.encode_prompt(rendered)
        try:
            images = rendered.renderer.read_images(rendered.conversation.messages)
        except (DataError, SettingsError) as error:
            raise ChatRequestError(f"messages: {error}", param="messages") from None
        return ChatPrompt(ids, rendered.tools, rendered.conversation, images)

    def compile_rules(
        self,
        rules: AnswerRules,
        schemas: Sequence[Mapping[str, Any]],
        vocab_size: int | None = None,
    ) -> TokenRules | None:
        """Compile the rules of a request; None = there are none.

        Args:
            schemas: of the tools that the answer may call.
        Raises: ChatRequestError.
        """
        is_tagged = OPEN_TAG in self.renderer.template.tool_source
        return compile_answer_rules(
            rules, schemas, self._grammars, is_tagged=is_tagged, vocab_size=vocab_size
        )

    def render_messages(
        self,
        messages: Sequence[ChatMessage],
        schemas: Sequence[Mapping[str, Any]],
        reasoning_effort: str | None = None,
    ) -> RenderedChat:
        """Convert the messages of a request; see `build_prompt`."""
        num_characters = sum(len(message.text) for message in messages)
        if num_characters > self.max_characters:
            raise self._build_length_error(f"more than {self._context} tokens")
        try:
            with self._lock:
                return self._render_messages(messages, schemas, reasoning_effort)
        except ChatRequestError:
            raise
        except (DataError, SettingsError) as error:
            raise ChatRequestError(f"messages: {error}", param="messages") from None

    @property
    def max_characters(self) -> int:
        """Longest text that may fit into the context; a longer one need not be tokenised."""
        return self._context * self._longest

    def encode_prompt(self, rendered: RenderedChat) -> list[int]:
        """Return the tokens of all messages and the header of the answer. Raises: ChatRequestError."""
        try:
            with self._lock:
                ids = rendered.renderer.encode_history_prompt(rendered.conversation.messages)
        except (DataError, SettingsError) as error:
            raise ChatRequestError(f"messages: {error}", param="messages") from None
        return self.check_prompt_length(ids)

    def extend_context(
        self, rendered: RenderedChat, num_known: int, context_ids: Sequence[int]
    ) -> list[int] | None:
        """Return the tokens of a context and the messages after it, up to the header of the answer.

        Args:
            num_known: messages that the context holds, in front of the new ones.
            context_ids: tokens of the context, up to the end of the policy's last turn.
        Returns: None if the chat template rewrites earlier turns, so that the prompt does not begin with the context.
        Raises: ChatRequestError.
        """
        new_messages = rendered.conversation.messages[num_known:]
        renderer = rendered.renderer
        try:
            with self._lock:
                if not renderer.needs_history_rewrite(new_messages):
                    ids = [*context_ids, *renderer.observation_ids(new_messages)]
                else:
                    ids = renderer.encode_history_prompt(rendered.conversation.messages)
                    if ids[: len(context_ids)] != list(context_ids):
                        return None
        except (DataError, SettingsError) as error:
            raise ChatRequestError(f"messages: {error}", param="messages") from None
        return self.check_prompt_length(ids)

    def check_prompt_length(self, ids: list[int]) -> list[int]:
        """Return the tokens of a prompt that leaves room for an answer. Raises: ChatRequestError."""
        if len(ids) >= self._context:
            raise self._build_length_error(f"{len(ids)} tokens")
        return ids

    def _render_messages(
        self,
        messages: Sequence[ChatMessage],
        schemas: Sequence[Mapping[str, Any]],
        reasoning_effort: str | None,
    ) -> RenderedChat:
        try:
            tools = _build_toolset(schemas) if schemas else None
        except SettingsError as error:
            reason = str(error).removeprefix("tools: ")
            raise ChatRequestError(f"tools: {reason}", param="tools") from None
        if tools is not None:
            tools.follow_template(self.renderer.template.tool_source)
        converted = [self._convert_message(message, tools) for message in messages]
        template_tools = list[dict[str, Any]]()
        renderer = self._select_renderer("[]", reasoning_effort)
        if tools is not None and self._style == "template" and self._takes_tools:
            text = json.dumps(schemas, sort_keys=True)
            renderer = self._select_renderer(text, reasoning_effort)
            template_tools = [dict(schema) for schema in schemas]
        elif tools is not None and self._style == "instructions":
            converted = _insert_tool_instructions(converted, tools.instructions())
        if not converted:
            raise ChatRequestError("messages: there are none", param="messages")
        return RenderedChat(renderer, tools, Conversation(converted, template_tools))

    def _build_length_error(self, length: str) -> ChatRequestError:
        return ChatRequestError(
            f"messages: {length}; a prompt and its answer have {self._context} together ({self._setting})",
            param="messages",
            code="context_length_exceeded",
        )

    def _select_renderer(self, schemas: str, reasoning_effort: str | None) -> ChatRenderer:
        """Return the renderer with these tools and this effort. Raises: ChatRequestError."""
        if schemas == "[]" and reasoning_effort is None:
            return self.renderer
        source = self.renderer.template.source
        if reasoning_effort is not None and re.search(r"\breasoning_effort\b", source) is None:
            raise ChatRequestError(
                "reasoning_effort: the model's chat template has no variable of this name; leave it out",
                param="reasoning_effort",
            )
        renderer = self._tool_renderers(schemas, reasoning_effort)
        if renderer.opened_thought != self.renderer.opened_thought:
            raise ChatRequestError(
                f"reasoning_effort: '{reasoning_effort}' changes how the chat template begins an answer, which is not "
                "supported",
                param="reasoning_effort",
            )
        return renderer

    def _build_tool_renderer(self, schemas: str, reasoning_effort: str | None) -> ChatRenderer:
        settings = self.renderer.settings
        if reasoning_effort is not None:
            variables = {**settings.chat_template_kwargs, "reasoning_effort": reasoning_effort}
            settings = dataclasses.replace(settings, chat_template_kwargs=variables)
        return ChatRenderer(
            self.renderer.tokenizer, settings, json.loads(schemas), self.renderer.encoder
        )

    def _convert_message(self, message: ChatMessage, tools: Toolset | None) -> Message:
        """Convert a message to the library's type; calls made here keep the text that the model wrote."""
        role = "system" if message.role == "developer" else message.role
        converted = Message(role=role, content=message.text)
        if message.images:
            converted["images"] = [self._load_image(address) for address in message.images]
        if message.tool_call_id is not None and role == "tool":
            converted["tool_call_id"] = message.tool_call_id
        if message.name is not None and role == "tool":
            converted["name"] = message.name
        if not message.tool_calls or role != "assistant":
            return converted
        text = self._call_texts.get(message.tool_calls[0]["id"])
        if text is not None:
            converted["content"] = text
            return converted
        calls = [_parse_tool_call(call) for call in message.tool_calls]
        if tools is not None and not self._takes_tools:
            # The server was restarted and forgot the text: format the calls as a policy trained here does.
            tool_calls = [
                ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in calls
            ]
            if all(call.name in tools.tools for call in tool_calls):
                lines = [message.text] if message.text else []
                lines += [tools.format(call) for call in tool_calls]
                converted["content"] = "\n".join(lines)
                return converted
        converted["tool_calls"] = calls
        return converted

    def _load_image(self, address: str) -> str:
        """Return the data URL of an image. Raises: ChatRequestError."""
        if find_image_reader(self.renderer.tokenizer) is None:
            raise ChatRequestError(
                "messages: image_url: this model reads no images", param="messages", status=400
            )
        try:
            folder = self._images_folder
            if folder is not None and not address.startswith(("data:", "http:", "https:")):
                address = str(resolve_inside(address, folder))
            return load_image(address, folder)
        except (DataError, SettingsError) as error:
            raise ChatRequestError(
                f"messages: image_url {error}", param="messages", status=400
            ) from None

    def decode_token(self, token: int) -> str:
        """Decode a single token; bytes that are no character and lone surrogates become U+FFFD."""
        return _SURROGATE.sub("\ufffd", self.renderer.decode_ids([token]))

    def parse_answer(
        self,
        text: str,
        tools: Toolset | None,
        create_id: Callable[[], str] = create_call_id,
        *,
        max_calls: int | None = None,
    ) -> ParsedAnswer:
        """Parse the tool calls of an answer; without valid calls the answer is its text, with what is wrong in them.

        Args:
            max_calls: further calls are left out, from later prompts, too; None = no limit.
        """
        try:
            tool_calls = tools.parse_all(text) if tools is not None else []
        except ToolMisuse as misuse:
            return ParsedAnswer(text, [], str(misuse))
        if not tool_calls:
            return ParsedAnswer(text, [])
        calls: list[dict[str, Any]] = [
            {
                "id": create_id(),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in tool_calls[:max_calls]
        ]
        if len(calls) < len(tool_calls):  # the text has calls that the client never sees
            return ParsedAnswer(None, calls)
        with self._lock:
            self._call_texts[calls[0]["id"]] = text
            while len(self._call_texts) > _MAX_REMEMBERED_CALLS:
                self._call_texts.popitem(last=False)
        return ParsedAnswer(None, calls)


def _build_toolset(schemas: Sequence[Mapping[str, Any]]) -> Toolset:
    """Build the tools that are parsed from answers and run by the client. Raises: SettingsError for bad schemas."""
    tools = []
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
        tools.append(
            Tool(
                function["name"],
                function["description"],
                kinds,
                _refuse_tool_call,
                optional=optional,
            )
        )
    return Toolset(tools)


def _convert_property_schema(schema: Any) -> Any:
    """Return a Python type if the schema specifies only a type, so that the line format can parse it."""
    if not isinstance(schema, dict):
        raise SettingsError("tools: a property is no JSON schema")
    if set(schema) <= {"type", "description", "title"} and isinstance(schema.get("type"), str):
        return {"integer": int, "number": float, "string": str}.get(schema["type"], schema)
    return schema


def _refuse_tool_call(**arguments: Any) -> str:
    raise PosttrainError("tools of a request are run by its client")


def _parse_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call into an object. Raises: DataError."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise DataError(f"tool_calls: arguments of {function['name']} are not JSON") from None
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _insert_tool_instructions(messages: list[Message], text: str) -> list[Message]:
    """Add the description of the tools to the system message."""
    if messages and messages[0]["role"] == "system":
        system = Message(role="system", content=f"{messages[0]['content']}\n\n{text}")
        return [system, *messages[1:]]
    return [Message(role="system", content=text), *messages]
