"""Options and value types that several commands share.

Grammar: a configuration is the first argument, a run is named by its short id (demo-7f3a), `--output` is the output
folder, files and folders that a command writes elsewhere are `--to`, `--json` and `--csv` print data for programs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys

from tasks.stage_registry import list_stage_names


class _DefaultFolder(str):
    """Default of `--output`; `is DEFAULT_OUTPUT` separates it from the same text on the command line."""

    __slots__ = ()


DEFAULT_OUTPUT = _DefaultFolder("outputs")
STAGE_HELP = f"one of {', '.join(list_stage_names())}, or one that the config defines"
RUN_HELP = "short id (demo-7f3a, as `posttrain runs` lists it) or name of a run, or its pipeline"
_CONFIG_HELP = "the pipeline's YAML file, or the name of a shipped one, such as demo"


def add_config_argument(
    parser: argparse.ArgumentParser,
    *,
    optional: bool = False,
    was_option: bool = False,
    metavar: str = "CONFIG",
    help_text: str = _CONFIG_HELP,
) -> None:
    """Add the configuration as an argument, with `--set` and `--output`.

    Args:
        optional: the command also works without a configuration.
        was_option: the configuration was `--config` in the last release, which still works.
        metavar: CONFIG|RUN for commands that take a run as well.
    """
    if optional:
        parser.add_argument("config", metavar=metavar, nargs="?", help=help_text)
    else:
        parser.add_argument("config", metavar=metavar, help=help_text)
    if was_option:
        add_former_config_option(parser)
    add_set_option(
        parser,
        "override a setting, as in stages.policy.learning_rate=3e-4; may be repeated; VALUE is YAML, "
        "and null removes a stage",
    )
    add_output_option(parser)


def add_former_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the hidden option `--config`, which works for one more release and says the new form."""
    parser.add_argument("--config", "-c", dest="former_config", help=argparse.SUPPRESS)


def add_set_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add the option `--set`."""
    parser.add_argument(
        "--set", "-s", metavar="KEY=VALUE", action="append", default=[], help=help_text
    )


def add_output_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--output`."""
    parser.add_argument(
        "--output",
        "-o",
        metavar="FOLDER",
        default=DEFAULT_OUTPUT,
        help="output folder (default: the configuration's, else outputs)",
    )


def has_explicit_output(arguments: argparse.Namespace) -> bool:
    """Return whether the command line has `--output`."""
    return getattr(arguments, "output", DEFAULT_OUTPUT) is not DEFAULT_OUTPUT


def list_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the settings that the command line overrides: those of `--set`, then the folder of `--output`."""
    overrides = list(arguments.set)
    if has_explicit_output(arguments):
        overrides.append(f"output={json.dumps(str(arguments.output))}")  # VALUE is YAML
    return overrides


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


def add_json_option(
    parser: argparse.ArgumentParser,
    help_text: str = "for programs; nothing else on standard output",
) -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help=help_text)


def add_data_options(parser: argparse.ArgumentParser, former_formats: tuple[str, ...] = ()) -> None:
    """Add the options `--json` and `--csv` of a command that prints a table.

    Args:
        former_formats: choices of the hidden option `--format` of the last release.
    """
    formats = parser.add_mutually_exclusive_group()
    add_json_option(formats)  # type: ignore[arg-type]  # a group takes arguments as a parser does
    formats.add_argument(
        "--csv", action="store_true", help="the rows as CSV; nested fields are columns like a.b"
    )
    if former_formats:
        add_former_format_option(parser, former_formats)


def add_former_format_option(parser: argparse.ArgumentParser, formats: tuple[str, ...]) -> None:
    """Add the hidden option `--format`; its formats json and csv are the options of these names."""
    parser.add_argument(
        "--format",
        choices=formats,
        default=formats[0],
        action=_ChooseFormat,
        help=argparse.SUPPRESS,
    )


class _ChooseFormat(argparse.Action):
    """Action of `--format`: set the option of that name."""

    def __call__(  # type: ignore[override]
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        for name in ("json", "csv"):
            if hasattr(namespace, name):
                setattr(namespace, name, values == name)
        if values in ("json", "csv"):
            print(f"posttrain: --format {values} is now --{values}", file=sys.stderr)


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
