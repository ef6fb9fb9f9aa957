"""A database as Prefect's migrations leave it, with one table of rows."""

import sqlite3
from contextlib import closing
from pathlib import Path


def create_migrated_database(home: Path, *names: str) -> Path:
    """Create the database of `home`; `names`: its rows."""
    home.mkdir(parents=True)
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("CREATE TABLE flow (name TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('abc')")
        database.executemany("INSERT INTO flow VALUES (?)", [(name,) for name in names])
        database.commit()
    return home / "prefect.db"


def rows(path: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [row[0] for row in database.execute(f"SELECT * FROM {table}")]
