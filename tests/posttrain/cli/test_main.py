"""The command line: exit codes, messages, and options that reach the flows."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

from posttrain.cli import main as cli
from posttrain.cli import run_setup
from rl_core.errors import (
    BackendError,
    CheckpointError,
    DataError,
    ModelError,
    SettingsError,
    Stopped,
)
from rl_core.storage.atomic_files import write_error
from tasks.config import build_settings
from tasks.tracking import Tracking

DEFAULT_OPTIONS = {"allow_drift": False, "fresh": False}


def test_a_model_folder_that_is_none_is_a_user_error(tmp_path, capsys):
    """Exit with 2: scripts retry an exit code of 1, which means that the machine failed."""
    (tmp_path / "empty").mkdir()
    assert cli.main(["check", "machine", "--model", str(tmp_path / "empty")]) == 2
    assert "is a folder without a config.json" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["run"],
        ["run", "x.yaml", "--only", "SFT!"],
        ["check"],
        ["check", "demo"],
        ["promote", "--approve"],
        ["evaluate"],
        ["promote", "x.yaml", "--version", "0"],
        ["ui", "--mlflow-port", "70000"],
        ["runs", "--limit", "x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: posttrain" in capsys.readouterr().err


def test_a_bad_model_folder_exits_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    assert cli.main(["check", "machine", "--model", str(tmp_path / "broken")]) == 2
    assert "broken" in capsys.readouterr().err
    assert issubclass(ModelError, CheckpointError)  # older handlers still catch it


@pytest.mark.parametrize(
    "command",
    [
        "run X",
        "validate X",
        "run X --only sft",
        "run X --dry-run",
        "evaluate X m",
        "promote X",
        "promote X --pending",
        "runs X",
        "check machine X",
        "store gc X",
    ],
)
def test_every_entry_checks_the_config_first(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("name: demo\nstages:\n  policy: {group_siz: 3}\n")
    before = set(tmp_path.iterdir())
    assert cli.main(command.replace("X", "bad.yaml").split()) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "posttrain: bad.yaml:3: stages.policy.group_siz: unknown key; did you mean 'group_size'?\n"
    )
    assert captured.out == ""
    assert set(tmp_path.iterdir()) == before  # nothing was written


def test_bad_config_in_a_separate_process(tmp_path, run_python):
    (tmp_path / "bad.yaml").write_text("name: a/b\nstages: {policy: {group_size: 1}}\n")
    code = "import sys; from posttrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = run_python(code, "run", "bad.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("posttrain: 2 problems:\nbad.yaml:1: name: 'a/b' must be")
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_missing_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "no.yaml"]) == 2
    assert "no.yaml: no such file" in capsys.readouterr().err


def test_overrides_are_checked_too(config, capsys):
    assert cli.main(["run", config, "--set", "stages.policy.learning_rate=3"]) == 2
    assert (
        "--set stages.policy.learning_rate=3: stages.policy.learning_rate: found 3"
        in capsys.readouterr().err
    )


def test_set_without_config(capsys):
    assert cli.main(["runs", "--set", "seed=1"]) == 2
    assert "name it: posttrain runs CONFIG" in capsys.readouterr().err


def test_stage_that_the_config_lacks(config, capsys):
    assert cli.main(["run", config, "--only", "reward_model"]) == 2
    assert (
        "has no stage 'reward_model', only sft, policy; add it with --set stages.reward_model={}"
        in capsys.readouterr().err
    )


def test_analyze_missing_path(capsys):
    assert cli.main(["analyze", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err


def test_models_are_analysed_with_a_config_only(config, tmp_path, monkeypatch, capsys):
    calls = []
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "report.html").write_text("<p>")

    def analyze_models(settings, models, *, quiet):
        calls.append((settings.name, models, quiet))
        results = {"analyze": SimpleNamespace(path=finished)}
        return SimpleNamespace(ok=True, format_table=lambda: "the table", results=results)

    monkeypatch.setitem(
        sys.modules, "flows.single_stage", SimpleNamespace(analyze_models=analyze_models)
    )
    monkeypatch.setattr(run_setup, "configure_prefect", lambda settings: None)
    monkeypatch.setattr(
        run_setup, "print_banner_and_start_prefect", lambda settings, **_: contextlib.nullcontext()
    )
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert cli.main(["analyze", "old", "new"]) == 2
    assert "old: is a model; name the configuration" in capsys.readouterr().err
    assert cli.main(["analyze", config, "old", "-q", "new", "--to", "report"]) == 0
    assert calls == [("demo", {"old": str(tmp_path / "old"), "new": str(tmp_path / "new")}, True)]
    assert (tmp_path / "report" / "report.html").read_text() == "<p>"
    assert capsys.readouterr().out == "the table\nreport: report/report.html\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\x1f\x8b\x08", "a.jsonl: the file is gzip-compressed; unpack it first"),
        ("a.jsonl", b'{"level": "easy"}\n', "a.jsonl:1: field 'environment' is missing"),
        ("a.jsonl", b"{\n", "a.jsonl:1: this is not JSON"),
        ("folder/other.txt", b"", "folder: contains no trajectories*.jsonl; name the files"),
    ],
)
def test_unreadable_trajectories_exit_with_2_and_leave_nothing(
    name, content, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert cli.main(["analyze", name.split("/")[0], "--to", "report"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_run_passes_its_options(config, flow, capsys):
    assert (
        cli.main(["run", config, "--set", "seed=4", "--set", "stages.sft=null", "--fresh", "-q"])
        == 0
    )
    ((settings, fresh, quiet, allow_drift),) = flow.calls
    assert (
        settings.seed == 4
        and settings.stages.active == ("policy",)
        and fresh
        and quiet
        and not allow_drift
    )
    assert capsys.readouterr().out == "the table\n"
    assert cli.main(["run", config, "--allow-drift"]) == 0 and flow.calls[-1][1:] == (
        False,
        False,
        True,
    )


def test_retrain_passes_its_options_and_prints_the_result(config, flow, monkeypatch, capsys):
    calls = []

    def run_retraining(settings, **options):
        calls.append((settings.seed, options))
        return SimpleNamespace(status="skipped", message="skipped: nothing is new", pipeline=None)

    monkeypatch.setitem(
        sys.modules, "flows.retrain", SimpleNamespace(run_retraining=run_retraining)
    )
    assert (
        cli.main(
            [
                "retrain",
                config,
                "--set",
                "seed=4",
                "--start",
                "base",
                "--force",
                "--reason",
                "why",
                "-q",
            ]
        )
        == 3
    )
    assert calls == [
        (4, {"start": "base", "force": True, "reason": "why", "quiet": True, **DEFAULT_OPTIONS})
    ]
    assert capsys.readouterr().out == "skipped: nothing is new\n"
    assert cli.main(["retrain", config, "--nothing-new-is-ok"]) == 0
    assert calls[1][1] == {
        "start": None,
        "force": False,
        "reason": "",
        "quiet": False,
        **DEFAULT_OPTIONS,
    }


def test_a_retraining_whose_promotion_is_postponed_exits_with_1(config, flow, monkeypatch):
    """Exit like a run, so that a Kubernetes job is retried."""
    pipeline = SimpleNamespace(ok=False, format_table=lambda: "the table")
    result = SimpleNamespace(
        status="postponed", message="the store does not answer", pipeline=pipeline
    )
    monkeypatch.setitem(
        sys.modules, "flows.retrain", SimpleNamespace(run_retraining=lambda *_, **__: result)
    )
    assert cli.main(["retrain", config]) == 1


def test_failed_pipeline_exits_with_1(config, flow, monkeypatch):
    monkeypatch.setattr(
        flow, "run_pipeline", lambda *_, **__: SimpleNamespace(ok=False, format_table=lambda: "")
    )
    assert cli.main(["run", config]) == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SettingsError("wrong"), 2, "posttrain: wrong\n"),
        (DataError("row 3 is bad"), 2, "posttrain: row 3 is bad\n"),
        (BackendError("store is down"), 1, "posttrain: store is down\n"),
        (Stopped("stopped after iteration 3", 15), 143, "posttrain: stopped after iteration 3\n"),
        (Stopped("stopped after iteration 3", 2), 130, "posttrain: stopped after iteration 3\n"),
        (KeyboardInterrupt(), 130, "posttrain: stopped by Ctrl-C"),
        (
            PermissionError(13, "no", "/else/logs"),
            1,
            "posttrain: /else/logs: Permission denied; use a writable folder",
        ),
        (
            OSError(28, "no", b"/full"),
            1,
            "posttrain: /full: No space left on device; make room, as with",
        ),
        (
            write_error("/full", OSError(28, "No space left on device")),
            1,
            "posttrain: /full: cannot be written: No space left on device; make room, as with",
        ),
        (
            write_error("/ro", OSError(30, "Read-only file system")),
            1,
            "posttrain: /ro: cannot be written: Read-only file system; make the file system writable",
        ),
    ],
)
def test_exit_codes(error, code, message, config, flow, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(flow, "run_pipeline", fail)
    assert cli.main(["run", config]) == code
    err = capsys.readouterr().err
    assert err.startswith(message) and "Traceback" not in err
    assert cli.main(["run", config, "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_unexpected_errors_are_shown_in_full(config, flow, monkeypatch):
    monkeypatch.setattr(flow, "run_pipeline", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", config])


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "without a file"), FileNotFoundError(2, "one of our files", "/missing")],
)
def test_only_os_errors_with_advice_become_messages(config, flow, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(flow, "run_pipeline", fail)
    with pytest.raises(type(error)):
        cli.main(["run", config])


def test_sigterm_unwinds_and_exits_with_143(config, run_python):
    """Unwind even through code that catches every Exception, as imports and start-ups of large packages do."""
    code = (
        "import os, signal, sys, types\n"
        "from posttrain.cli import main as cli\n"
        "def run_pipeline(settings, **_):\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "    except Exception: print('continues')\n"
        "    finally: print('closed')\n"
        "sys.modules['flows.post_training'] = types.SimpleNamespace(run_pipeline=run_pipeline)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = run_python(code, "run", config)
    assert done.returncode == 143 and done.stdout.endswith("\nclosed\n")
    assert (
        done.stderr.startswith("posttrain: stopped by SIGTERM") and "Traceback" not in done.stderr
    )


def test_a_sigterm_that_something_swallowed_stops_the_run_at_its_next_stage(monkeypatch):
    from flows import post_training
    from flows.runtime import stopping

    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def pipeline_run(*arguments, stop, **options):
        seen.append(stop.is_set())
        raise Stopped("here", 15)

    monkeypatch.setattr(post_training, "PipelineRun", pipeline_run)
    monkeypatch.setattr(post_training, "build_flow_run_url", lambda: "")
    settings = build_settings(
        {"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}
    )
    try:
        stopping.unwind_on_sigterm()
        for _ in range(2):
            with pytest.raises(Stopped):
                post_training.execute_pipeline(settings)
            with contextlib.suppress(stopping.TerminatedBySignal):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        assert seen == [False, True]
        stopping.unwind_on_sigterm()  # another command in this process
        assert not stopping.stop_requested.is_set()
    finally:
        stopping.stop_requested.clear()
        signal.signal(signal.SIGTERM, before)


def test_a_reader_that_closes_the_pipe(tmp_path):
    code = (
        "import sys, types\n"
        "from posttrain.cli import main as cli, runs\n"
        "runs.run_command = lambda arguments: print('x\\n' * 100000) or 0\n"
        "sys.exit(cli.main(['runs']))"
    )
    command = f'{sys.executable} -c "$CODE" | head -n 1'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CODE": code}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout == "x\n" and done.stderr == ""


def test_promote_passes_its_decisions(config, tmp_path, monkeypatch, capsys):
    calls = []

    def decide_approval(output, uri, run, **options):
        calls.append((str(output), uri, run, options))
        return "decided"

    monkeypatch.setattr("posttrain.cli.approvals.decide_approval", decide_approval)
    assert cli.main(["promote", "--reject", "demo", "--note", "worse", "--output", "o"]) == 0
    assert cli.main(["promote", "--pending"]) == 0
    rejected = {"approve": False, "by": "", "note": "worse", "store_options": " --output o"}
    undecided = {"approve": None, "by": "", "note": "", "store_options": ""}
    assert calls == [("o", None, "demo", rejected), ("outputs", None, None, undecided)]
    assert capsys.readouterr().out == "decided\ndecided\n"
    with pytest.raises(SystemExit):
        cli.main(["promote", "--approve", "demo", "--reject", "demo"])
    assert cli.main(["promote", "--approve", "demo", "--version", "3"]) == 2
    assert cli.main(["promote"]) == 2
    assert "name the configuration whose champion moves" in capsys.readouterr().err


def test_resume_uses_the_recorded_options(flow, tmp_path, monkeypatch, capsys):
    from tasks.config import build_settings

    settings = build_settings(
        {"name": "demo", "model": {"path": "a/b"}, "stages": {"policy": {}}}, check_files=False
    )
    record = SimpleNamespace(
        name="demo · 1", status="killed", only="policy", evaluated_models={"a": "b"}, started="1"
    )
    monkeypatch.setattr("posttrain.cli.resume.find_resumable_run", lambda *_: record)
    monkeypatch.setattr(
        "posttrain.cli.recorded_settings.load_recorded_settings", lambda *_: settings
    )
    monkeypatch.setattr(run_setup, "configure_prefect", lambda settings: None)
    monkeypatch.setattr(
        run_setup, "print_banner_and_start_prefect", lambda settings, **_: contextlib.nullcontext()
    )
    used = {}

    def run_pipeline(settings, **options):
        used.update(options)
        return SimpleNamespace(ok=True, format_table=lambda: "the table")

    monkeypatch.setattr(flow, "run_pipeline", run_pipeline)
    assert cli.main(["resume", "demo", "-q", "--output", str(tmp_path)]) == 0
    recorded = {"only": "policy", "models": {"a": "b"}, "quiet": True, "started": "1"}
    assert used.pop("keys").pipeline is settings
    assert used == {**recorded, "allow_drift": False, "restart": False}
    assert capsys.readouterr().out == "resuming demo · 1, which is killed\nthe table\n"


@pytest.mark.parametrize(
    "command", ["resume", "store gc", "store gc --yes", "store sync", "logs", "open"]
)
def test_operations_without_runs_name_the_folder(command, tmp_path, capsys):
    assert cli.main([*command.split(), "--output", str(tmp_path)]) == 2
    assert f"no runs in {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_crashed_run_is_listed_as_killed_before_it_is_repaired(tmp_path, monkeypatch, capsys):
    """List it like `resume`, `doctor` and the live page do; the store says RUNNING until the repair."""
    run = Tracking(None, tmp_path, "demo").start_run("demo · 1", tmp_path / "demo" / "runs" / "1")
    crashed = SimpleNamespace(
        mlflow_run_id=run.run_id, description="process 3 no longer exists", is_remote=False
    )
    for crashed_runs, status in (([], "running"), ([crashed], "killed")):
        monkeypatch.setattr(
            "tasks.lifecycle.crashed_runs.find_crashed_runs", lambda root, runs=crashed_runs: runs
        )
        assert cli.main(["runs", "--output", str(tmp_path), "--json"]) == 0
        assert [record["status"] for record in json.loads(capsys.readouterr().out)] == [status]
    assert cli.main(["runs", "--output", str(tmp_path)]) == 0
    assert "process 3 no longer exists" in capsys.readouterr().out
    run.close()
    # Not called: no run is marked as running.
    monkeypatch.setattr("tasks.lifecycle.crashed_runs.find_crashed_runs", None)
    assert cli.main(["runs", "--output", str(tmp_path)]) == 0


def test_runs_as_json_and_csv(tmp_path, capsys):
    assert cli.main(["runs", "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    with Tracking(None, tmp_path).start_run("demo", tmp_path / "run") as run:
        run.log_metrics({"train/loss": 0.5}, 1)
        run.set_tag("result", "good, 'quoted'")
    assert cli.main(["runs", "--output", str(tmp_path), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["run"], record["status"], record["result"]) == (
        "demo",
        "finished",
        "good, 'quoted'",
    )
    assert (
        record["metrics"] == {"train/loss": 0.5}
        and record["parent_run_id"] is None
        and record["seconds"] >= 0
    )
    assert cli.main(["runs", "--output", str(tmp_path), "--csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["run_id"], row["metrics.train/loss"], row["result"]) == (
        record["run_id"],
        "0.5",
        "good, 'quoted'",
    )
