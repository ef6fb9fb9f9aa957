"""Metric series in bounded memory, with moving averages and downsampling for charts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS_PER_METRIC = 4096  # points per metric; beyond, neighbours are averaged
MAX_METRICS = 1000  # metrics per journal
MAX_CHART_POINTS = 400  # points per line in a chart


class MetricSeries:
    """Observations (step, time, value) in order; beyond `limit`, each point is the mean of `stride` observations."""

    def __init__(self, limit: int = MAX_POINTS_PER_METRIC) -> None:
        self.limit, self.stride, self.count = limit, 1, 0
        self.last = math.nan  # latest value, never averaged
        self.last_step = 0.0
        self._steps, self._times, self._values = array("d"), array("d"), array("d")
        self._incomplete_point = (
            np.empty(0),
            np.empty(0),
            np.empty(0),
        )  # observations of the incomplete point

    def add_observation(self, step: float, time_s: float, value: float) -> None:
        """Append one observation; `time_s` in seconds since the epoch."""
        self.add_observations(np.array([step]), np.array([time_s]), np.array([value]))

    def add_observations(self, steps: np.ndarray, times_s: np.ndarray, values: np.ndarray) -> None:
        """Append observations, float64 [n] each: the same points as one after another."""
        if not len(values):
            return
        self.count += len(values)
        self.last, self.last_step = float(values[-1]), float(steps[-1])
        steps, times_s, values = (
            np.concatenate([kept, new])
            for kept, new in zip(self._incomplete_point, (steps, times_s, values), strict=True)
        )
        while points := min(len(values) // self.stride, 2 * self.limit - len(self._values)):
            used = points * self.stride
            ends = slice(
                self.stride - 1, used, self.stride
            )  # a merged point stands at its newest step
            self._steps.frombytes(steps[ends].tobytes())
            self._times.frombytes(times_s[ends].tobytes())
            self._values.frombytes(
                values[:used].reshape(points, self.stride).mean(axis=1).tobytes()
            )
            steps, times_s, values = steps[used:], times_s[used:], values[used:]
            if len(self._values) >= 2 * self.limit:
                self._merge_points()
        self._incomplete_point = (steps, times_s, values)

    def _merge_points(self) -> None:
        """Halve the points: pairs become their mean."""
        values = np.frombuffer(self._values).reshape(-1, 2).mean(axis=1)
        steps, times = (
            np.frombuffer(self._steps)[1::2].copy(),
            np.frombuffer(self._times)[1::2].copy(),
        )
        self._steps, self._times, self._values = (
            array("d", steps),
            array("d", times),
            array("d", values),
        )
        self.stride *= 2

    def read_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 [n] steps, times in seconds, values; the incomplete point comes last."""
        steps, times, values = self._incomplete_point
        tail = (steps[-1:], times[-1:], values.mean(keepdims=True) if len(values) else values)
        kept = (self._steps, self._times, self._values)
        return tuple(
            np.concatenate([np.frombuffer(part), end]) for part, end in zip(kept, tail, strict=True)
        )  # type: ignore[return-value]

    def compute_mean(self, window: int) -> float:
        """Mean of the latest `window` observations, at the stored resolution; NaN without any."""
        values = self.read_arrays()[2]
        return float(values[-max(1, window // self.stride) :].mean()) if len(values) else math.nan


class MetricSeriesTable:
    """All metrics of one journal; non-finite values are counted and dropped."""

    def __init__(self) -> None:
        self.series: dict[str, MetricSeries] = {}
        self.num_nonfinite = 0
        self.version = 0  # incremented per row

    def add_row(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl: {"step": 3, "time": <ms>, "metrics": {"train/loss": 0.5}}."""
        self.add_rows([row])

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Lines of metrics.jsonl, metric by metric: a long journal has a million values."""
        steps: list[float] = []
        times: list[float] = []
        columns: dict[str, tuple[list[int], list[Any]]] = {}
        for row in rows:
            metrics = row.get("metrics")
            try:
                step, time_s = float(row["step"]), float(row["time"]) / 1000
            except (KeyError, TypeError, ValueError, OverflowError):
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
            values = _convert_to_floats(found)
            finite = np.isfinite(values)
            at = np.array(places)[finite]
            self.num_nonfinite += len(found) - len(at)
            if name in self.series or (len(at) and len(self.series) < MAX_METRICS):
                self.series.setdefault(name, MetricSeries()).add_observations(
                    all_steps[at], all_times[at], values[finite]
                )


def _convert_to_floats(values: Sequence[Any]) -> np.ndarray:
    """float64 [n]; NaN for what is no number."""
    try:
        found = np.array(values, dtype=np.float64)
        if found.ndim == 1:
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_convert_to_float(value) for value in values])


def _convert_to_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # an integer beyond float64
        return math.nan


def compute_moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [n]: trailing mean over `window` values, fewer at the start."""
    if window <= 1 or len(values) == 0:
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def downsample_curve(
    xs: np.ndarray, ys: np.ndarray, max_points: int = MAX_CHART_POINTS
) -> tuple[list[float], list[float]]:
    """Downsample to at most about `shown` points, keeping minimum and maximum of each bucket, and both ends.

    Buckets have 2^k points each, so that a curve that grows keeps the points that it has shown.
    """
    if len(xs) > max_points:
        size = 1 << math.ceil(math.log2(2 * len(xs) / max_points))
        whole = len(ys) - len(ys) % size
        buckets, starts = ys[:whole].reshape(-1, size), np.arange(0, whole, size)
        rest = (
            [whole + int(ys[whole:].argmin()), whole + int(ys[whole:].argmax())]
            if whole < len(ys)
            else []
        )
        kept = [
            [0],
            starts + buckets.argmin(axis=1),
            starts + buckets.argmax(axis=1),
            rest,
            [len(ys) - 1],
        ]
        order = np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in kept]))
        xs, ys = xs[order], ys[order]
    return _round_to_digits(xs, 7), _round_to_digits(ys, 5)


def _round_to_digits(values: np.ndarray, digits: int) -> list[float]:
    """Values with so many significant digits."""
    sizes = np.abs(values)
    powers = digits - 1 - np.floor(np.log10(np.where(sizes > 0, sizes, 1.0)))
    up, down = (
        10.0 ** np.clip(powers, 0, 300),
        10.0 ** np.clip(-powers, 0, 300),
    )  # powers above 0 are exact
    return (np.rint(values * up / down) / up * down).tolist()
