"""Child process of the verifier `code`: runs one program with its tests per request. See `answer_checks`.

Each program runs in a separate process and session, in a temporary folder; all are removed or killed afterwards. Its
time, memory and output are limited, and it sees no environment variables. That alone is not a sandbox: the program has
the user's files and network.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_OUTPUT = 2**20  # bytes of a program's output, and of its report
_limits: dict[str, float] = {}

# Runs in the program's process. The report goes to a file without a name; its token keeps a program from ending the
# process early with a forged report.
_RUNNER = r"""
def main():
    import ctypes, json, os, resource, sys
    with open(int(sys.argv.pop()), "rb") as file:
        task = json.loads(file.read())
    try:
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: killed with its parent
    except (OSError, AttributeError):
        pass
    for name, limit in task["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    def report(passed, token=task["token"], place=task["report"], write=os.write, dumps=json.dumps, end=os._exit):
        try:
            sys.stdout.flush()
        except BaseException:
            pass
        write(place, dumps([token, passed]).encode())
        end(0)
    names, tests, program, passed = {"__name__": "__main__"}, task["tests"], task["program"], []
    del task
    try:
        exec(compile(program, "program", "exec"), names)
    except BaseException as error:
        report([isinstance(error, SystemExit) and error.code in (None, 0) and not tests])
    for test in tests:
        try:
            exec(compile(test, "test", "exec"), names)
            passed.append(True)
        except BaseException:
            passed.append(False)
    report(passed if tests else [True])
main()
"""


def start(setup: dict[str, Any]) -> None:
    """Store the limits."""
    _limits.update(timeout_s=setup["timeout_s"], memory_gib=setup["memory_gib"])


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"passed": [bool for each test], "timed_out": bool} for a program.

    A test that was not reached did not pass.
    """
    tests = request["tests"]
    if isinstance(tests[0], str):
        passed, _, timed_out = _run_program(request["program"], tests, "")
        return {"passed": (passed + [False] * len(tests))[: len(tests)], "timed_out": timed_out}
    results, any_timed_out = [], False
    for test in tests:
        passed, output, timed_out = _run_program(request["program"], [], test["input"])
        any_timed_out |= timed_out
        results.append(
            passed == [True] and _split_output_lines(output) == _split_output_lines(test["output"])
        )
    return {"passed": results, "timed_out": any_timed_out}


def _split_output_lines(output: str) -> list[str]:
    """Split into lines, ignoring trailing white space and trailing empty lines."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _run_program(program: str, tests: list[str], stdin_text: str) -> tuple[list[bool], str, bool]:
    """Run one process and return (passed, output, timed out)."""
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True)
        )
        report, output, task_file, stdin_file = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)
        )
        limits = {
            "AS": int(_limits["memory_gib"] * 2**30),
            "CPU": int(_limits["timeout_s"]) + 1,
            "FSIZE": MAX_OUTPUT,
            "CORE": 0,
        }
        task = {
            "program": program,
            "tests": tests,
            "limits": limits,
            "token": token,
            "report": report.fileno(),
        }
        for file, content in ((task_file, json.dumps(task)), (stdin_file, stdin_text)):
            file.write(content.encode("utf-8", "replace"))
            file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _RUNNER, str(task_file.fileno())],
            stdin=stdin_file,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"HOME": folder, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
            pass_fds=(report.fileno(), task_file.fileno()),
            start_new_session=True,
        )
        try:
            process.wait(_limits["timeout_s"])
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_session(process.pid)
            process.wait()
        report.seek(0)
        output.seek(0)
        return (
            _parse_report(report.read(MAX_OUTPUT), token),
            output.read(MAX_OUTPUT).decode(errors="replace"),
            timed_out,
        )


def _parse_report(report: bytes, token: str) -> list[bool]:
    """Return the tests' results; [] for a report without the token."""
    try:
        reported_token, passed = json.loads(report)
    except ValueError:
        return []
    return [value is True for value in passed] if reported_token == token else []


def _kill_session(leader: int) -> None:
    """Kill the program's processes, including those that outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    if not Path("/proc").is_dir():
        return
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            # Field 6 of /proc/PID/stat, after the name in brackets: the session.
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                os.kill(int(entry), signal.SIGKILL)
