"""The spare process: everything is loaded, and it waits to become the worker or the gate."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rl_core.api.policy import load_policy
from rl_core.settings import OnlineSettings
from rl_core.storage.single_files import open_log

__all__ = ["wait_for_part"]

LOG_BYTES = 4 * 2**20


def wait_for_part(descriptor: int, settings: OnlineSettings) -> str:
    """Load what a start needs, say so, and wait; returns the part to play, "" where the server is gone.

    The model is read once, for the code that it loads; the part reads it again, and its checkpoint.
    """
    load_policy(settings.model, seed=settings.seed)
    with socket.socket(fileno=os.dup(descriptor)) as server:
        server.setblocking(True)
        try:
            server.sendall(b"r")
            part = server.recv(64).decode().strip()
        except OSError:
            return ""
    if part:
        with open_log(Path(settings.folder) / f"{part}.log", append_up_to=LOG_BYTES) as log:
            for output in (1, 2):
                os.dup2(log.fileno(), output)
    return part
