"""Pieces that the parsers of commands share: a command with its examples, common options, types of values."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.stage_registry import list_stage_names

DEFAULT_OUTPUT = "outputs"  # folder of pipelines


def add_command_parser(
    commands: Any, name: str, summary: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    """Parser of a new command among `commands`, with examples below its help and with `--debug`."""
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
    """Help within the width of the terminal; an example that is longer goes on in lines that a shell takes as one."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        heading, *examples = text.splitlines()
        if not examples:
            return super()._fill_text(text, width, indent)
        return "\n".join(
            [heading, *(line for example in examples for line in _fold_example(example, width))]
        )


def _fold_example(example: str, width: int) -> Iterator[str]:
    """Lines of an example, cut at spaces outside quotes, an option with its value; a note in brackets has its own."""
    if len(example) <= width:
        yield example
        return
    shown, gap, note = example.partition("    (")
    line, *words = re.findall(r" *(?:--?[a-z-]+ (?=[^-]))?(?:'[^']*'|[^\s'])+", shown)
    for word in words:
        if len(line) + len(word) + 2 > width:  # with the backslash
            yield f"{line} \\"
            line = "     "
        line += word
    yield line
    yield from (
        textwrap.wrap(f"({note}", width, initial_indent="    ", subsequent_indent="     ")
        if gap
        else ()
    )


# ------------------------------------------------------------------------------------------------------------ options


def add_config_argument(
    parser: argparse.ArgumentParser, *, option: bool = False, required: bool = False
) -> None:
    """The configuration, as an argument or as the option `--config`, and `--set`."""
    about = "the pipeline's YAML file, or the name of a shipped one, such as demo"
    if option:
        parser.add_argument("--config", "-c", metavar="CONFIG", required=required, help=about)
    else:
        parser.add_argument("config", metavar="CONFIG", help=about)
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
    """The option `--output`."""
    about = "output folder, without --config (default: outputs)"
    parser.add_argument("--output", "-o", default=DEFAULT_OUTPUT, help=about)


def add_config_and_output_options(parser: argparse.ArgumentParser) -> None:
    """The options `--config` and `--output`, either of which says where the runs are."""
    add_config_argument(parser, option=True)
    add_output_option(parser)


def add_allow_drift_option(parser: argparse.ArgumentParser) -> None:
    """The option `--allow-drift`."""
    parser.add_argument(
        "--allow-drift",
        action="store_true",
        help="resume from a checkpoint although settings, data or code changed since",
    )


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """The option `--quiet`."""
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="no live progress, only the final table"
    )


def add_json_option(parser: argparse.ArgumentParser, help_text: str = "for programs") -> None:
    """The option `--json`."""
    parser.add_argument("--json", action="store_true", help=help_text)


def add_note_option(parser: argparse.ArgumentParser) -> None:
    """The option `--note`, for people who decide on a version."""
    parser.add_argument("--note", default="", help="why; kept as a tag of the version")


def add_stop_after_option(parser: argparse.ArgumentParser) -> None:
    """The option `--stop-after`."""
    parser.add_argument(
        "--stop-after",
        type=parse_duration,
        metavar="SECONDS",
        help="stop after so many seconds as SIGTERM does: state saved, exit code 143 within 10 s; the same command "
        "resumes",
    )


# ------------------------------------------------------------------------------------------------------------- values


def parse_duration(text: str) -> float:
    """A duration above 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parse_positive_integer(text: str) -> int:
    """An integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def parse_positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parse_port(text: str) -> int:
    """The number of a port."""
    number = parse_positive_integer(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (1 to 65535)")
    return number


def parse_stage_name(text: str) -> str:
    """Name of a stage: a shipped one, or one of the config's own, which is not read yet."""
    if text not in list_stage_names() and not re.fullmatch("[a-z][a-z0-9_]*", text):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {', '.join(list_stage_names())})"
        )
    return text
