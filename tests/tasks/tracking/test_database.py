"""Tables of a sqlite store: created completely or not at all."""

from __future__ import annotations

import contextlib
import logging
import resource
import sqlite3
import sys

import pytest

from rl_core.errors import BackendError
from tasks.tracking import Tracking, store
from tasks.tracking.store import ensure_database


def list_tables(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        return {
            row[0]
            for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }


@pytest.fixture
def file_size_limit(monkeypatch):
    # Python would keep compiled modules that were truncated by the limit
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit_leaves_no_partial_database(tmp_path, file_size_limit):
    tracking = Tracking(None, tmp_path, "e")
    tracking.store.import_mlflow()
    file_size_limit(100_000)
    with pytest.raises(
        BackendError, match=r"mlflow\.db: the tracking database cannot be created: .*ulimit -f"
    ):
        _ = tracking.store.client
    file_size_limit(resource.RLIM_INFINITY)
    assert [path.name for path in (tmp_path / "mlflow").iterdir()] == [".mlflow.db.lock"]
    assert tracking.experiment_id  # the same store works once there is room


def test_a_database_that_cannot_grow_is_reported_in_one_line(tmp_path, file_size_limit, caplog):
    """On a full disk MLflow logged a traceback for each failed write, thousands of lines."""
    store = Tracking(None, tmp_path, "e").store
    client, experiment = store.client, store.experiment_id
    logging.getLogger("mlflow.store.db.utils").addHandler(caplog.handler)
    file_size_limit((tmp_path / "mlflow/mlflow.db").stat().st_size + 4096)
    with (
        pytest.raises(
            BackendError,
            match=r"mlflow\.db could not make runs: \(sqlite3\.OperationalError\) d[^\n]*\Z",
        ),
        store.translate_errors("make runs"),
    ):
        for number in range(1000):
            client.create_run(experiment, tags={"filler": "x" * 5000}, run_name=f"run {number}")
    file_size_limit(resource.RLIM_INFINITY)
    logging.getLogger("mlflow.store.db.utils").removeHandler(caplog.handler)
    assert caplog.records == []
    assert client.create_run(experiment).info.status == "RUNNING"


def test_an_incomplete_database_is_moved_aside(tmp_path, caplog):
    """MLflow leaves such a database if it cannot create all tables; every later start failed with "table ...

    already exists".
    """
    Tracking(None, tmp_path).store.import_mlflow()
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(
            "CREATE TABLE runs (run_uuid TEXT); CREATE TABLE datasets (dataset_uuid TEXT);"
        )
    ensure_database(f"sqlite:///{path}")
    assert {"alembic_version", "model_versions", "trace_info"} <= list_tables(path)
    aside = next(tmp_path.glob("mlflow.db.half-made-*"))
    assert list_tables(aside) == {"runs", "datasets"} and "incomplete and empty" in caplog.text

    with contextlib.closing(sqlite3.connect(aside)) as database:
        database.executescript("INSERT INTO runs VALUES ('r')")
    ensure_database(f"sqlite:///{aside}")  # it holds a run: not ours to replace
    assert (
        list_tables(aside) == {"runs", "datasets"} and len(list(tmp_path.glob("*half-made*"))) == 1
    )


@pytest.fixture(scope="module")
def new_tables(tmp_path_factory):
    """Create MLflow's tables once for all tests, because it takes seconds."""
    path = tmp_path_factory.mktemp("tables") / "mlflow.db"
    Tracking(None, path.parent).store.import_mlflow()
    store._create_tables(path)
    return path.read_bytes()


@pytest.fixture
def filled(monkeypatch, tmp_path, new_tables):
    """Record the databases whose tables were not copied, in order of creation; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    created = []

    def fill(path):
        created.append(path)
        path.write_bytes(new_tables)

    monkeypatch.setattr(store, "_create_tables", fill)
    return created


def test_a_second_folder_begins_with_the_tables_of_the_first_and_none_of_its_runs(tmp_path, filled):
    first, second = (Tracking(None, tmp_path / name, "zebra") for name in ("one", "two"))
    assert first.experiment_id and len(filled) == 1
    (cached,) = (tmp_path / "cache/posttrain/mlflow").iterdir()
    assert b"zebra" not in cached.read_bytes() and list_tables(cached) == list_tables(
        tmp_path / "one/mlflow/mlflow.db"
    )
    assert second.experiment_id and len(filled) == 1
    run = second.start_run("r", tmp_path / "run", interval_s=0.05)
    run.log_metrics({"train/loss": 1.0}, 0)
    run.close("FINISHED")
    (row,) = second.list_runs()
    assert row.metrics["train/loss"] == 1.0 and first.list_runs() == []


@pytest.mark.parametrize("damage", [b"", b"no database at all", None])
def test_damaged_cached_tables_are_ignored_and_recreated(tmp_path, filled, damage):
    ensure_database(f"sqlite:///{tmp_path / 'one.db'}")
    (cached,) = (tmp_path / "cache/posttrain/mlflow").iterdir()
    intact = cached.read_bytes()
    middle = len(intact) // 2
    cached.write_bytes(
        damage if damage is not None else intact[:middle] + bytes(8192) + intact[middle + 8192 :]
    )
    ensure_database(f"sqlite:///{tmp_path / 'two.db'}")
    assert len(filled) == 2 and list_tables(tmp_path / "two.db") == list_tables(tmp_path / "one.db")
    assert cached.read_bytes() == (tmp_path / "two.db").read_bytes()


def test_a_user_without_a_cache_creates_tables(tmp_path, filled, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for name in ("one.db", "two.db"):
        ensure_database(f"sqlite:///{tmp_path / name}")
        assert "runs" in list_tables(tmp_path / name)
    assert len(filled) == 2


def test_a_new_store_lists_no_empty_default_experiment(tmp_path):
    tracking = Tracking(None, tmp_path / "own")
    assert tracking.experiment_id
    assert [experiment.name for experiment in tracking.store.client.search_experiments()] == [
        "posttrain"
    ]


@pytest.mark.parametrize("is_used", [True, False])
def test_an_experiment_default_that_somebody_uses_stays(tmp_path, is_used):
    store = Tracking(None, tmp_path / "own", "Default" if not is_used else "posttrain").store
    if is_used:
        store.client.create_run("0")
    assert store.experiment_id
    assert "Default" in [experiment.name for experiment in store.client.search_experiments()]


def test_the_newest_table_of_runs_is_that_of_the_pipeline_that_ran_last(tmp_path, monkeypatch):
    monkeypatch.setattr(store.TrackingStore, "resolve_link", lambda self, link: f"page/{link}")
    tracking = Tracking(None, tmp_path / "own", "first")
    assert tracking.find_newest_runs_url() == ""
    links = []
    for name in ("first", "second", "first"):
        selected = tracking.store.select_experiment(name)
        selected.client.create_run(selected.experiment_id, start_time=1000 + len(links))
        links.append(f"page/{selected.build_runs_link()}")
        assert tracking.find_newest_runs_url() == links[-1]
    assert links[0] == links[2] != links[1]
    foreign = tracking.store.client.create_experiment("somebody else's")
    tracking.store.client.create_run(foreign, start_time=5000)
    assert tracking.find_newest_runs_url() == links[-1]
