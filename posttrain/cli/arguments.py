"""Shared parts of the command parsers: commands with examples, common options, value types."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.stage_registry import list_stage_names

DEFAULT_OUTPUT = "outputs"
STAGE_HELP = f"one of {', '.join(list_stage_names())}, or one that the config defines"


def add_command_parser(
    commands: Any, name: str, summary: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    """Add a command with examples below its help and with `--debug`; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join(["examples:", *(f"  posttrain {example}" for example in examples)]),
        formatter_class=_ExamplesHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of every error")
    parser.set_defaults(command=name)
    return parser


class _ExamplesHelpFormatter(argparse.HelpFormatter):
    """Help within the width of the terminal; longer examples are folded so that a shell still accepts them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        heading, *examples = text.splitlines()
        if not examples:
            return super()._fill_text(text, width, indent)
        return "\n".join(
            [heading, *(line for example in examples for line in _fold_example(example, width))]
        )


def _fold_example(example: str, width: int) -> Iterator[str]:
    """Yield the lines of an example that is wider than the terminal.

    Lines are cut at spaces outside quotes, and an option stays with its value. A note in brackets gets its own line.
    """
    if len(example) <= width:
        yield example
        return
    command, separator, note = example.partition("    (")
    line, *words = re.findall(r" *(?:--?[a-z-]+ (?=[^-]))?(?:'[^']*'|[^\s'])+", command)
    for word in words:
        if len(line) + len(word) + 2 > width:  # with the backslash
            yield f"{line} \\"
            line = "     "
        line += word
    yield line
    yield from (
        textwrap.wrap(f"({note}", width, initial_indent="    ", subsequent_indent="     ")
        if separator
        else ()
    )


def add_config_argument(
    parser: argparse.ArgumentParser, *, option: bool = False, required: bool = False
) -> None:
    """Add the configuration, as an argument or as the option `--config`, and `--set`."""
    help_text = "the pipeline's YAML file, or the name of a shipped one, such as demo"
    if option:
        parser.add_argument("--config", "-c", metavar="CONFIG", required=required, help=help_text)
    else:
        parser.add_argument("config", metavar="CONFIG", help=help_text)
    parser.add_argument(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a setting, as in stages.policy.learning_rate=3e-4; may be repeated; VALUE is YAML, "
        "and null removes a stage",
    )


def add_output_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--output`."""
    help_text = "output folder, without --config (default: outputs)"
    parser.add_argument("--output", "-o", default=DEFAULT_OUTPUT, help=help_text)


def add_config_and_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options `--config` and `--output`; either locates the runs."""
    add_config_argument(parser, option=True)
    add_output_option(parser)


def add_allow_drift_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--allow-drift`."""
    parser.add_argument(
        "--allow-drift",
        action="store_true",
        help="resume from a checkpoint although settings, data or code changed since",
    )


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--quiet`."""
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="no live progress, only the final table"
    )


def add_json_option(parser: argparse.ArgumentParser, help_text: str = "for programs") -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help=help_text)


def add_note_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--note`, for people who decide on a version."""
    parser.add_argument("--note", default="", help="reason; stored as a tag of the version")


def add_stop_after_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--stop-after`."""
    parser.add_argument(
        "--stop-after",
        type=parse_duration,
        metavar="SECONDS",
        help="stop after so many seconds as SIGTERM does: state saved, exit code 143 within 10 s; the same command "
        "resumes",
    )


def parse_duration(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parse_positive_integer(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def parse_positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parse_port(text: str) -> int:
    """Parse a port number."""
    number = parse_positive_integer(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (1 to 65535)")
    return number


def parse_stage_name(text: str) -> str:
    """Parse a stage name: a shipped one, or one that the config defines; the config is not read yet."""
    if text not in list_stage_names() and not re.fullmatch("[a-z][a-z0-9_]*", text):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {', '.join(list_stage_names())})"
        )
    return text
