"""Protocol between the benchmark and a worker: step requests and replies. Standard library only.

worker -> {"ready": {...}}                           once
parent -> go                                         for every step; anything else, or the end of the pipe = stop
worker -> {"wall_s", "cpu_s", "tokens", "loss", "peak_mb"}
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 3600.0  # for one step, or for loading everything


class WorkerFailed(Exception):
    """A worker ended, hung, or answered with something else."""


def read_peak_mb():
    """Return the highest resident memory of this process, MB.

    Not ru_maxrss, which after exec still holds the parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return round(
            next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6, 1
        )
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6, 1)


class Gate:
    """Worker side. Library output goes to stderr, so that stdout holds only answers."""

    def __init__(self):
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started = (0.0, 0.0)

    def _say(self, answer):
        print(json.dumps(answer), file=self._answers, flush=True)

    def ready(self, **about):
        """Report that everything is loaded."""
        self._say({"ready": about})

    def wait(self):
        """Wait until the next step may start. Raises: SystemExit when there is none."""
        if sys.stdin.readline().strip() != "go":
            raise SystemExit(0)
        self._started = time.perf_counter(), time.process_time()

    def done(self, tokens, loss=None, *, wall_s=0.0, cpu_s=0.0):
        """Report that the step is over; `wall_s` and `cpu_s` add what was paid for it beforehand."""
        wall = time.perf_counter() - self._started[0] + wall_s
        cpu = time.process_time() - self._started[1] + cpu_s
        self._say(
            {
                "wall_s": wall,
                "cpu_s": cpu,
                "tokens": tokens,
                "loss": loss,
                "peak_mb": read_peak_mb(),
            }
        )


class Worker:
    """Parent side."""

    def __init__(self, command, *, env, log):
        self._log = Path(log)
        started = time.perf_counter()
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
            )
        try:
            self.about = self._read()["ready"]
        except BaseException:
            self.stop()
            raise
        self.about["start_s"] = round(time.perf_counter() - started, 2)

    def step(self):
        """Let the worker take one step, and wait for its answer."""
        try:
            self.process.stdin.write(b"go\n")
        except BrokenPipeError:
            raise WorkerFailed(self._read_last_line()) from None
        return self._read()

    def cpu_s(self):
        """Return processor seconds of the process so far; 0 if /proc has none."""
        return read_process_cpu_s(self.process.pid)

    def stop(self):
        """End it; one that does not go by itself is killed."""
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _read(self):
        line, end = b"", time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[
                0
            ]:
                raise WorkerFailed(f"no answer in {PATIENCE_S:g} s; {self._read_last_line()}")
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                raise WorkerFailed(self._read_last_line())
            line += part
        return json.loads(line)

    def _read_last_line(self):
        text = self._log.read_text(errors="replace").strip().splitlines()
        return f"{self._log}: {' / '.join(text[-3:]) or 'nothing on stderr'}"


def read_process_cpu_s(pid):
    """Return processor seconds of a process, its threads included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_machine_cpu_s():
    """Return processor seconds that all programs used since boot, stolen ones included; None if /proc has none."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, *rest = map(int, line.split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class Others:
    """Cores that other programs kept busy since this was created, on average: above 0.2, distrust what was measured."""

    def __init__(self, workers):
        self._workers = workers
        self._start = self._now()

    def _now(self):
        process_s = time.process_time() + sum(worker.cpu_s() for worker in self._workers)
        return time.perf_counter(), read_machine_cpu_s(), process_s

    def cores(self):
        """Return the busy cores; None if unknown."""
        (began, busy, process_before), (now, busy_now, process_now) = self._start, self._now()
        if busy is None or now <= began:
            return None
        return round(
            max(0.0, (busy_now - busy - (process_now - process_before)) / (now - began)), 2
        )


def take_turns(sides, steps, warmup):
    """Steps of both sides, one at a time; the one that goes first changes.

    Args:
        sides: name -> worker.
    Returns: name -> answers of the warm-up; name -> answers after it.
    """
    answers = {name: [] for name in sides}
    for index in range(warmup + steps):
        for name in sides if index % 2 == 0 else reversed(sides):
            answers[name].append(sides[name].step())
    return tuple(
        {name: steps_by_part[part] for name, steps_by_part in answers.items()}
        for part in (slice(warmup), slice(warmup, None))
    )
