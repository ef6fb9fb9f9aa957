"""Row formats of common data sets, by their columns, converted to the rows of `rl_core.data.records`.

A format is recognised row by row, by columns that are not null. What none of them fits is refused with the columns
found and a line that renames them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.files import BadRow, describe, read_text
from rl_core.data.messages import checked_messages

__all__ = [
    "COLUMNS",
    "Format",
    "Kind",
    "as_demonstration",
    "as_preference",
    "columns_to_read",
    "format_of",
    "unknown_columns",
]

Row = dict[str, Any]
Kind = Literal["demonstrations", "preferences"]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a row."""

    name: str
    needs: tuple[str, ...]  # columns without which a row is not of this format
    also: tuple[str, ...] = ()  # columns read where they are there
    lists: tuple[str, ...] = ()  # of `needs`, those that hold messages; the others hold text


_DEMONSTRATIONS = (
    Format("messages", ("messages",), ("tools",), ("messages",)),
    Format("prompt-completion, conversational", ("prompt", "completion"), ("tools",), ("prompt", "completion")),
    Format("prompt-completion", ("prompt", "completion"), ("tools",)),
    Format("ShareGPT", ("conversations",), ("system", "tools"), ("conversations",)),
    Format("Alpaca", ("instruction", "output"), ("input", "system", "history")),
    Format("Dolly", ("instruction", "response"), ("context",)),
    Format("text", ("text",)),
)
_PREFERENCES = (
    Format("prompt-chosen-rejected", ("prompt", "chosen", "rejected")),
    Format("pairs, conversational", ("prompt", "chosen", "rejected"), ("tools",), ("prompt", "chosen", "rejected")),
    Format("UltraFeedback, binarized", ("prompt", "chosen", "rejected"), (), ("chosen", "rejected")),
    Format("pairs, implicit prompt", ("chosen", "rejected"), ("tools",), ("chosen", "rejected")),
    Format("Orca-DPO", ("question", "chosen", "rejected"), ("system",)),
    Format("Orca-DPO, distilabel", ("input", "chosen", "rejected"), ("system",)),
    Format("HH-RLHF", ("chosen", "rejected")),
    Format("labelled completions", ("prompt", "completion", "label")),
    Format("labelled, conversational", ("prompt", "completion", "label"), ("tools",), ("prompt", "completion")),
)
_FORMATS: dict[str, tuple[Format, ...]] = {"demonstrations": _DEMONSTRATIONS, "preferences": _PREFERENCES}
_OWN = ("level", "kind", "seed")
_OWN_OF = {"demonstrations": _OWN, "preferences": ("margin", *_OWN)}
# Read so that a row can be named by its data set, though it cannot be used
_REFUSED = ("completions", "responses", "score", "response_0", "response_1")

COLUMNS: dict[str, tuple[str, ...]] = {
    kind: tuple(dict.fromkeys([*(c for f in formats for c in (*f.needs, *f.also)), *_OWN_OF[kind], *_REFUSED]))
    for kind, formats in _FORMATS.items()
}

_SHAREGPT = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ASKED = ("question", "query", "instruction", "problem", "input", "source", "prompt", "user", "request")
_ANSWERED = ("answer", "response", "output", "completion", "solution", "target", "assistant", "reply", "summary")


def format_of(row: Mapping[str, Any], kind: Kind) -> Format | None:
    """Format of a row; None = not recognised."""
    there = {name for name, value in row.items() if value is not None}
    for form in _FORMATS[kind]:
        if there.issuperset(form.needs) and all(
            isinstance(row[n], list | dict) == (n in form.lists) for n in form.needs
        ):
            if form.name == "HH-RLHF" and not all(_TURN.match(row[name]) for name in form.needs):
                continue
            return form
    return None


def columns_to_read(kind: Kind) -> tuple[str, ...]:
    """Columns of all formats of a kind, for a reader of Parquet."""
    return COLUMNS[kind]


def unknown_columns(row: Mapping[str, Any], form: Format, kind: Kind) -> set[str]:
    """Columns of a row that its format does not use."""
    used = {*form.needs, *form.also, *_OWN_OF[kind]}
    return {name for name, value in row.items() if value is not None and name not in used}


def as_demonstration(row: Row) -> Row:
    """The row with `messages` (not checked yet), and `tools` where it has some. Raises: BadRow."""
    form = format_of(row, "demonstrations")
    name = form.name if form else ""
    if name == "prompt-completion, conversational":
        return _with_messages(row, [*map(_silent, _listed(row["prompt"])), *_listed(row["completion"])])
    if name == "prompt-completion":
        return _with_messages(row, [_user(read_text(row, "prompt")), _assistant(read_text(row, "completion"))])
    if name == "ShareGPT":
        return _with_messages(row, _sharegpt(row))
    if name in ("Alpaca", "Dolly"):
        return _with_messages(
            row, _alpaca(row, *(("input", "output") if name == "Alpaca" else ("context", "response")))
        )
    if name == "text":
        return _with_messages(row, [{"role": "text", "content": read_text(row, "text")}])
    if name == "messages" or row.get("messages") is not None:
        return row
    if "prompt" in row or "completion" in row:
        read_text(row, "prompt")
        read_text(row, "completion")
    raise BadRow("messages", f"is missing, and so are prompt and completion; {_advice(row, 'demonstrations')}")


def as_preference(row: Row) -> Row:
    """The row as {prompt, chosen, rejected} or {prompt, completion, label}, each side text or messages. Raises: BadRow.

    A prompt is text if it is one message of the user, a side if it is one assistant message without further fields.
    """
    form = format_of(row, "preferences")
    name = form.name if form else ""
    if name == "HH-RLHF":
        return _implicit(row, _turns(row, "chosen"), _turns(row, "rejected"))
    if name in ("pairs, implicit prompt", "UltraFeedback, binarized"):
        found = _implicit(row, _messages(row, "chosen"), _messages(row, "rejected"))
        if (
            name.startswith("Ultra")
            and isinstance(found["prompt"], str)
            and found["prompt"].strip() != row["prompt"].strip()
        ):
            raise BadRow("prompt", "is not the text that chosen and rejected begin with")
        return found
    if name in ("pairs, conversational", "labelled, conversational"):
        sides = ("chosen", "rejected") if name.startswith("pairs") else ("completion",)
        changed = {side: _side(_messages(row, side), side) for side in sides}
        return {**row, "prompt": _opening(_messages(row, "prompt"), "prompt"), **changed}
    if name.startswith("Orca-DPO"):
        question = read_text(row, "question" if "question" in form.needs else "input") if form else ""
        system = [{"role": "system", "content": row["system"]}] if str(row.get("system") or "").strip() else []
        return {**row, "prompt": _opening([*system, _user(question)], "question")}
    if form is None:
        _refuse(row)
    return row


def _refuse(row: Row) -> None:
    """Raise for a row of no format, unless a column of ours is missing or empty, which is said by its name."""
    if {"chosen", "rejected"} <= set(row) and "prompt" not in row:
        raise BadRow("prompt", f"is missing; {_advice(row, 'preferences')}")
    if len({"prompt", "chosen", "rejected", "completion", "label"} & set(row)) < 2:
        raise BadRow("", _advice(row, "preferences"))
    for name in ("prompt", "chosen", "rejected", "completion"):
        if row.get(name) is not None:
            read_text(row, name)


# ------------------------------------------------------------------------------------------------- demonstrations


def _with_messages(row: Row, messages: list[Row]) -> Row:
    return {**row, "messages": messages}


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def _silent(message: Any) -> Any:
    """An assistant message of a prompt, which carries no loss."""
    return {**message, "weight": 0} if isinstance(message, Mapping) and message.get("role") == "assistant" else message


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Mapping) else list(value)


def _sharegpt(row: Row) -> list[Row]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadRow("conversations", f"must be a list of turns, found {describe(turns)}")
    system = row.get("system")
    messages: list[Row] = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    for index, turn in enumerate(turns):
        place = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            raise BadRow(place, f"must be an object with from and value, found {describe(turn)}")
        if "role" in turn:
            messages.append(dict(turn))
            continue
        fields = {name: value for name, value in turn.items() if value is not None}
        word = read_text(fields, "from", f"{place}.from")
        role = _SHAREGPT.get(word.lower())
        if role is None:
            raise BadRow(f"{place}.from", f"must be one of {', '.join(_SHAREGPT)}, found {word!r}")
        others = {name: value for name, value in fields.items() if name not in ("from", "value")}
        text = read_text(fields, "value", f"{place}.value", may_be_empty=role == "tool")
        messages.append({**(_call(text, place) if role == "call" else {"role": role, "content": text}), **others})
    if messages[-1].get("role") == "user":
        raise BadRow(
            f"conversations[{len(turns) - 1}].from",
            "is the user's turn at the end, so nobody answers it; cut it: jq -c '.conversations |= .[:-1]' FILE > NEW",
        )
    return messages


def _call(text: str, place: str) -> Row:
    """A turn that calls tools: JSON {"name", "arguments"}, or a list of them."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise BadRow(f"{place}.value", f"is no call in JSON: {error}") from None
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])
        ],
    }


def _alpaca(row: Row, context: str, answer: str) -> list[Row]:
    """Instruction, a blank line and the input as the user's message; system and history before it."""
    messages: list[Row] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for index, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"history[{index}]", f"must be a question and an answer, found {describe(pair)}")
        messages += [_user(pair[0]), _assistant(pair[1])]
    prompt = read_text(row, "instruction")
    if row.get(context):
        prompt += "\n\n" + read_text(row, context)
    return [*messages, _user(prompt), _assistant(read_text(row, answer))]


# ---------------------------------------------------------------------------------------------------- preferences


def _messages(row: Row, name: str) -> list[Row]:
    return checked_messages(_listed(row[name]), name)


def _turns(row: Row, name: str) -> list[Row]:
    """Turns of a text "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    text = read_text(row, name)
    parts = _TURN.split(text)
    if len(parts) < 5 or parts[0].strip():
        raise BadRow(name, "is no dialogue of the human and the assistant")
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[1::2], parts[2::2], strict=True)]
    if turns[-1]["role"] != "assistant":
        raise BadRow(name, "ends with the human's turn")
    empty = next((index for index, turn in enumerate(turns) if not turn["content"]), None)
    if empty is not None:
        raise BadRow(name, f"turn {empty + 1} is empty")
    return turns


def _implicit(row: Row, chosen: list[Row], rejected: list[Row]) -> Row:
    """The messages that both sides begin with are the prompt, up to the last one of another role than assistant."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    while same and (chosen[same - 1]["role"] == "assistant" or same == min(len(chosen), len(rejected))):
        same -= 1
    if not same:
        raise BadRow("chosen", "begins with another message than rejected, so there is no common prompt")
    return {
        **row,
        "prompt": _opening(chosen[:same], "chosen"),
        "chosen": _side(chosen[same:], "chosen"),
        "rejected": _side(rejected[same:], "rejected"),
    }


def _opening(messages: list[Row], place: str) -> str | list[Row]:
    """A prompt: text where it is one message of the user."""
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRow(place, "ends with the assistant's message, but a prompt is what it answers")
    text: str = messages[0]["content"]
    return text if len(messages) == 1 and set(messages[0]) == {"role", "content"} else messages


def _side(messages: Sequence[Row], place: str) -> str | list[Row]:
    """An answer: text where it is one assistant message of plain content."""
    if not messages or messages[-1]["role"] != "assistant" or messages[0]["role"] != "assistant":
        raise BadRow(place, "must begin and end with the assistant's message after the prompt")
    text: str = messages[0]["content"]
    return text if len(messages) == 1 and set(messages[0]) == {"role", "content"} else list(messages)


# --------------------------------------------------------------------------------------------------------- advice


def _advice(row: Mapping[str, Any], kind: Kind) -> str:
    """Columns found, and a line that makes rows of them."""
    found = ", ".join(str(name) for name in row) or "none"
    if isinstance(row.get("completions"), list) and "instruction" in row:
        fix = (
            "'{prompt: .instruction} + (.completions | sort_by(.overall_score) | {chosen: .[-1].response, rejected: "
            ".[0].response}) | select(.chosen != .rejected)'"
        )
    elif kind == "demonstrations":
        fix = f"'{{prompt: .{_guess(row, _ASKED, 'QUESTION')}, completion: .{_guess(row, _ANSWERED, 'ANSWER')}}}'"
    else:
        asked = _guess(row, _ASKED, "QUESTION")
        good = _guess(row, ("chosen", "chosen_response", "preferred", "better", "response_0", "accepted"), "BETTER")
        bad = _guess(row, ("rejected", "rejected_response", "dispreferred", "worse", "response_1"), "WORSE")
        fix = f"'{{prompt: .{asked}, chosen: .{good}, rejected: .{bad}}}'"
    names = ", ".join(form.name for form in _FORMATS[kind])
    return f"columns found: {found}; name them: jq -c {fix} FILE > NEW.jsonl (formats that are read: {names})"


def _guess(row: Mapping[str, Any], words: Sequence[str], otherwise: str) -> str:
    """The column with one of these names, or that holds one of these words."""
    names = [str(name) for name in row]
    tests: tuple[Callable[[str, str], bool], ...] = (lambda n, w: n.lower() == w, lambda n, w: w in n.lower())
    for test in tests:
        for word in words:
            for name in names:
                if test(name, word):
                    return name if name.isidentifier() else json.dumps(name)
    return otherwise
