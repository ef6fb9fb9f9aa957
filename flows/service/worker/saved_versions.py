"""Saved paths as versions of a registered model, with their lineage; in the background, and gone on with after a kill.

Weights are exported as a Hugging Face folder between two rounds, for the engine belongs to one thread; another thread
gives the folder to the tracking store, which may be slow or away: no request waits for it. The same bytes of the same
run are one version, so an attempt that was killed is repeated.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path

from flows.service.store import CheckpointRecord
from flows.service.worker.run_trackers import RunTrackers
from flows.service.worker.worker_parts import WorkerParts
from rl_core.errors import BackendError, PosttrainError, ServiceError
from rl_core.storage.faults import fault

__all__ = ["SavedVersions", "registered_name"]

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0  # after the store was away


def registered_name(prefix: str, base: str) -> str:
    """Name of the registered model for a base model."""
    return re.sub(r"[^A-Za-z0-9_.\- ]+", "-", f"{prefix}-{base}")[:100]


class SavedVersions:
    """Registration of saved paths, one at a time, the oldest first."""

    def __init__(self, parts: WorkerParts, trackers: RunTrackers) -> None:
        self._engine, self._store, self._folder, self._weights = parts.engine, parts.store, parts.folder, parts.weights
        self._settings, self._trackers = parts.settings.worker, trackers
        self._thread: threading.Thread | None = None
        self._not_before = 0.0

    def step(self) -> None:
        """Begin with the next path, if one waits and none is being sent."""
        if self._settings.registered == "none" or time.monotonic() < self._not_before:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        record = self._store.checkpoint_to_register()
        if record is None:
            return
        staging = self._folder.staging("model")
        try:
            self._weights.remove(staging)
            self._engine.export(self._folder.absolute(record.folder), staging)
        except ServiceError as error:
            self._failed(record, error)
            return
        fault("service.exported")
        self._thread = threading.Thread(target=self._send, args=(record, staging), name="versions", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for what is being sent."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _send(self, record: CheckpointRecord, staging: Path) -> None:
        try:
            version = self._version(record, staging)
            fault("service.registered")
            self._store.change_checkpoint(record.path, version=version, registration="done")
            log.info("%s is %s", record.path, version)
        except (BackendError, OSError) as error:
            log.warning("%s is registered later: %s", record.path, error)
            self._not_before = time.monotonic() + AGAIN_SECONDS
        except PosttrainError as error:
            self._failed(record, error)
        except BaseException:  # of the registry's own packages
            self._not_before = time.monotonic() + AGAIN_SECONDS
            raise

    def _version(self, record: CheckpointRecord, staging: Path) -> str:
        """The version of an exported folder, NAME/NUMBER. Raises: BackendError while the store is away."""
        name = registered_name(self._settings.registered_name, record.base)
        tags = {
            "stage": "service", "service.path": record.path, "service.run": record.model_id, "base_model": record.base,
            "service.owner": record.owner, "service.optimizer": record.facts.get("optimizer"),
            "service.updates": str(record.steps), "service.data_digest": record.facts.get("data_digest") or "none",
            **{f"service.user.{key}": value for key, value in (record.facts.get("user_metadata") or {}).items()},
        }  # fmt: skip
        with self._trackers.using(record.model_id) as run:
            number = run.log_model(staging, "policy", name, tags=tags, step=record.steps, description=record.path)
        if number is None:
            raise BackendError(f"the store of the model registry at {self._trackers.address} does not answer")
        return f"{name}/{number}"

    def _failed(self, record: CheckpointRecord, error: Exception) -> None:
        log.error("%s gets no version: %s", record.path, error)
        self._store.change_checkpoint(record.path, registration="failed")
