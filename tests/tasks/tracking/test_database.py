"""A sqlite store's tables: made whole or not at all."""

from __future__ import annotations

import contextlib
import resource
import sqlite3

import pytest

from rl_core.errors import BackendError
from tasks.tracking import Tracking
from tasks.tracking.database import ensure_database


def tables(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        return {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


@pytest.fixture
def file_size_limit():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit_leaves_no_half_made_database(tmp_path, file_size_limit):
    tracking = Tracking(None, tmp_path, "e")
    tracking.store.load()
    file_size_limit(100_000)
    with pytest.raises(BackendError, match=r"mlflow\.db: the tracking database cannot be made: .*ulimit -f"):
        _ = tracking.store.client
    file_size_limit(resource.RLIM_INFINITY)
    assert [path.name for path in (tmp_path / "mlflow").iterdir()] == [".mlflow.db.lock"]
    assert tracking.experiment_id  # the same store works once there is room


def test_what_was_half_made_before_is_set_aside(tmp_path, caplog):
    """As MLflow leaves it when its tables cannot all be made: every later start ended in "table ... already exists"."""
    Tracking(None, tmp_path).store.load()
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE runs (run_uuid TEXT); CREATE TABLE datasets (dataset_uuid TEXT);")
    ensure_database(f"sqlite:///{path}")
    assert {"alembic_version", "model_versions", "trace_info"} <= tables(path)
    aside = next(tmp_path.glob("mlflow.db.half-made-*"))
    assert tables(aside) == {"runs", "datasets"} and "never finished" in caplog.text

    with contextlib.closing(sqlite3.connect(aside)) as database:
        database.executescript("INSERT INTO runs VALUES ('r')")
    ensure_database(f"sqlite:///{aside}")  # it holds a run: not ours to replace
    assert tables(aside) == {"runs", "datasets"} and len(list(tmp_path.glob("*half-made*"))) == 1
