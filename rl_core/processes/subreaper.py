"""Keeper of one server: starts it, and ends its whole process tree when it or the supervisor ends.

Run as a script, by its path: `python -I -S subreaper.py PARENT LEAD SOFT GRACE COMMAND...`. It uses only the standard
library, so that a keeper needs 10 MB. PARENT is the supervisor's process id; the keeper gets SIGTERM when that process
dies, even by SIGKILL. Orphans of the server become children of the keeper, so that none is missed (a worker starts each
run in a new session). Shutdown: SIGTERM to the server's descendants, after up to LEAD seconds to the server, after SOFT
seconds to everything else, after GRACE seconds SIGKILL to the rest. A second SIGTERM skips the waiting. The keeper
exits with the server's code, or 128 + its signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SETTLE_SECONDS = 3.0  # for a server to report the end of its children
STUCK_SECONDS = 30.0  # after SIGKILL; then the keeper exits regardless
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}


def list_descendants(root: int) -> list[int]:
    """List the live descendants of `root`, from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if fields[0] not in "ZX":
            parents[int(name)] = int(fields[1])
    descendants, level = [], [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        descendants += level
    return descendants


def send_signals(pids: list[int], number: int) -> None:
    """Send a signal to processes, ignoring those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


class ProcessTreeKeeper:
    """One server and its descendants."""

    def __init__(self, command: list[str], lead: float, soft: float, grace: float) -> None:
        self.lead, self.soft, self.grace = lead, soft, grace
        self.terminated_pids: set[int] = set()  # descendants of the server that were sent SIGTERM
        self.exit_code: int | None = None  # of the server, once it has ended
        keeper = os.getpid()

        def tie_to_keeper() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            if os.getppid() != keeper:  # the keeper died before the tie was made
                os._exit(1)

        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie_to_keeper)

    def reap_children(self) -> None:
        """Reap all ended children, adopted ones included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def run_until_exit(self) -> int:
        """Wait until the server ends or a signal arrives, then end the tree."""
        while self.exit_code is None:
            received = signal.sigtimedwait(WATCHED, 5.0)
            self.reap_children()
            if received is not None and received.si_signo != signal.SIGCHLD:
                break
        self.end_tree()
        assert self.exit_code is not None
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    def list_other_descendants(self) -> list[int]:
        """List the live descendants of the keeper except the server."""
        return [pid for pid in list_descendants(os.getpid()) if pid != self.server.pid]

    def terminate_others(self) -> None:
        """Send SIGTERM once to each descendant: a second one would interrupt its saving."""
        new = [pid for pid in self.list_other_descendants() if pid not in self.terminated_pids]
        send_signals(new, signal.SIGTERM)
        self.terminated_pids.update(new)

    def wait_for_signal(self) -> bool:
        """Sleep briefly; return True if another signal asks to hurry."""
        received = signal.sigtimedwait(WATCHED, 0.1)
        self.reap_children()
        return received is not None and received.si_signo != signal.SIGCHLD

    def end_children_first(self) -> bool:
        """End the server's children before the server, which then reports their end; return True if asked to hurry."""
        deadline = time.monotonic() + self.lead
        settled = time.monotonic()
        while self.exit_code is None and time.monotonic() < deadline:
            self.terminate_others()
            if self.list_other_descendants():
                settled = time.monotonic() + SETTLE_SECONDS
            elif time.monotonic() >= settled:
                break
            if self.wait_for_signal():
                return True
        return False

    def end_tree(self) -> None:
        """Terminate the remaining processes."""
        must_kill = self.end_children_first()
        started = time.monotonic()
        if self.exit_code is None:
            send_signals([self.server.pid], signal.SIGTERM)
        # Until the server is reaped: while threads of a large process end, it looks like a zombie but has no code yet.
        while self.exit_code is None or list_descendants(os.getpid()):
            elapsed = time.monotonic() - started
            if self.exit_code is not None or elapsed >= self.soft:
                self.terminate_others()
            if must_kill or elapsed >= self.grace:
                unreaped = [self.server.pid] if self.exit_code is None else []
                send_signals([*list_descendants(os.getpid()), *unreaped], signal.SIGKILL)
                must_kill = True
            if elapsed >= self.grace + STUCK_SECONDS:
                break  # stuck in the kernel, as on an unreachable file system
            must_kill = self.wait_for_signal() or must_kill
        if self.exit_code is None:
            self.exit_code = 1


def main() -> int:
    """Parse the arguments, tie this process to its parent, keep the server."""
    parent = int(sys.argv[1])
    lead, soft, grace = (float(argument) for argument in sys.argv[2:5])
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    return ProcessTreeKeeper(sys.argv[5:], lead, soft, grace).run_until_exit()


if __name__ == "__main__":
    sys.exit(main())
