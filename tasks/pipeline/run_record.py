"""Lock and record of a pipeline's folder, stop exceptions, and the number of CPU threads.

One run at a time holds a pipeline's folder; run.json describes the newest one.
The number of threads is chosen once, recorded, and reused on resume: floating-point sums depend on how many threads
share them. An interrupted run resumes with the number that it started with, a stage with the number behind its
checkpoints, however many processors are free by then.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import Stopped
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.locks import FolderLock
from tasks.pipeline.run_options import RunOptions

logger = logging.getLogger(__name__)

RUN_RECORD = "run.json"
THREADS_FILE = "threads.json"  # in a stage's open folder, next to its checkpoints
STOP_TIMEOUT_SECONDS = (
    1.5  # for the tracking store: a preempted run has few seconds; the rest waits in the journal
)
# statuses from which a run with equal settings resumes
_RESUMABLE_STATUSES = ("running", "stopped", "waiting", "postponed")


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
        """Prepare the record without locking anything.

        Args:
            wait_s: how long to wait for the lock `home`/.lock.
            lock: held and released by the caller, and used instead of `home`/.lock.
        """
        self.home = home
        self._options = options
        self._lock = lock or FolderLock(home / ".lock", wait_s=wait_s)
        self._is_borrowed_lock = lock is not None
        self._folders: tuple[Path, ...] = ()
        self._values: dict[str, Any] = {}

    def acquire_lock(self) -> None:
        """Acquire the pipeline's lock. Raises: FolderBusy."""
        if not self._is_borrowed_lock:
            self._lock.__enter__()

    def release_lock(self) -> None:
        """Release the lock, unless the caller holds it."""
        if not self._is_borrowed_lock:
            self._lock.__exit__(None, None, None)

    def find_interrupted_run(self, digest: str) -> str:
        """Find the start time of the interrupted run to resume; "" = start a new one.

        Args:
            digest: of the settings; a run with another digest is not resumed.
        """
        if self._options.started:
            logger.info("resuming the run of %s", self._options.started)
            return self._options.started
        try:
            record = json.loads((self.home / RUN_RECORD).read_text())
        except (OSError, ValueError):
            return ""
        same = record.get("config_digest") == digest and record.get("only") == self._options.only
        if self._options.fresh or not same or record.get("status") not in _RESUMABLE_STATUSES:
            return ""
        logger.info("resuming the interrupted run of %s", record.get("started"))
        return str(record.get("started") or "")

    def begin_run(self, folder: Path, *, started: str, digest: str, threads: int | None) -> None:
        """Write the record of a starting run, also into its own folder, before anything else of it exists.

        Otherwise a run that is killed in its first seconds would not be found again. The pipeline's copy comes first:
        from it the same command finds the run's folder.
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
        """Record the ID of the run in the tracking store."""
        self._values["run_id"] = run_id
        self._write_record()

    def record_end(self, status: str) -> None:
        """Record the end: finished, waiting (for approval), postponed (for the tracking store), stopped or failed."""
        self._values["status"] = status
        # The pipeline's copy comes last: until then the same command resumes the run.
        self._write_record(reversed(self._folders))

    def _write_record(self, folders: Iterable[Path] | None = None) -> None:
        for folder in folders or self._folders:
            make_folder(folder)
            write_json_atomic(folder / RUN_RECORD, self._values)


def find_finished_run(home: Path, digest: str) -> str:
    """Find the start time of the pipeline's newest run, if it has finished under these settings; "" = it has not.

    Args:
        digest: of the settings.
    """
    try:
        record = json.loads((home / RUN_RECORD).read_text())
    except (OSError, ValueError):
        return ""
    same = record.get("config_digest") == digest and record.get("status") == "finished"
    return str(record.get("started") or "") if same else ""


def is_stop_error(error: BaseException | None) -> bool:
    """Return whether the run was stopped by somebody: Ctrl-C, or SIGTERM within a flow or outside.

    Prefect has an exception of its own for this.
    """
    kinds: tuple[type[BaseException], ...] = (Stopped, KeyboardInterrupt, SystemExit)
    prefect = sys.modules.get("prefect.exceptions")  # if it is not imported, it cannot have raised
    if prefect:
        kinds += (prefect.TerminationSignal,)
    return isinstance(error, kinds)


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
