"""Means over seeds with 95% intervals, and of differences seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student


def estimate_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lower and upper bound of the 95% interval by Student's t; one value has no bounds (nan)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(student.ppf(0.975, len(values) - 1))
    half *= statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def estimate_gap(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the interval of the differences to the base, seed by seed."""
    return estimate_interval([a - b for a, b in zip(values, base, strict=True)])


def describe_gap(low: float, high: float) -> str:
    """Describe the interval of a difference that is claimed to be above 0."""
    if math.isnan(low):
        return "one seed"
    return "true" if low > 0 else "refuted: worse" if high < 0 else "not shown"


def format_interval(
    values: tuple[float, float, float], scale: float = 1.0, digits: int = 1, unit: str = ""
) -> str:
    """Format mean, unit and bounds: `98.0% [97.1, 98.6]`; without bounds (nan) the mean alone."""
    mean, low, high = (value * scale for value in values)
    bounds = "" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{mean:.{digits}f}{unit}{bounds}"


def format_share(percentages: Sequence[float]) -> str:
    """Format the mean of percentages over seeds with its 95% interval."""
    return format_interval(estimate_interval(percentages), unit="%")
