"""Commands and options of the last release: they run, and say the new form in one line on standard error."""

import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

from posttrain.cli import main as cli
from posttrain.cli.former_commands import FORMER_COMMANDS, translate_command
from posttrain.cli.tables import print_json
from tasks.tracking import Tracking

LINES = {
    "stage policy demo --model m --fresh": "run demo --only policy --model m --fresh",
    "why demo": "run demo --dry-run",
    "why policy demo --set seed=1 --json": "run demo --dry-run --only policy --set seed=1 --json",
    "monitor": "ui --live",
    "monitor --run demo --port 7861 -o o": "ui demo --live --output o --port 7861",
    "approve": "promote --pending",
    "approve 'demo · 1'": "promote --pending 'demo · 1'",
    "approve demo --yes --note ok": "promote --approve demo --note ok",
    "approve demo --no -c mine.yaml --by ada": "promote mine.yaml --reject demo --by ada",
    "approve --json": "promote --pending --json",
    "verify-resume demo --kills 10": "check resume demo --kills 10",
    "profile demo -n 20 --stage sft": "check profile demo --stage sft --iterations 20",
    "plan demo --format json --gpus 8xH200": "check plan demo --gpus 8xH200 --json",
    "doctor": "check machine",
    "doctor --config gsm8k --repair": "check machine gsm8k --repair",
    "doctor --calibrate --output machine.yaml": "check machine --calibrate --to machine.yaml",
    "doctor -o outputs": "check machine --output outputs",
    "sync -c gsm8k": "store sync gsm8k",
    "gc --keep 3 --pipeline a --pipeline b --yes": "store gc --keep 3 --pipeline a --pipeline b --yes",
    "prefer mine.yaml --export": "label mine.yaml --export",
    "diff sft policy -c demo --episodes 9": "compare demo --models sft policy --episodes 9",
    "diff a b --format json": "compare --models a b --json",
    "stage sft demo --set=-x=1": "run demo --only sft --set=-x=1",
}


@pytest.mark.parametrize(("former", "new"), LINES.items(), ids=LINES)
def test_a_former_command_line_is_translated_to_one_that_parses(former, new, capsys):
    words = shlex.split(former)
    assert translate_command(cli.build_parser(words), words) == shlex.split(new)
    assert capsys.readouterr().err == f"posttrain: {words[0]} is now: posttrain {new}\n"
    arguments = cli.build_parser().parse_args(shlex.split(new))
    assert arguments.command in cli.list_commands()


def test_every_former_command_has_a_line_here_and_none_is_shown(capsys):
    assert {line.split()[0] for line in LINES} == set(FORMER_COMMANDS)
    assert not set(FORMER_COMMANDS) & set(cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "Former name of check machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("former", "new"),
    [
        ("diff", "compare --models"),
        ("stage sft", "run CONFIG --only STAGE"),
        ("plan demo --gpu", "check plan"),
    ],
)
def test_an_incomplete_former_command_line_says_the_new_name_too(former, new, capsys):
    words = shlex.split(former)
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    *_, error, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and error.startswith(f"posttrain {words[0]}: ")
    assert last == f"posttrain: {words[0]} is now: posttrain {new}"


def test_a_former_command_runs_and_its_output_is_that_of_the_new_one(tmp_path, capsys):
    words = ["--output", str(tmp_path)]
    assert cli.main(["approve", *words, "--json"]) == 0
    former = capsys.readouterr()
    assert cli.main(["promote", "--pending", *words, "--json"]) == 0
    new = capsys.readouterr()
    assert former.out == new.out == "[]\n" and new.err == ""
    assert former.err.count("\n") == 1 and former.err.startswith("posttrain: approve is now: ")


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["runs", "--config", "demo"], "runs demo"),
        (["evaluate", "models:/a/1", "-c", "no.yaml"], "evaluate no.yaml models:/a/1"),
        (["analyze", "a.jsonl", "b.jsonl", "--config=no.yaml"], "analyze no.yaml a.jsonl b.jsonl"),
        (["replay", "policy/1/easy/2/0", "-c", "no.yaml"], "replay no.yaml policy/1/easy/2/0"),
        (["promote", "--version", "3", "-c", "no.yaml"], "promote no.yaml --version 3"),
    ],
)
def test_the_former_option_config_is_the_argument_now(words, new, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli.main(words)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == f"posttrain: --config is now: posttrain {new}"


def test_two_configurations_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["runs", "demo", "-c", "gsm8k"])
    assert end.value.code == 2
    assert "name one configuration: demo, or gsm8k of --config" in capsys.readouterr().err


def test_arguments_and_options_come_in_any_order():
    parse = cli.build_parser().parse_args
    arguments = parse(["evaluate", "demo", "--quiet", "model", "-s", "seed=1"])
    assert (arguments.config, arguments.model, arguments.set) == ("demo", "model", ["seed=1"])
    assert parse(["evaluate", "--quiet", "demo", "model"]).model == "model"
    arguments = parse(["compare", "--models", "a", "b", "demo"])
    assert (arguments.runs, arguments.models) == (["demo"], ["a", "b"])
    assert parse(["promote", "--pending"]).pending == ""
    assert parse(["promote", "--pending", "demo-7f3a"]).pending == "demo-7f3a"
    assert parse(["run", "demo", "--only", "sft", "-o", "out"]).output == "out"


def test_output_is_the_output_folder_of_every_command(tmp_path, capsys):
    folder = tmp_path / "my: 'outputs'"  # YAML would read a bare text otherwise
    assert cli.main(["validate", "test", "-o", str(folder)]) == 0
    assert f"writes to {folder}/test" in capsys.readouterr().out
    others = [
        name
        for name in cli.list_commands()
        if "--output" not in cli_options(name) and name not in FREE
    ]
    assert others == []


# They have no output folder: files of the user, a service's folder, a script.
FREE = ("init", "convert", "data", "online", "service", "completion")


def cli_options(command):
    parser = cli.build_parser(command.split())
    for word in command.split():
        (commands,) = [action for action in parser._actions if hasattr(action, "add_parser")]
        parser = commands.choices[word]
    return parser._option_string_actions


def test_a_script_with_set_e_and_a_closed_pipe_gets_valid_output(tmp_path):
    script = (
        "set -eu -o pipefail; export PYTHONIOENCODING=ascii COLUMNS=40\n"
        "$POSTTRAIN doctor --faults --json > faults.json; $POSTTRAIN approve --json > pending.json\n"
        "$POSTTRAIN runs --json > runs.json; ($POSTTRAIN check machine --faults --json || true) | head -1\n"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "POSTTRAIN": f"{sys.executable} -m posttrain",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[\n"
    assert done.stderr.splitlines() == [
        "posttrain: doctor is now: posttrain check machine --json --faults",
        "posttrain: approve is now: posttrain promote --pending --json",
    ]
    assert json.loads((tmp_path / "runs.json").read_text()) == []
    assert {"name", "group"} <= set(json.loads((tmp_path / "faults.json").read_text())[0])


@pytest.fixture
def runs(tmp_path):
    """Return the short ids of a run of `demo` and of a later one of `other`."""
    ids = []
    for pipeline in ("demo", "other"):
        run = Tracking(None, tmp_path, pipeline).start_run(
            f"{pipeline} · 2026-11-29 04:01:19",
            tmp_path / pipeline / "runs" / "2026-11-29-04-01-19",
            tags={"kind": "pipeline", "pipeline": pipeline},
        )
        run.close()
        ids.append((f"{pipeline}-{run.key[:4]}", run.run_id))
    return ids


def test_the_run_of_the_former_monitor_stays_the_run_although_a_configuration_has_its_name(
    runs, tmp_path, capsys
):
    (short_id, _), _ = runs
    for name in ("demo", "demo/2026-11-29-04-01-19", "demo/2026", short_id):
        words = ["monitor", "--run", name, "--output", str(tmp_path)]
        expected = ["ui", short_id, "--live", "--output", str(tmp_path)]
        assert translate_command(cli.build_parser(words), words) == expected
    words = ["monitor", "--run", "dmeo", "--output", str(tmp_path)]
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        translate_command(cli.build_parser(words), words)
    assert end.value.code == 2
    assert "no run 'dmeo' in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["compare", "a", "b", "--config", "mine.yaml"], "compare a b --output results"),
        (["resume", "-c", "mine.yaml"], "resume --output results"),
        (["compare", "--models", "a", "b", "-c", "mine.yaml"], "compare mine.yaml --models a b"),
    ],
)
def test_the_former_configuration_of_runs_is_now_its_output_folder(
    words, new, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("name: mine\noutput: results\nstages: {sft: {}}\n")
    cli.main(words)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == f"posttrain: --config is now: posttrain {new}"


@pytest.mark.parametrize("option", ["--approve", "--reject"])
def test_an_empty_run_is_no_request_for_the_previous_champion(option, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("the champion moved")

    monkeypatch.setattr("tasks.lifecycle.promotion.promote_version", refuse)
    assert cli.main(["promote", "demo", option, "", "--note", "worse"]) == 2
    error = capsys.readouterr().err
    assert "the name of the run is empty" in error and error.count("\n") == 1


def test_json_carries_numbers_of_numpy_and_dates(capsys):
    record = {
        "step": np.int64(3),
        "loss": np.float32(0.5),
        "bad": np.float64("nan"),
        "is_over": np.True_,
        "day": datetime.date(2026, 11, 29),
        "path": Path("a/b"),
    }
    print_json(record)
    assert json.loads(capsys.readouterr().out) == {
        "step": 3,
        "loss": 0.5,
        "bad": None,
        "is_over": True,
        "day": "2026-11-29",
        "path": "a/b",
    }
