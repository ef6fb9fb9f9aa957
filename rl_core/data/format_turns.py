"""Messages of rows of other formats: ShareGPT's turns, Alpaca's instruction, the dialogues of HH-RLHF."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rl_core.data.files import BadRow, describe, read_text

__all__ = [
    "HH_TURN", "alpaca", "assistant", "from_and_value", "hh_turns", "listed", "sharegpt", "user", "without_loss",
]  # fmt: skip

Row = dict[str, Any]

_SHAREGPT = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def user(text: str) -> Row:
    """Message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    """Message of the assistant."""
    return {"role": "assistant", "content": text}


def without_loss(message: Any) -> Any:
    """An assistant message of a prompt, which carries no loss."""
    return {**message, "weight": 0} if isinstance(message, Mapping) and message.get("role") == "assistant" else message


def listed(value: Any) -> list[Any]:
    """One message as a list of one."""
    return [value] if isinstance(value, Mapping) else list(value)


def sharegpt(row: Row, name: str) -> list[Row]:
    """Messages of a conversation that ends with an answer."""
    messages = from_and_value(row, name)
    if messages[-1].get("role") == "user":
        raise BadRow(
            f"{name}[{len(row[name]) - 1}].from",
            f"is the user's turn at the end, so nobody answers it; cut it: jq -c '.{name} |= .[:-1]' FILE > NEW",
        )
    return messages


def from_and_value(row: Row, name: str) -> list[Row]:
    """Messages of turns {"from", "value"}, the row's system message before them."""
    turns = row[name]
    if not isinstance(turns, list) or not turns:
        raise BadRow(name, f"must be a list of turns, found {describe(turns)}")
    system = row.get("system")
    messages: list[Row] = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    for index, turn in enumerate(turns):
        place = f"{name}[{index}]"
        if not isinstance(turn, Mapping):
            raise BadRow(place, f"must be an object with from and value, found {describe(turn)}")
        messages.append(dict(turn) if "role" in turn else _said(turn, place))
    return messages


def _said(turn: Mapping[str, Any], place: str) -> Row:
    """The message of a turn {"from", "value"}, with whatever else the turn has."""
    fields = {name: value for name, value in turn.items() if value is not None}
    word = read_text(fields, "from", f"{place}.from")
    role = _SHAREGPT.get(word.lower())
    if role is None:
        raise BadRow(f"{place}.from", f"must be one of {', '.join(_SHAREGPT)}, found {word!r}")
    others = {name: value for name, value in fields.items() if name not in ("from", "value")}
    text = read_text(fields, "value", f"{place}.value", may_be_empty=role == "tool")
    return {**(_call(text, place) if role == "call" else {"role": role, "content": text}), **others}


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


def alpaca(row: Row, context: str) -> list[Row]:
    """Instruction, a blank line and the input as the user's message; system and history before it."""
    messages: list[Row] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for index, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"history[{index}]", f"must be a question and an answer, found {describe(pair)}")
        messages += [user(pair[0]), assistant(pair[1])]
    prompt = read_text(row, "instruction")
    if row.get(context):
        prompt += "\n\n" + read_text(row, context)
    return [*messages, user(prompt)]


def hh_turns(row: Row, name: str) -> list[Row]:
    """Turns of a text "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    text = read_text(row, name)
    parts = HH_TURN.split(text)
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
