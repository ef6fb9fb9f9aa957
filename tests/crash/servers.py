"""Prefect server of a crash test, environment of its runs, and its end by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

__all__ = ["end_by_sigterm", "environment", "prefect_server"]

ROOT = Path(__file__).resolve().parents[2]


def end_by_sigterm() -> None:
    """Let SIGTERM raise an exception in this process, so that everything it started is ended as well."""

    def end(number: int, frame: FrameType | None) -> None:
        # a second signal does not interrupt the cleanup
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def environment(api: str) -> dict[str, str]:
    """Build the environment of the runs: this checkout, one thread, no network, a separate Prefect server."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_"))
    }
    return inherited | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PREFECT_API_URL": api,
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "MPLBACKEND": "agg",
    }


@contextlib.contextmanager
def prefect_server() -> Iterator[str]:
    """Run a Prefect server with a separate database; yield the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="crash-prefect-") as home:
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "--factory",
            "prefect.server.api.server:create_app",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--log-level",
            "error",
            "--lifespan",
            "on",
        ]
        server = subprocess.Popen(
            command,
            env={
                **os.environ,
                "PREFECT_HOME": home,
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "DO_NOT_TRACK": "true",
            },
            start_new_session=True,
        )
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}/api/health", server)
            yield f"http://127.0.0.1:{port}/api"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, "the Prefect server ended"
        with contextlib.suppress(OSError), opener.open(url, timeout=2):
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} does not answer")
