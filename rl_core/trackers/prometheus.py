"""Metrics in Prometheus' text format: in a file for node exporter's textfile collector, or on a port of this machine.

The package prometheus_client is imported when something is made here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, write_text_unsynced
from rl_core.tracking import SilentTracker

PREFIX = "posttrain_"
MAX_SERIES = 20_000  # label sets of all metrics; bounds memory where names are generated
WRITE_SECONDS = 1.0  # between two writes of a file

_served: dict[tuple[str, int], MetricGauges] = {}
_served_lock = threading.Lock()


def format_prometheus_name(name: str) -> str:
    """A metric's name in Prometheus: posttrain_train_loss for train/loss."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


class MetricGauges:
    """The newest value of every metric, by labels, as a collector of prometheus_client. Thread-safe."""

    def __init__(self) -> None:
        from rl_core.analysis.metric_reference import (
            resolve_exported_metric,  # its package takes a second to import
        )

        self._exported = resolve_exported_metric
        self._lock = threading.Lock()
        self._help: dict[str, str] = {}
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._series = 0
        self.num_dropped = 0  # values without a place, beyond MAX_SERIES

    def set_values(self, metrics: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Take metrics by the names under which they are logged; they leave under those of `exported_names`."""
        with self._lock:
            for name, value in metrics.items():
                outside = self._exported(name)
                own = [
                    (_format_label(label), text)
                    for label, text in (*labels.items(), *outside.labels)
                ]
                key = tuple(sorted(dict(own).items()))
                series = self._values.setdefault(format_prometheus_name(outside.name), {})
                if key not in series and self._series >= MAX_SERIES:
                    self.num_dropped += 1
                    continue
                self._series += key not in series
                self._help[format_prometheus_name(outside.name)] = outside.help
                series[key] = float(value) * outside.scale

    def remove_values(self, labels: Mapping[str, str]) -> None:
        """Leave out every value with these labels."""
        gone = {(_format_label(label), text) for label, text in labels.items()}
        with self._lock:
            for series in self._values.values():
                for key in [key for key in series if gone <= set(key)]:
                    del series[key]
                    self._series -= 1

    def collect(self) -> list[Any]:
        """The families, as prometheus_client asks for them."""
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
        """All values in Prometheus' text format."""
        from prometheus_client import generate_latest

        found: bytes = generate_latest(self)
        return found.decode()


class PrometheusTracker(SilentTracker):
    """The newest metrics of a run, in a file or on a port; a port is shared by all runs of a process."""

    def __init__(
        self, target: Path | tuple[str, int], labels: Mapping[str, str] | None = None
    ) -> None:
        """Raises: SettingsError where the package is missing, or the port cannot be opened.

        Args:
            target: a file, which is replaced as a whole about once a second, or host and port of an HTTP server.
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
        self._written = -WRITE_SECONDS

    def begin(self, name: str, params: Mapping[str, Any]) -> None:
        """Say that the run is under way."""
        self._set_metrics({"run/active": 1.0})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take scalars of one step."""
        self._set_metrics({**metrics, "run/step": float(step)})

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Take a reading of the machine."""
        self._set_metrics(metrics)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Take the share that is done."""
        self._set_metrics({"run/progress": done / total if total else 0.0})

    def close(self, status: str) -> None:
        """Say that the run has ended; its last values stay."""
        self._set_metrics({"run/active": 0.0}, at_once=True)

    def _set_metrics(self, metrics: Mapping[str, float], *, at_once: bool = False) -> None:
        self._gauges.set_values(metrics, self.labels)
        if self._path is not None and (
            at_once or time.monotonic() - self._written >= WRITE_SECONDS
        ):
            make_folder(self._path.parent)
            write_text_unsynced(self._path, self._gauges.render_text())
            self._written = time.monotonic()


def parse_target(address: str, folder: Path, name: str) -> Path | tuple[str, int]:
    """Target of "prometheus:ADDRESS": PORT, HOST:PORT or a folder for the file `name`; "" = `folder`/prometheus."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        return host.strip("[]") or "127.0.0.1", int(port)
    return (
        Path(address) if address else folder / "prometheus"
    ) / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.prom"


def serve_gauges(host: str, port: int) -> MetricGauges:
    """The gauges that this process serves on a port; the server starts at the first call and ends with the process.

    Raises: SettingsError where the port cannot be opened.
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
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
