"""Chat templates: rendering with fixed variables, tools and date; examination; text of assistant messages with calls.

Examination renders small conversations with placeholders and finds roles, end of turn, thoughts, calls, tools and date
in the text, so nothing is assumed about a model family. A template that cannot be trained on exactly is refused, with
the way out.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from rl_core.data.model_text import THOUGHT_MARKERS, TURN_MARKERS, split_thought
from rl_core.data.token_ids import find_end_texts
from rl_core.data.tokenizer import select_chat_template
from rl_core.errors import DataError, SettingsError
from rl_core.settings import ModelSettings
from rl_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Of strftime; the longer ones first, as their text is replaced.
_DIRECTIVES = [
    *(f"%-{letter}" for letter in "dmHIMSj"),
    *(f"%{letter}" for letter in "aAbBcdDeFGHIjmMnpRSTuUVwWxXyYzZ"),
]


class ChatTemplate:
    """Chat template of a tokenizer (a plain one if it has none) as a function of messages.

    The same messages always give the same text: `strftime_now` of a template prints `settings.chat_template_date`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: ModelSettings | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`tools`: JSON schemas, as `Toolset.schema()` gives them."""
        self.tokenizer = tokenizer
        self.settings = settings or ModelSettings()
        self.tools = [dict(tool) for tool in tools]
        self.is_plain = not tokenizer.chat_template
        self.source = select_chat_template(tokenizer, has_tools=bool(self.tools))
        self._frozen = _freeze_date(
            self.source, datetime.date.fromisoformat(self.settings.chat_template_date)
        )

    @property
    def tool_source(self) -> str:
        """The template that renders tools."""
        return select_chat_template(self.tokenizer, has_tools=True)

    @property
    def can_print_date(self) -> bool:
        """The template asks for the date."""
        return "strftime_now" in self.source

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return the same template with other tools."""
        return ChatTemplate(self.tokenizer, self.settings, tools)

    def without_tools(self) -> ChatTemplate:
        """Return the same template without the tools; the one for conversations without them if it needs some."""
        other = copy.copy(self)
        other.tools = []
        needs_tools = self.tools and not _render_or_empty(other, [_build_user_message()])
        return self.with_tools(()) if needs_tools else other

    def with_date(self, day: str) -> ChatTemplate:
        """Return the same template on another day (YYYY-MM-DD)."""
        other = copy.copy(self)
        other._frozen = _freeze_date(self.source, datetime.date.fromisoformat(day))
        return other

    def render_messages(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool = True
    ) -> str:
        """Render messages, and the header of the next assistant message.

        Raises: DataError where the template refuses them.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list[Any](self.tools) or None,
                chat_template=self._frozen,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.settings.chat_template_kwargs,
            )
        except Exception as error:  # templates may raise any exception
            if not messages:
                raise DataError(
                    "no message comes before the assistant's first one; begin the conversation with that of the "
                    f"system or the user (the tokenizer's chat template: {error})"
                ) from error
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the tokenizer's chat template refuses this conversation ({roles}): {error}"
            ) from error
        assert isinstance(text, str)
        return text


def _freeze_date(source: str, day: datetime.date) -> str:
    """Return the template with its own `strftime_now`, which prints that day.

    transformers offers the real clock under this name, and lets no argument of the rendering be a function. The line
    break
    after the macro is removed by the rendering (trim_blocks), so the template still starts at the start of a line.
    """
    if "strftime_now" not in source:
        return source
    moment = datetime.datetime.combine(day, datetime.time())
    chain = "".join(
        f" | replace({json.dumps(d)}, {json.dumps(moment.strftime(d))})" for d in _DIRECTIVES
    )
    return f"{{% macro strftime_now(format) %}}{{{{ format{chain} }}}}{{% endmacro %}}\n{source}"


PLACEHOLDER = "Zq7MarkXw"  # message that is located in the rendered text
_THOUGHT = "Zq7ThoughtXw"
_TOOL, _ARGUMENT, _VALUE = "zq7_tool", "zq7_argument", "zq7value"
_CALL_ID = "zq7call01"  # nine letters and digits, as Mistral's templates ask for
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {_ARGUMENT: {"type": "string"}},
            "required": [_ARGUMENT],
        },
    },
}
_Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Properties of a chat template, detected by rendering."""

    end_of_turn: str  # token after an assistant message
    writes_end: bool  # the template puts it there itself; False = the tokenizer's EOS stands in
    has_system: bool
    has_tool: bool  # the role tool
    has_repeats: bool  # two messages of a role one after the other
    control: tuple[
        str, ...
    ]  # tokens that could forge a role or an end: never encoded from a message's text
    markers: tuple[str, ...]  # tokens around thoughts and calls, encoded as such
    thought_markers: tuple[str, str] | None  # around a thought
    prefill: str  # thought in the generation prompt, opened ("<think>\n") or opened and closed; "" = none
    closing: str  # what ends an opened thought that is empty
    renders_reasoning: bool  # reasoning_content of the last message
    renders_calls: Literal[
        "", "object", "text"
    ]  # tool_calls, with their arguments as an object or as JSON text
    takes_tools: bool
    drops_thoughts: tuple[
        str, ...
    ]  # kinds of messages after which an earlier turn has lost its thought: user, tool
    rewrites: tuple[
        str, ...
    ]  # kinds of messages after which an earlier turn is another text than was sampled
    prints_date: bool
    has_generation_blocks: bool  # {% generation %}, which marks the assistant's part

    @property
    def opens_thought(self) -> bool:
        """The generation prompt leaves a thought open."""
        return (
            bool(self.prefill)
            and self.thought_markers is not None
            and self.thought_markers[1] not in self.prefill
        )


def compile_token_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Compile a pattern of any of these texts, longest first; it matches nothing if there are none."""
    return re.compile(
        "|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True)) or r"(?!)"
    )


def examine_template(template: ChatTemplate) -> TemplateFacts:
    """Examine the template.

    Raises: DataError, SettingsError where nothing exact can be trained with it, or with these variables or tools.
    """
    _refuse_unknown_settings(template)
    bare = template.without_tools()
    refuse_unusable_template(bare)
    added = [
        token.content
        for token in template.tokenizer.added_tokens_decoder.values()
        if token.content.strip()
    ]
    special = {str(token) for token in template.tokenizer.all_special_tokens}
    special |= {
        token.content for token in template.tokenizer.added_tokens_decoder.values() if token.special
    }
    opening = bare.render_messages([_build_user_message()], generation_prompt=False)
    prompt = bare.render_messages([_build_user_message()])
    answered = bare.render_messages(
        [_build_user_message(), _build_assistant_message()], generation_prompt=False
    )
    before, _, after = answered.partition(PLACEHOLDER)
    end = compile_token_pattern([*special, *added]).match(after.lstrip())
    end_of_turn = end.group() if end else str(template.tokenizer.eos_token)
    generation = prompt.removeprefix(opening) if prompt.startswith(opening) else ""
    prefill, pair = _find_prefill(generation)
    pair = pair or _find_thought_markers(bare, added)
    arguments = _find_call_argument_form(bare, end_of_turn, answered.count(end_of_turn))
    has_system = _renders_roles(bare, "system", "user")
    control, markers = _find_control_and_marker_tokens(
        bare, added, special, end_of_turn, answered, arguments
    )
    dropping, rewriting = _find_rewritten_turns(
        bare, _build_thought_turn(prefill, pair), has_system
    )
    return TemplateFacts(
        end_of_turn=end_of_turn,
        writes_end=end is not None,
        has_system=has_system,
        has_tool=_has_tool_role(bare, prefill),
        has_repeats=_renders_roles(bare, "user", "user")
        and _renders_roles(bare, "user", "assistant", "assistant"),
        control=control,
        markers=markers,
        thought_markers=pair,
        prefill=prefill,
        closing=_find_thought_closing(prefill, pair, generation, before.removeprefix(opening)),
        renders_reasoning=_THOUGHT
        in _render_or_empty(bare, [_build_user_message(), _build_reasoning_message()], False),
        renders_calls=arguments,
        takes_tools=renders_tools(bare),
        drops_thoughts=dropping,
        rewrites=rewriting,
        prints_date=template.can_print_date
        and prompt != bare.with_date("1999-12-31").render_messages([_build_user_message()]),
        has_generation_blocks=re.search(r"\{%-?\s*generation\s*-?%\}", template.source) is not None,
    )


def renders_tools(template: ChatTemplate) -> bool:
    """Return whether the template describes the tools that it gets."""
    return _TOOL in _render_or_empty(template.with_tools([_SCHEMA]), [_build_user_message()])


# ---------------------------------------------------------------------------------------------------------- refusals


def _refuse_unknown_settings(template: ChatTemplate) -> None:
    """Refuse variables that the template does not know and tools that it does not take: it would drop them silently."""
    unknown = [
        name
        for name in template.settings.chat_template_kwargs
        if not re.search(rf"\b{name}\b", template.source)
    ]
    if unknown:
        raise SettingsError(
            f"model.chat_template_kwargs: the chat template has no variable '{unknown[0]}'; correct the name, or "
            "remove it"
        )
    if template.tools and not renders_tools(template):
        raise SettingsError(
            "model.native_tools, tools: the chat template does not describe tools that it is handed; describe them in "
            "a system message, or name a template that does in model.chat_template"
        )


def refuse_unusable_template(template: ChatTemplate) -> None:
    """Refuse a template that omits messages, or renders them differently each time. Raises: DataError."""
    if PLACEHOLDER not in template.render_messages([{"role": "user", "content": PLACEHOLDER}]):
        raise DataError(
            "the tokenizer's chat template omits user messages, so a policy would not see its prompt; name another one "
            "in model.chat_template"
        )
    texts = [
        template.render_messages(
            [_build_user_message(), _build_assistant_message()], generation_prompt=False
        )
        for _ in range(2)
    ]
    if PLACEHOLDER not in texts[0]:
        raise DataError(
            "the tokenizer's chat template omits assistant messages, or changes their text; name another one in "
            "model.chat_template"
        )
    if texts[0] != texts[1]:
        raise DataError(
            "the tokenizer's chat template renders the same messages differently each time, so nothing exact can be "
            "trained; name another one in model.chat_template"
        )


def _build_user_message(content: str = "U") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _build_assistant_message(content: str = PLACEHOLDER) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _build_reasoning_message() -> dict[str, Any]:
    return {**_build_assistant_message(), "reasoning_content": _THOUGHT}


def _build_call_message(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "id": _CALL_ID, "function": {"name": _TOOL, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _render_or_empty(
    template: ChatTemplate, messages: _Messages, generation_prompt: bool = True
) -> str:
    """Render the messages; return "" if the template refuses them."""
    try:
        return template.render_messages(messages, generation_prompt)
    except DataError:
        return ""


def _renders_roles(template: ChatTemplate, *roles: str) -> bool:
    """Return whether these roles in this order are rendered; some templates raise, others drop a message silently."""
    texts = [PLACEHOLDER + str(place) for place in range(len(roles))]
    shown = _render_or_empty(
        template, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    )
    return all(text in shown for text in texts)


def _has_tool_role(template: ChatTemplate, prefill: str) -> bool:
    """Return whether tool results are rendered and followed by the same header as other messages.

    DeepSeek-R1's template opens no thought after them, so one kind of turn would begin differently from the others.
    """
    shown = _renders_roles(template, "user", "assistant", "tool") and _renders_roles(
        template, "user", "assistant", "tool", "tool"
    )
    return shown and template.render_messages(
        [_build_user_message(), _build_assistant_message(), {"role": "tool", "content": "T"}]
    ).endswith(prefill)


def _find_prefill(generation: str) -> tuple[str, tuple[str, str] | None]:
    """Find the thought that a generation prompt opens, and its markers."""
    for pair in THOUGHT_MARKERS:
        place = generation.rfind(pair[0])
        if place >= 0:
            return generation[place:], pair
    return "", None


def _find_thought_markers(template: ChatTemplate, added: Sequence[str]) -> tuple[str, str] | None:
    """Find markers of thoughts that the template writes for reasoning_content, reads in content, or has as tokens."""
    rendered = _render_or_empty(
        template, [_build_user_message(), _build_reasoning_message()], False
    )
    for pair in THOUGHT_MARKERS:
        if (
            (pair[0] in rendered and _THOUGHT in rendered)
            or pair[1] in template.source
            or set(pair) <= set(added)
        ):
            return pair
    return None


def _find_thought_closing(
    prefill: str, pair: tuple[str, str] | None, generation: str, header: str
) -> str:
    """End of an opened thought that stays empty: as the template writes it before an answer, where it does."""
    if not prefill or pair is None or pair[1] in prefill:
        return ""
    if header.startswith(generation) and pair[1] in header[len(generation) :]:
        return header[len(generation) :]
    return f"\n{pair[1]}\n\n"


def _find_call_argument_form(
    template: ChatTemplate, end_of_turn: str, num_ends: int
) -> Literal["", "object", "text"]:
    """Find the form of call arguments that the template renders; some want an object, others its JSON text.

    None if the call has more than the `num_ends` ends of turn of an answer: it is then no turn that could be sampled.
    """
    forms: tuple[tuple[Literal["object", "text"], object], ...] = (
        ("object", {_ARGUMENT: _VALUE}),
        ("text", f'{{"{_ARGUMENT}": "{_VALUE}"}}'),
    )
    for form, arguments in forms:
        text = _render_or_empty(
            template, [_build_user_message(), _build_call_message(arguments)], False
        )
        if all(part in text for part in (_TOOL, _ARGUMENT, _VALUE)):
            return form if text.count(end_of_turn) <= num_ends else ""
    return ""


def _find_control_and_marker_tokens(
    template: ChatTemplate,
    added: Sequence[str],
    special: set[str],
    end_of_turn: str,
    skeleton: str,
    arguments: str,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (control tokens, marker tokens) among the added ones."""
    tokenizer = template.tokenizer
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    never = {str(token) for token in named if token is not None} | {end_of_turn}
    inside = ""
    if arguments:
        called = _build_call_message(
            {_ARGUMENT: _VALUE} if arguments == "object" else f'{{"{_ARGUMENT}": "{_VALUE}"}}'
        )
        inside = _render_or_empty(template, [_build_user_message(), called], False)
    # Some families' role tokens are not marked as special; a plain word that was added as a token is no role.
    headers = {
        text for text in added if text in skeleton and not (text[0].isalnum() or text[-1].isalnum())
    }
    written = {text for text in special if text in inside and text not in skeleton}
    written -= {
        text for text in written if inside.rstrip().endswith(text)
    }  # a separate end of turn
    markers = ((set(TURN_MARKERS) & set(added)) | written) - never
    control = (special | headers | never) - markers
    return tuple(sorted(control)), tuple(sorted(markers))


def _build_thought_turn(prefill: str, pair: tuple[str, str] | None) -> tuple[str, str]:
    """Return (content of an assistant message with a thought if possible, its text as sampled after a prompt)."""
    if pair is None or pair[1] in prefill:
        return PLACEHOLDER, PLACEHOLDER
    content = f"{pair[0]}\n{_THOUGHT}\n{pair[1]}\n\n{PLACEHOLDER}"
    return content, content.removeprefix(prefill)


def _find_rewritten_turns(
    template: ChatTemplate, turn: tuple[str, str], has_system: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Find roles of a next message after which an earlier turn loses its thought, or differs from the sampled text."""
    content, sampled = turn
    opening = (
        [{"role": "system", "content": "S"}, _build_user_message()]
        if has_system
        else [_build_user_message()]
    )  # some move it along
    prompt = template.render_messages(opening)
    dropping, rewriting = [], []
    for role in ("user", "tool"):
        later = _render_or_empty(
            template, [*opening, _build_assistant_message(content), {"role": role, "content": "N"}]
        )
        if not later:
            continue
        if _THOUGHT in content and _THOUGHT not in later:
            dropping.append(role)
        if not later.startswith(prompt + sampled):
            rewriting.append(role)
    return tuple(dropping), tuple(rewriting)


def render_assistant_text(template: ChatTemplate, facts: TemplateFacts, message: Message) -> str:
    """Render the last message of a conversation, between its header (without an opened thought) and its end of turn.

    If the template drops reasoning_content, it goes between the thought markers; if it drops tool_calls, they are
    written
    by `format_hermes_call`, which every environment reads.
    Raises: DataError for a thought if the tokenizer has no thought markers, or for text with a header or an end of
        turn.
    """
    content, thought, calls = (
        message.get("content") or "",
        message.get("reasoning_content"),
        message.get("tool_calls"),
    )
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
        content = "\n".join([*([content] if content else []), *map(format_hermes_call, calls)])
    plain: dict[str, Any] = {"role": "assistant", "content": content}
    if calls and facts.renders_calls:
        plain["tool_calls"] = _convert_call_arguments(calls, facts.renders_calls)
    if thought and facts.renders_reasoning:
        plain["reasoning_content"] = thought
    text = _render_message_body(template, facts, plain) if len(plain) > 2 else content
    if not thought or facts.renders_reasoning:
        return text
    assert pair is not None
    _, text = split_thought(
        text, pair
    )  # an empty one, which some templates write into every last turn
    return f"{pair[0]}\n{thought}\n{pair[1]}\n\n{text}"


def render_history_message(
    template: ChatTemplate, facts: TemplateFacts, content: str, fields: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Render content and other fields of an earlier assistant message, in the form that the template renders."""
    if (fields.get("tool_calls") and not facts.renders_calls) or (
        fields.get("reasoning_content") and not facts.renders_reasoning
    ):
        message = cast(Message, {"role": "assistant", "content": content, **fields})
        return render_assistant_text(template, facts, message), {}
    if fields.get("tool_calls"):
        fields = {
            **fields,
            "tool_calls": _convert_call_arguments(fields["tool_calls"], facts.renders_calls),
        }
    return content, fields


def format_hermes_call(call: Mapping[str, Any]) -> str:
    """Format an OpenAI-style call, as Hermes models write it and `Toolset.parse` reads it."""
    function = call["function"]
    return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': function['arguments']})}</tool_call>"


def _render_message_body(
    template: ChatTemplate, facts: TemplateFacts, message: Mapping[str, Any]
) -> str:
    """Render a message without its header and its end of turn."""
    opening = [{"role": "user", "content": "U"}]
    header = template.render_messages(opening).removesuffix(facts.prefill)
    rendered = template.render_messages([*opening, message], generation_prompt=False)
    advice = "write it into content, or name another template in model.chat_template"
    fields = ", ".join(name for name in message if name not in ("role", "content"))
    if not rendered.startswith(header):
        raise DataError(
            f"the chat template writes another header before a message with {fields} than before the policy's turn; "
            + advice
        )
    body = rendered[len(header) :].rstrip("\n")
    if not facts.writes_end:
        return body
    if not body.rstrip().endswith(facts.end_of_turn):
        # Calls of gpt-oss and Llama 3.1 end with another token, which generation_config.json lists.
        if body.rstrip().endswith(tuple(find_end_texts(template.tokenizer))):
            return body.rstrip()
        raise DataError(
            f"the chat template does not end a message with {fields} by {facts.end_of_turn}, as it ends others, so a "
            f"policy would not stop there; {advice}"
        )
    return body.rstrip().removesuffix(facts.end_of_turn)


def _convert_call_arguments(calls: Sequence[Mapping[str, Any]], form: str) -> list[dict[str, Any]]:
    """Calls with arguments as an object, or as its JSON text."""
    if form == "object":
        return [dict(call) for call in calls]
    return [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in calls
    ]
