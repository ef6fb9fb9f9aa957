"""Agreement of raters: Krippendorff's alpha with a bootstrap interval, by rater and over time. U units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.preferences.rating_journal import Rating

RatingScale = Literal["nominal", "interval"]
NUM_RESAMPLES = 500
NUM_TIME_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class RaterAgreement:
    """Agreement of one rater with the others."""

    rater: str
    alpha: float | None  # with the others on shared units; None = too few
    units: int  # rated by this rater and another one
    consistency: float | None  # share of repeated questions with the same answer
    repeats: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Krippendorff's alpha of all raters: 1 = full agreement, 0 = chance, negative = systematic disagreement."""

    alpha: float | None  # None = fewer than two units with two raters, or all values equal
    low: float | None  # 95% interval
    high: float | None
    units: int  # with at least two raters
    raters: list[RaterAgreement]
    over_time: list[tuple[float, float | None, int]]  # (time of last rating, alpha, units)


def compute_krippendorff_alpha(
    units: Sequence[Sequence[float]], scale: RatingScale = "interval"
) -> float | None:
    """Return 1 - observed / expected disagreement over units with at least two values; None if none is expected.

    Observed: mean over units of the squared difference (interval) or inequality (nominal) between the values of a unit,
    weighted by 1 / (m - 1), m its number of values. Expected: the same between all values of all units.
    Raises: DataError for an unknown scale.
    Source: Krippendorff 2011, "Computing Krippendorff's alpha-reliability", steps A to D.
    """
    observed_U, counts_UC, distances_CC = _compute_disagreement(units, scale)
    return _compute_alpha(observed_U, counts_UC, distances_CC)


def measure_agreement(
    ratings: Iterable[Rating], *, scale: RatingScale = "interval", seed: int = 0
) -> Agreement:
    """Measure agreement on each rater's first rating of each item; repeats count only for consistency."""
    first_ratings: dict[str, dict[str, Rating]] = {}  # by item and rater
    repeats: dict[str, list[bool]] = {}  # whether each repeated answer was the same, by rater
    for rating in ratings:
        if not rating.is_opinion:
            continue
        by_rater = first_ratings.setdefault(rating.item, {})
        first = by_rater.setdefault(rating.rater, rating)
        if first is not rating:
            repeats.setdefault(rating.rater, []).append(first.value == rating.value)
    shared = [list(by_rater.values()) for by_rater in first_ratings.values() if len(by_rater) > 1]
    values = [[rating.value for rating in unit] for unit in shared]
    alpha, low, high = _bootstrap_alpha(values, scale, seed)
    raters = sorted({rater for by_rater in first_ratings.values() for rater in by_rater})
    by_rater_agreement = [
        _measure_rater_agreement(rater, shared, repeats.get(rater, []), scale) for rater in raters
    ]
    over_time = _measure_agreement_over_time(shared, scale)
    return Agreement(alpha, low, high, len(shared), by_rater_agreement, over_time)


def _bootstrap_alpha(
    values: Sequence[Sequence[float]], scale: RatingScale, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Return alpha and its 95% percentile interval over resampled units."""
    if len(values) < 2:
        return None, None, None
    observed_U, counts_UC, distances_CC = _compute_disagreement(values, scale)
    alpha = _compute_alpha(observed_U, counts_UC, distances_CC)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(NUM_RESAMPLES):
        sample_U = rng.integers(len(values), size=len(values))
        draw = _compute_alpha(observed_U[sample_U], counts_UC[sample_U], distances_CC)
        if draw is not None:
            draws.append(draw)
    if alpha is None or not draws:
        return alpha, None, None
    low, high = np.percentile(draws, [2.5, 97.5])
    return alpha, float(low), float(high)


def _compute_disagreement(
    units: Sequence[Sequence[float]], scale: RatingScale
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return disagreement within each unit [U], counts of each value in it [U, C], and distances of values [C, C]."""
    if scale not in ("nominal", "interval"):
        raise DataError(f"scale: {scale!r} must be nominal or interval")
    units = [unit for unit in units if len(unit) > 1]
    distinct = sorted({value for unit in units for value in unit})
    columns = {value: index for index, value in enumerate(distinct)}
    counts_UC = np.zeros((len(units), len(distinct)))
    for row, unit in enumerate(units):
        for value in unit:
            counts_UC[row, columns[value]] += 1
    values_C = np.array(distinct)
    gaps_CC = np.subtract.outer(values_C, values_C) if distinct else np.zeros((0, 0))
    distances_CC = gaps_CC**2 if scale == "interval" else (gaps_CC != 0).astype(float)
    sums_U = np.einsum("uc,ck,uk->u", counts_UC, distances_CC, counts_UC)
    observed_U = sums_U / np.maximum(counts_UC.sum(1) - 1, 1)
    return observed_U, counts_UC, distances_CC


def _compute_alpha(
    observed_U: NDArray[np.float64],
    counts_UC: NDArray[np.float64],
    distances_CC: NDArray[np.float64],
) -> float | None:
    expected = _compute_expected_disagreement(counts_UC, distances_CC)
    if expected <= 0:
        return None
    return 1 - float(observed_U.sum() / counts_UC.sum()) / expected


def _compute_expected_disagreement(
    counts_UC: NDArray[np.float64], distances_CC: NDArray[np.float64]
) -> float:
    """Compute the mean distance between all values of all units."""
    total_C = counts_UC.sum(0)
    count = total_C.sum()
    return float(total_C @ distances_CC @ total_C) / (count * (count - 1)) if count > 1 else 0.0


def _measure_rater_agreement(
    rater: str, shared: Sequence[Sequence[Rating]], repeats: Sequence[bool], scale: RatingScale
) -> RaterAgreement:
    """Compare one rater's disagreement with the others to what is expected between all values."""
    gaps = []
    for unit in shared:
        value = next((rating.value for rating in unit if rating.rater == rater), None)
        if value is not None:
            others = [rating.value for rating in unit if rating.rater != rater]
            gaps.append(float(np.mean([_compute_distance(value, o, scale) for o in others])))
    values = [[rating.value for rating in unit] for unit in shared]
    _, counts_UC, distances_CC = _compute_disagreement(values, scale)
    expected = _compute_expected_disagreement(counts_UC, distances_CC)
    alpha = 1 - float(np.mean(gaps)) / expected if gaps and expected > 0 else None
    consistency = sum(repeats) / len(repeats) if repeats else None
    return RaterAgreement(rater, alpha, len(gaps), consistency, len(repeats))


def _compute_distance(value: float, other: float, scale: RatingScale) -> float:
    return (value - other) ** 2 if scale == "interval" else float(value != other)


def _measure_agreement_over_time(
    shared: Sequence[Sequence[Rating]], scale: RatingScale
) -> list[tuple[float, float | None, int]]:
    """Return alpha for windows of equally many units, in the order of their last ratings."""
    ordered = sorted(shared, key=lambda unit: max(rating.time for rating in unit))
    size = max(5, -(-len(ordered) // NUM_TIME_WINDOWS))
    windows = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    points: list[tuple[float, float | None, int]] = []
    for window in windows:
        values = [[rating.value for rating in unit] for unit in window]
        end_time = max(rating.time for rating in window[-1])
        points.append((end_time, compute_krippendorff_alpha(values, scale), len(window)))
    return points
