"""Metric series in bounded memory, with moving averages and downsampling for charts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["Series", "SeriesTable", "moving_average", "thin"]

LIMIT = 4096  # points per metric; beyond, neighbours are averaged
NAMES = 1000  # metrics per journal
SHOWN = 400  # points per line in a chart


class Series:
    """Observations (step, time, value) in order; beyond `limit`, each point is the mean of `stride` observations."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.stride, self.count = limit, 1, 0
        self.last = math.nan  # latest value, never averaged
        self.last_step = 0.0
        self._steps, self._times, self._values = array("d"), array("d"), array("d")
        self._open: list[tuple[float, float, float]] = []  # observations of the incomplete point

    def add(self, step: float, time_s: float, value: float) -> None:
        """Append one observation; `time_s` in seconds since the epoch."""
        self.count += 1
        self.last, self.last_step = value, step
        self._open.append((step, time_s, value))
        if len(self._open) < self.stride:
            return
        rows, self._open = self._open, []
        self._steps.append(step)  # a merged point stands at its newest step
        self._times.append(time_s)
        self._values.append(math.fsum(row[2] for row in rows) / len(rows))
        if len(self._values) >= 2 * self.limit:
            self._merge()

    def _merge(self) -> None:
        """Halve the points: pairs become their mean."""
        values = np.frombuffer(self._values).reshape(-1, 2).mean(axis=1)
        steps, times = np.frombuffer(self._steps)[1::2].copy(), np.frombuffer(self._times)[1::2].copy()
        self._steps, self._times, self._values = array("d", steps), array("d", times), array("d", values)
        self.stride *= 2

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 [n] steps, times in seconds, values; the incomplete point comes last."""
        rows = self._open
        tail = [[rows[-1][0]], [rows[-1][1]], [math.fsum(row[2] for row in rows) / len(rows)]] if rows else [[], [], []]
        kept = (self._steps, self._times, self._values)
        return tuple(np.array([*part, *end]) for part, end in zip(kept, tail, strict=True))  # type: ignore[return-value]

    def mean(self, window: int) -> float:
        """Mean of the latest `window` observations, at the stored resolution; NaN without any."""
        values = self.arrays()[2]
        return float(values[-max(1, window // self.stride) :].mean()) if len(values) else math.nan


class SeriesTable:
    """All metrics of one journal; non-finite values are counted and dropped."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.num_nonfinite = 0
        self.num_left_out = 0  # observations of metrics beyond the first `NAMES`
        self.version = 0  # incremented per row

    def add(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl: {"step": 3, "time": <ms>, "metrics": {"train/loss": 0.5}}."""
        metrics = row.get("metrics")
        try:
            step, time_s = float(row["step"]), float(row["time"]) / 1000
        except (KeyError, TypeError, ValueError):
            return
        if not isinstance(metrics, dict):
            return
        self.version += 1
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                self.num_nonfinite += 1
            elif name in self.series or len(self.series) < NAMES:
                self.series.setdefault(name, Series()).add(step, time_s, number)
            else:
                self.num_left_out += 1


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [n]: trailing mean over `window` values, fewer at the start."""
    if window <= 1 or len(values) == 0:
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def thin(xs: np.ndarray, ys: np.ndarray, shown: int = SHOWN) -> tuple[list[float], list[float]]:
    """Downsample to about `shown` points, keeping minimum and maximum of each bucket, and both ends."""
    if len(xs) > shown:
        edges = np.linspace(0, len(xs), max(2, shown // 2) + 1).astype(int)
        kept = {0, len(xs) - 1}
        for low, high in pairwise(edges):
            kept |= {low + int(ys[low:high].argmin()), low + int(ys[low:high].argmax())}
        order = np.array(sorted(kept))
        xs, ys = xs[order], ys[order]
    return [float(f"{x:.7g}") for x in xs], [float(f"{y:.5g}") for y in ys]
