"""Process identity, and search and termination of the processes of an output folder's servers."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import SettingsError
from rl_core.storage.single_files import make_folder, open_log

__all__ = ["MARK", "ProcessId", "end_all", "leftovers", "mark_of", "spawn"]

MARK = "POSTTRAIN_SERVERS"  # environment variable of every process of a folder's servers
KEEPER = Path(__file__).with_name("subreaper.py")


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str]:
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
    def of(cls, pid: int) -> ProcessId | None:
        """Current process with that pid; None = none, or a zombie."""
        fields = _stat(pid)
        if not fields or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]), _boot())

    @property
    def alive(self) -> bool:
        """True if this very process runs."""
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> bool:
        """Signal it; False if it has ended, even if its pid is reused."""
        if not self.alive:
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


def mark_of(output: Path, server: str = "") -> str:
    """Value of `MARK` for an output folder, or for one of its servers."""
    mark = hashlib.sha256(os.fsencode(output.resolve())).hexdigest()[:16]
    return f"{mark}.{server}" if server else mark


def leftovers(mark: str) -> list[ProcessId]:
    """Processes of this user with the mark of a folder or one of its servers, except this process's ancestors."""
    ours = f"{MARK}={mark}".encode()
    above, pid = set(), os.getpid()
    while pid > 1:
        above.add(pid)
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in above:
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended, or of another user
            continue
        carried = any(part == ours or part.startswith(ours + b".") for part in environment.split(b"\0"))
        if carried and (process := ProcessId.of(int(entry.name))):
            found.append(process)
    return found


def end_all(mark: str, grace: float) -> list[int]:
    """Terminate marked processes: SIGTERM, after `grace` seconds SIGKILL. Returns the ids of all found."""
    first = leftovers(mark)
    for process in first:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (left := leftovers(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(50):  # a process may fork between the search and the signal
        if not left:
            break
        for process in left:
            process.signal(signal.SIGKILL)
        time.sleep(0.1)
        left = leftovers(mark)
    return [process.pid for process in first]


def spawn(
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
    with open_log(log, append_up_to=MAX_LOG_BYTES) as output:
        output.write(f"--- started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        output.flush()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), str(lead), str(soft), str(grace), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops everything in order
        )


MAX_LOG_BYTES = 20 * 2**20
