"""The command line: exit codes, messages, help, and what is imported when."""

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
from helpers.adapters import fakes

from posttrain.cli import main as cli
from posttrain.cli import run_setup
from posttrain.cli.parser import COMMAND_ORDER, build_parser
from posttrain.cli.tables import format_runs_table
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
GOOD = "name: demo\nstages:\n  sft: {}\n  policy: {}\n"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return str(path)


@pytest.fixture
def flow(monkeypatch):
    """Replace flows.post_training by a double that records its calls."""
    calls = []

    def run_pipeline(settings, *, fresh, quiet, allow_drift, changed=()):
        calls.append((settings, fresh, quiet, allow_drift))
        return SimpleNamespace(ok=True, format_table=lambda: "the table")

    module = SimpleNamespace(run_pipeline=run_pipeline, calls=calls)
    monkeypatch.setitem(sys.modules, "flows.post_training", module)
    monkeypatch.setattr(run_setup, "configure_prefect", lambda settings: None)
    monkeypatch.setattr(
        run_setup, "print_banner_and_start_prefect", lambda settings, **_: contextlib.nullcontext()
    )
    return module


def run_python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **options,
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from posttrain.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'pydantic', 'yaml', 'numpy', 'rich', 'tasks.config'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    for arguments in (["--help"], ["run", "--help"], ["--version"]):
        done = run_python(code, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_every_command_has_help_with_examples(capsys):
    names = list(cli.COMMANDS)
    assert names == list(COMMAND_ORDER)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    overview = capsys.readouterr().out
    for name in names:
        assert f"\n  {name} " in overview
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0 and f"examples:\n  posttrain {name}" in text


def test_examples_in_help_parse():
    import shlex

    parser = build_parser()
    (commands,) = [
        action for action in parser._actions if hasattr(action, "choices") and action.choices
    ]
    for name, command in commands.choices.items():
        for line in command.epilog.splitlines()[1:]:
            line = line.split("    (")[0]
            arguments = parser.parse_args(shlex.split(line)[1:])
            assert arguments.command == name


def test_a_model_folder_that_is_none_is_a_user_error(tmp_path, capsys):
    """Exit with 2: scripts retry an exit code of 1, which means that the machine failed."""
    (tmp_path / "empty").mkdir()
    assert cli.main(["doctor", "--model", str(tmp_path / "empty")]) == 2
    assert "is a folder without a config.json" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["run"],
        ["stage", "SFT!", "x.yaml"],
        ["evaluate", "model"],
        ["promote", "--version", "0", "-c", "x.yaml"],
        ["ui", "--mlflow-port", "70000"],
        ["runs", "--limit", "x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: posttrain" in capsys.readouterr().err


def test_the_bare_command_shows_five_commands_that_parse(capsys):
    assert cli.main([]) == 0
    shown = [
        line.split()[:3]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  posttrain ")
    ]
    commands = [words for words in shown if words[1] in COMMAND_ORDER]
    assert [words[1] for words in commands] == ["run", "init", "runs", "monitor", "doctor"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rnu", "demo"], "did you mean 'run'?"),
        (["run", "demo", "--quite"], "did you mean '--quiet'?"),
        (["run", "demo", "--fersh=1"], "did you mean '--fresh'?"),
        (["service", "qeue"], "did you mean 'queue'?"),
        (["runs", "--format", "jsn"], "did you mean 'json'?"),
        (["--verison"], "did you mean '--version'?"),
        (["xyzzy"], "choose from init, convert"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(arguments, hint, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and hint in error.splitlines()[-1]


def test_a_mistyped_config_is_answered_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["validate", "dmeo"]) == 2
    assert (
        capsys.readouterr().err
        == "posttrain: dmeo: no such file, and no shipped config; did you mean 'demo'?\n"
    )


def test_help_and_the_table_of_runs_fit_into_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    page = "http://127.0.0.1:5000/#/experiments/1/runs/0123456789abcdef0123456789abcdef"
    row = {
        "run": "demo · 2026-11-21 14:00:00",
        "status": "finished",
        "started": "2026-11-21 14:00:00",
        "took": "311 s",
        "settings": "learning_rate=0.001, seed=1",
        "result": "sft 56.8% [52.4%, 61.1%]; policy 97.2%",
        "page": page,
    }
    lines = format_runs_table([row, {**row, "run": "  sft", "started": ""}]).splitlines()
    assert lines[-1] == f"page of the newest: {page}"
    assert [len(line) <= 80 for line in lines[:-2]] == [True] * 3
    assert lines[0].split() == ["run", "status", "took", "result"]
    assert (
        lines[1].startswith("demo · 2026-11-21 14:00:00  finished  311 s  sft 56.8%")
        and lines[1].count("…") == 1
    )
    wider = format_runs_table([row], 100).splitlines()
    assert (
        wider[0].split() == ["run", "status", "took", "settings", "result"]
        and wider[1].count("…") == 1
    )
    unlimited = format_runs_table([row], 1000).splitlines()
    assert page in unlimited[1] and "…" not in unlimited[1]
    long = {**row, "run": "a pipeline with a name of words · 2026-11-21 14:00:00"}
    lines = format_runs_table([long], 80).splitlines()
    assert lines[0].split() == ["run", "status", "result"] and len(lines[1]) <= 80
    assert lines[1].startswith(f"{long['run']}  finished  ")


def test_validate(config, capsys):
    assert cli.main(["validate", config]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config}: fine\n") and "sft -> policy" in out


def test_the_summary_of_validate_fits_into_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        cli.main(["init", "first_task"]) == 0
        and cli.main(["validate", "first_task/config.yaml"]) == 0
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert all(
        len(line) <= 80 for line in lines if " " in line.strip().removeprefix("writes to ")
    ), out
    assert "first_task.reward:brevity (found, not imported: --import-code)" in " ".join(out.split())
    monkeypatch.delenv("COLUMNS")
    assert cli.main(["validate", "first_task/config.yaml"]) == 0
    assert any(
        len(line) > 80 for line in capsys.readouterr().out.splitlines()
    )  # unwrapped in a pipe


def test_validate_warns_of_a_reward_model_that_no_reward_uses(config, capsys):
    with open(config, "a") as file:
        file.write("  reward_model: {}\n")
    assert cli.main(["validate", config]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(
        f"posttrain: warning: {config}:5: stages.reward_model: is trained, but no reward"
    )
    assert (
        "set stages.policy.rewards.learned to a weight" in captured.err
        and captured.out.startswith(config)
    )
    assert (
        cli.main(["validate", config, "-s", "stages.policy.rewards={task: 1.0, learned: 0.1}"]) == 0
    )
    assert capsys.readouterr().err == ""


CUSTOM_DATA = """
name: custom
model: {path: no_such_folder}
stages:
  prepare_data: {demonstrations: rows.jsonl}
  sft: {}
"""


def test_validate_reads_rows_and_says_what_it_did_not_check(tmp_path, monkeypatch, capsys):
    """Check data files without an environment: rows are read, and the model is taken for a hub name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom.yaml").write_text(CUSTOM_DATA)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    assert cli.main(["validate", "custom.yaml"]) == 0
    out = capsys.readouterr().out
    assert f"data      {tmp_path / 'rows.jsonl'} (demonstrations, all 2 rows checked)" in out
    assert (
        "model     no_such_folder (no folder here, so a Hugging Face name; looked up when it runs)"
        in out
    )
    assert "acts in" not in out
    assert cli.main(["validate", "custom.yaml", "-s", "stages.evaluate={}"]) == 0
    assert "acts in   pixel_grid" in capsys.readouterr().out


CUSTOM_CODE = """
import pathlib
pathlib.Path("ran").touch()
from rl_core.environments.arithmetic import Arithmetic
def brief(trajectories): return [0.0] * len(trajectories)
"""


@pytest.mark.parametrize(
    ("environment", "rewards", "path"),
    [
        ("{name: 'custom_code:Arithmetic'}", "{task: 1.0}", "custom_code:Arithmetic"),
        ("{name: arithmetic}", "{'custom_code:brief': 1.0}", "custom_code:brief"),
    ],
)
def test_validate_imports_code_only_on_request(
    tmp_path, monkeypatch, capsys, environment, rewards, path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "custom_code", raising=False)
    (tmp_path / "custom_code.py").write_text(CUSTOM_CODE)
    text = f"name: custom\nenvironment: {environment}\nstages: {{sft: {{}}, policy: {{rewards: {rewards}}}}}\n"
    (tmp_path / "custom.yaml").write_text(text)
    assert cli.main(["validate", "custom.yaml"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("custom.yaml: fine, but for code that was not imported\n")
        and f"code      {path} (" in out
    )
    assert not (tmp_path / "ran").exists()
    missing = text.replace("custom_code:", "no_code:")
    (tmp_path / "custom.yaml").write_text(missing)
    assert cli.main(["validate", "custom.yaml"]) == 2
    assert "needs the module 'no_code', which cannot be found" in capsys.readouterr().err
    (tmp_path / "custom.yaml").write_text(text)
    assert cli.main(["validate", "custom.yaml", "--import-code"]) == 0
    assert f"code      {path} (imported)" in capsys.readouterr().out and (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", [[], ["--import-code"]])
def test_validate_runs_no_command_that_stands_for_an_environment(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    with fakes("gymnasium"):
        options = {"id": "os:system", "options": {"command": "touch ran"}}
        values = {
            "name": "x",
            "environment": {"name": "gymnasium", "options": options},
            "stages": {"sft": {}},
        }
        (tmp_path / "x.yaml").write_text(json.dumps(values))
        assert cli.main(["validate", "x.yaml", *command]) == (2 if command else 0)
    assert not (tmp_path / "ran").exists()
    assert (
        not command or "'os:system' is not a subclass of gymnasium.Env" in capsys.readouterr().err
    )


def test_a_bad_model_folder_exits_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    assert cli.main(["doctor", "--model", str(tmp_path / "broken")]) == 2
    assert "broken" in capsys.readouterr().err
    assert issubclass(ModelError, CheckpointError)  # older handlers still catch it


def test_validate_refuses_a_bad_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom.yaml").write_text(CUSTOM_DATA)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    assert cli.main(["validate", "custom.yaml"]) == 2
    captured = capsys.readouterr()
    assert (
        f"{tmp_path / 'rows.jsonl'}:2: completion: is missing" in captured.err
        and captured.out == ""
    )
    monkeypatch.setattr("tasks.config.machine_checks.NUM_CHECKED_ROWS", 1)
    assert cli.main(["validate", "custom.yaml"]) == 0
    assert "first 1 rows checked" in capsys.readouterr().out


def test_validate_show_prints_a_config_that_loads(config, capsys, tmp_path):
    assert cli.main(["validate", config, "--show", "-s", "seed=5"]) == 0
    shown = tmp_path / "shcustom.yaml"
    shown.write_text(capsys.readouterr().out)
    from tasks.config import load_settings

    assert load_settings(shown) == load_settings(config, ["seed=5"])


@pytest.mark.parametrize(
    "command",
    ["run", "validate", "stage sft", "evaluate m -c", "promote -c", "runs -c", "doctor -c"],
)
def test_every_entry_checks_the_config_first(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("name: demo\nstages:\n  policy: {group_siz: 3}\n")
    before = set(tmp_path.iterdir())
    assert cli.main([*command.split(), "bad.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "posttrain: bad.yaml:3: stages.policy.group_siz: unknown key; did you mean 'group_size'?\n"
    )
    assert captured.out == ""
    assert set(tmp_path.iterdir()) == before  # nothing was written


def test_bad_config_in_a_separate_process(tmp_path):
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
    assert "give one with --config" in capsys.readouterr().err


def test_stage_that_the_config_lacks(config, capsys):
    assert cli.main(["stage", "reward_model", config]) == 2
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
    assert "old: is a model; give its episodes with --config CONFIG" in capsys.readouterr().err
    assert cli.main(["analyze", "old", "new", "--config", config, "--out", "report", "-q"]) == 0
    assert calls == [("demo", {"old": str(tmp_path / "old"), "new": str(tmp_path / "new")}, True)]
    assert (tmp_path / "report" / "report.html").read_text() == "<p>"
    assert capsys.readouterr().out == "the table\nreport: report/report.html\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\x1f\x8b\x08", "a.jsonl: the file is gzip-compressed; unpack it first"),
        ("a.jsonl", b'{"level": "easy"}\n', "a.jsonl:1: field 'environment' is missing"),
        ("a.jsonl", b"{\n", "a.jsonl:1: this is not JSON"),
        ("folder/other.txt", b"", "folder: no trajectories*.jsonl there; name the files"),
    ],
)
def test_unreadable_trajectories_exit_with_2_and_leave_nothing(
    name, content, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert cli.main(["analyze", name.split("/")[0], "--out", "report"]) == 2
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
        == 0
    )
    assert calls == [
        (4, {"start": "base", "force": True, "reason": "why", "quiet": True, **DEFAULT_OPTIONS})
    ]
    assert capsys.readouterr().out == "skipped: nothing is new\n"
    assert cli.main(["retrain", config]) == 0
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
        (BackendError("store is down"), 1, "posttrain: BackendError: store is down\n"),
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
            "posttrain: CheckpointError: /full: cannot be written: No space left on device; make room, as with",
        ),
        (
            write_error("/ro", OSError(30, "Read-only file system")),
            1,
            "posttrain: CheckpointError: /ro: cannot be written: Read-only file system; make the file system writable",
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


def test_sigterm_unwinds_and_exits_with_143(tmp_path):
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
    (tmp_path / "good.yaml").write_text(GOOD)
    done = run_python(code, "run", "good.yaml", cwd=tmp_path)
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
        "from posttrain.cli import main as cli\n"
        "cli.COMMANDS['runs'] = lambda arguments: print('x\\n' * 100000) or 0\n"
        "sys.exit(cli.main(['runs']))"
    )
    command = f'{sys.executable} -c "$CODE" | head -n 1'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CODE": code}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout == "x\n" and done.stderr == ""


def test_table_is_aligned():
    rows = [{"run": "demo 1", "status": "finished"}, {"run": "x", "status": "failed"}]
    assert format_runs_table(rows) == "run     status\ndemo 1  finished\nx       failed"


def test_approve_passes_its_options(config, tmp_path, monkeypatch, capsys):
    calls = []

    def decide_approval(output, uri, run, **options):
        calls.append((str(output), uri, run, options))
        return "decided"

    monkeypatch.setattr("posttrain.cli.approvals.decide_approval", decide_approval)
    assert cli.main(["approve", "demo", "--no", "--note", "worse", "--output", "o"]) == 0
    assert cli.main(["approve"]) == 0
    rejected = {"approve": False, "by": "", "note": "worse", "store_options": " --output o"}
    undecided = {"approve": None, "by": "", "note": "", "store_options": ""}
    assert calls == [("o", None, "demo", rejected), ("outputs", None, None, undecided)]
    assert capsys.readouterr().out == "decided\ndecided\n"
    with pytest.raises(SystemExit):
        cli.main(["approve", "demo", "--yes", "--no"])


def test_resume_uses_the_recorded_options(flow, tmp_path, monkeypatch, capsys):
    from tasks.config import build_settings

    settings = build_settings(
        {"name": "demo", "model": {"path": "a/b"}, "stages": {"policy": {}}}, check_files=False
    )
    record = SimpleNamespace(
        name="demo · 1", status="killed", only="policy", evaluated_models={"a": "b"}, started="1"
    )
    monkeypatch.setattr("posttrain.cli.resumable_runs.find_resumable_run", lambda *_: record)
    monkeypatch.setattr("posttrain.cli.resumable_runs.load_recorded_settings", lambda *_: settings)
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
    assert used == {**recorded, "allow_drift": False, "restart": False}
    assert capsys.readouterr().out == "resuming 'demo · 1', which is killed\nthe table\n"


@pytest.mark.parametrize("command", ["resume", "gc", "gc --yes"])
def test_operations_without_runs_name_the_folder(command, tmp_path, capsys):
    assert cli.main([*command.split(), "--output", str(tmp_path)]) == 2
    assert f"no runs in {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    assert cli.main(["runs", "--output", str(tmp_path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    with Tracking(None, tmp_path).start_run("demo", tmp_path / "run") as run:
        run.log_metrics({"train/loss": 0.5}, 1)
        run.set_tag("result", "good, 'quoted'")
    assert cli.main(["runs", "--output", str(tmp_path), "--format", "json"]) == 0
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
    assert cli.main(["runs", "--output", str(tmp_path), "--format", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["run_id"], row["metrics.train/loss"], row["result"]) == (
        record["run_id"],
        "0.5",
        "good, 'quoted'",
    )
