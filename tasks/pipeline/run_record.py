"""Lock and record of a pipeline's folder: one run at a time, and the newest one's description in run.json.

Exceptions that stop a run rather than fail it.

Number of CPU threads of a run and of its stages: chosen once, recorded, and kept by whatever goes on later.

Sums depend on how many threads share them out, so a run that is interrupted goes on with the number that it began with,
and a stage with the one behind its checkpoints, whatever is free by then.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import Stopped
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.locks import FolderLock
from tasks.pipeline.run_options import RunOptions

logger = logging.getLogger(__name__)

RUN_RECORD = "run.json"
_RESUMABLE_STATUSES = (
    "running",
    "stopped",
    "waiting",
    "postponed",
)  # states that a run with equal settings goes on from


class PipelineRecord:
    """run.json of a pipeline and of its newest run, written while the pipeline's lock is held."""

    def __init__(
        self,
        home: Path,
        options: RunOptions,
        *,
        wait_s: float = 0.0,
        lock: FolderLock | None = None,
    ) -> None:
        """`lock`: held by the caller, who releases it; None = `home`/.lock, waited for at most `wait_s` seconds."""
        self.home = home
        self._options = options
        self._lock = lock or FolderLock(home / ".lock", wait_s=wait_s)
        self._is_borrowed_lock = lock is not None
        self._folders: tuple[Path, ...] = ()
        self._values: dict[str, Any] = {}

    def acquire_lock(self) -> None:
        """Take the pipeline's lock. Raises: FolderBusy."""
        if not self._is_borrowed_lock:
            self._lock.__enter__()

    def release_lock(self) -> None:
        """Release the lock, unless it is the caller's."""
        if not self._is_borrowed_lock:
            self._lock.__exit__(None, None, None)

    def find_interrupted_run(self, digest: str) -> str:
        """Start time of the interrupted run to go on with; "" = begin a new one.

        Args:
            digest: of the settings; another one is another run.
        """
        if self._options.started:
            logger.info("going on with the run of %s", self._options.started)
            return self._options.started
        try:
            record = json.loads((self.home / RUN_RECORD).read_text())
        except (OSError, ValueError):
            return ""
        same = record.get("config_digest") == digest and record.get("only") == self._options.only
        if self._options.fresh or not same or record.get("status") not in _RESUMABLE_STATUSES:
            return ""
        logger.info("going on with the interrupted run of %s", record.get("started"))
        return str(record.get("started") or "")

    def begin_run(self, folder: Path, *, started: str, digest: str, threads: int | None) -> None:
        """Write the record of a run that begins, into its own folder too: before anything else of it exists.

        Else one that is killed in its first seconds would not be found again. The pipeline's comes first: by it the
        same command finds the run's folder.
        """
        self._folders = (self.home, folder)
        self._values = {
            "started": started,
            "run_id": None,
            "config_digest": digest,
            "threads": threads,
            "only": self._options.only,
            "given": dict(self._options.evaluated_models),
            "status": "running",
            "pid": os.getpid(),
            "host": platform.node(),
        }
        self._write_record()

    def record_run_id(self, run_id: str | None) -> None:
        """Note the run of the tracking store."""
        self._values["run_id"] = run_id
        self._write_record()

    def record_end(self, status: str) -> None:
        """Note the end: finished, waiting (for approval), postponed (for the tracking store), stopped or failed."""
        self._values["status"] = status
        self._folders = self._folders[
            ::-1
        ]  # the pipeline's last: until then the run is gone on with
        self._write_record()
        self._folders = self._folders[::-1]

    def _write_record(self) -> None:
        for folder in self._folders:
            make_folder(folder)
            write_json_atomic(folder / RUN_RECORD, self._values)


def find_finished_run(home: Path, digest: str) -> str:
    """Start time of the pipeline's newest run, if it has finished under these settings; "" = it has not.

    Args:
        digest: of the settings.
    """
    try:
        record = json.loads((home / RUN_RECORD).read_text())
    except (OSError, ValueError):
        return ""
    same = record.get("config_digest") == digest and record.get("status") == "finished"
    return str(record.get("started") or "") if same else ""


STOP_TIMEOUT_SECONDS = 1.5  # for the tracking store, of the few that a preempted run has; the rest waits in the journal


def is_stop_error(error: BaseException | None) -> bool:
    """True = somebody stopped the run: Ctrl-C, SIGTERM in or outside a flow (Prefect has an exception of its own)."""
    prefect = sys.modules.get("prefect.exceptions")  # it can only have raised where it was imported
    kinds = (
        Stopped,
        KeyboardInterrupt,
        SystemExit,
        *([prefect.TerminationSignal] if prefect else []),
    )
    return isinstance(error, kinds)


THREADS_FILE = "threads.json"  # in a stage's open folder, beside its checkpoints


def choose_num_threads(
    setting: int | Literal["auto"] | None, earlier: int | None
) -> tuple[int | None, str]:
    """Number of threads of a run, and a sentence about it where it was found out ("" where it was not).

    Args:
        setting: None = torch's own number, here None as well (see `read_default_threads`); "auto" = as many as processors
            are free, which takes a second to see.
        earlier: that of the run which goes on; None = it begins.
    """
    if setting != "auto":
        return setting, ""
    read_default_threads()
    from rl_core.cpu.openmp_spin import (  # here, as it loads torch
        count_usable_processors,
        free_processors,
    )

    if earlier is not None:
        return earlier, f"threads: {earlier}, the number that this run began with"
    free = free_processors()
    return free, f"threads: {free}, as {free} of {count_usable_processors()} processors are free"


@functools.cache
def read_default_threads() -> int:
    """Threads that torch takes by itself: those that it had before the first run of this process."""
    import torch  # here: a run of which everything is cached does without the seconds that this takes

    return torch.get_num_threads()


def read_recorded_threads(path: Path) -> int | None:
    """The number in a run's or a stage's record; None where there is none."""
    try:
        found = json.loads(path.read_text()).get("threads")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def record_num_threads(folder: Path, threads: int) -> None:
    """Record the number of a stage in its open folder, before there are checkpoints."""
    write_json_atomic(folder / THREADS_FILE, {"threads": threads})


@contextlib.contextmanager
def use_torch_threads(threads: int) -> Iterator[None]:
    """So many threads of torch within, and as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
