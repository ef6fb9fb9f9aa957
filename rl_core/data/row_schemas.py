"""Rows of data sets, checked one by one: a schema gives the columns that are kept, or raises BadRow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.data.files import BadRow, describe, read_number, read_text
from rl_core.data.formats import as_demonstration, as_preference
from rl_core.data.messages import checked_messages, checked_tools

__all__ = ["OPTIONAL", "Row", "demonstration_row", "optional_columns", "preference_row", "prompt_row"]

Row = dict[str, Any]

OPTIONAL = ("level", "kind", "seed")


def optional_columns(row: Row) -> Row:
    """Optional columns that describe the episode of a row."""
    kept: Row = {name: read_text(row, name) for name in ("level", "kind") if row.get(name) is not None}
    seed = row.get("seed")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise BadRow("seed", f"must be an integer, found {describe(seed)}")
        if not -(2**63) <= seed < 2**63:
            raise BadRow("seed", "does not fit into 64 bits")
        kept["seed"] = seed
    return kept


def demonstration_row(row: Row) -> Row:
    """A demonstration of any format as messages, the last one the assistant's."""
    row = as_demonstration(row)
    messages = _messages(row)
    tools = checked_tools(row["tools"]) if row.get("tools") else []
    return {"messages": messages, **({"tools": tools} if tools else {}), **optional_columns(row)}


def _messages(row: Row) -> list[dict[str, Any]]:
    found = row["messages"]
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], Mapping) and found[0].get("role") == "text":
        return [{"role": "text", "content": read_text(found[0], "content", "text")}]
    messages = checked_messages(row["messages"], "messages")
    if messages[-1]["role"] != "assistant":
        raise BadRow(
            f"messages[{len(messages) - 1}].role", f"must be assistant at the end, found '{messages[-1]['role']}'"
        )
    if all(message.get("weight", 1) == 0 for message in messages if message["role"] == "assistant"):
        raise BadRow("messages", "carries no loss: every assistant message has weight 0")
    return messages


def prompt_row(row: Row) -> Row:
    """A prompt, text or messages, with every other column."""
    if not isinstance(row.get("prompt"), list):
        return {**row, "prompt": read_text(row, "prompt")}
    messages = checked_messages(row["prompt"], "prompt")
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"prompt[{len(messages) - 1}].role", "is assistant, but the policy is to write what comes next")
    return {**row, "prompt": messages}


def _labelled(row: Row) -> Row:
    kept: Row = {name: _said(row, name) for name in ("prompt", "completion")}
    if row.get("score") is not None and row.get("label") is None:
        return {**kept, "score": read_number(row, "score"), **_tools(row), **optional_columns(row)}
    label = row.get("label")
    if not isinstance(label, bool):
        raise BadRow("label", "is missing" if label is None else f"must be true or false, found {describe(label)}")
    return {**kept, "label": label, **_tools(row), **optional_columns(row)}


def _said(row: Row, name: str) -> str | list[dict[str, Any]]:
    """Text, or messages that `as_preference` has checked."""
    return row[name] if isinstance(row.get(name), list) and row[name] else read_text(row, name)


def _tools(row: Row) -> Row:
    return {"tools": checked_tools(row["tools"])} if row.get("tools") else {}


def _margin(row: Row) -> Row:
    return {} if row.get("margin") is None else {"margin": read_number(row, "margin", lowest=0.0)}


def _tie(row: Row) -> Row:
    if not isinstance(row.get("tie"), bool | None):
        raise BadRow("tie", f"must be true or false, found {describe(row['tie'])}")
    return {"tie": True} if row.get("tie") else {}


def preference_row(row: Row) -> Row:
    """A pair, or a labelled or scored completion, of any format."""
    row = as_preference(row)
    if row.get("chosen") is None and row.get("rejected") is None and ("completion" in row or "label" in row):
        return _labelled(row)
    kept: Row = {name: _said(row, name) for name in ("prompt", "chosen", "rejected")}
    if _bare(kept["chosen"]) == _bare(kept["rejected"]):
        raise BadRow("chosen", "is equal to rejected, so there is no preference")
    return kept | _margin(row) | _tie(row) | _tools(row) | optional_columns(row)


def _bare(side: str | list[dict[str, Any]]) -> Any:
    return side.strip() if isinstance(side, str) else side
