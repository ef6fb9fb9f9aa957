"""Free ports and port holders.

Process identity, and search and termination of the processes of an output folder's servers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, open_log_file

HOST = "127.0.0.1"


def is_port_free(port: int) -> bool:
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


def describe_port_holder(port: int) -> str:
    """Description of the process listening on a port: id and command, as far as visible to this user."""
    import psutil

    try:
        found = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        ]
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


def check_port(port: int, purpose: str, option: str) -> None:
    """Raise SettingsError if the port is taken, naming its holder and the option for another port."""
    if not is_port_free(port):
        raise SettingsError(
            f"port {port}, meant for {purpose}, is taken by {describe_port_holder(port)}; end that, or choose another port with "
            f"{option} (a port is fixed, so that links in runs and reports stay right)"
        )


def check_ports(wanted: Sequence[tuple[int, str, str]]) -> None:
    """As `check_port`, for the servers that are to run side by side; also if two of them are to have the same port.

    wanted: port, purpose and option of each.
    """
    options: dict[int, str] = {}
    for port, _, option in wanted:
        if port in options:
            raise SettingsError(
                f"{options[port]} and {option} are both {port}; each server needs a port of its own"
            )
        options[port] = option
    for port, what, option in wanted:
        check_port(port, what, option)


MARK_VARIABLE = "POSTTRAIN_SERVERS"  # environment variable of every process of a folder's servers
KEEPER_SCRIPT = Path(__file__).with_name("subreaper.py")


@functools.cache
def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_process_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state field on; [] = no such process."""
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
        """Current process with that pid; None = none, or a zombie."""
        fields = _read_process_stat(pid)
        if not fields or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]), _read_boot_id())

    @property
    def is_alive(self) -> bool:
        """True if this very process runs."""
        return ProcessId.from_pid(self.pid) == self

    def send_signal(self, number: int) -> bool:
        """Signal it; False if it has ended, even if its pid is reused."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def check_platform() -> None:
    """Raise SettingsError on platforms where children cannot be tied to their parent."""
    if not sys.platform.startswith("linux"):
        raise SettingsError(
            "`posttrain up` needs Linux, which ends children with their parent; use `posttrain ui` here"
        )


def format_mark(output: Path, server: str = "") -> str:
    """Value of `MARK` for an output folder, or for one of its servers."""
    mark = hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]
    return f"{mark}.{server}" if server else mark


def find_marked_processes(mark: str) -> list[ProcessId]:
    """Processes of this user with the mark of a folder or one of its servers, except this process's ancestors."""
    ours = f"{MARK_VARIABLE}={mark}".encode()
    above, pid = set(), os.getpid()
    while pid > 1:
        above.add(pid)
        fields = _read_process_stat(pid)
        pid = int(fields[1]) if fields else 0
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in above:
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended, or of another user
            continue
        carried = any(
            part == ours or part.startswith(ours + b".") for part in environment.split(b"\0")
        )
        if carried and (process := ProcessId.from_pid(int(entry.name))):
            found.append(process)
    return found


def terminate_marked(mark: str, grace: float) -> list[int]:
    """Terminate marked processes: SIGTERM, after `grace` seconds SIGKILL. Returns the ids of all found."""
    first = find_marked_processes(mark)
    for process in first:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (left := find_marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(50):  # a process may fork between the search and the signal
        if not left:
            break
        for process in left:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
        left = find_marked_processes(mark)
    return [process.pid for process in first]


def spawn_server(
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    log: Path,
    *,
    lead: float = 0.0,
    soft: float = 5.0,
    grace: float = 15.0,
) -> subprocess.Popen[bytes]:
    """Start a command under a keeper, in its own session, with output appended to `log`.

    Args:
        lead: seconds for the server's children to end before the server is signalled; see subreaper.py.
        soft, grace: seconds from the server's SIGTERM to that of the whole tree, and to SIGKILL.
    """
    make_folder(log.parent)
    with open_log_file(log, append_up_to=MAX_LOG_BYTES) as output:
        output.write(f"--- started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        output.flush()
        return subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(KEEPER_SCRIPT),
                str(os.getpid()),
                str(lead),
                str(soft),
                str(grace),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops everything in order
        )


MAX_LOG_BYTES = 20 * 2**20
