"""Supervision of worker and gate: a death is noticed at once, a hang within seconds, a server that is gone as well."""

import os
import signal
import socket
import sys
import time

import pytest
from helpers.waiting import wait_for

from posttrain.online import supervision
from posttrain.online.supervision import (
    HANG_SECONDS,
    STARVED_SECONDS,
    Heartbeat,
    StandbyProcess,
    SupervisedProcess,
    read_processor_waits,
)

BEAT_ONCE = "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'.'); time.sleep(600)"
DIE = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'.'); sys.exit(3)"


@pytest.fixture
def supervised(tmp_path, request):
    """A function that makes a supervised process of some code, on a clock that stands in `now[0]`."""

    def make(code):
        now, told = [100.0], []
        command = [sys.executable, "-S", "-c", code]
        found = SupervisedProcess(
            "worker", command, tmp_path / "log ü", clock=lambda: now[0], report_exit=told.append
        )
        request.addfinalizer(found.stop_process)
        return found, now, told

    return make


def step_until(process, condition, what):
    def look():
        process.step()
        return condition()

    wait_for(look, what)


def test_a_hang_is_noticed_within_three_seconds_and_the_next_start_is_at_once(supervised):
    process, now, told = supervised(BEAT_ONCE)
    step_until(process, lambda: process.is_up, "its first heartbeat")
    first = process.process.pid
    now[0] += HANG_SECONDS - 0.1
    process.step()
    assert process.process.pid == first and not told
    now[0] += 0.2
    process.step()
    assert HANG_SECONDS < 3 and told == [
        f"the worker sent no heartbeat for {HANG_SECONDS:g} s and was killed"
    ]
    process.step()
    assert process.process is not None and process.process.pid != first and process.restarts == 1


def test_one_that_waits_for_a_processor_is_no_hang(supervised, monkeypatch):
    process, now, told = supervised(BEAT_ONCE)
    waited = {"1": 5.0, "2": 1.0}
    monkeypatch.setattr(supervision, "read_processor_waits", lambda pid: dict(waited))
    step_until(process, lambda: process.is_up, "its first heartbeat")
    now[0] += 10.0
    waited["2"] += 9.0  # of 10 silent seconds
    process.step()
    assert process.is_up and not told
    now[0] += 2.0  # 12 seconds, of which it waited for 9: 3 are its own
    process.step()
    assert not process.is_up and "no heartbeat for 2.5 s" in told[0]


def test_one_that_never_gets_a_processor_is_started_again_at_last(supervised, monkeypatch):
    process, now, told = supervised(BEAT_ONCE)
    monkeypatch.setattr(supervision, "read_processor_waits", lambda pid: {"1": now[0]})
    step_until(process, lambda: process.is_up, "its first heartbeat")
    now[0] += STARVED_SECONDS - 0.1
    process.step()
    assert process.is_up
    now[0] += 0.2
    process.step()
    assert told


def test_time_that_a_process_waits_for_a_processor_is_read():
    before = read_processor_waits(os.getpid())
    assert str(os.getpid()) in before and all(waited >= 0 for waited in before.values())
    assert read_processor_waits(2**22 + 1) == {}


def test_a_death_is_noticed_at_once_and_one_that_comes_again_waits_longer(supervised):
    process, now, told = supervised(DIE)
    waits = []
    for _ in range(4):
        step_until(process, lambda: process.process is None, "its end")
        waits.append(process._retry_at - now[0])
        now[0] = process._retry_at
    assert waits == [0.0, 0.5, 1.0, 2.0] and told[0] == "the worker ended with exit code 3"
    now[0] += 100  # one that lived long begins anew
    process.step()
    now[0] += 100
    step_until(process, lambda: process.process is None, "its end")
    assert process.failures == 1
    for lived, failures in ((9, 2), (11, 1)):
        now[0] = process._retry_at
        process.step()
        now[0] += lived
        step_until(process, lambda: process.process is None, "its end")
        assert process.failures == failures


def test_the_reason_for_an_end_is_told(supervised):
    process, _, told = supervised(
        "print('begins'); print('model.path: is not there\\n'); raise SystemExit(2)"
    )
    process._log.write_text("of an earlier process\n")
    for _ in range(2):
        step_until(process, lambda: process.process is not None, "its start")
        step_until(process, lambda: process.process is None, "its end")
        process._retry_at = 0.0
    assert told == ["the worker ended with exit code 2: model.path: is not there"] * 2


def test_what_cannot_be_started_is_tried_again(supervised):
    process, now, told = supervised(DIE)
    process._command = ["/no/such/program"]
    process.step()
    assert (
        process.process is None and "cannot be started" in told[0] and process._retry_at == now[0]
    )


def test_stop_ends_the_whole_group(supervised):
    process, _, told = supervised(BEAT_ONCE)
    step_until(process, lambda: process.is_up, "its first heartbeat")
    child = process.process
    process.stop()
    assert child.returncode == -signal.SIGTERM and process.process is None and not told


@pytest.fixture
def beating(monkeypatch):
    monkeypatch.setattr(supervision, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(supervision, "IDLE_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, theirs.detach()
    ours.close()


def beats(ours):
    try:
        return len(ours.recv(65536))
    except BlockingIOError:
        return 0


def test_one_that_only_waits_has_to_say_so_and_work_has_its_own_time(beating):
    ours, descriptor = beating
    with Heartbeat(descriptor, work_seconds=60.0) as heart:
        heart.report_working()
        wait_for(lambda: beats(ours) > 0, "a heartbeat in the middle of work")
        heart.report_waiting()
        time.sleep(0.2)
        beats(ours)
        time.sleep(0.1)
        assert beats(ours) == 0  # the main thread said nothing

        def said() -> bool:
            heart.report_waiting()
            return beats(ours) > 0

        wait_for(said, "a heartbeat")


def test_without_its_server_it_stops(beating, monkeypatch):
    ours, descriptor = beating
    sent = []
    monkeypatch.setattr(supervision.os, "kill", lambda pid, number: sent.append(number))
    with Heartbeat(descriptor, work_seconds=60.0):
        ours.close()
        wait_for(lambda: sent, "the signal")
    assert sent == [signal.SIGTERM]


def test_one_that_nobody_supervises_beats_nowhere():
    with Heartbeat(None, 1.0) as heart:
        heart.report_working(), heart.report_waiting()
        assert not heart._thread.is_alive()


SPARE = (
    "import socket, sys, time; s = socket.socket(fileno=int(sys.argv[1])); s.send(b'r');"
    "part = s.recv(64); print(part.decode(), flush=True); s.send(b'.') if part else None; time.sleep(600)"
)


def test_a_spare_takes_the_place_of_one_that_died(supervised, tmp_path, request):
    process, _, _ = supervised(BEAT_ONCE)
    process._standby = spare = StandbyProcess(
        [sys.executable, "-S", "-c", SPARE], tmp_path / "standby.log"
    )
    request.addfinalizer(spare.stop_process)
    step_until(process, lambda: process.is_up, "its first heartbeat")
    spare.ensure_started()
    waiting = spare.process
    spare.ensure_started()
    assert spare.process is waiting
    process.process.kill()
    step_until(process, lambda: process.process is None, "its end")
    time.sleep(0.3)  # the spare has to be ready; else another process is started
    process.step()
    assert process.process is waiting and spare.process is None
    step_until(process, lambda: process.is_up, "the spare's heartbeat")
    assert (tmp_path / "standby.log").read_text().startswith("worker")
