"""Metric series in bounded memory, with moving averages and downsampling for charts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_POINTS_PER_METRIC = 4096  # beyond that, neighbours are averaged
MAX_METRICS = 1000  # metrics per journal
MAX_CHART_POINTS = 400  # points per line in a chart


class MetricSeries:
    """Observations (step, time, value) in order; beyond `limit`, each point is the mean of `stride` observations."""

    def __init__(self, limit: int = MAX_POINTS_PER_METRIC) -> None:
        self.limit, self.stride, self.count = limit, 1, 0
        self.last = math.nan  # latest value, never averaged
        self.last_step = 0.0
        self._steps, self._times, self._values = array("d"), array("d"), array("d")
        # Steps, times and values of the observations of the incomplete point.
        self._incomplete_point = (np.empty(0), np.empty(0), np.empty(0))

    def add_observation(self, step: float, time_s: float, value: float) -> None:
        """Append one observation; `time_s` in seconds since the epoch."""
        self.add_observations(np.array([step]), np.array([time_s]), np.array([value]))

    def add_observations(self, steps: np.ndarray, times_s: np.ndarray, values: np.ndarray) -> None:
        """Append observations, float64 [n] each; gives the same points as appending them one by one."""
        if not len(values):
            return
        self.count += len(values)
        self.last, self.last_step = float(values[-1]), float(steps[-1])
        steps, times_s, values = (
            np.concatenate([old, new])
            for old, new in zip(self._incomplete_point, (steps, times_s, values), strict=True)
        )
        while num_points := min(len(values) // self.stride, 2 * self.limit - len(self._values)):
            num_used = num_points * self.stride
            # A merged point has the step and time of its newest observation.
            newest = slice(self.stride - 1, num_used, self.stride)
            means = values[:num_used].reshape(num_points, self.stride).mean(axis=1)
            self._steps.frombytes(steps[newest].tobytes())
            self._times.frombytes(times_s[newest].tobytes())
            self._values.frombytes(means.tobytes())
            steps, times_s, values = steps[num_used:], times_s[num_used:], values[num_used:]
            if len(self._values) >= 2 * self.limit:
                self._merge_points()
        self._incomplete_point = (steps, times_s, values)

    def _merge_points(self) -> None:
        """Halve the number of points by averaging pairs."""
        values = np.frombuffer(self._values).reshape(-1, 2).mean(axis=1)
        self._steps = array("d", np.frombuffer(self._steps)[1::2].copy())
        self._times = array("d", np.frombuffer(self._times)[1::2].copy())
        self._values = array("d", values)
        self.stride *= 2

    def read_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return steps, times in seconds and values, float64 [n] each; the incomplete point comes last."""
        steps, times, values = self._incomplete_point
        mean = values.mean(keepdims=True) if len(values) else values
        return (
            np.concatenate([np.frombuffer(self._steps), steps[-1:]]),
            np.concatenate([np.frombuffer(self._times), times[-1:]]),
            np.concatenate([np.frombuffer(self._values), mean]),
        )

    def compute_mean(self, window: int) -> float:
        """Compute the mean of the latest `window` observations, at the stored resolution; NaN without any."""
        values = self.read_arrays()[2]
        return float(values[-max(1, window // self.stride) :].mean()) if len(values) else math.nan


class MetricSeriesTable:
    """All metrics of one journal; non-finite values are counted and dropped."""

    def __init__(self) -> None:
        self.series: dict[str, MetricSeries] = {}
        self.num_nonfinite = 0
        self.version = 0  # incremented per row

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl: {"step": 3, "time": <ms>, "metrics": {"train/loss": 0.5}}."""
        self.add_rows([row])

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add lines of metrics.jsonl, metric by metric: a long journal has a million values."""
        steps: list[float] = []
        times: list[float] = []
        columns: dict[str, tuple[list[int], list[Any]]] = {}  # metric -> row indices, values
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
        for name, (indices, raw_values) in columns.items():
            values = _convert_to_floats(raw_values)
            is_finite = np.isfinite(values)
            selected = np.array(indices)[is_finite]
            self.num_nonfinite += len(raw_values) - len(selected)
            if name in self.series or (len(selected) and len(self.series) < MAX_METRICS):
                series = self.series.setdefault(name, MetricSeries())
                series.add_observations(all_steps[selected], all_times[selected], values[is_finite])


def _convert_to_floats(values: Sequence[Any]) -> np.ndarray:
    """Convert values to float64 [n]; NaN for those that are not numbers."""
    try:
        converted = np.array(values, dtype=np.float64)
        if converted.ndim == 1:
            return converted
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_convert_to_float(value) for value in values])


def _convert_to_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # an integer beyond float64
        return math.nan


def compute_moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Compute the trailing mean over `window` values, fewer at the start; float64 [n]."""
    if window <= 1 or len(values) == 0:
        return values
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def downsample_curve(
    xs: np.ndarray, ys: np.ndarray, max_points: int = MAX_CHART_POINTS
) -> tuple[list[float], list[float]]:
    """Downsample to at most about `max_points` points: minimum and maximum of each bucket, and both ends.

    Buckets have 2^k points each, so that a growing curve keeps the points drawn before.
    """
    if len(xs) > max_points:
        size = 1 << math.ceil(math.log2(2 * len(xs) / max_points))
        end = len(ys) - len(ys) % size  # of the complete buckets
        buckets, starts = ys[:end].reshape(-1, size), np.arange(0, end, size)
        rest = ys[end:]
        indices = [
            [0],
            starts + buckets.argmin(axis=1),
            starts + buckets.argmax(axis=1),
            [end + int(rest.argmin()), end + int(rest.argmax())] if len(rest) else [],
            [len(ys) - 1],
        ]
        order = np.unique(np.concatenate([np.asarray(part, dtype=np.int64) for part in indices]))
        xs, ys = xs[order], ys[order]
    return _round_to_digits(xs, 7), _round_to_digits(ys, 5)


def _round_to_digits(values: np.ndarray, digits: int) -> list[float]:
    """Round values to that many significant digits."""
    sizes = np.abs(values)
    powers = digits - 1 - np.floor(np.log10(np.where(sizes > 0, sizes, 1.0)))
    # Two factors, because only positive powers of ten are exact.
    up, down = 10.0 ** np.clip(powers, 0, 300), 10.0 ** np.clip(-powers, 0, 300)
    return (np.rint(values * up / down) / up * down).tolist()
