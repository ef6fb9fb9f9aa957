"""Process identity and ports; a keeper ends its server's whole process tree."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import wait_for

from posttrain.operations.processes import (
    MARK_VARIABLE,
    ProcessId,
    check_port,
    check_ports,
    describe_port_holder,
    find_marked_processes,
    format_mark,
    is_port_free,
    terminate_marked,
)
from rl_core.errors import SettingsError
from rl_core.processes.children import spawn_server
from rl_core.processes.subreaper import list_descendants

# A server with a child in another session, as a worker has: prints both ids.
SERVER = """
import os, subprocess, sys, time
code = "import signal, sys, time\\n" + sys.argv[1] + "\\nprint('ready', flush=True)\\ntime.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def read_process_ids(log: Path) -> list[ProcessId]:
    """Read the process ids that a SERVER printed."""

    def read_last_line():
        lines = log.read_text().splitlines()
        return len(lines) > 1 and lines[-1].split()

    return [
        process for pid in wait_for(read_last_line) if (process := ProcessId.from_pid(int(pid)))
    ]


def start_keeper(
    tmp_path: Path, then: str, child: str = "pass", **seconds
) -> tuple[subprocess.Popen, list[ProcessId]]:
    command = [sys.executable, "-c", SERVER + then, child]
    keeper = spawn_server(command, dict(os.environ), tmp_path, tmp_path / "log", **seconds)
    ids = read_process_ids(tmp_path / "log")
    assert len(ids) == 2 and all(process.is_alive for process in ids)
    return keeper, ids


def test_process_identity_is_pid_and_start_time():
    process = ProcessId.from_pid(os.getpid())
    assert process is not None and process.pid == os.getpid() and process.is_alive
    reused = dataclasses.replace(process, started=process.started - 1)
    assert not reused.is_alive
    assert not reused.send_signal(signal.SIGKILL)  # otherwise this test would end here
    assert not dataclasses.replace(process, boot="another").is_alive


def test_zombie_counts_as_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: ProcessId.from_pid(child.pid) is None)
    assert os.path.exists(f"/proc/{child.pid}"), "not reaped yet: a zombie"
    assert child.wait() == 0


def test_sigterm_to_the_keeper_ends_a_child_in_another_session(tmp_path):
    keeper, ids = start_keeper(tmp_path, "time.sleep(100)", soft=0.1)
    assert {process.pid for process in ids} <= set(list_descendants(keeper.pid))
    keeper.terminate()
    assert keeper.wait(30) == 128 + signal.SIGTERM
    assert not any(process.is_alive for process in ids)


def test_what_ignores_sigterm_is_killed(tmp_path):
    keeper, ids = start_keeper(tmp_path, "time.sleep(100)", STUBBORN, soft=0.1, grace=0.5)
    keeper.terminate()
    keeper.wait(30)
    assert not any(process.is_alive for process in ids)


def test_children_end_before_the_server(tmp_path):
    """The server records when it gets SIGTERM; its child gets it first and takes half a second to save."""
    then = (
        "import signal\ndef stop(*a): print('stopped', child.poll(), flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "while True: time.sleep(0.1); child.poll()"
    )
    saving = "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.5), sys.exit(5)))"
    keeper, _ = start_keeper(tmp_path, then, saving, lead=60.0, soft=60.0, grace=60.0)
    keeper.terminate()
    assert keeper.wait(60) == 0
    assert (tmp_path / "log").read_text().splitlines()[-1] == "stopped 5"


def test_second_sigterm_kills_immediately(tmp_path):
    keeper, ids = start_keeper(tmp_path, "time.sleep(100)", STUBBORN, soft=1000.0, grace=1000.0)
    keeper.terminate()
    wait_for(lambda: not ids[0].is_alive)
    keeper.terminate()
    keeper.wait(30)
    assert not any(process.is_alive for process in ids)


# On SIGTERM the first thread ends, as early in the exit of a large process; the others live on for a second.
SLOW_EXIT = """
import ctypes, os, signal, sys, threading, time
SYS_EXIT = 60 if os.uname().machine == "x86_64" else 93
def end_slowly(number, frame):
    threading.Thread(target=lambda: (time.sleep(1.0), os._exit(143))).start()
    ctypes.CDLL(None).syscall(SYS_EXIT, 0)
signal.signal(signal.SIGTERM, end_slowly)
print(os.getpid(), os.getpid(), flush=True)
time.sleep(100)
"""


def test_the_exit_code_is_that_of_the_server_although_its_first_thread_ends_before(tmp_path):
    """Such a process looks like a zombie; `service up` then said that not every run was saved, at every stop."""
    command = [sys.executable, "-c", SLOW_EXIT]
    keeper = spawn_server(command, dict(os.environ), tmp_path, tmp_path / "log", soft=20, grace=20)
    (server, _) = read_process_ids(tmp_path / "log")
    keeper.terminate()
    assert keeper.wait(30) == 143
    assert not server.is_alive


def test_children_end_with_their_server(tmp_path):
    keeper, ids = start_keeper(tmp_path, "sys.stdout.flush(); time.sleep(0.5); sys.exit(7)")
    assert keeper.wait(30) == 7
    assert not any(process.is_alive for process in ids)


def test_sigkill_of_the_supervisor_ends_everything(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from rl_core.processes.children import spawn_server\n"
        "spawn_server([sys.executable, '-c', sys.argv[1], 'pass'], dict(os.environ), Path(sys.argv[2]), "
        "Path(sys.argv[2]) / 'log', soft=0.1)\ntime.sleep(100)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, SERVER + "time.sleep(100)", str(tmp_path)]
    )
    wait_for((tmp_path / "log").exists)
    ids = read_process_ids(tmp_path / "log")
    assert ids and all(process.is_alive for process in ids)
    supervisor.kill()
    assert supervisor.wait() == -signal.SIGKILL
    wait_for(lambda: not any(process.is_alive for process in ids))


def test_leftovers_are_identified_by_their_mark_and_ended(tmp_path):
    mark, other = format_mark(tmp_path / "one"), format_mark(tmp_path / "two")
    assert mark != other
    server = format_mark(tmp_path / "one", "worker")
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, MARK_VARIABLE: value},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for value in (server, other)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"1\n"
        assert [process.pid for process in find_marked_processes(mark)] == [children[0].pid]
        assert [process.pid for process in find_marked_processes(server)] == [children[0].pid]
        assert find_marked_processes(format_mark(tmp_path / "one", "prefect")) == []
        assert terminate_marked(mark, grace=0.2) == [children[0].pid]
        assert children[0].wait(10) == -signal.SIGKILL and children[1].poll() is None
        assert find_marked_processes(mark) == [] and terminate_marked(mark, grace=0.2) == []
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_taken_port_names_its_holder_and_the_option():
    code = (
        "import socket, time; server = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True); time.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        assert not is_port_free(port)
        with pytest.raises(
            SettingsError, match=rf"port {port}, .* process {child.pid} \(.*--prefect-port"
        ):
            check_port(port, "the prefect server", "--prefect-port")
    finally:
        child.kill()
        child.wait()
    assert is_port_free(port)
    check_port(port, "the prefect server", "--prefect-port")
    assert describe_port_holder(port) == "a process of another user or container"


LISTENER = """
import socket, sys, time
servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(server.getsockname()[1] for server in servers), flush=True)
time.sleep(100)
"""


def test_ports_of_another_team_are_named_with_free_ones(tmp_path):
    environment = {
        **os.environ,
        MARK_VARIABLE: format_mark(tmp_path, "mlflow"),
        "PREFECT_PROFILES_PATH": str(tmp_path / "outputs" / "prefect" / "profiles.toml"),
    }
    team = subprocess.Popen(
        [sys.executable, "-c", LISTENER], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        first, second = (int(port) for port in team.stdout.readline().split())
        wanted = [
            (first, "the mlflow server", "--mlflow-port"),
            (second, "the prefect server", "--prefect-port"),
        ]
        with pytest.raises(SettingsError) as error:
            check_ports(wanted)
        message = str(error.value)
        holder = f"process {team.pid} (a server of `posttrain up` for {tmp_path}/outputs)"
        assert f"{first}, meant for the mlflow server, by {holder}; {second}, meant for" in message
        options = message.partition("choose other ports: ")[2].split()
        assert options[::2] == ["--mlflow-port", "--prefect-port"]
        free = {int(port) for port in options[1::2]}
        assert len(free) == 2 and all(is_port_free(port) for port in free)
        with pytest.raises(SettingsError, match=r"outputs.*; choose another port with --port N"):
            check_port(first, "the training service", "--port N")
    finally:
        team.kill()
        team.communicate()
