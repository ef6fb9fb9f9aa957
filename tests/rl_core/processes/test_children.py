"""Start, stop and parent-death binding of child processes."""

import ast
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from helpers import ROOT
from helpers.waiting import wait_for

from rl_core.processes.children import (
    kill_group,
    signal_group,
    start_child,
    stop_child,
    stop_group,
    wait_or_kill,
)

PARENT = """
import signal, subprocess, sys
from rl_core.processes.children import start_child
child = start_child(["sleep", "600"], death_signal={signal})
print(child.pid, flush=True)
child.wait()
"""
THREADED_PARENT = """
import signal, threading, time
from rl_core.processes.children import start_child
children = []
def start():
    children.append(start_child(["sleep", "600"], death_signal=signal.SIGKILL))
for _ in range(2):
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
time.sleep(0.2)
print(*[child.pid for child in children], *[child.poll() for child in children], flush=True)
time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# A leader with a child in its group that ignores SIGTERM.
FAMILY = (
    "import subprocess, sys, time; "
    f"child = subprocess.Popen([sys.executable, '-c', '{STUBBORN}print(1, flush=True); time.sleep(600)'], "
    "stdout=subprocess.PIPE); child.stdout.readline(); print(child.pid, flush=True); "
)


def start_python(code: str) -> subprocess.Popen[bytes]:
    """Start a program and wait until it has printed a line."""
    child = start_child([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.first_line = child.stdout.readline()
    return child


def test_a_child_outlives_the_thread_that_started_it_and_ends_with_the_process():
    command = [sys.executable, "-c", THREADED_PARENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    first, second, *codes = parent.stdout.readline().decode().split()
    assert codes == ["None", "None"]
    parent.kill()
    parent.wait()
    for pid in (first, second):
        wait_for(lambda pid=int(pid): not psutil.pid_exists(pid), 20)


def test_an_error_of_the_start_reaches_the_thread_that_asked():
    errors = []

    def start():
        try:
            start_child(["/nowhere/program"])
        except FileNotFoundError as error:
            errors.append(error)

    for _ in range(2):  # the thread that forks survives it
        thread = threading.Thread(target=start)
        thread.start()
        thread.join(20)
    assert len(errors) == 2


def test_a_child_leads_a_session_and_writes_its_log(tmp_path):
    log = tmp_path / "logs" / "ü.log"
    code = "import os, sys; print(os.getsid(0) == os.getpid(), os.getcwd()); print('error', file=sys.stderr)"
    for _ in range(2):
        child = start_child(
            [sys.executable, "-u", "-S", "-c", code],
            log=log,
            append_up_to=10_000,
            header="--- started\n",
            folder=tmp_path,
        )
        assert child.wait(20) == 0
    assert log.read_text() == f"--- started\nTrue {tmp_path}\nerror\n" * 2
    start_child(["true"], log=log).wait()
    assert log.read_text() == ""


def test_only_named_descriptors_and_variables_are_inherited():
    reading, writing = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), repr(sorted(os.environ)).encode())"
    child = start_child(
        [sys.executable, "-S", "-c", code, str(writing)],
        environment={"ONE": "1", "LC_ALL": "C"},
        descriptors=[writing],
    )
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert lines.read() == "['LC_ALL', 'ONE']"
    assert child.wait(20) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number):
    code = PARENT.format(signal=int(number))
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        _, alive = psutil.wait_procs([child], timeout=20)
        for process in alive:
            process.kill()
        assert alive == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_of_a_dead_parent_exits():
    code = "import os, sys; from rl_core.processes.children import bind_to_parent; bind_to_parent(2**22 + 1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 1


def test_stop_is_sigterm_and_after_the_grace_sigkill():
    child = start_python("import time; print(1, flush=True); time.sleep(600)")
    assert stop_child(child, 20.0) == -signal.SIGTERM
    assert stop_child(child, 0.0) == -signal.SIGTERM  # already ended
    child = start_python(f"{STUBBORN}print(1, flush=True); time.sleep(600)")
    assert stop_child(child, 0.2) == -signal.SIGKILL
    child = start_python("import sys; print(1, flush=True); sys.exit(3)")
    assert wait_or_kill(child, 20.0) == 3


def test_a_group_is_killed_with_its_stubborn_leader():
    code = f"{STUBBORN}import subprocess, sys; {FAMILY}time.sleep(600)"
    for end in (kill_group, lambda child: stop_group(child, 0.2)):
        leader = start_python(code)
        member = psutil.Process(int(leader.first_line))
        assert end(leader) == -signal.SIGKILL
        member.wait(20)
        assert not signal_group(leader, 0)


def test_a_group_outlives_its_leader_until_it_is_killed():
    leader = start_python(f"{FAMILY}time.sleep(600)")
    member = psutil.Process(int(leader.first_line))
    assert stop_group(leader, 20.0) == -signal.SIGTERM
    assert member.is_running() and signal_group(leader, 0)
    kill_group(leader)
    member.wait(20)


def test_a_program_that_is_missing_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="no_such_program"):
        start_child([str(Path("/no_such_program"))], log=tmp_path / "log")


PRIMITIVES = {"subprocess.Popen", "os.killpg", "os.fork", "multiprocessing.Process"}


def test_children_are_started_and_killed_in_one_place():
    places = {}
    for package in ("rl_core", "tasks", "flows", "posttrain"):
        for path in sorted((ROOT / package).rglob("*.py")):
            calls = {
                ast.unparse(node.func)
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Call)
            }
            if used := calls & PRIMITIVES:
                places[str(path.relative_to(ROOT))] = used
    assert places.pop("rl_core/processes/children.py") == {"subprocess.Popen", "os.killpg"}
    assert places == {  # programs that run without this project on their path
        "rl_core/processes/subreaper.py": {"subprocess.Popen"},
        "rl_core/environments/code_child.py": {"subprocess.Popen", "os.killpg"},
        "rl_core/environments/agent_child.py": {"os.fork"},
        "rl_core/environments/sandbox.py": {"os.fork"},
        "rl_core/environments/subprocess_main.py": {"os.fork"},
    }
