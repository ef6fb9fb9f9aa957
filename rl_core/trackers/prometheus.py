"""Metrics in Prometheus's text format: in a file for node exporter's textfile collector, or on a port of this machine.

The package prometheus_client is imported when a tracker is created.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, write_text_unsynced
from rl_core.tracking import SilentTracker, replace_invalid_characters

PREFIX = "posttrain_"
MAX_SERIES = 20_000  # label sets of all metrics; bounds memory where names are generated
WRITE_SECONDS = 1.0  # between two writes of a file

_served: dict[tuple[str, int], MetricGauges] = {}
_served_lock = threading.Lock()


def format_prometheus_name(name: str) -> str:
    """Return a metric's name in Prometheus: posttrain_train_loss for train/loss."""
    return PREFIX + _format_label(name)


class MetricGauges:
    """Newest value of every metric, by labels; a collector of prometheus_client. Thread-safe."""

    def __init__(self) -> None:
        # Imported here, because the package takes a second to import.
        from rl_core.analysis.metric_reference import resolve_exported_metric

        self._resolve_exported = resolve_exported_metric
        self._lock = threading.Lock()
        self._help: dict[str, str] = {}
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._num_series = 0
        self.num_dropped = 0  # values beyond MAX_SERIES

    def set_values(self, metrics: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Set metrics by the names under which they are logged; they are exported under their public names."""
        with self._lock:
            for name, value in metrics.items():
                exported = self._resolve_exported(name)
                all_labels = {
                    _format_label(label): text
                    for label, text in (*labels.items(), *exported.labels)
                }
                key = tuple(sorted(all_labels.items()))
                exported_name = format_prometheus_name(exported.name)
                series = self._values.setdefault(exported_name, {})
                if key not in series and self._num_series >= MAX_SERIES:
                    self.num_dropped += 1
                    continue
                self._num_series += key not in series
                self._help[exported_name] = exported.help
                series[key] = float(value) * exported.scale

    def remove_values(self, labels: Mapping[str, str]) -> None:
        """Remove every value with these labels."""
        removed_labels = {(_format_label(label), text) for label, text in labels.items()}
        with self._lock:
            for series in self._values.values():
                for key in [key for key in series if removed_labels <= set(key)]:
                    del series[key]
                    self._num_series -= 1

    def collect(self) -> list[Any]:
        """Return the metric families for prometheus_client."""
        from prometheus_client.core import GaugeMetricFamily

        families = []
        with self._lock:
            for name, series in sorted(self._values.items()):
                family = GaugeMetricFamily(name, self._help[name])
                for key, value in sorted(series.items()):
                    family.add_sample(name, dict(key), value)
                if series:
                    families.append(family)
        return families

    def render_text(self) -> str:
        """Return all values in Prometheus's text format."""
        from prometheus_client import generate_latest

        text: bytes = generate_latest(self)
        return text.decode()


class PrometheusTracker(SilentTracker):
    """Tracker that publishes a run's newest metrics in a file or on a port; all runs of a process share a port."""

    def __init__(
        self, target: Path | tuple[str, int], labels: Mapping[str, str] | None = None
    ) -> None:
        """Open the target. Raises: SettingsError if the package is missing, or the port cannot be opened.

        Args:
            target: a file, replaced about once a second, or host and port of an HTTP server.
            labels: of every value.
        """
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise SettingsError(
                "tracker: Prometheus needs the package prometheus-client; install it"
            ) from error
        self.labels = dict(labels or {})
        self._path = target if isinstance(target, Path) else None
        self._gauges = MetricGauges() if isinstance(target, Path) else serve_gauges(*target)
        self._last_write = -WRITE_SECONDS

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Mark the run as active."""
        self._set_metrics({"run/active": 1.0})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the scalars of one step."""
        self._set_metrics({**metrics, "run/step": float(step)})

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Set a reading of the machine."""
        self._set_metrics(metrics)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Set the completed share."""
        self._set_metrics({"run/progress": done / total if total else 0.0})

    def close(self, status: str) -> None:
        """Mark the run as ended; its last values stay."""
        self._set_metrics({"run/active": 0.0}, write_now=True)

    def _set_metrics(self, metrics: Mapping[str, float], *, write_now: bool = False) -> None:
        self._gauges.set_values(metrics, self.labels)
        is_due = write_now or time.monotonic() - self._last_write >= WRITE_SECONDS
        if self._path is not None and is_due:
            make_folder(self._path.parent)
            write_text_unsynced(self._path, self._gauges.render_text())
            self._last_write = time.monotonic()


def parse_target(address: str, folder: Path, name: str) -> Path | tuple[str, int]:
    """Parse the target of "prometheus:ADDRESS": PORT, HOST:PORT, or a folder for the file `name`.

    "" means the folder `folder`/prometheus.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        return host.strip("[]") or "127.0.0.1", int(port)
    parent = Path(address) if address else folder / "prometheus"
    return parent / f"{replace_invalid_characters(name, 'A-Za-z0-9_.-', merge=False)}.prom"


def serve_gauges(host: str, port: int) -> MetricGauges:
    """Return the gauges served on a port; the server starts at the first call and ends with the process.

    Raises: SettingsError if the port cannot be opened.
    """
    from prometheus_client import start_http_server

    with _served_lock:
        if (host, port) not in _served:
            gauges = MetricGauges()
            try:
                start_http_server(port, host, registry=gauges)
            except OSError as error:
                raise SettingsError(
                    f"tracker: prometheus:{host}:{port} cannot be opened: {error}"
                ) from error
            _served[host, port] = gauges
        return _served[host, port]


def _format_label(name: str) -> str:
    return replace_invalid_characters(name, "A-Za-z0-9_", merge=False)
