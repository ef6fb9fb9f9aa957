"""Keeper of one server: starts it, and ends its whole process tree when it or the supervisor ends.

Run as a script, by its path: `python -I -S subreaper.py PARENT LEAD SOFT GRACE COMMAND...`. Standard library only, so
that a keeper needs 10 MB. PARENT is the supervisor's process id; the keeper gets SIGTERM when that process dies, even
by SIGKILL. Orphans of the server (a worker starts its runs in their own sessions) become children of the keeper, so
none is missed. Shutdown: SIGTERM to the server's descendants, after up to LEAD seconds to the server, after SOFT
seconds to everything else, after GRACE seconds SIGKILL to the rest. A second SIGTERM skips the waiting. Exits with the
server's code, or 128 + its signal.
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


def descendants(root: int) -> list[int]:
    """Live descendants of `root`, from /proc."""
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
    found, level = [], [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found


def tell(pids: list[int], number: int) -> None:
    """Signal processes, ignoring those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


class Keeper:
    """One server and its descendants."""

    def __init__(self, command: list[str], lead: float, soft: float, grace: float) -> None:
        self.lead, self.soft, self.grace = lead, soft, grace
        self.told: set[int] = set()  # descendants of the server that were sent SIGTERM
        self.code: int | None = None  # of the server, once it has ended
        own = os.getpid()

        def tied() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            if os.getppid() != own:  # the keeper died before the tie was made
                os._exit(1)

        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tied)

    def reap(self) -> None:
        """Reap all ended children, adopted ones included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server.pid:
                self.code = os.waitstatus_to_exitcode(status)

    def run(self) -> int:
        """Wait until the server ends or a signal arrives, then end the tree."""
        while self.code is None:
            told = signal.sigtimedwait(WATCHED, 5.0)
            self.reap()
            if told is not None and told.si_signo != signal.SIGCHLD:
                break
        self.end()
        assert self.code is not None
        return self.code if self.code >= 0 else 128 - self.code

    def others(self) -> list[int]:
        """Live descendants of the keeper except the server."""
        return [pid for pid in descendants(os.getpid()) if pid != self.server.pid]

    def tell_others(self) -> None:
        """SIGTERM, once to each: a second one would interrupt their saving."""
        new = [pid for pid in self.others() if pid not in self.told]
        tell(new, signal.SIGTERM)
        self.told.update(new)

    def pause(self) -> bool:
        """Sleep briefly; True = another signal asks to hurry."""
        told = signal.sigtimedwait(WATCHED, 0.1)
        self.reap()
        return told is not None and told.si_signo != signal.SIGCHLD

    def children_first(self) -> bool:
        """End the server's children before the server, which then reports their end; True = asked to hurry."""
        deadline = time.monotonic() + self.lead
        settled = time.monotonic()
        while self.code is None and time.monotonic() < deadline:
            self.tell_others()
            if self.others():
                settled = time.monotonic() + SETTLE_SECONDS
            elif time.monotonic() >= settled:
                break
            if self.pause():
                return True
        return False

    def end(self) -> None:
        """Terminate the remaining processes."""
        killed = self.children_first()
        started = time.monotonic()
        if self.code is None:
            tell([self.server.pid], signal.SIGTERM)
        while descendants(os.getpid()):
            passed = time.monotonic() - started
            if self.code is not None or passed >= self.soft:
                self.tell_others()
            if killed or passed >= self.grace:
                tell(descendants(os.getpid()), signal.SIGKILL)
                killed = True
            if passed >= self.grace + STUCK_SECONDS:  # stuck in the kernel, as on an unreachable file system
                break
            killed = self.pause() or killed
        self.reap()
        if self.code is None:
            self.code = 1


def main() -> int:
    """Parse the arguments, tie this process to its parent, keep the server."""
    parent, lead, soft, grace = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    return Keeper(sys.argv[5:], lead, soft, grace).run()


if __name__ == "__main__":
    sys.exit(main())
