"""Main program of a child process: JSON-lines requests on standard input, replies on standard output.

    python -P subprocess_main.py <file that defines start(setup) and handle(request)> <setup and limits as JSON>

The child is confined (`sandbox.py`) before the file is loaded. Each request runs in a process of its own, a copy of the
one that has imported everything: what it changes, starts or leaves behind ends with it. Standard library only, without
imports from this package, so that it starts quickly and loads no model.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import select
import signal
import struct
import sys
from pathlib import Path
from typing import Any

MAX_REPLY = 64 * 2**20  # bytes
_POLL_S = 0.02  # between looks whether a request's process has died


def _call_handler(handle: Any, request: Any) -> dict[str, Any]:
    try:
        return {"value": handle(request)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _encode_reply(reply: dict[str, Any]) -> bytes:
    try:
        data = json.dumps(reply).encode()
    except (TypeError, ValueError, RecursionError) as error:
        data = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode()
    if len(data) > MAX_REPLY:
        return json.dumps(
            {"error": f"a reply of {len(data)} bytes; at most {MAX_REPLY} are taken"}
        ).encode()
    return data


def _serve_in_fork(handle: Any, request: Any, options: dict[str, Any], limit_cpu: Any) -> bytes:
    """Reply to one request, from a process of its own, with whatever that one left behind ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        limit_cpu(options["timeout_s"])
        with open(
            os.devnull, "w"
        ) as nowhere:  # should the parent have been killed, this ends the request
            faulthandler.dump_traceback_later(options["timeout_s"] + 30.0, exit=True, file=nowhere)
            data = _encode_reply(_call_handler(handle, request))
            with contextlib.suppress(OSError), open(writing, "wb") as file:
                file.write(struct.pack("<Q", len(data)) + data)
        os._exit(0)
    os.close(writing)
    try:
        return _receive_from_fork(reading, pid)
    finally:
        os.close(reading)
        _kill_request_processes(pid)


def _receive_from_fork(reading: int, pid: int) -> bytes:
    found = bytearray()
    status = None
    while len(found) < 8 or len(found) < 8 + struct.unpack("<Q", found[:8])[0]:
        readable = select.select([reading], [], [], _POLL_S)[0]
        part = os.read(reading, 2**16) if readable else b""
        found += part
        if len(found) >= 8 and struct.unpack("<Q", found[:8])[0] > MAX_REPLY:
            return _encode_reply({"error": "a reply that is too long"})
        if part:
            continue
        if (
            status is not None or readable
        ):  # nothing was left to read when it had died, or it closed the pipe
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1] if status is None else status)
            cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return _encode_reply({"error": f"a child process died ({cause})"})
        found_pid, found_status = os.waitpid(pid, os.WNOHANG)
        status = found_status if found_pid else None
    return bytes(found[8:])


def _kill_request_processes(pid: int) -> None:
    """End a request's process, and in a PID namespace everything that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1 if os.getpid() == 1 else pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if os.getpid() == 1 else os.WNOHANG)[0]:
            pass


def main(script: str, options: dict[str, Any]) -> None:
    """Serve requests until standard input ends."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output printed by a scorer must not be parsed as a reply

    def send(data: bytes) -> None:
        channel.write(data + b"\n")
        channel.flush()

    sandbox = runpy.run_path(str(Path(__file__).with_name("sandbox.py")))
    try:
        missing = sandbox["enter"](**options["sandbox"])
        names = runpy.run_path(script)
        names["start"](
            options["setup"]
        )  # imports and loads data; not counted against the first request
        handle = names["handle"]
    except Exception as error:
        send(_encode_reply({"error": f"{type(error).__name__}: {error}"[:2000]}))
        return
    send(_encode_reply({"value": {"missing": missing}}))
    for line in sys.stdin.buffer:
        send(_serve_in_fork(handle, json.loads(line), options, sandbox["limit_cpu"]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
