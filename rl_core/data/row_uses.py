"""Uses of preference rows: which losses can learn from which rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USES_WITH_TIES = ("reward_model", "dpo", "ipo")  # uses of preferences that have a model of ties
_ROWS_NEEDED = {
    "reward_regression": "scores",
    "process_reward": "labels of steps",
    "kto": "labels",
}  # rows that a use needs; others: pairs


def explain_misfit(row: Mapping[str, Any], use: str) -> str:
    """Return why a loss ("dpo", ..., "reward_model") cannot use a preference row; "" = it can."""
    if ("step_ends" in row) != (use == "process_reward"):
        if "step_ends" in row:
            needed = _ROWS_NEEDED.get(use, "pairs")
            return f"has labels of steps, which only a reward model with `loss: process` takes; {use} needs {needed}"
        return "has no labels of steps; a reward model with `loss: process` needs prompt, completions and labels"
    if use != "kto" and "label" in row:
        return f"has a label, which only the loss kto takes; {use} needs {_ROWS_NEEDED.get(use, 'pairs')}"
    if ("score" in row) != (use == "reward_regression"):
        if "score" in row:
            needed = _ROWS_NEEDED.get(use, "pairs")
            return f"has a score, which only a reward model with `loss: mse` takes; {use} needs {needed}"
        return "has no score; a reward model with `loss: mse` needs prompt, completion and score"
    if row.get("tie") and use not in USES_WITH_TIES:
        uses = ", ".join(USES_WITH_TIES)
        return f"is a tie, which only {uses} learn from, not {use}; leave out rows with `tie: true`"
    if use != "reward_model" and "margin" in row:
        return f"margin: only a reward model takes margins, not the loss {use}"
    return ""
