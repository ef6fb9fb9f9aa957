"""`posttrain ui`: ports, refusals, and complete shutdown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cli.ui import PageServer, PageServers
from rl_core.errors import BackendError, SettingsError
from rl_core.processes.children import signal_group


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_only_loopback(tmp_path):
    with pytest.raises(SettingsError, match="not loopback"):
        PageServers(tmp_path, host="0.0.0.0")


def test_a_taken_port_gives_the_next_free_one(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        pages = PageServers(tmp_path, mlflow_port=taken, prefect_port=taken)
        first, second = (
            pages._build_service("MLflow", "/health"),
            pages._build_service("Prefect", "/api/health"),
        )
        ports = [int(service.url.rsplit(":", 1)[1]) for service in (first, second)]
    assert taken < ports[0] < ports[1]
    assert first.notes == [f"(port {taken} is taken)"] == second.notes


def test_external_services_are_linked_and_not_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    with PageServers(tmp_path, "http://me:secret@mlflow.example:5000") as pages:
        assert [(page.url, page.process) for page in pages.services] == [
            ("http://mlflow.example:5000", None),
            ("http://prefect.example:4200", None),
        ]


def test_a_server_that_dies_says_why_and_the_other_one_is_stopped(tmp_path, monkeypatch):
    lasting = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )

    def broken(self):
        service = self._build_service("Prefect", "/api/health")
        self._start_process(service, ["no_such_module_here"], {})
        return service

    monkeypatch.setattr(
        PageServers,
        "_start_mlflow",
        lambda self: PageServer("MLflow", "u", "http://127.0.0.1:9", None, lasting),
    )
    monkeypatch.setattr(PageServers, "_start_prefect", broken)
    with pytest.raises(
        BackendError, match=r"Prefect server ended \(exit code 1\)[\s\S]*no_such_module_here"
    ):
        PageServers(tmp_path).__enter__()
    assert lasting.poll() is not None


def test_a_group_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.cli.ui.STOP_SECONDS", 0.5)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(60)"
    )
    stubborn = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None and stubborn.stdout.readline() == b"ready\n"
    pages = PageServers(tmp_path)
    pages.services = [PageServer("x", "u", process=stubborn)]
    pages.stop_processes()
    assert stubborn.returncode == -signal.SIGKILL and not signal_group(stubborn, 0)


def list_members(session_leaders: set[int]) -> list[int]:
    """Return the living processes of these sessions."""
    alive = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) in session_leaders and fields[0] != "Z":
                alive.append(int(entry.name))
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_both_pages_answer_and_nothing_is_left_behind(tmp_path, number):
    code = (
        "import sys; from pathlib import Path; from posttrain.cli.ui import serve_web_pages\n"
        "serve_web_pages(Path(sys.argv[1]), mlflow_port=15000, prefect_port=14200)"
    )
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")}
    pages = subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert pages.stdout is not None
    lines = []
    for line in pages.stdout:
        lines.append(line)
        if line.startswith("Ctrl-C"):
            break
    text = "".join(lines)
    assert "http://127.0.0.1:15" in text and "http://127.0.0.1:14" in text
    children = {
        int(pid) for pid in Path(f"/proc/{pages.pid}/task/{pages.pid}/children").read_text().split()
    }
    assert len(children) == 2 and len(list_members(children)) >= 2
    pages.send_signal(number)
    pages.wait(30)
    deadline = time.monotonic() + 30
    while list_members(children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list_members(children) == []
