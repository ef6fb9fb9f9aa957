"""Number of CPU threads of a run and of its stages: chosen once, recorded, and reused on resume.

Floating-point sums depend on how many threads share them. An interrupted run resumes with the number that it started
with, a stage with the number behind its checkpoints, however many processors are free by then.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rl_core.storage.atomic_files import write_json_atomic

THREADS_FILE = "threads.json"  # in a stage's open folder, next to its checkpoints


def choose_num_threads(
    setting: int | Literal["auto"] | None, earlier: int | None
) -> tuple[int | None, str]:
    """Choose the number of threads of a run, and a sentence about it if it was determined here ("" otherwise).

    Args:
        setting: None = torch's default, returned as None (see `read_default_threads`); "auto" = as many as processors
            are free, which takes a second to measure.
        earlier: number of the run that is resumed; None = a new run.
    """
    if setting != "auto":
        return setting, ""
    read_default_threads()
    from rl_core.cpu.openmp_spin import (  # imported here because it loads torch
        count_usable_processors,
        free_processors,
    )

    if earlier is not None:
        return earlier, f"threads: {earlier}, the number that this run started with"
    free = free_processors()
    return free, f"threads: {free}, as {free} of {count_usable_processors()} processors are free"


@functools.cache
def read_default_threads() -> int:
    """Return torch's default number of threads: the one it had before the first run of this process."""
    import torch  # imported here: a fully cached run does not need it and saves seconds

    return torch.get_num_threads()


def read_recorded_threads(path: Path) -> int | None:
    """Read the number of threads from a run's or a stage's record; None if there is none."""
    try:
        threads = json.loads(path.read_text()).get("threads")
    except (OSError, ValueError, AttributeError):
        return None
    return threads if isinstance(threads, int) and threads > 0 else None


def record_num_threads(folder: Path, threads: int) -> None:
    """Record a stage's number of threads in its open folder, before there are checkpoints."""
    write_json_atomic(folder / THREADS_FILE, {"threads": threads})


@contextlib.contextmanager
def use_torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads within the block and restore it afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
