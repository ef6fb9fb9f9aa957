"""Free ports and port holders."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from rl_core.errors import SettingsError

__all__ = ["check_port", "check_ports", "holder"]

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """True if a server could listen on that loopback port. Raises: SettingsError for a port this user may not bind."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port with connections in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError as error:
            raise SettingsError(f"port {port}: {error.strerror}; use one above 1023") from None
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """Description of the process listening on a port: id and command, as far as visible to this user."""
    import psutil

    try:
        found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    except psutil.AccessDenied:
        found = []
    for connection in found:
        if connection.pid is None:
            continue
        try:
            command = " ".join(" ".join(psutil.Process(connection.pid).cmdline()).split()) or "?"
        except psutil.Error:
            command = "a process of another user"
        return f"process {connection.pid} ({command if len(command) <= 120 else command[:117] + '...'})"
    return "a process of another user or container"


def check_port(port: int, what: str, option: str) -> None:
    """Raise SettingsError if the port is taken, naming its holder and the option for another port."""
    if not is_free(port):
        raise SettingsError(
            f"port {port}, meant for {what}, is taken by {holder(port)}; end that, or choose another port with "
            f"{option} (a port is fixed, so that links in runs and reports stay right)"
        )


def check_ports(wanted: Sequence[tuple[int, str, str]]) -> None:
    """As `check_port`, for the servers that are to run side by side; also if two of them are to have the same port.

    wanted: port, purpose and option of each.
    """
    options: dict[int, str] = {}
    for port, _, option in wanted:
        if port in options:
            raise SettingsError(f"{options[port]} and {option} are both {port}; each server needs a port of its own")
        options[port] = option
    for port, what, option in wanted:
        check_port(port, what, option)
