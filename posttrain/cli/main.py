"""Program `posttrain`: run one command and turn errors into messages and exit codes.

Only the standard library and the error tree are imported at module level, so that `posttrain --help` starts quickly;
each command imports what it needs.

Exit codes: 0 done; 1 failed; 2 wrong command, settings or data; 130 and 143 stopped by Ctrl-C and SIGTERM with all
state saved.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from flows.runtime import prefect_outage, stopping
from flows.runtime.import_setup import disable_bytecode_under_file_limit
from flows.runtime.stopping import TerminatedBySignal, bound_shutdown_time, unwind_on_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli.evaluate_commands import (
    run_analyze_command,
    run_approve_command,
    run_evaluate_command,
    run_promote_command,
    run_replay_command,
)
from posttrain.cli.inspect_commands import (
    run_compare_command,
    run_diff_command,
    run_profile_command,
    run_runs_command,
    run_verify_resume_command,
    run_why_command,
)
from posttrain.cli.online_command import run_online_command
from posttrain.cli.operate_commands import (
    run_doctor_command,
    run_down_command,
    run_gc_command,
    run_monitor_command,
    run_status_command,
    run_sync_command,
    run_ui_command,
    run_up_command,
)
from posttrain.cli.parser import build_parser, format_first_commands
from posttrain.cli.plan_command import run_plan_command
from posttrain.cli.prefer_command import run_prefer_command
from posttrain.cli.prepare_commands import (
    run_convert_command,
    run_data_command,
    run_init_command,
    run_validate_command,
)
from posttrain.cli.serve_command import run_serve_command
from posttrain.cli.service_command import run_service_command
from posttrain.cli.train_commands import (
    run_pipeline_command,
    run_resume_command,
    run_retrain_command,
    run_stage_command,
    run_sweep_command,
)
from rl_core.errors import (
    DataError,
    ModelError,
    PosttrainError,
    ResumeRefused,
    SettingsError,
    Stopped,
)
from rl_core.storage import faults
from rl_core.storage.atomic_files import REMEDIES
from rl_core.user_code.load import append_working_directory

WRITABLE_FOLDER_ADVICE = (
    "use a writable folder (--output, or output: in the configuration), or fix this one"
)
DISK_SPACE_ADVICE = (
    "make room, as with `posttrain gc`; the same command resumes from the last checkpoint"
)
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
    arguments = build_parser().parse_args(argv)
    if arguments.command is None:
        print(format_first_commands())
        return 0
    unwind_on_sigterm()
    append_working_directory()
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
        return 1
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        discard_output()
        return _print_failure(
            arguments, f"the output cannot be written: {os.strerror(error.errno)}; make room", 1
        )


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
        faults.check_fault_plan()
        if sys.flags.optimize:
            raise SettingsError(
                "`python -O` (PYTHONOPTIMIZE) takes out checks that posttrain relies on; run without it"
            )
        return COMMANDS[arguments.command](arguments)
    except Stopped as stopped:
        return _print_failure(arguments, str(stopped), 128 + stopped.signum)
    except KeyboardInterrupt as error:
        if isinstance(error, TerminatedBySignal):
            cause, signum = "SIGTERM", signal.SIGTERM
        else:
            cause, signum = "Ctrl-C", signal.SIGINT
        is_resumable = arguments.command in TRAINING
        hint = "; the same command resumes from the last checkpoint" if is_resumable else ""
        return _print_failure(arguments, f"stopped by {cause}{hint}", 128 + signum)
    except (SettingsError, DataError, ModelError, ResumeRefused) as error:
        return _print_failure(arguments, str(error), 2)
    except PosttrainError as error:
        return _print_failure(arguments, _append_disk_advice(f"{type(error).__name__}: {error}"), 1)
    except OSError as error:
        return _print_os_error(arguments, error)
    except Exception as error:
        return _print_foreign_error(arguments, error)


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


def run_completion_command(arguments: argparse.Namespace) -> int:
    """Print the shell completion script."""
    from posttrain.cli.completion import build_completion_script

    print(build_completion_script(arguments.shell, build_parser()), end="")
    return 0


# Handlers by command, in the order of `posttrain --help`.
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "init": run_init_command,
    "convert": run_convert_command,
    "data": run_data_command,
    "validate": run_validate_command,
    "plan": run_plan_command,
    "run": run_pipeline_command,
    "stage": run_stage_command,
    "resume": run_resume_command,
    "sweep": run_sweep_command,
    "retrain": run_retrain_command,
    "online": run_online_command,
    "runs": run_runs_command,
    "why": run_why_command,
    "compare": run_compare_command,
    "diff": run_diff_command,
    "monitor": run_monitor_command,
    "ui": run_ui_command,
    "profile": run_profile_command,
    "evaluate": run_evaluate_command,
    "analyze": run_analyze_command,
    "replay": run_replay_command,
    "promote": run_promote_command,
    "approve": run_approve_command,
    "prefer": run_prefer_command,
    "serve": run_serve_command,
    "service": run_service_command,
    "up": run_up_command,
    "down": run_down_command,
    "status": run_status_command,
    "sync": run_sync_command,
    "gc": run_gc_command,
    "doctor": run_doctor_command,
    "verify-resume": run_verify_resume_command,
    "completion": run_completion_command,
}
TRAINING = ("run", "resume", "retrain", "stage", "sweep", "online")  # resumable commands
# Commands that Ctrl-C ends in bounded time. Servers wait for their clients, a sweep for its trials.
_BOUNDED_AFTER_CTRL_C = (
    "run",
    "resume",
    "retrain",
    "stage",
    "profile",
    "evaluate",
    "analyze",
    "diff",
)

if __name__ == "__main__":
    command()
