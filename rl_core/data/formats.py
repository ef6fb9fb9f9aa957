"""Row formats of common data sets, by their columns, converted to the rows of `rl_core.data.records`.

A format is recognised row by row, by columns that are not null. What none of them fits is refused with the columns
found and a line that renames them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.files import BadRow, read_text
from rl_core.data.format_advice import advice
from rl_core.data.format_turns import (
    HH_TURN,
    alpaca,
    assistant,
    from_and_value,
    hh_turns,
    listed,
    sharegpt,
    user,
    without_loss,
)
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
    Format(
        "pairs, ShareGPT",
        ("conversations", "chosen", "rejected"),
        ("system", "tools"),
        ("conversations", "chosen", "rejected"),
    ),
    Format("pairs, implicit prompt", ("chosen", "rejected"), ("tools",), ("chosen", "rejected")),
    Format("pairs, Alpaca", ("instruction", "chosen", "rejected"), ("input", "system", "history")),
    Format("Orca-DPO", ("question", "chosen", "rejected"), ("system",)),
    Format("Orca-DPO, distilabel", ("input", "chosen", "rejected"), ("system",)),
    Format("HH-RLHF", ("chosen", "rejected")),
    Format("labelled completions", ("prompt", "completion", "label")),
    Format("labelled, conversational", ("prompt", "completion", "label"), ("tools",), ("prompt", "completion")),
    Format("labelled, messages", ("messages", "label"), ("tools",), ("messages",)),
    Format("scored completions", ("prompt", "completion", "score")),
    Format("scored, conversational", ("prompt", "completion", "score"), ("tools",), ("prompt", "completion")),
)
_FORMATS: dict[str, tuple[Format, ...]] = {"demonstrations": _DEMONSTRATIONS, "preferences": _PREFERENCES}
_NAMES = {kind: [form.name for form in formats] for kind, formats in _FORMATS.items()}
_OWN = ("level", "kind", "seed")
# `judgement`: who compared, when and how, as `posttrain prefer` writes it; kept in the file, not read
_OWN_OF = {"demonstrations": _OWN, "preferences": ("margin", "tie", "judgement", *_OWN)}
# Read so that a row can be named by its data set, though it cannot be used
_REFUSED = ("completions", "responses", "score", "response_0", "response_1", "label")

COLUMNS: dict[str, tuple[str, ...]] = {
    kind: tuple(dict.fromkeys([*(c for f in formats for c in (*f.needs, *f.also)), *_OWN_OF[kind], *_REFUSED]))
    for kind, formats in _FORMATS.items()
}


def format_of(row: Mapping[str, Any], kind: Kind) -> Format | None:
    """Format of a row; None = not recognised."""
    there = {name for name, value in row.items() if value is not None}
    for form in _FORMATS[kind]:
        if there.issuperset(form.needs) and all(
            isinstance(row[n], list | dict) == (n in form.lists) for n in form.needs
        ):
            if form.name == "HH-RLHF" and not all(HH_TURN.match(row[name]) for name in form.needs):
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
    if row.get("label") is False:
        raise BadRow("label", "is false, and what is not wanted is not imitated: jq -c 'select(.label)' FILE > NEW")
    form = format_of(row, "demonstrations")
    name = form.name if form else ""
    if name == "prompt-completion, conversational":
        return _with_messages(row, [*map(without_loss, listed(row["prompt"])), *listed(row["completion"])])
    if name == "prompt-completion":
        return _with_messages(row, [user(read_text(row, "prompt")), assistant(read_text(row, "completion"))])
    if name == "ShareGPT":
        return _with_messages(row, sharegpt(row, "conversations"))
    if name in ("Alpaca", "Dolly"):
        context, answer = ("input", "output") if name == "Alpaca" else ("context", "response")
        return _with_messages(row, [*alpaca(row, context), assistant(read_text(row, answer))])
    if name == "text":
        return _with_messages(row, [{"role": "text", "content": read_text(row, "text")}])
    if name == "messages" or row.get("messages") is not None:
        return row
    if "prompt" in row or "completion" in row:
        read_text(row, "prompt")
        read_text(row, "completion")
    raise BadRow(
        "messages",
        f"is missing, and so are prompt and completion; {advice(row, 'demonstrations', _NAMES['demonstrations'])}",
    )


def as_preference(row: Row) -> Row:
    """The row as {prompt, chosen, rejected} or {prompt, completion, label or score}, sides text or messages.

    Raises: BadRow.

    A prompt is text if it is one message of the user, a side if it is one assistant message without further fields.
    """
    form = format_of(row, "preferences")
    if form is None:
        _refuse(row)
        return row
    convert = _CONVERSIONS.get(form.name)
    return row if convert is None else convert(row)


def _refuse(row: Row) -> None:
    """Raise for a row of no format, unless a column of ours is missing or empty, which is said by its name."""
    if {"chosen", "rejected"} <= set(row) and "prompt" not in row:
        raise BadRow("prompt", f"is missing; {advice(row, 'preferences', _NAMES['preferences'])}")
    if len({"prompt", "chosen", "rejected", "completion", "label"} & set(row)) < 2:
        raise BadRow("", advice(row, "preferences", _NAMES["preferences"]))
    for name in ("prompt", "chosen", "rejected", "completion"):
        if row.get(name) is not None:
            read_text(row, name)


# ------------------------------------------------------------------------------------------------- demonstrations


def _with_messages(row: Row, messages: list[Row]) -> Row:
    return {**row, "messages": messages}


# ---------------------------------------------------------------------------------------------------- preferences


def _messages(row: Row, name: str) -> list[Row]:
    return checked_messages(listed(row[name]), name)


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


def _binarized(row: Row) -> Row:
    """UltraFeedback's pairs, whose prompt is there twice."""
    found = _implicit(row, _messages(row, "chosen"), _messages(row, "rejected"))
    if isinstance(found["prompt"], str) and found["prompt"].strip() != row["prompt"].strip():
        raise BadRow("prompt", "is not the text that chosen and rejected begin with")
    return found


def _conversational(row: Row) -> Row:
    sides = [name for name in ("chosen", "rejected", "completion") if row.get(name) is not None]
    changed = {side: _side(_messages(row, side), side) for side in sides}
    return {**row, "prompt": _opening(_messages(row, "prompt"), "prompt"), **changed}


def _sharegpt_pair(row: Row) -> Row:
    """A conversation that waits for an answer, and two of them: a turn or several each."""
    asked = checked_messages(from_and_value(row, "conversations"), "conversations")
    sides = {side: from_and_value({side: listed(row[side])}, side) for side in ("chosen", "rejected")}
    changed = {side: _side(checked_messages(turns, side), side) for side, turns in sides.items()}
    return {**row, "prompt": _opening(asked, "conversations"), **changed}


def _alpaca_pair(row: Row) -> Row:
    return {**row, "prompt": _opening(checked_messages(alpaca(row, "input"), "history"), "history")}


def _labelled_messages(row: Row) -> Row:
    """A conversation of which the last answer is labelled."""
    said = _messages(row, "messages")
    return {**row, "prompt": _opening(said[:-1], "messages"), "completion": _side(said[-1:], "messages")}


def _asked_by(name: str) -> Callable[[Row], Row]:
    """Conversion of rows with the question in that column and a system message of their own."""

    def convert(row: Row) -> Row:
        system = [{"role": "system", "content": row["system"]}] if str(row.get("system") or "").strip() else []
        return {**row, "prompt": _opening([*system, user(read_text(row, name))], "question")}

    return convert


_CONVERSIONS: dict[str, Callable[[Row], Row]] = {
    "pairs, conversational": _conversational,
    "UltraFeedback, binarized": _binarized,
    "pairs, ShareGPT": _sharegpt_pair,
    "pairs, implicit prompt": lambda row: _implicit(row, _messages(row, "chosen"), _messages(row, "rejected")),
    "pairs, Alpaca": _alpaca_pair,
    "Orca-DPO": _asked_by("question"),
    "Orca-DPO, distilabel": _asked_by("input"),
    "HH-RLHF": lambda row: _implicit(row, hh_turns(row, "chosen"), hh_turns(row, "rejected")),
    "labelled, conversational": _conversational,
    "scored, conversational": _conversational,
    "labelled, messages": _labelled_messages,
}
