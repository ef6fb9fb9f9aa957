"""Line of jq that renames the columns of a row of no known format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["advice"]

_SYSTEM = ("system_prompt", "system", "system_message")
_ASKED = ("question", "query", "instruction", "problem", "input", "source", "prompt", "user", "request")
_ANSWERED = ("answer", "response", "output", "completion", "solution", "target", "assistant", "reply", "summary")


def advice(row: Mapping[str, Any], kind: str, names: Sequence[str]) -> str:
    """Columns found, and a line that makes rows of them.

    Args:
        kind: demonstrations or preferences.
        names: formats of that kind.
    """
    found = ", ".join(str(name) for name in row) or "none"
    if isinstance(row.get("completions"), list) and "instruction" in row:
        fix = (
            "'{prompt: .instruction} + (.completions | sort_by(.overall_score) | {chosen: .[-1].response, rejected: "
            ".[0].response}) | select(.chosen != .rejected)'"
        )
    elif kind == "demonstrations":
        fix = _demonstration(row)
    else:
        asked = _guess(row, _ASKED, "QUESTION")
        good = _guess(row, ("chosen", "chosen_response", "preferred", "better", "response_0", "accepted"), "BETTER")
        bad = _guess(row, ("rejected", "rejected_response", "dispreferred", "worse", "response_1"), "WORSE")
        fix = f"'{{prompt: .{asked}, chosen: .{good}, rejected: .{bad}}}'"
    read = "; ".join(names)
    return f"columns found: {found}; name them: jq -c {fix} FILE > NEW.jsonl (formats that are read: {read})"


def _demonstration(row: Mapping[str, Any]) -> str:
    """Question and answer as prompt and completion, or with a system message as messages."""
    system = next((name for name in _SYSTEM if isinstance(row.get(name), str)), "")
    left = {name: value for name, value in row.items() if name != system}
    asked, answered = _guess(left, _ASKED, "QUESTION"), _guess(left, _ANSWERED, "ANSWER")
    if not system:
        return f"'{{prompt: .{asked}, completion: .{answered}}}'"
    said = [("system", system), ("user", asked), ("assistant", answered)]
    turns = ", ".join(f'{{role: "{role}", content: .{name}}}' for role, name in said)
    return f"'{{messages: [{turns}]}}'"


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
