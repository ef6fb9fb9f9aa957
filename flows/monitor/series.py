"""Metric series in bounded memory, with moving averages and downsampling for charts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
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
        self._open = (np.empty(0), np.empty(0), np.empty(0))  # observations of the incomplete point

    def add(self, step: float, time_s: float, value: float) -> None:
        """Append one observation; `time_s` in seconds since the epoch."""
        self.extend(np.array([step]), np.array([time_s]), np.array([value]))

    def extend(self, steps: np.ndarray, times_s: np.ndarray, values: np.ndarray) -> None:
        """Append observations, float64 [n] each: the same points as one after another."""
        if not len(values):
            return
        self.count += len(values)
        self.last, self.last_step = float(values[-1]), float(steps[-1])
        steps, times_s, values = (
            np.concatenate([kept, new]) for kept, new in zip(self._open, (steps, times_s, values), strict=True)
        )
        while points := min(len(values) // self.stride, 2 * self.limit - len(self._values)):
            used = points * self.stride
            ends = slice(self.stride - 1, used, self.stride)  # a merged point stands at its newest step
            self._steps.frombytes(steps[ends].tobytes())
            self._times.frombytes(times_s[ends].tobytes())
            self._values.frombytes(values[:used].reshape(points, self.stride).mean(axis=1).tobytes())
            steps, times_s, values = steps[used:], times_s[used:], values[used:]
            if len(self._values) >= 2 * self.limit:
                self._merge()
        self._open = (steps, times_s, values)

    def _merge(self) -> None:
        """Halve the points: pairs become their mean."""
        values = np.frombuffer(self._values).reshape(-1, 2).mean(axis=1)
        steps, times = np.frombuffer(self._steps)[1::2].copy(), np.frombuffer(self._times)[1::2].copy()
        self._steps, self._times, self._values = array("d", steps), array("d", times), array("d", values)
        self.stride *= 2

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 [n] steps, times in seconds, values; the incomplete point comes last."""
        steps, times, values = self._open
        tail = (steps[-1:], times[-1:], values.mean(keepdims=True) if len(values) else values)
        kept = (self._steps, self._times, self._values)
        return tuple(np.concatenate([np.frombuffer(part), end]) for part, end in zip(kept, tail, strict=True))  # type: ignore[return-value]

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
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Lines of metrics.jsonl, metric by metric: a long journal has a million values."""
        steps: list[float] = []
        times: list[float] = []
        columns: dict[str, tuple[list[int], list[Any]]] = {}
        for row in rows:
            metrics = row.get("metrics")
            try:
                step, time_s = float(row["step"]), float(row["time"]) / 1000
            except (KeyError, TypeError, ValueError):
                continue
            if not isinstance(metrics, dict):
                continue
            for name, value in metrics.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = ([], [])
                column[0].append(len(steps))
                column[1].append(value)
            steps.append(step)
            times.append(time_s)
        self.version += len(steps)
        all_steps, all_times = np.array(steps), np.array(times)
        for name, (places, found) in columns.items():
            values = _numbers(found)
            finite = np.isfinite(values)
            at = np.array(places)[finite]
            self.num_nonfinite += len(found) - len(at)
            if name in self.series or (len(at) and len(self.series) < NAMES):
                self.series.setdefault(name, Series()).extend(all_steps[at], all_times[at], values[finite])
            else:
                self.num_left_out += len(at)


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """float64 [n]; NaN for what is no number."""
    try:
        found = np.array(values, dtype=np.float64)
        if found.ndim == 1:
            return found
    except (TypeError, ValueError):
        pass
    return np.array([_number(value) for value in values])


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [n]: trailing mean over `window` values, fewer at the start."""
    if window <= 1 or len(values) == 0:
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def thin(xs: np.ndarray, ys: np.ndarray, shown: int = SHOWN) -> tuple[list[float], list[float]]:
    """Downsample to at most about `shown` points, keeping minimum and maximum of each bucket, and both ends.

    Buckets have 2^k points each, so that a curve that grows keeps the points that it has shown.
    """
    if len(xs) > shown:
        size = 1 << math.ceil(math.log2(2 * len(xs) / shown))
        whole = len(ys) - len(ys) % size
        buckets, starts = ys[:whole].reshape(-1, size), np.arange(0, whole, size)
        rest = [whole + int(ys[whole:].argmin()), whole + int(ys[whole:].argmax())] if whole < len(ys) else []
        kept = [[0], starts + buckets.argmin(axis=1), starts + buckets.argmax(axis=1), rest, [len(ys) - 1]]
        order = np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in kept]))
        xs, ys = xs[order], ys[order]
    return _rounded(xs, 7), _rounded(ys, 5)


def _rounded(values: np.ndarray, digits: int) -> list[float]:
    """Values with so many significant digits."""
    sizes = np.abs(values)
    powers = digits - 1 - np.floor(np.log10(np.where(sizes > 0, sizes, 1.0)))
    up, down = 10.0 ** np.clip(powers, 0, 300), 10.0 ** np.clip(-powers, 0, 300)  # powers above 0 are exact
    return (np.rint(values * up / down) / up * down).tolist()
