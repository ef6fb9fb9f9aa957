"""Help of `posttrain` itself: commands in groups, and the five to start with. Standard library only."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping

from flows.cli.hinting_parser import HintingParser

__all__ = ["GROUPS", "ORDER", "OverviewParser", "first_commands"]

# Commands as `--help` lists them.
GROUPS: dict[str, tuple[str, ...]] = {
    "prepare": ("init", "convert", "data", "validate", "plan"),
    "train": ("run", "stage", "resume", "sweep", "retrain", "online"),
    "look": ("runs", "why", "compare", "diff", "monitor", "ui", "profile"),
    "judge": ("evaluate", "analyze", "replay", "promote", "approve", "prefer"),
    "serve": ("serve", "service"),
    "operate": ("up", "down", "status", "sync", "gc", "doctor", "verify-resume", "completion"),
}
ORDER = tuple(name for names in GROUPS.values() for name in names)

ABOUT = """\
Post-train language-model policies: prepare data, SFT, preference optimisation (DPO), reward model, policy
optimisation, evaluation, analysis, promotion. A pipeline is one YAML file."""

_FIRST = {
    "run demo": "the whole pipeline on an environment that needs no download",
    "init my_task": "a config, an environment and a reward to start from",
    "runs": "what ran, how it ended, how good it is",
    "monitor": "watch a run live",
    "doctor": "what this machine has, and what is missing",
}

_EXIT_CODES = "0 done   1 failed   2 wrong settings or data   130, 143 stopped; the same command resumes"
_MARGIN = 18  # columns of names


class OverviewParser(HintingParser):
    """The parser of `posttrain` itself."""

    def format_help(self) -> str:
        """Commands in their groups, within the width of the terminal."""
        abouts = _abouts(self)
        lines = ["usage: posttrain COMMAND ...", "", *_wrapped(ABOUT.replace("\n", " "), ""), "", "start here"]
        lines += _rows({f"posttrain {name}": about for name, about in _FIRST.items()}, 26)
        for heading, names in GROUPS.items():
            lines += ["", heading, *_rows({name: abouts[name] for name in names if name in abouts})]
        options = {"-h, --help": "this; `posttrain COMMAND --help`: one command, with examples"}
        lines += ["", "options", *_rows({**options, "--version": "print the version"})]
        lines += ["", "exit codes", *_wrapped(_EXIT_CODES, "  ")]
        return "\n".join(lines) + "\n"

    def format_usage(self) -> str:
        """One line instead of a list of all commands."""
        return "usage: posttrain COMMAND ...    (posttrain --help lists the commands)\n"


def first_commands() -> str:
    """The five commands that matter at first."""
    rows = _rows({f"posttrain {name}": about for name, about in _FIRST.items()}, 26)
    return "\n".join([*rows, "", *_wrapped("posttrain --help lists all commands, posttrain COMMAND --help one.", "  ")])


def _abouts(parser: argparse.ArgumentParser) -> Mapping[str, str]:
    """One line about each command."""
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {choice.dest: choice.help or "" for choice in commands._choices_actions}


def _rows(abouts: Mapping[str, str], margin: int = _MARGIN) -> Iterator[str]:
    for name, about in abouts.items():
        first, *more = _wrapped(about, " " * margin)
        yield f"  {name}".ljust(margin) + first[margin:]
        yield from more


def _wrapped(text: str, indent: str) -> list[str]:
    width = max(36, min(120, shutil.get_terminal_size().columns))
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
