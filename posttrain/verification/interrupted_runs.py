"""Child processes that run a pipeline: in one piece, killed at random points, or in slices of time."""

from __future__ import annotations

import contextlib
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
from rl_core.storage.atomic_files import open_log_file
from rl_core.storage.faults import FAULT_POINTS, PLAN_VARIABLE
from tasks.tracking import read_metrics

STOP_SECONDS = 30.0  # after SIGTERM; then it is killed
POLL_SECONDS = 0.2
MAX_LOG_BYTES = 1 << 30
MAX_STALLED_SLICES = 3  # slices in a row without progress

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class PipelineCommand:
    """Command that runs the user's pipeline."""

    config: str
    overrides: Sequence[str]
    name: str  # of the pipeline
    environment: Mapping[str, str] = field(default_factory=lambda: _build_child_environment())

    def start_process(
        self, output: Path, log: Path, more: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start it, in a session of its own, so that a kill takes its workers with it."""
        sets = [
            argument
            for override in (*self.overrides, f"output={output}")
            for argument in ("--set", override)
        ]
        # -P: the working directory comes last on the path, as with the command `posttrain`
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "posttrain.cli.main",
            "run",
            self.config,
            "--quiet",
            *sets,
        ]
        with open_log_file(log, append_up_to=MAX_LOG_BYTES) as file:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**self.environment, **more},
            )


def _build_child_environment() -> dict[str, str]:
    """This process's environment without servers and faults, which are not for a trial."""
    names = ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_PROFILE", PLAN_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in names}


@dataclass
class Interruption:
    """One end of a process before its pipeline's end."""

    description: (
        str  # "killed after 12.3 s", "at fault point loop.saved (hit 1)", "stopped after 60.0 s"
    )
    seconds: float  # that the process ran
    stage: str = ""  # that was open
    iterations: int = 0  # that the next process does again
    lost_seconds: float = 0.0  # of these iterations
    restart_seconds: float | None = None  # from the next process's start to its first progress


@dataclass
class VerificationRun:
    """A pipeline run to its end, in one process or in several."""

    home: Path  # <output>/<pipeline>
    seconds: float = 0.0  # of all processes
    first_progress: float | None = None  # of the first process
    interruptions: list[Interruption] = field(default_factory=list)


def run_uninterrupted(
    command: PipelineCommand, folder: Path, limit_s: float, report: ReportProgress
) -> VerificationRun:
    """Run it in one piece. Raises: CheckFailed when it fails, or takes longer than `limit_s`."""
    trial = VerificationRun(folder / "whole" / command.name)
    with _WatchedProcess(
        command, trial, folder / "whole.log", {"PYTHONHASHSEED": "1"}, report
    ) as process:
        code = process.wait_for_exit(limit_s)
        if code is None:
            process.stop_gracefully()
    trial.seconds, trial.first_progress = process.seconds, process.first_progress
    if code is None:
        raise CheckFailed(f"the run in one piece takes longer than {limit_s:.0f} s")
    if code != 0:
        raise CheckFailed(
            f"the run in one piece ends with exit code {code}:\n{_read_log_tail(folder / 'whole.log')}"
        )
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
    """Run it while killing it (SIGKILL), at random moments and at random fault points in turn, until it ends.

    Raises: CheckFailed when a restart fails, or all of them take longer than `limit_s`.
    """
    trial = VerificationRun(folder / "killed" / command.name)
    start_up = uninterrupted.first_progress or 1.0
    rest = max(0.0, uninterrupted.seconds - start_up)
    while True:
        number = len(trial.interruptions)
        more = {"PYTHONHASHSEED": str(2 + number)}
        left_s = limit_s - trial.seconds
        moment, fault = _InterruptionTime(left_s), ""
        if number < kills and trial.seconds < limit_s / 2:
            moment = _InterruptionTime(left_s, rng.uniform(0, 0.8) * 2 * rest / (kills + 1))
            if number % 4 == 3:  # while it starts
                moment = _InterruptionTime(rng.random() * start_up)
            elif number % 2:
                fault = f"{rng.choice(sorted(FAULT_POINTS))}:{rng.randint(1, 3)}"
                more[PLAN_VARIABLE] = f"{fault}:kill"
        if _run_one_process(command, trial, folder / "killed.log", more, moment, fault, report):
            return trial
        if trial.seconds >= limit_s:
            raise CheckFailed(f"the run under kills takes longer than {limit_s:.0f} s")


def run_in_slices(
    command: PipelineCommand, folder: Path, slice_s: float, limit_s: float, report: ReportProgress
) -> VerificationRun:
    """Run it in slices: SIGTERM after `slice_s` seconds, and start again, until it ends.

    Raises: CheckFailed when a restart fails, or slices are too short for any progress.
    """
    trial = VerificationRun(folder / "sliced" / command.name)
    stalled, seen = 0, -1
    while True:
        more = {"PYTHONHASHSEED": str(2 + len(trial.interruptions))}
        log = folder / "sliced.log"
        if _run_one_process(
            command, trial, log, more, _InterruptionTime(slice_s), "", report, signal.SIGTERM
        ):
            return trial
        done = _count_progress(trial.home)
        stalled = 0 if done > seen else stalled + 1
        seen = done
        if stalled >= MAX_STALLED_SLICES:
            known = [
                cut.restart_seconds
                for cut in trial.interruptions
                if cut.restart_seconds is not None
            ]
            start = (
                f"starting takes about {sum(known) / len(known):.0f} s"
                if known
                else "starting takes longer than that"
            )
            raise CheckFailed(
                f"{MAX_STALLED_SLICES} slices of {slice_s:g} s in a row ended without progress: {start}, and a checkpoint comes "
                "every `checkpoint_every` iterations. Take longer slices, or save more often"
            )
        if trial.seconds > limit_s:
            raise CheckFailed(f"the run in slices takes longer than {limit_s:.0f} s")


@dataclass(frozen=True)
class _InterruptionTime:
    """Moment of an interruption: seconds after the start, or earlier, so many seconds after the first progress."""

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
    """Run one process until its end, or `moment`; True = the pipeline has ended."""
    text = f"killed at fault point {fault.partition(':')[0]}"
    with _WatchedProcess(command, trial, log, environment, report) as process:
        code = process.wait_for_exit(moment.after_start, moment.after_progress)
        if code is None:
            code = (
                process.kill_group()
                if signal_number == signal.SIGKILL
                else process.stop_gracefully()
            )
            text = f"{'killed' if signal_number == signal.SIGKILL else 'stopped'} after {process.seconds:.1f} s"
    trial.seconds += process.seconds
    if trial.interruptions:
        trial.interruptions[-1].restart_seconds = process.first_progress
    elif trial.first_progress is None:
        trial.first_progress = process.first_progress
    if code == 0:
        return True
    # A signal in the first moments, before Python has a handler for it, ends the process by itself.
    expected = (-signal_number, -signal.SIGKILL, 128 + signal.SIGTERM)
    if code not in expected:
        raise CheckFailed(
            f"the process after interruption {len(trial.interruptions)} ends with exit code {code}:\n{_read_log_tail(log)}"
        )
    stage, iterations, lost = _count_lost_iterations(trial.home)
    trial.interruptions.append(Interruption(text, process.seconds, stage, iterations, lost))
    return False


class _WatchedProcess:
    """One child process, watched for progress; a context manager that leaves nothing of it running."""

    def __init__(
        self,
        command: PipelineCommand,
        trial: VerificationRun,
        log: Path,
        more: Mapping[str, str],
        report: ReportProgress,
    ) -> None:
        if "PYTHONHASHSEED" in command.environment:  # the user's own choice
            more = {name: value for name, value in more.items() if name != "PYTHONHASHSEED"}
        self._home, self._report = trial.home, report
        self._description = f"{trial.home.parent.name}, process {len(trial.interruptions) + 1}"
        self._began, self._began_at = time.monotonic(), time.time()
        self._process = command.start_process(trial.home.parent, log, more)
        self.first_progress: float | None = None
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill_group()

    def wait_for_exit(self, limit_s: float, after_progress: float = math.inf) -> int | None:
        """Exit code; None = it still runs after `limit_s`, or `after_progress` seconds after its first progress."""
        while True:
            try:
                return self._process.wait(
                    min(POLL_SECONDS, max(0.0, limit_s - (time.monotonic() - self._began)))
                )
            except subprocess.TimeoutExpired:
                pass
            finally:
                self.seconds = time.monotonic() - self._began
            self._observe_progress()
            if self.first_progress is not None:
                limit_s = min(limit_s, self.first_progress + after_progress)
            if self.seconds >= limit_s:
                return None

    def kill_group(self) -> int:
        """SIGKILL to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def stop_gracefully(self) -> int:
        """SIGTERM, as a scheduler sends it; SIGKILL if it has not ended within STOP_S."""
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            code = self.kill_group()
        self.seconds = time.monotonic() - self._began
        return code

    def _observe_progress(self) -> None:
        newest = _read_newest_progress(self._home, self._began_at)
        if newest is not None and self.first_progress is None:
            self.first_progress = time.monotonic() - self._began
        self._report(f"{self._description}: {self.seconds:.0f} s, {newest or 'starting'}")


def _read_newest_progress(home: Path, since: float) -> str | None:
    """Stage and count of the newest progress after `since`; None = none yet."""
    found = [
        (path.stat().st_mtime, path)
        for path in home.glob("stages/*/*.tracking/.tracking/progress.json")
    ]
    found = [(changed, path) for changed, path in found if changed >= since]
    if not found:
        return None
    _, path = max(found)
    try:
        row = json.loads(path.read_text())
    except (OSError, ValueError):
        return path.parents[2].name
    return f"{path.parents[2].name} {row.get('done')}/{row.get('total')}"


def _count_progress(home: Path) -> int:
    """Finished stages and saved versions of the open one: grows with every bit of progress that stays."""
    finished = len(list(home.glob("stages/*/*/manifest.json")))
    versions = [
        int(path.name.rpartition("-")[2])
        for path in home.glob("stages/*/*.open/checkpoints/checkpoint-*")
        if path.is_dir()
    ]
    return finished * 10**9 + max(versions, default=0)


def _count_lost_iterations(home: Path) -> tuple[str, int, float]:
    """Stage that was open; iterations in its journal after its newest checkpoint, and the seconds that they took."""
    for folder in home.glob("stages/*/*.open"):
        journal = folder.with_name(f"{folder.name.removesuffix('.open')}.tracking")
        rows = (
            [row for _, row in read_metrics(journal) if "perf/step_seconds" in row]
            if journal.is_dir()
            else []
        )
        saved = _read_saved_iteration(folder / "checkpoints")
        again = rows[saved:]
        return folder.parent.name, len(again), sum(row["perf/step_seconds"] for row in again)
    return "", 0, 0.0


def _read_saved_iteration(checkpoints: Path) -> int:
    """Iteration of the newest checkpoint; 0 = none."""
    try:
        name = (checkpoints / "LATEST").read_text().strip()
        return int(json.loads((checkpoints / name / "state.json").read_text())["loop"]["iteration"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read_log_tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("posttrain:")]
    return "\n".join(f"  {line}" for line in (said[-1:] or lines[-15:]))
