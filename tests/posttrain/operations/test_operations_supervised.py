"""One managed server over time, with a fake clock and process; the state file and the status table."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from posttrain.operations import connection
from posttrain.operations.connection import format_status_table
from posttrain.operations.managed_service import RESTART_POLICY, ManagedService
from posttrain.operations.processes import ProcessId
from posttrain.operations.services import ServiceSpec
from posttrain.operations.state import (
    ServerOptions,
    ServiceState,
    StatePaths,
    SupervisorState,
    is_running,
    read_state,
    write_state,
)
from rl_core.errors import FolderBusy
from rl_core.json_client import RequestError
from rl_core.storage.locks import FolderLock


class FakeProcess:
    """A process that runs until the test sets its return code."""

    def __init__(self):
        self.pid, self.returncode = os.getpid(), None

    def poll(self):
        return self.returncode


@pytest.fixture
def world(tmp_path):
    """Create a managed server with its processes, and whether it answers."""

    class World:
        def __init__(self):
            self.answers, self.processes, self.signals = False, [], []

    world = World()

    def start(command, environment, folder, log, **seconds):
        world.processes.append(FakeProcess())
        return world.processes[-1]

    service = ServiceSpec(
        "prefect", ("x",), {}, tmp_path, "http://127.0.0.1:1", lambda: world.answers
    )
    world.server = ManagedService(service, tmp_path / "log", start)
    world.server.send_signal = world.signals.append
    return world


def test_restart_delays_double_up_to_a_minute():
    assert [RESTART_POLICY.compute_delay(failures) for failures in (1, 2, 3, 6, 7, 8, 10_000)] == [
        1,
        2,
        4,
        32,
        60,
        60,
        60,
    ]


def test_from_start_to_up(world):
    server, state = world.server, world.server.state
    server.step(100.0)
    assert (
        state.phase == "starting"
        and state.since == 100.0
        and state.process == ProcessId.from_pid(os.getpid())
    )
    server.step(101.0)
    assert not server.is_up
    world.answers = True
    server.step(102.0)
    assert server.is_up and len(world.processes) == 1


def test_crashes_are_restarted_with_growing_delays(world):
    server, state = world.server, world.server.state
    world.answers = True
    server.step(100.0)
    server.step(100.5)
    assert server.is_up
    world.processes[-1].returncode = 128 + signal.SIGKILL
    server.step(110.0)
    assert (state.phase, state.retry_at, state.restarts, state.process) == (
        "waiting",
        111.0,
        1,
        None,
    )
    assert state.message == "was ended by SIGKILL"
    server.step(110.9)
    assert len(world.processes) == 1
    server.step(111.0)
    assert len(world.processes) == 2 and state.phase == "starting"
    world.processes[-1].returncode = 3
    server.step(112.0)
    assert (state.retry_at, state.restarts, state.message) == (114.0, 2, "ended with exit code 3")
    server.skip_restart_delay()
    server.step(112.1)
    assert len(world.processes) == 3


def test_failures_are_forgotten_after_steady_work(world):
    server, state = world.server, world.server.state
    world.answers = True
    server.failures = 5
    server.step(0.0)
    server.step(1.0)
    assert server.failures == 5
    server.step(200.0)
    assert server.failures == 0
    world.processes[-1].returncode = 1
    server.step(201.0)
    assert state.retry_at == 202.0


def test_hanging_server_is_restarted(world):
    server, state = world.server, world.server.state
    world.answers = True
    server.step(0.0)
    server.step(1.0)
    world.answers = False
    server.step(100.0)
    assert world.signals == []
    server.step(122.0)  # 121 s after it last answered
    assert world.signals == [signal.SIGTERM]
    world.processes[-1].returncode = 128 + signal.SIGTERM
    server.step(123.0)
    assert state.phase == "waiting" and state.message == "did not answer for 120 s"


def test_server_that_never_answers_is_ended(world):
    server = world.server
    server.step(0.0)
    server.step(600.0)
    assert world.signals == []
    server.step(601.0)
    assert world.signals == [signal.SIGTERM]


def test_a_crash_after_a_hang_is_described_by_its_exit(world):
    """The words of the hang stayed in the state and were repeated after every later crash."""
    server, state = world.server, world.server.state
    world.answers = True
    server.step(0.0)
    server.step(1.0)
    world.answers = False
    server.step(200.0)
    assert state.message == "did not answer for 120 s"
    world.processes[-1].returncode = 128 + signal.SIGTERM
    server.step(201.0)
    assert (state.phase, state.message) == ("waiting", "did not answer for 120 s")
    server.step(210.0)
    assert len(world.processes) == 2
    world.processes[-1].returncode = 3
    server.step(211.0)
    assert state.message == "ended with exit code 3"


def test_taken_port_is_awaited(world, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        service = ServiceSpec("prefect", ("x",), {}, tmp_path, "", lambda: True, port=port)
        server = ManagedService(service, tmp_path / "log", lambda *a, **k: FakeProcess())
        server.step(10.0)
        assert server.state.phase == "waiting" and server.state.message == f"port {port} is taken"
    server.step(11.0)
    assert server.state.phase == "starting"


def build_state() -> SupervisorState:
    process = ProcessId.from_pid(os.getpid())
    assert process is not None
    services = [
        ServiceState("mlflow", "http://127.0.0.1:5000", "up", process, since=1000.0),
        ServiceState(
            "worker",
            "w",
            "waiting",
            since=1000.0,
            restarts=2,
            retry_at=1130.0,
            message="died",
            log="x.log",
        ),
    ]
    registration = {
        "problem": "",
        "pool": "made",
        "gpu_slots": 1,
        "deployments": ["post-training/demo"],
    }
    registration["automations"] = [{"name": "crash zombies", "what": "made", "note": ""}]
    return SupervisorState(
        process, ServerOptions(mlflow_port=5001), "up", services, 3, registration
    )


def test_state_round_trip(tmp_path):
    paths = StatePaths(tmp_path)
    write_state(paths, build_state())
    assert read_state(paths) == build_state()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 99, "services": []}']
)
def test_unreadable_state_is_none(tmp_path, text):
    paths = StatePaths(tmp_path)
    assert read_state(paths) is None
    paths.folder.mkdir()
    paths.state_file.write_text(text)
    assert read_state(paths) is None


def test_lock_decides_whether_a_supervisor_runs(tmp_path):
    paths = StatePaths(tmp_path)
    write_state(paths, build_state())
    assert not is_running(paths)
    with FolderLock(paths.lock_file):
        assert is_running(paths)
        with pytest.raises(FolderBusy), FolderLock(paths.lock_file):
            pass
    assert not is_running(paths)


def test_status_table():
    text = format_status_table(build_state(), Path("outputs"), now=1125.0)
    lines = text.splitlines()
    assert lines[0] == f"up; supervisor: process {os.getpid()}; database: sqlite"
    assert lines[2].split() == [
        "mlflow",
        "up",
        str(os.getpid()),
        "2",
        "min",
        "0",
        "http://127.0.0.1:5000",
    ]
    assert lines[3].split(maxsplit=3) == [
        "worker",
        "waiting",
        "2",
        "died; next start in 5 s; log: x.log",
    ]
    assert "deployed post-training/demo" in text and "automation crash zombies: made" in text


def test_a_work_pool_that_was_not_made_yet_was_not_deleted(monkeypatch):
    def answer_not_found(*_, **__):
        raise RequestError("no such pool", 404)

    monkeypatch.setattr(connection, "fetch_json", answer_not_found)
    state = build_state()
    state.services.append(ServiceState("prefect", "http://127.0.0.1:4200", "up"))
    assert "work pool 'posttrain' was deleted" in format_status_table(state, Path("outputs"))
    state.registration = {}  # it is registered at the moment
    assert "work pool" not in format_status_table(state, Path("outputs"))


def test_logs_are_rotated(tmp_path, monkeypatch):
    from rl_core.processes import children

    monkeypatch.setattr(children, "MAX_SERVER_LOG_BYTES", 100)
    log = Path(tmp_path / "logs" / "x.log")
    log.parent.mkdir()
    log.write_text("old " * 50)
    children.spawn_server(["/bin/true"], {}, tmp_path, log).wait()
    assert log.with_name("x.log.1").read_text() == "old " * 50 and "old" not in log.read_text()
