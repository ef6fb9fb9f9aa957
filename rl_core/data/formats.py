"""Row formats of common data sets, recognised by their columns and converted to the rows of `rl_core.data.records`.

A format is recognised row by row, by columns that are not null. A row that fits none is refused with its columns and a
line of jq that renames them. `validate_...` check rows one by one: they return the columns that are used, or raise
BadRow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.data.files import (
    BadRow,
    describe_value,
    list_field_names,
    read_number,
    read_text,
    refuse_answer_row,
)
from rl_core.data.messages import (
    HH_TURN,
    build_assistant_message,
    build_user_message,
    convert_alpaca,
    convert_sharegpt,
    convert_sharegpt_turns,
    drop_message_loss,
    parse_hh_turns,
    validate_messages,
    validate_tools,
    wrap_in_list,
)
from rl_core.data.recorded_rows import RECORDED, RECORDED_COLUMNS, validate_recorded_row
from rl_core.data.text_steps import validate_labelled_steps

_SYSTEM_COLUMNS = ("system_prompt", "system", "system_message")
_QUESTION_COLUMNS = (
    "question",
    "query",
    "instruction",
    "problem",
    "input",
    "source",
    "prompt",
    "user",
    "request",
)
_ANSWER_COLUMNS = (
    "answer",
    "response",
    "output",
    "completion",
    "solution",
    "target",
    "assistant",
    "reply",
    "summary",
)


def advise_column_renames(row: Mapping[str, Any], kind: str, names: Sequence[str]) -> str:
    """Return the columns of a row, and a line of jq that converts such rows.

    Args:
        kind: demonstrations or preferences.
        names: formats of that kind.
    """
    columns = ", ".join(str(name) for name in row) or "none"
    if isinstance(row.get("completions"), list) and "instruction" in row:
        fix = (
            "'{prompt: .instruction} + (.completions | sort_by(.overall_score) | {chosen: .[-1].response, rejected: "
            ".[0].response}) | select(.chosen != .rejected)'"
        )
    elif kind == "demonstrations":
        fix = _advise_demonstration(row)
    else:
        question = _guess_column(row, _QUESTION_COLUMNS, "QUESTION")
        good = _guess_column(
            row,
            ("chosen", "chosen_response", "preferred", "better", "response_0", "accepted"),
            "BETTER",
        )
        bad = _guess_column(
            row, ("rejected", "rejected_response", "dispreferred", "worse", "response_1"), "WORSE"
        )
        fix = f"'{{prompt: .{question}, chosen: .{good}, rejected: .{bad}}}'"
    read = "; ".join(names)
    return f"columns found: {columns}; name them: jq -c {fix} FILE > NEW.jsonl (formats that are read: {read})"


def _advise_demonstration(row: Mapping[str, Any]) -> str:
    """Return a jq filter that makes prompt and completion, or messages if there is a system column."""
    system = next((name for name in _SYSTEM_COLUMNS if isinstance(row.get(name), str)), "")
    left = {name: value for name, value in row.items() if name != system}
    question, answered = (
        _guess_column(left, _QUESTION_COLUMNS, "QUESTION"),
        _guess_column(left, _ANSWER_COLUMNS, "ANSWER"),
    )
    if not system:
        return f"'{{prompt: .{question}, completion: .{answered}}}'"
    turns_by_role = [("system", system), ("user", question), ("assistant", answered)]
    turns = ", ".join(f'{{role: "{role}", content: .{name}}}' for role, name in turns_by_role)
    return f"'{{messages: [{turns}]}}'"


def _guess_column(row: Mapping[str, Any], words: Sequence[str], default: str) -> str:
    """Return the column with one of these names, or whose name contains one of these words."""
    names = [str(name) for name in row]
    tests: tuple[Callable[[str, str], bool], ...] = (
        lambda n, w: n.lower() == w,
        lambda n, w: w in n.lower(),
    )
    for test in tests:
        for word in words:
            for name in names:
                if test(name, word):
                    return name if name.isidentifier() else json.dumps(name)
    return default


RawRow = dict[str, Any]
RowKind = Literal["demonstrations", "preferences"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One way to write a row."""

    name: str
    needs: tuple[str, ...]  # columns without which a row is not of this format
    also: tuple[str, ...] = ()  # columns read where they are there
    lists: tuple[str, ...] = ()  # of `needs`, those that hold messages; the others hold text


_DEMONSTRATIONS = (
    RowFormat(RECORDED, ("messages", "sequences"), RECORDED_COLUMNS, ("messages", "sequences")),
    RowFormat("messages", ("messages",), ("tools", "images"), ("messages",)),
    RowFormat(
        "prompt-completion, conversational",
        ("prompt", "completion"),
        ("tools", "images"),
        ("prompt", "completion"),
    ),
    RowFormat("prompt-completion", ("prompt", "completion"), ("tools",)),
    RowFormat("ShareGPT", ("conversations",), ("system", "tools"), ("conversations",)),
    RowFormat("Alpaca", ("instruction", "output"), ("input", "system", "history")),
    RowFormat("Dolly", ("instruction", "response"), ("context",)),
    RowFormat("text", ("text",)),
)
_PREFERENCES = (
    RowFormat("prompt-chosen-rejected", ("prompt", "chosen", "rejected")),
    RowFormat(
        "pairs, conversational",
        ("prompt", "chosen", "rejected"),
        ("tools",),
        ("prompt", "chosen", "rejected"),
    ),
    RowFormat(
        "UltraFeedback, binarized", ("prompt", "chosen", "rejected"), (), ("chosen", "rejected")
    ),
    RowFormat(
        "pairs, ShareGPT",
        ("conversations", "chosen", "rejected"),
        ("system", "tools"),
        ("conversations", "chosen", "rejected"),
    ),
    RowFormat("pairs, implicit prompt", ("chosen", "rejected"), ("tools",), ("chosen", "rejected")),
    RowFormat(
        "pairs, Alpaca", ("instruction", "chosen", "rejected"), ("input", "system", "history")
    ),
    RowFormat("Orca-DPO", ("question", "chosen", "rejected"), ("system",)),
    RowFormat("Orca-DPO, distilabel", ("input", "chosen", "rejected"), ("system",)),
    RowFormat("HH-RLHF", ("chosen", "rejected")),
    RowFormat("labelled completions", ("prompt", "completion", "label")),
    RowFormat(
        "labelled, conversational",
        ("prompt", "completion", "label"),
        ("tools",),
        ("prompt", "completion"),
    ),
    RowFormat("labelled, messages", ("messages", "label"), ("tools",), ("messages",)),
    RowFormat("scored completions", ("prompt", "completion", "score")),
    RowFormat(
        "scored, conversational",
        ("prompt", "completion", "score"),
        ("tools",),
        ("prompt", "completion"),
    ),
    RowFormat(
        "stepwise supervision",
        ("prompt", "completions", "labels"),
        ("step_separator",),
        ("completions", "labels"),
    ),
)
_FORMATS: dict[str, tuple[RowFormat, ...]] = {
    "demonstrations": _DEMONSTRATIONS,
    "preferences": _PREFERENCES,
}
_NAMES = {kind: [form.name for form in formats] for kind, formats in _FORMATS.items()}
_SHARED_COLUMNS = ("level", "kind", "seed")
# `judgement`: who compared, when and how, as `posttrain label` writes it; stays in the file, not read
_COLUMNS_BY_KIND = {
    "demonstrations": _SHARED_COLUMNS,
    "preferences": ("margin", "tie", "judgement", *_SHARED_COLUMNS),
}
# Read so that a row can be named by its data set, though it cannot be used
_REFUSED = ("completions", "responses", "score", "response_0", "response_1", "label")

COLUMNS: dict[str, tuple[str, ...]] = {
    kind: tuple(
        dict.fromkeys(
            [*(c for f in formats for c in (*f.needs, *f.also)), *_COLUMNS_BY_KIND[kind], *_REFUSED]
        )
    )
    for kind, formats in _FORMATS.items()
}


def detect_format(row: Mapping[str, Any], kind: RowKind) -> RowFormat | None:
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


def list_format_columns(kind: RowKind) -> tuple[str, ...]:
    """Return the columns of all formats of a kind, for a reader of Parquet."""
    return COLUMNS[kind]


def find_unknown_columns(row: Mapping[str, Any], form: RowFormat, kind: RowKind) -> set[str]:
    """Return columns of a row that its format does not use."""
    used = {*form.needs, *form.also, *_COLUMNS_BY_KIND[kind]}
    return {name for name, value in row.items() if value is not None and name not in used}


def convert_demonstration(row: RawRow) -> RawRow:
    """Return the row with `messages` (not checked yet), and `tools` if it has some. Raises: BadRow."""
    if row.get("label") is False:
        raise BadRow(
            "label",
            "is false, and what is not wanted is not imitated: jq -c 'select(.label)' FILE > NEW",
        )
    form = detect_format(row, "demonstrations")
    name = form.name if form else ""
    if name == "prompt-completion, conversational":
        return _set_messages(
            row,
            [
                *map(drop_message_loss, wrap_in_list(row["prompt"])),
                *wrap_in_list(row["completion"]),
            ],
        )
    if name == "prompt-completion":
        return _set_messages(
            row,
            [
                build_user_message(read_text(row, "prompt")),
                build_assistant_message(read_text(row, "completion")),
            ],
        )
    if name == "ShareGPT":
        return _set_messages(row, convert_sharegpt(row, "conversations"))
    if name in ("Alpaca", "Dolly"):
        context, answer = ("input", "output") if name == "Alpaca" else ("context", "response")
        return _set_messages(
            row, [*convert_alpaca(row, context), build_assistant_message(read_text(row, answer))]
        )
    if name == "text":
        return _set_messages(row, [{"role": "text", "content": read_text(row, "text")}])
    if name == "messages" or row.get("messages") is not None:
        return row
    if "prompt" in row or "completion" in row:
        read_text(row, "prompt")
        refuse_answer_row(row)
        read_text(row, "completion")
    raise BadRow(
        "messages",
        "is missing, and so are prompt and completion; "
        f"{advise_column_renames(row, 'demonstrations', _NAMES['demonstrations'])}",
    )


def convert_preference(row: RawRow) -> RawRow:
    """Return the row as {prompt, chosen, rejected} or {prompt, completion, label or score}, sides text or messages.

    Raises: BadRow.

    A prompt is text if it is one message of the user, a side if it is one assistant message without further fields.
    """
    form = detect_format(row, "preferences")
    if form is None:
        _refuse_unknown_preference(row)
        return row
    convert = _CONVERSIONS.get(form.name)
    return row if convert is None else convert(row)


def _refuse_unknown_preference(row: RawRow) -> None:
    """Raise for a row of no format; if one of our columns is missing or empty, name it."""
    if {"chosen", "rejected"} <= set(row) and "prompt" not in row:
        raise BadRow(
            "prompt",
            f"is missing; {advise_column_renames(row, 'preferences', _NAMES['preferences'])}",
        )
    if len({"prompt", "chosen", "rejected", "completion", "label"} & set(row)) < 2:
        raise BadRow("", advise_column_renames(row, "preferences", _NAMES["preferences"]))
    for name in ("prompt", "chosen", "rejected", "completion"):
        if row.get(name) is not None:
            read_text(row, name)


# ------------------------------------------------------------------------------------------------- demonstrations


def _set_messages(row: RawRow, messages: list[RawRow]) -> RawRow:
    return {**row, "messages": messages}


# ---------------------------------------------------------------------------------------------------- preferences


def _read_messages(row: RawRow, name: str) -> list[RawRow]:
    return validate_messages(wrap_in_list(row[name]), name)


def _split_implicit_prompt(row: RawRow, chosen: list[RawRow], rejected: list[RawRow]) -> RawRow:
    """Split off the prompt: the messages that both sides share, up to the last one of a role other than assistant."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    while same and (
        chosen[same - 1]["role"] == "assistant" or same == min(len(chosen), len(rejected))
    ):
        same -= 1
    if not same:
        raise BadRow(
            "chosen", "begins with another message than rejected, so there is no common prompt"
        )
    return {
        **row,
        "prompt": _convert_prompt(chosen[:same], "chosen"),
        "chosen": _convert_answer(chosen[same:], "chosen"),
        "rejected": _convert_answer(rejected[same:], "rejected"),
    }


def _convert_prompt(messages: list[RawRow], path: str) -> str | list[RawRow]:
    """Return a prompt: text if it is one message of the user."""
    if not messages or messages[-1]["role"] == "assistant":
        raise BadRow(path, "ends with the assistant's message, but a prompt is what it answers")
    text: str = messages[0]["content"]
    return text if len(messages) == 1 and set(messages[0]) == {"role", "content"} else messages


def _convert_answer(messages: Sequence[RawRow], path: str) -> str | list[RawRow]:
    """Return an answer: text if it is one assistant message of plain content."""
    if not messages or messages[-1]["role"] != "assistant" or messages[0]["role"] != "assistant":
        raise BadRow(path, "must begin and end with the assistant's message after the prompt")
    text: str = messages[0]["content"]
    return (
        text if len(messages) == 1 and set(messages[0]) == {"role", "content"} else list(messages)
    )


def _convert_binarized_pair(row: RawRow) -> RawRow:
    """Convert UltraFeedback's pairs, which hold the prompt twice."""
    pair = _split_implicit_prompt(
        row, _read_messages(row, "chosen"), _read_messages(row, "rejected")
    )
    if isinstance(pair["prompt"], str) and pair["prompt"].strip() != row["prompt"].strip():
        raise BadRow("prompt", "is not the text that chosen and rejected begin with")
    return pair


def _convert_conversational(row: RawRow) -> RawRow:
    sides = [name for name in ("chosen", "rejected", "completion") if row.get(name) is not None]
    changed = {side: _convert_answer(_read_messages(row, side), side) for side in sides}
    return {**row, "prompt": _convert_prompt(_read_messages(row, "prompt"), "prompt"), **changed}


def _convert_sharegpt_pair(row: RawRow) -> RawRow:
    """Convert a conversation that waits for an answer, and two answers: one turn or several each."""
    conversation = validate_messages(convert_sharegpt_turns(row, "conversations"), "conversations")
    sides = {
        side: convert_sharegpt_turns({side: wrap_in_list(row[side])}, side)
        for side in ("chosen", "rejected")
    }
    changed = {
        side: _convert_answer(validate_messages(turns, side), side) for side, turns in sides.items()
    }
    return {**row, "prompt": _convert_prompt(conversation, "conversations"), **changed}


def _convert_alpaca_pair(row: RawRow) -> RawRow:
    return {
        **row,
        "prompt": _convert_prompt(
            validate_messages(convert_alpaca(row, "input"), "history"), "history"
        ),
    }


def _convert_labelled_messages(row: RawRow) -> RawRow:
    """Convert a conversation whose last answer is labelled."""
    messages = _read_messages(row, "messages")
    return {
        **row,
        "prompt": _convert_prompt(messages[:-1], "messages"),
        "completion": _convert_answer(messages[-1:], "messages"),
    }


def _build_question_converter(name: str) -> Callable[[RawRow], RawRow]:
    """Build a conversion of rows with the question in that column and a system message."""

    def convert(row: RawRow) -> RawRow:
        system = (
            [{"role": "system", "content": row["system"]}]
            if str(row.get("system") or "").strip()
            else []
        )
        return {
            **row,
            "prompt": _convert_prompt(
                [*system, build_user_message(read_text(row, name))], "question"
            ),
        }

    return convert


_CONVERSIONS: dict[str, Callable[[RawRow], RawRow]] = {
    "pairs, conversational": _convert_conversational,
    "UltraFeedback, binarized": _convert_binarized_pair,
    "pairs, ShareGPT": _convert_sharegpt_pair,
    "pairs, implicit prompt": lambda row: _split_implicit_prompt(
        row, _read_messages(row, "chosen"), _read_messages(row, "rejected")
    ),
    "pairs, Alpaca": _convert_alpaca_pair,
    "Orca-DPO": _build_question_converter("question"),
    "Orca-DPO, distilabel": _build_question_converter("input"),
    "HH-RLHF": lambda row: _split_implicit_prompt(
        row, parse_hh_turns(row, "chosen"), parse_hh_turns(row, "rejected")
    ),
    "labelled, conversational": _convert_conversational,
    "scored, conversational": _convert_conversational,
    "labelled, messages": _convert_labelled_messages,
}


Row = dict[str, Any]

OPTIONAL_COLUMNS = ("level", "kind", "seed")


def read_optional_columns(row: Row) -> Row:
    """Return optional columns that describe the episode of a row."""
    columns: Row = {
        name: read_text(row, name) for name in ("level", "kind") if row.get(name) is not None
    }
    seed = row.get("seed")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadRow("seed", f"must be an integer, found {describe_value(seed)}")
        if not -(2**63) <= seed < 2**63:
            raise BadRow("seed", "does not fit into 64 bits")
        columns["seed"] = seed
    return columns


def validate_demonstration(row: Row) -> Row:
    """Return a demonstration of any format as messages, the last one the assistant's."""
    if row.get("sequences") is not None:
        return validate_recorded_row(row) | read_optional_columns(row)
    row = convert_demonstration(row)
    messages = _validate_demonstration_messages(row)
    tools = validate_tools(row["tools"]) if row.get("tools") else []
    return {
        "messages": messages,
        **({"tools": tools} if tools else {}),
        **read_optional_columns(row),
    }


def _validate_demonstration_messages(row: Row) -> list[dict[str, Any]]:
    raw = row["messages"]
    first = raw[0] if isinstance(raw, list) and len(raw) == 1 else None
    if isinstance(first, Mapping) and first.get("role") == "text":
        return [{"role": "text", "content": read_text(first, "content", "text")}]
    messages = validate_messages(row["messages"], "messages", with_images=True)
    if messages[-1]["role"] != "assistant":
        raise BadRow(
            f"messages[{len(messages) - 1}].role",
            f"must be assistant at the end, found '{messages[-1]['role']}'",
        )
    if all(message.get("weight", 1) == 0 for message in messages if message["role"] == "assistant"):
        raise BadRow("messages", "carries no loss: every assistant message has weight 0")
    return messages


def validate_prompt(row: Row) -> Row:
    """Return a prompt, text or messages, with every other column."""
    if row.get("prompt") is None:
        columns = ", ".join(list_field_names(row)) or "none"
        raise BadRow("prompt", f"is missing; columns found: {columns}")
    if not isinstance(row.get("prompt"), list):
        return {**row, "prompt": read_text(row, "prompt")}
    messages = validate_messages(row["prompt"], "prompt", with_images=True)
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            f"prompt[{len(messages) - 1}].role",
            "is assistant, but the policy is to write what comes next",
        )
    return {**row, "prompt": messages}


def _validate_labelled_completion(row: Row) -> Row:
    columns: Row = {name: _read_text_or_messages(row, name) for name in ("prompt", "completion")}
    if row.get("score") is not None and row.get("label") is None:
        return {
            **columns,
            "score": read_number(row, "score"),
            **_read_tools(row),
            **read_optional_columns(row),
        }
    label = row.get("label")
    if not isinstance(label, bool):
        raise BadRow(
            "label",
            "is missing"
            if label is None
            else f"must be true or false, found {describe_value(label)}",
        )
    return {**columns, "label": label, **_read_tools(row), **read_optional_columns(row)}


def _read_text_or_messages(row: Row, name: str) -> str | list[dict[str, Any]]:
    """Return text, or messages that `convert_preference` has checked."""
    return row[name] if isinstance(row.get(name), list) and row[name] else read_text(row, name)


def _read_tools(row: Row) -> Row:
    return {"tools": validate_tools(row["tools"])} if row.get("tools") else {}


def _read_margin(row: Row) -> Row:
    return {} if row.get("margin") is None else {"margin": read_number(row, "margin", lowest=0.0)}


def _read_tie(row: Row) -> Row:
    if not isinstance(row.get("tie"), bool | None):
        raise BadRow("tie", f"must be true or false, found {describe_value(row['tie'])}")
    return {"tie": True} if row.get("tie") else {}


def validate_preference(row: Row) -> Row:
    """Return a pair, or a labelled or scored completion, of any format."""
    row = convert_preference(row)
    if isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list):
        return {
            "prompt": _read_text_or_messages(row, "prompt"),
            **validate_labelled_steps(row),
            **read_optional_columns(row),
        }
    if (
        row.get("chosen") is None
        and row.get("rejected") is None
        and ("completion" in row or "label" in row)
    ):
        return _validate_labelled_completion(row)
    sides: Row = {
        name: _read_text_or_messages(row, name) for name in ("prompt", "chosen", "rejected")
    }
    if _strip_text(sides["chosen"]) == _strip_text(sides["rejected"]):
        raise BadRow("chosen", "is equal to rejected, so there is no preference")
    return (
        sides | _read_margin(row) | _read_tie(row) | _read_tools(row) | read_optional_columns(row)
    )


def _strip_text(side: str | list[dict[str, Any]]) -> Any:
    return side.strip() if isinstance(side, str) else side
