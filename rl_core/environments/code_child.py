"""Child process of the verifier `code`: runs one program with its tests per request. See `answer_checks`.

Each program runs in a separate process and session, in a temporary folder; all are removed or killed afterwards. Its
time, memory and output are limited, and it sees no environment variables. That alone is not a sandbox: the program has
the user's files and network.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_OUTPUT = 2**20  # bytes of a program's output
MAX_REPORT = 2**24  # bytes of what its process reports
_POLL_S = 0.05  # between checks whether a program has ended
_PR_SET_DUMPABLE = 4
_limits: dict[str, float] = {}

# Runs in the program's process. Before its report it asks for a token, which is not in the process while the program
# runs, so a program cannot end the process early with a forged report. What the tests rely on (builtins, the modules
# that they import) is compared with what it was before the program ran. Nothing that a program can change through
# the frames below it holds a result.
_RUNNER = r"""
def main():
    import atexit, builtins, ctypes, importlib, json, os, resource, sys, types
    with open(int(sys.argv.pop()), "rb") as file:
        task = json.loads(file.read())
    try:
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: killed with its parent
    except (OSError, AttributeError):
        pass
    for name, limit in task["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    run, compile_code, get, is_callable, is_type = exec, compile, getattr, callable, isinstance
    write, read, end, dumps, modules, stdout = os.write, os.read, os._exit, json.dumps, sys.modules, sys.stdout
    Failure, Exit, Module, Class, text = BaseException, SystemExit, types.ModuleType, type, str
    Number, Whole, Truth, List, Tuple, Object = float, int, bool, list, tuple, dict
    channel, function, mode = task["channel"], task["function"], task["mode"]

    def describe():
        found = {}
        for name in checked:
            module = modules.get(name)
            found[name] = module
            for key, value in Tuple(get(module, "__dict__", {}).items()):
                if is_callable(value):
                    found[name, key] = value
                    found[name, key, "code"] = get(value, "__code__", None)
                owner = get(value, "__module__", None)
                if is_type(value, Class) and name != "builtins" and text(owner).startswith(name):
                    for part, member in Tuple(value.__dict__.items()):
                        if is_callable(member):
                            found[name, key, "part", part] = member
                            found[name, key, "code", part] = get(member, "__code__", None)
        return found

    def is_unchanged(before):
        now = describe()
        for key, value in before.items():
            if now.get(key) is not value:
                return False
        return True

    def encode(value, depth=20):
        kind = Class(value)
        if kind.__module__ == "numpy":
            value = value.tolist()
            kind = Class(value)
        if value is None or kind in (Truth, Whole, Number, text):
            return value
        if depth and is_type(value, (List, Tuple)):
            return {"list": [encode(item, depth - 1) for item in value]}
        if depth and is_type(value, Object):
            return {"dict": [[encode(k, depth - 1), encode(v, depth - 1)] for k, v in value.items()]}
        raise TypeError

    checked, codes, results, num_passed_bits = ["builtins"], (), [], 0
    for name in task["modules"]:
        if name not in ("sys", "os"):
            try:
                importlib.import_module(name)
                checked.append(name)
            except BaseException:
                pass
    codes = tuple((compile(source, "test", "exec"), is_test) for source, is_test in task["steps"])
    arguments, program, aliases = task["arguments"], task["program"], task["program_modules"]
    del task
    checked = tuple(checked)
    before, names = describe(), {"__name__": "__main__"}
    builtin_names, is_right, is_sound = frozenset(vars(builtins)), False, True
    try:
        run(compile_code(program, "program", "exec"), names)
        is_right = True
    except Failure as error:
        is_right = mode == "pairs" and is_type(error, Exit) and error.code in (None, 0)
    if mode == "calls" and is_right:
        owner = names.get("Solution")
        for given in arguments:
            try:
                target = names[function] if function in names else get(owner(), function)
                results.append([encode(target(*given))])
            except Failure:
                results.append(None)
    elif mode == "steps" and is_right:
        space = {
            key: value
            for key, value in Tuple(names.items())
            if key == function or key not in builtin_names
        }
        space |= {"__name__": "__main__", "__builtins__": builtins}
        for name in aliases:
            modules[name] = Module(name)
            modules[name].__dict__.update(space)
        place = 1
        for code, is_test in codes:
            try:
                run(code, space)
                if is_test:
                    num_passed_bits |= place
            except Failure:
                is_sound &= is_test
            if is_test:
                place <<= 1
        is_sound &= is_unchanged(before)
    for finish in (atexit._run_exitfuncs, sys.stdout.flush, stdout.flush):
        try:
            finish()
        except Failure:
            pass
    passed = num_passed_bits if is_sound else 0
    write(channel, b"?")
    report = dumps([read(channel, 64).decode(), is_right, passed, results]).encode() + b"\n"
    while report:
        report = report[write(channel, report):]
    end(0)
main()
"""


def start(setup: dict[str, Any]) -> None:
    """Store the limits, and close this process's memory and files to the programs."""
    _limits.update(timeout_s=setup["timeout_s"], memory_gib=setup["memory_gib"])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Run a program with `ProgramTests` and return {"passed": [bool for each test], "timed_out": bool}.

    A test that was not reached did not pass.
    """
    if request["pairs"]:
        return _run_pairs(request)
    mode = "calls" if request["expected"] else "steps"
    report, _, timed_out = _run_program(request, mode, "")
    if mode == "calls":
        results = report[2] if report else []
        passed = [
            index < len(results)
            and results[index] is not None
            and _is_expected(_decode_value(results[index][0]), expected)
            for index, expected in enumerate(request["expected"])
        ]
    else:
        bits = report[1] if report else 0
        count = sum(is_test for _, is_test in request["steps"])
        passed = [bool(bits >> index & 1) for index in range(count)]
    return {"passed": passed, "timed_out": timed_out}


def _run_pairs(request: dict[str, Any]) -> dict[str, Any]:
    results, any_timed_out = [], False
    for pair in request["pairs"]:
        report, output, timed_out = _run_program(request, "pairs", pair["input"])
        any_timed_out |= timed_out
        is_right = bool(report) and report[0] is True
        results.append(
            is_right and _split_output_lines(output) == _split_output_lines(pair["output"])
        )
    return {"passed": results, "timed_out": any_timed_out}


def _decode_value(value: Any) -> Any:
    """Decode what the program's process encoded; keys of objects become text, as in JSON."""
    if isinstance(value, dict) and "list" in value:
        return [_decode_value(item) for item in value["list"]]
    if isinstance(value, dict):
        return {_write_key(key): _decode_value(item) for key, item in value["dict"]}
    return value


def _write_key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _is_expected(value: Any, expected: Any) -> bool:
    """Compare a result with the expected one, which APPS puts into a list of its own."""
    if isinstance(expected, list) and len(expected) == 1 and _is_equal(value, expected[0]):
        return True
    return _is_equal(value, expected)


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(_is_equal, value, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_is_equal(value[key], expected[key]) for key in expected)
        )
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if isinstance(value, int) and isinstance(expected, int):
            return value == expected
        with contextlib.suppress(OverflowError):
            return value == expected or math.isclose(value, expected, rel_tol=1e-9)
        return False
    return type(value) is type(expected) and bool(value == expected)


def _split_output_lines(output: str) -> list[str]:
    """Split into lines, ignoring trailing white space and trailing empty lines."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _run_program(
    request: dict[str, Any], mode: str, stdin_text: str
) -> tuple[list[Any], str, bool]:
    """Run one process and return (report, output, timed out); report: [ended well, bits of passed tests, results]."""
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True)
        )
        output, task_file, stdin_file = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)
        )
        channel, far_end = socket.socketpair()
        stack.enter_context(channel)
        stack.enter_context(far_end)
        limits = {
            "AS": int(_limits["memory_gib"] * 2**30),
            "CPU": int(_limits["timeout_s"]) + 1,
            "FSIZE": MAX_OUTPUT,
            "CORE": 0,
        }
        names = ("program", "function", "arguments", "steps", "modules", "program_modules")
        task = {name: request[name] for name in names}  # without what is expected
        task |= {"mode": mode, "limits": limits, "channel": far_end.fileno()}
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
            pass_fds=(far_end.fileno(), task_file.fileno()),
            start_new_session=True,
        )
        far_end.close()
        try:
            data, timed_out = _receive_report(process, channel, token)
        finally:
            _kill_session(process.pid)
            process.wait()
        output.seek(0)
        text = output.read(MAX_OUTPUT).decode(errors="replace")
        return _parse_report(data, token), text, timed_out


def _receive_report(
    process: subprocess.Popen[bytes], channel: socket.socket, token: str
) -> tuple[bytes, bool]:
    """Send the token when it is asked for; return the report after it, and whether time ran out."""
    deadline = time.monotonic() + _limits["timeout_s"]
    data, is_asked = bytearray(), False
    while not data.endswith(b"\n") and len(data) <= MAX_REPORT:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return b"", True
        if not select.select([channel], [], [], min(left_s, _POLL_S))[0]:
            if process.poll() is not None and not select.select([channel], [], [], 0)[0]:
                break
            continue
        try:
            chunk = channel.recv(2**16)
            if not chunk:
                break
            if is_asked:
                data += chunk
            elif chunk == b"?":
                is_asked = True
                channel.sendall(token.encode())
            else:
                break  # not by the runner
        except OSError:
            break
    return bytes(data), False


def _parse_report(data: bytes, token: str) -> list[Any]:
    """Return what the runner reported; [] for a report without the token."""
    try:
        reported_token, is_right, passed, results = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return []
    is_sound = isinstance(passed, int) and isinstance(results, list) and passed >= 0
    return [is_right, passed, results] if reported_token == token and is_sound else []


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
