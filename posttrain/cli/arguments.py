"""Options and value types that several commands share."""

from __future__ import annotations

import argparse
import math
import re

from tasks.stage_registry import list_stage_names

DEFAULT_OUTPUT = "outputs"
STAGE_HELP = f"one of {', '.join(list_stage_names())}, or one that the config defines"


def add_config_argument(
    parser: argparse.ArgumentParser, *, option: bool = False, required: bool = False
) -> None:
    """Add the configuration, as an argument or as the option `--config`, and `--set`."""
    help_text = "the pipeline's YAML file, or the name of a shipped one, such as demo"
    if option:
        parser.add_argument("--config", "-c", metavar="CONFIG", required=required, help=help_text)
    else:
        parser.add_argument("config", metavar="CONFIG", help=help_text)
    add_set_option(
        parser,
        "override a setting, as in stages.policy.learning_rate=3e-4; may be repeated; VALUE is YAML, "
        "and null removes a stage",
    )


def add_set_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the option `--set`."""
    parser.add_argument(
        "--set", "-s", metavar="KEY=VALUE", action="append", default=[], help=help_text
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


def add_json_format_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` as a synonym of `--format json`."""
    parser.add_argument(
        "--json",
        dest="format",
        action="store_const",
        const="json",
        help="the same as --format json",
    )


def add_note_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--note`, for people who decide on a version."""
    parser.add_argument("--note", default="", help="reason; stored as a tag of the version")


def add_stop_after_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--stop-after`."""
    parser.add_argument(
        "--stop-after",
        type=parse_duration,
        metavar="SECONDS",
        help="time limit: after so many seconds save the state and end, with exit code 143, within 10 s; the same "
        "command resumes",
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
