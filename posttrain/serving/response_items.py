"""Conversion between OpenAI's responses API and its chat API: requests, items of input and output, response objects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.serving.errors import ServingHTTPError
from rl_core.chat.prompts import ParsedAnswer
from rl_core.chat.responses import ResponseFormatter, resolve_finish_reason
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest

# Parameters that are passed on under their name in the chat API.
_SAME_NAMES = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "user",
    "tool_choice",
    "parallel_tool_calls",
)
_EXTENSIONS = ("seed", "top_k", "min_p", "stop", "deadline_seconds")  # of the chat route
# About accounts, caches and the tools of OpenAI's platform, which are not here.
_IGNORED = (
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "max_tool_calls",
    "stream_options",
)
# The values that change nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}
_OWN = (
    "input",
    "instructions",
    "tools",
    "text",
    "reasoning",
    "include",
    "top_logprobs",
    "max_output_tokens",
    "previous_response_id",
    "store",
)
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # there is no encrypted reasoning to include
_TEXT_PARTS = ("input_text", "output_text", "text")
# Names in the chat API -> names in the responses API, for errors.
_PARAMETER_NAMES = {
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
}

Message = dict[str, Any]  # of the chat API


@dataclass(slots=True)
class ResponseRequest:
    """A checked request of the responses API."""

    chat: dict[str, Any]  # parameters of the chat request, without its messages
    messages: list[Message]  # of `input`
    items: list[dict[str, Any]]  # of `input`
    parameters: dict[str, Any]  # as sent

    @property
    def previous_id(self) -> str | None:
        """The response that this one continues."""
        return self.parameters.get("previous_response_id")

    @property
    def is_stored(self) -> bool:
        """True = later requests may continue it."""
        return self.parameters.get("store") is not False

    def build_chat_parameters(self, history: Sequence[Message]) -> dict[str, Any]:
        """Build the parameters of the chat request. Instructions of earlier requests do not count."""
        instructions = self.parameters.get("instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        return self.chat | {"messages": [*system, *history, *self.messages]}


def convert_response_request(parameters: Mapping[str, Any]) -> ResponseRequest:
    """Convert a request to a chat request. Raises: ServingHTTPError (422) that names the parameter."""
    values = {name: value for name, value in parameters.items() if value is not None}
    chat: dict[str, Any] = {}
    for name, value in values.items():
        if name in (*_SAME_NAMES, *_EXTENSIONS):
            chat[name] = value
        elif name in _WITHOUT_EFFECT:
            if value not in _WITHOUT_EFFECT[name]:
                raise _refuse(name, "is not supported here; leave it out")
        elif name not in (*_OWN, *_IGNORED):
            raise _refuse(name[:80], "is unknown")
    for name, kind in (("instructions", str), ("previous_response_id", str), ("store", bool)):
        if not isinstance(values.get(name, kind()), kind):
            raise _refuse(name, f"must be {'text' if kind is str else 'true or false'}")
    if "max_output_tokens" in values:
        chat["max_completion_tokens"] = values["max_output_tokens"]
    if "tools" in values:
        chat["tools"] = [_convert_tool(tool) for tool in _require_list("tools", values["tools"])]
    if not chat.get("tools"):
        chat.pop("parallel_tool_calls", None)
    chat |= _convert_text_options(values.get("text", {}))
    reasoning = values.get("reasoning", {})
    if not isinstance(reasoning, Mapping):
        raise _refuse("reasoning", "must be an object")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    included = _require_list("include", values.get("include", []))
    for name in included:
        if name not in _INCLUDED:
            raise _refuse("include", f"{str(name)[:80]!r} is not supported here")
    if _LOGPROBS in included:
        chat |= {"logprobs": True, "top_logprobs": values.get("top_logprobs", 0)}
    items = read_input_items(values.get("input", []))
    return ResponseRequest(chat, convert_items(items), items, dict(values))


def rename_parameter(error: ServingHTTPError) -> ServingHTTPError:
    """Return the error of a chat request with the parameter's name in the responses API."""
    chat_name = (error.param or "").split(".")[0]
    name = _PARAMETER_NAMES.get(chat_name)
    if name is None:
        return error
    message = str(error).replace(chat_name, name, 1)
    renamed = ServingHTTPError(error.status, message, param=name, code=error.code)
    renamed.headers.update(error.headers)
    return renamed


def read_input_items(value: Any) -> list[dict[str, Any]]:
    """Return the items of `input`, each with an id. Raises: ServingHTTPError."""
    if isinstance(value, str):
        part = {"type": "input_text", "text": value}
        value = [{"type": "message", "role": "user", "content": [part]}]
    items = _require_list("input", value)
    for item in items:
        if not isinstance(item, dict):
            raise _refuse("input", "must be text or a list of items")
    return [{"id": item.get("id") or f"item_{secrets.token_hex(12)}", **item} for item in items]


def convert_items(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert items to messages of a chat; calls that follow one another are one message. Raises: ServingHTTPError."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            content = _join_text(item.get("content"), f"input.{index}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            content = _join_text(item.get("output"), f"input.{index}.output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
        elif kind != "reasoning":  # a thought that the client sends back is not part of the prompt
            raise _refuse("input", f"items of the type {str(kind)[:80]!r} are not supported")
    return messages


def _join_text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refuse("input", f"{place} must be text or a list of parts")
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise _refuse("input", f"{place}: only parts of text are supported")
    return "".join(part["text"] for part in content)


def _convert_tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise _refuse(
            "tools", f"a tool of the type {str(kind)[:80]!r}: only functions are supported"
        )
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _convert_text_options(text: Any) -> dict[str, Any]:
    if not isinstance(text, Mapping):
        raise _refuse("text", "must be an object")
    if text.get("verbosity") not in (None, "medium"):
        raise _refuse("text.verbosity", "is not supported here; leave it out")
    declared = text.get("format")
    if declared is None:
        return {}
    if not isinstance(declared, Mapping):
        raise _refuse("text.format", "must be an object")
    if declared.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": dict(declared)}}
    return {"response_format": dict(declared)}


def _require_list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > 10_000:
        raise _refuse(name, "must be a list")
    return value


def _refuse(name: str, reason: str) -> ServingHTTPError:
    return ServingHTTPError(422, f"{name}: {reason}", param=name)


@dataclass(slots=True)
class ResponseBuilder:
    """Builder of the response object of one request, while it is answered and once it has ended."""

    id: str
    request: ResponseRequest
    formatter: ResponseFormatter
    created_at: int = field(default_factory=lambda: int(time.time()))
    message_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def build_response(
        self, served: ServedRequest, answer: ParsedAnswer | None, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Build the response object; `answer` is None while it is in progress."""
        sent, version = self.request.parameters, served.policy_version
        usage, status, details = None, "in_progress", None
        if answer is not None:
            sequence = served.sequence
            assert isinstance(sequence, AnswerSequence)
            usage = _format_usage(self.formatter.count_usage([served]))
            is_cut = resolve_finish_reason(sequence, answer) == "length"
            status = "incomplete" if is_cut else "completed"
            details = {"reason": "max_output_tokens"} if is_cut else None
        text = sent.get("text") or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": sent.get("instructions"),
            "max_output_tokens": sent.get("max_output_tokens"),
            "model": self.formatter.model,
            "output": output,
            "parallel_tool_calls": sent.get("parallel_tool_calls", True),
            "previous_response_id": self.request.previous_id,
            "reasoning": {"effort": None, "summary": None, **(sent.get("reasoning") or {})},
            "store": self.request.is_stored,
            "temperature": sent.get("temperature", 1.0),
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": sent.get("tool_choice", "auto"),
            "tools": sent.get("tools", []),
            "top_p": sent.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": usage,
            "user": sent.get("user"),
            "metadata": sent.get("metadata", {}),
            "policy_version": version,
            "model_version": self.formatter.format_weights_name(version),
        }

    def build_output(self, served: ServedRequest, answer: ParsedAnswer) -> list[dict[str, Any]]:
        """Build the items of an answer that has ended: a thought, its calls or its text."""
        sequence = served.sequence
        assert isinstance(sequence, AnswerSequence)
        items: list[dict[str, Any]] = []
        if answer.thought is not None:
            part = {"type": "reasoning_text", "text": answer.thought}
            reasoning_id = f"rs_{self.message_id.removeprefix('msg_')}"
            items.append(
                {"id": reasoning_id, "type": "reasoning", "summary": [], "content": [part]}
            )
        if answer.calls:
            return items + [build_call_item(call) for call in answer.calls]
        logprobs = self.formatter.format_logprobs(
            sequence.tokens, sequence.logprobs, served.top_tokens
        )
        part = build_text_part(answer.content or "", logprobs)
        is_cut = resolve_finish_reason(sequence, answer) == "length"
        message = build_message_item(self.message_id, "incomplete" if is_cut else "completed", part)
        if answer.call_error is not None:
            message["tool_call_error"] = answer.call_error
        return [*items, message]


def build_text_part(text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Build the part of a message that holds its text."""
    content = [] if logprobs is None else logprobs["content"]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": content}


def build_message_item(
    item_id: str, status: str, part: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Build the item of a message."""
    content = [] if part is None else [part]
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def build_call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    """Build the item of a function call from the chat API's."""
    return {
        "id": f"fc_{call['id'].removeprefix('call_')}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _format_usage(usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
