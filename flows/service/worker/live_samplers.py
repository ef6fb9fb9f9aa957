"""Samplers in the engine's memory: made again from their folder when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flows.service.commands import OpenSampler, SaveForSampler
from flows.service.store import SamplerRecord, StoredRequest
from flows.service.worker.service_folder import OWN
from flows.service.worker.worker_parts import WorkerParts
from rl_core.errors import CheckpointError, ServiceError
from rl_core.service.requests import CreateSampler
from rl_core.storage.faults import fault
from rl_core.storage.linked_folders import keep_folder

__all__ = ["LiveSamplers"]

HOUR = 3600.0


class LiveSamplers:
    """The samplers that are in memory, at most so many."""

    def __init__(self, parts: WorkerParts) -> None:
        self._engine, self._store, self._folder, self._weights = parts.engine, parts.store, parts.folder, parts.weights
        self._most = min(parts.settings.worker.samplers_in_memory, parts.settings.engine.max_samplers)
        self._live: dict[str, str | None] = {}  # -> run of an in-flight one; the one used longest ago first

    def need(self, sampler_id: str, others: set[str]) -> None:
        """Have a sampler in memory, if there is one; `others` stay. Raises: ServiceError."""
        is_there = sampler_id in self._live
        if is_there:
            self._live[sampler_id] = self._live.pop(sampler_id)
        others = {*others, sampler_id}
        while len(self._live) + (not is_there) > self._most and (
            free := [one for one in self._live if one not in others]
        ):
            self._drop(free[0])
        if is_there:
            return
        record = self._store.sampler(sampler_id)
        if record is None:
            return
        if record.kind == "inflight":
            run = self._store.run(str(record.model_id))
            published = None if run is None else run.published
            if published is None:
                raise ServiceError(f"sampler_id: the weights of '{sampler_id}' are gone", "user")
            self._make(record, {"model_id": record.model_id, "folder": published})
        elif record.folder is not None:
            self._make(record, {"folder": record.folder})
        else:
            self._make(record, {"base": record.base})

    def _make(self, record: SamplerRecord, source: Mapping[str, Any]) -> str:
        """A sampler in the engine; the name of its base model."""
        values = dict(source)
        if values.get("folder") is not None:
            values["folder"] = str(self._folder.absolute(values["folder"]))
        info = self._engine.create_sampler(CreateSampler(sampler_id=record.sampler_id, kind=record.kind, **values))
        self._live[record.sampler_id] = record.model_id if record.kind == "inflight" else None
        return info.name

    def _drop(self, sampler_id: str) -> None:
        self._live.pop(sampler_id, None)
        with contextlib.suppress(ServiceError):
            self._engine.unload_sampler(sampler_id)

    def drop_inflight(self, model_id: str) -> None:
        """Forget the in-flight samplers of a run that leaves memory: they would not see what it publishes later."""
        for sampler_id in [name for name, run in self._live.items() if run == model_id]:
            self._drop(sampler_id)

    def open(self, command: OpenSampler, request: StoredRequest) -> dict[str, Any]:
        """A sampler of a base model or a saved path; its row. Raises: ServiceError."""
        saved = None if command.path is None else self._weights.find(command.path, request.owner)
        record = self._record(
            command.sampler_id, request, base=command.base or "", path=command.path,
            folder=None if saved is None else saved.folder, model_id=None if saved is None else saved.model_id,
        )  # fmt: skip
        self._drop(command.sampler_id)
        source = {"base": command.base} if saved is None else {"folder": saved.folder}
        return asdict(record) | {"base": self._make(record, source)}

    def publish(self, command: SaveForSampler, request: StoredRequest) -> tuple[dict[str, Any], dict[str, Any]]:
        """A sampler of a run's present weights, which are in a folder when this returns.

        Returns: its row; new values of the run's row. Raises: ServiceError.
        """
        assert command.sampler_id is not None
        model_id = command.model_id
        if command.kind == "inflight":
            place = self._folder.published(model_id, request.seq)
        else:
            place = self._folder.sampler(model_id, command.sampler_id)
        self._weights.remove(place)  # of a worker that was killed
        self._engine.save_sampler_weights(model_id, place)
        fault("service.published")
        folder = self._folder.relative(place)
        self._drop(command.sampler_id)
        if command.kind == "inflight":
            record = self._record(command.sampler_id, request, model_id=model_id, kind="inflight")
            base = self._make(record, {"model_id": model_id, "folder": folder})
            return asdict(record) | {"base": base}, {"published": folder}
        record = self._record(command.sampler_id, request, model_id=model_id, folder=folder)
        return asdict(record) | {"base": self._make(record, {"folder": folder})}, {}

    def release(self, path: str) -> None:
        """Have no sampler read the folder of a saved path, which is about to be written again or is gone.

        Each keeps the weights of its day under a name of its own. One whose path was deleted ends.
        Raises: ServiceError (server) where the disk refuses.
        """
        place = self._folder.weights(path)
        is_known = self._store.checkpoint(path) is not None and place.is_dir()
        for record in self._store.samplers_in(self._folder.relative(place)):
            if not is_known:
                self._drop(record.sampler_id)
                self._store.delete_sampler(record.sampler_id)
                continue
            own = self._folder.sampler(str(record.model_id), record.sampler_id)
            self._weights.remove(own)  # of a worker that was killed
            try:
                keep_folder(place, own)
            except CheckpointError as error:
                raise ServiceError(str(error), "server") from error
            fault("service.kept")
            self._store.move_sampler(record.sampler_id, self._folder.relative(own))

    @staticmethod
    def _record(sampler_id: str, request: StoredRequest, **values: Any) -> SamplerRecord:
        return SamplerRecord(
            sampler_id=sampler_id, owner=request.owner, session_id=request.session_id, created=request.accepted,
            touched=request.accepted, **values,
        )  # fmt: skip

    def remove_unused(self, lifetime: float, now: float) -> list[str]:
        """Remove samplers without a path that nobody has used for long, with their weights; their names."""
        gone = []
        unused = self._store.unused_samplers(now - lifetime, now - min(lifetime, HOUR), OWN)
        for record in unused:
            with contextlib.suppress(ServiceError):
                if record.folder is not None:
                    self._weights.remove(self._folder.absolute(record.folder))
                self._drop(record.sampler_id)
                self._store.delete_sampler(record.sampler_id)
                gone.append(record.sampler_id)
        return gone
