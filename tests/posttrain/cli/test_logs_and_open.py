"""`posttrain logs` of finished, cached and running stages; `posttrain open`: only pages that answer."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from posttrain.cli import logs
from posttrain.cli import main as cli
from posttrain.cli.model_references import resolve_run_model
from posttrain.monitor.runs import RunView, StageView
from rl_core.errors import BackendError, DataError
from tasks.mlflow_environment import record_served_page
from tasks.tracking import Tracking
from tasks.tracking.run_ids import list_named_runs


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


def test_the_unfinished_last_line_of_a_run_that_is_over_is_printed(run, tmp_path, capsys):
    run.stage.close()
    run.close()
    assert cli.main(["logs", "demo", "sft", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "one \\x1b[2J\ntwo\nthr\n"


def test_follow_ends_with_a_run_that_waits_for_approval(run, tmp_path, capsys, monkeypatch):
    def refuse_to_wait(seconds):
        raise AssertionError("follows on")

    run.stage.close()
    run.set_tag("approval", "waiting")
    run.close()
    monkeypatch.setattr(logs.time, "sleep", refuse_to_wait)
    assert cli_follow(["logs", "demo", "sft", "-f", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("thr\n")


def test_a_reused_stage_without_files_is_not_called_one_that_has_not_begun(run, tmp_path, capsys):
    view = RunView("demo/1", "demo", "", "finished", stages=[StageView("policy", "cached")])
    assert logs._explain_missing_log(view, "policy") == (
        "stage 'policy' was reused from an earlier run, whose log no longer exists"
    )
    view.stages[0].status = "pending"
    assert logs._explain_missing_log(view, "policy") == "stage 'policy' has not begun (finished)"
    assert logs._explain_missing_log(view, None) == "no stage has begun (finished)"


@pytest.fixture
def trial(tmp_path):
    """Return the tracker of a sweep's trial with a finished stage `policy`, all closed."""
    tracking = Tracking(None, tmp_path, "demo")
    sweep = tmp_path / "demo" / "sweeps" / "7a75cdb394"
    tracking.start_run("demo · sweep", sweep, tags={"kind": "sweep"}).close()
    trial = tracking.start_run(
        "demo · trial 0, seed 0",
        sweep / "trials" / "0000-s0" / "runs" / "2026-11-29-04-02-00",
        tags={"kind": "trial", "pipeline": "demo"},
    )
    folder = tmp_path / "demo" / "stages" / "policy" / "0123456789abcdef.tracking"
    stage = tracking.start_run(
        "policy", folder, parent_folder=trial.folder, tags={"stage": "policy", "pipeline": "demo"}
    )
    (folder / "stage.log").write_text("of the trial\n")
    (folder.with_suffix("") / "model").mkdir(parents=True)
    stage.close()
    trial.close()
    trial.short_id = f"demo-{trial.key[:4]}"
    trial.sweep_id = next(run.short_id for run in list_named_runs(tmp_path) if run.is_sweep)
    return trial


def test_every_command_that_takes_a_run_takes_a_trial(trial, tmp_path, capsys):
    out = ["--output", str(tmp_path)]
    assert cli.main(["logs", trial.short_id, "policy", *out]) == 0
    assert capsys.readouterr().out == "of the trial\n"
    cli.main(["open", trial.short_id, "--json", *out])
    identity = json.loads(capsys.readouterr().out)["run"]
    assert identity == "demo/7a75cdb394/0000-s0/2026-11-29-04-02-00"
    assert cli.main(["ui", trial.short_id, "--export", str(tmp_path / "numbers"), *out]) == 0
    assert json.loads((tmp_path / "numbers" / "run.json").read_text())["run"] == identity
    model = tmp_path / "demo" / "stages" / "policy" / "0123456789abcdef" / "model"
    assert resolve_run_model(trial.short_id, tmp_path) == str(model)


def test_a_sweep_is_refused_by_name_and_a_trial_by_resume(trial, tmp_path, capsys):
    out = ["--output", str(tmp_path)]
    for words in (["logs", trial.sweep_id], ["ui", trial.sweep_id, "--export", "x"]):
        assert cli.main([*words, *out]) == 2
        assert f"'{trial.sweep_id}' is a sweep" in capsys.readouterr().err
    with pytest.raises(DataError, match="is a sweep"):
        resolve_run_model(trial.sweep_id, tmp_path)
    Tracking(None, tmp_path, "demo").start_run(
        "demo · 2026-11-29 04:03:00",
        tmp_path / "demo" / "runs" / "2026-11-29-04-03-00",
        tags={"kind": "pipeline", "pipeline": "demo"},
    ).close("FAILED")
    assert cli.main(["resume", trial.short_id, *out]) == 2
    assert "the same `posttrain sweep` command continues it" in capsys.readouterr().err
    for command in ("resume", "logs", "open"):
        assert cli.main([command, "", *out]) == 2
        assert "the name of the run is empty" in capsys.readouterr().err


def cli_follow(words):
    arguments = cli.build_parser(words).parse_args(words)  # signals belong to the main thread
    return arguments.handler(arguments)


class Pages(BaseHTTPRequestHandler):
    """Stand-in for MLflow and Prefect: it knows one run of each."""

    def do_GET(self):
        known = (
            self.path.endswith(f"run_id={self.server.run_id}") or self.path == "/api/flow_runs/f1"
        )
        password = getattr(self.server, "password", "")
        expected = f"Basic {base64.b64encode(password.encode()).decode()}"
        is_refused = password and self.headers.get("Authorization") != expected
        self.send_response(401 if is_refused else 200 if known else 404)
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


def test_a_prefect_server_with_a_password_is_asked_with_it_and_its_refusal_is_an_answer(
    run, tmp_path, capsys, monkeypatch
):
    def read_the_file_of_another_user(output):
        raise BackendError("another user started the servers")

    server = HTTPServer(("127.0.0.1", 0), Pages)
    server.run_id, server.password = run.run_id, "me:secret"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PREFECT_API_URL", f"{address}/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:secret")
    words = ["open", "demo", "--json", "--output", str(tmp_path)]
    link = f"{address}/runs/flow-run/f1"
    try:
        assert cli.main(words) == 0
        assert json.loads(capsys.readouterr().out)["pages"] == {"prefect": link}
        monkeypatch.delenv("PREFECT_API_AUTH_STRING")
        assert cli.main(words) == 0  # 401: the browser asks for the password
        assert json.loads(capsys.readouterr().out)["pages"] == {"prefect": link}
        record_served_page(tmp_path, "prefect", address)
        monkeypatch.setattr(
            "flows.runtime.prefect_access.load_or_create_password", read_the_file_of_another_user
        )
        assert cli.main(words) == 0
        assert json.loads(capsys.readouterr().out)["pages"] == {"prefect": link}
    finally:
        server.shutdown()
        server.server_close()
