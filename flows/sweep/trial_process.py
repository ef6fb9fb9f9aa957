"""Worker processes of a sweep's trials (`worker.py`) on this machine, and their memory. They exchange lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from rl_core.errors import PosttrainError, SettingsError, Stopped, WorkerFailed
from rl_core.machine_memory import measure_free_memory
from rl_core.processes.children import start_child, wait_or_kill
from rl_core.user_code.load import build_child_import_path
from tasks.config import PipelineSettings
from tasks.config.machine_checks import GIB

STOP_SECONDS = 9.0  # for a process to save and stop
LIBRARY_BYTES = int(0.7 * GIB)  # torch, transformers and MLflow with a tiny model: 0.6 GiB measured
TRAINED_WEIGHT_COPIES = 4  # the weights, gradients and the two moments of Adam

TrialProgress = Callable[[str, int, int, str], None]


class NodeLost(Exception):
    """The machine of a trial was lost; the text says how."""


class TrialProcess(Protocol):
    """Process that runs trials, on any machine. Raises: NodeLost in every method but `end`."""

    @property
    def is_alive(self) -> bool:
        """True if the process is running."""

    def send(self, line: str) -> None:
        """Send a line; a process that has ended ignores it."""

    def iter_lines(self) -> Iterator[str]:
        """Yield the lines that it writes, until it ends."""

    def terminate(self) -> None:
        """Send SIGTERM: the process saves and ends. May be called from any thread."""

    def close_input(self) -> None:
        """Close its input: it ends once it waits for a job."""

    def end(self) -> int:
        """Wait for its end, or kill it after `STOP_SECONDS`; return its exit code."""


class LocalTrialProcess:
    """`TrialProcess` that is a child of this process and ends with it."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """Start it. `log` receives its output. Raises: OSError."""
        read_end, write_end = os.pipe()
        program = [sys.executable, "-P", "-m", "flows.sweep.worker"]
        try:
            self.process = start_child(
                [*program, str(os.getpid()), str(write_end)],
                log=log,
                stdin=subprocess.PIPE,
                environment=environment,
                descriptors=(write_end,),
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._events: IO[str] = os.fdopen(read_end)

    @property
    def is_alive(self) -> bool:
        """See `TrialProcess`."""
        return self.process.poll() is None

    def send(self, line: str) -> None:
        """See `TrialProcess`."""
        assert self.process.stdin is not None
        # The process may have ended, or its input may be closed.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def iter_lines(self) -> Iterator[str]:
        """See `TrialProcess`."""
        # Iterating over the file itself would close it when the caller stops early.
        yield from iter(self._events.readline, "")

    def terminate(self) -> None:
        """See `TrialProcess`."""
        if self.is_alive:
            self.process.terminate()

    def close_input(self) -> None:
        """See `TrialProcess`."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self) -> int:
        """See `TrialProcess`."""
        code = wait_or_kill(self.process, STOP_SECONDS)
        self._events.close()
        self.close_input()
        return code


def estimate_trial_bytes(settings: PipelineSettings) -> int:
    """Estimate the memory of one trial: the process, and the model in training if its size is known."""
    weight_bytes = 0
    if settings.model.path is not None and Path(settings.model.path).is_dir():
        files = Path(settings.model.path).glob("*.safetensors")
        weight_bytes = sum(path.stat().st_size for path in files)
    copies = 1 if settings.model.lora is not None else TRAINED_WEIGHT_COPIES
    return LIBRARY_BYTES + weight_bytes * copies


def refuse_insufficient_memory(parallel: int, settings: PipelineSettings) -> None:
    """Refuse more processes than fit into memory. Raises: SettingsError."""
    need = estimate_trial_bytes(settings)
    free = measure_free_memory()
    if parallel > 1 and parallel * need > free:
        raise SettingsError(
            f"--parallel {parallel}: a trial takes at least {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; "
            f"use --parallel {max(1, free // need)}"
        )


def select_visible_device(index: int, visible: str | None, count: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a worker: one GPU each, in turn; None = unchanged (one GPU, or none)."""
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[index % len(names)] if len(names) > 1 else None


class LocalTrialPool:
    """This machine as a pool of `parallel` trial processes, each with one of several GPUs."""

    shares_memory = True  # a trial waits until its memory is free

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel

    def open_pool(self, settings: PipelineSettings) -> None:
        """Check the memory. Raises: SettingsError for more processes than fit."""
        refuse_insufficient_memory(self.parallel, settings)

    @property
    def threads(self) -> int | None:
        """Threads of a trial whose settings name none; None = torch's default."""
        return None if self.parallel == 1 else max(1, (os.cpu_count() or 1) // self.parallel)

    def start_process(
        self, index: int, home: Path, log: Path, stop: threading.Event
    ) -> TrialProcess:
        """Start the process of a lane."""
        environment = {**os.environ, "PYTHONPATH": build_child_import_path()}
        if self.parallel > 1:
            import torch

            device = select_visible_device(
                index, environment.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
            )
            if device is not None:
                environment["CUDA_VISIBLE_DEVICES"] = device
        return LocalTrialProcess(log, environment)

    def close_pool(self) -> None:
        """Do nothing: workers close their processes."""


class TrialWorker:
    """Worker process, started at its first job and restarted after it dies. Used by one thread."""

    def __init__(self, log: Path, start: Callable[[], TrialProcess], stop: threading.Event) -> None:
        """Configure the worker.

        Args:
            log: output of the process.
            start: starts the process.
            stop: when set, a running job is saved and stopped.
        """
        self._log, self._start_process, self._stop = log, start, stop
        self._process: TrialProcess | None = None

    def run_job(
        self, job: Mapping[str, Any], decide: Callable[[float], bool], progress: TrialProgress
    ) -> dict[str, Any]:
        """Run one job to its end; return fields of its outcome.

        Raises: Stopped; WorkerFailed if the process died; NodeLost if its machine did.
        """
        try:
            return self._exchange_events(job, decide, progress)
        except NodeLost as lost:
            self._end_process()
            if self._stop.is_set():
                raise Stopped("stopped; the same command resumes", signal.SIGTERM) from lost
            raise

    def _exchange_events(
        self, job: Mapping[str, Any], decide: Callable[[float], bool], progress: TrialProgress
    ) -> dict[str, Any]:
        process = self._ensure_process()
        process.send(json.dumps(job))
        for event in map(json.loads, process.iter_lines()):
            if event["event"] == "ended":
                return dict(event["outcome"])
            if event["event"] == "progress":
                progress(event["stage"], event["done"], event["total"], event["message"])
            if event["event"] == "rung":
                process.send(json.dumps({"goes_on": decide(event["value"])}))
            if event["event"] == "stopped":
                break
        code = self._end_process()
        if self._stop.is_set():
            raise Stopped("stopped; the same command resumes", signal.SIGTERM)
        killed = " (out of memory? try --parallel 1)" if code == -signal.SIGKILL else ""
        raise WorkerFailed(
            f"the process of the trial ended with {code}{killed}; its output is in {self._log}"
        )

    def _ensure_process(self) -> TrialProcess:
        if self._process is None or not self._process.is_alive:
            self._end_process()
            self._process = self._start_process()
            if self._stop.is_set():
                self.request_stop()
        return self._process

    def request_stop(self) -> None:
        """Send SIGTERM: the process saves and ends. May be called from any thread."""
        process = self._process
        if process is not None:
            process.terminate()

    def close_process(self) -> None:
        """End the process; stop a running job first."""
        if self._process is not None:
            with contextlib.suppress(NodeLost, PosttrainError):
                self._process.close_input()  # it ends once it waits for a job
        if self._stop.is_set():
            self.request_stop()
        self._end_process()

    def _end_process(self) -> int:
        """Wait for the end of the process, or kill it; return its exit code."""
        process = self._process
        self._process = None
        return process.end() if process is not None else 0
