"""Worker processes of a sweep, and the memory that they may take together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flows.sweep.trial_process import LocalTrialProcess, NodeLost, TrialProcess
from rl_core.errors import PosttrainError, SettingsError, Stopped, WorkerFailed
from rl_core.importing import child_import_path
from rl_core.machine_memory import free_memory
from tasks.config import PipelineSettings
from tasks.config.memory_checks import GIB

__all__ = ["LocalTrials", "Progress", "Worker", "check_memory", "device_of", "free_memory", "trial_bytes"]

logger = logging.getLogger(__name__)

PROCESS_BYTES = int(0.7 * GIB)  # torch, transformers and MLflow with a model of no size: 0.6 GiB were measured
TRAINED_COPIES = 4  # of the weights: themselves, gradients and the two moments of Adam

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


class LocalTrials:
    """This machine as the place of trials: `parallel` processes, with several GPUs one each."""

    shares_memory = True  # a trial waits until there is memory for it

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel

    def open(self, settings: PipelineSettings) -> None:
        """Raises: SettingsError for more processes than fit."""
        check_memory(self.parallel, settings)

    @property
    def threads(self) -> int | None:
        """Threads of a trial whose settings name none; None = torch's own number."""
        return None if self.parallel == 1 else max(1, (os.cpu_count() or 1) // self.parallel)

    def start(self, index: int, home: Path, log: Path, stop: threading.Event) -> TrialProcess:
        """The process of a lane."""
        environment = {**os.environ, "PYTHONPATH": child_import_path()}
        if self.parallel > 1:
            import torch

            device = device_of(index, environment.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
            if device is not None:
                environment["CUDA_VISIBLE_DEVICES"] = device
        return LocalTrialProcess(log, environment)

    def close(self) -> None:
        """There is nothing to end."""


class Worker:
    """One worker process; it is started at its first job, and again after it died. For one thread."""

    def __init__(self, log: Path, start: Callable[[], TrialProcess], stop: threading.Event) -> None:
        """start: makes the process. stop: when set, a job under way is saved and stopped. log: of what it prints."""
        self._log, self._make, self._stop = log, start, stop
        self._process: TrialProcess | None = None

    def run(self, job: Mapping[str, Any], decide: Callable[[float], bool], progress: Progress) -> dict[str, Any]:
        """Run one job to its end; returns fields of its outcome.

        Raises: Stopped; WorkerFailed where the process died; NodeLost where its machine did.
        """
        try:
            return self._run(job, decide, progress)
        except NodeLost as lost:
            self._gone()
            if self._stop.is_set():
                raise Stopped("stopped; the same command goes on", signal.SIGTERM) from lost
            raise

    def _run(self, job: Mapping[str, Any], decide: Callable[[float], bool], progress: Progress) -> dict[str, Any]:
        process = self._started()
        process.send(json.dumps(job))
        for event in map(json.loads, process.lines()):
            if event["event"] == "ended":
                return dict(event["outcome"])
            if event["event"] == "progress":
                progress(event["stage"], event["done"], event["total"], event["message"])
            if event["event"] == "rung":
                process.send(json.dumps({"goes_on": decide(event["value"])}))
            if event["event"] == "stopped":
                break
        code = self._gone()
        if self._stop.is_set():
            raise Stopped("stopped; the same command goes on", signal.SIGTERM)
        killed = " (out of memory? try --parallel 1)" if code == -signal.SIGKILL else ""
        raise WorkerFailed(f"the process of the trial ended with {code}{killed}; its output is in {self._log}")

    def _started(self) -> TrialProcess:
        if self._process is None or not self._process.is_alive:
            self._gone()
            self._process = self._make()
            if self._stop.is_set():
                self.ask_to_stop()
        return self._process

    def ask_to_stop(self) -> None:
        """SIGTERM: it saves and ends. From any thread."""
        process = self._process
        if process is not None:
            process.terminate()

    def close(self) -> None:
        """End the process; one that is at work is stopped first."""
        if self._process is not None:
            with contextlib.suppress(NodeLost, PosttrainError):
                self._process.close_input()  # it ends by itself where it waits for a job
        if self._stop.is_set():
            self.ask_to_stop()
        self._gone()

    def _gone(self) -> int:
        """Wait for the end of the process, or kill it; returns its exit code."""
        process, self._process = self._process, None
        return process.end() if process is not None else 0
