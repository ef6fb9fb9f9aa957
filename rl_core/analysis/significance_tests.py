"""Exact one-sided tests of a paired gain, alpha spending over repeated attempts, and statistics over seeds.

Pure functions. Suffixes on arrays: U distinct values of the difference of an episode, with their counts; S seeds of one
configuration, M comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_core.analysis.statistics import Rate
from rl_core.errors import DataError

_MAX_DENOMINATOR = 360  # differences that are multiples of 1/k, k up to this, are counted exactly
_MAX_EXACT_CELLS = 40_000  # cells of the exact distribution; beyond it signs are drawn
_DRAWN_CELLS = 2_000_000  # drawn per batch
_MAX_DRAWS = 1_000_000
_NUM_STAKES = 64


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Result of a test of H0: the mean gain is at most the margin, against a larger gain."""

    name: str
    p_value: float
    episodes: int
    discordant: int  # episodes whose difference is not 0


def run_gain_test(
    differences_E: ArrayLike,
    *,
    margin: float = 0.0,
    bounded: bool = True,
    level: float = 0.025,
    seed: int = 0,
) -> PairedTest:
    """Test of the mean paired difference against `margin`.

    At margin 0, the sign-flip test: with one outcome of 0 or 1 for each episode it is McNemar's exact (sign) test. With
    graded outcomes it is exact for symmetric differences; with rare large losses against small gains it rejects up to
    four times as often as `level` on 50 episodes (docs/benchmarks/online.md). At
    another margin there is no exchange of the two models that leaves the hypothesis as it is, so differences within
    [-1, 1] go to the betting test; unbounded ones to the sign-flip test around the margin.

    Args:
        differences_E: float [E], challenger minus champion on each episode, samples of an episode averaged.
        bounded: the differences lie within [-1, 1]. level: p-value of interest; decides the number of drawn signs.
        seed: of the drawn signs.
    Raises: DataError without episodes or with values that are not finite.
    """
    differences = np.asarray(differences_E, dtype=np.float64)
    if differences.ndim != 1 or not len(differences) or not np.isfinite(differences).all():
        raise DataError(
            f"gain_test: needs a vector of finite differences, found shape {differences.shape}"
        )
    values_U, counts_U = np.unique(differences, return_counts=True)
    discordant = int(counts_U[values_U != 0].sum())
    if margin and bounded:
        name, p_value = "betting test", betting_test(values_U, counts_U, margin)
    else:
        draws = min(_MAX_DRAWS, max(10_000, math.ceil(20 / level)))
        p_value = sign_flip_test(values_U - margin, counts_U, draws=draws, seed=seed)
        graded = margin != 0 or not set(np.abs(values_U).tolist()) <= {0.0, 1.0}
        name = "sign-flip test" if graded else "sign test"
    return PairedTest(name, p_value, len(differences), discordant)


def sign_flip_test(
    values_U: ArrayLike, counts_U: ArrayLike, *, draws: int = 10_000, seed: int = 0
) -> float:
    """Compute the one-sided p-value of a sum of paired differences under independent random signs.

    p = P(sum_i s_i |d_i| >= sum_i d_i), s_i = -1 or +1 with probability 1/2 each; zeros drop out. Valid at every sample
    size if the two models are exchangeable on an episode under the hypothesis (differences symmetric around 0); with
    differences of 0, -1 and 1 also for the hypothesis that wins are no likelier than losses, where it is the sign test.
    For a mean of 0 without symmetry it is right in the limit of many episodes (Romano 1990).

    Where all differences are multiples of 1/k (k up to 360, as success rates over samples are), the distribution of the
    sum is computed: a convolution of one binomial for each size. Otherwise signs are drawn, and
    p = (1 + sums that are as large) / (1 + draws), which is valid too (Phipson and Smyth 2010).
    Args:
        values_U, counts_U: distinct differences and the number of episodes with each.
        draws, seed: of the drawn signs.
    Raises: DataError if shapes differ or values are not finite.
    Source: Fisher 1935, The Design of Experiments, section 21; Phipson and Smyth 2010, doi:10.2202/1544-6115.1585.
    """
    values, counts = np.asarray(values_U, dtype=np.float64), np.asarray(counts_U, dtype=np.int64)
    if values.shape != counts.shape or values.ndim != 1 or not np.isfinite(values).all():
        raise DataError(
            f"sign_flip_test: values {values.shape} and counts {counts.shape} must be finite and alike"
        )
    nonzero = (values != 0) & (counts > 0)
    values, counts = values[nonzero], counts[nonzero]
    if not len(values):
        return 1.0
    sizes = _scale_to_integers(values)
    if sizes is not None and int(np.abs(sizes) @ counts) <= _MAX_EXACT_CELLS:
        return _compute_exact_tail(sizes, counts)
    return _estimate_tail(values, counts, draws, seed)


def _scale_to_integers(values_U: NDArray[np.float64]) -> NDArray[np.int64] | None:
    """Return the values as integer multiples of 1/k for the least k up to `_GRID`; None if there is none."""
    for k in range(1, _MAX_DENOMINATOR + 1):
        scaled = values_U * k
        nearest = np.rint(scaled)
        if np.abs(scaled - nearest).max() < 1e-9 * k:
            return nearest.astype(np.int64)
    return None


def _compute_exact_tail(sizes_U: NDArray[np.int64], counts_U: NDArray[np.int64]) -> float:
    """Compute P(sum of the sizes whose sign is + >= the observed one): all terms are positive, so tails keep their
    digits.
    """
    reached = int(np.maximum(sizes_U, 0) @ counts_U)
    pmf = np.ones(1)
    for size in np.unique(np.abs(sizes_U)):
        count = int(counts_U[np.abs(sizes_U) == size].sum())
        spaced = np.zeros(count * size + 1)
        log_terms = [
            math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1)
            for i in range(count + 1)
        ]
        spaced[::size] = np.exp(np.array(log_terms) - count * math.log(2))
        pmf = np.convolve(pmf, spaced)
    return min(1.0, float(pmf[reached:].sum()))


def _estimate_tail(
    values_U: NDArray[np.float64], counts_U: NDArray[np.int64], draws: int, seed: int
) -> float:
    generator = np.random.default_rng(seed)
    observed, scale = float(values_U @ counts_U), float(np.abs(values_U) @ counts_U)
    rows = max(1, _DRAWN_CELLS // len(values_U))
    hits = 0
    for start in range(0, draws, rows):
        positive = generator.binomial(counts_U, 0.5, size=(min(rows, draws - start), len(values_U)))
        sums = (2.0 * positive - counts_U) @ np.abs(values_U)
        hits += int((sums >= observed - 1e-12 * scale).sum())
    return (1 + hits) / (1 + draws)


def betting_test(values_U: ArrayLike, counts_U: ArrayLike, margin: float) -> float:
    """Compute the p-value of H0: mean difference <= margin, for differences within [-1, 1], at every sample size.

    p = min(1, 1 / mean_l prod_i (1 + l (d_i - margin))) over 64 stakes l in (0, 1 / (1 + margin)): each product is the
    wealth of a gambler who cannot gain under H0, so its mean exceeds 1/p with probability p at most (Markov). It asks
    for neither symmetry nor many episodes; the price is a larger gain that it needs.
    Raises: DataError if a value lies outside [-1, 1].
    Source: Waudby-Smith and Ramdas 2024, arXiv:2010.09686, section 4.
    """
    values, counts = np.asarray(values_U, dtype=np.float64), np.asarray(counts_U, dtype=np.int64)
    if np.abs(values).max(initial=0.0) > 1 + 1e-9:
        raise DataError("betting_test: differences must lie within -1 and 1")
    stakes = 0.999 * (np.arange(1, _NUM_STAKES + 1) / _NUM_STAKES) ** 2 / max(1 + margin, 0.02)
    wealth = np.array([float(counts @ np.log1p(stake * (values - margin))) for stake in stakes])
    top = float(wealth.max())
    return min(1.0, math.exp(-top) / float(np.exp(wealth - top).mean()))


def compute_spent_alpha(alpha: float, attempt: int) -> float:
    """Return the level of the k-th attempt on the same episodes: alpha / (k (k + 1)).

    The levels of all attempts add up to alpha, so by the union bound the chance that any of them promotes a model
    without the gain is at most alpha, however many there are and however they depend on each other.
    Raises: DataError for an attempt below 1.
    Source: alpha-spending, Tian and Ramdas 2021, arXiv:1910.04900, section 2.
    """
    if attempt < 1:
        raise DataError(f"spent_alpha: attempt {attempt} must be at least 1")
    return alpha / (attempt * (attempt + 1))


def compute_remaining_alpha(alpha: float, attempt: int) -> float:
    """Return the sum of the levels of all attempts after the k-th: alpha / (k + 1)."""
    return alpha / (attempt + 1)


def estimate_episodes_needed(
    differences_E: ArrayLike, margin: float, level: float, power: float = 0.8
) -> int | None:
    """Estimate the episodes on which a gain of the observed size has probability `power` of detection; None without
    gain.

    n = (z_(1-level) + z_power)^2 Var(d) / (mean(d) - margin)^2, rounded up to two digits; a normal approximation.
    """
    differences = np.asarray(differences_E, dtype=np.float64)
    gain = float(differences.mean()) - margin
    if gain <= 0:
        return None
    quantiles = NormalDist().inv_cdf(1 - level) + NormalDist().inv_cdf(power)
    needed = quantiles**2 * float(differences.var()) / gain**2
    unit = 10 ** max(0, math.ceil(math.log10(max(needed, 1))) - 2)
    return math.ceil(needed / unit) * unit


_SIMPSON_PIECES = 400  # of Simpson's rule; even


def compute_seed_interval(values_S: Sequence[float], confidence: float = 0.95) -> Rate:
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
    half = compute_student_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
    return Rate(mean, mean - half, mean + half, count)


def compute_student_quantile(probability: float, degrees: int) -> float:
    """Compute a quantile of Student's t distribution.

    P(T <= sqrt(v) tan a) = 1/2 + c integral_0^a cos^(v-1), c = Gamma((v+1)/2) / (sqrt(pi) Gamma(v/2)); solved for a by
    bisection. Raises: DataError outside of 0 < probability < 1 and degrees >= 1.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise DataError(
            f"student_quantile: probability {probability} and degrees {degrees} are out of range"
        )
    if probability < 0.5:
        return -compute_student_quantile(1 - probability, degrees)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + scale * _integrate_cosine_power(middle, degrees - 1) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _integrate_cosine_power(end: float, power: int) -> float:
    """Integrate cos^power from 0 to `end`, by Simpson's rule."""
    step = end / _SIMPSON_PIECES
    weights = [1, *([4, 2] * (_SIMPSON_PIECES // 2))[: _SIMPSON_PIECES - 1], 1]
    return (
        step
        / 3
        * sum(weight * math.cos(index * step) ** power for index, weight in enumerate(weights))
    )


def adjust_p_values_holm(p_values_M: Sequence[float]) -> list[float]:
    """Adjust p-values for their number: the k-th smallest times M - k + 1, none below a smaller one's, at most 1.

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
