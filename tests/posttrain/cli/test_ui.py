"""`posttrain ui`: ports, refusals, and complete shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.cli import ui
from posttrain.cli.main import main
from posttrain.cli.ui import PageServer, PageServers, _announce_page
from rl_core.errors import BackendError, SettingsError
from rl_core.processes.children import signal_group
from tasks.tracking import Tracking


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


def test_each_page_is_announced_once_it_answers(tmp_path, monkeypatch, capsys):
    """On a busy machine the last server takes half a minute; the first page can be read meanwhile."""
    looks = {"live": 3, "MLflow": 1}  # how often each is asked until it answers

    def answers(self):
        looks[self.name] -= 1
        return looks[self.name] <= 0

    def start(name):
        lasting = [sys.executable, "-c", "import time; time.sleep(60)"]
        process = subprocess.Popen(lasting, start_new_session=True)
        return lambda self: PageServer(name, f"http://{name}", "health", None, process)

    monkeypatch.setattr(PageServer, "is_healthy", answers)
    monkeypatch.setattr(PageServers, "_start_live_page", start("live"))
    monkeypatch.setattr(PageServers, "_start_mlflow", start("MLflow"))
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    waiting = []

    def announce(service):
        waiting.append(dict(looks))
        _announce_page(tmp_path, service)

    with PageServers(tmp_path, pages=("live", "mlflow", "prefect"), on_answer=announce):
        lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "MLflow   http://MLflow",
        "Prefect  http://prefect.example:4200/runs (runs elsewhere)",
        "live     http://live",
    ]
    assert waiting[0]["live"] > 0  # announced while the live page is still starting


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


def start_run(output, pipeline, second):
    folder = output / pipeline / "runs" / f"2026-11-29-04-01-{second:02d}"
    run = Tracking(None, output, pipeline).start_run(
        f"{pipeline} · 2026-11-29 04:01:{second:02d}",
        folder,
        tags={"kind": "pipeline", "pipeline": pipeline},
    )
    run.close()
    return f"{pipeline}-{run.key[:4]}"


def test_the_child_of_the_live_page_gets_a_run_that_it_finds(tmp_path, monkeypatch):
    served, commands = [], []
    short_id = start_run(tmp_path, "mini", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(
        ui, "serve_web_pages", lambda output, uri, **options: served.append(options)
    )
    assert main(["ui", "mini", "--output", str(tmp_path)]) == 0
    (options,) = served
    assert options["pages"] == ["live", "mlflow", "prefect"]
    pages = PageServers(tmp_path, live_options=options["live_options"])
    monkeypatch.setattr(
        pages, "_start_process", lambda service, command, environment: commands.append(command)
    )
    pages._start_live_page()
    monkeypatch.setattr(ui, "_serve_live_page", lambda output, run, port: served.append(run) or 0)
    assert main(commands[0][1:]) == 0  # what the child runs
    assert served[-1] == short_id


def test_the_live_page_is_asked_at_its_only_address(tmp_path, monkeypatch):
    pages = PageServers(tmp_path, host="::1")
    monkeypatch.setattr(pages, "_start_process", lambda *_: None)
    assert pages._start_live_page().health.startswith("http://127.0.0.1:")
    assert pages._build_service("Prefect", "/api/health").url.startswith("http://[::1]:")


def test_without_gradio_one_line_says_what_the_live_page_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(ui, "serve_web_pages", lambda *_, **options: print(options["pages"]))
    hint = "posttrain: the live page needs posttrain[monitor]: python -m posttrain.install --extras monitor\n"
    assert main(["ui", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("['mlflow', 'prefect']\n", hint)
    assert main(["ui", "--live", "--mlflow", "--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "the live page needs posttrain[monitor]" in captured.err


def test_the_export_of_a_configuration_is_its_newest_run_not_that_of_another(tmp_path, capsys):
    words = ["ui", "test", "--output", str(tmp_path), "--export", str(tmp_path / "numbers")]
    start_run(tmp_path, "other", 1)
    assert main(words) == 2
    assert "no runs of 'test' in" in capsys.readouterr().err
    start_run(tmp_path, "test", 2)
    start_run(tmp_path, "other", 3)
    assert main(words) == 0
    exported = json.loads((tmp_path / "numbers" / "run.json").read_text())
    assert exported["run"] == "test/2026-11-29-04-01-02"
