"""Texts that nearly repeat others: MinHash candidates (datasketch), confirmed by their exact Jaccard similarity.

Source: Broder 1997, "On the resemblance and containment of documents"; shingles of words as in Lee et al. 2021,
arXiv:2107.06499.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Sequence
from functools import lru_cache

from rl_core.errors import SettingsError

__all__ = ["is_available", "jaccard", "near_pairs", "shingles"]

_WORDS = 5  # of one shingle
_PERMUTATIONS = 64
_KEPT = 4096  # sets of shingles


def is_available() -> bool:
    """True if datasketch is installed (the extra `data`)."""
    return importlib.util.find_spec("datasketch") is not None


def shingles(text: str) -> set[str]:
    """Runs of five words, in lower case; the whole text where it has fewer."""
    words = text.casefold().split()
    return {" ".join(words[i : i + _WORDS]) for i in range(max(1, len(words) - _WORDS + 1))}


def jaccard(one: set[str], other: set[str]) -> float:
    """Share of common shingles, |A and B| / |A or B|."""
    return len(one & other) / max(1, len(one | other))


def near_pairs(texts: Sequence[str], others: Sequence[str] | None, similarity: float) -> list[tuple[int, int, float]]:
    """(index of a text, index of the earlier or other text that it is nearest to, their Jaccard similarity), from 0.

    Args:
        texts: looked up in order; each is compared with those before it, or with all `others` where those are given.
        similarity: least Jaccard similarity of the shingles, above 0 and at most 1; equal texts are left out.
    Raises: SettingsError for a similarity out of range, or without datasketch.
    """
    if not 0 < similarity <= 1:
        raise SettingsError(f"near: {similarity} must be above 0 and at most 1")
    if not is_available():
        raise SettingsError("near duplicates need the package datasketch; pip install 'posttrain[data]'")
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=similarity, num_perm=_PERMUTATIONS)
    pool = texts if others is None else others
    # Most texts are never looked at again: shingles take ten times the text, and are made anew where needed.
    parts_of = lru_cache(maxsize=_KEPT)(lambda place: shingles(pool[place]))
    found = []
    # Its permutations are drawn once, and words are hashed by a checksum: both took most of the time. Candidates are
    # confirmed, so that a poorer hash costs a look at most.
    empty = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=zlib.crc32)

    def sketch(parts: set[str]) -> MinHash:
        made = empty.copy()
        made.update_batch([part.encode() for part in parts])
        return made

    for place, text in enumerate(others or ()):
        index.insert(place, sketch(shingles(text)))
    for place, text in enumerate(texts):
        parts = shingles(text)
        made = sketch(parts)
        near = (int(key) for key in index.query(made))
        best = max(((jaccard(parts, parts_of(key)), -key) for key in near if pool[key] != text), default=(0.0, 0))
        if best[0] >= similarity:
            found.append((place, -best[1], best[0]))
        if others is None:
            index.insert(place, made)
    return found
