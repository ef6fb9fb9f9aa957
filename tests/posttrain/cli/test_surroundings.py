"""Commands in unusual surroundings: closed or full streams, poor encodings, no folder, few files, wrong variables."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

from posttrain.cli import main as cli

PROGRAM = """
import os, resource, sys
from posttrain.cli import main as cli, runs
from rl_core.errors import SettingsError
from rl_core.storage.faults import inject_fault
def run_command(arguments):
    BODY
    return 0
runs.run_command = run_command
sys.exit(cli.main(["runs"]))
"""


def run_command(body, streams="", folder=None, **environment):
    """Run `posttrain runs` with this body; a shell redirects its streams."""
    return subprocess.run(
        ["bash", "-c", f'exec "$PYTHON" -c "$CODE" {streams}'],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "CODE": PROGRAM.replace("BODY", body),
            **environment,
        },
    )


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "utf-8"])
def test_characters_that_a_terminal_lacks_are_printed_as_escapes(encoding):
    done = run_command(r"print('demo \u00b7 \u2603 \ud800')", PYTHONIOENCODING=encoding)
    expected = "demo · ☃ \\ud800\n" if encoding == "utf-8" else "demo \\xb7 \\u2603 \\ud800\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_output_to_a_full_disk_is_reported():
    done = run_command("print('x')", "> /dev/full", PYTHONUNBUFFERED="")
    assert done.returncode == 1
    assert (
        done.stderr
        == "posttrain: the output cannot be written: No space left on device; make room\n"
    )


def test_an_error_that_cannot_be_printed_keeps_its_exit_code():
    assert run_command("raise SettingsError('x')", "2> /dev/full").returncode == 2


def test_files_never_get_the_numbers_of_closed_streams(tmp_path):
    body = "f = open('f', 'w'); print('x'); print('y', file=sys.stderr); os.system('echo z'); f.write(str(f.fileno()))"
    done = run_command(body, "<&- >&- 2>&-", tmp_path)
    assert done.returncode == 0 and int((tmp_path / "f").read_text()) > 2


def test_a_removed_working_folder_is_reported(tmp_path):
    (tmp_path / "removed").mkdir()
    done = run_command("os.getcwd()", folder=tmp_path)
    assert done.returncode == 0
    done = run_command("os.chdir('removed'); os.rmdir('../removed'); os.getcwd()", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "posttrain: the current folder was removed; change to an existing one\n",
    )


def test_too_many_open_files_name_the_limit():
    done = run_command(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); [os.pipe() for _ in range(20)]"
    )
    assert (done.returncode, done.stderr) == (
        1,
        "posttrain: Too many open files; raise the limit of open files (ulimit -n)\n",
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("POSTTRAIN_FAULT", "garbage", "POSTTRAIN_FAULT: 'garbage' must read point:hit:action"),
        ("POSTTRAIN_FAULT", "nope:1:kill", "POSTTRAIN_FAULT: unknown point 'nope'"),
        (
            "POSTTRAIN_FAULT_LOG",
            "/nowhere/log",
            "POSTTRAIN_FAULT_LOG: /nowhere/log cannot be written: No such file",
        ),
    ],
)
def test_a_wrong_plan_of_faults_is_an_error_of_the_command_not_of_an_import(
    variable, value, message
):
    done = run_command("inject_fault('loop.step')", **{variable: value})
    assert done.returncode == 2 and done.stderr.startswith(f"posttrain: {message}")


def test_wrong_prefect_variables_are_refused():
    body = "from prefect.settings import get_current_settings; get_current_settings()"
    done = run_command(body, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="abc")
    assert (
        done.returncode == 2
        and "\nposttrain: Prefect refuses a variable PREFECT_..." in done.stderr
    )
    assert "startup_timeout_seconds" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("level", ["1", "2"])
def test_python_without_asserts_is_refused(level):
    done = run_command("return 0", PYTHONOPTIMIZE=level)
    assert done.returncode == 2 and "`python -O` (PYTHONOPTIMIZE) takes out checks" in done.stderr


@pytest.mark.parametrize("module", ["parser", "runs"])
def test_ctrl_c_while_modules_are_imported_prints_no_traceback(module):
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'posttrain.cli.{module}': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # these tests may run in the background
        "from posttrain.cli.entry import command\n"
        "sys.argv = ['posttrain', 'runs']\n"
        "command()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_texts_of_models_and_environments_are_wrapped_and_escaped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    text = "it failed: \x1b[2J" + " word" * 40
    monkeypatch.setattr(
        "posttrain.cli.recorded_settings.load_newest_run_settings", lambda output: None
    )
    monkeypatch.setattr("posttrain.cli.replay.format_failed_episodes", lambda settings: text)
    monkeypatch.setattr(
        "posttrain.cli.replay.replay_recorded_episode", lambda *_, **__: (text, True)
    )
    monkeypatch.setattr(
        "posttrain.cli.store_gc.collect_garbage",
        lambda *_, **__: SimpleNamespace(format_text=lambda: text, to_record=dict),
    )
    monkeypatch.setattr("posttrain.cli.approvals.decide_approval", lambda *_, **__: text)
    monkeypatch.setattr("posttrain.cli.compare.compare_tracked_runs", lambda *_: {})
    monkeypatch.setattr("posttrain.cli.compare.format_comparison", lambda comparison: text)
    for command in (
        ["replay"],
        ["replay", "policy/1/easy/2/0"],
        ["replay", "policy/1/sums/easy/2/0"],
        ["store", "gc"],
        ["promote", "--pending", "demo"],
        ["compare", "a", "b"],
    ):
        assert cli.main(command) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "\\x1b[2J" in lines[0] and "\x1b" not in "".join(lines), command
        assert max(map(len, lines)) <= 60 and len(lines) > 3, command


@pytest.mark.parametrize("command", ["run demo", "serve demo", "service up"])
def test_too_few_open_files_are_refused_before_anything_starts(tmp_path, command):
    """A run hung: its Prefect server could not accept a connection."""
    done = subprocess.run(
        ["bash", "-c", f'ulimit -n 16; exec "$PYTHON" -m posttrain {command}'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
    )
    assert (done.returncode, done.stderr) == (
        2,
        "posttrain: the limit of open files is 16, and at least 128 are needed; raise it (ulimit -n)\n",
    )
    assert not list(tmp_path.iterdir())


def test_a_low_limit_of_open_files_is_raised_where_the_system_permits():
    body = "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    code = (
        PROGRAM.replace("BODY", body)
        .replace('["runs"]', '["check", "profile", "demo"]')
        .replace("runs", "check_profile")
    )
    done = subprocess.run(
        ["bash", "-c", 'ulimit -S -n 40; exec "$PYTHON" -c "$CODE" '],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "CODE": code},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "128\n", "")
