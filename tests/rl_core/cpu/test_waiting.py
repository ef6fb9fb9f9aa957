"""OpenMP threads sleep early while they queue behind other programs and may spin otherwise; how that is seen."""

import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch

from rl_core.cpu import openmp_spin

needs_libgomp = pytest.mark.skipif(
    openmp_spin._find_libgomp() is None, reason="of GCC's OpenMP library"
)

# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  99 9 99 9999 9 9 9 9 0 0
cpu0 100 10 20 5000 7 1 2 3 0 0
cpu1 200 0 40 4000 8 0 0 60 0 0
cpu10 900 0 0 0 0 0 0 0 0 0
intr 5
"""

# Switches of the second thread that it made by itself: it sleeps once in every pause, or is still spinning when the
# next region begins.
PROGRAM = """
import ctypes, os, time, torch
torch.set_num_threads(2)
from rl_core.cpu import openmp_spin
x, before = torch.randn(2**16), set(os.listdir("/proc/self/task"))
x.exp()
(worker,) = set(os.listdir("/proc/self/task")) - before
def switches():
    lines = open(f"/proc/self/task/{worker}/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("voluntary")))
def count():
    start = switches()
    for _ in range(50):
        x.exp()
        end = time.thread_time() + 0.0005  # of processor time: far more than 100 turns, far less than 300,000
        while time.thread_time() < end: pass
    return switches() - start
crowd = openmp_spin._Crowd(openmp_spin._libgomp())
found = []
for is_there in (False, True, False):
    crowd.set(is_there)
    time.sleep(0.1)  # a team that has ended takes itself away
    found.append(count())
print(*found)
"""


def test_busy_seconds_are_those_of_our_processors_with_what_the_hypervisor_took() -> None:
    # cpu0: 100 + 10 + 20 + 1 + 2 + 3 = 136 ticks; cpu1: 200 + 40 + 60 = 300; cpu10 is not ours
    assert openmp_spin.compute_busy_seconds(STAT, {0, 1}, 100) == pytest.approx(4.36)
    assert openmp_spin.compute_busy_seconds(STAT, {10}, 100) == pytest.approx(9.0)


def test_waiting_is_bounded_at_once_and_free_again_after_quiet_looks() -> None:
    mode = openmp_spin.SpinMode()
    assert [mode.update_mode(queueing) for queueing in (0.0, 0.15, 0.9)] == [False, False, True]
    assert [mode.update_mode(queueing) for queueing in (0.0, 0.0, 0.0, 0.15)] == [
        True,
        True,
        True,
        True,
    ]  # it begins anew
    assert [mode.update_mode(queueing) for queueing in (0.0, 0.0, 0.05, 0.0)] == [
        True,
        True,
        True,
        False,
    ]


def test_the_watcher_bounds_waiting_while_threads_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crowd:
        seen: ClassVar[list[bool]] = []

        def set(self, is_there: bool) -> None:
            self.seen.append(is_there)

    class Queue:  # in place of the class: this process's own watcher may be looking at an instance of that one
        busy = iter([0.0, 1.5, 0.0, 0.0, 0.0, 0.0])  # the first look only begins the measurement

        def threads(self) -> float:
            return next(self.busy)

    monkeypatch.setattr(openmp_spin, "RunQueueDelay", Queue)
    monkeypatch.setattr(openmp_spin, "_CHECK_INTERVAL_S", 0.0)
    with pytest.raises(StopIteration):
        openmp_spin._watch_queue_delay(Crowd())  # type: ignore[arg-type]
    assert Crowd.seen == [True, True, True, True, False]


# Beside another program on one processor: first a thread that wants to run, then one that sleeps.
QUEUEING = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from rl_core.cpu import openmp_spin
queue, end = openmp_spin.Queue(), time.monotonic() + 0.4
first = queue.threads()
def spin():
    while time.monotonic() < end: sum(range(10**5))
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
spin()
together = queue.threads()
time.sleep(1.0)
apart = queue.threads()
other.kill()
print(first, together, apart)
"""


@pytest.mark.skipif(
    openmp_spin.RunQueueDelay().measure_waiting_threads() is None, reason="Linux tells who queues"
)
def test_threads_queue_behind_another_program_only_while_they_want_to_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUEUEING], capture_output=True, text=True, check=True
    )
    first, together, apart = map(float, done.stdout.split())
    assert first == 0.0
    assert together > 0.2  # about a half; while nothing was wanted, nothing waited
    assert apart < 0.1


@needs_libgomp
def test_threads_sleep_in_pauses_while_there_is_a_crowd_and_spin_again_after_it() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    )
    before, crowded, after = map(int, done.stdout.split())
    assert crowded >= 45  # of 50 pauses
    assert before <= 25 and after <= 25


def test_waiting_is_left_alone_where_the_user_has_set_it_and_on_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openmp_spin, "_watcher", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not openmp_spin.limit_openmp_spin()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert not openmp_spin.limit_openmp_spin()
    assert openmp_spin._watcher is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux tells what is busy")
def test_free_processors_are_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp_spin, "count_usable_processors", lambda: 8)
    for others, free in ((0.2, 8), (3.4, 5), (11.0, 1)):
        monkeypatch.setattr(
            openmp_spin.ProcessorLoad, "measure_other_load", lambda self, others=others: others
        )
        assert openmp_spin.free_processors(0.0) == free
