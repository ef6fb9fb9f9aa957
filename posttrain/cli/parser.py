"""Argument parser of `posttrain`: grouped help, suggestions for mistyped words, all commands.

Only the standard library is imported, so that `--help` starts quickly.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from posttrain.cli import (
    analyze,
    completion,
    online,
    plan,
    prefer,
    runs,
    serve,
    service,
    sweep,
    up,
    validate,
)

# Commands in the order of `--help`.
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
_NAME_COLUMNS = 18
_COMMAND_COLUMNS = 26  # of "posttrain NAME"


class SuggestingParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that suggests the nearest known name; subparsers are of this class, too."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as the base class does, but refuse unknown options here, where the known ones can be suggested."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            hints = [
                _suggest_nearest(word.partition("=")[0], options)
                for word in unknown
                if word.startswith("-")
            ]
            hint = next((hint for hint in hints if hint), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

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
        """Print the short usage and the message; exit with code 2."""
        self.print_usage(_get_stderr())
        self.exit(2, f"{self.prog}: {message}\n")


def _get_stderr() -> Any:
    import sys

    return sys.stderr


def _suggest_nearest(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'run'?", or "" if no known name is near."""
    import difflib  # only needed after a mistake

    names: Sequence[str] = list(candidates)
    completions = [known for known in names if len(name) > 2 and known.startswith(name)]
    match = completions or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


class OverviewParser(SuggestingParser):
    """Parser of `posttrain` itself, whose help lists the commands in groups."""

    def format_help(self) -> str:
        """Format the commands in their groups, within the width of the terminal."""
        summaries = _collect_command_help(self)
        lines = [
            "usage: posttrain COMMAND ...",
            "",
            *_wrap_help_text(DESCRIPTION.replace("\n", " "), ""),
            "",
            "start here",
        ]
        lines += _format_help_rows(
            {f"posttrain {name}": summary for name, summary in _FIRST_COMMANDS.items()},
            _COMMAND_COLUMNS,
        )
        for heading, names in GROUPS.items():
            lines += [
                "",
                heading,
                *_format_help_rows({name: summaries[name] for name in names if name in summaries}),
            ]
        options = {"-h, --help": "this; `posttrain COMMAND --help`: one command, with examples"}
        lines += ["", "options", *_format_help_rows({**options, "--version": "print the version"})]
        lines += ["", "exit codes", *_wrap_help_text(_EXIT_CODES, "  ")]
        return "\n".join(lines) + "\n"

    def format_usage(self) -> str:
        """Return one line instead of a list of all commands."""
        return "usage: posttrain COMMAND ...    (posttrain --help lists the commands)\n"


def format_first_commands() -> str:
    """Format the five commands to start with."""
    rows = _format_help_rows(
        {f"posttrain {name}": summary for name, summary in _FIRST_COMMANDS.items()},
        _COMMAND_COLUMNS,
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
    """Return the one-line summary of each command."""
    (commands,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return {choice.dest: choice.help or "" for choice in commands._choices_actions}


def _format_help_rows(summaries: Mapping[str, str], margin: int = _NAME_COLUMNS) -> Iterator[str]:
    for name, summary in summaries.items():
        first, *further_lines = _wrap_help_text(summary, " " * margin)
        yield f"  {name}".ljust(margin) + first[margin:]
        yield from further_lines


def _wrap_help_text(text: str, indent: str) -> list[str]:
    width = max(36, min(120, shutil.get_terminal_size().columns))
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = OverviewParser(prog="posttrain", description=DESCRIPTION)
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    parser.set_defaults(debug=False, command=None)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=SuggestingParser
    )
    tables = (
        validate.PARSERS,
        plan.PARSERS,
        sweep.PARSERS,
        online.PARSERS,
        runs.PARSERS,
        analyze.PARSERS,
        prefer.PARSERS,
        serve.PARSERS,
        service.PARSERS,
        up.PARSERS,
        completion.PARSERS,
    )
    add_parser = {name: add for table in tables for name, add in table.items()}
    for name in COMMAND_ORDER:
        add_parser[name](commands)
    return parser


class _PrintVersion(argparse.Action):
    """Action that prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"posttrain {version('posttrain')}")
        except PackageNotFoundError:
            print("posttrain, not installed")
        parser.exit()
