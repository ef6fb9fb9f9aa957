"""Models of a pipeline run: the one it starts from, and the registered versions of those that it trains."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl_core.storage.folders import digest_folder
from tasks import stage_registry
from tasks.config import PipelineSettings, settings_digest
from tasks.pipeline.key import code_version
from tasks.pipeline.result import StageResult
from tasks.tracking import Registry, RunTracker, is_registered_reference

__all__ = ["ModelVersions", "registered_name"]


def registered_name(settings: PipelineSettings) -> str:
    """Name of the pipeline's policy in the model registry."""
    return settings.tracking.registered_model or settings.name


class ModelVersions:
    """Resolution and registration of the models of one pipeline run."""

    def __init__(
        self,
        settings: PipelineSettings,
        registry: Registry,
        cache: Path,
        results: Mapping[str, StageResult],
        tags: Mapping[str, str],
    ) -> None:
        """`cache`: folder for downloads; `results`: the run's finished stages, which may grow; `tags`: of versions."""
        self._settings = settings
        self._registry = registry
        self._cache = cache
        self._results = results
        self._tags = dict(tags)
        self._base = f"preset {settings.model.preset}"  # for tags: the model that the pipeline starts from
        self.name = registered_name(settings)

    def resolve_base(self) -> Path | str | None:
        """The model to start from: a folder, a hub name, or None for a preset."""
        path = self._settings.model.path
        if path is None:
            return None
        resolved, self._base = self.resolve(path)
        return resolved

    def resolve(self, path: str) -> tuple[Path | str, str]:
        """A model's folder or hub name (registered versions are downloaded), and its lasting name (aliases move)."""
        if is_registered_reference(path):
            version = self._registry.find(path)
            return self._registry.download(version, self._cache), version.reference
        resolved = self._registry.resolve_model(path, self._cache)
        return resolved, str(resolved)

    def register(self, tracker: RunTracker, folder: Path, stage: str, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Register a stage's model as a new version; returns the fields that this adds to the stage's summary."""
        kind: Literal["policy", "reward_model"] = stage_registry.entry(stage).trains or "policy"
        name = f"{self.name}-reward-model" if kind == "reward_model" else self.name
        numbers = {key: value for key, value in (summary.get("metrics") or {}).items() if isinstance(value, float)}
        tags = {
            "stage": stage,
            "pipeline": self._settings.name,
            "model_sha256": digest_folder(folder),
            "config_digest": settings_digest(self._settings),
            "code_version": code_version(),
            "base_model": self._settings.model.path or f"preset {self._settings.model.preset}",
            **self._tags,
        }
        parent = self._start_of(stage)
        if parent is not None:
            tags["parent_version"] = str(parent.summary.get("model_version", ""))
        start = f" from version {tags['parent_version']}" if tags.get("parent_version") else ""
        story = f"{stage.replace('_', ' ')}{start}: {summary['note']}" if summary.get("note") else ""
        version = tracker.log_model(folder, kind, name, metrics=numbers, tags=tags, description=story)
        return {"registered_model": name, "model_version": version}

    def ensure_version(self, result: StageResult, tracker: RunTracker) -> int:
        """Registered version of a finished stage's model; registered now, by `tracker`, where the store lacks it."""
        wanted = digest_folder(result.model)
        for version in self._registry.versions(self.name):
            if version.tags.get("model_sha256") == wanted:
                return int(version.version)
        return int(self.register(tracker, result.model, result.stage, result.summary)["model_version"])

    def parent_tags(self, stage: str) -> dict[str, str]:
        """Tag with the model that a training stage starts from: a version, a path, a hub name or a preset."""
        if stage_registry.entry(stage).trains is None:
            return {}
        parent = self._start_of(stage)
        version = parent.summary.get("model_version") if parent is not None else None
        return {"parent_model_version": f"models:/{self.name}/{version}" if version else self._base}

    def _start_of(self, stage: str) -> StageResult | None:
        """The stage of this run whose model `stage` starts from; None = the pipeline's base model."""
        before = itertools.takewhile(lambda name: name != stage, stage_registry.names())
        earlier = [name for name in before if name in stage_registry.policy_stages() and name in self._results]
        return self._results[earlier[-1]] if earlier else None
