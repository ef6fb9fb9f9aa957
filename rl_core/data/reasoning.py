"""Thoughts of reasoning models in plain text: the markers around them, and what lies outside."""

from __future__ import annotations

__all__ = ["THOUGHT_MARKERS", "after_thought", "split_thought"]

# (opening, closing) of a thought: DeepSeek-R1, QwQ, Qwen3 and others; Magistral; Command A.
THOUGHT_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def split_thought(text: str, markers: tuple[str, str]) -> tuple[str | None, str]:
    """(thought, rest) of a text that begins with a thought, or closes one that its prompt opened; else (None, text).

    White space around the thought and before the rest is dropped.
    """
    opening, closing = markers
    thought, found, rest = text.partition(closing)
    if not found:
        return None, text
    return thought.strip().removeprefix(opening).strip(), rest.lstrip()


def after_thought(text: str) -> str:
    """Text of an action after its thought, where alone calls and answers count; "" for a thought that is not closed."""
    for opening, closing in THOUGHT_MARKERS:
        if closing in text:
            return text.rpartition(closing)[2]
        if text.lstrip().startswith(opening):
            return ""
    return text
