"""Supervision of worker and gate: crashes, hangs, restart delays, lost servers, the standby process."""

import os
import signal
import socket
import sys
import time

import pytest
from helpers.waiting import wait_for

from rl_core.processes import heartbeats
from rl_core.processes.heartbeats import (
    HANG_SECONDS,
    STARVED_SECONDS,
    Heartbeat,
    HeartbeatProcess,
    StandbyProcess,
    read_processor_waits,
)

BEAT_ONCE = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'.'); time.sleep(600)"
BEAT_AND_EXIT = (
    "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'.'); sys.exit(3)"
)


@pytest.fixture
def make_supervised(tmp_path, request):
    """Return a function that supervises a process of some code; it is stepped at the time `now[0]`."""

    def make(code):
        now, reports = [100.0], []
        command = [sys.executable, "-S", "-c", code]
        process = HeartbeatProcess(
            "worker", command, tmp_path / "log ü", report_exit=reports.append
        )
        step = process.step
        process.step = lambda: step(now[0])
        request.addfinalizer(process.stop_process)
        return process, now, reports

    return make


def step_until(process, condition, what):
    def step_and_check():
        process.step()
        return condition()

    wait_for(step_and_check, what)


def test_hang_is_detected_within_three_seconds_and_restarted(make_supervised):
    process, now, reports = make_supervised(BEAT_ONCE)
    step_until(process, lambda: process.is_up, "its first heartbeat")
    first = process.process.pid
    now[0] += HANG_SECONDS - 0.1
    process.step()
    assert process.process.pid == first and not reports
    now[0] += 0.2
    process.step()
    assert HANG_SECONDS < 3 and reports == [
        f"the worker sent no heartbeat for {HANG_SECONDS:g} s and was killed"
    ]
    process.step()
    assert process.process is not None and process.process.pid != first and process.restarts == 1


def test_process_waiting_for_a_processor_does_not_hang(make_supervised, monkeypatch):
    process, now, reports = make_supervised(BEAT_ONCE)
    waited = {"1": 5.0, "2": 1.0}
    monkeypatch.setattr(heartbeats, "read_processor_waits", lambda pid: dict(waited))
    step_until(process, lambda: process.is_up, "its first heartbeat")
    now[0] += 10.0
    waited["2"] += 9.0  # of 10 silent seconds
    process.step()
    assert process.is_up and not reports
    now[0] += 2.0  # 12 seconds, of which it waited for 9: 3 count
    process.step()
    assert not process.is_up and "no heartbeat for 2.5 s" in reports[0]


def test_process_starved_for_long_is_restarted(make_supervised, monkeypatch):
    process, now, reports = make_supervised(BEAT_ONCE)
    monkeypatch.setattr(heartbeats, "read_processor_waits", lambda pid: {"1": now[0]})
    step_until(process, lambda: process.is_up, "its first heartbeat")
    now[0] += STARVED_SECONDS - 0.1
    process.step()
    assert process.is_up
    now[0] += 0.2
    process.step()
    assert reports


def test_read_processor_waits():
    waits = read_processor_waits(os.getpid())
    assert str(os.getpid()) in waits and all(waited >= 0 for waited in waits.values())
    assert read_processor_waits(2**22 + 1) == {}


def test_crash_is_detected_and_repeated_crashes_back_off(make_supervised):
    process, now, reports = make_supervised(BEAT_AND_EXIT)
    delays = []
    for _ in range(4):
        step_until(process, lambda: process.process is None, "its end")
        delays.append(process.retry_at - now[0])
        now[0] = process.retry_at
    assert delays == [0.0, 0.5, 1.0, 2.0] and reports[0] == "the worker ended with exit code 3"
    now[0] += 100  # after a long life the delays start over
    process.step()
    now[0] += 100
    step_until(process, lambda: process.process is None, "its end")
    assert process.failures == 1
    for lived, failures in ((9, 2), (11, 1)):
        now[0] = process.retry_at
        process.step()
        now[0] += lived
        step_until(process, lambda: process.process is None, "its end")
        assert process.failures == failures


def test_exit_reason_is_reported(make_supervised):
    process, _, reports = make_supervised(
        "print('begins'); print('model.path: is not there\\n'); raise SystemExit(2)"
    )
    process.log_path.write_text("of an earlier process\n")
    for _ in range(2):
        step_until(process, lambda: process.process is not None, "its start")
        step_until(process, lambda: process.process is None, "its end")
        process.retry_at = 0.0
    assert reports == ["the worker ended with exit code 2: model.path: is not there"] * 2


def test_failed_start_is_retried(make_supervised):
    process, now, reports = make_supervised(BEAT_AND_EXIT)
    process._command = ["/no/such/program"]
    process.step()
    assert (
        process.process is None and "cannot be started" in reports[0] and process.retry_at == now[0]
    )


def test_stop_ends_the_whole_group(make_supervised):
    process, _, reports = make_supervised(BEAT_ONCE)
    step_until(process, lambda: process.is_up, "its first heartbeat")
    child = process.process
    process.stop_process()
    assert child.returncode == -signal.SIGTERM and process.process is None and not reports


@pytest.fixture
def beating(monkeypatch):
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(heartbeats, "IDLE_SECONDS", 0.1)
    connection, child_end = socket.socketpair()
    connection.setblocking(False)
    yield connection, child_end.detach()
    connection.close()


def count_beats(connection):
    try:
        return len(connection.recv(65536))
    except BlockingIOError:
        return 0


def test_waiting_process_must_report_and_work_has_its_time(beating):
    connection, descriptor = beating
    with Heartbeat(descriptor, work_seconds=60.0) as heartbeat:
        heartbeat.report_working()
        wait_for(lambda: count_beats(connection) > 0, "a heartbeat in the middle of work")
        heartbeat.report_waiting()
        time.sleep(0.2)
        count_beats(connection)
        time.sleep(0.1)
        assert count_beats(connection) == 0  # the main thread reported nothing

        def report_and_check() -> bool:
            heartbeat.report_waiting()
            return count_beats(connection) > 0

        wait_for(report_and_check, "a heartbeat")


def test_process_stops_without_its_server(beating, monkeypatch):
    connection, descriptor = beating
    sent = []
    monkeypatch.setattr(heartbeats.os, "kill", lambda pid, number: sent.append(number))
    with Heartbeat(descriptor, work_seconds=60.0):
        connection.close()
        wait_for(lambda: sent, "the signal")
    assert sent == [signal.SIGTERM]


def test_unsupervised_process_sends_nothing():
    with Heartbeat(None, 1.0) as heartbeat:
        heartbeat.report_working(), heartbeat.report_waiting()
        assert not heartbeat._thread.is_alive()


STANDBY = (
    "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'r');"
    "part = s.recv(64); print(part.decode(), flush=True); s.send(b'.') if part else None; time.sleep(600)"
)


def test_standby_replaces_a_crashed_process(make_supervised, tmp_path, request):
    process, _, _ = make_supervised(BEAT_ONCE)
    process._standby = standby = StandbyProcess(
        [sys.executable, "-S", "-c", STANDBY], tmp_path / "standby.log"
    )
    request.addfinalizer(standby.stop_process)
    step_until(process, lambda: process.is_up, "its first heartbeat")
    standby.ensure_started()
    spare_process = standby.process
    standby.ensure_started()
    assert standby.process is spare_process
    process.process.kill()
    step_until(process, lambda: process.process is None, "its end")
    time.sleep(0.3)  # the standby has to be ready; else another process is started
    process.step()
    assert process.process is spare_process and standby.process is None
    step_until(process, lambda: process.is_up, "the standby's heartbeat")
    assert (tmp_path / "standby.log").read_text().startswith("worker")


def test_a_standby_that_does_not_take_its_role_is_ended(tmp_path):
    """It closed its socket; process and socket were forgotten but lived on."""
    code = (
        "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'r'); s.close();"
        "time.sleep(600)"
    )
    num_files = len(os.listdir("/proc/self/fd"))
    standby = StandbyProcess([sys.executable, "-S", "-c", code], tmp_path / "standby.log")
    standby.ensure_started()
    process = standby.process
    try:
        deadline = time.monotonic() + 20
        while standby.process is not None and time.monotonic() < deadline:
            assert standby.claim_process("worker") is None
            time.sleep(0.05)
        assert standby.process is None and process.poll() is not None
        assert len(os.listdir("/proc/self/fd")) == num_files
    finally:
        process.kill()
        process.wait()
