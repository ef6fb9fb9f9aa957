"""Uses of preference rows, and what each of them takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["TIED", "misfit"]

TIED = ("reward_model", "dpo", "ipo")  # uses of preferences that have a model of ties
_NEEDS = {"reward_regression": "scores", "kto": "labels"}  # rows that a use needs; others: pairs


def misfit(row: Mapping[str, Any], use: str) -> str:
    """Reason why a preference row cannot be used by a loss ("dpo", ..., "reward_model"); "" = it can."""
    if use != "kto" and "label" in row:
        return f"has a label, which only the loss kto takes; {use} needs {_NEEDS.get(use, 'pairs')}"
    if ("score" in row) != (use == "reward_regression"):
        if "score" in row:
            return (
                f"has a score, which only a reward model with `loss: mse` takes; {use} needs {_NEEDS.get(use, 'pairs')}"
            )
        return "has no score; a reward model with `loss: mse` needs prompt, completion and score"
    if row.get("tie") and use not in TIED:
        return f"is a tie, which only {', '.join(TIED)} learn from, not {use}; leave out rows with `tie: true`"
    if use != "reward_model" and "margin" in row:
        return f"margin: only a reward model takes margins, not the loss {use}"
    return ""
