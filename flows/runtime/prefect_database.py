"""Prefect's sqlite database, migrated once for each version of Prefect and then copied.

A new output folder would otherwise run all of Prefect's migrations, which takes longer than many a run of a pipeline of
which everything is cached. What is kept has tables and no rows but the number of the migration. A database with that
number has run them all, and its server need not look for more of them, for which it would import Alembic.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from rl_core.errors import PosttrainError
from rl_core.storage.faults import fault
from rl_core.storage.own_files import cache_folder
from rl_core.storage.single_files import adopt, make_folder, temporary_beside

__all__ = ["database_of", "keep_tables", "migration_environment", "start_from_tables"]

log = logging.getLogger(__name__)

_KEPT = "alembic_version"  # the table with the number of the migration
_ELSEWHERE = ("PREFECT_API_DATABASE_", "PREFECT_SERVER_DATABASE_")  # beginnings of variables of another database


def database_of(home: Path) -> Path:
    """Database file of a Prefect home."""
    return home / "prefect.db"


def start_from_tables(home: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Give a home without a database the kept tables; False where nothing was to be done. Never raises."""
    path, kept = database_of(home), _place()
    if kept is None or path.exists() or not _is_migrated(kept) or _is_elsewhere(environment):
        return False
    try:
        make_folder(home)
        with temporary_beside(path) as copy:
            try:
                shutil.copyfile(kept, copy)
                fault("prefect.copied")
                return adopt(copy, path, once=True)  # False = another run was faster
            finally:
                copy.unlink(missing_ok=True)
    except (OSError, PosttrainError) as error:
        log.debug("Prefect makes its own tables: %s", error)
        return False


def keep_tables(home: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Keep the tables of a home's database, which a server may have open, unless they are kept. Never raises."""
    path, kept = database_of(home), _place()
    if kept is None or _is_migrated(kept) or _is_elsewhere(environment) or not _is_migrated(path):
        return False
    try:
        make_folder(kept.parent)
        with temporary_beside(kept) as copy:
            try:
                _copy_without_rows(path, copy)
                fault("prefect.kept")
                adopt(copy, kept)
            finally:
                copy.unlink(missing_ok=True)
        return True
    except (OSError, sqlite3.Error, PosttrainError) as error:
        log.debug("Prefect's tables are not kept: %s", error)
        return False


def migration_environment(home: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which the server of a home opens its database as it is; {} where migrations may be missing.

    environment: of the server. Never raises.
    """
    kept = _place()
    if kept is None or _is_elsewhere(environment):
        return {}
    number = _migration(kept)
    return (
        {"PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false"}
        if number and number == _migration(database_of(home))
        else {}
    )


def _place() -> Path | None:
    """File of the kept tables; None where this user has no cache."""
    try:
        return cache_folder("prefect") / f"{version('prefect')}.db"
    except (OSError, PosttrainError):
        return None


def _is_elsewhere(environment: Mapping[str, str]) -> bool:
    return any(name.startswith(_ELSEWHERE) for name in environment)


def _is_migrated(path: Path) -> bool:
    """True = a database that has run its migrations."""
    return bool(_migration(path))


def _migration(path: Path) -> str:
    """Number of the newest migration that a database has run; "" where it is none, or has run none."""
    if not path.is_file():
        return ""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return ",".join(sorted(str(row[0]) for row in database.execute(f"SELECT version_num FROM {_KEPT}")))
    except sqlite3.Error:
        return ""


def _copy_without_rows(path: Path, copy: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # one file
        target.execute("PRAGMA foreign_keys = OFF")
        names = target.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (name,) in names.fetchall():
            if name != _KEPT:
                target.execute(f'DELETE FROM "{name}"')
        target.commit()
        target.execute("VACUUM")
