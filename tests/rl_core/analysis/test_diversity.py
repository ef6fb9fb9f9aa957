"""Diversity of samples, by hand; the ratio bootstrap against one that draws texts one by one."""

import math

import numpy as np
import pytest

from rl_core.analysis.statistics import (
    bootstrap_ratio,
    compute_distinct_ngrams,
    compute_distinct_words,
    compute_same_opening_rate,
    compute_self_bleu,
)
from rl_core.errors import DataError


def test_distinct_ngrams_by_hand():
    # bigrams: ab ba ab | bc: 4, of which 3 are distinct; none spans two sequences
    assert compute_distinct_ngrams(["abab", "bc"], 2) == 3 / 4
    assert compute_distinct_ngrams([[1], [2]], 2) == 0.0
    assert compute_distinct_words(["a b a b", "b c"], 2) == 3 / 4


def test_same_opening_rate_by_hand():
    texts = ["A stone is hard.", "a stone, IS old", "A stone was here.", "A stone", "Why?"]
    assert compute_same_opening_rate(texts) == 2 / 5  # a stone is
    assert compute_same_opening_rate(texts, words=2) == 4 / 5
    assert compute_same_opening_rate(["", "", "x"]) == 2 / 3 and compute_same_opening_rate([]) == 0


def test_self_bleu_by_hand():
    first, second = ["a", "b", "c", "d"], ["a", "b", "c", "e"]
    # 3 of 4 unigrams; smoothed: (2 + 1) / (3 + 1) bigrams, (1 + 1) / (2 + 1) trigrams, (0 + 1) / (1 + 1) of order 4
    expected = (3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert compute_self_bleu([first, second]) == pytest.approx(expected, rel=1e-12)
    assert compute_self_bleu([first, first, first]) == pytest.approx(1.0, rel=1e-12)
    assert compute_self_bleu([first, ["e", "f", "g", "h"]]) == 0.0
    # clipped: "a" occurs once in the reference, so 1 of 3 unigrams; bigrams (0 + 1) / (2 + 1); brevity 1 (3 > 1)
    # and the reverse: its only unigram matches, exp(1 - 3 / 1)
    expected = (math.sqrt(1 / 3 * 1 / 3) + math.exp(-2)) / 2
    assert compute_self_bleu([["a"] * 3, ["a"]], max_n=2) == pytest.approx(expected, rel=1e-12)


def compute_naive_self_bleu(sequences, max_n):
    """Score every hypothesis against all other references, counted from scratch."""
    total = 0.0
    for index, hypothesis in enumerate(sequences):
        others = [s for i, s in enumerate(sequences) if i != index]
        if not hypothesis:
            total += any(not other for other in others)
            continue
        product, orders = 1.0, min(max_n, len(hypothesis))
        for n in range(1, orders + 1):
            grams = [tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1)]
            matched = 0
            for gram in set(grams):
                max_count = max(
                    sum(tuple(other[i : i + n]) == gram for i in range(len(other) - n + 1))
                    for other in others
                )
                matched += min(grams.count(gram), max_count)
            added = int(n > 1)
            product *= (matched + added) / (len(grams) + added)
        nearest = min(others, key=lambda other: (abs(len(other) - len(hypothesis)), len(other)))
        total += product ** (1 / orders) * min(1.0, math.exp(1 - len(nearest) / len(hypothesis)))
    return total / len(sequences)


def test_self_bleu_is_that_of_a_naive_count():
    rng = np.random.default_rng(0)
    for _ in range(30):
        sequences = [
            rng.integers(0, 4, rng.integers(0, 9)).tolist() for _ in range(rng.integers(2, 6))
        ]
        assert compute_self_bleu(sequences, 3) == pytest.approx(
            compute_naive_self_bleu(sequences, 3), rel=1e-12, abs=1e-15
        )


def test_self_bleu_needs_two():
    with pytest.raises(DataError, match="1 sequences"):
        compute_self_bleu([["a"]])


def test_ratio_bootstrap():
    sums, sizes = np.array([6.0, 1.0, 2.0, 9.0]), np.array([3, 1, 4, 2])
    interval = bootstrap_ratio(sums, sizes, samples=4000, seed=1)
    assert interval.difference == 18 / 10
    rng = np.random.default_rng(5)
    drawn = rng.integers(0, 4, (40_000, 4))
    ratios = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert interval.low == pytest.approx(low, abs=0.05) and interval.high == pytest.approx(
        high, abs=0.1
    )
    assert interval == bootstrap_ratio(sums, sizes, samples=4000, seed=1)
    assert bootstrap_ratio([3.0], [2], samples=10, seed=0) == (1.5, 1.5, 1.5)
    for bad in (([1.0], [0]), ([np.nan], [1]), ([], []), ([1.0, 2.0], [1])):
        with pytest.raises(DataError):
            bootstrap_ratio(*bad, samples=10, seed=0)
