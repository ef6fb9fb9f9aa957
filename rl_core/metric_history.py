"""Metric history with bounded windows: moving averages, slopes, quantiles."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rl_core.errors import DataError

logger = logging.getLogger(__name__)

MAX_METRICS = (
    5000  # bounds memory if names are generated per step (for instance with a seed in them)
)


class MetricHistory:
    """Latest observations (step, value) of every metric. Thread-safe.

    A window is the latest `window` observations of one metric. Statistics of a window that is not full yet use the
    available observations; see `is_full`.
    """

    def __init__(self, limit: int = 1000, max_metrics: int = MAX_METRICS) -> None:
        if limit < 1 or max_metrics < 1:
            raise DataError(f"limit: {limit} and max_metrics {max_metrics} must be at least 1")
        self.max_metrics = max_metrics
        self._has_warned = False  # about dropped names
        self.limit = limit  # stored observations per metric, hence the longest window
        self._series: dict[str, deque[tuple[float, float]]] = {}
        self._lock = threading.RLock()

    def record_values(self, metrics: Mapping[str, float], step: float) -> None:
        """Append one observation of each metric; non-finite values are dropped.

        New names beyond `max_metrics` are dropped too, with one warning.
        """
        with self._lock:
            for name, value in metrics.items():
                if name not in self._series and len(self._series) >= self.max_metrics:
                    if not self._has_warned:
                        logger.warning(
                            "more than %d metrics: '%s' and later ones are not stored",
                            self.max_metrics,
                            name,
                        )
                    self._has_warned = True
                elif math.isfinite(value):
                    points = self._series.setdefault(name, deque(maxlen=self.limit))
                    points.append((float(step), float(value)))

    @property
    def names(self) -> list[str]:
        """Observed metrics, sorted."""
        with self._lock:
            return sorted(self._series)

    def count_points(self, name: str) -> int:
        """Return the number of stored observations."""
        with self._lock:
            return len(self._series.get(name, ()))

    def is_full(self, name: str, window: int) -> bool:
        """Return whether there are `window` observations. Raises: DataError for a window above `limit`."""
        self._check_window(window)
        return self.count_points(name) >= window

    def list_points(self, name: str, window: int | None = None) -> list[tuple[float, float]]:
        """Return the latest `window` observations (default: all) as (step, value), oldest first."""
        if window is not None:
            self._check_window(window)
        with self._lock:
            points = list(self._series.get(name, ()))
        return points if window is None else points[-window:]

    def list_values(self, name: str, window: int | None = None) -> list[float]:
        """Return the latest `window` values (default: all), oldest first; [] for an unknown metric."""
        return [value for _, value in self.list_points(name, window)]

    def compute_mean(self, name: str, window: int) -> float | None:
        """Return the moving average; None for an unknown metric."""
        values = self.list_values(name, window)
        return math.fsum(values) / len(values) if values else None

    def compute_slope(self, name: str, window: int) -> float | None:
        """Return the least-squares slope per step; None with fewer than two distinct steps.

        sum (s - mean s)(v - mean v) / sum (s - mean s)^2.
        """
        points = self.list_points(name, window)
        if not points:
            return None
        import numpy as np  # takes a third of a second, and checking a configuration does not need it

        steps, values = np.array(points, dtype=np.float64).T
        centered = steps - steps.mean()
        spread = float(centered @ centered)
        return float(centered @ (values - values.mean())) / spread if spread > 0 else None

    def compute_quantile(self, name: str, q: float, window: int) -> float | None:
        """Return quantile q in [0, 1] with linear interpolation; None for an unknown metric."""
        if not 0 <= q <= 1:
            raise DataError(f"q: {q} must lie in [0, 1]")
        values = self.list_values(name, window)
        if not values:
            return None
        import numpy as np

        return float(np.quantile(values, q))

    def clear_metrics(self, names: Iterable[str] | None = None) -> None:
        """Delete all metrics, or only `names`."""
        with self._lock:
            for name in list(self._series) if names is None else names:
                self._series.pop(name, None)

    def summarize_window(self, window: int) -> dict[str, dict[str, Any]]:
        """Return last, mean, slope per step, p10, p50, p90 and is_full of each metric's latest `window` values."""
        import numpy as np

        with self._lock:
            summary = {}
            for name in self.names:
                values = self.list_values(name, window)
                low, middle, high = (float(value) for value in np.quantile(values, (0.1, 0.5, 0.9)))
                summary[name] = {
                    "last": values[-1],
                    "mean": self.compute_mean(name, window),
                    "slope": self.compute_slope(name, window),
                    "p10": low,
                    "p50": middle,
                    "p90": high,
                    "is_full": self.is_full(name, window),
                }
            return summary

    def to_json(self, *, window: int = 10) -> str:
        """Return a consistent snapshot as JSON, for a dashboard.

        {"window": 10, "summary": {name: see `summarize_window`}, "metrics": {name: [[step, value], ...]}}
        """
        with self._lock:
            series = {
                name: [list(point) for point in points]
                for name, points in sorted(self._series.items())
            }
            window = min(window, self.limit)
            values = {"window": window, "summary": self.summarize_window(window), "metrics": series}
        return json.dumps(values, allow_nan=False) + "\n"

    def state_dict(self) -> dict[str, Any]:
        """Return all stored observations."""
        with self._lock:
            series = {
                name: [list(point) for point in points] for name, points in self._series.items()
            }
        return {"series": series}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`. `limit` is not restored."""
        with self._lock:
            self._series = {
                name: deque(((float(s), float(v)) for s, v in points), maxlen=self.limit)
                for name, points in state["series"].items()
            }

    def _check_window(self, window: int) -> None:
        if not 1 <= window <= self.limit:
            raise DataError(
                f"window: {window} must lie between 1 and {self.limit}, the number of stored observations"
            )
