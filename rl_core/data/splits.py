"""Train/held-out splits by prompt, with duplicate and overlap reports."""

from __future__ import annotations

import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rl_core.data.repeats import digest_of
from rl_core.errors import DataError

__all__ = [
    "duplicate_report",
    "opening_text",
    "overlap_report",
    "prompt_key",
    "prompt_text",
    "split_by_prompt",
    "split_places",
]

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

    Arguments and errors: `split_places`.
    Returns: training rows, held-out rows, report (`duplicate_report` and `overlap_report` together).
    """
    train, heldout, report = split_places(rows, prompt_of, heldout_fraction, seed)
    return [rows[place] for place in train], [rows[place] for place in heldout], report


def split_places(
    rows: Sequence[T], prompt_of: Callable[[T], str], heldout_fraction: float, seed: int
) -> tuple[list[int], list[int], dict[str, int]]:
    """Places of the training and of the held-out rows, ascending, and the report of `split_by_prompt`.

    Prompts are ranked by a seeded hash of their key and the lowest are held out, so the split is independent of row
    order and changes little when rows are added. Of each prompt a digest is kept, not its text.
    Args:
        prompt_of: returns a row's prompt text.
        heldout_fraction: share of distinct prompts held out, rounded; at least one prompt stays on each side.
    Raises: DataError for a fraction outside (0, 1) or fewer than two distinct prompts.
    """
    if not 0 < heldout_fraction < 1:
        raise DataError(f"heldout_fraction: {heldout_fraction} must be between 0 and 1")
    keys: list[bytes] = []
    ranks: dict[bytes, bytes] = {}
    for row in rows:
        key = prompt_key(prompt_of(row))
        keys.append(digest_of(key))
        if keys[-1] not in ranks:
            ranks[keys[-1]] = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    if len(ranks) < 2:
        raise DataError(f"{len(ranks)} distinct prompts cannot be split into a training and a held-out set")
    count = min(max(1, round(heldout_fraction * len(ranks))), len(ranks) - 1)
    heldout_keys = set(sorted(ranks, key=ranks.__getitem__)[:count])
    train = [place for place, key in enumerate(keys) if key not in heldout_keys]
    heldout = [place for place, key in enumerate(keys) if key in heldout_keys]
    sides = [[keys[place] for place in part] for part in (train, heldout)]
    return train, heldout, _duplicates(rows, keys) | _overlap(*sides)


def duplicate_report(rows: Sequence[T], prompt_of: Callable[[T], str]) -> dict[str, int]:
    """Counts of rows, exact duplicates, distinct prompts, and rows with a repeated prompt."""
    return _duplicates(rows, _keys(rows, prompt_of))


def overlap_report(train: Sequence[T], heldout: Sequence[T], prompt_of: Callable[[T], str]) -> dict[str, int]:
    """Counts of both sides, and of the distinct prompts and held-out rows whose prompt is also in the training set."""
    return _overlap(_keys(train, prompt_of), _keys(heldout, prompt_of))


def _keys(rows: Sequence[T], prompt_of: Callable[[T], str]) -> list[bytes]:
    return [digest_of(prompt_key(prompt_of(row))) for row in rows]


def _duplicates(rows: Sequence[object], keys: Sequence[bytes]) -> dict[str, int]:
    num_prompts = len(set(keys))
    return {
        "num_rows": len(rows),
        "num_duplicate_rows": len(rows) - len({digest_of(row) for row in rows}),
        "num_prompts": num_prompts,
        "num_repeated_prompts": len(rows) - num_prompts,
    }


def _overlap(train: Sequence[bytes], heldout: Sequence[bytes]) -> dict[str, int]:
    train_keys = set(train)
    return {
        "num_train_rows": len(train),
        "num_train_prompts": len(train_keys),
        "num_heldout_rows": len(heldout),
        "num_heldout_prompts": len(set(heldout)),
        "num_overlap_prompts": len(train_keys & set(heldout)),
        "num_overlap_rows": sum(key in train_keys for key in heldout),
    }
