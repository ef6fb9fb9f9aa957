"""Saved weights in the service's folder: saving, loading, exporting, deleting; and the context shared by the worker.

A folder without a row in the store was left behind by a worker that crashed, or is about to be deleted. Saving to it
starts from scratch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.training_service.commands import (
    LoadWeights,
    SaveForSampler,
    SaveWeights,
    WeightsLoaded,
)
from posttrain.training_service.paths import ServiceFolder, measure_folder_bytes, parse_tinker_path
from posttrain.training_service.store import CheckpointRecord, ServiceStore
from rl_core.errors import CheckpointError, ServiceError
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceSettings, ServiceWorkerSettings
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import remove_folder


def describe_model(engine: TrainingEngine, model_id: str) -> dict[str, Any]:
    """Describe adapter, optimizer and data digest of a run as JSON."""
    info = engine.model_info(model_id)
    adapter = None if info.adapter is None else dataclasses.asdict(info.adapter)
    return {
        "adapter": adapter,
        "optimizer": info.optimizer,
        "num_trained": info.num_trained,
        "data_digest": info.data_digest,
    }


class WeightsStorage:
    """Saved paths and their folders."""

    def __init__(
        self,
        engine: TrainingEngine,
        store: ServiceStore,
        folder: ServiceFolder,
        settings: ServiceWorkerSettings,
    ) -> None:
        self._engine, self._store, self._folder = engine, store, folder
        self._settings = settings

    def find_checkpoint(self, path: str, owner: str) -> CheckpointRecord:
        """Return saved weights that a key may read. Raises: ServiceError (user)."""
        checkpoint = self._store.find_checkpoint(path)
        if checkpoint is None or (checkpoint.owner != owner and not checkpoint.public):
            raise ServiceError(
                f"path: there are no saved weights {path}, or they have expired", "user"
            )
        return checkpoint

    def resolve_folder(self, path: str, owner: str) -> Path:
        """Return the folder of saved weights. Raises: ServiceError (user)."""
        return self._folder.to_absolute_path(self.find_checkpoint(path, owner).folder)

    def load_weights(self, command: LoadWeights, owner: str) -> WeightsLoaded:
        """Load weights into a run, which is created if it does not exist. Raises: ServiceError."""
        folder = self.resolve_folder(command.path, owner)
        self._engine.load_weights(
            command.model_id, folder, optimizer=command.optimizer, kind=command.kind
        )
        return WeightsLoaded(model_id=command.model_id, path=command.path)

    def save_weights(
        self,
        command: SaveWeights | SaveForSampler,
        owner: str,
        facts: Mapping[str, Any],
        save_snapshot: Callable[[], Path],
    ) -> CheckpointRecord:
        """Save weights of a run under a path. They are durable, and become visible with the returned row.

        Args:
            save_snapshot: saves a snapshot of the run and returns its folder, for an export.
        Raises: ServiceError.
        """
        assert command.path is not None
        path, model_id = parse_tinker_path(command.path), command.model_id
        folder = self._folder.resolve_weights_folder(command.path)
        is_known = self._store.find_checkpoint(command.path) is not None
        may_replace = isinstance(command, SaveForSampler) or command.overwrite
        if is_known and not may_replace:
            raise ServiceError(
                f"path: {command.path} exists already; choose another name, or overwrite it", "user"
            )
        if not is_known:
            self.delete_folder(folder)
        if isinstance(command, SaveForSampler):
            self._engine.save_sampler_weights(model_id, folder)
        elif command.external:
            peft = self._engine.model_info(model_id).adapter is not None
            self._engine.export(save_snapshot(), folder, peft=peft)
        else:
            self._engine.save_weights(model_id, folder, {"path": command.path})
        inject_fault("service.saved")
        info, now = self._engine.model_info(model_id), self._store.read_clock()
        is_registered = self._settings.registered in ("all", path.kind)
        return CheckpointRecord(
            path=command.path,
            model_id=model_id,
            owner=owner,
            kind=path.kind,
            name=path.name,
            folder=self._folder.to_relative_path(folder),
            created=now,
            steps=info.steps,
            bytes=measure_folder_bytes(folder),
            expires=None if command.ttl_seconds is None else now + command.ttl_seconds,
            base=info.base,
            facts={
                **describe_model(self._engine, model_id),
                "user_metadata": facts.get("user_metadata") or {},
            },
            registration="waiting" if is_registered and path.kind != "external_weights" else "none",
        )

    def delete_folder(self, folder: Path) -> None:
        """Delete a folder if it exists. Raises: ServiceError (server)."""
        try:
            if folder.is_dir():
                remove_folder(folder)
        except CheckpointError as error:
            raise ServiceError(str(error), "server") from error

    def delete_sibling_folders(self, folder: Path) -> None:
        """Delete all other folders of the same parent. Raises: ServiceError (server)."""
        for sibling in sorted(folder.parent.iterdir()):
            if sibling != folder and not sibling.name.startswith("."):
                self.delete_folder(sibling)

    def delete_expired_weights(self) -> list[str]:
        """Delete expired weights; return their paths."""
        deleted = []
        for record in self._store.list_expired_checkpoints():
            with contextlib.suppress(ServiceError):  # the next round tries again
                self.delete_folder(self._folder.to_absolute_path(record.folder))
                self._store.drop_checkpoint(record.path)
                deleted.append(record.path)
        return deleted


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Engine, store, folder, saved weights and settings, shared by all parts of a worker."""

    engine: TrainingEngine
    store: ServiceStore
    folder: ServiceFolder
    weights: WeightsStorage
    settings: ServiceSettings
