"""Bounded waiting of OpenMP threads beside other programs, and the number of processors that are free.

Threads of a parallel region wait for each other by spinning, for milliseconds in GCC's library. On an idle machine that
is fastest. Where other programs run, a thread that spins keeps the one it waits for off the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_core.cpu.build import find_loaded_openmp

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 0.5  # between two looks at the threads
# of our threads that have to queue for a processor: waiting is bounded, or not again
_BUSY_THRESHOLD, _QUIET_THRESHOLD = (
    0.2,
    0.1,
)
_NUM_QUIET_CHECKS = 4  # quiet looks before threads may spin again
_USER_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def count_usable_processors() -> int:
    """Number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_processors(seconds: float = 1.0) -> int:
    """Number of usable processors that other programs leave free, at least 1; looks for `seconds`."""
    load = ProcessorLoad()
    if load.measure_other_load() is None:
        return count_usable_processors()
    time.sleep(seconds)
    return max(1, round(count_usable_processors() - (load.measure_other_load() or 0.0)))


def limit_openmp_spin() -> bool:
    """Let this process's OpenMP threads sleep early while they queue for processors. Returns: True = done.

    A thread looks twice a second from then on. Where this process's threads queue behind other programs' it takes more
    OpenMP threads than there are processors, which sleep: GCC's library then bounds every wait of the process to 100
    turns instead of 300,000 (documentation of GOMP_SPINCOUNT in the manual of libgomp). What others do while this
    process wants nothing, or on processors that it does not need, is no reason. Results do not change. Nothing is done
    where the environment sets the way of waiting, torch has one thread, or its OpenMP is another library.
    """
    global _watcher
    if torch.get_num_threads() == 1 or any(os.environ.get(name) for name in _USER_VARIABLES):
        return False
    with _lock:
        if _watcher is None:
            path = _find_libgomp()
            if path is None or RunQueueDelay().measure_waiting_threads() is None:
                return False
            _watcher = threading.Thread(
                target=_watch_queue_delay, args=(_ThreadSurplus(path),), daemon=True, name="waiting"
            )
            _watcher.start()
    return True


class ProcessorLoad:
    """Processor time that other programs use on the processors of this process."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None

    def measure_other_load(self) -> float | None:
        """Processors that other programs kept busy since the last call; 0 at first; None where the system hides it."""
        try:
            busy = compute_busy_seconds(
                Path("/proc/stat").read_text(), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
            )
        except (OSError, ValueError, AttributeError):
            return None
        now = time.monotonic(), busy, time.process_time()
        before, self._last = self._last or now, now
        seconds, all_s, own_s = (new - old for new, old in zip(now, before, strict=True))
        return max(0.0, (all_s - own_s) / seconds) if seconds > 0 else 0.0


class RunQueueDelay:
    """Time that threads of this process, ready to run, waited for a processor."""

    def __init__(self) -> None:
        self._seconds, self._waited_ns = 0.0, dict[str, int]()

    def measure_waiting_threads(self) -> float | None:
        """Threads that waited since the last call, on average; 0 at first; None where the system hides it.

        Source: run delay in schedstat (Documentation/scheduler/sched-stats.rst of Linux).
        """
        waited_ns: dict[str, int] = {}
        try:
            for path in Path("/proc/self/task").iterdir():
                with contextlib.suppress(
                    FileNotFoundError, ProcessLookupError
                ):  # it ended meanwhile
                    waited_ns[path.name] = int((path / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        if not waited_ns:
            return None
        now, before = time.monotonic(), self._waited_ns
        seconds, self._seconds, self._waited_ns = now - self._seconds, now, waited_ns
        if not before or seconds <= 0:
            return 0.0
        return sum(ns - before.get(thread, 0) for thread, ns in waited_ns.items()) / 1e9 / seconds


def compute_busy_seconds(stat: str, processors: set[int], ticks_per_second: int) -> float:
    """Time that these processors were busy since the start of the system, from the text of /proc/stat.

    Time that a hypervisor took away ("steal") counts: nothing of ours ran in it.
    """
    ticks = 0
    for line in stat.splitlines():
        found = re.match(r"cpu(\d+) ", line)
        if found and int(found[1]) in processors:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / ticks_per_second


@dataclass
class SpinMode:
    """Hysteresis of the way of waiting: bounded at the first busy look, free to spin after some quiet ones."""

    is_bounded: bool = False
    num_quiet: int = 0

    def update_mode(self, queueing: float) -> bool:
        """True = waiting is bounded now; `queueing`: threads of ours that waited for a processor."""
        if queueing > _BUSY_THRESHOLD:
            self.is_bounded, self.num_quiet = True, 0
        elif queueing < _QUIET_THRESHOLD:
            self.num_quiet += 1
            if self.num_quiet >= _NUM_QUIET_CHECKS:
                self.is_bounded = False
        else:
            self.num_quiet = 0
        return self.is_bounded


class _ThreadSurplus:
    """More OpenMP threads than processors, asleep, in a team that a thread of its own holds."""

    def __init__(self, libgomp: str) -> None:
        self._parallel = ctypes.CDLL(libgomp).GOMP_parallel
        place, number = ctypes.c_void_p, ctypes.c_uint
        self._parallel.argtypes, self._parallel.restype = (place, place, number, number), None
        # takes no notice of arguments
        self._nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
        self._end_event: threading.Event | None = None

    def set_active(self, is_there: bool) -> None:
        """Make the team, or end it with its thread."""
        if is_there and self._end_event is None:
            self._end_event, came = threading.Event(), threading.Event()
            threading.Thread(
                target=self._hold_team,
                args=(self._end_event, came),
                daemon=True,
                name="waiting team",
            ).start()
            came.wait()
        elif not is_there and self._end_event is not None:
            self._end_event.set()
            self._end_event = None

    def _hold_team(self, end_event: threading.Event, came: threading.Event) -> None:
        self._parallel(self._nothing, None, count_usable_processors() + 1, 0)
        came.set()
        end_event.wait()


def _watch_queue_delay(crowd: _ThreadSurplus) -> None:
    queue, mode = RunQueueDelay(), SpinMode()
    queue.measure_waiting_threads()
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        was = mode.is_bounded
        is_bounded = mode.update_mode(queue.measure_waiting_threads() or 0.0)
        if is_bounded != was:
            logger.debug(
                "threads queue for processors: %s; waiting is %s",
                is_bounded,
                ["free", "bounded"][is_bounded],
            )
        crowd.set_active(is_bounded)


def _find_libgomp() -> str | None:
    """Path of GCC's OpenMP library, where it is the one that torch has loaded."""
    path = find_loaded_openmp()
    return path if path is not None and Path(path).name.startswith("libgomp") else None
