"""The `posttrain` command.

Only the standard library and the error tree are imported here, so that `posttrain --help` starts at once; each command
imports what it needs.

Exit codes: 0 done; 1 it failed; 2 the command, the settings or the data are wrong; 130 and 143 stopped by Ctrl-C and
SIGTERM, with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from flows.cli import streams
from flows.cli.compiled_modules import keep_them_whole
from flows.cli.help_overview import first_commands
from flows.cli.online_commands import online
from flows.cli.parser import build_parser
from flows.cli.pipeline_commands import (
    convert,
    data,
    init,
    profile,
    resume,
    retrain,
    run,
    stage,
    sweep,
    validate,
    verify_resume,
    why,
)  # fmt: skip
from flows.cli.plan_command import plan
from flows.cli.prefer_command import prefer
from flows.cli.review_commands import analyze, approve, compare, diff, evaluate, gc, promote, replay, runs, sync
from flows.cli.serve_command import serve
from flows.cli.service_commands import completion, doctor, down, monitor, status, ui, up
from flows.cli.training_service import service
from flows.runtime import outlived, stopping
from flows.runtime.stopping import Terminated, bounded, unwind_on_sigterm
from flows.runtime.user_code_path import find_own_code
from flows.runtime.visible import visible
from rl_core.errors import DataError, ModelError, PosttrainError, ResumeRefused, SettingsError, Stopped
from rl_core.storage import faults
from rl_core.storage.single_files import REMEDIES

__all__ = ["command", "main"]

ELSEWHERE = "use a writable folder (--output, or output: in the configuration), or fix this one"
ROOM = "make room, as with `posttrain gc`; the same command resumes from the last checkpoint"
LONGEST_LINE = 2000  # characters of a line of a message; names and values in it may be of any length
# File system errors that a user can fix; any other OSError is a bug and shown with its traceback.
REFUSALS = {
    errno.EACCES: ELSEWHERE,
    errno.EPERM: ELSEWHERE,
    errno.EROFS: ELSEWHERE,
    errno.EEXIST: ELSEWHERE,
    errno.ENOTDIR: ELSEWHERE,
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: "raise the file size limit (ulimit -f); the same command resumes from the last checkpoint",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), REMEDIES[errno.EMFILE]),
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TOO_MANY = (errno.EMFILE, errno.ENFILE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    streams.make_usable()
    keep_them_whole()
    arguments = build_parser().parse_args(argv)
    if arguments.command is None:
        print(first_commands())
        return 0
    unwind_on_sigterm()
    find_own_code()
    try:
        with bounded(interrupt=arguments.command in _ENDED_BY_CTRL_C, resumes=arguments.command in TRAINING):
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe, as in `posttrain runs | head`
        streams.discard_output()
        return 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        streams.discard_output()
        return _failed(arguments, f"the output cannot be written: {os.strerror(error.errno)}; make room", 1)


def command() -> NoReturn:
    """The console script: `main`, then the end of the process."""
    code = main()
    if stopping.asked.is_set() or outlived.api_is_away.is_set():
        # Prefect would go on for a minute, trying to send what nobody takes. Everything of ours is closed.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: argparse.Namespace) -> int:
    """Run the command; user errors become a message and an exit code."""
    try:
        faults.check()
        if sys.flags.optimize:
            raise SettingsError("`python -O` (PYTHONOPTIMIZE) takes out checks that this relies on; run without it")
        return COMMANDS[arguments.command](arguments)
    except Stopped as stopped:
        return _failed(arguments, str(stopped), 128 + stopped.signum)
    except KeyboardInterrupt as error:
        how, number = ("SIGTERM", signal.SIGTERM) if isinstance(error, Terminated) else ("Ctrl-C", signal.SIGINT)
        more = "; the same command resumes from the last checkpoint" if arguments.command in TRAINING else ""
        return _failed(arguments, f"stopped by {how}{more}", 128 + number)
    except (SettingsError, DataError, ModelError, ResumeRefused) as error:
        return _failed(arguments, str(error), 2)
    except PosttrainError as error:
        return _failed(arguments, _with_advice(f"{type(error).__name__}: {error}"), 1)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) and error.filename is not None:  # of an argument
            return _failed(arguments, f"{os.fsdecode(error.filename)[:200]}: {os.strerror(error.errno)}", 2)
        if error.errno == errno.ENOENT and error.filename is None and not _has_folder():
            return _failed(arguments, "the current folder was removed; change to one that is there", 2)
        if error.errno not in REFUSALS or (error.filename is None and error.errno not in (*FULL, *TOO_MANY)):
            raise
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return _failed(arguments, f"{where}{os.strerror(error.errno)}; {REFUSALS[error.errno]}", 1)
    except Exception as error:  # a writer of another language or a database says it in words of its own
        if type(error).__module__.startswith("pydantic") and any(name.startswith("PREFECT_") for name in os.environ):
            return _failed(arguments, f"Prefect refuses a variable PREFECT_... of its settings: {error}", 2)
        if (message := _with_advice(f"{type(error).__name__}: {error}")) == f"{type(error).__name__}: {error}":
            raise
        return _failed(arguments, message, 1)


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _with_advice(message: str) -> str:
    """A message that says that the disk is full, or a file too large, with what to do."""
    said = {**{number: os.strerror(number) for number in FULL}, 0: "database or disk is full"}
    found = next((number for number, words in said.items() if words in message), None)
    if found is None:
        return message
    return f"{message.replace(f'; {REMEDIES.get(found)}', '')}; {REFUSALS.get(found, ROOM)}"


def _failed(arguments: argparse.Namespace, message: str, code: int) -> int:
    if arguments.debug:
        traceback.print_exc()
    half = LONGEST_LINE // 2  # a reason stands before or behind a long name
    lines = (
        line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}" for line in message.splitlines()
    )
    with contextlib.suppress(OSError):  # nobody can be told; the exit code stays
        print(f"posttrain: {visible(chr(10).join(lines))}", file=sys.stderr)
    return code


_ALL = (
    init, convert, data, validate, plan, run, stage, resume, sweep, retrain, online, runs, why, compare, diff, monitor,
    ui, profile, evaluate, analyze, replay, promote, approve, prefer, serve, service, up, down, status, sync, gc,
    doctor, verify_resume, completion,
)  # fmt: skip
TRAINING = ("run", "resume", "retrain", "stage", "sweep", "online")  # resumable commands
# Commands that Ctrl-C ends in bounded time. Servers take the time that clients need; a sweep waits for its trials.
_ENDED_BY_CTRL_C = ("run", "resume", "retrain", "stage", "profile", "evaluate", "analyze", "diff")
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    command.__name__.replace("_", "-"): command for command in _ALL
}

if __name__ == "__main__":
    command()
