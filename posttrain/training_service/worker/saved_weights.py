"""Saved weights in the service's folder: saving, loading, exporting, removing.

A folder without its row in the store is what a killed worker left, or is about to be removed; saving there begins anew.

Parts that all of a worker's rooms work with.
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
    """Adapter and optimizer of a run, and the digest of its data, as JSON."""
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
        """Saved weights that a key may read. Raises: ServiceError (user)."""
        found = self._store.find_checkpoint(path)
        if found is None or (found.owner != owner and not found.public):
            raise ServiceError(
                f"path: there are no saved weights {path}, or they have expired", "user"
            )
        return found

    def resolve_folder(self, path: str, owner: str) -> Path:
        """Folder of saved weights. Raises: ServiceError (user)."""
        return self._folder.to_absolute_path(self.find_checkpoint(path, owner).folder)

    def load_weights(self, command: LoadWeights, owner: str) -> WeightsLoaded:
        """Weights into a run, which is made where it is not there. Raises: ServiceError."""
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
        """Weights of a run under a path; they are durable, and the row is what makes them known.

        Args:
            latest: takes a snapshot of the run and gives its folder, for an export.
        Raises: ServiceError.
        """
        assert command.path is not None
        place, model_id = parse_tinker_path(command.path), command.model_id
        folder = self._folder.resolve_weights_folder(command.path)
        is_known = self._store.find_checkpoint(command.path) is not None
        replaces = isinstance(command, SaveForSampler) or command.overwrite
        if is_known and not replaces:
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
        wanted = self._settings.registered in ("all", place.kind)
        return CheckpointRecord(
            path=command.path,
            model_id=model_id,
            owner=owner,
            kind=place.kind,
            name=place.name,
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
            registration="waiting" if wanted and place.kind != "external_weights" else "none",
        )

    def delete_folder(self, folder: Path) -> None:
        """Remove a folder; one that is not there is no fault. Raises: ServiceError (server)."""
        try:
            if folder.is_dir():
                remove_folder(folder)
        except CheckpointError as error:
            raise ServiceError(str(error), "server") from error

    def delete_sibling_folders(self, folder: Path) -> None:
        """Remove all folders beside this one. Raises: ServiceError (server)."""
        for other in sorted(folder.parent.iterdir()):
            if other != folder and not other.name.startswith("."):
                self.delete_folder(other)

    def delete_expired_weights(self) -> list[str]:
        """Remove what has expired; the paths."""
        gone = []
        for record in self._store.list_expired_checkpoints():
            with contextlib.suppress(ServiceError):  # the next round tries again
                self.delete_folder(self._folder.to_absolute_path(record.folder))
                self._store.drop_checkpoint(record.path)
                gone.append(record.path)
        return gone


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Engine, store, folder and saved weights of one worker, and its settings."""

    engine: TrainingEngine
    store: ServiceStore
    folder: ServiceFolder
    weights: WeightsStorage
    settings: ServiceSettings
