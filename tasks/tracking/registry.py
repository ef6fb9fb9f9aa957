"""Model registry: references, downloads, and the aliases champion and challenger.

Names, aliases and versions of a sqlite store can also be checked without MLflow, whose import takes seconds, so that a
mistyped name is refused immediately.
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
from rl_core.models.adapter_folder import is_adapter_folder
from rl_core.models.named_models import resolve_local_model
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, publish_folder, remove_folder
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import verify_folder
from tasks.tracking.models import MODEL_NAME
from tasks.tracking.store import TrackingStore, is_missing_error

if TYPE_CHECKING:
    from mlflow.entities import model_registry


log = logging.getLogger(__name__)

REFERENCE = re.compile(
    rf"models:/(?P<name>{MODEL_NAME.pattern}?)(?:@(?P<alias>[\w\-]+)|/(?P<version>\d+|latest))"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
ALIAS_MOVED_TAG = "alias.moved."  # version tag, followed by the alias: time of the move in ms
# starts the paragraph of a version's description with the gate's decision
_GATE_PARAGRAPH = "\n\nGate: "


def refuse_unregistered_model(
    name: str, alias: str | None, version: str | None, database: Path, label: str
) -> None:
    """Refuse a model, alias or version that the store does not have. A store with unknown tables is left to MLflow.

    Args:
        alias, version: one of them; `version` is a number, or "latest".
        label: name of the store, for messages.
    Raises: SettingsError with the nearest known name.
    """
    with contextlib.suppress(sqlite3.Error):
        address = f"{database.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=5.0)) as store:
            names = [row[0] for row in store.execute("SELECT name FROM registered_models")]
            versions_query = "SELECT version FROM model_versions WHERE name = ? ORDER BY version"
            versions = [str(row[0]) for row in store.execute(versions_query, (name,))]
            aliases_query = "SELECT alias FROM registered_model_aliases WHERE name = ?"
            aliases = [row[0] for row in store.execute(aliases_query, (name,))]
        if name not in names:
            raise build_unknown_model_error(name, names, label)
        if alias is not None and alias not in aliases:
            raise build_unknown_alias_error(name, alias, aliases)
        if version not in (None, "latest") and str(int(str(version))) not in versions:
            raise build_unknown_version_error(name, int(str(version)), versions)


def build_unknown_model_error(name: str, names: Iterable[str], label: str) -> SettingsError:
    """Build the error for a model that is not registered. `label`: name of the store."""
    return SettingsError(f"no registered model '{name}' in {label}; {suggest_name(name, names)}")


def build_unknown_alias_error(name: str, alias: str, aliases: Iterable[str]) -> SettingsError:
    """Build the error for an alias that no version of a model has."""
    return SettingsError(
        f"registered model '{name}' has no version with alias '{alias}'; {suggest_name(alias, aliases)}"
    )


def build_unknown_version_error(name: str, version: int, versions: Iterable[str]) -> SettingsError:
    """Build the error for a version that a model does not have."""
    known = ", ".join(versions) or "none yet"
    return SettingsError(f"registered model '{name}' has no version {version}; versions: {known}")


def is_registered_reference(reference: str) -> bool:
    """Return whether `reference` names a registered model."""
    return reference.startswith("models:")


@dataclass(frozen=True)
class ModelVersion:
    """Version of a registered model."""

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
    """Registered models of one store."""

    def __init__(self, store: TrackingStore) -> None:
        self._store = store

    def resolve_model(self, reference: str, cache_folder: Path) -> Path | str:
        """Return the local folder of a model, or its name on the hub.

        Args:
            reference: a folder, a GGUF file, a named model, a hub name, models:/NAME@ALIAS or models:/NAME/VERSION.
            cache_folder: a registered version is copied here once, unless its files are already on this machine.
        Raises: SettingsError naming what is unknown; BackendError if the store does not answer.
        """
        if is_registered_reference(reference):
            return self.download_version(self.find_version(reference), cache_folder)
        local = resolve_local_model(reference)
        if local is not None:
            return local.resolve()
        path = Path(reference).expanduser()
        if path.exists():
            if not (path / "config.json").is_file() and not is_adapter_folder(path):
                raise SettingsError(
                    f"model path '{reference}' is no Hugging Face model folder: config.json is missing"
                )
            return path.resolve()
        is_path = reference.startswith((".", "/", "~", "\\")) or reference.count("/") > 1
        if is_path or not HUB_NAME.fullmatch(reference):
            raise SettingsError(f"model path '{reference}' does not exist")
        return reference

    def find_version(self, reference: str) -> ModelVersion:
        """Return the version of models:/NAME@ALIAS, models:/NAME/3 or models:/NAME/latest. Raises: SettingsError."""
        match = REFERENCE.fullmatch(reference)
        if match is None:
            raise SettingsError(
                f"model reference '{reference}' must be models:/NAME@ALIAS (models:/policy@champion), models:/NAME/3 "
                "or models:/NAME/latest"
            )
        name, alias = match["name"], match["alias"]
        if alias:
            version = self.find_by_alias(name, alias)
            if version is None:
                self._require_registered(name)
                known = {known for info in self.list_versions(name) for known in info.aliases}
                raise build_unknown_alias_error(name, alias, sorted(known))
            return version
        if match["version"] == "latest":
            versions = self.list_versions(name)
            if not versions:
                self._require_registered(name)
                raise SettingsError(f"registered model '{name}' has no version yet")
            return versions[-1]
        return self.fetch_version(name, int(match["version"]))

    def download_version(self, info: ModelVersion, cache_folder: Path) -> Path:
        """Return the Hugging Face folder of a version, downloaded if it is not on this machine."""
        model_suffix = (info.model_id or "model")[-8:]
        target = cache_folder / f"{info.name.replace(' ', '_')}-v{info.version}-{model_suffix}"
        if _is_complete_download(target):
            return _find_model_folder(target, info)
        client = self._store.client
        with self._store.translate_errors(f"hand out {info.reference}"):
            location = client.get_model_version_download_uri(info.name, str(info.version))
            if location.startswith("models:/"):
                model_id = location.removeprefix("models:/")
                location = client.get_logged_model(model_id).artifact_location
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
                if not _is_complete_download(target):  # otherwise another process was faster
                    raise
        return _find_model_folder(target, info)

    def _download_artifacts(self, location: str, folder: Path) -> None:
        """Download artifacts to a folder."""
        import mlflow.artifacts

        downloaded = mlflow.artifacts.download_artifacts(
            artifact_uri=location, dst_path=str(folder), tracking_uri=self._store.uri
        )
        # MLflow may create a subfolder with the artifact's name.
        if Path(downloaded).resolve() != folder.resolve():
            for path in Path(downloaded).iterdir():
                path.rename(folder / path.name)
            Path(downloaded).rmdir()

    def list_model_names(self) -> list[str]:
        """List all registered models."""
        with self._store.translate_errors("list registered models"):
            models = self._store.client.search_registered_models(max_results=1000)
        return sorted(model.name for model in models)

    def list_versions(self, name: str) -> list[ModelVersion]:
        """List all versions, oldest first; [] for an unknown name."""
        _check_model_name(name)
        with self._store.translate_errors("list model versions"):
            versions = self._store.client.search_model_versions(
                f"name = '{name}'", max_results=1000
            )
            # Search results have no aliases; the registered model has them.
            aliases: dict[int, list[str]] = {}
            if versions:
                for alias, number in self._store.client.get_registered_model(name).aliases.items():
                    aliases.setdefault(int(number), []).append(alias)
        infos = [
            self._build_version(number, aliases.get(int(number.version), [])) for number in versions
        ]
        return sorted(infos, key=lambda info: info.version)

    def fetch_version(self, name: str, version: int) -> ModelVersion:
        """Return one version. Raises: SettingsError naming the nearest known model, or the existing versions."""
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
        """Return the version with `alias`; None if there is none or the model is unknown."""
        _check_model_name(name)
        try:
            with self._store.translate_errors("look up an alias"):
                return self._build_version(
                    self._store.client.get_model_version_by_alias(name, alias)
                )
        except DataError:
            return None  # MLflow reports an unknown alias as an invalid parameter

    def find_champion(self, name: str) -> ModelVersion | None:
        """Return the version that passed the promotion gate last; None if there is none."""
        return self.find_by_alias(name, "champion")

    def set_champion(self, name: str, version: int) -> None:
        """Move `champion` to a version, which is then no longer challenger. Raises: SettingsError."""
        self.set_alias(name, "champion", version)
        self.clear_challenger(name, version)

    def clear_challenger(self, name: str, version: int) -> None:
        """Remove the alias `challenger` from a version that is champion, if it has it."""
        challenger = self.find_by_alias(name, "challenger")
        if challenger is not None and challenger.version == version:
            with self._store.translate_errors("remove an alias"):
                self._store.client.delete_registered_model_alias(name, "challenger")
            inject_fault("alias.cleared")

    def replace_champion(self, name: str, version: int, before: int | None) -> bool:
        """Move `champion` to `version` if it is still on `before` (None = on no version).

        If it is already on `version`, a process moved it and was killed before it could report that. Processes that
        share the output folder take turns. MLflow itself has no atomic exchange: two machines that promote on one
        server within the same milliseconds could conflict.
        Returns: whether `champion` is on `version` now.
        Raises: SettingsError for an unknown version; FolderBusy if another process holds the lock for half a minute.
        """
        lock = self._store.output / "mlflow" / f"champion-{name.replace(' ', '_')}.lock"
        with FolderLock(lock, wait_s=30.0):
            champion = self.find_champion(name)
            current = champion.version if champion is not None else None
            if current not in (before, version):
                return False
            self.set_champion(name, version)
            return True

    def set_challenger(self, name: str, version: int) -> None:
        """Move `challenger` to a version. Raises: SettingsError."""
        self.set_alias(name, "challenger", version)

    def set_alias(self, name: str, alias: str, version: int, *, time_ms: int | None = None) -> None:
        """Move an alias to a version and record the time (None = now). Raises: SettingsError for an unknown version."""
        self.fetch_version(name, version)
        moved_at = time.time_ns() // 1_000_000 if time_ms is None else time_ms
        with self._store.translate_errors("move an alias"):
            self._store.client.set_model_version_tag(
                name, str(version), f"{ALIAS_MOVED_TAG}{alias}", str(moved_at)
            )
            inject_fault("alias.timed")
            self._store.client.set_registered_model_alias(name, alias, str(version))
            inject_fault("alias.moved")

    def tag_version(self, name: str, version: int, tags: dict[str, Any]) -> None:
        """Set tags of a version, skipping None values. A gate's decision is also written to its description.

        Raises: SettingsError.
        """
        self.fetch_version(name, version)
        with self._store.translate_errors("tag a model version"):
            for key, value in tags.items():
                if value is not None:
                    self._store.client.set_model_version_tag(name, str(version), key, str(value))
            if "gate.decision" in tags:
                stored = self._store.client.get_model_version(name, str(version))
                text = insert_gate_decision(stored.description or "", dict(stored.tags))
                self._store.client.update_model_version(name, str(version), text)
        inject_fault("version.tagged")

    def read_model_tags(self, name: str) -> dict[str, str]:
        """Return the tags of the registered model itself, which outlive its versions; {} for an unknown name."""
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
            url=self._store.resolve_link(
                self._store.build_version_link(version.name, int(version.version))
            ),
        )


def insert_gate_decision(description: str, tags: Mapping[str, str]) -> str:
    """Insert the gate's decision from a version's tags into its description, replacing an earlier decision."""
    rate, low, high = (tags.get(f"figure.{name}") for name in ("success_rate", "low", "high"))
    result = f"success {float(rate):.1%}" if rate else ""
    if rate and low and high:
        result += f" [{float(low):.1%}, {float(high):.1%}] of {tags.get('figure.samples', '?')} held-out attempts"
    explanation = "; ".join(filter(None, (tags.get("gate.reason"), result)))
    text = description.partition(_GATE_PARAGRAPH)[0].rstrip()
    return f"{text}{_GATE_PARAGRAPH}{tags['gate.decision']}: {explanation}".lstrip()


def read_alias_move_time(version: ModelVersion, alias: str) -> float:
    """Return the time in ms at which `alias` moved to the version that has it; infinity if somebody else moved it."""
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
    """Return whether every byte was downloaded before. Remove a damaged or outdated download."""
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
