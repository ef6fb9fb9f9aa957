"""Number of CPU threads of a run and of its stages: chosen once, recorded, and kept by whatever goes on later.

Sums depend on how many threads share them out, so a run that is interrupted goes on with the number that it began with,
and a stage with the one behind its checkpoints, whatever is free by then.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rl_core.storage.single_files import write_json_atomic

__all__ = ["THREADS", "choose_threads", "note_threads", "own_threads", "recorded_threads", "torch_threads"]

THREADS = "threads.json"  # in a stage's open folder, beside its checkpoints


def choose_threads(setting: int | Literal["auto"] | None, earlier: int | None) -> tuple[int | None, str]:
    """Number of threads of a run, and a sentence about it where it was found out ("" where it was not).

    Args:
        setting: None = torch's own number, here None as well (see `own_threads`); "auto" = as many as processors
            are free, which takes a second to see.
        earlier: that of the run which goes on; None = it begins.
    """
    if setting != "auto":
        return setting, ""
    own_threads()
    from rl_core.cpu.waiting import free_processors, usable_processors  # here, as it loads torch

    if earlier is not None:
        return earlier, f"threads: {earlier}, the number that this run began with"
    free = free_processors()
    return free, f"threads: {free}, as {free} of {usable_processors()} processors are free"


@functools.cache
def own_threads() -> int:
    """Threads that torch takes by itself: those that it had before the first run of this process."""
    import torch  # here: a run of which everything is cached does without the seconds that this takes

    return torch.get_num_threads()


def recorded_threads(path: Path) -> int | None:
    """The number in a run's or a stage's record; None where there is none."""
    try:
        found = json.loads(path.read_text()).get("threads")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def note_threads(folder: Path, threads: int) -> None:
    """Record the number of a stage in its open folder, before there are checkpoints."""
    write_json_atomic(folder / THREADS, {"threads": threads})


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """So many threads of torch within, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
