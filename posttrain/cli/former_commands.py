"""Commands and options of the last release: hidden from --help, they run and say the new form on standard error.

Remove this module, its uses in `main.py` and `add_former_config_option` one release after the commands were renamed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.cli.arguments import (
    DEFAULT_OUTPUT,
    add_note_option,
    add_quiet_option,
    parse_duration,
    parse_port,
    parse_positive_integer,
    parse_stage_name,
)

Translate = Callable[[argparse.Namespace, list[str]], list[str]]


@dataclass(frozen=True)
class FormerCommand:
    """Command of the last release."""

    summary: str  # the new form
    add_arguments: Callable[[argparse.ArgumentParser], None]
    translate: Translate  # (arguments, their options as words) -> words of the new command
    skipped: tuple[str, ...] = ()  # arguments that `translate` places itself


def add_former_parser(commands: Any, name: str) -> None:
    """Add the hidden parser of a former command."""
    former = FORMER_COMMANDS[name]
    parser: argparse.ArgumentParser = commands.add_parser(
        name, description=f"Former name of {former.summary}, which takes the same options."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of every error")
    former.add_arguments(parser)
    parser.set_defaults(command=name, former_parser=parser)


def translate_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Translate a former command line; print the new one in one line on standard error.

    Args:
        parser: with the former command.
        words: a valid or invalid command line; argparse ends the process for an invalid one, and after --help.
    """
    try:
        arguments = parser.parse_args(words)
    except SystemExit as ending:
        if ending.code:
            print_new_form(words[0], FORMER_COMMANDS[words[0]].summary.split())
        raise
    former = FORMER_COMMANDS[arguments.command]
    options = format_options(arguments.former_parser, arguments, {"config", *former.skipped})
    new_words = former.translate(arguments, options)
    print_new_form(arguments.command, new_words)
    return new_words


def print_new_form(former: str, words: Sequence[str]) -> None:
    """Print the new form of a command or option."""
    from flows.runtime.terminal import escape_control_characters

    line = escape_control_characters(f"posttrain {shlex.join(words)}").replace("\n", "\\n")
    print(f"posttrain: {former} is now: {line}", file=sys.stderr)


def format_options(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, skipped: set[str]
) -> list[str]:
    """Format the options that differ from their defaults as words of a command line."""
    words: list[str] = []
    for action in parser._actions:
        value = getattr(arguments, action.dest, None)
        if not action.option_strings or action.dest in skipped:
            continue
        if value is None or value is action.default:
            continue
        option = max(action.option_strings, key=len)
        if action.nargs == 0:
            words.append(option)
            continue
        for item in value if isinstance(value, list) else [value]:
            text = str(item)
            words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return words


def apply_former_config(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]
) -> None:
    """Take the former option `--config` as the argument that it is now; say the new form."""
    former = getattr(arguments, "former_config", None)
    if former is None:
        return
    if not hasattr(
        arguments, "config"
    ):  # the command takes runs, of whose folder it was the configuration
        arguments.config = former
        command = str(arguments.command).split()
        remaining = _remove_former_option(words[len(command) :])
        if (
            getattr(arguments, "models", None) is not None
        ):  # and plays the episodes of that configuration
            print_new_form("--config", [*command, former, *remaining])
        elif output := _read_output_folder(arguments):
            print_new_form("--config", [*command, *remaining, "--output", output])
        return
    if arguments.config is not None and getattr(arguments, "episode", "") is None:
        arguments.config, arguments.episode = None, arguments.config
    if arguments.config is not None and hasattr(arguments, "paths"):
        arguments.config, arguments.paths = None, [arguments.config, *arguments.paths]
    if arguments.config is not None:
        parser.error(f"name one configuration: {arguments.config}, or {former} of --config")
    arguments.config = former
    command = str(arguments.command).split()
    remaining = _remove_former_option(words[len(command) :])
    print_new_form("--config", [*command, former, *remaining])


def _remove_former_option(words: Sequence[str]) -> list[str]:
    """Remove `--config` and its value from the words behind a command."""
    others = iter(words)
    remaining = []
    for word in others:
        if word in ("-c", "--config"):
            next(others, None)
        elif not word.startswith(("--config=", "-c")):
            remaining.append(word)
    return remaining


def _read_output_folder(arguments: argparse.Namespace) -> str:
    """Read the output folder of the former option's configuration; "" if it has problems, which the command reports."""
    from rl_core.errors import PosttrainError
    from tasks.config import load_settings

    try:
        settings = load_settings(
            arguments.config, arguments.set, import_code=False, check_servers=False
        )
    except PosttrainError:
        return ""
    return str(settings.output)


# ------------------------------------------------------------------------------------- declarations


def _add_config(parser: argparse.ArgumentParser, *, option: bool) -> None:
    if option:
        parser.add_argument("--config", "-c", metavar="CONFIG")
    else:
        parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--set", "-s", metavar="KEY=VALUE", action="append", default=[])


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", "-o", default=DEFAULT_OUTPUT)


def _add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", type=parse_stage_name)
    _add_config(parser, option=False)
    parser.add_argument("--model", metavar="MODEL")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--allow-drift", action="store_true")
    add_quiet_option(parser)


def _add_why_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="STAGE", type=parse_stage_name, nargs="?")
    _add_config(parser, option=False)
    parser.add_argument("--json", action="store_true")


def _add_monitor_arguments(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    parser.add_argument("--run", metavar="NAME")
    parser.add_argument("--port", type=parse_port, metavar="PORT")
    parser.add_argument("--export", metavar="FOLDER")


def _add_approve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?")
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument("--yes", dest="approve", action="store_true", default=None)
    decision.add_argument("--no", dest="approve", action="store_false", default=None)
    add_note_option(parser)
    parser.add_argument("--by", default="")
    parser.add_argument("--json", action="store_true")
    _add_config(parser, option=True)
    _add_output(parser)


def _add_verify_resume_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, option=False)
    parser.add_argument("--kills", type=parse_positive_integer, default=5, metavar="N")
    parser.add_argument("--slices", type=parse_duration, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=parse_duration, default=60.0, metavar="M")
    parser.add_argument("--keep", action="store_true")


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, option=False)
    parser.add_argument("--stage", metavar="NAME", type=parse_stage_name)
    parser.add_argument("--iterations", "-n", metavar="N", type=parse_positive_integer, default=8)
    parser.add_argument("--json", action="store_true")
    add_quiet_option(parser)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, option=False)
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument("--gpus", metavar="GPUS")
    hardware.add_argument("--machine", metavar="FILE")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    for name in ("--row-tokens", "--prompt-tokens", "--completion-tokens", "--rows"):
        parser.add_argument(name, type=parse_positive_integer, metavar="N")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--rates", metavar="FILE")
    parser.add_argument("--workers", metavar="LIST")
    parser.add_argument("--staleness", metavar="LIST")
    parser.add_argument("--cores", type=parse_positive_integer, metavar="N")
    parser.add_argument("--iterations", type=parse_positive_integer, metavar="N")
    parser.add_argument("--json", action="store_true")


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("--repair", "--json", "--calibrate", "--faults"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--model", metavar="MODEL")
    _add_config(parser, option=True)
    _add_output(parser)


def _add_sync_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, option=True)
    _add_output(parser)


def _add_gc_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", type=parse_positive_integer, default=5, metavar="N")
    parser.add_argument("--pipeline", metavar="NAME", action="append", default=[])
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--json", action="store_true")
    _add_config(parser, option=True)
    _add_output(parser)


def _add_prefer_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config(parser, option=False)
    parser.add_argument("--answers", metavar="FILE")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--port", type=parse_port, metavar="PORT")
    parser.add_argument("--export", action="store_true")
    parser.add_argument("--output", "-o", metavar="FOLDER")


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="MODEL")
    parser.add_argument("second", metavar="MODEL")
    _add_config(parser, option=True)
    _add_output(parser)
    parser.add_argument("--episodes", type=parse_positive_integer, default=5, metavar="N")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--json", dest="format", action="store_const", const="json")
    add_quiet_option(parser)


# ------------------------------------------------------------------------------------- translations


def _list_config(arguments: argparse.Namespace) -> list[str]:
    return [] if arguments.config is None else [arguments.config]


def _translate_to(*command: str) -> Translate:
    """Return the translation of a command that is only called differently."""
    return lambda arguments, options: [*command, *_list_config(arguments), *options]


def _translate_stage(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    return ["run", arguments.config, "--only", arguments.name, *options]


def _translate_why(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    stage = [] if arguments.name is None else ["--only", arguments.name]
    return ["run", arguments.config, "--dry-run", *stage, *options]


def _translate_monitor(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    run = [] if arguments.run is None else [_find_short_id(arguments)]
    return ["ui", *run, "--live", *options]


def _find_short_id(arguments: argparse.Namespace) -> str:
    """Return the short id of the run that `monitor --run` names: `ui demo` is the configuration, not its newest run."""
    from posttrain.monitor.reader import RunReader
    from rl_core.errors import PosttrainError

    output, name = Path(arguments.output), str(arguments.run)
    if not output.is_dir():  # which `ui` says
        return name
    try:
        reader = RunReader(output)
        run_id = reader.resolve_run_id(name)
        return next(run.short_id for run in reader.list_runs() if run.id == run_id) or run_id
    except PosttrainError as error:
        parser: argparse.ArgumentParser = arguments.former_parser
        parser.error(str(error))


def _translate_approve(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    decision = {None: "--pending", True: "--approve", False: "--reject"}[arguments.approve]
    run = [] if arguments.run is None else [arguments.run]
    return ["promote", *_list_config(arguments), decision, *run, *options]


def _translate_plan(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    is_json = ["--json"] if arguments.json or arguments.format == "json" else []
    return ["check", "plan", arguments.config, *options, *is_json]


def _translate_doctor(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    output = []
    if arguments.output is not DEFAULT_OUTPUT:
        # The option named the file of the calibration, too.
        output = ["--to" if arguments.calibrate else "--output", arguments.output]
    return ["check", "machine", *_list_config(arguments), *options, *output]


def _translate_diff(arguments: argparse.Namespace, options: list[str]) -> list[str]:
    models = ["--models", arguments.first, arguments.second]
    is_json = ["--json"] if arguments.format == "json" else []
    return ["compare", *_list_config(arguments), *models, *options, *is_json]


FORMER_COMMANDS = {
    "stage": FormerCommand("run CONFIG --only STAGE", _add_stage_arguments, _translate_stage),
    "why": FormerCommand("run CONFIG --dry-run", _add_why_arguments, _translate_why),
    "monitor": FormerCommand("ui --live", _add_monitor_arguments, _translate_monitor, ("run",)),
    "approve": FormerCommand(
        "promote --approve RUN, --reject RUN and --pending",
        _add_approve_arguments,
        _translate_approve,
        ("approve",),
    ),
    "verify-resume": FormerCommand(
        "check resume", _add_verify_resume_arguments, _translate_to("check", "resume")
    ),
    "profile": FormerCommand(
        "check profile", _add_profile_arguments, _translate_to("check", "profile")
    ),
    "plan": FormerCommand("check plan", _add_plan_arguments, _translate_plan, ("format", "json")),
    "doctor": FormerCommand("check machine", _add_doctor_arguments, _translate_doctor, ("output",)),
    "sync": FormerCommand("store sync", _add_sync_arguments, _translate_to("store", "sync")),
    "gc": FormerCommand("store gc", _add_gc_arguments, _translate_to("store", "gc")),
    "prefer": FormerCommand("label", _add_prefer_arguments, _translate_to("label")),
    "diff": FormerCommand("compare --models", _add_diff_arguments, _translate_diff, ("format",)),
}
