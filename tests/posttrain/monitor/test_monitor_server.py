"""`posttrain ui --live`: messages, port, export; the page without a browser."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from helpers import ROOT
from helpers.monitor_runs import make_run

from posttrain.cli.main import main
from posttrain.monitor import server
from posttrain.monitor.reader import RunReader
from posttrain.web.server_setup import LOOPBACK_HOST, MAX_PORTS_TRIED, find_free_port
from rl_core.errors import SettingsError


def fetch_page(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return answer.headers, answer.read()


def test_a_missing_folder_a_file_and_an_unknown_run_are_refused(tmp_path, capsys):
    assert main(["ui", "--live", "--output", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["ui", "--live", "--output", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err
    make_run(tmp_path / "out", status="FINISHED")
    assert main(["ui", "--live", "--output", str(tmp_path / "out"), "nope"]) == 2
    assert "no run 'nope'" in capsys.readouterr().err


def test_without_gradio_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["ui", "--live", "--output", str(tmp_path)]) == 2
    assert "python -m posttrain.install --extras monitor" in capsys.readouterr().err


def test_taken_port_gives_the_next_free_one():
    with socket.socket() as holder:
        holder.bind((LOOPBACK_HOST, 0))
        holder.listen()
        taken = holder.getsockname()[1]
        assert taken < find_free_port(taken) <= taken + MAX_PORTS_TRIED


def test_export_needs_no_gradio(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    make_run(tmp_path / "out", status="FINISHED")
    assert (
        main(
            [
                "ui",
                "--output",
                str(tmp_path / "out"),
                "demo",
                "--export",
                str(tmp_path / "f"),
            ]
        )
        == 0
    )
    assert str(tmp_path / "f/metrics.csv") in capsys.readouterr().out
    assert json.loads((tmp_path / "f/run.json").read_text())["status"] == "finished"
    (tmp_path / "empty").mkdir()
    assert (
        main(["ui", "--live", "--output", str(tmp_path / "empty"), "--export", str(tmp_path / "g")])
        == 2
    )
    assert "no runs in" in capsys.readouterr().err


def test_page_makes_no_external_requests_and_ctrl_c_ends_it(tmp_path):
    pytest.importorskip("gradio")
    make_run(tmp_path)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "posttrain.cli.main",
            "ui",
            "--live",
            "--output",
            str(tmp_path),
            "--port",
            "18760",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GRADIO_ANALYTICS_ENABLED": "True"},
    )
    try:
        url = process.stdout.readline().split()[1]
        headers, page = fetch_page(url)
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert b"window.posttrain" in page and b"fonts.googleapis.com" not in page
        assert (
            fetch_page(f"{url}/image.png?run=demo/2027-01-15-08-00-00&level=easy&seed=7")[1][:4]
            == b"\x89PNG"
        )
        assert (
            b"reward/mean,5,"
            in fetch_page(f"{url}/export/metrics.csv?run=demo/2027-01-15-08-00-00")[1]
        )
        for path in (
            "export/metrics.csv?run=none",
            "image.png?run=&level=none&seed=1",
            "export/other?run=",
        ):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch_page(f"{url}/{path}")
        request = urllib.request.Request(url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch_page(request)
    finally:
        process.send_signal(signal.SIGINT)
        stopped_at = time.monotonic()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "stopped" in out and "Traceback" not in err, err
    assert time.monotonic() - stopped_at < 25


def test_the_page_can_be_built_for_an_empty_folder(tmp_path):
    pytest.importorskip("gradio")
    from posttrain.monitor.page import build_page

    page = build_page(RunReader(tmp_path))
    assert not page.analytics_enabled
    with pytest.raises(SettingsError):
        server._open_reader(tmp_path / "none")
