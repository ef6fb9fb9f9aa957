"""Statistics of several training runs of several configurations: intervals over seeds, adjusted p-values.

Suffixes on arrays: S seeds of one configuration, M comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_core.analysis.statistics import Rate
from rl_core.errors import DataError

__all__ = ["holm", "seed_interval", "student_quantile"]

_PIECES = 400  # of Simpson's rule; even


def seed_interval(values_S: Sequence[float], confidence: float = 0.95) -> Rate:
    """Mean over seeds with Student's interval for it: mean +- t_(S-1) s / sqrt(S), s the standard deviation.

    It speaks of training runs with other seeds, if their results are about normal; episodes are the same ones. With one
    seed nothing is known of others: the interval is unbounded.
    Returns: Rate whose `n` is the number of seeds. Raises: DataError without values or with one that is not finite.
    Source: Student 1908, doi:10.1093/biomet/6.1.1; for few training runs see Agarwal et al. 2021, arXiv:2108.13264.
    """
    values = [float(value) for value in values_S]
    if not values or not all(math.isfinite(value) for value in values):
        raise DataError(f"seed_interval: needs finite values, found {values_S}")
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Rate(mean, -math.inf, math.inf, 1)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
    return Rate(mean, mean - half, mean + half, count)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution.

    P(T <= sqrt(v) tan a) = 1/2 + c integral_0^a cos^(v-1), c = Gamma((v+1)/2) / (sqrt(pi) Gamma(v/2)); solved for a by
    bisection. Raises: DataError outside of 0 < probability < 1 and degrees >= 1.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise DataError(f"student_quantile: probability {probability} and degrees {degrees} are out of range")
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + scale * _power_of_cosine(middle, degrees - 1) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _power_of_cosine(end: float, power: int) -> float:
    """Integral of cos^power from 0 to `end`, by Simpson's rule."""
    step = end / _PIECES
    weights = [1, *([4, 2] * (_PIECES // 2))[: _PIECES - 1], 1]
    return step / 3 * sum(weight * math.cos(index * step) ** power for index, weight in enumerate(weights))


def holm(p_values_M: Sequence[float]) -> list[float]:
    """P-values adjusted for their number: the k-th smallest times M - k + 1, none below a smaller one's, at most 1.

    Rejecting where the adjusted value is at most alpha makes any wrong rejection with probability alpha at most,
    however the tests depend on each other.
    Source: Holm 1979, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6.
    """
    order = sorted(range(len(p_values_M)), key=lambda index: p_values_M[index])
    adjusted = [0.0] * len(p_values_M)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(p_values_M) - rank) * p_values_M[index])
        adjusted[index] = min(1.0, largest)
    return adjusted
