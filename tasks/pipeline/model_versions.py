"""Models of a pipeline run: the one it starts from, and the registered versions of those that it trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import BackendError
from rl_core.storage.manifest import digest_folder
from tasks import stage_registry
from tasks.config import PipelineSettings, settings_digest
from tasks.pipeline.result import StageResult
from tasks.pipeline.stage_code import code_version
from tasks.tracking import PARENT, Registry, RunTracker, VersionOf, is_registered_reference

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
        deliver: Callable[[], int] = lambda: 0,
    ) -> None:
        """Note where everything is.

        Args:
            cache: folder for downloads. results: the run's finished stages, which may grow. tags: of versions.
            deliver: sends what earlier runs and stages recorded; returns how many records still wait.
        """
        self._settings = settings
        self._registry = registry
        self._cache = cache
        self._results = results
        self._tags = dict(tags)
        self._deliver = deliver
        self._base = f"preset {settings.model.preset}"  # for tags: the model that the pipeline starts from
        self._lasting: dict[str, str] = {}  # names of versions by the references that were resolved to them
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
            self._lasting[path] = version.reference
            return self._registry.download(version, self._cache), version.reference
        resolved = self._registry.resolve_model(path, self._cache)
        return resolved, str(resolved)

    def version_of(self, path: str) -> str:
        """Number of the version that this run resolved a registered reference to; "" = to none."""
        return self._lasting.get(path, "").rpartition("/")[2]

    def register(self, tracker: RunTracker, folder: Path, stage: str, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Register a stage's model as a new version; returns the fields that this adds to the stage's summary.

        While the tracking store is away, there is no `model_version` among them: the version is made when it answers.
        """
        is_reward_model = stage_registry.entry(stage).trains == "reward_model"
        kind: Literal["policy", "reward_model"] = "reward_model" if is_reward_model else "policy"
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
        if sampler := summary.get("sampler"):
            tags |= {f"rollouts.{key}": str(value) for key, value in sampler.items()}
        parent = self._start_of(stage)
        known = str(parent.summary.get("model_version") or "") if parent is not None else ""
        if known:
            tags["parent_version"] = known
        start = f" from version {known or PARENT}" if parent is not None else ""
        story = f"{stage.replace('_', ' ')}{start or f' from {self._base}'}: {summary.get('note') or 'trained'}"
        sources = self._tags.get("data.sources", "none")
        story += f"; files: {sources}" if sources != "none" else ""
        version = tracker.log_model(
            folder, kind, name, metrics=numbers, tags=tags, description=story,
            parent=self._by_content(parent) if parent is not None and not known else None,
        )  # fmt: skip
        return {"registered_model": name, **({"model_version": version} if version is not None else {})}

    def _by_content(self, result: StageResult) -> VersionOf:
        """The version of a finished stage's model, which the store has not numbered yet."""
        return VersionOf(self.name, digest_folder(result.model))

    def ensure_version(self, result: StageResult, tracker: RunTracker) -> int:
        """Registered version of a finished stage's model; registered now, by `tracker`, where the store lacks it.

        Raises: BackendError while the store is away.
        """
        self._deliver()  # it may wait in a journal
        wanted = digest_folder(result.model)
        for version in self._registry.versions(self.name):
            if version.tags.get("model_sha256") == wanted:
                return int(version.version)
        made = self.register(tracker, result.model, result.stage, result.summary).get("model_version")
        if made is None:
            raise BackendError(f"the model of stage '{result.stage}' has no version yet: the tracking store is away")
        return int(made)

    def parent_tags(self, stage: str) -> dict[str, str | VersionOf]:
        """Tag with the model that a training stage starts from: a version, a path, a hub name or a preset."""
        if stage_registry.entry(stage).trains in (None, "network"):
            return {}
        parent = self._start_of(stage)
        if parent is None:
            return {"parent_model_version": self._base}
        version = parent.summary.get("model_version")
        return {"parent_model_version": f"models:/{self.name}/{version}" if version else self._by_content(parent)}

    def _start_of(self, stage: str) -> StageResult | None:
        """The stage of this run whose model `stage` starts from; None = the pipeline's base model."""
        before = itertools.takewhile(lambda name: name != stage, stage_registry.names())
        earlier = [name for name in before if name in stage_registry.policy_stages() and name in self._results]
        return self._results[earlier[-1]] if earlier else None
