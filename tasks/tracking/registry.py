"""Names, aliases and versions of the registered models of a sqlite store, read without MLflow.

MLflow's import takes seconds, and a mistyped name is to be refused at once.

The model registry: references, downloads, and the aliases champion and challenger.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import CheckpointError, CorruptError, DataError, SettingsError, suggest_name
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, publish_folder, remove_folder
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import verify_folder
from tasks.tracking.models import MODEL_NAME
from tasks.tracking.store import TrackingStore, is_missing_error

if TYPE_CHECKING:
    from mlflow.entities import model_registry


def refuse_unregistered_model(
    name: str, alias: str | None, version: str | None, database: Path, label: str
) -> None:
    """Refuse a model, alias or version that the store does not have; one of another shape is left to MLflow.

    Args:
        alias, version: one of them; `version` is a number, or "latest".
        label: name of the store for people.
    Raises: SettingsError with the nearest known name.
    """
    with contextlib.suppress(sqlite3.Error):
        address = f"{database.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=5.0)) as store:
            names = [row[0] for row in store.execute("SELECT name FROM registered_models")]
            asked = "SELECT version FROM model_versions WHERE name = ? ORDER BY version"
            versions = [str(row[0]) for row in store.execute(asked, (name,))]
            of_model = store.execute(
                "SELECT alias FROM registered_model_aliases WHERE name = ?", (name,)
            )
            aliases = [row[0] for row in of_model]
        if name not in names:
            raise build_unknown_model_error(name, names, label)
        if alias is not None and alias not in aliases:
            raise build_unknown_alias_error(name, alias, aliases)
        if version not in (None, "latest") and str(int(str(version))) not in versions:
            raise build_unknown_version_error(name, int(str(version)), versions)


def build_unknown_model_error(name: str, names: Iterable[str], label: str) -> SettingsError:
    """Error about a model that is not registered; `label`: of the store."""
    return SettingsError(f"no registered model '{name}' in {label}; {suggest_name(name, names)}")


def build_unknown_alias_error(name: str, alias: str, aliases: Iterable[str]) -> SettingsError:
    """Error about an alias that no version of a model has."""
    return SettingsError(
        f"registered model '{name}' has no version with alias '{alias}'; {suggest_name(alias, aliases)}"
    )


def build_unknown_version_error(name: str, version: int, versions: Iterable[str]) -> SettingsError:
    """Error about a version that a model does not have."""
    known = ", ".join(versions) or "none yet"
    return SettingsError(f"registered model '{name}' has no version {version}; versions: {known}")


log = logging.getLogger(__name__)

REFERENCE = re.compile(
    rf"models:/(?P<name>{MODEL_NAME.pattern}?)(?:@(?P<alias>[\w\-]+)|/(?P<version>\d+|latest))"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")


ALIAS_MOVED_TAG = "alias.moved."  # tag of a version, with the alias: when that was put on it, in ms


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


class ModelRegistry:
    """The registered models of one store."""

    def __init__(self, store: TrackingStore) -> None:
        self._store = store

    def resolve_model(self, reference: str, cache_folder: Path) -> Path | str:
        """The local folder (or hub name) behind a folder, a hub name, models:/NAME@ALIAS or models:/NAME/VERSION.

        A registered version is copied into `resolve_cache_folder` once, unless its files are on this machine already.
        Raises: SettingsError naming what is unknown; BackendError when the store does not answer.
        """
        if is_registered_reference(reference):
            return self.download_version(self.find_version(reference), cache_folder)
        path = Path(reference).expanduser()
        if path.exists():
            if not (path / "config.json").is_file():
                raise SettingsError(
                    f"model path '{reference}' is no Hugging Face model folder: config.json is missing"
                )
            return path.resolve()
        if (
            reference.startswith((".", "/", "~", "\\"))
            or reference.count("/") > 1
            or not HUB_NAME.fullmatch(reference)
        ):
            raise SettingsError(f"model path '{reference}' does not exist")
        return reference

    def find_version(self, reference: str) -> ModelVersion:
        """The version behind models:/NAME@ALIAS, models:/NAME/3 or models:/NAME/latest. Raises: SettingsError."""
        match = REFERENCE.fullmatch(reference)
        if match is None:
            raise SettingsError(
                f"model reference '{reference}' must be models:/NAME@ALIAS (models:/policy@champion), models:/NAME/3 "
                "or models:/NAME/latest"
            )
        name = match["name"]
        if match["alias"]:
            found = self.find_by_alias(name, match["alias"])
            if found is None:
                self._require_registered(name)
                aliases = sorted(
                    {alias for info in self.list_versions(name) for alias in info.aliases}
                )
                raise build_unknown_alias_error(name, match["alias"], aliases)
            return found
        if match["version"] == "latest":
            versions = self.list_versions(name)
            if not versions:
                self._require_registered(name)
                raise SettingsError(f"registered model '{name}' has no version yet")
            return versions[-1]
        return self.fetch_version(name, int(match["version"]))

    def download_version(self, info: ModelVersion, cache_folder: Path) -> Path:
        """The Hugging Face folder of a version, on this machine."""
        target = (
            cache_folder
            / f"{info.name.replace(' ', '_')}-v{info.version}-{(info.model_id or 'model')[-8:]}"
        )
        if not _is_complete_download(target):
            with self._store.translate_errors(f"hand out {info.reference}"):
                location = self._store.client.get_model_version_download_uri(
                    info.name, str(info.version)
                )
                if location.startswith("models:/"):
                    model_id = location.removeprefix("models:/")
                    location = self._store.client.get_logged_model(model_id).artifact_location
                local = _resolve_local_folder(location)
                if local is not None:
                    return _find_model_folder(local, info)
                make_folder(cache_folder)
                clear_leftovers(cache_folder)
                try:
                    publish_folder(
                        target,
                        lambda folder: self._download_artifacts(location, folder),
                        {"kind": "download"},
                    )
                except CheckpointError:
                    if not _is_complete_download(target):  # else another process was faster
                        raise
        return _find_model_folder(target, info)

    def _download_artifacts(self, location: str, folder: Path) -> None:
        """Download artifacts into a folder."""
        import mlflow.artifacts

        made = mlflow.artifacts.download_artifacts(
            artifact_uri=location, dst_path=str(folder), tracking_uri=self._store.uri
        )
        if Path(made).resolve() != folder.resolve():  # a folder in it, by the artifact's name
            for path in Path(made).iterdir():
                path.rename(folder / path.name)
            Path(made).rmdir()

    def list_model_names(self) -> list[str]:
        """All registered models."""
        with self._store.translate_errors("list registered models"):
            return sorted(
                model.name
                for model in self._store.client.search_registered_models(max_results=1000)
            )

    def list_versions(self, name: str) -> list[ModelVersion]:
        """All versions, the oldest first; [] for an unknown name."""
        _check_model_name(name)
        with self._store.translate_errors("list model versions"):
            found = self._store.client.search_model_versions(f"name = '{name}'", max_results=1000)
            # The search leaves the aliases out; the model itself knows them.
            aliases: dict[int, list[str]] = {}
            if found:
                for alias, version in self._store.client.get_registered_model(name).aliases.items():
                    aliases.setdefault(int(version), []).append(alias)
        infos = [
            self._build_version(version, aliases.get(int(version.version), [])) for version in found
        ]
        return sorted(infos, key=lambda info: info.version)

    def fetch_version(self, name: str, version: int) -> ModelVersion:
        """One version. Raises: SettingsError naming the nearest known model, or the versions there are."""
        _check_model_name(name)
        try:
            with self._store.translate_errors("look up a model version"):
                return self._build_version(self._store.client.get_model_version(name, str(version)))
        except DataError as error:
            if not is_missing_error(error.__cause__ or error):  # type: ignore[arg-type]
                raise
        self._require_registered(name)
        raise build_unknown_version_error(
            name, version, [str(info.version) for info in self.list_versions(name)]
        )

    def find_by_alias(self, name: str, alias: str) -> ModelVersion | None:
        """The version that carries `alias`; None where none does or the model is unknown."""
        _check_model_name(name)
        try:
            with self._store.translate_errors("look up an alias"):
                return self._build_version(
                    self._store.client.get_model_version_by_alias(name, alias)
                )
        except DataError:
            return None  # MLflow calls an unknown alias an invalid parameter

    def find_champion(self, name: str) -> ModelVersion | None:
        """The version that passed the promotion gate last; None where there is none."""
        return self.find_by_alias(name, "champion")

    def set_champion(self, name: str, version: int) -> None:
        """Move `champion` to a version; a version that was challenger is so no more. Raises: SettingsError."""
        self.set_alias(name, "champion", version)
        self.clear_challenger(name, version)

    def clear_challenger(self, name: str, version: int) -> None:
        """Take the alias `challenger` from a version, if it has it: one that is champion."""
        challenger = self.find_by_alias(name, "challenger")
        if challenger is not None and challenger.version == version:
            with self._store.translate_errors("remove an alias"):
                self._store.client.delete_registered_model_alias(name, "challenger")
            inject_fault("alias.cleared")

    def replace_champion(self, name: str, version: int, before: int | None) -> bool:
        """Move `champion` to `version` if it still stands on `before` (None = nowhere); whether it is there now.

        One that stands on `version` already was moved by a process that was killed before it could say so.

        Processes that share the output folder never interleave here. MLflow itself has no such step: two machines that
        promote within the same milliseconds on one server could.
        Raises: SettingsError for an unknown version; FolderBusy where another process holds on for half a minute.
        """
        lock = self._store.output / "mlflow" / f"champion-{name.replace(' ', '_')}.lock"
        with FolderLock(lock, wait_s=30.0):
            present = self.find_champion(name)
            if (present.version if present is not None else None) not in (before, version):
                return False
            self.set_champion(name, version)
            return True

    def set_challenger(self, name: str, version: int) -> None:
        """Move `challenger` to a version. Raises: SettingsError."""
        self.set_alias(name, "challenger", version)

    def set_alias(self, name: str, alias: str, version: int, *, time_ms: int | None = None) -> None:
        """Move an alias to a version, and note the time (None = now). Raises: SettingsError for an unknown one."""
        self.fetch_version(name, version)
        moved = time.time_ns() // 1_000_000 if time_ms is None else time_ms
        with self._store.translate_errors("move an alias"):
            self._store.client.set_model_version_tag(
                name, str(version), f"{ALIAS_MOVED_TAG}{alias}", str(moved)
            )
            inject_fault("alias.timed")
            self._store.client.set_registered_model_alias(name, alias, str(version))
            inject_fault("alias.moved")

    def tag_version(self, name: str, version: int, tags: dict[str, Any]) -> None:
        """Attach short texts to a version; None values are left out. A gate's decision goes into its description, too.

        Raises: SettingsError.
        """
        self.fetch_version(name, version)
        with self._store.translate_errors("tag a model version"):
            for key, value in tags.items():
                if value is not None:
                    self._store.client.set_model_version_tag(name, str(version), key, str(value))
            if "gate.decision" in tags:
                found = self._store.client.get_model_version(name, str(version))
                text = insert_gate_decision(found.description or "", dict(found.tags))
                self._store.client.update_model_version(name, str(version), text)
        inject_fault("version.tagged")

    def read_model_tags(self, name: str) -> dict[str, str]:
        """Tags of the registered model itself, which outlive its versions; {} for an unknown name."""
        _check_model_name(name)
        try:
            with self._store.translate_errors("look up a registered model"):
                return dict(self._store.client.get_registered_model(name).tags)
        except DataError as error:
            if not is_missing_error(error.__cause__ or error):  # type: ignore[arg-type]
                raise
            return {}

    def tag_model(self, name: str, key: str, value: str) -> None:
        """Set a tag of the registered model itself. Raises: DataError for an unknown name."""
        _check_model_name(name)
        with self._store.translate_errors("tag a registered model"):
            self._store.client.set_registered_model_tag(name, key, value)

    def _require_registered(self, name: str) -> None:
        names = self.list_model_names()
        if name not in names:
            raise build_unknown_model_error(name, names, self._store.label)

    def _build_version(
        self, version: model_registry.ModelVersion, aliases: list[str] | None = None
    ) -> ModelVersion:
        metrics = {metric.key: metric.value for metric in version.metrics or []}
        return ModelVersion(
            name=version.name,
            version=int(version.version),
            run_id=version.run_id or None,
            model_id=version.model_id or None,
            aliases=tuple(sorted(version.aliases if aliases is None else aliases)),
            tags=dict(version.tags),
            metrics=metrics,
            url=self._store.build_version_url(version.name, int(version.version)),
        )


# begins the paragraph of a version's description that tells the decision
_GATE_PARAGRAPH = "\n\nGate: "


def insert_gate_decision(description: str, tags: Mapping[str, str]) -> str:
    """A version's description with the gate's decision, as its tags tell it, in place of an earlier one."""
    low, high = tags.get("figure.low"), tags.get("figure.high")
    rate = (
        f"success {float(tags['figure.success_rate']):.1%}"
        if tags.get("figure.success_rate")
        else ""
    )
    if rate and low and high:
        rate += f" [{float(low):.1%}, {float(high):.1%}] of {tags.get('figure.samples', '?')} held-out attempts"
    told = "; ".join(filter(None, (tags.get("gate.reason"), rate)))
    before = description.partition(_GATE_PARAGRAPH)[0].rstrip()
    return f"{before}{_GATE_PARAGRAPH}{tags['gate.decision']}: {told}".lstrip()


def read_alias_move_time(version: ModelVersion, alias: str) -> float:
    """Time in ms when `alias` was put on the version that carries it; infinity = by somebody else, who is right."""
    text = version.tags.get(f"{ALIAS_MOVED_TAG}{alias}", "")
    return float(text) if text.isdigit() else math.inf


def _check_model_name(name: str) -> None:
    if not MODEL_NAME.fullmatch(name):
        raise SettingsError(f"'{name}' is no name of a registered model")


def _resolve_local_folder(location: str) -> Path | None:
    if location.startswith("file://"):
        from mlflow.utils.file_utils import local_file_uri_to_path

        location = local_file_uri_to_path(location)
    path = Path(location)
    return path if path.is_absolute() and path.is_dir() else None


def _is_complete_download(target: Path) -> bool:
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


def _find_model_folder(artifact: Path, info: ModelVersion) -> Path:
    for folder in (artifact / "model", artifact):
        if (folder / "config.json").is_file():
            return folder
    raise DataError(
        f"{info.reference} holds no Hugging Face model (no config.json under {artifact})"
    )
