"""The tables of a sqlite store: made aside and published whole, so that no half-made database stays.

MLflow makes them in dozens of steps, and cannot go on where a full disk or a kill ended one: "table ... exists". These
steps take seconds, so new tables are kept for each version of MLflow, and other output folders begin with a copy.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from importlib.metadata import version
from pathlib import Path

from rl_core.errors import BackendError, CheckpointError, PosttrainError
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, set_aside
from rl_core.storage.locks import FolderLock
from rl_core.storage.own_files import cache_folder
from rl_core.storage.single_files import adopt, make_folder, replacing, temporary_beside

__all__ = ["ensure_database"]

log = logging.getLogger(__name__)

WAIT_SECONDS = 120.0  # for another process that makes the same database
FULL = "make room or raise the file size limit (ulimit -f); `posttrain sync` then delivers what waits"


def ensure_database(uri: str) -> None:
    """Make a sqlite store's database where it is missing; set one aside that was half-made and holds nothing.

    Other stores, and databases of other versions that hold runs, are left as they are. MLflow is imported already.
    Raises: BackendError where the disk refuses.
    """
    if not uri.startswith("sqlite:///") or (name := uri.removeprefix("sqlite:///")) in ("", ":memory:") or "?" in name:
        return
    path = Path(name)
    try:
        make_folder(path.parent)
        if _is_whole(path):
            return
        with FolderLock(path.with_name(f".{path.name}.lock"), wait_s=WAIT_SECONDS):
            if not _is_whole(path):
                _make(path)
    except (OSError, sqlite3.Error, CheckpointError) as error:
        raise BackendError(f"{path}: the tracking database cannot be made: {error}; {FULL}") from error


def _is_whole(path: Path) -> bool:
    """True = it has all tables, or holds something, so that it is not ours to replace."""
    from mlflow.store.db.utils import Base

    if not path.exists() or path.stat().st_size == 0:
        return False
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)) as database:
        try:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            filled = (t for t in ("runs", "registered_models", "trace_info") if t in tables)
            return set(Base.metadata.tables) <= tables or any(
                database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in filled
            )
        except sqlite3.DatabaseError as error:
            # Operational: locked, or a disk that fails, which says nothing about it. Else it is no database at all.
            return isinstance(error, sqlite3.OperationalError)


def _make(path: Path) -> None:
    clear_leftovers(path.parent)
    with temporary_beside(path) as temporary:
        if not _start_from_kept(temporary):
            _fill(temporary)
            _keep(temporary)
        fault("store.tables")
        if path.exists():
            aside = set_aside(path, f"{path.name}.half-made")
            log.warning("%s was never finished and holds nothing; set aside as %s", path, aside.name)
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)  # of the half-made one
        adopt(temporary, path)
        fault("store.made")


def _fill(temporary: Path) -> None:
    """Make a database with all tables; nothing is left of one that could not be made."""
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    engine = create_engine(f"sqlite:///{temporary}")
    try:
        _initialize_tables(engine)
    except SQLAlchemyError as error:
        for left in (temporary, temporary.with_name(f"{temporary.name}-journal")):
            left.unlink(missing_ok=True)
        raise sqlite3.OperationalError(str(getattr(error, "orig", None) or error)) from error
    finally:
        engine.dispose()


def _start_from_kept(temporary: Path) -> bool:
    """Copy the kept tables; False where there are none, or no room. Never raises."""
    kept = _place()
    if kept is None or not _is_sound(kept):
        return False
    try:
        with replacing(temporary, binary=True) as file:
            file.write(kept.read_bytes())
        return True
    except (OSError, PosttrainError) as error:
        log.debug("MLflow makes its own tables: %s", error)
        return False


def _keep(made: Path) -> None:
    """Keep new tables, which hold no run yet, for other output folders. Never raises."""
    kept = _place()
    if kept is None:
        return
    try:
        make_folder(kept.parent)
        with replacing(kept, binary=True) as file:
            file.write(made.read_bytes())
            fault("store.kept")
    except (OSError, PosttrainError) as error:
        log.debug("MLflow's tables are not kept: %s", error)


def _place() -> Path | None:
    """File of the kept tables; None where this user has no cache."""
    try:
        return cache_folder("mlflow") / f"{version('mlflow')}.db"
    except (OSError, PosttrainError):
        return None


def _is_sound(kept: Path) -> bool:
    """True = an undamaged database with all tables, the number of their migration, and no run."""
    from mlflow.store.db.utils import Base

    if not kept.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{kept.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            return (
                set(Base.metadata.tables) <= tables
                and database.execute("SELECT count(*) FROM alembic_version").fetchone()[0] == 1
                and database.execute("SELECT count(*) FROM runs").fetchone()[0] == 0
                and database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            )
    except sqlite3.Error:
        return False
