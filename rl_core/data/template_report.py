"""Report on a model's chat template for people: its properties, and an example conversation with its loss tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby

from rl_core.data.chat import ChatRenderer
from rl_core.data.chat_template import TemplateFacts
from rl_core.data.training_sequences import build_training_sequences
from rl_core.types import Message

_WIDTH = 100
_CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "look_up", "arguments": {"word": "seven"}},
}


def describe_template(renderer: ChatRenderer) -> list[str]:
    """Return lines on what the template does, then an example with the tokens that carry loss."""
    rows = list(_list_properties(renderer))
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        first, *others = textwrap.wrap(text, _WIDTH - width - 2, break_on_hyphens=False) or [""]
        lines += [f"{name.ljust(width)}  {first}", *(f"{'':{width}}  {other}" for other in others)]
    lines += ["", "example (loss: tokens that SFT trains on, and that a policy writes itself)"]
    for ids, mask in build_training_sequences(renderer, build_example_conversation(renderer.facts)):
        lines += format_loss_runs(renderer, ids, mask)
    return lines


def build_example_conversation(facts: TemplateFacts) -> list[Message]:
    """Build a conversation of two turns with a tool call, and a thought if the template has a place for one."""
    first = Message(role="assistant", content="", tool_calls=[_CALL])
    last = Message(role="assistant", content="7")
    if facts.thought_markers is not None and (facts.opens_thought or not facts.prefill):
        first["reasoning_content"], last["reasoning_content"] = "I look it up.", "That is it."
    question = Message(role="user", content="Which digit is seven?")
    return [
        Message(role="system", content="Answer."),
        question,
        first,
        Message(role="tool", content="7"),
        last,
    ]


def format_loss_runs(renderer: ChatRenderer, ids: list[int], mask: list[bool]) -> list[str]:
    """Return one line per run of tokens and line break: `loss` or `context`, number of tokens, text."""
    lines: list[str] = []
    for learns, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        text = renderer.decode_ids(tokens, is_start=not lines)
        head = f"{'loss' if learns else 'context':7}  {len(tokens):4}  "
        for part in text.replace("\n", "\\n\n").splitlines():
            lines.append(f"{head}|{part}|")
            head = f"{'':15}"
    return lines


def _list_properties(renderer: ChatRenderer) -> Iterator[tuple[str, str]]:
    facts, settings = renderer.facts, renderer.settings
    if settings.chat_template is not None:
        yield "template", f"from {settings.chat_template}"
    else:
        yield (
            "template",
            "none: messages are rendered as plain text"
            if renderer.template.is_plain
            else "the model's own",
        )
    end = (
        "written by the template"
        if facts.writes_end
        else "the tokenizer's EOS, as the template writes no token there"
    )
    others = [renderer.decode_ids([token]) for token in renderer.eos_ids[1:]]
    yield "end of turn", "; also ".join([f"{facts.end_of_turn} ({end})", *others])
    for name, there in (("system", facts.has_system), ("tool", facts.has_tool)):
        yield f"role {name}", "yes" if there else "no: its messages are shown as the user's"
    if not facts.has_repeats:
        yield "alternation", "strict: messages of one role in a row are joined"
    yield "thoughts", _describe_thoughts(facts)
    yield "history", _describe_history(facts, settings.history_thoughts)
    yield (
        "markers",
        ", ".join(facts.markers) or "no tokens of their own: thoughts and calls are plain text",
    )
    forms = {"object": "", "text": ", arguments as JSON text"}
    calls = (
        f"as the template writes them{forms[facts.renders_calls]}" if facts.renders_calls else ""
    )
    yield (
        "tool_calls",
        calls or "not rendered by the template: written as <tool_call>{...}</tool_call>",
    )
    native = (
        "handed to the template"
        if settings.native_tools
        else "described there with model.native_tools: true"
    )
    yield (
        "tools",
        native
        if facts.takes_tools
        else "not taken by the template: describe them in a system message",
    )
    if facts.prints_date:
        yield (
            "date",
            f"printed; it stays {settings.chat_template_date} (model.chat_template_date), whatever the clock says",
        )
    else:
        yield "date", "not printed"
    if settings.chat_template_kwargs:
        yield (
            "variables",
            ", ".join(f"{name}={value!r}" for name, value in settings.chat_template_kwargs.items()),
        )
    if facts.has_generation_blocks:
        yield (
            "{% generation %}",
            "there; the loss mask below follows from the turns and does not need it",
        )


def _describe_thoughts(facts: TemplateFacts) -> str:
    if facts.thought_markers is None:
        return "none"
    opening, closing = facts.thought_markers
    if facts.opens_thought:
        return f"the prompt opens {facts.prefill!r}; the policy continues from there and writes {closing}"
    if facts.prefill:
        return f"the prompt holds a closed one, {facts.prefill!r}; the policy answers at once"
    return f"between {opening} and {closing}, written by the policy"


def _describe_history(facts: TemplateFacts, history_thoughts: str) -> str:
    """Describe the stability of earlier turns, under the setting `history_thoughts`."""
    if not facts.rewrites:
        return "prefix-stable: earlier turns stay the tokens that were sampled"
    after = " or ".join(facts.rewrites)
    lost = "drops earlier thoughts" if facts.drops_thoughts else "writes earlier turns differently"
    text = f"not prefix-stable: after a {after} message the template {lost}; "
    if history_thoughts == "keep":
        return text + (
            "training and rollouts keep them as they were sampled (model.history_thoughts: keep), a server that "
            "renders the history anew shows the model another text"
        )
    return text + (
        "demonstrations are split into the sequences that it renders, and rollouts read the history as it renders it "
        "(model.history_thoughts: template)"
    )
