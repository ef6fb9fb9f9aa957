"""Child processes that run a pipeline: uninterrupted, killed at random points, or in time slices."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rl_core.errors import CheckFailed
from rl_core.processes.children import kill_group, start_child, wait_or_kill
from rl_core.storage.faults import FAULT_POINTS, PLAN_VARIABLE
from tasks.tracking import read_metrics

STOP_SECONDS = 30.0  # after SIGTERM, before SIGKILL
POLL_SECONDS = 0.2
MAX_LOG_BYTES = 1 << 30
MAX_STALLED_SLICES = 3  # consecutive slices without progress

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class PipelineCommand:
    """Command that runs the user's pipeline."""

    config: str
    overrides: Sequence[str]
    name: str  # of the pipeline
    environment: Mapping[str, str] = field(default_factory=lambda: _build_child_environment())

    def start_process(
        self, output: Path, log: Path, extra_environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the command in a new session, so that a kill also ends its workers."""
        set_options = [
            argument
            for override in (*self.overrides, f"output={output}")
            for argument in ("--set", override)
        ]
        # -P: the working directory comes last on the path, as with the command `posttrain`.
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "posttrain.cli.main",
            "run",
            self.config,
            "--quiet",
            *set_options,
        ]
        environment = {**self.environment, **extra_environment}
        return start_child(arguments, log=log, append_up_to=MAX_LOG_BYTES, environment=environment)


def _build_child_environment() -> dict[str, str]:
    """Return this process's environment without servers and faults, which must not affect a trial."""
    names = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_PROFILE", PLAN_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in names}


@dataclass
class Interruption:
    """End of a process before its pipeline's end."""

    # "killed after 12.3 s", "killed at fault point loop.saved", "stopped after 60.0 s"
    description: str
    seconds: float  # duration of the process
    stage: str = ""  # unfinished
    iterations: int = 0  # repeated by the next process
    lost_seconds: float = 0.0  # of these iterations
    restart_seconds: float | None = None  # from the next process's start to its first progress


@dataclass
class VerificationRun:
    """Pipeline run to its end, in one process or in several."""

    home: Path  # <output>/<pipeline>
    seconds: float = 0.0  # of all processes
    first_progress: float | None = None  # of the first process
    interruptions: list[Interruption] = field(default_factory=list)


def run_uninterrupted(
    command: PipelineCommand, folder: Path, limit_s: float, report: ReportProgress
) -> VerificationRun:
    """Run the pipeline without interruption. Raises: CheckFailed if it fails, or takes longer than `limit_s`."""
    trial = VerificationRun(folder / "whole" / command.name)
    with _WatchedProcess(
        command, trial, folder / "whole.log", {"PYTHONHASHSEED": "1"}, report
    ) as process:
        code = process.wait_for_exit(limit_s)
        if code is None:
            process.stop_gracefully()
    trial.seconds, trial.first_progress = process.seconds, process.first_progress
    if code is None:
        raise CheckFailed(f"the uninterrupted run takes longer than {limit_s:.0f} s")
    if code != 0:
        tail = _read_log_tail(folder / "whole.log")
        raise CheckFailed(f"the uninterrupted run ends with exit code {code}:\n{tail}")
    return trial


def run_with_kills(
    command: PipelineCommand,
    folder: Path,
    uninterrupted: VerificationRun,
    kills: int,
    rng: random.Random,
    limit_s: float,
    report: ReportProgress,
) -> VerificationRun:
    """Run the pipeline while killing it (SIGKILL), at random times and random fault points in turn, until it ends.

    Raises: CheckFailed if a restart fails, or all runs together take longer than `limit_s`.
    """
    trial = VerificationRun(folder / "killed" / command.name)
    start_up = uninterrupted.first_progress or 1.0
    work_seconds = max(0.0, uninterrupted.seconds - start_up)
    while True:
        number = len(trial.interruptions)
        environment = {"PYTHONHASHSEED": str(2 + number)}
        remaining_s = limit_s - trial.seconds
        moment = _InterruptionTime(remaining_s)
        fault = ""
        if number < kills and trial.seconds < limit_s / 2:
            moment = _InterruptionTime(
                remaining_s, rng.uniform(0, 0.8) * 2 * work_seconds / (kills + 1)
            )
            if number % 4 == 3:  # during the start
                moment = _InterruptionTime(rng.random() * start_up)
            elif number % 2:
                fault = f"{rng.choice(sorted(FAULT_POINTS))}:{rng.randint(1, 3)}"
                environment[PLAN_VARIABLE] = f"{fault}:kill"
        if _run_one_process(
            command, trial, folder / "killed.log", environment, moment, fault, report
        ):
            return trial
        if trial.seconds >= limit_s:
            raise CheckFailed(f"the run under kills takes longer than {limit_s:.0f} s")


def run_in_slices(
    command: PipelineCommand, folder: Path, slice_s: float, limit_s: float, report: ReportProgress
) -> VerificationRun:
    """Run the pipeline in slices until it ends: SIGTERM after `slice_s` seconds, then restart.

    Raises: CheckFailed if a restart fails, or slices are too short for progress.
    """
    trial = VerificationRun(folder / "sliced" / command.name)
    log = folder / "sliced.log"
    num_stalled = 0
    last_progress = -1
    while True:
        environment = {"PYTHONHASHSEED": str(2 + len(trial.interruptions))}
        moment = _InterruptionTime(slice_s)
        if _run_one_process(command, trial, log, environment, moment, "", report, signal.SIGTERM):
            return trial
        progress = _count_progress(trial.home)
        num_stalled = 0 if progress > last_progress else num_stalled + 1
        last_progress = progress
        if num_stalled >= MAX_STALLED_SLICES:
            raise CheckFailed(_describe_stall(trial, slice_s))
        if trial.seconds > limit_s:
            raise CheckFailed(f"the run in slices takes longer than {limit_s:.0f} s")


def _describe_stall(trial: VerificationRun, slice_s: float) -> str:
    starts = [
        interruption.restart_seconds
        for interruption in trial.interruptions
        if interruption.restart_seconds is not None
    ]
    start = "starting takes longer than that"
    if starts:
        start = f"starting takes about {sum(starts) / len(starts):.0f} s"
    return (
        f"{MAX_STALLED_SLICES} slices of {slice_s:g} s in a row ended without progress: {start}, and a checkpoint is "
        "saved every `checkpoint_every` iterations. Take longer slices, or save more often"
    )


@dataclass(frozen=True)
class _InterruptionTime:
    """Time of an interruption: seconds after the start, or earlier, seconds after the first progress."""

    after_start: float
    after_progress: float = math.inf


def _run_one_process(
    command: PipelineCommand,
    trial: VerificationRun,
    log: Path,
    environment: Mapping[str, str],
    moment: _InterruptionTime,
    fault: str,
    report: ReportProgress,
    signal_number: int = signal.SIGKILL,
) -> bool:
    """Run one process until its end or `moment`; return True if the pipeline has ended."""
    is_kill = signal_number == signal.SIGKILL
    text = f"killed at fault point {fault.partition(':')[0]}"
    with _WatchedProcess(command, trial, log, environment, report) as process:
        code = process.wait_for_exit(moment.after_start, moment.after_progress)
        if code is None:
            code = process.kill_group() if is_kill else process.stop_gracefully()
            text = f"{'killed' if is_kill else 'stopped'} after {process.seconds:.1f} s"
    trial.seconds += process.seconds
    if trial.interruptions:
        trial.interruptions[-1].restart_seconds = process.first_progress
    elif trial.first_progress is None:
        trial.first_progress = process.first_progress
    if code == 0:
        return True
    # A signal that arrives before Python has installed its handler ends the process directly.
    expected = (-signal_number, -signal.SIGKILL, 128 + signal.SIGTERM)
    if code not in expected:
        number = len(trial.interruptions)
        raise CheckFailed(
            f"the process after interruption {number} ends with exit code {code}:\n{_read_log_tail(log)}"
        )
    stage, iterations, lost = _count_lost_iterations(trial.home)
    trial.interruptions.append(Interruption(text, process.seconds, stage, iterations, lost))
    return False


class _WatchedProcess:
    """Child process that is watched for progress; the context manager ends it and its children."""

    def __init__(
        self,
        command: PipelineCommand,
        trial: VerificationRun,
        log: Path,
        environment: Mapping[str, str],
        report: ReportProgress,
    ) -> None:
        if "PYTHONHASHSEED" in command.environment:  # set by the user
            environment = {
                name: value for name, value in environment.items() if name != "PYTHONHASHSEED"
            }
        self._home, self._report = trial.home, report
        self._description = f"{trial.home.parent.name}, process {len(trial.interruptions) + 1}"
        self._start, self._start_time = time.monotonic(), time.time()
        self._process = command.start_process(trial.home.parent, log, environment)
        self.first_progress: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill_group()

    def wait_for_exit(self, limit_s: float, after_progress: float = math.inf) -> int | None:
        """Wait for the end of the process and return its exit code.

        Returns: None if it still runs after `limit_s`, or `after_progress` seconds after its first progress.
        """
        while True:
            try:
                remaining = limit_s - (time.monotonic() - self._start)
                return self._process.wait(min(POLL_SECONDS, max(0.0, remaining)))
            except subprocess.TimeoutExpired:
                pass
            finally:
                self.seconds = time.monotonic() - self._start
            self._observe_progress()
            if self.first_progress is not None:
                limit_s = min(limit_s, self.first_progress + after_progress)
            if self.seconds >= limit_s:
                return None

    def kill_group(self) -> int:
        """Send SIGKILL to the process and everything it started."""
        return kill_group(self._process)

    def stop_gracefully(self) -> int:
        """Send SIGTERM like a scheduler; SIGKILL if it has not ended within STOP_SECONDS."""
        self._process.terminate()
        code = wait_or_kill(self._process, STOP_SECONDS, whole_group=True)
        self.seconds = time.monotonic() - self._start
        return code

    def _observe_progress(self) -> None:
        newest = _read_newest_progress(self._home, self._start_time)
        if newest is not None and self.first_progress is None:
            self.first_progress = time.monotonic() - self._start
        self._report(f"{self._description}: {self.seconds:.0f} s, {newest or 'starting'}")


def _read_newest_progress(home: Path, since: float) -> str | None:
    """Return stage and count of the newest progress after `since`; None = none yet."""
    files = []
    for path in home.glob("stages/*/*.tracking/.tracking/progress.json"):
        modified = path.stat().st_mtime
        if modified >= since:
            files.append((modified, path))
    if not files:
        return None
    _, path = max(files)
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return path.parents[2].name
    return f"{path.parents[2].name} {row.get('done')}/{row.get('total')}"


def _count_progress(home: Path) -> int:
    """Count finished stages and saved versions of the unfinished one; the count grows with all persistent progress."""
    finished = len(list(home.glob("stages/*/*/manifest.json")))
    versions = [
        int(path.name.rpartition("-")[2])
        for path in home.glob("stages/*/*.open/checkpoints/checkpoint-*")
        if path.is_dir()
    ]
    return finished * 10**9 + max(versions, default=0)


def _count_lost_iterations(home: Path) -> tuple[str, int, float]:
    """Return the unfinished stage, the iterations in its journal after its newest checkpoint, and their seconds."""
    for folder in home.glob("stages/*/*.open"):
        journal = folder.with_name(f"{folder.name.removesuffix('.open')}.tracking")
        metrics = read_metrics(journal) if journal.is_dir() else []
        seconds = [row["perf/step_seconds"] for _, row in metrics if "perf/step_seconds" in row]
        lost = seconds[_read_saved_iteration(folder / "checkpoints") :]
        return folder.parent.name, len(lost), sum(lost)
    return "", 0, 0.0


def _read_saved_iteration(checkpoints: Path) -> int:
    """Return the iteration of the newest checkpoint; 0 = none."""
    try:
        name = (checkpoints / "LATEST").read_text().strip()
        return int(json.loads((checkpoints / name / "state.json").read_text())["loop"]["iteration"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read_log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    messages = [line for line in lines if line.startswith("posttrain:")]
    return "\n".join(f"  {line}" for line in (messages[-1:] or lines[-15:]))
