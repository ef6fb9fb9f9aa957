"""Program `posttrain`: run one command and turn errors into messages and exit codes.

The module of a command is imported only when the command runs or its help is printed, so that `posttrain --help`
starts quickly. It declares `EXAMPLES`, `add_arguments(parser)` and `run_command(arguments)`, which returns the exit
code, and imports what takes long inside functions.

`posttrain/cli/parser.py` declares the exit codes, `posttrain/cli/former_commands.py` the names of the last release.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn, TextIO

from flows.runtime import prefect_outage, stopping
from flows.runtime.import_setup import (
    disable_bytecode_under_file_limit,
    ensure_home_folder,
    ensure_open_files,
)
from flows.runtime.stopping import TerminatedBySignal, bound_shutdown_time, unwind_on_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import former_commands
from posttrain.cli.parser import (
    ExamplesHelpFormatter,
    ExitCode,
    OverviewParser,
    SuggestingParser,
    format_first_commands,
)
from rl_core.errors import (
    DataError,
    ModelError,
    PosttrainError,
    ResumeRefused,
    SettingsError,
    Stopped,
)
from rl_core.json_client import exempt_loopback_from_proxies
from rl_core.storage import faults
from rl_core.storage.atomic_files import REMEDIES
from rl_core.user_code.load import append_working_directory

# Summaries of the commands by group, in the order of `posttrain --help`. A command is the module of its name;
# `check machine` is check_machine.
COMMAND_GROUPS: dict[str, dict[str, str]] = {
    "prepare": {
        "init": "write a commented starter config, environment and reward",
        "convert": "convert a configuration of TRL or verl, with comments on settings that have no equivalent",
        "data": "show a data file: format, counts, lengths, duplicates, contradictions, examples with loss tokens "
        "marked",
        "validate": "check a configuration without running anything",
        "check": "check before or instead of a run: this machine, memory and hours, time by phase, crash recovery",
    },
    "train": {
        "run": "run a pipeline, or one stage with --only; cached stages are skipped; --dry-run explains what would run",
        "resume": "resume a killed, stopped or failed run with its own settings, from its last checkpoint",
        "sweep": "run trials that differ in some settings and seeds, sharing all unchanged stages; choose the best",
        "retrain": "retrain if there is data new to the champion, and promote the result if it passes the gate",
        "schedule": "run or retrain a pipeline at set times, on the servers of `posttrain up`",
        "online": "learn from recorded traffic under guardrails: worker, gate of a server, replay of a buffer, report",
        "label": "let people compare or score answers on a local page; the result is training data",
    },
    "look": {
        "runs": "list runs, newest first, with id, status and result",
        "logs": "print the log of a run or of one of its stages; --follow continues while it is written",
        "open": "open the pages of a run that answer: live page, MLflow, Prefect, report",
        "ui": "serve the web UI on this machine until Ctrl-C: live page, MLflow, Prefect",
        "compare": "compare runs, or with --models two models on the same held-out episodes",
    },
    "judge": {
        "evaluate": "evaluate a model on the held-out episodes of a configuration",
        "analyze": "analyse trajectory files, or models on the same episodes: tables, figures, an HTML report",
        "export": "write a model as a Hugging Face folder, an adapter, or a GGUF file for llama.cpp and ollama",
        "replay": "replay a recorded episode, failed or not, and show where the result differs from the recording",
        "promote": "move the alias champion, or approve and reject pending promotions",
    },
    "serve": {
        "serve": "serve a model over HTTP on this machine, in the dialect of OpenAI's clients (chat completions)",
        "service": "serve training to clients of the tinker SDK: up, key, runs, queue, cancel, promote, logs, audit",
    },
    "operate": {
        "up": "start Prefect, a worker and MLflow on this machine, with all deployments and automations registered",
        "down": "stop `posttrain up`: the worker and its runs (which save first), then the servers",
        "status": "state of the servers of `posttrain up`; exits with 1 unless all are up",
        "store": "deliver waiting records to the tracking store, remove data that nothing needs",
        "completion": "print a script that completes commands and options in your shell",
    },
}
SUBCOMMANDS: dict[str, dict[str, str]] = {
    "check": {
        "judge": "ask the judge of a configuration about human labels and print its agreement; exits with 1 below "
        "min_agreement",
        "machine": "check versions, devices, stores and folders; exits with 1 if a requirement is missing",
        "plan": "estimate memory, work and hours of each stage; with --simulate, simulate rollout workers or a cluster",
        "profile": "profile a few iterations of a training stage by phase",
        "resume": "run a pipeline without interruption, and again while killing it; compare the bytes and name "
        "sources of nondeterminism; exits with 0 if they are equal, 1 if they differ, 2 if that could not be verified",
    },
    "store": {
        "sync": "deliver what runs recorded while the tracking store was unreachable, or before it lost its database",
        "gc": "remove data needed by no alias, champion lineage or open run; a dry run unless --yes is given",
    },
}
COMMANDS = {name: summary for group in COMMAND_GROUPS.values() for name, summary in group.items()}
TRAINING = ("run", "resume", "retrain", "sweep", "online")  # resumable commands
# Commands that Ctrl-C ends in bounded time. Servers wait for their clients, a sweep for its trials.
_BOUNDED_AFTER_CTRL_C = (
    "run",
    "resume",
    "retrain",
    "check profile",
    "evaluate",
    "analyze",
    "compare",
)

# Commands that start no server, and open few files at a time.
_FEW_FILES = (
    "init",
    "convert",
    "data",
    "validate",
    "check judge",
    "check plan",
    "check machine",
    "runs",
    "logs",
    "open",
    "down",
    "status",
    "store gc",
    "completion",
)

WRITABLE_FOLDER_ADVICE = (
    "use a writable folder (--output, or output: in the configuration), or fix this one"
)
DISK_SPACE_ADVICE = (
    "make room, as with `posttrain store gc`; the same command resumes from the last checkpoint"
)
SETTINGS_READER = os.path.join("tasks", "config", "schema.py")  # warns of former names
SHOW_OTHER_WARNING = warnings.showwarning
MAX_LINE_CHARACTERS = 2000  # names and values in a message may be of any length
# File system errors that a user can fix; any other OSError is a bug and shown with its traceback.
OS_ERROR_ADVICE = {
    errno.EACCES: WRITABLE_FOLDER_ADVICE,
    errno.EPERM: WRITABLE_FOLDER_ADVICE,
    errno.EROFS: WRITABLE_FOLDER_ADVICE,
    errno.EEXIST: WRITABLE_FOLDER_ADVICE,
    errno.ENOTDIR: WRITABLE_FOLDER_ADVICE,
    errno.ENOSPC: DISK_SPACE_ADVICE,
    errno.EDQUOT: DISK_SPACE_ADVICE,
    errno.EFBIG: "raise the file size limit (ulimit -f); the same command resumes from the last checkpoint",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), REMEDIES[errno.EMFILE]),
}
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OPEN_FILES_ERRORS = (errno.EMFILE, errno.ENFILE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    repair_standard_streams()
    disable_bytecode_under_file_limit()
    exempt_loopback_from_proxies()
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] and words[0] in former_commands.FORMER_COMMANDS:
        words = former_commands.translate_command(build_parser(words), words)
    parser = build_parser(words)
    arguments = parser.parse_args(words)
    former_commands.apply_former_config(parser, arguments, words)
    if arguments.command is None:
        print(format_first_commands())
        return 0
    unwind_on_sigterm()
    append_working_directory()
    warnings.showwarning = _show_warning
    try:
        with bound_shutdown_time(
            include_interrupt=arguments.command in _BOUNDED_AFTER_CTRL_C,
            is_resumable=arguments.command in TRAINING,
        ):
            code = _run_command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe, as in `posttrain runs | head`
        discard_output()
        return ExitCode.FAILED
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        discard_output()
        return _print_failure(
            arguments, f"the output cannot be written: {os.strerror(error.errno)}; make room", 1
        )


def list_commands() -> list[str]:
    """List the commands that run, such as `run` and `check machine`; the module of each has its name."""
    return [
        command
        for name in COMMANDS
        for command in [f"{name} {part}" for part in SUBCOMMANDS.get(name, ())] or [name]
    ]


def import_command_modules(words: Sequence[str] | None) -> dict[str, ModuleType]:
    """Import the modules of a command line's command; return them by command.

    Args:
        words: the command line; None = the modules of all commands.
    """
    names = list_commands()
    if words is not None:
        names = [name for name in names if name in (" ".join(words[:1]), " ".join(words[:2]))]
    return {
        name: importlib.import_module(f"posttrain.cli.{name.replace(' ', '_')}") for name in names
    }


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Build the parser of `posttrain`.

    Args:
        words: a command line: only its command gets its arguments, which the command's module declares; None = every
            command does.
    """
    modules = import_command_modules(words)
    parser = OverviewParser(COMMAND_GROUPS)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=SuggestingParser
    )
    for name, summary in COMMANDS.items():
        command_parser = _add_command_parser(commands, name, name, summary, modules)
        if name not in SUBCOMMANDS:
            continue
        parts = command_parser.add_subparsers(
            title="commands", metavar="COMMAND", required=True, dest="part"
        )
        for part, part_summary in SUBCOMMANDS[name].items():
            _add_command_parser(parts, part, f"{name} {part}", part_summary, modules)
    for name in former_commands.FORMER_COMMANDS:
        if words is None or words[:1] == [name]:
            former_commands.add_former_parser(commands, name)
    return parser


def _add_command_parser(
    commands: Any, name: str, command: str, summary: str, modules: Mapping[str, ModuleType]
) -> argparse.ArgumentParser:
    """Add the parser of a command, with its arguments if its module is imported."""
    command_parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=ExamplesHelpFormatter,
    )
    module = modules.get(command)
    if module is not None:
        examples = (f"  posttrain {example}" for example in module.EXAMPLES)
        command_parser.epilog = "\n".join(["examples:", *examples])
        command_parser.add_argument(
            "--debug", action="store_true", help="show the traceback of every error"
        )
        command_parser.set_defaults(command=command, handler=module.run_command)
        module.add_arguments(command_parser)
    return command_parser


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning about the user's settings in a line; any other as Python does."""
    if category is FutureWarning and filename.endswith(SETTINGS_READER):
        print(f"posttrain: warning: {escape_control_characters(str(message))}", file=sys.stderr)
    else:
        SHOW_OTHER_WARNING(message, category, filename, lineno, file, line)


def command() -> NoReturn:
    """Run `main`, then end the process."""
    code = main()
    if stopping.stop_requested.is_set() or prefect_outage.api_unreachable.is_set():
        # Prefect would retry its pending requests for a minute. Our own files are closed already.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run_command(arguments: argparse.Namespace) -> int:
    """Run the command; turn user errors into a message and an exit code."""
    try:
        ensure_home_folder()
        if arguments.command not in _FEW_FILES:
            ensure_open_files()
        faults.check_fault_plan()
        if sys.flags.optimize:
            raise SettingsError(
                "`python -O` (PYTHONOPTIMIZE) takes out checks that posttrain relies on; run without it"
            )
        code: int = arguments.handler(arguments)
        return code
    except Stopped as stopped:
        return _print_failure(arguments, _name_stop_cause(stopped), 128 + stopped.signum)
    except SystemExit as error:  # no code of ours: a user's module, or a library
        place = traceback.extract_tb(error.__traceback__)[-1]
        status = "" if error.code is None else repr(error.code)
        text = f"{place.filename}:{place.lineno} ended the command by sys.exit({status})"
        return _print_failure(arguments, text, ExitCode.WRONG_INPUT)
    except KeyboardInterrupt as error:
        is_terminated = isinstance(error, TerminatedBySignal)
        signum = signal.SIGTERM if is_terminated else signal.SIGINT
        is_resumable = arguments.command in TRAINING
        hint = "; the same command resumes from the last checkpoint" if is_resumable else ""
        return _print_failure(
            arguments, f"stopped by {stopping.describe_signal(signum)}{hint}", 128 + signum
        )
    except (SettingsError, DataError, ModelError, ResumeRefused) as error:
        return _print_failure(arguments, str(error), ExitCode.WRONG_INPUT)
    except PosttrainError as error:
        return _print_failure(arguments, _append_disk_advice(str(error)), 1)
    except OSError as error:
        return _print_os_error(arguments, error)
    except Exception as error:
        return _print_foreign_error(arguments, error)


def _name_stop_cause(stopped: Stopped) -> str:
    """Return the message of a stop; if `--stop-after` caused it, with the time limit instead of its signal."""
    cause = stopping.describe_signal(stopped.signum)
    if stopped.signum != signal.SIGTERM or cause == "SIGTERM":
        return str(stopped)
    message = str(stopped).replace(cause, "SIGTERM").replace("SIGTERM", "the time limit")
    message = message.removeprefix("stopped ")
    return f"stopped by {cause} {message}"


def _print_os_error(arguments: argparse.Namespace, error: OSError) -> int:
    """Print an operating system error that the user can fix; raise any other again."""
    reason = os.strerror(error.errno) if error.errno is not None else ""
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) and error.filename is not None:
        # The path is an argument of the command.
        return _print_failure(arguments, f"{os.fsdecode(error.filename)[:200]}: {reason}", 2)
    if error.errno == errno.ENOENT and error.filename is None and not _has_working_directory():
        return _print_failure(
            arguments, "the current folder was removed; change to an existing one", 2
        )
    if error.errno not in OS_ERROR_ADVICE:
        raise error
    if error.filename is None and error.errno not in (*DISK_FULL_ERRORS, *OPEN_FILES_ERRORS):
        raise error
    path = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    return _print_failure(arguments, f"{path}{reason}; {OS_ERROR_ADVICE[error.errno]}", 1)


def _print_foreign_error(arguments: argparse.Namespace, error: Exception) -> int:
    """Print an error of another library that the user can fix; raise any other again.

    Writers in other languages and databases report a full disk with exceptions of their own types.
    """
    is_pydantic = type(error).__module__.startswith("pydantic")
    if is_pydantic and any(name.startswith("PREFECT_") for name in os.environ):
        return _print_failure(
            arguments, f"Prefect refuses a variable PREFECT_... of its settings: {error}", 2
        )
    message = f"{type(error).__name__}: {error}"
    with_advice = _append_disk_advice(message)
    if with_advice == message:
        raise error
    return _print_failure(arguments, with_advice, 1)


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _append_disk_advice(message: str) -> str:
    """Append the advice to a message that says that the disk is full or a file too large."""
    phrases = {
        **{number: os.strerror(number) for number in DISK_FULL_ERRORS},
        0: "database or disk is full",
    }
    number = next((number for number, phrase in phrases.items() if phrase in message), None)
    if number is None:
        return message
    message = message.replace(f"; {REMEDIES.get(number)}", "")
    return f"{message}; {OS_ERROR_ADVICE.get(number, DISK_SPACE_ADVICE)}"


def _print_failure(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    half = MAX_LINE_CHARACTERS // 2  # the reason stands before or after a long name
    lines = (
        line if len(line) <= MAX_LINE_CHARACTERS else f"{line[:half]} ... {line[-half:]}"
        for line in message.splitlines()
    )
    text = "\n".join(lines)
    with contextlib.suppress(OSError):  # stderr is unusable; the exit code remains
        print(f"posttrain: {escape_control_characters(text)}", file=sys.stderr)
    return code


def repair_standard_streams() -> None:
    """Open closed standard streams on /dev/null; print characters that an encoding lacks as escapes.

    Otherwise the next opened file would get the number of a closed stream, and C libraries would print into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Redirect standard output to /dev/null after its reader has closed it or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    command()
