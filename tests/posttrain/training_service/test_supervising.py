"""`posttrain service up`: both processes, a crashing worker, a clean stop; options for the same store."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT
from helpers.waiting import free_ports

from posttrain.training_service.supervisor import _stop_servers, format_store_options
from posttrain.training_service.worker.engine_process import EXIT_NOT_SAVED
from rl_core.settings import ServiceSettings


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({}, ""),
        ({"folder": "/data/my runs"}, " --set 'folder=/data/my runs'"),
        ({"folder": "a", "store": "sqlite:///b.db"}, " --set folder=a --set store=sqlite:///b.db"),
    ],
)
def test_other_commands_get_options_for_the_store(changed, options):
    assert format_store_options(ServiceSettings(**changed)) == options


def list_workers(pid):
    """List the worker processes that `posttrain service up` started."""
    candidates = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if b"posttrain.training_service.process" in words and b"worker" in words:
            candidates.append((int(entry.name), parent))
    known = {pid}
    for _ in candidates:
        known |= {process for process, parent in candidates if parent in known}
    return sorted(known - {pid})


def test_up_keeps_both_processes_alive_and_saves_at_the_end(base_folder, tmp_path):
    (port,) = free_ports(1)
    folder = tmp_path / "service"
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "service",
        "up",
        "service",
        "--set",
        f"folder={folder}",
        "--set",
        f"server.port={port}",
        "--set",
        f"engine.bases.base={base_folder}",
    ]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(child.stdout), daemon=True)
    reader.start()

    def wait_for(is_true, event):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and child.poll() is None:
            if is_true():
                return
            time.sleep(0.1)
        pytest.fail(f"{event} did not come:\n" + "".join(lines))

    try:
        wait_for(lambda: any("Ctrl-C stops it" in line for line in lines), "the announcement")
        assert f"key create NAME --set folder={folder}" in "".join(lines)
        before = list_workers(child.pid)
        assert before
        for process in before:
            os.kill(process, signal.SIGKILL)
        wait_for(
            lambda: any(re.search("worker: .*SIGKILL", line) for line in lines), "word of the kill"
        )
        wait_for(
            lambda: list_workers(child.pid) and not set(list_workers(child.pid)) & set(before),
            "another worker",
        )
        assert (
            b"ok"
            in urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=10).read()
        )
    finally:
        last = list_workers(child.pid)
        child.terminate()
        code = child.wait(timeout=120)
    reader.join(timeout=10)
    assert lines[-1] == "stopped; every run is saved\n" and code == 0
    assert last and not any(Path(f"/proc/{process}").exists() for process in last)


@pytest.mark.parametrize(
    ("code", "is_saved"), [(143, True), (130, True), (EXIT_NOT_SAVED, False), (137, False)]
)
def test_the_end_of_the_worker_says_whether_all_is_saved(code, is_saved):
    """A further signal while the worker saves is passed on."""
    signals, waits, stops = [], [], [signal.SIGTERM]

    def stop(now, seconds):
        waits.append(seconds)
        if len(waits) == 2:
            stops.append(signal.SIGINT)
        return len(waits) > 3

    worker = SimpleNamespace(
        process=SimpleNamespace(returncode=code), send_signal=signals.append, wait_for_exit=stop
    )
    assert _stop_servers([worker], stops) is is_saved
    assert signals == [signal.SIGTERM, signal.SIGTERM] and len(waits) == 4
    assert _stop_servers([], stops) is False


def test_the_service_alongside_pipelines(tmp_path):
    """The service's processes are servers of `posttrain up`, use its MLflow server, and are ended by `down`."""
    from posttrain.operations.processes import MARK_VARIABLE, format_mark
    from posttrain.settings_files import load_service_settings, parse_service_settings
    from posttrain.training_service.supervisor import prepare_pipeline_specs

    config = tmp_path / "mine.yaml"
    config.write_text("engine: {bases: {small: org/small}}\nserver: {port: 8700}\n")
    output = tmp_path / "out puts"
    settings = load_service_settings(config, [f"folder={output / 'service'}"])
    engine, server = prepare_pipeline_specs(settings, output, "http://127.0.0.1:5999")
    assert (engine.name, server.name) == ("engine", "service")
    assert [spec.environment[MARK_VARIABLE] for spec in (engine, server)] == [
        format_mark(output, n) for n in ("engine", "service")
    ]
    assert {spec.environment["MLFLOW_TRACKING_URI"] for spec in (engine, server)} == {
        "http://127.0.0.1:5999"
    }
    assert (engine.port, server.port, server.url) == (None, 8700, "http://127.0.0.1:8700")
    written = Path(server.command[-1])
    assert written == output / "service" / "settings.json" and engine.command[-2:] == (
        "worker",
        str(written),
    )
    assert parse_service_settings(json.loads(written.read_text())).engine.bases == {
        "small": "org/small"
    }
    assert server.check_health() is False and engine.check_health() is True
    assert (
        server.access
        == f"a key: posttrain service key create NAME --set 'folder={output / 'service'}'"
    )
    assert engine.access == ""
