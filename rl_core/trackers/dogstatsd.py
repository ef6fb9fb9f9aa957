"""DogStatsD metrics as UDP datagrams for a Datadog agent, or in a file while no agent listens.

The package datadog is imported when a tracker is created. Names are those of
`metric_reference.resolve_exported_metric`:
posttrain.train.loss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.storage.append_log import AppendLog
from rl_core.storage.atomic_files import make_folder
from rl_core.tracking import SilentTracker

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8125
AGENT_CHECK_SECONDS = 30.0  # between two checks for an absent agent
MAX_FILE_BYTES = 256 * 2**20  # later records are dropped


class DogStatsdTracker(SilentTracker):
    """Tracker that sends the newest metrics as gauges. Sending a datagram never waits, so no agent can stall a run."""

    def __init__(
        self, address: str, file: str | Path, labels: Mapping[str, str] | None = None
    ) -> None:
        """Create the client. Raises: SettingsError if the package is missing, or for an invalid address.

        Args:
            address: HOST:PORT or HOST; "" = DD_AGENT_HOST and DD_DOGSTATSD_PORT, else this machine's port 8125.
            file: receives the same datagrams with timestamps, one line per value, while there is no agent.
            labels: tags of every value.
        """
        try:
            from datadog.dogstatsd import DogStatsd
        except ImportError as error:
            raise SettingsError(
                "tracker: DogStatsD needs the package datadog; install it, or posttrain[datadog]"
            ) from error
        self.host, self.port = _parse_host_and_port(address)
        self.file, self._labels = Path(file), dict(labels or {})
        self._client: Any = DogStatsd(
            host=self.host,
            port=self.port,
            disable_telemetry=True,
            disable_aggregation=True,
            disable_buffering=True,
            disable_background_sender=True,
        )
        self._last_check = -AGENT_CHECK_SECONDS
        self._is_agent_available = False
        self._is_full = False
        # Imported here, because the package takes a second to import.
        from rl_core.analysis.metric_reference import resolve_exported_metric

        self._resolve_exported = resolve_exported_metric

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the scalars of one step."""
        self._send_metrics({**metrics, "run/step": float(step)})

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Send a reading of the machine."""
        self._send_metrics(metrics)

    def close(self, status: str) -> None:
        """Close the socket."""
        self._client.close_socket()

    def _send_metrics(self, metrics: Mapping[str, float]) -> None:
        gauges = [self._build_gauge(name, value) for name, value in metrics.items()]
        if self._is_agent_listening():
            for name, value, tags in gauges:
                self._client.gauge(name, value, tags=tags)
            if not self._is_socket_refused():
                return
        self._append_to_file(gauges)

    def _build_gauge(self, name: str, value: float) -> tuple[str, float, list[str]]:
        exported = self._resolve_exported(name)
        tags = [
            f"{key}:{_replace_reserved_characters(text)}"
            for key, text in (*self._labels.items(), *exported.labels)
        ]
        gauge_name = _replace_reserved_characters(exported.name).replace("/", ".")
        return f"posttrain.{gauge_name}", float(value) * exported.scale, tags

    def _is_agent_listening(self) -> bool:
        """Return whether the last datagram was accepted; after a refusal, probe with an empty one at intervals."""
        now = time.monotonic()
        if not self._is_agent_available and now - self._last_check >= AGENT_CHECK_SECONDS:
            self._last_check = now
            with contextlib.suppress(OSError):
                self._client.get_socket().send(b"")
                self._is_agent_available = not self._is_socket_refused()
        return self._is_agent_available

    def _is_socket_refused(self) -> bool:
        """Return whether there is no socket, or the other machine has reported that nobody listens."""
        client_socket = self._client.socket
        is_refused = (
            client_socket is None
            or client_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        )
        if is_refused:
            self._is_agent_available, self._last_check = False, time.monotonic()
            self._client.close_socket()
        return is_refused

    def _append_to_file(self, gauges: list[tuple[str, float, list[str]]]) -> None:
        if self._is_full:
            return
        now = int(time.time())
        lines = [f"{name}:{value!r}|g|#{','.join(tags)}|T{now}\n" for name, value, tags in gauges]
        make_folder(self.file.parent)
        if self.file.is_file() and self.file.stat().st_size > MAX_FILE_BYTES:
            self._is_full = True
            logger.warning(
                "%s: no agent at %s:%d, and the file is full", self.file, self.host, self.port
            )
            return
        AppendLog(self.file).append_lines("".join(lines).encode())


def _parse_host_and_port(address: str) -> tuple[str, int]:
    if not address:
        default_host = os.environ.get("DD_AGENT_HOST", "127.0.0.1")
        address = f"{default_host}:{os.environ.get('DD_DOGSTATSD_PORT', DEFAULT_PORT)}"
    host, separator, port = address.rpartition(":")
    if not separator:
        return address, DEFAULT_PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(
            f"tracker: dogstatsd:{address}: '{port}' is not a port; write dogstatsd:HOST:PORT"
        )
    return host.strip("[]"), int(port)


def _replace_reserved_characters(text: str) -> str:
    """Replace the characters that end a name or a tag."""
    return re.sub(r"[|,#:@\s]", "_", text)
