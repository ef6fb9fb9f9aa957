"""Diversity of samples: distinct n-grams and self-BLEU. Pure functions of sequences of words or token ids.

Statistics of evaluation results: intervals, paired differences, pass@k, loops, diversity. Pure functions.

Suffixes on arrays: E episodes, K samples of one episode, U distinct values.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.errors import DataError

Ngram = tuple[Hashable, ...]


def compute_distinct_ngrams(sequences: Iterable[Sequence[Hashable]], n: int) -> float:
    """Compute distinct n-grams over all n-grams of the sequences (none crosses two of them); 0 without any.

    It decreases with the amount of text: compare samples of equal size.
    Source: Li et al. 2016, arXiv:1510.03055, section 5.1 (distinct-1, distinct-2).
    """
    seen: set[Ngram] = set()
    total = 0
    for sequence in sequences:
        grams = _list_ngrams(sequence, n)
        seen.update(grams)
        total += len(grams)
    return len(seen) / total if total else 0.0


def compute_self_bleu(sequences: Sequence[Sequence[Hashable]], max_n: int = 4) -> float:
    """Compute the mean BLEU of each sequence against all others as its references: 1 = all equal, near 0 = nothing in
    common.

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
        raise DataError(
            f"self_bleu: {len(sequences)} sequences and orders up to {max_n}; needs at least 2 and 1"
        )
    counts = [
        [Counter(_list_ngrams(sequence, n)) for n in range(1, max_n + 1)] for sequence in sequences
    ]
    most = [_find_two_largest_counts([one[order] for one in counts]) for order in range(max_n)]
    lengths = sorted(map(len, sequences))
    total = 0.0
    for sequence, orders in zip(sequences, counts, strict=True):
        size = len(sequence)
        if not size:
            total += float(lengths[1] == 0)
            continue
        logs = []
        for order in range(min(max_n, size)):
            matched = sum(
                min(count, _find_largest_other_count(most[order][gram], count))
                for gram, count in orders[order].items()
            )
            added = int(order > 0)
            if matched + added == 0:
                break
            logs.append(math.log((matched + added) / (size - order + added)))
        else:
            total += _compute_brevity_penalty(size, lengths) * math.exp(sum(logs) / len(logs))
    return total / len(sequences)


def _list_ngrams(sequence: Sequence[Hashable], n: int) -> list[Ngram]:
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]


def _find_two_largest_counts(counts: Sequence[Counter[Ngram]]) -> dict[Ngram, tuple[int, int]]:
    """Find, for each n-gram, the two largest counts in a sequence."""
    largest: dict[Ngram, tuple[int, int]] = {}
    for one in counts:
        for gram, count in one.items():
            first, second = largest.get(gram, (0, 0))
            largest[gram] = (count, first) if count > first else (first, max(second, count))
    return largest


def _find_largest_other_count(largest: tuple[int, int], count: int) -> int:
    """Return the largest count in another sequence."""
    first, second = largest
    return second if count == first else first


def _compute_brevity_penalty(size: int, lengths: Sequence[int]) -> float:
    """Compute the brevity penalty of a sequence of `size`; `lengths`: of all sequences, itself included, in rising
    order.
    """
    place = bisect_left(lengths, size)
    others = [*lengths[max(0, place - 1) : place], *lengths[place + 1 : place + 2]]
    nearest = min(others, key=lambda length: (abs(length - size), length))
    return min(1.0, math.exp(1 - nearest / size))


_CELLS_PER_CHUNK = 2_000_000  # multinomial cells per chunk; limits a bootstrap to 16 MB


class Rate(NamedTuple):
    """A proportion with its interval; `n` = denominator."""

    rate: float
    low: float
    high: float
    n: int


class Difference(NamedTuple):
    """A difference of means or proportions with its interval."""

    difference: float
    low: float
    high: float


class StepLoop(NamedTuple):
    """A block of `period` steps from step `start`, occurring `repeats` times in a row."""

    start: int
    period: int
    repeats: int


def wilson_interval(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the Wilson score interval of a binomial proportion.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), p = successes/n, z the normal quantile.
    Args:
        successes: of n trials; fractional if n is an effective sample size.
        n: trials; 0 gives (0, 1).
        confidence: coverage, in (0, 1).
    Returns: (low, high) within [0, 1], of positive width also at 0 or n successes.
    Raises: DataError if successes lie outside [0, n] or the confidence outside (0, 1).
    Source: Wilson 1927, doi:10.2307/2276774; Brown, Cai, DasGupta 2001, doi:10.1214/ss/1009213286.
    """
    if not 0 <= successes <= n:
        raise DataError(
            f"wilson_interval: {successes} successes of {n} trials; successes must lie within 0 and n"
        )
    _check_confidence(confidence)
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    center = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 or n successes one bound is exactly 0 or 1, up to rounding of 1e-17.
    low = 0.0 if successes == 0 else max(0.0, (center - half) / scale)
    high = 1.0 if successes == n else min(1.0, (center + half) / scale)
    return low, high


def compute_rate_from_sums(
    episodes: int, n: int, c: int, cc: float, nn: float, cn: float, confidence: float = 0.95
) -> Rate:
    """Compute the success rate over episodes with several samples each, from sums over the episodes.

    Samples of one episode are correlated, so the interval is Wilson's at the effective sample size
    n_eff = p(1-p) / Var(p), Var(p) = sum_i (c_i - p n_i)^2 / n^2 (ratio estimator over clusters). With one sample per
    episode n_eff = n, Wilson's own; with identical samples within episodes n_eff = the number of episodes.
    Args:
        episodes: clusters. n, c: sums of samples n_i and successes c_i. cc, nn, cn: sums of c_i^2, n_i^2, c_i n_i.
    Returns: Rate whose `n` is the number of samples.
    Source: Kish 1965, Survey Sampling, ch. 5.4 and 8.2; Korn and Graubard 1998 (effective sample size in an interval).
    """
    if n == 0:
        return Rate(0.0, 0.0, 1.0, 0)
    p = c / n
    spread = cc - 2 * p * cn + p * p * nn
    # At p = 0 or 1 the variance estimate is 0; the number of episodes is then a conservative n_eff.
    n_eff = (
        float(episodes)
        if c in (0, n) or spread <= 0
        else min(float(n), p * (1 - p) * n * n / spread)
    )
    low, high = wilson_interval(p * n_eff, n_eff, confidence)
    return Rate(p, low, high, n)


def compute_clustered_rate(
    successes_E: ArrayLike, samples_E: ArrayLike, confidence: float = 0.95
) -> Rate:
    """Compute `compute_rate_from_sums` from arrays.

    Args:
        successes_E: int [E], successes of each episode. samples_E: int [E], its samples.
    Raises: DataError if shapes differ or an episode has more successes than samples.
    """
    c_E, n_E = np.asarray(successes_E, dtype=np.int64), np.asarray(samples_E, dtype=np.int64)
    if c_E.shape != n_E.shape or c_E.ndim != 1:
        raise DataError(
            f"clustered_rate: successes {c_E.shape} and samples {n_E.shape} must be vectors of one length"
        )
    if (c_E < 0).any() or (c_E > n_E).any():
        raise DataError("clustered_rate: every episode needs 0 <= successes <= samples")
    return compute_rate_from_sums(
        len(n_E),
        int(n_E.sum()),
        int(c_E.sum()),
        int(c_E @ c_E),
        int(n_E @ n_E),
        int(c_E @ n_E),
        confidence,
    )


def compute_rate_difference(after: Rate, before: Rate) -> Difference:
    """Compute `after` - `before` of two independent proportions, with Newcombe's hybrid score interval.

    d - sqrt((p1 - l1)^2 + (u2 - p2)^2), d + sqrt((u1 - p1)^2 + (p2 - l2)^2), p and (l, u) the proportions and their
    Wilson intervals; keeps its coverage for few episodes and proportions near 0 or 1.
    Source: Newcombe 1998, Statistics in Medicine 17:873-890, method 10.
    """
    difference = after.rate - before.rate
    low = difference - math.hypot(after.rate - after.low, before.high - before.rate)
    high = difference + math.hypot(after.high - after.rate, before.rate - before.low)
    return Difference(difference, low, high)


def bootstrap_mean(
    values_U: ArrayLike, counts_U: ArrayLike, *, samples: int, seed: int, confidence: float = 0.95
) -> Difference:
    """Compute the percentile bootstrap interval of a mean, from distinct values and their counts.

    Resampling N items with U distinct values is one multinomial draw of N over the U values, so this is the ordinary
    bootstrap in memory independent of N.
    Args:
        values_U: float [U]. counts_U: int [U], sum at least 1.
        samples: resamples. seed: of the generator. confidence: coverage, in (0, 1).
    Returns: Difference(mean, low, high), of zero width if all values are equal.
    Raises: DataError if shapes differ, counts are empty or a value is not finite.
    Source: Efron 1979, doi:10.1214/aos/1176344552 (section 3: the multinomial form).
    """
    values, counts = np.asarray(values_U, dtype=np.float64), np.asarray(counts_U, dtype=np.int64)
    _check_confidence(confidence)
    if values.shape != counts.shape or values.ndim != 1:
        raise DataError(
            f"bootstrap_mean: values {values.shape} and counts {counts.shape} must be vectors of one length"
        )
    if samples < 1 or (counts < 0).any() or counts.sum() == 0:
        raise DataError("bootstrap_mean: needs at least one value and one resample")
    if not np.isfinite(values).all():
        raise DataError("bootstrap_mean: values must be finite")
    total = int(counts.sum())
    generator = np.random.default_rng(seed)
    rows = max(1, _CELLS_PER_CHUNK // len(values))
    means = np.empty(samples)
    for start in range(0, samples, rows):
        size = min(rows, samples - start)
        means[start : start + size] = (
            generator.multinomial(total, counts / total, size=size) @ values / total
        )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(float(counts @ values / total), float(low), float(high))


def bootstrap_ratio(
    sums_E: ArrayLike, sizes_E: ArrayLike, *, samples: int, seed: int, confidence: float = 0.95
) -> Difference:
    """Compute the percentile bootstrap interval of sum(sums) / sum(sizes): a mean per token, resampled by texts.

    Tokens of a text depend on each other, so whole texts are drawn. For two models the differences of their sums as
    `sums_E` give the paired interval.
    Args:
        sums_E: float [E], sum over the tokens of each text. sizes_E: int [E], its tokens, at least 1.
        samples, seed, confidence: as in `bootstrap_mean`.
    Returns: Difference(ratio, low, high); of zero width for one text.
    Raises: DataError if shapes differ, there is no text, a text has no token or a sum is not finite.
    Source: Efron 1979, doi:10.1214/aos/1176344552; Koehn 2004, aclanthology.org/W04-3250 (paired form).
    """
    sums, sizes = np.asarray(sums_E, dtype=np.float64), np.asarray(sizes_E, dtype=np.float64)
    _check_confidence(confidence)
    if sums.shape != sizes.shape or sums.ndim != 1 or not len(sums) or samples < 1:
        raise DataError(
            f"bootstrap_ratio: sums {sums.shape} and sizes {sizes.shape} must be vectors of one length"
        )
    if not np.isfinite(sums).all() or (sizes < 1).any():
        raise DataError("bootstrap_ratio: sums must be finite, and every text needs a token")
    texts = len(sums)
    generator = np.random.default_rng(seed)
    rows = max(1, _CELLS_PER_CHUNK // texts)
    ratios = np.empty(samples)
    for start in range(0, samples, rows):
        size = min(rows, samples - start)
        drawn = generator.multinomial(texts, np.full(texts, 1 / texts), size=size)
        ratios[start : start + size] = (drawn @ sums) / (drawn @ sizes)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(float(sums.sum() / sizes.sum()), float(low), float(high))


def bootstrap_paired_difference(
    a: ArrayLike, b: ArrayLike, samples: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Difference:
    """Compute the paired difference mean(a) - mean(b) on the same episodes, with a bootstrap interval over episodes.

    Args:
        a, b: float [E] or [E, K]: outcome of each episode (or of its K samples) under each model, in the same order.
            Samples of an episode are averaged first, since only episodes are independent.
    Returns: Difference(mean(a) - mean(b), low, high).
    Raises: DataError if the numbers of episodes differ or are 0.
    Source: Efron 1979; Koehn 2004, aclanthology.org/W04-3250 (paired form).
    """
    a_E, b_E = (np.asarray(x, dtype=np.float64) for x in (a, b))
    a_E, b_E = (x.mean(axis=1) if x.ndim == 2 and x.shape[1] else x for x in (a_E, b_E))
    if a_E.shape != b_E.shape or a_E.ndim != 1:
        raise DataError(
            f"paired_bootstrap: outcomes of {a_E.shape} and {b_E.shape} episodes cannot be paired"
        )
    values_U, counts_U = np.unique(a_E - b_E, return_counts=True)
    return bootstrap_mean(values_U, counts_U, samples=samples, seed=seed, confidence=confidence)


def sign_test(wins: int, losses: int) -> float:
    """Compute the p-value of the two-sided exact sign test of `wins` against `losses` (ties excluded).

    2 P(X <= min(wins, losses)), X ~ Binomial(wins + losses, 1/2), at most 1; for binary outcomes McNemar's exact test.
    Raises: DataError for negative counts.
    Source: McNemar 1947, doi:10.1007/BF02295996.
    """
    if min(wins, losses) < 0:
        raise DataError(f"sign_test: counts {wins} and {losses} must not be negative")
    n, k = wins + losses, min(wins, losses)
    # Terms from C(n, k) / 2^n downwards, C(n, i-1) = C(n, i) i / (n-i+1), until negligible.
    term = math.exp(
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
    )
    total = 0.0
    for i in range(k, -1, -1):
        total += term
        term *= i / (n - i + 1)
        if term < 1e-17 * total:
            break
    return min(1.0, 2 * total)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k samples succeeds, from c successes of n samples.

    1 - C(n-c, k) / C(n, k)
    Raises: DataError unless 1 <= k <= n and 0 <= c <= n.
    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise DataError(f"pass_at_k: needs 1 <= k <= n and 0 <= c <= n, found n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def compute_mean_pass_at_k(
    samples_E: Iterable[int], successes_E: Iterable[int], k: int
) -> float | None:
    """Mean of `pass_at_k` over the episodes with at least k samples; None without any."""
    groups = Counter((n, c) for n, c in zip(samples_E, successes_E, strict=True) if n >= k)
    total = sum(groups.values())
    return (
        sum(pass_at_k(n, c, k) * count for (n, c), count in groups.items()) / total
        if total
        else None
    )


def compute_entropy(counts: Iterable[float]) -> float:
    """Compute the Shannon entropy in nats of the distribution proportional to `counts`: -sum p log p; 0 if empty."""
    positive = [count for count in counts if count > 0]
    total = sum(positive)
    return (
        max(0.0, -sum(count / total * math.log(count / total) for count in positive))
        if positive
        else 0.0
    )


def compute_distinct_words(texts: Iterable[str], n: int) -> float:
    """Compute distinct word n-grams over all word n-grams of the texts (n-grams do not cross texts); 0 without any.

    It decreases with the amount of text: compare samples of equal size.
    Source: Li et al. 2016, arXiv:1510.03055, section 5.1 (distinct-1, distinct-2).
    """
    return compute_distinct_ngrams((text.split() for text in texts), n)


def compute_same_opening_rate(texts: Sequence[str], words: int = 3) -> float:
    """Compute the share of texts that begin with the most frequent opening, ignoring case and marks; 0 without any.

    Args:
        words: length of an opening; a shorter text is an opening of its own length.
    """
    openings = Counter(tuple(re.findall(r"\w+", text.lower())[:words]) for text in texts)
    return max(openings.values()) / len(texts) if openings else 0.0


def find_loop(steps: Sequence[Hashable], min_repeats: int = 2) -> StepLoop | None:
    """Find the cycle that covers the most steps: a block occurring at least `min_repeats` times in a row.

    A step is a state-action pair, e.g. (canonical action, resulting state): oscillation between two states is a cycle
    of period 2. Ties go to the shorter period, then the earlier start.
    Args:
        steps: T hashable steps. min_repeats: occurrences of the block in a row, at least 2.
    Returns: Loop, with `repeats` in whole blocks; None without a cycle.
    """
    if min_repeats < 2:
        raise DataError(f"find_loop: min_repeats {min_repeats} must be at least 2")
    total = len(steps)
    if total < min_repeats or len(set(steps)) == total:
        return None
    numbers: dict[Hashable, int] = {}
    ids_T = np.array([numbers.setdefault(step, len(numbers)) for step in steps])
    best: StepLoop | None = None
    for period in range(1, total // min_repeats + 1):
        for start, matches in _find_runs(ids_T[period:] == ids_T[:-period]):
            repeats = (
                matches // period + 1
            )  # m matches at lag p mean that m + p steps have period p
            if repeats >= min_repeats and (
                best is None or repeats * period > best.repeats * best.period
            ):
                best = StepLoop(start, period, repeats)
    return best


def compute_moving_average(values_T: ArrayLike, window: int) -> NDArray[np.float64]:
    """Compute the trailing mean over the last `window` values (fewer at the start). Returns: float [T]."""
    values = np.asarray(values_T, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def _find_runs(flags_T: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, length) of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags_T, [False]]).astype(np.int8)))
    return [
        (int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise DataError(f"confidence: {confidence} must lie between 0 and 1")
