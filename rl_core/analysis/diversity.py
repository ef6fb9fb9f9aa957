"""Diversity of samples: distinct n-grams and self-BLEU. Pure functions of sequences of words or token ids."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from rl_core.errors import DataError

__all__ = ["distinct_ngrams", "self_bleu"]

Ngram = tuple[Hashable, ...]


def distinct_ngrams(sequences: Iterable[Sequence[Hashable]], n: int) -> float:
    """Distinct n-grams over all n-grams of the sequences (none crosses two of them); 0 without any.

    It decreases with the amount of text: compare samples of equal size.
    Source: Li et al. 2016, arXiv:1510.03055, section 5.1 (distinct-1, distinct-2).
    """
    seen: set[Ngram] = set()
    total = 0
    for sequence in sequences:
        grams = _ngrams(sequence, n)
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else 0.0


def self_bleu(sequences: Sequence[Sequence[Hashable]], max_n: int = 4) -> float:
    """Mean BLEU of each sequence against all others as its references: 1 = all equal, near 0 = nothing in common.

    BLEU = min(1, exp(1 - r / c)) exp(mean_n log p_n), c the length of the sequence, r that of the reference nearest to
    it (ties: the shorter), p_n its n-grams that occur in references, each at most as often as in the one that has it
    most, over all its n-grams; from n = 2 on with 1 added to both, so that one missing order does not decide. A
    sequence shorter than `max_n` has the orders up to its length; an empty one has BLEU 1 beside an empty one, else 0.
    Args:
        sequences: at least 2. max_n: longest n-grams, at least 1.
    Raises: DataError for fewer sequences or orders.
    Source: Zhu et al. 2018, arXiv:1802.01886, section 3.1; Papineni et al. 2002, aclanthology.org/P02-1040; smoothing
        of Lin and Och 2004, aclanthology.org/C04-1072.
    """
    if len(sequences) < 2 or max_n < 1:
        raise DataError(f"self_bleu: {len(sequences)} sequences and orders up to {max_n}; needs at least 2 and 1")
    counts = [[Counter(_ngrams(sequence, n)) for n in range(1, max_n + 1)] for sequence in sequences]
    most = [_two_largest([one[order] for one in counts]) for order in range(max_n)]
    lengths = sorted(map(len, sequences))
    total = 0.0
    for sequence, orders in zip(sequences, counts, strict=True):
        size = len(sequence)
        if not size:
            total += float(lengths[1] == 0)
            continue
        logs = []
        for order in range(min(max_n, size)):
            matched = sum(min(count, _of_others(most[order][gram], count)) for gram, count in orders[order].items())
            added = int(order > 0)
            if matched + added == 0:
                break
            logs.append(math.log((matched + added) / (size - order + added)))
        else:
            total += _brevity(size, lengths) * math.exp(sum(logs) / len(logs))
    return total / len(sequences)


def _ngrams(sequence: Sequence[Hashable], n: int) -> list[Ngram]:
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]


def _two_largest(counts: Sequence[Counter[Ngram]]) -> dict[Ngram, tuple[int, int]]:
    """Of each n-gram the two largest counts in a sequence."""
    found: dict[Ngram, tuple[int, int]] = {}
    for one in counts:
        for gram, count in one.items():
            first, second = found.get(gram, (0, 0))
            found[gram] = (count, first) if count > first else (first, max(second, count))
    return found


def _of_others(largest: tuple[int, int], own: int) -> int:
    """The largest count in another sequence."""
    first, second = largest
    return second if own == first else first


def _brevity(size: int, lengths: Sequence[int]) -> float:
    """Brevity penalty of a sequence of `size`; `lengths`: of all sequences, it included, in rising order."""
    place = bisect_left(lengths, size)
    others = [*lengths[max(0, place - 1) : place], *lengths[place + 1 : place + 2]]
    nearest = min(others, key=lambda length: (abs(length - size), length))
    return min(1.0, math.exp(1 - nearest / size))
