"""OpenMP threads sleep early while they queue behind other programs and may spin otherwise, and how it is measured."""

import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

from rl_core.cpu import openmp_spin

needs_libgomp = pytest.mark.skipif(
    openmp_spin._find_libgomp() is None, reason="tests GCC's OpenMP library"
)

# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  99 9 99 9999 9 9 9 9 0 0
cpu0 100 10 20 5000 7 1 2 3 0 0
cpu1 200 0 40 4000 8 0 0 60 0 0
cpu10 900 0 0 0 0 0 0 0 0 0
intr 5
"""

# Voluntary context switches of the second thread: it sleeps once in every pause, or is still spinning when the next
# region begins. Beside other programs a pause lasts longer than its processor time, and a spinning thread gives up as
# well; hence the block of pauses with the fewest switches.
PROGRAM = """
import ctypes, os, time, torch
torch.set_num_threads(2)
from rl_core.cpu import openmp_spin
x, threads_before = torch.randn(2**16), set(os.listdir("/proc/self/task"))
x.exp()
(worker,) = set(os.listdir("/proc/self/task")) - threads_before
def switches():
    lines = open(f"/proc/self/task/{worker}/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary")))
def count():
    start = switches()
    for _ in range(5):
        x.exp()
        end = time.thread_time() + 0.0005  # of processor time: far more than 100 iterations, far fewer than 300,000
        while time.thread_time() < end: pass
    return switches() - start
surplus = openmp_spin._ThreadSurplus(openmp_spin._find_libgomp())
counts = []
for is_active in (False, True, False):
    surplus.set_active(is_active)
    time.sleep(0.1)  # until an ended team has disappeared
    counts.append(min(count() for _ in range(200)))
print(*counts)
"""


def test_busy_seconds_of_our_processors_include_steal() -> None:
    # cpu0: 100 + 10 + 20 + 1 + 2 + 3 = 136 ticks; cpu1: 200 + 40 + 60 = 300; cpu10 is not ours
    assert openmp_spin.compute_busy_seconds(STAT, {0, 1}, 100) == pytest.approx(4.36)
    assert openmp_spin.compute_busy_seconds(STAT, {10}, 100) == pytest.approx(9.0)


def test_waiting_is_bounded_immediately_and_free_after_quiet_checks() -> None:
    mode = openmp_spin.SpinMode()
    assert [mode.update_mode(queueing) for queueing in (0.0, 0.15, 0.9)] == [False, False, True]
    # 0.15 restarts the count of quiet checks
    assert [mode.update_mode(q) for q in (0.0, 0.0, 0.0, 0.15)] == [True] * 4
    assert [mode.update_mode(q) for q in (0.0, 0.0, 0.05, 0.0)] == [True, True, True, False]


def test_the_watcher_bounds_waiting_while_threads_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    class Surplus:
        seen: ClassVar[list[bool]] = []

        def set_active(self, is_active: bool) -> None:
            self.seen.append(is_active)

    class Queue:  # replaces the class, because this process's watcher may be using an instance of it
        busy = iter([0.0, 1.5, 0.0, 0.0, 0.0, 0.0])  # the first check only starts the measurement

        def measure_waiting_threads(self) -> float:
            return next(self.busy)

    monkeypatch.setattr(openmp_spin, "RunQueueDelay", Queue)
    monkeypatch.setattr(openmp_spin, "_CHECK_INTERVAL_S", 0.0)
    with pytest.raises(StopIteration):
        openmp_spin._watch_queue_delay(Surplus())  # type: ignore[arg-type]
    assert Surplus.seen == [True, True, True, True, False]


# With another program on the same processor: first a thread that wants to run, then one that sleeps.
QUEUEING = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from rl_core.cpu import openmp_spin
queue, end = openmp_spin.RunQueueDelay(), time.monotonic() + 0.4
first = queue.measure_waiting_threads()
def spin():
    while time.monotonic() < end: sum(range(10**5))
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
spin()
together = queue.measure_waiting_threads()
time.sleep(1.0)
apart = queue.measure_waiting_threads()
other.kill()
print(first, together, apart)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    openmp_spin.RunQueueDelay().measure_waiting_threads() is None, reason="needs Linux's schedstat"
)
def test_threads_queue_behind_another_program_only_while_they_want_to_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUEUEING], capture_output=True, text=True, check=True
    )
    first, together, apart = map(float, done.stdout.split())
    assert first == 0.0
    assert together > 0.2  # about a half
    assert apart < 0.1


@pytest.mark.slow
@needs_libgomp
def test_threads_sleep_in_pauses_with_a_surplus_and_spin_again_after_it() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    switches_before, switches_with_surplus, switches_after = map(int, done.stdout.split())
    assert switches_with_surplus >= 4  # of 5 pauses
    assert switches_before <= 2 and switches_after <= 2


def test_waiting_is_unchanged_if_configured_or_on_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openmp_spin, "_watcher", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not openmp_spin.limit_openmp_spin()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert not openmp_spin.limit_openmp_spin()
    assert openmp_spin._watcher is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux's /proc/stat")
def test_free_processors_are_those_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp_spin, "count_usable_processors", lambda: 8)
    for others, free in ((0.2, 8), (3.4, 5), (11.0, 1)):
        monkeypatch.setattr(
            openmp_spin.ProcessorLoad, "measure_other_load", lambda self, others=others: others
        )
        assert openmp_spin.free_processors(0.0) == free
