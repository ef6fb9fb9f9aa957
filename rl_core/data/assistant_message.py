"""Text of an assistant message with a thought and calls of tools, as the chat template writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rl_core.data.chat_template import ChatTemplate
from rl_core.data.reasoning import split_thought
from rl_core.data.template_probe import TemplateFacts
from rl_core.errors import DataError
from rl_core.types import Message

__all__ = ["assistant_text", "call_text", "in_history"]


def assistant_text(template: ChatTemplate, facts: TemplateFacts, message: Message) -> str:
    """Text of the last message of a conversation, between its header (without an opened thought) and its end of turn.

    A template that leaves out reasoning_content gets it between its thought markers; one that leaves out tool_calls
    gets them as `call_text`, which every environment reads.
    Raises: DataError for a thought where the tokenizer knows no markers for one, or a header or an end of its own.
    """
    content, thought, calls = message.get("content") or "", message.get("reasoning_content"), message.get("tool_calls")
    if not thought and not calls:
        return content
    pair = facts.thought_markers
    if pair is not None and not thought:
        thought, content = split_thought(content, pair)
    if thought and pair is None and not facts.renders_reasoning:
        raise DataError(
            "reasoning_content: the chat template does not render it and has no markers for a thought; write it into "
            "content, or name a template that does in model.chat_template"
        )
    if calls and not facts.renders_calls:
        content = "\n".join([*([content] if content else []), *map(call_text, calls)])
    plain: dict[str, Any] = {"role": "assistant", "content": content}
    if calls and facts.renders_calls:
        plain["tool_calls"] = _in_form(calls, facts.renders_calls)
    if thought and facts.renders_reasoning:
        plain["reasoning_content"] = thought
    text = _body(template, facts, plain) if len(plain) > 2 else content
    if not thought or facts.renders_reasoning:
        return text
    assert pair is not None
    _, text = split_thought(text, pair)  # an empty one, which some templates write into every last turn
    return f"{pair[0]}\n{thought}\n{pair[1]}\n\n{text}"


def in_history(
    template: ChatTemplate, facts: TemplateFacts, content: str, fields: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Content and other fields of an earlier assistant message, in the form that the template renders."""
    if (fields.get("tool_calls") and not facts.renders_calls) or (
        fields.get("reasoning_content") and not facts.renders_reasoning
    ):
        message = cast(Message, {"role": "assistant", "content": content, **fields})
        return assistant_text(template, facts, message), {}
    if fields.get("tool_calls"):
        fields = {**fields, "tool_calls": _in_form(fields["tool_calls"], facts.renders_calls)}
    return content, fields


def call_text(call: Mapping[str, Any]) -> str:
    """Text of an OpenAI-style call, as Hermes models write it and `Toolset.parse` reads it."""
    function = call["function"]
    return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': function['arguments']})}</tool_call>"


def _body(template: ChatTemplate, facts: TemplateFacts, message: Mapping[str, Any]) -> str:
    """Rendered message between its header and its end of turn."""
    opening = [{"role": "user", "content": "U"}]
    header = template.text(opening).removesuffix(facts.prefill)
    whole = template.text([*opening, message], generation_prompt=False)
    advice = "write it into content, or name another template in model.chat_template"
    fields = ", ".join(name for name in message if name not in ("role", "content"))
    if not whole.startswith(header):
        raise DataError(
            f"the chat template writes another header before a message with {fields} than before the policy's turn; "
            + advice
        )
    body = whole[len(header) :].rstrip("\n")
    if not facts.writes_end:
        return body
    if not body.rstrip().endswith(facts.end_of_turn):
        raise DataError(
            f"the chat template does not end a message with {fields} by {facts.end_of_turn}, as it ends others, so a "
            f"policy would not stop there; {advice}"
        )
    return body.rstrip().removesuffix(facts.end_of_turn)


def _in_form(calls: Sequence[Mapping[str, Any]], form: str) -> list[dict[str, Any]]:
    """Calls with arguments as an object, or as its JSON text."""
    if form == "object":
        return [dict(call) for call in calls]
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]
