"""Examination of a chat template by rendering small conversations: roles, end of turn, thoughts, calls, tools, date.

Placeholders are rendered and looked for in the text, so nothing is assumed about a family of models. What cannot be
trained on exactly is refused, with the way out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.chat_template import ChatTemplate
from rl_core.data.reasoning import THOUGHT_MARKERS
from rl_core.errors import DataError, SettingsError

__all__ = ["MARK", "TemplateFacts", "control_pattern", "examine"]

MARK = "Zq7MarkXw"  # message that is located in the rendered text
_THOUGHT = "Zq7ThoughtXw"
_TOOL, _ARGUMENT, _VALUE = "zq7_tool", "zq7_argument", "zq7value"
_CALL_ID = "zq7call01"  # nine letters and digits, as Mistral's templates ask for
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "d",
        "parameters": {"type": "object", "properties": {_ARGUMENT: {"type": "string"}}, "required": [_ARGUMENT]},
    },
}
_BAR, _BLOCK = "\uff5c", "\u2581"  # of DeepSeek's tokens
# Texts that a policy may write as tokens of their own, where its tokenizer has them, beside those that the template
# itself writes into an assistant message.
_MARKERS = (
    *(marker for pair in THOUGHT_MARKERS for marker in pair),
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<answer>", "</answer>"),
    *(f"<{_BAR}tool{_BLOCK}{name}{_BLOCK}{end}{_BAR}>" for name in ("calls", "call") for end in ("begin", "end")),
    f"<{_BAR}tool{_BLOCK}sep{_BAR}>",
)

_Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Properties of a chat template, found by rendering."""

    end_of_turn: str  # token after an assistant message
    writes_end: bool  # the template puts it there itself; False = the tokenizer's EOS stands in
    has_system: bool
    has_tool: bool  # the role tool
    has_repeats: bool  # two messages of a role one after the other
    control: tuple[str, ...]  # tokens that could forge a role or an end: never encoded from a message's text
    markers: tuple[str, ...]  # tokens around thoughts and calls, encoded as such
    thought_markers: tuple[str, str] | None  # around a thought
    prefill: str  # thought in the generation prompt, opened ("<think>\n") or opened and closed; "" = none
    closing: str  # what ends an opened thought that is empty
    renders_reasoning: bool  # reasoning_content of the last message
    renders_calls: Literal["", "object", "text"]  # tool_calls, with their arguments as an object or as JSON text
    takes_tools: bool
    drops_thoughts: tuple[str, ...]  # kinds of messages after which an earlier turn has lost its thought: user, tool
    rewrites: tuple[str, ...]  # kinds of messages after which an earlier turn is another text than was sampled
    prints_date: bool
    has_generation_blocks: bool  # {% generation %}, which marks the assistant's part

    @property
    def opens_thought(self) -> bool:
        """The generation prompt leaves a thought open."""
        return bool(self.prefill) and self.thought_markers is not None and self.thought_markers[1] not in self.prefill


def control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Pattern of any of these texts, the longest first; of nothing where there is none."""
    return re.compile("|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def examine(template: ChatTemplate) -> TemplateFacts:
    """The facts of a template.

    Raises: DataError, SettingsError where nothing exact can be trained with it, or with these variables or tools.
    """
    _refuse_settings(template)
    bare = template.with_tools(())
    _refuse_unusable(bare)
    added = [token.content for token in template.tokenizer.added_tokens_decoder.values() if token.content.strip()]
    special = {str(token) for token in template.tokenizer.all_special_tokens}
    special |= {token.content for token in template.tokenizer.added_tokens_decoder.values() if token.special}
    opening = bare.text([_user()], generation_prompt=False)
    prompt = bare.text([_user()])
    answered = bare.text([_user(), _assistant()], generation_prompt=False)
    before, _, after = answered.partition(MARK)
    end = control_pattern([*special, *added]).match(after.lstrip())
    end_of_turn = end.group() if end else str(template.tokenizer.eos_token)
    generation = prompt.removeprefix(opening) if prompt.startswith(opening) else ""
    prefill, pair = _prefill(generation)
    pair = pair or _thought_markers(bare, added)
    arguments = _call_arguments(bare, end_of_turn, answered.count(end_of_turn))
    has_system = _shows(bare, "system", "user")
    control, markers = _tokens(bare, added, special, end_of_turn, answered, arguments)
    dropping, rewriting = _changed_turns(bare, _turn(prefill, pair), has_system)
    return TemplateFacts(
        end_of_turn=end_of_turn,
        writes_end=end is not None,
        has_system=has_system,
        has_tool=_has_tool(bare, prefill),
        has_repeats=_shows(bare, "user", "user") and _shows(bare, "user", "assistant", "assistant"),
        control=control,
        markers=markers,
        thought_markers=pair,
        prefill=prefill,
        closing=_closing(prefill, pair, generation, before.removeprefix(opening)),
        renders_reasoning=_THOUGHT in _tried(bare, [_user(), _reasoned()], False),
        renders_calls=arguments,
        takes_tools=takes_tools(bare),
        drops_thoughts=dropping,
        rewrites=rewriting,
        prints_date=template.can_print_date and prompt != bare.with_date("1999-12-31").text([_user()]),
        has_generation_blocks=re.search(r"\{%-?\s*generation\s*-?%\}", template.source) is not None,
    )


def takes_tools(template: ChatTemplate) -> bool:
    """The template describes the tools that it is handed."""
    return _TOOL in _tried(template.with_tools([_SCHEMA]), [_user()])


# ---------------------------------------------------------------------------------------------------------- refusals


def _refuse_settings(template: ChatTemplate) -> None:
    """Variables that the template does not know, and tools that it does not take, would be dropped without a word."""
    unknown = [
        name for name in template.settings.chat_template_kwargs if not re.search(rf"\b{name}\b", template.source)
    ]
    if unknown:
        raise SettingsError(
            f"model.chat_template_kwargs: the chat template has no variable '{unknown[0]}'; correct the name, or "
            "remove it"
        )
    if template.tools and not takes_tools(template):
        raise SettingsError(
            "model.native_tools, tools: the chat template does not describe tools that it is handed; describe them in "
            "a system message, or name a template that does in model.chat_template"
        )


def _refuse_unusable(template: ChatTemplate) -> None:
    if MARK not in template.text([{"role": "user", "content": MARK}]):
        raise DataError(
            "the tokenizer's chat template omits user messages, so a policy would not see its prompt; name another one "
            "in model.chat_template"
        )
    texts = [template.text([_user(), _assistant()], generation_prompt=False) for _ in range(2)]
    if MARK not in texts[0]:
        raise DataError(
            "the tokenizer's chat template omits assistant messages, or changes their text; name another one in "
            "model.chat_template"
        )
    if texts[0] != texts[1]:
        raise DataError(
            "the tokenizer's chat template renders the same messages differently each time, so nothing exact can be "
            "trained; name another one in model.chat_template"
        )


# ------------------------------------------------------------------------------------------------------------ probes


def _user(content: str = "U") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str = MARK) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _reasoned() -> dict[str, Any]:
    return {**_assistant(), "reasoning_content": _THOUGHT}


def _called(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "id": _CALL_ID, "function": {"name": _TOOL, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tried(template: ChatTemplate, messages: _Messages, generation_prompt: bool = True) -> str:
    """The rendered text; "" where the template refuses."""
    try:
        return template.text(messages, generation_prompt)
    except DataError:
        return ""


def _shows(template: ChatTemplate, *roles: str) -> bool:
    """True if these roles in this order are rendered; some templates raise, others omit a message without a word."""
    texts = [MARK + str(place) for place in range(len(roles))]
    shown = _tried(template, [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    return all(text in shown for text in texts)


def _has_tool(template: ChatTemplate, prefill: str) -> bool:
    """True if results of tools are rendered, and followed by the same header as other messages.

    DeepSeek-R1's template opens no thought after them, so one kind of turn would begin differently from the others.
    """
    shown = _shows(template, "user", "assistant", "tool") and _shows(template, "user", "assistant", "tool", "tool")
    return shown and template.text([_user(), _assistant(), {"role": "tool", "content": "T"}]).endswith(prefill)


def _prefill(generation: str) -> tuple[str, tuple[str, str] | None]:
    """The thought that a generation prompt opens, and its markers."""
    for pair in THOUGHT_MARKERS:
        place = generation.rfind(pair[0])
        if place >= 0:
            return generation[place:], pair
    return "", None


def _thought_markers(template: ChatTemplate, added: Sequence[str]) -> tuple[str, str] | None:
    """Markers of thoughts that the template writes for reasoning_content, reads in content, or has as tokens."""
    rendered = _tried(template, [_user(), _reasoned()], False)
    for pair in THOUGHT_MARKERS:
        if (pair[0] in rendered and _THOUGHT in rendered) or pair[1] in template.source or set(pair) <= set(added):
            return pair
    return None


def _closing(prefill: str, pair: tuple[str, str] | None, generation: str, header: str) -> str:
    """End of an opened thought that stays empty: as the template writes it before an answer, where it does."""
    if not prefill or pair is None or pair[1] in prefill:
        return ""
    if header.startswith(generation) and pair[1] in header[len(generation) :]:
        return header[len(generation) :]
    return f"\n{pair[1]}\n\n"


def _call_arguments(template: ChatTemplate, end_of_turn: str, num_ends: int) -> Literal["", "object", "text"]:
    """Form of a call's arguments that the template renders; some want an object, others the JSON text of one.

    None if the call has more than the `num_ends` ends of turn of an answer: it is then no turn that could be sampled.
    """
    forms: tuple[tuple[Literal["object", "text"], object], ...] = (
        ("object", {_ARGUMENT: _VALUE}),
        ("text", f'{{"{_ARGUMENT}": "{_VALUE}"}}'),
    )
    for form, arguments in forms:
        text = _tried(template, [_user(), _called(arguments)], False)
        if all(part in text for part in (_TOOL, _ARGUMENT, _VALUE)):
            return form if text.count(end_of_turn) <= num_ends else ""
    return ""


def _tokens(
    template: ChatTemplate, added: Sequence[str], special: set[str], end_of_turn: str, skeleton: str, arguments: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(control tokens, marker tokens) among the added ones."""
    tokenizer = template.tokenizer
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    never = {str(token) for token in named if token is not None} | {end_of_turn}
    inside = ""
    if arguments:
        called = _called({_ARGUMENT: _VALUE} if arguments == "object" else f'{{"{_ARGUMENT}": "{_VALUE}"}}')
        inside = _tried(template, [_user(), called], False)
    # Some families' role tokens are not marked as special; a plain word that was added as a token is no role.
    headers = {text for text in added if text in skeleton and not (text[0].isalnum() or text[-1].isalnum())}
    written = {text for text in special if text in inside and text not in skeleton}
    written -= {text for text in written if inside.rstrip().endswith(text)}  # an end of turn of its own
    markers = ((set(_MARKERS) & set(added)) | written) - never
    control = (special | headers | never) - markers
    return tuple(sorted(control)), tuple(sorted(markers))


def _turn(prefill: str, pair: tuple[str, str] | None) -> tuple[str, str]:
    """(content of an assistant message with a thought where there can be one, its text as sampled after a prompt)."""
    if pair is None or pair[1] in prefill:
        return MARK, MARK
    content = f"{pair[0]}\n{_THOUGHT}\n{pair[1]}\n\n{MARK}"
    return content, content.removeprefix(prefill)


def _changed_turns(
    template: ChatTemplate, turn: tuple[str, str], has_system: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Roles of a next message after which an earlier turn has lost its thought, or is not the text that was sampled."""
    content, sampled = turn
    opening = [{"role": "system", "content": "S"}, _user()] if has_system else [_user()]  # some move it along
    prompt = template.text(opening)
    dropping, rewriting = [], []
    for role in ("user", "tool"):
        later = _tried(template, [*opening, _assistant(content), {"role": role, "content": "N"}])
        if not later:
            continue
        if _THOUGHT in content and _THOUGHT not in later:
            dropping.append(role)
        if not later.startswith(prompt + sampled):
            rewriting.append(role)
    return tuple(dropping), tuple(rewriting)
