"""Width of the help texts: within the terminal, with examples that can still be copied."""

import argparse
import shlex
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from posttrain.cli.main import build_parser
from posttrain.cli.parser import format_first_commands
from posttrain.cli.run_setup import format_run_banner


def iter_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in dict.fromkeys(action.choices):
                yield from iter_parsers(action.choices[name])


def test_no_line_of_any_help_is_wider_than_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    wide = [
        f"{parser.prog}: {line}"
        for parser in iter_parsers(build_parser())
        for line in parser.format_help().splitlines()
        if len(line) > 80
    ]
    assert wide == []


def test_examples_that_are_cut_are_the_same_command_to_a_shell(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    root, cut = build_parser(), 0
    (commands,) = [
        action for action in root._actions if isinstance(action, argparse._SubParsersAction)
    ]
    for command in commands.choices.values():
        text = command.format_help().partition("examples:\n")[2]
        examples = [line.partition("    (")[0] for line in (command.epilog or "").splitlines()[1:]]
        cut += text.count("\\\n")
        shown = [
            line for line in text.replace("\\\n", "").splitlines() if line.startswith("  posttrain")
        ]
        assert [shlex.split(line.partition("    (")[0]) for line in shown] == [
            shlex.split(line) for line in examples
        ]
    assert cut >= 5


@pytest.mark.parametrize("columns", [40, 60])
def test_the_first_texts_fit_into_a_narrow_terminal(columns, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)  # where no run of this name has finished stages
    stages = SimpleNamespace(
        active=["prepare_data", "sft", "reward_model", "policy", "evaluate", "promote"]
    )
    first = format_run_banner(
        SimpleNamespace(name="demo", output="outputs", stages=stages)
    ).splitlines()
    first = [line for line in first if not line.startswith("output ")]  # a path is never cut
    for line in (
        *build_parser().format_help().splitlines(),
        *format_first_commands().splitlines(),
        *first,
    ):
        assert len(line) <= columns or line.startswith(("results ", "web UI ", "  posttrain")), line
