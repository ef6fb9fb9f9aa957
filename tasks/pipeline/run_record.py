"""Lock and record of a pipeline's folder: one run at a time holds it, and run.json describes the newest one."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.locks import FolderLock
from tasks.pipeline.run_options import RunOptions

logger = logging.getLogger(__name__)

RUN_RECORD = "run.json"
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

    def record_start(self, folder: Path, *, started: str, digest: str, threads: int | None) -> None:
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
