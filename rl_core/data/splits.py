"""Train/held-out splits by prompt, with duplicate and overlap reports."""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rl_core.errors import DataError

__all__ = ["duplicate_report", "opening_text", "overlap_report", "prompt_key", "prompt_text", "split_by_prompt"]

T = TypeVar("T")


def prompt_key(prompt: str) -> str:
    """Normalised prompt for duplicate detection: case, white space and Unicode composition are ignored."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def opening_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Prompt of a conversation: its text before the first assistant message."""
    opening = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    return "\n".join(message["content"] for message in opening)


def prompt_text(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Text that tells prompts apart: of a conversation its text before the first assistant message."""
    return prompt if isinstance(prompt, str) else opening_text(prompt)


def split_by_prompt(
    rows: Sequence[T], prompt_of: Callable[[T], str], heldout_fraction: float, seed: int
) -> tuple[list[T], list[T], dict[str, int]]:
    """Split of rows such that no prompt is on both sides; rows keep their order.

    Prompts are ranked by a seeded hash of their key and the lowest are held out, so the split is independent of row
    order and changes little when rows are added.
    Args:
        prompt_of: returns a row's prompt text.
        heldout_fraction: share of distinct prompts held out, rounded; at least one prompt stays on each side.
    Returns: training rows, held-out rows, report (`duplicate_report` and `overlap_report` together).
    Raises: DataError for a fraction outside (0, 1) or fewer than two distinct prompts.
    """
    if not 0 < heldout_fraction < 1:
        raise DataError(f"heldout_fraction: {heldout_fraction} must be between 0 and 1")
    keys = [prompt_key(prompt_of(row)) for row in rows]
    ranked = sorted(set(keys), key=lambda key: (hashlib.sha256(f"{seed}\n{key}".encode()).digest(), key))
    if len(ranked) < 2:
        raise DataError(f"{len(ranked)} distinct prompts cannot be split into a training and a held-out set")
    count = min(max(1, round(heldout_fraction * len(ranked))), len(ranked) - 1)
    heldout_keys = set(ranked[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in heldout_keys]
    heldout = [row for row, key in zip(rows, keys, strict=True) if key in heldout_keys]
    return train, heldout, duplicate_report(rows, prompt_of) | overlap_report(train, heldout, prompt_of)


def duplicate_report(rows: Sequence[T], prompt_of: Callable[[T], str]) -> dict[str, int]:
    """Counts of rows, exact duplicates, distinct prompts, and rows with a repeated prompt."""
    distinct_prompts = {prompt_key(prompt_of(row)) for row in rows}
    return {
        "num_rows": len(rows),
        "num_duplicate_rows": len(rows) - len({repr(row) for row in rows}),
        "num_prompts": len(distinct_prompts),
        "num_repeated_prompts": len(rows) - len(distinct_prompts),
    }


def overlap_report(train: Sequence[T], heldout: Sequence[T], prompt_of: Callable[[T], str]) -> dict[str, int]:
    """Counts of both sides, and of the distinct prompts and held-out rows whose prompt is also in the training set."""
    train_keys = {prompt_key(prompt_of(row)) for row in train}
    heldout_keys = [prompt_key(prompt_of(row)) for row in heldout]
    return {
        "num_train_rows": len(train),
        "num_train_prompts": len(train_keys),
        "num_heldout_rows": len(heldout),
        "num_heldout_prompts": len(set(heldout_keys)),
        "num_overlap_prompts": len(train_keys & set(heldout_keys)),
        "num_overlap_rows": sum(key in train_keys for key in heldout_keys),
    }
