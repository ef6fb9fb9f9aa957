"""Names, aliases and versions of the registered models of a sqlite store, read without MLflow.

MLflow's import takes seconds, and a mistyped name is to be refused at once.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from rl_core.errors import SettingsError, nearest

__all__ = ["refuse_unregistered", "unknown_alias", "unknown_model", "unknown_version"]


def refuse_unregistered(name: str, alias: str | None, version: str | None, database: Path, label: str) -> None:
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
            of_model = store.execute("SELECT alias FROM registered_model_aliases WHERE name = ?", (name,))
            aliases = [row[0] for row in of_model]
        if name not in names:
            raise unknown_model(name, names, label)
        if alias is not None and alias not in aliases:
            raise unknown_alias(name, alias, aliases)
        if version not in (None, "latest") and str(int(str(version))) not in versions:
            raise unknown_version(name, int(str(version)), versions)


def unknown_model(name: str, names: Iterable[str], label: str) -> SettingsError:
    """Error about a model that is not registered; `label`: of the store."""
    return SettingsError(f"no registered model '{name}' in {label}; {nearest(name, names)}")


def unknown_alias(name: str, alias: str, aliases: Iterable[str]) -> SettingsError:
    """Error about an alias that no version of a model has."""
    return SettingsError(f"registered model '{name}' has no version with alias '{alias}'; {nearest(alias, aliases)}")


def unknown_version(name: str, version: int, versions: Iterable[str]) -> SettingsError:
    """Error about a version that a model does not have."""
    known = ", ".join(versions) or "none yet"
    return SettingsError(f"registered model '{name}' has no version {version}; versions: {known}")
