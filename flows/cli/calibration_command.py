"""`posttrain doctor --calibrate`: measure this machine, and write its speeds for `posttrain plan --machine`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flows.runtime.status_line import StatusLine
from rl_core.errors import SettingsError

__all__ = ["DEFAULT_FILE", "calibrate_machine"]

Clock = Callable[[], float]

DEFAULT_FILE = "machine.yaml"
_PIPELINE = ("prefect", "mlflow", "flows.post_training")  # what a pipeline's process has beside rl_core


def calibrate_machine(path: Path, *, as_json: bool, clock: Clock = time.perf_counter) -> str:
    """Measure for about a minute and write the file; text about it, or the settings as JSON.

    Raises: SettingsError, before anything is measured, where there is no folder for the file; BackendError where a
        process that measures memory fails; CheckpointError where the file cannot be written.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        problem = "is a folder" if path.is_dir() else f"cannot be written: {path.parent} is no folder that takes files"
        raise SettingsError(f"--output: {path} {problem}; name a file for the speeds")

    import yaml

    from rl_core.resources.machine_calibration import calibrate
    from rl_core.storage.single_files import write_text_atomic
    from tasks.config import resolve

    began, progress = time.monotonic(), StatusLine(sys.stderr)
    progress.line(f"measuring {_processor()}, which takes about a minute where nothing else runs")
    machine = calibrate(_processor(), pipeline_imports=_PIPELINE, clock=clock, progress=progress)
    progress.clear()
    values = resolve(machine)
    head = "# Speeds of one machine, for `posttrain plan CONFIG --machine FILE`: posttrain doctor --calibrate\n"
    write_text_atomic(path, head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    if as_json:
        return json.dumps(values, indent=1)
    lines = [f"{machine.name}, {machine.threads} threads, {machine.memory_bytes / 2**30:.1f} GiB"]
    for name in ("training", "scoring", "decoding"):
        points = ", ".join(f"{one.median / 1e9:,.0f} ({one.hidden_size})" for one in getattr(machine, name))
        lines.append(f"{name}: {points} GFLOP/s (at width)")
    lines.append(
        f"memory: copies {machine.copy_bytes_per_second / 1e9:.1f} GB/s, reads "
        f"{machine.read_bytes_per_second / 1e9:.1f} GB/s; a process takes "
        f"{machine.library_bytes / 2**20:.0f} MiB, with the pipeline {machine.pipeline_bytes / 2**20:.0f} MiB more"
    )
    lines.append(f"{path} written after {time.monotonic() - began:.0f} s: posttrain plan CONFIG --machine {path}")
    return "\n".join(lines)


def _processor() -> str:
    """Name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
