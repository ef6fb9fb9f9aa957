"""Fork server for hostile input: imports everything once, then runs each case in a limited child and reports.

    python -m helpers.hostile_runner          one JSON request a line on standard input, one JSON report a line out

A request is {"folder", "arguments", "megabytes", "cpu_seconds", "allowed"}: the child changes into the folder, runs
`posttrain ARGUMENTS`, and may write below the `allowed` folders only. `["call", "module:function", ...]` runs that
function in the place of a command, with its errors turned into messages and exit codes in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch",
    "transformers",
    "pyarrow.parquet",
    "re2",
    "mlflow",
    "tasks.config",
    "tasks.tracking",
    "tasks.pipeline.pipeline_run",
    "tasks.stages.prepare_data",
    "tasks.lifecycle.crashed_runs",
    "rl_core.models.causal_lm",
    "rl_core.data.records",
    "rl_core.storage.checkpoint",
    "rl_core.analysis.runner",
    "rl_core.readers",
    "posttrain.cli.main",
    "posttrain.cli.recorded_settings",
    "posttrain.cli.model_capabilities",
    "posttrain.cli.approvals",
    "posttrain.cli.store_gc",
    "flows.runtime.run_summary",
    "tasks.lifecycle.approval",
    "tasks.retention",
    "tasks.tracking.removal",
    "tasks.tracking.replay",
    "posttrain.operations.commands",
    "posttrain.monitor.server",
    "hostile.calls",
    "rl_core.environments.gsm8k",
    "peft",
    "pandas",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
)
STARTS = (  # audit events of a program being started, a connection being made, a pickle being read
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pickle.find_class",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "ctypes.dlopen",
)
WRITES = {  # audit event -> places of the paths that it changes
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "shutil.rmtree": (0,),
    "sqlite3.connect": (0,),
}
WALL_SECONDS = 120.0  # of a case that waits and computes nothing


class _Watch:
    """Audit hook that notes programs started, connections, unpickling, forbidden imports, and writes elsewhere."""

    def __init__(self, allowed: list[str]) -> None:
        self.allowed = [os.path.realpath(path) for path in (*allowed, "/dev/null", "/dev/shm")]
        self.seen: list[str] = []
        self.busy = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            self._look(event, arguments)
        except (TypeError, ValueError, IndexError):
            pass
        finally:
            self.busy = False

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            if event != "ctypes.dlopen" or (arguments[0] and "canary" in str(arguments[0])):
                self.seen.append(f"{event} {arguments!r}"[:200])
        elif event == "import" and "canary" in str(arguments[0]):
            self.seen.append(f"import {arguments[0]}")
        elif event == "open" and isinstance(arguments[2], int):
            flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            if (
                not isinstance(arguments[0], int)
                and arguments[2] & flags
                and arguments[2] & os.O_TMPFILE != os.O_TMPFILE
            ):
                self._written(event, arguments[0])
        elif event in WRITES:
            for position in WRITES[event]:
                if not isinstance(arguments[position], int):
                    self._written(event, arguments[position])

    def _written(self, event: str, path: Any) -> None:
        if os.fsdecode(path).startswith(os.path.join(tempfile.gettempdir(), "posttrain-")):
            return  # a separate folder, for a model that has to be downloaded
        if event == "sqlite3.connect" and path in ("", ":memory:"):
            return
        real = os.path.realpath(os.fsdecode(path))
        if not any(real == folder or real.startswith(folder + os.sep) for folder in self.allowed):
            self.seen.append(f"{event} {real}"[:300])


def _read_virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _run_command(arguments: list[str]) -> int:
    from posttrain.cli import main as cli

    if arguments[0] == "call":
        module, _, name = arguments[1].partition(":")
        function = getattr(importlib.import_module(module), name)

        def call(_: argparse.Namespace) -> int:
            function(*arguments[2:])
            return 0

        return cli._run_command(argparse.Namespace(command="call", debug=False, handler=call))
    return cli.main(arguments)


def _surround(request: dict[str, Any]) -> None:
    """Give the case its variables, umask and user."""
    for name, value in request.get("environment", {}).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = None  # of another TMPDIR
    os.umask(request.get("umask", 0o022))
    if user := request.get("user", 0):
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    tempfile.gettempdir()  # chosen before the audit hook asks for it, which the search would call within its lock


def _run_child(request: dict[str, Any], reply: int) -> None:
    """Run one case, and write what the audit hook saw. Never returns."""
    os.setsid()
    os.chdir(request["folder"])
    out = os.open(request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    err = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(number, stream)
    room = _read_virtual_bytes() + request["megabytes"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"] + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _surround(request)
    watch = _Watch(request["allowed"])
    sys.addaudithook(watch)
    code = 70
    try:
        code = _run_command(request["arguments"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    watch.busy = True
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(reply, json.dumps(watch.seen[:20]).encode())
    os._exit(code if 0 <= code < 256 else 1)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    reading, writing = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_child(request, writing)
    os.close(writing)
    waiting = os.pidfd_open(pid)
    if not select.select([waiting], [], [], WALL_SECONDS)[0]:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(waiting)
    with open(reading, "rb") as file:
        seen = json.loads(file.read() or b'["it died"]')
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seen": seen,
        "cpu": usage.ru_utime + usage.ru_stime,
        "wall": time.monotonic() - began,
    }


def serve() -> None:
    """Serve requests until standard input ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from tasks.config import load_settings

    load_settings("test", import_code=False)  # fills caches that every case would fill for itself
    gc.collect()
    gc.freeze()  # a child that collects garbage would copy the pages of all modules: 0.4 s a case
    for line in sys.stdin:
        channel.write(json.dumps(_answer(json.loads(line))) + "\n")
        channel.flush()


if __name__ == "__main__":
    serve()
