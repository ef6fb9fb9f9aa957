"""Live page under `posttrain up --monitor`: one of its servers, on a separate port."""

import os
import signal
import subprocess

import pytest
from helpers.monitor_runs import make_run
from helpers.waiting import free_ports, wait_for

from posttrain.cli import up as up_command
from posttrain.cli.main import build_parser, main
from posttrain.monitor import server as page_module
from posttrain.monitor.server import build_page_services
from posttrain.operations import commands


def record_up_call(monkeypatch, *arguments):
    """Run `up` and return the options and extra servers that it would start."""
    call = {}

    def up(output, options, *, detach, extra_servers):
        call.update(options=options, specs=extra_servers(output, ""))

    monkeypatch.setattr(commands, "start_servers", up)
    assert up_command.run_command(build_parser().parse_args(["up", *map(str, arguments)])) == 0
    return call


def test_up_runs_the_page_only_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: name)
    assert record_up_call(monkeypatch, "--output", tmp_path) == {"options": {}, "specs": []}
    call = record_up_call(monkeypatch, "--output", tmp_path, "--monitor")
    assert call["options"] == {"monitor_port": 7860} and [spec.port for spec in call["specs"]] == [
        7860
    ]
    call = record_up_call(monkeypatch, "--output", tmp_path, "--monitor-port", 7900)
    (spec,) = call["specs"]
    assert call["options"] == {"monitor_port": 7900} and spec.url == "http://127.0.0.1:7900"
    assert spec.command[-4:] == ("--output", str(tmp_path), "--port", "7900")


def test_without_gradio_nothing_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    assert main(["up", "--output", str(tmp_path / "out"), "--monitor"]) == 2
    assert (
        "python -m posttrain.install --extras monitor" in capsys.readouterr().err
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
