"""Main program of a child process: JSON-lines requests on standard input, replies on standard output.

    python -P subprocess_main.py <file that defines start(setup) and handle(request)> <setup and limits as JSON>

The child is confined (`sandbox.py`) before the file is loaded. Each request runs in a fork of the process that has
imported everything, so all that it changes, starts or leaves running ends with it. Standard library only, without
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
_POLL_S = 0.02  # between checks whether a request's process has died


def describe_error(error: BaseException) -> str:
    """Describe an error by type and message; a group, or an error that a group caused, by the group's members."""
    members = list_group_members(error)
    if not members:
        return f"{type(error).__name__}: {error}"[:2000]
    texts = dict.fromkeys(f"{type(member).__name__}: {member}" for member in members)
    return "; ".join(texts)[:2000]


def list_group_members(error: BaseException) -> list[BaseException]:
    """List the errors within a group (of an asyncio.TaskGroup), or within the group that caused an error; else []."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, BaseExceptionGroup):
        cause = cause.__cause__
    if cause is None:
        return []
    return [leaf for part in cause.exceptions for leaf in (list_group_members(part) or [part])]


def _call_handler(handle: Any, request: Any) -> dict[str, Any]:
    try:
        return {"value": handle(request)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and asyncio's CancelledError are no Exception
        return {"error": describe_error(error)}


def _encode_reply(reply: dict[str, Any]) -> bytes:
    try:
        data = json.dumps(reply).encode()
    except (TypeError, ValueError, RecursionError) as error:
        data = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode()
    if len(data) > MAX_REPLY:
        message = f"a reply of {len(data)} bytes; at most {MAX_REPLY} are accepted"
        return json.dumps({"error": message}).encode()
    return data


def _serve_in_fork(handle: Any, request: Any, options: dict[str, Any], limit_cpu: Any) -> bytes:
    """Return the reply to one request, run in a fork; then end everything that it left running."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        limit_cpu(options["timeout_s"])
        # Ends the request if the parent has been killed.
        with open(os.devnull, "w") as nowhere:
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
    received = bytearray()
    status = None
    while len(received) < 8 or len(received) < 8 + struct.unpack("<Q", received[:8])[0]:
        readable = select.select([reading], [], [], _POLL_S)[0]
        chunk = os.read(reading, 2**16) if readable else b""
        received += chunk
        if len(received) >= 8 and struct.unpack("<Q", received[:8])[0] > MAX_REPLY:
            return _encode_reply({"error": "a reply that is too long"})
        if chunk:
            continue
        # Nothing was left to read after it died, or it closed the pipe.
        if status is not None or readable:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1] if status is None else status)
            cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return _encode_reply({"error": f"a child process died ({cause})"})
        ended_pid, ended_status = os.waitpid(pid, os.WNOHANG)
        status = ended_status if ended_pid else None
    return bytes(received[8:])


def _kill_request_processes(pid: int) -> None:
    """Kill a request's process, and in a PID namespace everything that it started."""
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
        # Imports and loads data; this time does not count against the first request.
        names["start"](options["setup"])
        handle = names["handle"]
    except (Exception, SystemExit) as error:
        send(_encode_reply({"error": describe_error(error)}))
        return
    send(_encode_reply({"value": {"missing": missing}}))
    for line in sys.stdin.buffer:
        send(_serve_in_fork(handle, json.loads(line), options, sandbox["limit_cpu"]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
