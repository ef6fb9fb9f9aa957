"""Help, suggestions for mistyped words, and tables in 80 columns."""

import re
import shlex

import pytest

from posttrain.cli import main as cli
from posttrain.cli.former_commands import FORMER_COMMANDS
from posttrain.cli.main import COMMANDS, build_parser
from posttrain.cli.tables import format_runs_table


def test_help_imports_nothing_heavy(run_python):
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
    every_command = code.replace("main(sys.argv[1:])", "build_parser()", 1)
    done = run_python(every_command.replace("import main", "import build_parser"))
    assert (done.returncode, done.stdout) == (0, "HEAVY []\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        ([], []),
        (["--help"], []),
        (["rnu"], []),
        (["run", "--help"], ["run"]),
        (["check", "resume", "--help"], ["check_resume"]),
        (["check", "--help"], []),
        (["run", "check"], ["run"]),
        (["run", "plan", "--help"], ["run"]),
        (["service", "key", "--help"], ["service"]),
        (["down", "--nonsense"], ["down"]),
    ],
)
def test_only_the_module_of_the_command_is_imported(run_python, arguments, loaded):
    code = (
        "import contextlib, sys\n"
        "from posttrain.cli.main import list_commands, main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "names = (name.replace(' ', '_') for name in list_commands())\n"
        "print('LOADED', [name for name in names if f'posttrain.cli.{name}' in sys.modules])"
    )
    done = run_python(code, *arguments)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"LOADED {loaded}", done.stderr


def test_every_command_has_help_with_examples(capsys):
    names = list(COMMANDS)
    groups = [name for group in cli.COMMAND_GROUPS.values() for name in group]
    assert names == groups and len(set(groups)) == len(groups) == 29
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    overview = capsys.readouterr().out
    for name in names:
        assert f"\n  {name} " in overview
    for command in cli.list_commands():
        with pytest.raises(SystemExit) as end:
            cli.main([*command.split(), "--help"])
        text = capsys.readouterr().out
        assert end.value.code == 0 and f"examples:\n  posttrain {command}" in text
    assert not [name for name in FORMER_COMMANDS if re.search(rf"(^|  ){name} ", overview)]


def test_examples_in_help_parse():
    parser, modules = build_parser(), cli.import_command_modules(None)
    assert list(modules) == cli.list_commands()
    for command, module in modules.items():
        for example in module.EXAMPLES:
            arguments = parser.parse_args(shlex.split(example.split("    (")[0]))
            assert arguments.command == command


def test_the_bare_command_shows_five_commands_that_parse(capsys):
    assert cli.main([]) == 0
    shown = [
        line.split()[:4]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  posttrain ")
    ]
    commands = [words for words in shown if words[1] in COMMANDS]
    assert [words[1] for words in commands] == ["run", "init", "runs", "ui", "check"]
    assert commands[-1][2] == "machine"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rnu", "demo"], "did you mean 'run'?"),
        (["run", "demo", "--quite"], "did you mean '--quiet'?"),
        (["run", "demo", "--fersh=1"], "did you mean '--fresh'?"),
        (["service", "qeue"], "did you mean 'queue'?"),
        (["completion", "bsh"], "did you mean 'bash'?"),
        (["check", "machin"], "did you mean 'machine'?"),
        (["mointor"], "choose from init, convert"),
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
        wider[0].split() == ["run", "status", "started", "took", "result"]
        and wider[1].count("…") == 1
    )
    unlimited = format_runs_table([row], 1000).splitlines()
    assert page in unlimited[1] and "…" not in unlimited[1]
    long = {**row, "run": "a pipeline with a name of words · 2026-11-21 14:00:00"}
    lines = format_runs_table([long], 80).splitlines()
    assert lines[0].split() == ["run", "status", "result"] and len(lines[1]) <= 80
    assert lines[1].startswith(f"{long['run']}  finished  ")


def test_table_is_aligned():
    rows = [{"run": "demo 1", "status": "finished"}, {"run": "x", "status": "failed"}]
    assert format_runs_table(rows) == "run     status\ndemo 1  finished\nx       failed"
