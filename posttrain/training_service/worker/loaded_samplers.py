"""Samplers in the engine's memory: made again from their folder when they are asked for."""

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

HOUR = 3600.0


class LoadedSamplers:
    """The samplers that are in memory, at most so many."""

    def __init__(self, context: WorkerContext) -> None:
        self._engine, self._store, self._folder, self._weights = (
            context.engine,
            context.store,
            context.folder,
            context.weights,
        )
        self._max_samplers = min(
            context.settings.worker.samplers_in_memory, context.settings.engine.max_samplers
        )
        self._loaded: dict[
            str, str | None
        ] = {}  # -> run of an in-flight one; the one used longest ago first

    def ensure_loaded(self, sampler_id: str, pinned: set[str]) -> None:
        """Have a sampler in memory, if there is one; `others` stay. Raises: ServiceError."""
        is_there = sampler_id in self._loaded
        if is_there:
            self._loaded[sampler_id] = self._loaded.pop(sampler_id)
        pinned = {*pinned, sampler_id}
        while len(self._loaded) + (not is_there) > self._max_samplers and (
            free := [one for one in self._loaded if one not in pinned]
        ):
            self._drop_sampler(free[0])
        if is_there:
            return
        record = self._store.find_sampler(sampler_id)
        if record is None:
            return
        if record.kind == "inflight":
            run = self._store.find_run(str(record.model_id))
            published = None if run is None else run.published
            if published is None:
                raise ServiceError(f"sampler_id: the weights of '{sampler_id}' are gone", "user")
            self._create_sampler(record, {"model_id": record.model_id, "folder": published})
        elif record.folder is not None:
            self._create_sampler(record, {"folder": record.folder})
        else:
            self._create_sampler(record, {"base": record.base})

    def _create_sampler(self, record: SamplerRecord, source: Mapping[str, Any]) -> str:
        """A sampler in the engine; the name of its base model."""
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
        """Forget the in-flight samplers of a run that leaves memory: they would not see what it publishes later."""
        for sampler_id in [name for name, run in self._loaded.items() if run == model_id]:
            self._drop_sampler(sampler_id)

    def open_sampler(self, command: OpenSampler, request: StoredRequest) -> dict[str, Any]:
        """A sampler of a base model or a saved path; its row. Raises: ServiceError."""
        saved = (
            None
            if command.path is None
            else self._weights.find_checkpoint(command.path, request.owner)
        )
        record = self._build_record(
            command.sampler_id,
            request,
            base=command.base or "",
            path=command.path,
            folder=None if saved is None else saved.folder,
            model_id=None if saved is None else saved.model_id,
        )
        self._drop_sampler(command.sampler_id)
        source = {"base": command.base} if saved is None else {"folder": saved.folder}
        return asdict(record) | {"base": self._create_sampler(record, source)}

    def publish_sampler(
        self, command: SaveForSampler, request: StoredRequest
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A sampler of a run's present weights, which are in a folder when this returns.

        Returns: its row; new values of the run's row. Raises: ServiceError.
        """
        assert command.sampler_id is not None
        model_id = command.model_id
        if command.kind == "inflight":
            place = self._folder.resolve_published_folder(model_id, request.seq)
        else:
            place = self._folder.resolve_sampler_folder(model_id, command.sampler_id)
        self._weights.delete_folder(place)  # of a worker that was killed
        self._engine.save_sampler_weights(model_id, place)
        inject_fault("service.published")
        folder = self._folder.to_relative_path(place)
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
        """Have no sampler read the folder of a saved path, which is about to be written again or is gone.

        Each keeps the weights of its day under a name of its own. One whose path was deleted ends.
        Raises: ServiceError (server) where the disk refuses.
        """
        place = self._folder.resolve_weights_folder(path)
        is_known = self._store.find_checkpoint(path) is not None and place.is_dir()
        for record in self._store.list_folder_samplers(self._folder.to_relative_path(place)):
            if not is_known:
                self._drop_sampler(record.sampler_id)
                self._store.delete_sampler(record.sampler_id)
                continue
            own = self._folder.resolve_sampler_folder(str(record.model_id), record.sampler_id)
            self._weights.delete_folder(own)  # of a worker that was killed
            try:
                link_folder_synced(place, own)
            except CheckpointError as error:
                raise ServiceError(str(error), "server") from error
            inject_fault("service.kept")
            self._store.move_sampler(record.sampler_id, self._folder.to_relative_path(own))

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
        """Remove samplers without a path that nobody has used for long, with their weights; their names."""
        gone = []
        unused = self._store.list_unused_samplers(
            now - lifetime, now - min(lifetime, HOUR), SAMPLER_FOLDER_PART
        )
        for record in unused:
            with contextlib.suppress(ServiceError):
                if record.folder is not None:
                    self._weights.delete_folder(self._folder.to_absolute_path(record.folder))
                self._drop_sampler(record.sampler_id)
                self._store.delete_sampler(record.sampler_id)
                gone.append(record.sampler_id)
        return gone
