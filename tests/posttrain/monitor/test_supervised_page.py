"""The live page under `posttrain up --monitor`: as one of its servers, on a port of its own."""

import os
import signal
import subprocess

import pytest
from helpers.monitor_runs import make_run
from helpers.waiting import free_ports, wait_for

from posttrain.cli import operate_commands
from posttrain.cli.main import main
from posttrain.cli.parser import build_parser
from posttrain.monitor import server as page_module
from posttrain.monitor.server import build_page_services
from posttrain.operations import commands


def started(monkeypatch, *words):
    """Arguments that `up` is called with: options, and the servers beside."""
    found = {}

    def up(output, given, *, detach, extra_servers):
        found.update(given=given, also=extra_servers(output, ""))

    monkeypatch.setattr(commands, "start_servers", up)
    assert operate_commands.run_up_command(build_parser().parse_args(["up", *map(str, words)])) == 0
    return found


def test_up_keeps_the_page_up_only_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: name)
    assert started(monkeypatch, "--output", tmp_path) == {"given": {}, "also": []}
    found = started(monkeypatch, "--output", tmp_path, "--monitor")
    assert found["given"] == {"monitor_port": 7860} and [one.port for one in found["also"]] == [
        7860
    ]
    found = started(monkeypatch, "--output", tmp_path, "--monitor-port", 7900)
    (spec,) = found["also"]
    assert found["given"] == {"monitor_port": 7900} and spec.url == "http://127.0.0.1:7900"
    assert spec.command[-4:] == ("--output", str(tmp_path), "--port", "7900")


def test_without_gradio_nothing_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    assert main(["up", "--output", str(tmp_path / "out"), "--monitor"]) == 2
    assert (
        "pip install 'posttrain[monitor]'" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


def test_a_port_of_another_server_is_refused(tmp_path, capsys):
    pytest.importorskip("gradio")
    assert main(["up", "--output", str(tmp_path / "out"), "--monitor-port", "4200"]) == 2
    assert "--monitor-port are both 4200" in capsys.readouterr().err


def test_the_server_answers_and_ends_on_sigterm(tmp_path):
    pytest.importorskip("gradio")
    make_run(tmp_path)
    (spec,) = build_page_services(free_ports(1)[0], tmp_path, "")
    assert not spec.check_health()
    process = subprocess.Popen(
        spec.command,
        env=dict(spec.environment),
        cwd=spec.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(spec.check_health, "the page")
    finally:
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert (
        spec.url in out and "stopped" in out and "Traceback" not in out and not spec.check_health()
    )
