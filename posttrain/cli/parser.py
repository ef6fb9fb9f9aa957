"""An argument parser that says what was probably meant: commands, options, choices. Standard library only.

Help of `posttrain` itself: commands in groups, and the five to start with. Standard library only.

Argument parser of the `posttrain` command. Standard library only, so that `--help` starts at once.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from posttrain.cli import (
    evaluate_commands,
    inspect_commands,
    online_command,
    operate_commands,
    plan_command,
    prefer_command,
    serve_command,
    service_command,
    train_commands,
)


class SuggestingParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with hints at the nearest known name; its subparsers are of this class, too."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As the base class; an option that this command has not is refused here, where its options are known."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [name for action in self._actions for name in action.option_strings]
            hints = [
                _suggest_nearest(word.partition("=")[0], options)
                for word in rest
                if word.startswith("-")
            ]
            hint = next((hint for hint in hints if hint), "")
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        names = [str(choice) for choice in choices]
        hint = _suggest_nearest(str(value), names) or f"; choose from {', '.join(names)}"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{hint}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """The usage in short, and the message; exit code 2."""
        self.print_usage(_get_stderr())
        self.exit(2, f"{self.prog}: {message}\n")


def _get_stderr() -> Any:
    import sys

    return sys.stderr


def _suggest_nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'run'?`, or "" where nothing is near."""
    import difflib  # where something is wrong

    names: Sequence[str] = list(known)
    starts = [one for one in names if len(name) > 2 and one.startswith(name)]
    match = starts or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


# Commands as `--help` lists them.
GROUPS: dict[str, tuple[str, ...]] = {
    "prepare": ("init", "convert", "data", "validate", "plan"),
    "train": ("run", "stage", "resume", "sweep", "retrain", "online"),
    "look": ("runs", "why", "compare", "diff", "monitor", "ui", "profile"),
    "judge": ("evaluate", "analyze", "replay", "promote", "approve", "prefer"),
    "serve": ("serve", "service"),
    "operate": ("up", "down", "status", "sync", "gc", "doctor", "verify-resume", "completion"),
}
COMMAND_ORDER = tuple(name for names in GROUPS.values() for name in names)

DESCRIPTION = """\
Post-train language-model policies: prepare data, SFT, preference optimisation (DPO), reward model, policy
optimisation, evaluation, analysis, promotion. A pipeline is one YAML file."""

_FIRST_COMMANDS = {
    "run demo": "the whole pipeline on an environment that needs no download",
    "init my_task": "a config, an environment and a reward to start from",
    "runs": "what ran, how it ended, how good it is",
    "monitor": "watch a run live",
    "doctor": "what this machine has, and what is missing",
}

_EXIT_CODES = (
    "0 done   1 failed   2 wrong settings or data   130, 143 stopped; the same command resumes"
)
_NAME_COLUMNS = 18  # columns of names


class OverviewParser(SuggestingParser):
    """The parser of `posttrain` itself."""

    def format_help(self) -> str:
        """Commands in their groups, within the width of the terminal."""
        abouts = _collect_command_help(self)
        lines = [
            "usage: posttrain COMMAND ...",
            "",
            *_wrap_help_text(DESCRIPTION.replace("\n", " "), ""),
            "",
            "start here",
        ]
        lines += _format_help_rows(
            {f"posttrain {name}": about for name, about in _FIRST_COMMANDS.items()}, 26
        )
        for heading, names in GROUPS.items():
            lines += [
                "",
                heading,
                *_format_help_rows({name: abouts[name] for name in names if name in abouts}),
            ]
        options = {"-h, --help": "this; `posttrain COMMAND --help`: one command, with examples"}
        lines += ["", "options", *_format_help_rows({**options, "--version": "print the version"})]
        lines += ["", "exit codes", *_wrap_help_text(_EXIT_CODES, "  ")]
        return "\n".join(lines) + "\n"

    def format_usage(self) -> str:
        """One line instead of a list of all commands."""
        return "usage: posttrain COMMAND ...    (posttrain --help lists the commands)\n"


def format_first_commands() -> str:
    """The five commands that matter at first."""
    rows = _format_help_rows(
        {f"posttrain {name}": about for name, about in _FIRST_COMMANDS.items()}, 26
    )
    return "\n".join(
        [
            *rows,
            "",
            *_wrap_help_text(
                "posttrain --help lists all commands, posttrain COMMAND --help one.", "  "
            ),
        ]
    )


def _collect_command_help(parser: argparse.ArgumentParser) -> Mapping[str, str]:
    """One line about each command."""
    (commands,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return {choice.dest: choice.help or "" for choice in commands._choices_actions}


def _format_help_rows(abouts: Mapping[str, str], margin: int = _NAME_COLUMNS) -> Iterator[str]:
    for name, about in abouts.items():
        first, *more = _wrap_help_text(about, " " * margin)
        yield f"  {name}".ljust(margin) + first[margin:]
        yield from more


def _wrap_help_text(text: str, indent: str) -> list[str]:
    width = max(36, min(120, shutil.get_terminal_size().columns))
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = OverviewParser(prog="posttrain", description=DESCRIPTION)
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    parser.set_defaults(debug=False, command=None)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=SuggestingParser
    )
    rooms = (
        train_commands,
        plan_command,
        inspect_commands,
        evaluate_commands,
        operate_commands,
        serve_command,
        service_command,
        online_command,
        prefer_command,
    )
    parsers = {name: add for room in rooms for name, add in room.PARSERS.items()}
    for name in sorted(parsers, key=COMMAND_ORDER.index):
        parsers[name](commands)
    return parser


class _PrintVersion(argparse.Action):
    """Action that prints the version, looked up lazily."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"posttrain {version('posttrain')}")
        except PackageNotFoundError:
            print("posttrain, not installed")
        parser.exit()
