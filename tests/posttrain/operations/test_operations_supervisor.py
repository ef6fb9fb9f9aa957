"""`posttrain up`, `status`, `down` with fake servers: starts, crashes, signals, and no leftover processes."""

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
from rl_core.json_client import fetch_json

SCRIPT = ROOT / "tests/helpers/fake_servers.py"


class ServerWorld:
    def __init__(self, output: Path):
        self.output = output
        self.prefect, self.mlflow = free_ports(2)
        external_variables = (
            "PREFECT_API_URL",
            "MLFLOW_TRACKING_URI",
            "POSTTRAIN_DATABASE",
            "PREFECT_PROFILE",
        )
        self.environment = {
            name: value for name, value in os.environ.items() if name not in external_variables
        }
        self.environment["PYTHONPATH"] = str(ROOT)

    def start(self, command: str, *options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), command, "--output", str(self.output), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            preexec_fn=_reset_signal_handlers,
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

    def list_leftovers(self) -> list[int]:
        return [process.pid for process in find_marked_processes(format_mark(self.output))]


@pytest.fixture
def world(tmp_path):
    world = ServerWorld(tmp_path)
    yield world
    world.call("down")


def _reset_signal_handlers() -> None:
    """Reset signals that nohup or a background shell may have set to ignored."""
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


def test_detached_up_repair_crashes_and_down(world):
    code, text = world.call("up", "--detach")
    assert (
        code == 0 and f"http://127.0.0.1:{world.prefect}" in text and "pool     posttrain" in text
    )
    assert len(world.list_leftovers()) == 6  # two keepers, two servers, a child of each
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
    )  # the keeper: its server ends too, and both are restarted
    wait_for(lambda: world.status()["services"][0]["restarts"] == 2 and world.status()["code"] == 0)
    assert len(world.list_leftovers()) == 6

    code, text = world.call("down")
    assert (code, text.splitlines()[-1]) == (0, "stopped")
    assert world.list_leftovers() == [] and not (world.output / "operations/state.json").exists()
    assert world.call("status")[0] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_closed_terminal_stop_everything(world, number):
    child = world.up()
    read_until(child, "Ctrl-C")
    assert len(world.list_leftovers()) == 6
    child.send_signal(number)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "stopped; nothing is left running" in text
    assert world.list_leftovers() == []


def test_saving_server_is_awaited(world):
    """Saving takes longer than other commands may after SIGTERM."""
    (world.output / "mlflow.breaks.slow").touch()
    child = world.up()
    read_until(child, "Ctrl-C")
    child.send_signal(signal.SIGTERM)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "stopped; nothing is left running" in text
    assert (world.output / "mlflow.breaks.saved").exists() and world.list_leftovers() == []


def test_sigkill_of_the_supervisor_leaves_nothing(world):
    child = world.up()
    read_until(child, "Ctrl-C")
    child.kill()
    child.wait()
    wait_for(lambda: world.list_leftovers() == [])
    code, text = world.call("status")
    assert code == 1 and "not running" in text
    code, text = world.call("up", "--detach")
    assert code == 0 and world.status()["code"] == 0


@pytest.mark.slow
def test_next_up_ends_leftovers(world):
    child = world.up()
    read_until(child, "Ctrl-C")
    keepers = [service["process"]["pid"] for service in world.status()["services"]]
    for number in (
        signal.SIGSTOP,
        signal.SIGKILL,
    ):  # stopped first, because a keeper cleans up once its supervisor ends
        for pid in [child.pid, *keepers]:
            os.kill(pid, number)
    child.wait()
    leftovers = wait_for(world.list_leftovers)  # at least the servers' children
    code, text = world.call("up", "--detach")
    assert code == 0, text
    assert not set(leftovers) & set(world.list_leftovers()) and world.status()["code"] == 0


def test_failed_start_is_explained_and_stops_the_others(world):
    (world.output / "prefect.breaks").touch()
    for options in ((), ("--detach",)):
        code, text = world.call("up", *options)
        explained = "the prefect server ended with exit code 4; another process has taken the port"
        assert code == 1 and explained in text, text
        assert world.list_leftovers() == []


@pytest.mark.slow
def test_failed_repair_is_reported(world):
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


def test_taken_port_is_an_early_error(world):
    with socket.create_server(("127.0.0.1", world.prefect)):
        code, text = world.call("up")
    assert (
        code == 2
        and f"port {world.prefect}, meant for the prefect server, is taken by process {os.getpid()}"
        in text
    )
    assert world.list_leftovers() == []


@pytest.mark.slow
def test_concurrent_ups_start_once(world):
    children = [world.up("--detach") for _ in range(2)]
    texts = [child.communicate(timeout=120)[0] for child in children]
    assert sorted(child.returncode for child in children) in ([0, 0], [0, 1]), texts
    assert world.status()["code"] == 0 and len(world.list_leftovers()) == 6
