"""Subprocess pool for code that executes model output or may never return.

Unlike a thread, a process can be killed. Children stay alive between requests, since their imports take seconds; each
request runs in a fork of its child (`subprocess_main.py`), confined by `sandbox.py` as far as this machine allows.
docs/reliability.md lists what that does not stop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import PosttrainError
from rl_core.processes.children import kill_group, start_child
from rl_core.processes.process_pool import ProcessPool

logger = logging.getLogger(__name__)

_MAIN = Path(__file__).with_name("subprocess_main.py")
_START_TIMEOUT_S = 600.0  # importing a large package from a cold disk, downloading what it needs
_MAX_REPLY = 65 * 2**20  # bytes; the child itself sends at most 64 MiB
_MEMORY_POLL_S = 0.5  # between measurements of the memory of a child and its descendants
# Environment variables passed to a child: no tokens, keys, server addresses or folders.
_VARIABLES = ("PATH", "LANG", "LC_ALL")


class ChildFailed(PosttrainError):
    """A child's function raised, or the child died; the message gives the cause."""


class ChildTimeout(ChildFailed):
    """A child exceeded its time limit and was killed."""


class ChildPool(ProcessPool["_ChildProcess"]):
    """Up to `count` children that serve requests with the function `handle` of a script. Thread-safe."""

    def __init__(
        self,
        script: Path,
        *,
        setup: dict[str, Any],
        count: int,
        timeout_s: float,
        memory_gib: float | None = None,
        variables: Iterable[str] = (),
        values: Mapping[str, str] | None = None,
        network: bool = False,
        readable: Iterable[Path] = (),
        writable: Iterable[Path] = (),
    ) -> None:
        """Store the options; children start on demand, with the first requests.

        Args:
            script: a Python file with `start(setup)`, called once in each child, and `handle(request)`.
            count: maximum number of children, hence of concurrent requests.
            timeout_s: time limit of one request, not counting the start of a child.
            memory_gib: address space of each of a child's processes, and memory of all together; None = no limit.
            variables: names of additional environment variables passed to children.
            values: additional environment variables with their values.
            network: allow children to use the network.
            readable: files and folders that children may read, in addition to the system's and the import path.
            writable: files and folders that children may also write.
        """
        super().__init__(count)
        self._script, self._timeout_s, self._memory_gib = script, timeout_s, memory_gib
        self._options = {"setup": setup, "timeout_s": timeout_s}
        self._sandbox = {
            "memory_gib": memory_gib,
            "network": network,
            "readable": [str(script), str(_MAIN.parent), *map(str, readable)],
            "writable": [str(path) for path in writable],
        }
        self._variables, self._values = (*_VARIABLES, *variables), dict(values or {})
        # Parts of the sandbox that the newest child lacks, with the reason.
        self.missing_sandbox_parts: dict[str, str] = {}

    def request_reply(self, request: dict[str, Any]) -> Any:
        """Return the result of `handle(request)`, decoded from JSON; blocks while all children are busy.

        Raises: ChildTimeout if there is no reply within the limit; ChildFailed if it raised or the child died.
        """
        with self.use_child() as child:
            reply = child.send_request(request, self._timeout_s)
        if "error" in reply:
            raise ChildFailed(reply["error"])
        return reply["value"]

    def _start_child(self) -> _ChildProcess:
        variables = {name: os.environ[name] for name in self._variables if name in os.environ}
        variables |= {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
        }
        variables |= self._values
        options = {**self._options, "sandbox": self._sandbox}
        return _ChildProcess(self._script, options, variables, self._memory_gib)

    def _set_up_child(self, child: _ChildProcess) -> None:
        reply = child.receive_reply(_START_TIMEOUT_S)
        if "error" in reply:
            raise ChildFailed(reply["error"])
        self.missing_sandbox_parts = reply["value"]["missing"]
        for part, reason in self.missing_sandbox_parts.items():
            warn_about_missing_part(part, reason)


@functools.lru_cache(maxsize=64)
def warn_about_missing_part(part: str, reason: str) -> None:
    """Warn once that the sandbox of child processes lacks a part on this machine."""
    logger.warning(
        "the sandbox of child processes is incomplete, %s: %s (docs/reliability.md)", part, reason
    )


def probe_sandbox() -> dict[str, str]:
    """Return the parts of the sandbox (`sandbox.PARTS`) that this machine does not support, with reasons, by a trial.

    Raises: ChildFailed if no child starts.
    """
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        script = Path(folder, "trial.py")
        script.write_text("def start(setup): pass\n\n\ndef handle(request): return request\n")
        pool = ChildPool(script, setup={}, count=1, timeout_s=60.0, memory_gib=4.0)
        pool.request_reply({})
        return pool.missing_sandbox_parts


class _ChildProcess:
    """One child in a dedicated process group and working folder, both of which are removed with it."""

    def __init__(
        self,
        script: Path,
        options: dict[str, Any],
        variables: dict[str, str],
        memory_gib: float | None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="posttrain-sandbox-")
        options = {**options, "sandbox": {**options["sandbox"], "folder": self._folder}}
        self._process = start_child(
            [sys.executable, "-P", str(_MAIN), str(script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            folder=Path(self._folder),
            environment=variables,
        )
        self._memory_bytes = None if memory_gib is None else memory_gib * 2**30
        self._buffer = bytearray()

    def send_request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and block for its reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ChildFailed(
                f"a child process died (exit status {self._process.poll()})"
            ) from error
        return self.receive_reply(timeout_s)

    def receive_reply(self, timeout_s: float) -> dict[str, Any]:
        """Receive the next reply of the child."""
        assert self._process.stdout is not None
        channel = self._process.stdout.fileno()
        end = time.monotonic() + timeout_s
        searched = 0
        while (newline := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            time_left = end - time.monotonic()
            readable, _, _ = select.select(
                [channel], [], [], max(0.0, min(time_left, _MEMORY_POLL_S))
            )
            if not readable:
                if time_left <= 0:
                    raise ChildTimeout(f"no answer within {timeout_s:g} s")
                self._check_memory()
                continue
            chunk = os.read(channel, 2**16)
            if not chunk:
                self._process.wait()
                raise ChildFailed(f"a child process died (exit status {self._process.returncode})")
            self._buffer += chunk
            if len(self._buffer) > _MAX_REPLY:
                raise ChildFailed(f"a child process sent more than {_MAX_REPLY} bytes")
        line, self._buffer = bytes(self._buffer[:newline]), self._buffer[newline + 1 :]
        try:
            reply: dict[str, Any] = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChildFailed(f"a child process sent no JSON: {error}") from error
        if not isinstance(reply, dict) or (
            "value" not in reply and not isinstance(reply.get("error"), str)
        ):
            raise ChildFailed(
                "a child process sent a malformed reply; the code in it may have tampered with it"
            )
        return reply

    def _check_memory(self) -> None:
        """Raise ChildFailed if the child and its descendants use too much memory; measured on Linux only."""
        if self._memory_bytes is None:
            return
        memory = read_process_table().sum_tree_memory(self._process.pid)
        if memory > self._memory_bytes:
            raise ChildFailed(
                f"its processes use {memory / 2**30:.1f} GiB together, above memory_gib"
            )

    def end_process(self) -> None:
        """Kill the process group and remove the working folder."""
        kill_group(self._process)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """Parent and private memory of every process of this machine, by its id."""

    parents: dict[int, int]
    private_bytes: dict[int, int]

    def sum_tree_memory(self, pid: int) -> int:
        """Sum the private memory of a process and its descendants, in bytes."""
        members, newer = {pid}, {pid}
        while newer:
            newer = {number for number, parent in self.parents.items() if parent in newer} - members
            members |= newer
        return sum(self.private_bytes.get(number, 0) for number in members)


def read_process_table() -> ProcessTable:
    """Read the table of all processes; on Linux only, elsewhere it is empty."""
    table = ProcessTable({}, {})
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            number = int(status.parent.name)
            table.parents[number] = int(fields["PPid"])
            table.private_bytes[number] = 1024 * int(fields.get("RssAnon", "0 kB").split()[0])
    return table
