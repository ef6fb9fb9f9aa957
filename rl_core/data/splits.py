"""Splits by prompt, and repeated rows: copies, contradictions and near duplicates.

Copies and contradictions are counted and reported, and trained on nevertheless. Near duplicates are MinHash candidates
(datasketch), confirmed by their exact Jaccard similarity.
Source: Broder 1997, "On the resemblance and containment of documents"; shingles of words as in Lee et al. 2021,
arXiv:2107.06499.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from rl_core.data.images import describe_images
from rl_core.errors import DataError, SettingsError

logger = logging.getLogger(__name__)

_NUM_EXAMPLES = 3  # examples in a message


@dataclass(slots=True)
class RepeatedRows:
    """Pairs (index of a row, index of the first row that it repeats or contradicts)."""

    copies: list[tuple[int, int]] = field(default_factory=list)  # equal in every column
    # A preference the other way round, or a completion with the other label, for the same prompt
    contradictions: list[tuple[int, int]] = field(default_factory=list)

    def warn_about_repeats(self, source: str, num_rows: int, lines: Sequence[int]) -> None:
        """Warn of both, with the places of the first ones. `lines`: line of each row, 0 = rows in memory."""

        def places(pairs: Sequence[tuple[int, int]]) -> str:
            shown = [
                f"{_describe_row_place(row, lines)} and {_describe_row_place(first, lines)}"
                for row, first in pairs[:_NUM_EXAMPLES]
            ]
            return "; ".join(shown) + (
                f"; and {len(pairs) - _NUM_EXAMPLES} more" if len(pairs) > _NUM_EXAMPLES else ""
            )

        if self.copies:
            logger.warning(
                "%s: %d of %d rows are exact copies of earlier ones and count more than once in training (%s)",
                source,
                len(self.copies),
                num_rows,
                places(self.copies),
            )
        if self.contradictions:
            logger.warning(
                "%s: %d of %d rows contradict earlier ones: they prefer what those reject, or label one completion "
                "both ways (%s)",
                source,
                len(self.contradictions),
                num_rows,
                places(self.contradictions),
            )


def find_repeats(rows: Sequence[Mapping[str, Any]]) -> RepeatedRows:
    """Find copies among the rows, and contradictions among preferences (chosen, rejected) or labelled completions."""
    found = RepeatedRows()
    whole: dict[bytes, int] = {}
    judged: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        first = whole.setdefault(compute_short_digest(row), index)
        if first != index:
            found.copies.append((index, first))
        if row.get("tie"):
            continue
        if "chosen" in row:
            own, other = (row["chosen"], row["rejected"]), (row["rejected"], row["chosen"])
        elif "label" in row:
            own, other = (row["completion"], row["label"]), (row["completion"], not row["label"])
        else:
            continue
        prompt = str(row["prompt"])
        judged.setdefault(compute_short_digest((prompt, own)), index)
        if (against := judged.get(compute_short_digest((prompt, other)))) is not None:
            found.contradictions.append((index, against))
    return found


def compute_short_digest(value: object) -> bytes:
    """Compute a 16-byte digest of a value: the texts of a million rows are not held twice."""
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _describe_row_place(index: int, lines: Sequence[int]) -> str:
    return f"line {lines[index]}" if lines[index] else f"row {index}"


_SHINGLE_WORDS = 5  # of one shingle
_PERMUTATIONS = 64
_MAX_CACHED_SHINGLES = 4096  # sets of shingles


def is_datasketch_available() -> bool:
    """Return whether datasketch is installed (the extra `data`)."""
    return importlib.util.find_spec("datasketch") is not None


def build_shingles(text: str) -> set[str]:
    """Return runs of five words, in lower case; the entire text if it has fewer."""
    words = text.casefold().split()
    return {
        " ".join(words[i : i + _SHINGLE_WORDS])
        for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))
    }


def compute_jaccard(one: set[str], other: set[str]) -> float:
    """Compute the share of common shingles, |A and B| / |A or B|."""
    return len(one & other) / max(1, len(one | other))


def find_near_duplicates(
    texts: Sequence[str], others: Sequence[str] | None, min_similarity: float
) -> list[tuple[int, int, float]]:
    """Find (index of a text, index of its nearest earlier or other text, their Jaccard similarity), from 0.

    Args:
        texts: looked up in order; each is compared with those before it, or with all `others` if there are any.
        min_similarity: least Jaccard similarity of the shingles, above 0 and at most 1; equal texts are skipped.
    Raises: SettingsError for a similarity out of range, or without datasketch.
    """
    if not 0 < min_similarity <= 1:
        raise SettingsError(f"near: {min_similarity} must be above 0 and at most 1")
    if not is_datasketch_available():
        raise SettingsError(
            "near duplicates need the package datasketch; python -m posttrain.install --extras data"
        )
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=min_similarity, num_perm=_PERMUTATIONS)
    pool = texts if others is None else others
    # Most texts are never compared again; shingles take ten times the text, so they are rebuilt on demand.
    parts_of = lru_cache(maxsize=_MAX_CACHED_SHINGLES)(lambda place: build_shingles(pool[place]))
    duplicates = []
    # Its permutations are drawn once, and words are hashed by a checksum: both took most of the time. Candidates are
    # confirmed, so that a poorer hash costs a look at most.
    empty = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=zlib.crc32)

    def sketch(parts: set[str]) -> MinHash:
        made = empty.copy()
        made.update_batch([part.encode() for part in parts])
        return made

    for place, text in enumerate(others or ()):
        index.insert(place, sketch(build_shingles(text)))
    for place, text in enumerate(texts):
        parts = build_shingles(text)
        made = sketch(parts)
        near = (int(key) for key in index.query(made))
        best = max(
            ((compute_jaccard(parts, parts_of(key)), -key) for key in near if pool[key] != text),
            default=(0.0, 0),
        )
        if best[0] >= min_similarity:
            duplicates.append((place, -best[1], best[0]))
        if others is None:
            index.insert(place, made)
    return duplicates


T = TypeVar("T")


def normalize_prompt(prompt: str) -> str:
    """Normalise a prompt for duplicate detection: ignore case, white space and Unicode composition."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def extract_opening_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the prompt of a conversation: its text before the first assistant message, with digests of images."""
    opening = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    return "\n".join(f"{message['content']}{describe_images(message)}" for message in opening)


def extract_prompt_text(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """Return the text that identifies a prompt: of a conversation its text before the first assistant message."""
    return prompt if isinstance(prompt, str) else extract_opening_text(prompt)


def split_by_prompt(
    rows: Sequence[T], prompt_of: Callable[[T], str], heldout_fraction: float, seed: int
) -> tuple[list[T], list[T], dict[str, int]]:
    """Split of rows such that no prompt is on both sides; rows keep their order.

    Arguments and errors: `split_indices`.
    Returns: training rows, held-out rows, report (`count_duplicates` and `count_overlap` together).
    """
    train, heldout, report = split_indices(rows, prompt_of, heldout_fraction, seed)
    return [rows[place] for place in train], [rows[place] for place in heldout], report


def split_indices(
    rows: Sequence[T], prompt_of: Callable[[T], str], heldout_fraction: float, seed: int
) -> tuple[list[int], list[int], dict[str, int]]:
    """Return indices of the training and of the held-out rows, ascending, and the report of `split_by_prompt`.

    Prompts are ranked by a seeded hash of their key and the lowest are held out, so the split is independent of row
    order and changes little when rows are added. Only a digest of each prompt is stored, not its text.
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
        key = normalize_prompt(prompt_of(row))
        keys.append(compute_short_digest(key))
        if keys[-1] not in ranks:
            ranks[keys[-1]] = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    if len(ranks) < 2:
        raise DataError(
            f"{len(ranks)} distinct prompt{'' if len(ranks) == 1 else 's'} cannot be split into a training and a "
            "held-out set"
        )
    count = min(max(1, round(heldout_fraction * len(ranks))), len(ranks) - 1)
    heldout_keys = set(sorted(ranks, key=ranks.__getitem__)[:count])
    train = [place for place, key in enumerate(keys) if key not in heldout_keys]
    heldout = [place for place, key in enumerate(keys) if key in heldout_keys]
    sides = [[keys[place] for place in part] for part in (train, heldout)]
    return train, heldout, _count_key_duplicates(rows, keys) | _count_key_overlap(*sides)


def count_duplicates(rows: Sequence[T], prompt_of: Callable[[T], str]) -> dict[str, int]:
    """Counts of rows, exact duplicates, distinct prompts, and rows with a repeated prompt."""
    return _count_key_duplicates(rows, _compute_prompt_digests(rows, prompt_of))


def count_overlap(
    train: Sequence[T], heldout: Sequence[T], prompt_of: Callable[[T], str]
) -> dict[str, int]:
    """Counts of both sides, and of the distinct prompts and held-out rows whose prompt is also in the training set."""
    return _count_key_overlap(
        _compute_prompt_digests(train, prompt_of), _compute_prompt_digests(heldout, prompt_of)
    )


def _compute_prompt_digests(rows: Sequence[T], prompt_of: Callable[[T], str]) -> list[bytes]:
    return [compute_short_digest(normalize_prompt(prompt_of(row))) for row in rows]


def _count_key_duplicates(rows: Sequence[object], keys: Sequence[bytes]) -> dict[str, int]:
    num_prompts = len(set(keys))
    return {
        "num_rows": len(rows),
        "num_duplicate_rows": len(rows) - len({compute_short_digest(row) for row in rows}),
        "num_prompts": num_prompts,
        "num_repeated_prompts": len(rows) - num_prompts,
    }


def _count_key_overlap(train: Sequence[bytes], heldout: Sequence[bytes]) -> dict[str, int]:
    train_keys = set(train)
    return {
        "num_train_rows": len(train),
        "num_train_prompts": len(train_keys),
        "num_heldout_rows": len(heldout),
        "num_heldout_prompts": len(set(heldout)),
        "num_overlap_prompts": len(train_keys & set(heldout)),
        "num_overlap_rows": sum(key in train_keys for key in heldout),
    }
