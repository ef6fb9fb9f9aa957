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
NUM_TIME_WINDOWS = 8  # of time


@dataclass(frozen=True, slots=True)
class RaterAgreement:
    """One person among the others."""

    rater: str
    alpha: float | None  # with the others on the units that both rated; None = too few
    units: int  # rated by this person and another one
    consistency: float | None  # share of the units asked again with the same answer
    repeats: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Krippendorff's alpha of all raters: 1 = they agree, 0 = as by chance, below 0 = they contradict each other."""

    alpha: float | None  # None = fewer than two units with two raters, or all values equal
    low: float | None  # 95% interval
    high: float | None
    units: int  # with at least two raters
    raters: list[RaterAgreement]
    # (time of its last rating, alpha, units) of each window
    over_time: list[tuple[float, float | None, int]]


def compute_krippendorff_alpha(
    units: Sequence[Sequence[float]], scale: RatingScale = "interval"
) -> float | None:
    """1 - observed / expected disagreement over units with two values at least; None where nothing can be expected.

    Observed: mean over units of the squared difference (interval) or inequality (nominal) between the values of a unit,
    weighted by 1 / (m - 1), m its number of values. Expected: the same between all values, of whatever unit.
    Raises: DataError for a scale that is not known.
    Source: Krippendorff 2011, "Computing Krippendorff's alpha-reliability", steps A to D.
    """
    observed_U, counts_UC, distances_CC = _compute_disagreement(units, scale)
    return _compute_alpha(observed_U, counts_UC, distances_CC)


def measure_agreement(
    ratings: Iterable[Rating], *, scale: RatingScale = "interval", seed: int = 0
) -> Agreement:
    """Agreement over the first rating that each person gave of each item; repeats count for consistency alone."""
    first: dict[str, dict[str, Rating]] = {}
    again: dict[str, list[bool]] = {}
    for rating in ratings:
        if not rating.is_opinion:
            continue
        of_item = first.setdefault(rating.item, {})
        before = of_item.setdefault(rating.rater, rating)
        if before is not rating:
            again.setdefault(rating.rater, []).append(before.value == rating.value)
    shared = [list(by.values()) for by in first.values() if len(by) > 1]
    values = [[rating.value for rating in unit] for unit in shared]
    alpha, low, high = _bootstrap_alpha(values, scale, seed)
    people = sorted({rating.rater for by in first.values() for rating in by.values()})
    return Agreement(
        alpha,
        low,
        high,
        len(shared),
        [_measure_rater_agreement(name, shared, again.get(name, []), scale) for name in people],
        _measure_agreement_over_time(shared, scale),
    )


def _bootstrap_alpha(
    values: Sequence[Sequence[float]], scale: RatingScale, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Alpha and the 95% percentile interval over resampled units."""
    if len(values) < 2:
        return None, None, None
    observed_U, counts_UC, distances_CC = _compute_disagreement(values, scale)
    alpha = _compute_alpha(observed_U, counts_UC, distances_CC)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(NUM_RESAMPLES):
        chosen_U = rng.integers(len(values), size=len(values))
        found = _compute_alpha(observed_U[chosen_U], counts_UC[chosen_U], distances_CC)
        if found is not None:
            draws.append(found)
    if alpha is None or not draws:
        return alpha, None, None
    low, high = np.percentile(draws, [2.5, 97.5])
    return alpha, float(low), float(high)


def _compute_disagreement(
    units: Sequence[Sequence[float]], scale: RatingScale
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Disagreement within each unit [U], number of each value in it [U, C], and distances of values [C, C]."""
    if scale not in ("nominal", "interval"):
        raise DataError(f"scale: {scale!r} must be nominal or interval")
    units = [unit for unit in units if len(unit) > 1]
    kinds = sorted({value for unit in units for value in unit})
    place = {value: index for index, value in enumerate(kinds)}
    counts_UC = np.zeros((len(units), len(kinds)))
    for number, unit in enumerate(units):
        for value in unit:
            counts_UC[number, place[value]] += 1
    gaps_CC = np.subtract.outer(np.array(kinds), np.array(kinds)) if kinds else np.zeros((0, 0))
    distances_CC = gaps_CC**2 if scale == "interval" else (gaps_CC != 0).astype(float)
    size_U = counts_UC.sum(1)
    observed_U = np.einsum("uc,ck,uk->u", counts_UC, distances_CC, counts_UC) / np.maximum(
        size_U - 1, 1
    )
    return observed_U, counts_UC, distances_CC


def _compute_alpha(
    observed_U: NDArray[np.float64],
    counts_UC: NDArray[np.float64],
    distances_CC: NDArray[np.float64],
) -> float | None:
    total_C = counts_UC.sum(0)
    count = total_C.sum()
    expected = float(total_C @ distances_CC @ total_C) / (count * (count - 1)) if count > 1 else 0.0
    return 1 - float(observed_U.sum() / count) / expected if expected > 0 else None


def _measure_rater_agreement(
    name: str, shared: Sequence[Sequence[Rating]], again: Sequence[bool], scale: RatingScale
) -> RaterAgreement:
    """Disagreement of one person with each other one, over what is expected between all values."""
    gaps = []
    for unit in shared:
        own = next((rating.value for rating in unit if rating.rater == name), None)
        if own is not None:
            others = [rating.value for rating in unit if rating.rater != name]
            gaps.append(float(np.mean([_compute_distance(own, other, scale) for other in others])))
    values = [[rating.value for rating in unit] for unit in shared]
    _, counts_UC, distances_CC = _compute_disagreement(values, scale)
    total_C = counts_UC.sum(0)
    count = total_C.sum()
    expected = float(total_C @ distances_CC @ total_C) / (count * (count - 1)) if count > 1 else 0.0
    alpha = 1 - float(np.mean(gaps)) / expected if gaps and expected > 0 else None
    return RaterAgreement(
        name, alpha, len(gaps), sum(again) / len(again) if again else None, len(again)
    )


def _compute_distance(one: float, other: float, scale: RatingScale) -> float:
    return (one - other) ** 2 if scale == "interval" else float(one != other)


def _measure_agreement_over_time(
    shared: Sequence[Sequence[Rating]], scale: RatingScale
) -> list[tuple[float, float | None, int]]:
    """Alpha of windows of equally many units, in the order of their last ratings."""
    ended = sorted(shared, key=lambda unit: max(rating.time for rating in unit))
    size = max(5, -(-len(ended) // NUM_TIME_WINDOWS))
    windows = [ended[start : start + size] for start in range(0, len(ended), size)]
    found: list[tuple[float, float | None, int]] = []
    for window in windows:
        values = [[rating.value for rating in unit] for unit in window]
        last = max(rating.time for rating in window[-1])
        found.append((last, compute_krippendorff_alpha(values, scale), len(window)))
    return found
