"""The model registry: references, downloads, and the aliases champion and challenger."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import CheckpointError, CorruptError, DataError, SettingsError
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, remove_folder
from rl_core.storage.folders import publish_folder
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import verify_folder
from rl_core.storage.single_files import make_folder
from tasks.tracking.models import MODEL_NAME
from tasks.tracking.registered_names import unknown_alias, unknown_model, unknown_version
from tasks.tracking.store import Store, missing

if TYPE_CHECKING:
    from mlflow.entities import model_registry

__all__ = ["Registry", "ModelVersion", "is_registered_reference", "moved_at", "with_decision"]

log = logging.getLogger(__name__)

REFERENCE = re.compile(rf"models:/(?P<name>{MODEL_NAME.pattern}?)(?:@(?P<alias>[\w\-]+)|/(?P<version>\d+|latest))")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


MOVED = "alias.moved."  # tag of a version, with the alias: when that was put on it, in ms


def is_registered_reference(reference: str) -> bool:
    """True = `reference` names a registered model."""
    return reference.startswith("models:")


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model."""

    name: str
    version: int
    run_id: str | None
    model_id: str | None
    aliases: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    url: str = ""

    @property
    def reference(self) -> str:
        """Name of this version in a configuration."""
        return f"models:/{self.name}/{self.version}"


class Registry:
    """The registered models of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- references ---------------------------------------------------------------------------------------------

    def resolve_model(self, reference: str, cache_folder: Path) -> Path | str:
        """The local folder (or hub name) behind a folder, a hub name, models:/NAME@ALIAS or models:/NAME/VERSION.

        A registered version is copied into `cache_folder` once, unless its files are on this machine already.
        Raises: SettingsError naming what is unknown; BackendError when the store does not answer.
        """
        if is_registered_reference(reference):
            return self.download(self.find(reference), cache_folder)
        path = Path(reference).expanduser()
        if path.exists():
            if not (path / "config.json").is_file():
                raise SettingsError(f"model path '{reference}' is no Hugging Face model folder: config.json is missing")
            return path.resolve()
        if reference.startswith((".", "/", "~", "\\")) or reference.count("/") > 1 or not HUB_NAME.fullmatch(reference):
            raise SettingsError(f"model path '{reference}' does not exist")
        return reference

    def find(self, reference: str) -> ModelVersion:
        """The version behind models:/NAME@ALIAS, models:/NAME/3 or models:/NAME/latest. Raises: SettingsError."""
        match = REFERENCE.fullmatch(reference)
        if match is None:
            raise SettingsError(
                f"model reference '{reference}' must be models:/NAME@ALIAS (models:/policy@champion), models:/NAME/3 "
                "or models:/NAME/latest"
            )
        name = match["name"]
        if match["alias"]:
            found = self.by_alias(name, match["alias"])
            if found is None:
                self._require(name)
                aliases = sorted({alias for info in self.versions(name) for alias in info.aliases})
                raise unknown_alias(name, match["alias"], aliases)
            return found
        if match["version"] == "latest":
            versions = self.versions(name)
            if not versions:
                self._require(name)
                raise SettingsError(f"registered model '{name}' has no version yet")
            return versions[-1]
        return self.version(name, int(match["version"]))

    def download(self, info: ModelVersion, cache_folder: Path) -> Path:
        """The Hugging Face folder of a version, on this machine."""
        target = cache_folder / f"{info.name.replace(' ', '_')}-v{info.version}-{(info.model_id or 'model')[-8:]}"
        if not _is_whole(target):
            with self._store.answers(f"hand out {info.reference}"):
                location = self._store.client.get_model_version_download_uri(info.name, str(info.version))
                if location.startswith("models:/"):
                    model_id = location.removeprefix("models:/")
                    location = self._store.client.get_logged_model(model_id).artifact_location
                local = _local_folder(location)
                if local is not None:
                    return _model_folder(local, info)
                make_folder(cache_folder)
                clear_leftovers(cache_folder)
                try:
                    publish_folder(target, lambda folder: self._fetch(location, folder), {"kind": "download"})
                except CheckpointError:
                    if not _is_whole(target):  # else another process was faster
                        raise
        return _model_folder(target, info)

    def _fetch(self, location: str, folder: Path) -> None:
        """Download artifacts into a folder."""
        import mlflow.artifacts

        made = mlflow.artifacts.download_artifacts(
            artifact_uri=location, dst_path=str(folder), tracking_uri=self._store.uri
        )
        if Path(made).resolve() != folder.resolve():  # a folder in it, by the artifact's name
            for path in Path(made).iterdir():
                path.rename(folder / path.name)
            Path(made).rmdir()

    # -- versions and aliases -----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """All registered models."""
        with self._store.answers("list registered models"):
            return sorted(model.name for model in self._store.client.search_registered_models(max_results=1000))

    def versions(self, name: str) -> list[ModelVersion]:
        """All versions, the oldest first; [] for an unknown name."""
        _check_name(name)
        with self._store.answers("list model versions"):
            found = self._store.client.search_model_versions(f"name = '{name}'", max_results=1000)
            # The search leaves the aliases out; the model itself knows them.
            aliases: dict[int, list[str]] = {}
            if found:
                for alias, version in self._store.client.get_registered_model(name).aliases.items():
                    aliases.setdefault(int(version), []).append(alias)
        infos = [self._info(version, aliases.get(int(version.version), [])) for version in found]
        return sorted(infos, key=lambda info: info.version)

    def version(self, name: str, version: int) -> ModelVersion:
        """One version. Raises: SettingsError naming the nearest known model, or the versions there are."""
        _check_name(name)
        try:
            with self._store.answers("look up a model version"):
                return self._info(self._store.client.get_model_version(name, str(version)))
        except DataError as error:
            if not missing(error.__cause__ or error):  # type: ignore[arg-type]
                raise
        self._require(name)
        raise unknown_version(name, version, [str(info.version) for info in self.versions(name)])

    def by_alias(self, name: str, alias: str) -> ModelVersion | None:
        """The version that carries `alias`; None where none does or the model is unknown."""
        _check_name(name)
        try:
            with self._store.answers("look up an alias"):
                return self._info(self._store.client.get_model_version_by_alias(name, alias))
        except DataError:
            return None  # MLflow calls an unknown alias an invalid parameter

    def champion(self, name: str) -> ModelVersion | None:
        """The version that passed the promotion gate last; None where there is none."""
        return self.by_alias(name, "champion")

    def set_champion(self, name: str, version: int) -> None:
        """Move `champion` to a version; a version that was challenger is so no more. Raises: SettingsError."""
        self.set_alias(name, "champion", version)
        self.clear_challenger(name, version)

    def clear_challenger(self, name: str, version: int) -> None:
        """Take the alias `challenger` from a version, if it has it: one that is champion."""
        challenger = self.by_alias(name, "challenger")
        if challenger is not None and challenger.version == version:
            with self._store.answers("remove an alias"):
                self._store.client.delete_registered_model_alias(name, "challenger")
            fault("alias.cleared")

    def replace_champion(self, name: str, version: int, before: int | None) -> bool:
        """Move `champion` to `version` if it still stands on `before` (None = nowhere); whether it is there now.

        One that stands on `version` already was moved by a process that was killed before it could say so.

        Processes that share the output folder never interleave here. MLflow itself has no such step: two machines that
        promote within the same milliseconds on one server could.
        Raises: SettingsError for an unknown version; FolderBusy where another process holds on for half a minute.
        """
        lock = self._store.output / "mlflow" / f"champion-{name.replace(' ', '_')}.lock"
        with FolderLock(lock, wait_s=30.0):
            present = self.champion(name)
            if (present.version if present is not None else None) not in (before, version):
                return False
            self.set_champion(name, version)
            return True

    def set_challenger(self, name: str, version: int) -> None:
        """Move `challenger` to a version. Raises: SettingsError."""
        self.set_alias(name, "challenger", version)

    def set_alias(self, name: str, alias: str, version: int, *, time_ms: int | None = None) -> None:
        """Move an alias to a version, and note the time (None = now). Raises: SettingsError for an unknown one."""
        self.version(name, version)
        moved = time.time_ns() // 1_000_000 if time_ms is None else time_ms
        with self._store.answers("move an alias"):
            self._store.client.set_model_version_tag(name, str(version), f"{MOVED}{alias}", str(moved))
            fault("alias.timed")
            self._store.client.set_registered_model_alias(name, alias, str(version))
            fault("alias.moved")

    def tag_version(self, name: str, version: int, tags: dict[str, Any]) -> None:
        """Attach short texts to a version; None values are left out. A gate's decision goes into its description, too.

        Raises: SettingsError.
        """
        self.version(name, version)
        with self._store.answers("tag a model version"):
            for key, value in tags.items():
                if value is not None:
                    self._store.client.set_model_version_tag(name, str(version), key, str(value))
            if "gate.decision" in tags:
                found = self._store.client.get_model_version(name, str(version))
                text = with_decision(found.description or "", dict(found.tags))
                self._store.client.update_model_version(name, str(version), text)
        fault("version.tagged")

    def model_tags(self, name: str) -> dict[str, str]:
        """Tags of the registered model itself, which outlive its versions; {} for an unknown name."""
        _check_name(name)
        try:
            with self._store.answers("look up a registered model"):
                return dict(self._store.client.get_registered_model(name).tags)
        except DataError as error:
            if not missing(error.__cause__ or error):  # type: ignore[arg-type]
                raise
            return {}

    def tag_model(self, name: str, key: str, value: str) -> None:
        """Set a tag of the registered model itself. Raises: DataError for an unknown name."""
        _check_name(name)
        with self._store.answers("tag a registered model"):
            self._store.client.set_registered_model_tag(name, key, value)

    def _require(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise unknown_model(name, names, self._store.label)

    def _info(self, version: model_registry.ModelVersion, aliases: list[str] | None = None) -> ModelVersion:
        metrics = {metric.key: metric.value for metric in version.metrics or []}
        return ModelVersion(
            name=version.name,
            version=int(version.version),
            run_id=version.run_id or None,
            model_id=version.model_id or None,
            aliases=tuple(sorted(version.aliases if aliases is None else aliases)),
            tags=dict(version.tags),
            metrics=metrics,
            url=self._store.version_url(version.name, int(version.version)),
        )


_GATE = "\n\nGate: "  # begins the paragraph of a version's description that tells the decision


def with_decision(description: str, tags: Mapping[str, str]) -> str:
    """A version's description with the gate's decision, as its tags tell it, in place of an earlier one."""
    low, high = tags.get("figure.low"), tags.get("figure.high")
    rate = f"success {float(tags['figure.success_rate']):.1%}" if tags.get("figure.success_rate") else ""
    if rate and low and high:
        rate += f" [{float(low):.1%}, {float(high):.1%}] of {tags.get('figure.samples', '?')} held-out attempts"
    told = "; ".join(filter(None, (tags.get("gate.reason"), rate)))
    before = description.partition(_GATE)[0].rstrip()
    return f"{before}{_GATE}{tags['gate.decision']}: {told}".lstrip()


def moved_at(version: ModelVersion, alias: str) -> float:
    """Time in ms when `alias` was put on the version that carries it; infinity = by somebody else, who is right."""
    text = version.tags.get(f"{MOVED}{alias}", "")
    return float(text) if text.isdigit() else math.inf


def _check_name(name: str) -> None:
    if not MODEL_NAME.fullmatch(name):
        raise SettingsError(f"'{name}' is no name of a registered model")


def _local_folder(location: str) -> Path | None:
    if location.startswith("file://"):
        from mlflow.utils.file_utils import local_file_uri_to_path

        location = local_file_uri_to_path(location)
    path = Path(location)
    return path if path.is_absolute() and path.is_dir() else None


def _is_whole(target: Path) -> bool:
    """True = downloaded before, every byte as it came. What is damaged, or of an older version, is removed."""
    if not target.exists():
        return False
    try:
        verify_folder(target)
    except CorruptError as error:
        log.warning("the downloaded model is fetched again: %s", error)
        remove_folder(target)
        return False
    return True


def _model_folder(artifact: Path, info: ModelVersion) -> Path:
    for folder in (artifact / "model", artifact):
        if (folder / "config.json").is_file():
            return folder
    raise DataError(f"{info.reference} holds no Hugging Face model (no config.json under {artifact})")
