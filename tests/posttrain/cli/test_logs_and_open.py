"""`posttrain logs` of finished, cached and running stages; `posttrain open`: only pages that answer."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from posttrain.cli import logs
from posttrain.cli import main as cli
from tasks.mlflow_environment import record_served_page
from tasks.tracking import Tracking


@pytest.fixture
def run(tmp_path):
    """Return the tracker of an open run with an open stage `sft` that has a log."""
    tracking = Tracking(None, tmp_path, "demo")
    parent = tracking.start_run(
        "demo · 2026-11-29 04:01:19",
        tmp_path / "demo" / "runs" / "2026-11-29-04-01-19",
        tags={"kind": "pipeline", "pipeline": "demo", "prefect.flow_run_id": "f1"},
    )
    folder = tmp_path / "demo" / "stages" / "sft" / "0123456789abcdef.tracking"
    stage = tracking.start_run(
        "sft", folder, parent_folder=parent.folder, tags={"stage": "sft", "pipeline": "demo"}
    )
    (folder / "stage.log").write_text("one \x1b[2J\ntwo\nthr")
    parent.stage, parent.log = stage, folder / "stage.log"
    yield parent
    stage.close()
    parent.close()


def test_a_log_that_is_being_written_has_whole_escaped_lines(run, tmp_path, capsys):
    out = ["--output", str(tmp_path)]
    assert cli.main(["logs", *out]) == 0
    assert capsys.readouterr().out == "== sft · running\none \\x1b[2J\ntwo\n"
    assert cli.main(["logs", f"demo-{run.key[:4]}", "sft", "-n", "1", *out]) == 0
    assert capsys.readouterr().out == "two\n"
    assert cli.main(["logs", "sft", "-n", "1", *out]) == 0  # of the newest run
    assert capsys.readouterr().out == "two\n"
    assert cli.main(["logs", "demo", "policy", *out]) == 2
    assert "has no stage 'policy', only sft" in capsys.readouterr().err
    assert cli.main(["logs", "demo-0000", *out]) == 2
    error = capsys.readouterr().err
    assert f"newest runs of demo: demo-{run.key[:4]}" in error and error.count("\n") == 1


def test_follow_prints_what_is_written_also_after_a_rotation_and_ends_with_the_run(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(logs, "FOLLOW_SECONDS", 0.05)
    monkeypatch.setattr("posttrain.monitor.reader.MIN_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("posttrain.monitor.reader.LISTING_SECONDS", 0.0)
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(cli_follow(["logs", "demo", "sft", "-f", "-o", str(tmp_path)]))
    )
    thread.start()
    time.sleep(1.0)
    with run.log.open("a") as file:
        file.write("ee\nfour\n")
    time.sleep(0.5)
    run.log.rename(run.log.with_name("stage.log.1"))
    run.log.write_text("five\n")
    time.sleep(0.5)
    run.stage.close()
    run.close()
    thread.join(20)
    assert codes == [0]
    assert capsys.readouterr().out == "one \\x1b[2J\ntwo\nthree\nfour\nfive\n"


def cli_follow(words):
    arguments = cli.build_parser(words).parse_args(words)  # signals belong to the main thread
    return arguments.handler(arguments)


class Pages(BaseHTTPRequestHandler):
    """Stand-in for MLflow and Prefect: it knows one run of each."""

    def do_GET(self):
        known = (
            self.path.endswith(f"run_id={self.server.run_id}") or self.path == "/api/flow_runs/f1"
        )
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def test_open_prints_only_pages_that_answer(run, tmp_path, capsys, monkeypatch):
    for name in ("PREFECT_API_URL", "DISPLAY", "BROWSER", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    opened = []
    monkeypatch.setattr("webbrowser.open_new_tab", opened.append)
    words = ["open", "demo", "--output", str(tmp_path)]
    assert cli.main(words) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == "" and "live, mlflow, prefect: no page of this run answers" in captured.err
    )
    server = HTTPServer(("127.0.0.1", 0), Pages)
    server.run_id = run.run_id
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        record_served_page(tmp_path, "mlflow", address)
        record_served_page(tmp_path, "prefect", address)
        record_served_page(tmp_path, "live", "http://127.0.0.1:9")  # nobody listens
        assert cli.main([*words, "--json"]) == 0
        pages = json.loads(capsys.readouterr().out)["pages"]
        assert set(pages) == {"mlflow", "prefect"} and opened == []
        assert pages["mlflow"].startswith(f"{address}/#/experiments/")
        assert pages["prefect"] == f"{address}/runs/flow-run/f1"
        monkeypatch.setenv("BROWSER", "a-browser")
        assert cli.main(words) == 0 and opened == list(pages.values())
        server.run_id = "another"
        assert cli.main([*words, "--no-browser"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("prefect ")
        assert len(opened) == 2
    finally:
        server.shutdown()
        server.server_close()
