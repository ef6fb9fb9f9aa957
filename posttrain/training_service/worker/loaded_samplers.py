"""Samplers in the engine's memory, recreated from their folder on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from posttrain.training_service.commands import OpenSampler, SaveForSampler
from posttrain.training_service.paths import SAMPLER_FOLDER_PART
from posttrain.training_service.store import SamplerRecord, StoredRequest
from posttrain.training_service.worker.saved_weights import WorkerContext
from rl_core.errors import CheckpointError, ServiceError
from rl_core.service.requests import CreateSampler
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import link_folder_synced

SECONDS_PER_HOUR = 3600.0


class LoadedSamplers:
    """Samplers in memory, up to a limit."""

    def __init__(self, context: WorkerContext) -> None:
        self._engine = context.engine
        self._store = context.store
        self._folder = context.folder
        self._weights = context.weights
        self._max_samplers = min(
            context.settings.worker.samplers_in_memory, context.settings.engine.max_samplers
        )
        # sampler -> run of an in-flight sampler; least recently used first
        self._loaded: dict[str, str | None] = {}

    def ensure_loaded(self, sampler_id: str, pinned: set[str]) -> None:
        """Load a sampler into memory if it exists. Samplers in `pinned` are not evicted. Raises: ServiceError."""
        is_loaded = sampler_id in self._loaded
        if is_loaded:
            self._loaded[sampler_id] = self._loaded.pop(sampler_id)  # now the most recently used
        self._evict_samplers({*pinned, sampler_id}, room=0 if is_loaded else 1)
        if is_loaded:
            return
        record = self._store.find_sampler(sampler_id)
        if record is None:
            return
        if record.kind == "inflight":
            run = self._store.find_run(str(record.model_id))
            published = None if run is None else run.published
            if published is None:
                raise ServiceError(
                    f"sampler_id: the weights of '{sampler_id}' no longer exist", "user"
                )
            self._create_sampler(record, {"model_id": record.model_id, "folder": published})
        elif record.folder is not None:
            self._create_sampler(record, {"folder": record.folder})
        else:
            self._create_sampler(record, {"base": record.base})

    def _evict_samplers(self, pinned: set[str], room: int) -> None:
        """Drop the least recently used samplers until there is room for `room` more."""
        while len(self._loaded) + room > self._max_samplers:
            evictable = [sampler_id for sampler_id in self._loaded if sampler_id not in pinned]
            if not evictable:
                return
            self._drop_sampler(evictable[0])

    def _create_sampler(self, record: SamplerRecord, source: Mapping[str, Any]) -> str:
        """Create a sampler in the engine; return the name of its base model."""
        values = dict(source)
        if values.get("folder") is not None:
            values["folder"] = str(self._folder.to_absolute_path(values["folder"]))
        info = self._engine.create_sampler(
            CreateSampler(sampler_id=record.sampler_id, kind=record.kind, **values)
        )
        self._loaded[record.sampler_id] = record.model_id if record.kind == "inflight" else None
        return info.name

    def _drop_sampler(self, sampler_id: str) -> None:
        self._loaded.pop(sampler_id, None)
        with contextlib.suppress(ServiceError):
            self._engine.unload_sampler(sampler_id)

    def drop_inflight_samplers(self, model_id: str) -> None:
        """Drop the in-flight samplers of a run that leaves memory: they would not see its later weights."""
        inflight = [sampler_id for sampler_id, run in self._loaded.items() if run == model_id]
        for sampler_id in inflight:
            self._drop_sampler(sampler_id)

    def open_sampler(self, command: OpenSampler, request: StoredRequest) -> dict[str, Any]:
        """Create a sampler of a base model or a saved path; return its row. Raises: ServiceError."""
        checkpoint = None
        if command.path is not None:
            checkpoint = self._weights.find_checkpoint(command.path, request.owner)
        record = self._build_record(
            command.sampler_id,
            request,
            base=command.base or "",
            path=command.path,
            folder=None if checkpoint is None else checkpoint.folder,
            model_id=None if checkpoint is None else checkpoint.model_id,
        )
        self._drop_sampler(command.sampler_id)
        source = {"base": command.base} if checkpoint is None else {"folder": checkpoint.folder}
        return asdict(record) | {"base": self._create_sampler(record, source)}

    def publish_sampler(
        self, command: SaveForSampler, request: StoredRequest
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Create a sampler of a run's current weights, which are saved to a folder before this returns.

        Returns: row of the sampler; changes of the run's row. Raises: ServiceError.
        """
        assert command.sampler_id is not None
        model_id = command.model_id
        if command.kind == "inflight":
            path = self._folder.resolve_published_folder(model_id, request.seq)
        else:
            path = self._folder.resolve_sampler_folder(model_id, command.sampler_id)
        self._weights.delete_folder(path)  # left behind by a worker that crashed
        self._engine.save_sampler_weights(model_id, path)
        inject_fault("service.published")
        folder = self._folder.to_relative_path(path)
        self._drop_sampler(command.sampler_id)
        if command.kind == "inflight":
            record = self._build_record(
                command.sampler_id, request, model_id=model_id, kind="inflight"
            )
            base = self._create_sampler(record, {"model_id": model_id, "folder": folder})
            return asdict(record) | {"base": base}, {"published": folder}
        record = self._build_record(command.sampler_id, request, model_id=model_id, folder=folder)
        return asdict(record) | {"base": self._create_sampler(record, {"folder": folder})}, {}

    def detach_samplers(self, path: str) -> None:
        """Detach all samplers from the folder of a saved path that is about to be rewritten, or has been deleted.

        A sampler of a rewritten path keeps its current weights in a private folder. A sampler of a deleted path ends.
        Raises: ServiceError (server) if the disk refuses.
        """
        saved_folder = self._folder.resolve_weights_folder(path)
        has_weights = self._store.find_checkpoint(path) is not None and saved_folder.is_dir()
        for record in self._store.list_folder_samplers(self._folder.to_relative_path(saved_folder)):
            if not has_weights:
                self._drop_sampler(record.sampler_id)
                self._store.delete_sampler(record.sampler_id)
                continue
            private_folder = self._folder.resolve_sampler_folder(
                str(record.model_id), record.sampler_id
            )
            self._weights.delete_folder(private_folder)  # left behind by a worker that crashed
            try:
                link_folder_synced(saved_folder, private_folder)
            except CheckpointError as error:
                raise ServiceError(str(error), "server") from error
            inject_fault("service.kept")
            self._store.move_sampler(
                record.sampler_id, self._folder.to_relative_path(private_folder)
            )

    @staticmethod
    def _build_record(sampler_id: str, request: StoredRequest, **values: Any) -> SamplerRecord:
        return SamplerRecord(
            sampler_id=sampler_id,
            owner=request.owner,
            session_id=request.session_id,
            created=request.accepted,
            touched=request.accepted,
            **values,
        )

    def remove_unused_samplers(self, lifetime: float, now: float) -> list[str]:
        """Remove samplers that were unused for long and have no path, with their weights; return their names."""
        removed = []
        unused = self._store.list_unused_samplers(
            now - lifetime, now - min(lifetime, SECONDS_PER_HOUR), SAMPLER_FOLDER_PART
        )
        for record in unused:
            with contextlib.suppress(ServiceError):
                if record.folder is not None:
                    self._weights.delete_folder(self._folder.to_absolute_path(record.folder))
                self._drop_sampler(record.sampler_id)
                self._store.delete_sampler(record.sampler_id)
                removed.append(record.sampler_id)
        return removed
