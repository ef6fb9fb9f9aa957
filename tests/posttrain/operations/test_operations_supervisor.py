"""`posttrain up`, `status`, `down` over servers of the test: starts, crashes, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.waiting import free_ports, wait_for

from posttrain.operations.processes import find_marked_processes, format_mark
from posttrain.operations.services import fetch_json

SCRIPT = ROOT / "tests/helpers/fake_servers.py"


class World:
    def __init__(self, output: Path):
        self.output = output
        self.prefect, self.mlflow = free_ports(2)
        elsewhere = (
            "PREFECT_API_URL",
            "MLFLOW_TRACKING_URI",
            "POSTTRAIN_DATABASE",
            "PREFECT_PROFILE",
        )
        self.environment = {
            name: value for name, value in os.environ.items() if name not in elsewhere
        }
        self.environment["PYTHONPATH"] = str(ROOT)

    def start(self, command: str, *options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), command, "--output", str(self.output), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            preexec_fn=_heed_signals,
        )

    def up(self, *options: str) -> subprocess.Popen:
        return self.start(
            "up", "--prefect-port", str(self.prefect), "--mlflow-port", str(self.mlflow), *options
        )

    def call(self, command: str, *options: str) -> tuple[int, str]:
        child = self.up(*options) if command == "up" else self.start(command, *options)
        text, _ = child.communicate(timeout=120)
        return child.returncode, text

    def status(self) -> dict:
        code, text = self.call("status", "--json")
        return {"code": code, **json.loads(text)}

    def left(self) -> list[int]:
        return [process.pid for process in find_marked_processes(format_mark(self.output))]


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.call("down")


def _heed_signals() -> None:
    """Default handlers of signals that nohup or a background shell may have set to ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def read_until(child: subprocess.Popen, start: str) -> str:
    lines = []
    assert child.stdout is not None
    for line in child.stdout:
        lines.append(line)
        if line.startswith(start):
            return "".join(lines)
    raise AssertionError("".join(lines))


def test_in_the_background_again_crashes_and_down(world):
    code, text = world.call("up", "--detach")
    assert (
        code == 0 and f"http://127.0.0.1:{world.prefect}" in text and "pool     posttrain" in text
    )
    assert len(world.left()) == 6  # two keepers, two servers, a child of each
    state = world.status()
    assert state["code"] == 0 and state["phase"] == "up"
    assert [(service["name"], service["phase"]) for service in state["services"]] == [
        ("mlflow", "up"),
        ("prefect", "up"),
    ]

    first = fetch_json(f"http://127.0.0.1:{world.mlflow}")
    code, text = world.call("up")
    assert code == 0 and "already running; registering again" in text
    assert (
        world.status()["repairs"] == 1 and fetch_json(f"http://127.0.0.1:{world.mlflow}") == first
    )

    os.kill(first, signal.SIGKILL)
    wait_for(lambda: world.status()["services"][0]["restarts"] == 1 and world.status()["code"] == 0)
    assert fetch_json(f"http://127.0.0.1:{world.mlflow}") != first
    service = world.status()["services"][0]
    assert service["message"] == "was ended by SIGKILL"
    os.kill(
        service["process"]["pid"], signal.SIGKILL
    )  # the keeper: what it kept goes too, and all starts anew
    wait_for(lambda: world.status()["services"][0]["restarts"] == 2 and world.status()["code"] == 0)
    assert len(world.left()) == 6

    code, text = world.call("down")
    assert (code, text.splitlines()[-1]) == (0, "stopped")
    assert world.left() == [] and not (world.output / "operations/state.json").exists()
    assert world.call("status")[0] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_stop_everything(world, number):
    child = world.up()
    read_until(child, "Ctrl-C")
    assert len(world.left()) == 6
    child.send_signal(number)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "stopped; nothing is left running" in text
    assert world.left() == []


def test_a_server_that_saves_is_waited_for(world):
    """Longer than a command has after SIGTERM."""
    (world.output / "mlflow.breaks.slow").touch()
    child = world.up()
    read_until(child, "Ctrl-C")
    child.send_signal(signal.SIGTERM)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "stopped; nothing is left running" in text
    assert (world.output / "mlflow.breaks.saved").exists() and world.left() == []


def test_sigkill_of_the_supervisor_leaves_nothing_and_up_starts_anew(world):
    child = world.up()
    read_until(child, "Ctrl-C")
    child.kill()
    child.wait()
    wait_for(lambda: world.left() == [])
    code, text = world.call("status")
    assert code == 1 and "not running" in text
    code, text = world.call("up", "--detach")
    assert code == 0 and world.status()["code"] == 0


def test_what_survives_supervisor_and_keepers_is_cleared_by_the_next_up(world):
    child = world.up()
    read_until(child, "Ctrl-C")
    keepers = [service["process"]["pid"] for service in world.status()["services"]]
    for number in (
        signal.SIGSTOP,
        signal.SIGKILL,
    ):  # stopped first, as a keeper cleans up once its supervisor is gone
        for pid in [child.pid, *keepers]:
            os.kill(pid, number)
    child.wait()
    left = wait_for(world.left)  # the servers' children, at least
    code, text = world.call("up", "--detach")
    assert code == 0, text
    assert not set(left) & set(world.left()) and world.status()["code"] == 0


def test_a_server_that_does_not_start_says_why_and_the_others_are_stopped(world):
    (world.output / "prefect.breaks").touch()
    for options in ((), ("--detach",)):
        code, text = world.call("up", *options)
        assert (
            code == 1
            and "the prefect server ended with exit code 4; another process has taken the port" in text
        )
        assert world.left() == []


def test_a_repair_that_does_not_succeed_says_so(world):
    assert world.call("up", "--detach")[0] == 0
    (world.output / "prefect.breaks").touch()
    os.kill(fetch_json(f"http://127.0.0.1:{world.prefect}"), signal.SIGKILL)
    wait_for(lambda: world.status()["services"][1]["restarts"] > 0)
    code, text = world.call("up")
    assert code == 1 and "the prefect server ended with exit code 4 repeatedly; log: " in text
    code, text = world.call("status")
    assert code == 1 and "ended with exit code 4; next start in" in text
    (world.output / "prefect.breaks").unlink()
    assert world.call("up")[0] == 0 and world.status()["code"] == 0


def test_a_taken_port_is_an_error_before_anything_starts(world):
    with socket.create_server(("127.0.0.1", world.prefect)):
        code, text = world.call("up")
    assert (
        code == 2
        and f"port {world.prefect}, meant for the prefect server, is taken by process {os.getpid()}"
        in text
    )
    assert world.left() == []


def test_two_at_once_are_one(world):
    children = [world.up("--detach") for _ in range(2)]
    texts = [child.communicate(timeout=120)[0] for child in children]
    assert sorted(child.returncode for child in children) in ([0, 0], [0, 1]), texts
    assert world.status()["code"] == 0 and len(world.left()) == 6
