"""Bounded spinning of OpenMP threads while other programs run, and the number of free processors.

Threads of a parallel region wait for each other by spinning, for milliseconds in GCC's library. That is fastest on an
idle machine. If other programs run, a spinning thread keeps the one it waits for off the processor.
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

_CHECK_INTERVAL_S = 0.5
# average number of queueing threads above which waiting is bounded, and below which a check is quiet
_BUSY_THRESHOLD, _QUIET_THRESHOLD = 0.2, 0.1
_NUM_QUIET_CHECKS = 4  # quiet checks before threads may spin again
_USER_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def count_usable_processors() -> int:
    """Count the processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_processors(seconds: float = 1.0) -> int:
    """Return the number of usable processors that other programs leave free, at least 1; measure for `seconds`."""
    load = ProcessorLoad()
    if load.measure_other_load() is None:
        return count_usable_processors()
    time.sleep(seconds)
    return max(1, round(count_usable_processors() - (load.measure_other_load() or 0.0)))


def limit_openmp_spin() -> bool:
    """Let this process's OpenMP threads sleep early while they queue for processors; return whether that is set up.

    A watcher thread checks twice a second. While this process's threads queue behind those of other programs, it
    holds more OpenMP threads than processors, asleep: GCC's library then bounds every wait of the process to 100
    iterations instead of 300,000 (GOMP_SPINCOUNT in the manual of libgomp). Load of other programs while this process
    needs no processor, or on processors that it does not need, does not count. Results do not change. Nothing is done
    if the environment sets the wait policy, torch has one thread, or its OpenMP is another library.
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
    """Processor time that other programs use on this process's processors."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None

    def measure_other_load(self) -> float | None:
        """Return the processors that other programs kept busy since the last call; 0 at first; None if the system
        hides it.
        """
        try:
            busy = compute_busy_seconds(
                Path("/proc/stat").read_text(), os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
            )
        except (OSError, ValueError, AttributeError):
            return None
        now = time.monotonic(), busy, time.process_time()
        previous, self._last = self._last or now, now
        seconds, all_s, process_s = (new - old for new, old in zip(now, previous, strict=True))
        return max(0.0, (all_s - process_s) / seconds) if seconds > 0 else 0.0


class RunQueueDelay:
    """Time that runnable threads of this process waited for a processor."""

    def __init__(self) -> None:
        self._seconds, self._waited_ns = 0.0, dict[str, int]()

    def measure_waiting_threads(self) -> float | None:
        """Return the average number of waiting threads since the last call; 0 at first; None if the system hides it.

        Source: run delay in schedstat (Documentation/scheduler/sched-stats.rst of Linux).
        """
        waited_ns: dict[str, int] = {}
        try:
            for path in Path("/proc/self/task").iterdir():
                # the thread may have ended meanwhile
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    waited_ns[path.name] = int((path / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        if not waited_ns:
            return None
        now, previous = time.monotonic(), self._waited_ns
        seconds, self._seconds, self._waited_ns = now - self._seconds, now, waited_ns
        if not previous or seconds <= 0:
            return 0.0
        return sum(ns - previous.get(thread, 0) for thread, ns in waited_ns.items()) / 1e9 / seconds


def compute_busy_seconds(stat: str, processors: set[int], ticks_per_second: int) -> float:
    """Compute how long these processors were busy since the system started, from the text of /proc/stat.

    Time taken by a hypervisor ("steal") counts, because none of our threads ran in it.
    """
    ticks = 0
    for line in stat.splitlines():
        match = re.match(r"cpu(\d+) ", line)
        if match and int(match[1]) in processors:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / ticks_per_second


@dataclass
class SpinMode:
    """Hysteresis of the wait mode: bounded at the first busy check, free to spin after several quiet ones."""

    is_bounded: bool = False
    num_quiet: int = 0

    def update_mode(self, queueing: float) -> bool:
        """Return whether waiting is bounded now.

        Args:
            queueing: threads of this process that waited for a processor.
        """
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
    """A sleeping OpenMP team larger than the number of processors, held by a dedicated thread."""

    def __init__(self, libgomp: str) -> None:
        self._parallel = ctypes.CDLL(libgomp).GOMP_parallel
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._parallel.argtypes, self._parallel.restype = (pointer, pointer, number, number), None
        # a function that ignores arguments
        self._do_nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
        self._end_event: threading.Event | None = None

    def set_active(self, is_active: bool) -> None:
        """Create the team, or end it with its thread."""
        if is_active and self._end_event is None:
            self._end_event, started = threading.Event(), threading.Event()
            threading.Thread(
                target=self._hold_team,
                args=(self._end_event, started),
                daemon=True,
                name="waiting team",
            ).start()
            started.wait()
        elif not is_active and self._end_event is not None:
            self._end_event.set()
            self._end_event = None

    def _hold_team(self, end_event: threading.Event, started: threading.Event) -> None:
        self._parallel(self._do_nothing, None, count_usable_processors() + 1, 0)
        started.set()
        end_event.wait()


def _watch_queue_delay(surplus: _ThreadSurplus) -> None:
    queue, mode = RunQueueDelay(), SpinMode()
    queue.measure_waiting_threads()
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        was_bounded = mode.is_bounded
        is_bounded = mode.update_mode(queue.measure_waiting_threads() or 0.0)
        if is_bounded != was_bounded:
            logger.debug(
                "threads queue for processors: %s; waiting is %s",
                is_bounded,
                ["free", "bounded"][is_bounded],
            )
        surplus.set_active(is_bounded)


def _find_libgomp() -> str | None:
    """Return the path of GCC's OpenMP library if torch has loaded that one."""
    path = find_loaded_openmp()
    return path if path is not None and Path(path).name.startswith("libgomp") else None
