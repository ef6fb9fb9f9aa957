"""Supervision: the clock when the system clock is set, restart delays, restarts and their count."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_core.processes.supervision import (
    MonotonicClock,
    RestartPolicy,
    SupervisedProcess,
    handle_signals,
)


def test_signals_are_handled_within_the_block_alone():
    received = []
    previous = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    handlers = {
        signal.SIGUSR1: lambda number, frame: received.append(number),
        signal.SIGUSR2: lambda number, frame: received.append(-number),
    }
    with pytest.raises(ValueError, match="end"), handle_signals(handlers):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        raise ValueError("end")
    assert sorted(received) == sorted([signal.SIGUSR1, -signal.SIGUSR2])
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == previous


def test_clock_does_not_jump(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    clock = MonotonicClock()
    assert clock() == 1000.0
    for wall in (1000.0 + 3600, 1000.0 - 3600):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        monkeypatch.setattr(time, "monotonic", lambda: 57.5)
        assert clock() == 1007.5


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (RestartPolicy(1.0, 60.0, steady_s=120.0), [1, 2, 4, 32, 60, 60, 60]),
        (RestartPolicy(0.5, 30.0, steady_s=10.0, num_immediate=1), [0, 0.5, 1, 8, 16, 30, 30]),
    ],
)
def test_restart_delays_double_up_to_a_limit(policy, delays):
    failures = (1, 2, 3, 6, 7, 8, 10_000)
    assert [policy.compute_delay(count) for count in failures] == delays


class Program(SupervisedProcess):
    """Supervised Python program."""

    def __init__(self, log_path, code):
        super().__init__("program", log_path, RestartPolicy(1.0, 8.0, steady_s=10.0))
        self.command, self.checks, self.exits = [sys.executable, "-S", "-c", code], [], []

    def _spawn_process(self):
        with self.log_path.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log)

    def _check_liveness(self, now):
        self.checks.append(now)
        self._forget_failures_if_steady(now)

    def _describe_exit(self, code):
        self.exits.append(code)
        return f"ended with {code}"


def test_a_process_is_restarted_when_its_delay_has_passed(tmp_path, caplog):
    program = Program(tmp_path / "log", "print('one'); raise SystemExit(3)")
    program.log_path.write_text("of an earlier process\n")
    program.step(100.0)
    program.process.wait(20)
    assert program.read_log_lines(1000) == ["one"] and program.read_log_lines(2) == ["e"]
    program.step(101.0)
    assert program.process is None and program.exits == [3]
    assert (program.failures, program.restarts, program.retry_at) == (1, 1, 102.0)
    assert "program: ended with 3; next start in 1 s" in caplog.text
    program.step(101.9)
    assert program.process is None
    program.step(102.0)
    program.process.wait(20)
    program.step(103.0)
    assert program.retry_at == 105.0  # the second failure in a row
    program.skip_restart_delay()
    assert program.failures == 0
    program.step(103.1)
    program.process.wait(20)
    program.log_path.write_text("new\n")  # replaced: shorter than what earlier processes wrote
    assert program.read_log_lines(1000) == ["new"]
    program.log_path.unlink()
    assert program.read_log_lines(1000) == []


def test_failures_are_forgotten_after_a_long_life(tmp_path):
    program = Program(tmp_path / "log", "import time; time.sleep(600)")
    program.failures = 3
    program.step(0.0)
    program.step(10.0)
    assert program.failures == 3
    program.step(10.5)
    assert program.failures == 0 and program.checks == [10.0, 10.5]
    program.process.kill()
    program.process.wait()


def test_a_start_that_fails_is_tried_again(tmp_path):
    program = Program(tmp_path / "missing" / "log", "")
    program.step(5.0)
    assert program.process is None and (program.failures, program.retry_at) == (1, 6.0)
    program.log_path.parent.mkdir()
    program.step(6.0)
    assert program.process.wait(20) == 0
