"""The process of a sweep's trials (`worker.py`), on this machine: lines go in, lines come out.

Worker processes of a sweep, and the memory that they may take together.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from rl_core.storage.atomic_files import make_folder, open_log_file
from rl_core.user_code import build_child_import_path
from tasks.config import PipelineSettings
from tasks.config.machine_checks import GIB

STOP_SECONDS = 9.0  # for a process to save and stop


class NodeLost(Exception):
    """The machine that a trial ran on is gone; the text says how."""


class TrialProcess(Protocol):
    """A process that runs trials, wherever it is. Raises: NodeLost in every method but `end`."""

    @property
    def is_alive(self) -> bool:
        """False = it has ended."""

    def send(self, line: str) -> None:
        """Give it a line; one that has ended takes none."""

    def iter_lines(self) -> Iterator[str]:
        """Lines that it writes, until it ends."""

    def terminate(self) -> None:
        """SIGTERM: it saves and ends. From any thread."""

    def close_input(self) -> None:
        """Say that no line follows: it ends where it waits for a job."""

    def end(self) -> int:
        """Wait for its end, or kill it after `LAST_SECONDS`; returns its exit code."""


class LocalTrialProcess:
    """A `TrialProcess` that is a child of this process, which it does not outlive."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """Start it. `log`: of what it prints. Raises: OSError."""
        read, write = os.pipe()
        make_folder(log.parent)
        with open_log_file(log) as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.sweep.worker", str(os.getpid()), str(write)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
                pass_fds=(write,),
                env=dict(environment),
                start_new_session=True,
            )
        os.close(write)
        self._events: IO[str] = os.fdopen(read)

    @property
    def is_alive(self) -> bool:
        """See `TrialProcess`."""
        return self.process.poll() is None

    def send(self, line: str) -> None:
        """See `TrialProcess`."""
        assert self.process.stdin is not None
        with contextlib.suppress(
            BrokenPipeError, ValueError
        ):  # it has ended, or its input is closed
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def iter_lines(self) -> Iterator[str]:
        """See `TrialProcess`."""
        yield from iter(
            self._events.readline, ""
        )  # not from the file: a caller that goes would close it

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
        try:
            code = self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._events.close()
        self.close_input()
        return code


logger = logging.getLogger(__name__)

LIBRARY_BYTES = int(
    0.7 * GIB
)  # torch, transformers and MLflow with a model of no size: 0.6 GiB were measured
TRAINED_WEIGHT_COPIES = 4  # of the weights: themselves, gradients and the two moments of Adam

TrialProgress = Callable[[str, int, int, str], None]


def estimate_trial_bytes(settings: PipelineSettings) -> int:
    """Memory that one trial takes at least: the process, and the model in training where its size is known."""
    folder = Path(settings.model.path) if settings.model.path is not None else None
    weights = (
        sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if folder and folder.is_dir()
        else 0
    )
    return LIBRARY_BYTES + weights * (
        1 if settings.model.lora is not None else TRAINED_WEIGHT_COPIES
    )


def refuse_insufficient_memory(parallel: int, settings: PipelineSettings) -> None:
    """Refuse more processes than fit. Raises: SettingsError."""
    need, free = estimate_trial_bytes(settings), measure_free_memory()
    if parallel > 1 and parallel * need > free:
        raise SettingsError(
            f"--parallel {parallel}: a trial takes at least {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; "
            f"use --parallel {max(1, free // need)}"
        )


def select_visible_device(index: int, visible: str | None, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a worker: one GPU each, in turn; None = as it is (one GPU, or none)."""
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[index % len(names)] if len(names) > 1 else None


class LocalTrialPool:
    """This machine as the place of trials: `parallel` processes, with several GPUs one each."""

    shares_memory = True  # a trial waits until there is memory for it

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel

    def open_pool(self, settings: PipelineSettings) -> None:
        """Raises: SettingsError for more processes than fit."""
        refuse_insufficient_memory(self.parallel, settings)

    @property
    def threads(self) -> int | None:
        """Threads of a trial whose settings name none; None = torch's own number."""
        return None if self.parallel == 1 else max(1, (os.cpu_count() or 1) // self.parallel)

    def start_process(
        self, index: int, home: Path, log: Path, stop: threading.Event
    ) -> TrialProcess:
        """The process of a lane."""
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
        """There is nothing to end."""


class TrialWorker:
    """One worker process; it is started at its first job, and again after it died. For one thread."""

    def __init__(self, log: Path, start: Callable[[], TrialProcess], stop: threading.Event) -> None:
        """start: makes the process. stop: when set, a job under way is saved and stopped. log: of what it prints."""
        self._log, self._start_process, self._stop = log, start, stop
        self._process: TrialProcess | None = None

    def run_job(
        self, job: Mapping[str, Any], decide: Callable[[float], bool], progress: TrialProgress
    ) -> dict[str, Any]:
        """Run one job to its end; returns fields of its outcome.

        Raises: Stopped; WorkerFailed where the process died; NodeLost where its machine did.
        """
        try:
            return self._exchange_events(job, decide, progress)
        except NodeLost as lost:
            self._end_process()
            if self._stop.is_set():
                raise Stopped("stopped; the same command goes on", signal.SIGTERM) from lost
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
            raise Stopped("stopped; the same command goes on", signal.SIGTERM)
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
        """SIGTERM: it saves and ends. From any thread."""
        process = self._process
        if process is not None:
            process.terminate()

    def close_process(self) -> None:
        """End the process; one that is at work is stopped first."""
        if self._process is not None:
            with contextlib.suppress(NodeLost, PosttrainError):
                self._process.close_input()  # it ends by itself where it waits for a job
        if self._stop.is_set():
            self.request_stop()
        self._end_process()

    def _end_process(self) -> int:
        """Wait for the end of the process, or kill it; returns its exit code."""
        process, self._process = self._process, None
        return process.end() if process is not None else 0
