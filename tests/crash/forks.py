"""Warm process with everything imported, which forks a child for each run: 10 s of imports are paid once.

`python -m crash.forks` reads requests as JSON lines and answers each with one line. A forked child differs from a fresh
process in its imports and their filled caches; a request with `fresh` starts a new interpreter instead.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

# linux/prctl.h: orphans of a child become our children, so they are noticed
PR_SET_CHILD_SUBREAPER = 36
CHECK = "evaluate-champion"  # runs the flow, which has no command
END_SECONDS = 300.0  # longest wait for the current run
ORPHAN_SECONDS = 10.0  # longest wait for the end of a killed process's children


@dataclass(frozen=True)
class Request:
    """Request to run one process."""

    arguments: list[str]  # of the command line `posttrain`
    printed: str  # file of its output
    fault: str = ""  # POSTTRAIN_FAULT
    log: str = ""  # POSTTRAIN_FAULT_LOG
    kill_after: float | None = None  # seconds
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False  # start a new interpreter instead of forking


@dataclass(frozen=True)
class Ended:
    """End of a process."""

    code: int  # exit code, or minus the signal
    seconds: float
    began: float  # seconds since the epoch
    orphans: list[str]  # processes that outlived it
    load: float = 0.0  # processor seconds of it and its children


class Forks:
    """Client of the warm process; a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Forks:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self._answer() == {"ready": True}
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_SECONDS)

    def run(self, request: Request) -> Ended:
        """Run one process to its end."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        return Ended(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the warm process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _import_everything() -> None:
    """Import all modules of a run, but nothing that starts a thread or reads the settings of a run."""
    from tasks.mlflow_environment import build_offline_environment

    for name, value in build_offline_environment().items():
        os.environ.setdefault(name, value)
    import matplotlib.pyplot
    import mlflow
    import mlflow.pyfunc
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracing.client
    import mlflow.transformers
    import pandas
    import prefect.artifacts
    import transformers.models.llama.modeling_llama

    import flows.evaluate_champion
    import flows.post_training
    import flows.retrain
    import rl_core.api.recipes.policy_gradient
    import rl_core.api.recipes.reward_model
    import rl_core.api.recipes.thoughts
    import rl_core.trainers.preference
    import rl_core.trainers.sft
    import tasks.stages.promote
    from tasks import stage_registry

    for stage in stage_registry.list_stages():
        stage_registry.import_stage_task(stage)
    from rl_core.cpu import layer_kernels
    from tasks.pipeline.stage_key import compute_code_version
    from tasks.tracking import freeze_environment

    assert compute_code_version() and freeze_environment() and layer_kernels
    modules = (matplotlib, mlflow, pandas, prefect, transformers, flows, rl_core, tasks)
    assert all(modules)


def _serve(replies: IO[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    _import_everything()
    gc.collect()
    gc.freeze()  # else each child would copy the pages of all modules when it collects garbage
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        _reply(replies, asdict(_run_request(Request(**json.loads(line)))))


def _reply(replies: IO[str], values: dict[str, Any]) -> None:
    replies.write(json.dumps(values) + "\n")
    replies.flush()


def _run_request(request: Request) -> Ended:
    started_at, times_before = time.time(), os.times()
    started = time.monotonic()
    pid = _spawn_process(request) if request.fresh else _fork_process(request)
    while True:
        exited_pid, status = os.waitpid(pid, os.WNOHANG)
        if exited_pid:
            break
        if request.kill_after is not None and time.monotonic() - started >= request.kill_after:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            break
        time.sleep(0.001)
    seconds = time.monotonic() - started
    orphans = _reap()
    times_after = os.times()
    load = (
        times_after.children_user
        + times_after.children_system
        - times_before.children_user
        - times_before.children_system
    )
    return Ended(os.waitstatus_to_exitcode(status), seconds, started_at, orphans, load)


def _build_environment(request: Request) -> dict[str, str]:
    named = {
        "POSTTRAIN_FAULT": request.fault,
        "POSTTRAIN_FAULT_LOG": request.log,
        **request.environment,
    }
    return {name: value for name, value in named.items() if value}


def _spawn_process(request: Request) -> int:
    with open(request.printed, "ab") as output:
        command = [sys.executable, "-m", "posttrain.cli.main", *request.arguments]
        environment = {**os.environ, **_build_environment(request)}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        ).pid


def _fork_process(request: Request) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = _run_child(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # as at the end of an interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_child(request: Request) -> int:
    os.setsid()
    output = os.open(request.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.environ |= _build_environment(request)
    from rl_core.storage import faults

    faults.configure_faults(request.fault)
    faults.log_reached_points(request.log or None)
    if request.arguments[0] == CHECK:
        from flows.evaluate_champion import evaluate_champion

        return 0 if evaluate_champion(*request.arguments[1:]) else 1
    from posttrain.cli.main import main

    return main(request.arguments)


def _reap() -> list[str]:
    """Wait for the orphans of a dead child; kill the remaining ones and return their names."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        running = _list_children()
        if not running:
            return []
        if time.monotonic() > deadline:
            names = [
                Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200] for pid in running
            ]
            for pid in running:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            return names
        time.sleep(0.01)


def _list_children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints goes to stderr
    _serve(answers)
