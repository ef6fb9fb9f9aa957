"""Tables of Prefect's database, cached and copied: without rows, and never over an existing database."""

import errno
import os
import shutil
import sqlite3
import stat
from contextlib import closing

import pytest
from helpers.prefect_tables import create_migrated_database, rows

from flows.runtime.embedded_server import (
    build_migration_environment,
    cache_tables,
    copy_cached_tables,
    prepare_database,
)
from rl_core.storage import atomic_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/posttrain/prefect"


def test_a_new_home_starts_from_the_tables_without_the_rows(tmp_path, cache):
    create_migrated_database(tmp_path / "one", "secret")
    assert cache_tables(tmp_path / "one", {}) and copy_cached_tables(tmp_path / "two", {})
    (cached,) = cache.iterdir()
    for path in (cached, tmp_path / "two/prefect.db"):
        assert rows(path, "flow") == [] and rows(path, "alembic_version") == ["abc"]
        assert b"secret" not in path.read_bytes()
    assert rows(tmp_path / "one/prefect.db", "flow") == ["secret"]
    assert os.listdir(tmp_path / "two") == ["prefect.db"]


def test_nothing_is_repeated_or_overwritten(tmp_path, cache):
    create_migrated_database(tmp_path / "one")
    assert cache_tables(tmp_path / "one", {}) and not cache_tables(tmp_path / "one", {})
    create_migrated_database(tmp_path / "two", "mine")
    assert not copy_cached_tables(tmp_path / "two", {}) and rows(
        tmp_path / "two/prefect.db", "flow"
    ) == ["mine"]


def test_a_server_looks_for_migrations_unless_its_database_matches_the_cached_tables(
    tmp_path,
):
    no_migration = {"PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false"}
    path = create_migrated_database(tmp_path / "one")
    assert (
        build_migration_environment(tmp_path / "one", {}) == {}
    )  # no cached tables tell the newest number
    cache_tables(tmp_path / "one", {})
    assert build_migration_environment(tmp_path / "one", {}) == no_migration
    assert build_migration_environment(tmp_path / "two", {}) == {}  # no database
    copy_cached_tables(tmp_path / "two", {})
    assert build_migration_environment(tmp_path / "two", {}) == no_migration
    elsewhere = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql://me@db/x"}
    assert build_migration_environment(tmp_path / "one", elsewhere) == {}
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE alembic_version SET version_num = 'older'")
        database.commit()
    assert build_migration_environment(tmp_path / "one", {}) == {}
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM alembic_version")
        database.commit()
    assert build_migration_environment(tmp_path / "one", {}) == {}


def test_another_database_is_left_to_prefect(tmp_path):
    create_migrated_database(tmp_path / "one")
    environment = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql://me@db/x"}
    assert not cache_tables(tmp_path / "one", environment)
    assert cache_tables(tmp_path / "one", {}) and not copy_cached_tables(
        tmp_path / "two", environment
    )


def test_a_database_that_another_run_makes_meanwhile_stays(tmp_path, monkeypatch):
    create_migrated_database(tmp_path / "one")
    assert cache_tables(tmp_path / "one", {})
    theirs, sync = create_migrated_database(tmp_path / "theirs", "theirs"), atomic_files.fsync_path

    def create_meanwhile(path):
        if path.parent == tmp_path / "two":
            theirs.replace(tmp_path / "two/prefect.db")
        sync(path)

    monkeypatch.setattr(atomic_files, "fsync_path", create_meanwhile)
    assert not copy_cached_tables(tmp_path / "two", {})
    assert rows(tmp_path / "two/prefect.db", "flow") == ["theirs"] and os.listdir(
        tmp_path / "two"
    ) == ["prefect.db"]


@pytest.mark.parametrize("content", [b"", b"no database at all", b"SQLite format 3\0" + b"x" * 500])
def test_damaged_cached_tables_are_ignored(tmp_path, cache, content):
    create_migrated_database(tmp_path / "one")
    cache_tables(tmp_path / "one", {})
    (cached,) = cache.iterdir()
    cached.write_bytes(content)
    assert (
        not copy_cached_tables(tmp_path / "two", {}) and not (tmp_path / "two/prefect.db").exists()
    )
    assert cache_tables(tmp_path / "one", {}) and copy_cached_tables(tmp_path / "two", {})


def test_a_user_without_a_cache_does_without(tmp_path, monkeypatch):
    create_migrated_database(tmp_path / "one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one/prefect.db"))  # a file
    assert not cache_tables(tmp_path / "one", {}) and not copy_cached_tables(tmp_path / "two", {})


def test_a_copy_that_fails_leaves_nothing(tmp_path, cache, monkeypatch):
    """Remove a partial copy: a file size limit once left a temporary file in each output folder."""
    create_migrated_database(tmp_path / "one")
    assert cache_tables(tmp_path / "one", {})

    def copy_partly(source, target):
        target.write_bytes(source.read_bytes()[:100])
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(shutil, "copyfile", copy_partly)
    home = tmp_path / "home"
    assert not copy_cached_tables(home, {})
    assert list(home.iterdir()) == []


def read_mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_database_behind_the_password_is_this_users_alone(tmp_path, cache):
    """It was readable by everybody: with the cached tables, without them, and when Prefect created it."""
    previous = os.umask(0o022)
    try:
        prepare_database(tmp_path / "first", {})
        create_migrated_database(tmp_path / "one")
        (tmp_path / "one/prefect.db-wal").touch(0o644)
        assert cache_tables(tmp_path / "one", {})
        for home in ("one", "copied"):
            prepare_database(tmp_path / home, {})
        with closing(sqlite3.connect(tmp_path / "first/prefect.db")) as database:
            database.execute("CREATE TABLE a (b)")  # an empty file becomes a database
        prepare_database(tmp_path / "elsewhere", {"PREFECT_SERVER_DATABASE_HOST": "db"})
        shared = create_migrated_database(tmp_path / "shared")
        shared.chmod(0o664)
        prepare_database(tmp_path / "shared", {})
    finally:
        os.umask(previous)
    for home in ("first", "one", "copied"):
        assert read_mode(tmp_path / home / "prefect.db") == 0o600, home
    assert read_mode(tmp_path / "one/prefect.db-wal") == 0o600
    assert rows(tmp_path / "copied/prefect.db", "alembic_version") == ["abc"]
    assert read_mode(shared) == 0o664, "a group shares it on purpose"
    assert not (tmp_path / "elsewhere").exists()
