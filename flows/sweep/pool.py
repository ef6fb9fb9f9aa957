"""Worker processes of a sweep, and the memory that they may take together."""

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
from typing import IO, Any

from rl_core.errors import SettingsError, Stopped, WorkerFailed
from rl_core.machine_memory import free_memory
from rl_core.storage.single_files import make_folder, open_log
from tasks.config import PipelineSettings
from tasks.config.memory_checks import GIB

__all__ = ["Progress", "Worker", "check_memory", "device_of", "free_memory", "trial_bytes"]

logger = logging.getLogger(__name__)

PROCESS_BYTES = int(0.7 * GIB)  # torch, transformers and MLflow with a model of no size: 0.6 GiB were measured
TRAINED_COPIES = 4  # of the weights: themselves, gradients and the two moments of Adam
LAST_SECONDS = 9.0  # for a worker to save and stop

Progress = Callable[[str, int, int, str], None]


def trial_bytes(settings: PipelineSettings) -> int:
    """Memory that one trial takes at least: the process, and the model in training where its size is known."""
    folder = Path(settings.model.path) if settings.model.path is not None else None
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder and folder.is_dir() else 0
    return PROCESS_BYTES + weights * (1 if settings.model.lora is not None else TRAINED_COPIES)


def check_memory(parallel: int, settings: PipelineSettings) -> None:
    """Refuse more processes than fit. Raises: SettingsError."""
    need, free = trial_bytes(settings), free_memory()
    if parallel > 1 and parallel * need > free:
        raise SettingsError(
            f"--parallel {parallel}: a trial takes at least {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; "
            f"use --parallel {max(1, free // need)}"
        )


def device_of(index: int, visible: str | None, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a worker: one GPU each, in turn; None = as it is (one GPU, or none)."""
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[index % len(names)] if len(names) > 1 else None


class Worker:
    """One worker process; it is started at its first job, and again after it died. For one thread."""

    def __init__(self, log: Path, environment: Mapping[str, str], stop: threading.Event) -> None:
        """stop: when set, a job under way is saved and stopped. log: of what the process prints."""
        self._log, self._environment, self._stop = log, dict(environment), stop
        self._process: subprocess.Popen[str] | None = None
        self._events: IO[str] | None = None

    def run(self, job: Mapping[str, Any], decide: Callable[[float], bool], progress: Progress) -> dict[str, Any]:
        """Run one job to its end; returns fields of its outcome.

        Raises: Stopped; WorkerFailed where the process died.
        """
        self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._send(job)
        for event in self._read():
            if event["event"] == "ended":
                return dict(event["outcome"])
            if event["event"] == "progress":
                progress(event["stage"], event["done"], event["total"], event["message"])
            if event["event"] == "rung":
                self._send({"goes_on": decide(event["value"])})
            if event["event"] == "stopped":
                break
        code = self._gone()
        if self._stop.is_set():
            raise Stopped("stopped; the same command goes on", signal.SIGTERM)
        killed = " (out of memory? try --parallel 1)" if code == -signal.SIGKILL else ""
        raise WorkerFailed(f"the process of the trial ended with {code}{killed}; its output is in {self._log}")

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._gone()
        read, write = os.pipe()
        make_folder(self._log.parent)
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.sweep.worker", str(os.getpid()), str(write)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=(write,),
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        os.close(write)
        self._events = os.fdopen(read)
        if self._stop.is_set():
            self.ask_to_stop()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self._events is not None
        for line in self._events:
            yield json.loads(line)

    def ask_to_stop(self) -> None:
        """SIGTERM: it saves and ends. From any thread."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()

    def close(self) -> None:
        """End the process; one that is at work is stopped first."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # it ends by itself where it waits for a job
        if self._stop.is_set():
            self.ask_to_stop()
        self._gone()

    def _gone(self) -> int:
        """Wait for the end of the process, or kill it; returns its exit code."""
        if self._process is None:
            return 0
        try:
            code = self._process.wait(timeout=LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._events is not None:
            self._events.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process, self._events = None, None
        return code
