"""Waiting and free ports for tests of servers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def wait_for(
    condition: Callable[[], Any], what: str = "it", seconds: float = 60.0, every: float = 0.05
) -> Any:
    """Return the first true value of the condition."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(every)
    raise AssertionError(f"{what}: did not come about")


def delivered_run_id(run: Any) -> str:
    """Return the MLflow id of a run, as soon as the store has assigned one."""
    run._shipper.request_delivery()
    return str(wait_for(lambda: run.run_id, "the run's id"))
