"""Lock and record of a pipeline's folder: one run at a time, and the newest one's description in run.json."""

from __future__ import annotations

import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

from rl_core.storage.locks import FolderLock
from rl_core.storage.single_files import make_folder, write_json_atomic
from tasks.pipeline.run_options import RunOptions

__all__ = ["RUN_RECORD", "PipelineRecord", "finished_run"]

logger = logging.getLogger(__name__)

RUN_RECORD = "run.json"
_INTERRUPTED = ("running", "stopped", "waiting", "postponed")  # states that a run with equal settings goes on from


class PipelineRecord:
    """run.json of a pipeline and of its newest run, written while the pipeline's lock is held."""

    def __init__(self, home: Path, options: RunOptions, *, wait_s: float = 0.0, lock: FolderLock | None = None) -> None:
        """`lock`: held by the caller, who releases it; None = `home`/.lock, waited for at most `wait_s` seconds."""
        self.home = home
        self._options = options
        self._lock = lock or FolderLock(home / ".lock", wait_s=wait_s)
        self._is_callers = lock is not None
        self._folders: tuple[Path, ...] = ()
        self._values: dict[str, Any] = {}

    def acquire(self) -> None:
        """Take the pipeline's lock. Raises: FolderBusy."""
        if not self._is_callers:
            self._lock.__enter__()

    def release(self) -> None:
        """Release the lock, unless it is the caller's."""
        if not self._is_callers:
            self._lock.__exit__(None, None, None)

    def interrupted(self, digest: str) -> str:
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
        if self._options.fresh or not same or record.get("status") not in _INTERRUPTED:
            return ""
        logger.info("going on with the interrupted run of %s", record.get("started"))
        return str(record.get("started") or "")

    def begin(self, folder: Path, *, started: str, digest: str, threads: int | None) -> None:
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
            "given": dict(self._options.given),
            "status": "running",
            "pid": os.getpid(),
            "host": platform.node(),
        }
        self._write()

    def note_run(self, run_id: str | None) -> None:
        """Note the run of the tracking store."""
        self._values["run_id"] = run_id
        self._write()

    def end(self, status: str) -> None:
        """Note the end: finished, waiting (for approval), postponed (for the tracking store), stopped or failed."""
        self._values["status"] = status
        self._folders = self._folders[::-1]  # the pipeline's last: until then the run is gone on with
        self._write()
        self._folders = self._folders[::-1]

    def _write(self) -> None:
        for folder in self._folders:
            make_folder(folder)
            write_json_atomic(folder / RUN_RECORD, self._values)


def finished_run(home: Path, digest: str) -> str:
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
