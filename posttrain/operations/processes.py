"""Ports and processes of an output folder's servers: free ports, process identity, search, termination."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import SettingsError

HOST = "127.0.0.1"
MARK_VARIABLE = "POSTTRAIN_SERVERS"  # environment variable of every process of a folder's servers


def is_port_free(port: int) -> bool:
    """Return whether a server could listen on the loopback port. Raises: SettingsError if this user may not bind it."""
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


def describe_port_holder(port: int) -> str:
    """Describe the process listening on a port: id and command, as far as visible to this user."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        connections = []
    for connection in connections:
        is_listening = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if not is_listening or connection.pid is None:
            continue
        try:
            process = psutil.Process(connection.pid)
            environment = process.environ()
            if MARK_VARIABLE in environment and "PREFECT_PROFILES_PATH" in environment:
                output = Path(environment["PREFECT_PROFILES_PATH"]).parents[1]
                return f"process {connection.pid} (a server of `posttrain up` for {output})"
            command = " ".join(" ".join(process.cmdline()).split()) or "?"
        except psutil.Error:
            command = "a process of another user"
        if len(command) > 120:
            command = command[:117] + "..."
        return f"process {connection.pid} ({command})"
    return "a process of another user or container"


def check_port(port: int, purpose: str, option: str) -> None:
    """Refuse a port that is taken. Raises: SettingsError that names its holder and the option for another port."""
    if not is_port_free(port):
        holder = describe_port_holder(port)
        advice = "choose" if "`posttrain up`" in holder else "end that, or choose"
        raise SettingsError(
            f"port {port}, meant for {purpose}, is taken by {holder}; {advice} another port with {option} (ports are "
            "fixed so that links in runs and reports stay valid)"
        )


def check_ports(wanted: Sequence[tuple[int, str, str]]) -> None:
    """Refuse ports that are taken, or used twice, for servers that run side by side.

    Args:
        wanted: port, purpose and option of each server.
    Raises: SettingsError.
    """
    options: dict[int, str] = {}
    for port, _, option in wanted:
        if port in options:
            raise SettingsError(
                f"{options[port]} and {option} are both {port}; each server needs its own port"
            )
        options[port] = option
    taken = [entry for entry in wanted if not is_port_free(entry[0])]
    if len(taken) == 1:
        check_port(*taken[0])
    if taken:
        holders = "; ".join(
            f"{port}, meant for {purpose}, by {describe_port_holder(port)}"
            for port, purpose, _ in taken
        )
        others, used = [], {port for port, _, _ in wanted}
        for port, _, option in taken:
            free = next(n for n in range(port + 1, 65536) if n not in used and is_port_free(n))
            used.add(free)
            others.append(f"{option} {free}" if option.startswith("--") else option)
        raise SettingsError(f"ports are taken: {holders}; choose other ports: {' '.join(others)}")


@functools.cache
def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_process_stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat from the state field on; [] = no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Process id with start time, so that a reused pid is not mistaken for it."""

    pid: int
    started: int  # clock ticks since boot, unaffected by clock changes
    boot: str

    @classmethod
    def from_pid(cls, pid: int) -> ProcessId | None:
        """Return the identity of the process that has the pid now; None = no process, or a zombie."""
        fields = _read_process_stat(pid)
        if not fields or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]), _read_boot_id())

    @property
    def is_alive(self) -> bool:
        """True = this process runs, not another one with its pid."""
        return ProcessId.from_pid(self.pid) == self

    def send_signal(self, number: int) -> bool:
        """Send a signal; return False if the process has ended, even if its pid is reused."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def check_platform() -> None:
    """Refuse platforms where children cannot be tied to their parent. Raises: SettingsError."""
    if not sys.platform.startswith("linux"):
        raise SettingsError(
            "`posttrain up` needs Linux, which ends children with their parent; use `posttrain ui` here"
        )


def format_mark(output: Path, server: str = "") -> str:
    """Format the value of `MARK_VARIABLE` for an output folder, or for one of its servers."""
    mark = hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]
    return f"{mark}.{server}" if server else mark


def find_marked_processes(mark: str) -> list[ProcessId]:
    """Find this user's processes with the mark of a folder or of one of its servers, except this one's ancestors."""
    entry_of_mark = f"{MARK_VARIABLE}={mark}".encode()
    ancestors, pid = set(), os.getpid()
    while pid > 1:
        ancestors.add(pid)
        fields = _read_process_stat(pid)
        pid = int(fields[1]) if fields else 0
    processes = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in ancestors:
            continue
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended, or of another user
            continue
        is_marked = any(
            entry == entry_of_mark or entry.startswith(entry_of_mark + b".") for entry in entries
        )
        if is_marked and (process := ProcessId.from_pid(int(folder.name))):
            processes.append(process)
    return processes


def terminate_marked(mark: str, grace: float) -> list[int]:
    """Terminate marked processes: SIGTERM, after `grace` seconds SIGKILL. Return the ids of those sent SIGTERM."""
    first = find_marked_processes(mark)
    for process in first:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (remaining := find_marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(50):  # a process may fork between the search and the signal
        if not remaining:
            break
        for process in remaining:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
        remaining = find_marked_processes(mark)
    return [process.pid for process in first]
