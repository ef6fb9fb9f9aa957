"""Metrics as DogStatsD datagrams over UDP, for a Datadog agent; into a file while no agent listens.

The package datadog is imported when a tracker is made. Names are those of `exported_names`: posttrain.train.loss.
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
from rl_core.storage.atomic_files import append_bytes, make_folder
from rl_core.tracking import SilentTracker

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8125
AGENT_CHECK_SECONDS = 30.0  # between two looks for an agent that was away
MAX_FILE_BYTES = 256 * 2**20  # bytes; later records are left out


class DogStatsdTracker(SilentTracker):
    """Gauges of the newest metrics. A datagram cannot wait for anybody, so no agent can stall a run."""

    def __init__(
        self, address: str, file: str | Path, labels: Mapping[str, str] | None = None
    ) -> None:
        """Raises: SettingsError where the package is missing, or the address is none.

        Args:
            address: HOST:PORT or HOST; "" = DD_AGENT_HOST and DD_DOGSTATSD_PORT, else this machine's port 8125.
            file: gets the same datagrams with the time of each, a line a value, while no agent is there.
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
        from rl_core.analysis.metric_reference import (
            resolve_exported_metric,  # its package takes a second to import
        )

        self._exported = resolve_exported_metric

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send scalars of one step."""
        self._send_metrics({**metrics, "run/step": float(step)})

    def log_system(self, metrics: Mapping[str, float], number: int) -> None:
        """Send a reading of the machine."""
        self._send_metrics(metrics)

    def close(self, status: str) -> None:
        """Give the socket back."""
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
        outside = self._exported(name)
        tags = [
            f"{key}:{_replace_reserved_characters(text)}"
            for key, text in (*self._labels.items(), *outside.labels)
        ]
        return (
            "posttrain." + _replace_reserved_characters(outside.name).replace("/", "."),
            float(value) * outside.scale,
            tags,
        )

    def _is_agent_listening(self) -> bool:
        """True = the last datagram was not sent back; after one that was, an empty one asks again now and then."""
        if (
            not self._is_agent_available
            and time.monotonic() - self._last_check >= AGENT_CHECK_SECONDS
        ):
            self._last_check = time.monotonic()
            with contextlib.suppress(OSError):
                self._client.get_socket().send(b"")
                self._is_agent_available = not self._is_socket_refused()
        return self._is_agent_available

    def _is_socket_refused(self) -> bool:
        """True = there is no socket, or the other machine has said that nobody listens there."""
        found = self._client.socket
        refused = found is None or found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        if refused:
            self._is_agent_available, self._last_check = False, time.monotonic()
            self._client.close_socket()
        return refused

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
        append_bytes(self.file, "".join(lines).encode())


def _parse_host_and_port(address: str) -> tuple[str, int]:
    if not address:
        address = f"{os.environ.get('DD_AGENT_HOST', '127.0.0.1')}:{os.environ.get('DD_DOGSTATSD_PORT', DEFAULT_PORT)}"
    host, separator, port = address.rpartition(":")
    if not separator:
        return address, DEFAULT_PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(
            f"tracker: dogstatsd:{address}: '{port}' is no port; write dogstatsd:HOST:PORT"
        )
    return host.strip("[]"), int(port)


def _replace_reserved_characters(text: str) -> str:
    """Text without the characters that end a name or a tag."""
    return re.sub(r"[|,#:@\s]", "_", text)
