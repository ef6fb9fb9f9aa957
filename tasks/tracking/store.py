"""The tables of a sqlite store: made aside and published whole, so that no half-made database stays.

MLflow makes them in dozens of steps, and cannot go on where a full disk or a kill ended one: "table ... exists". These
steps take seconds, so new tables are kept for each version of MLflow, and other output folders begin with a copy.

The MLflow store: its address, a client, and translated errors.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import logging
import os
import re
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import BackendError, CheckpointError, DataError, PosttrainError, SettingsError
from rl_core.storage.atomic_files import (
    make_folder,
    move_into_place,
    replace_file,
    reserve_temporary,
    resolve_cache_folder,
)
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, move_aside
from rl_core.storage.locks import FolderLock
from tasks.mlflow_environment import (
    build_default_uri,
    build_offline_environment,
    find_served_page,
    strip_uri_password,
)
from tasks.tracking.experiment_view import VIEW_KEY as VIEW_KEY
from tasks.tracking.experiment_view import (
    build_shared_views,
    build_stage_view_key,
    contains_view,
    pack_view,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient


log = logging.getLogger(__name__)

DATABASE_LOCK_SECONDS = 120.0  # for another process that makes the same database
DISK_FULL_HINT = (
    "make room or raise the file size limit (ulimit -f); `posttrain sync` then delivers what waits"
)


def ensure_database(uri: str) -> None:
    """Make a sqlite store's database where it is missing; set one aside that was half-made and holds nothing.

    Other stores, and databases of other versions that hold runs, are left as they are. MLflow is imported already.
    Raises: BackendError where the disk refuses.
    """
    if (
        not uri.startswith("sqlite:///")
        or (name := uri.removeprefix("sqlite:///")) in ("", ":memory:")
        or "?" in name
    ):
        return
    path = Path(name)
    try:
        make_folder(path.parent)
        if _is_complete_database(path):
            return
        with FolderLock(path.with_name(f".{path.name}.lock"), wait_s=DATABASE_LOCK_SECONDS):
            if not _is_complete_database(path):
                _create_database(path)
    except (OSError, sqlite3.Error, CheckpointError) as error:
        raise BackendError(
            f"{path}: the tracking database cannot be made: {error}; {DISK_FULL_HINT}"
        ) from error


def _is_complete_database(path: Path) -> bool:
    """True = it has all tables, or holds something, so that it is not ours to replace."""
    from mlflow.store.db.utils import Base

    if not path.exists() or path.stat().st_size == 0:
        return False
    with contextlib.closing(
        sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)
    ) as database:
        try:
            tables = {
                row[0]
                for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            filled = (t for t in ("runs", "registered_models", "trace_info") if t in tables)
            return set(Base.metadata.tables) <= tables or any(
                database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in filled
            )
        except sqlite3.DatabaseError as error:
            # Operational: locked, or a disk that fails, which says nothing about it. Else it is no database at all.
            return isinstance(error, sqlite3.OperationalError)


def _create_database(path: Path) -> None:
    clear_leftovers(path.parent)
    with reserve_temporary(path) as temporary:
        if not _copy_cached_tables(temporary):
            _create_tables(temporary)
            _cache_tables(temporary)
        inject_fault("store.tables")
        if path.exists():
            aside = move_aside(path, f"{path.name}.half-made")
            log.warning(
                "%s was never finished and holds nothing; set aside as %s", path, aside.name
            )
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)  # of the half-made one
        move_into_place(temporary, path)
        inject_fault("store.made")


def _create_tables(temporary: Path) -> None:
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


def _copy_cached_tables(temporary: Path) -> bool:
    """Copy the kept tables; False where there are none, or no room. Never raises."""
    kept = _find_cached_tables()
    if kept is None or not _is_valid_cache(kept):
        return False
    try:
        with replace_file(temporary, binary=True) as file:
            file.write(kept.read_bytes())
        return True
    except (OSError, PosttrainError) as error:
        log.debug("MLflow makes its own tables: %s", error)
        return False


def _cache_tables(made: Path) -> None:
    """Keep new tables, which hold no run yet, for other output folders. Never raises."""
    kept = _find_cached_tables()
    if kept is None:
        return
    try:
        make_folder(kept.parent)
        with replace_file(kept, binary=True) as file:
            file.write(made.read_bytes())
            inject_fault("store.kept")
    except (OSError, PosttrainError) as error:
        log.debug("MLflow's tables are not kept: %s", error)


def _find_cached_tables() -> Path | None:
    """File of the kept tables; None where this user has no cache."""
    try:
        return resolve_cache_folder("mlflow") / f"{version('mlflow')}.db"
    except (OSError, PosttrainError):
        return None


def _is_valid_cache(kept: Path) -> bool:
    """True = an undamaged database with all tables, the number of their migration, and no run."""
    from mlflow.store.db.utils import Base

    if not kept.is_file():
        return False
    try:
        with contextlib.closing(
            sqlite3.connect(f"{kept.absolute().as_uri()}?mode=ro", uri=True)
        ) as database:
            tables = {
                row[0]
                for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            return (
                set(Base.metadata.tables) <= tables
                and database.execute("SELECT count(*) FROM alembic_version").fetchone()[0] == 1
                and database.execute("SELECT count(*) FROM runs").fetchone()[0] == 0
                and database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            )
    except sqlite3.Error:
        return False


DEFAULT_PORT = 5000  # where `posttrain ui` serves a local store

# Codes with which MLflow says that the request, not the store, is at fault: asking again gives the same answer.
_REFUSAL_CODES = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_IMPLEMENTED",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}

# What the experiment's page shows: runs and charts before prompts and judges, and how to read them.
_IDENTITY_TAG = "posttrain.identity"  # tag of an experiment: another database at the same address has another one
_EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": """One run per pipeline, with one nested run per stage (unfold it with +).

| metrics | of |
|---|---|
| `train/` | loss, learning rate and gradient of each optimizer step |
| `eval/` | held-out episodes or rows |
| `reward/`, `policy/`, `value/`, `tool/` | rollouts and the update made from them |
| `curriculum/` | stage and mix of levels |
| `perf/`, `system/` | speed; CPU, memory, GPU |

Episodes that were played for evaluation are under Traces. Model versions are under Models; `champion` is the one that
passed the promotion gate last.
""",
}


@functools.cache
def read_user_name() -> str:
    """Name of the present user; their number in containers without a user database."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class TrackingCost:
    """Seconds that tracking took: of the callers, who wait for it, and of processor time on its own threads."""

    def __init__(self) -> None:
        self.foreground_seconds = 0.0
        self.background_seconds = 0.0
        self._lock = threading.Lock()

    def add_seconds(self, *, foreground: float = 0.0, background: float = 0.0) -> None:
        """Add seconds."""
        with self._lock:
            self.foreground_seconds += foreground
            self.background_seconds += background

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count the time within as the caller's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(foreground=time.perf_counter() - started)


class TrackingStore:
    """One MLflow tracking store and model registry, with one experiment in it. Threads may share it."""

    def __init__(self, uri: str | None, output: Path, experiment: str) -> None:
        """`uri` None: MLFLOW_TRACKING_URI where it is set, else sqlite under `output`. Nothing is opened yet."""
        self.output = output.resolve()
        self.default_uri = build_default_uri(self.output)
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or self.default_uri
        self.experiment = experiment
        self.cost = TrackingCost()
        self._lock = threading.Lock()
        self._client: MlflowClient | None = None
        self._experiment_id: str | None = None
        self._identity = ""
        self._siblings: dict[str, TrackingStore] = {experiment: self}
        self._unreachable = threading.Event()

    def select_experiment(self, experiment: str | None) -> TrackingStore:
        """The same store with another experiment; None = this one."""
        if experiment is None:
            return self
        if experiment not in self._siblings:
            other = TrackingStore(self.uri, self.output, experiment)
            other.cost = self.cost
            other._unreachable = self._unreachable
            other._siblings = self._siblings
            self._siblings[experiment] = other
        return self._siblings[experiment]

    @property
    def is_unreachable(self) -> bool:
        """True = it did not answer the last time that something was delivered; then nobody waits long for it."""
        return self._unreachable.is_set()

    @is_unreachable.setter
    def is_unreachable(self, away: bool) -> None:
        (self._unreachable.set if away else self._unreachable.clear)()

    @property
    def is_local(self) -> bool:
        """True = a database that this machine opens itself."""
        return not self.uri.startswith(("http://", "https://"))

    @property
    def label(self) -> str:
        """The store's address as it may be shown and written down."""
        return strip_uri_password(self.uri)

    def import_mlflow(self) -> None:
        """Import MLflow, and what it opens a sqlite store with; its environment is set before."""
        for name, value in build_offline_environment().items():
            os.environ.setdefault(name, value)
        import mlflow

        if self.uri.startswith("sqlite:"):
            with _skip_error_page_lexers():
                import mlflow.store.model_registry.sqlalchemy_store
                import mlflow.store.tracking.sqlalchemy_store

        for name in (
            "alembic",
            "mlflow.store.db.utils",
            "mlflow.store.model_registry.abstract_store",
        ):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db.utils").addFilter(_should_log_record)
        # the shipper says it once
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        assert mlflow

    @property
    def client(self) -> MlflowClient:
        """The client; the first use of a new sqlite store creates its tables. Raises: BackendError, SettingsError."""
        with self._lock:
            if self._client is None:
                self.import_mlflow()
                from mlflow import MlflowClient

                ensure_database(self.uri)
                try:
                    self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
                except Exception as error:
                    message = f"cannot open the tracking store {self.label}: {shorten_error(error)}"
                    kind = SettingsError if is_refusal(error) else BackendError
                    raise kind(f"{message}; check MLFLOW_TRACKING_URI or tracking.uri") from error
            return self._client

    @property
    def experiment_id(self) -> str:
        """The experiment's id; it is created, or restored where someone deleted it. Raises: BackendError."""
        if self._experiment_id is None:
            with self.translate_errors("open the experiment"):
                self._experiment_id = self._open_experiment()
        assert self._experiment_id is not None
        return self._experiment_id

    @property
    def identity(self) -> str:
        """Mark of the experiment, made with it: a database that was made anew has another. Raises: BackendError."""
        return self._identity if self.experiment_id else ""

    def _open_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            location = None
            if self.uri == self.default_uri:
                location = (self.output / "mlflow" / "artifacts").as_uri()
            mark = uuid.uuid4().hex
            try:
                made = self.client.create_experiment(
                    self.experiment,
                    artifact_location=location,
                    tags={tag: pack_view(view) for tag, view in build_shared_views().items()}
                    | {**_EXPERIMENT_TAGS, _IDENTITY_TAG: mark},
                )
                inject_fault("store.experiment")
                self._identity = mark
                return made
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                # another process was faster
                found = self.client.get_experiment_by_name(self.experiment)
                assert found is not None
        if found.lifecycle_stage == "deleted":
            log.warning(
                "experiment '%s' was deleted in %s; it is restored", self.experiment, self.label
            )
            self.client.restore_experiment(found.experiment_id)
        for tag, view in build_shared_views().items():
            # made by an earlier version, or by hand
            if not contains_view(found.tags.get(tag), view):
                self.client.set_experiment_tag(found.experiment_id, tag, pack_view(view))
        self._identity = found.tags.get(_IDENTITY_TAG, "")
        if not self._identity:
            self._identity = uuid.uuid4().hex
            self.client.set_experiment_tag(found.experiment_id, _IDENTITY_TAG, self._identity)
        return str(found.experiment_id)

    @contextmanager
    def translate_errors(self, doing: str) -> Iterator[None]:
        """Turn MLflow's errors into ours: BackendError where asking again may help, DataError where not."""
        try:
            yield
        except (BackendError, SettingsError, DataError):
            raise
        except Exception as error:
            if is_refusal(error):
                raise DataError(
                    f"{self.label} refused to {doing}: {shorten_error(error)}"
                ) from error
            if _is_programming_error(error):
                raise
            raise BackendError(f"{self.label} could not {doing}: {shorten_error(error)}") from error

    def build_ui_url(self, path: str) -> str:
        """Address of a page of the UI: on the server, or where `posttrain ui` serves a local store."""
        return f"{self._resolve_ui_address()}/#/{path}"

    def _resolve_ui_address(self) -> str:
        served = find_served_page(self.output, "mlflow") or f"http://127.0.0.1:{DEFAULT_PORT}"
        return served if self.is_local else self.label.rstrip("/")

    def convert_to_relative_links(self, markdown: str) -> str:
        """Markdown for a page of MLflow: links to its other pages follow the server that shows them."""
        return markdown.replace(f"]({self._resolve_ui_address()}/#/", "](#/")

    def build_run_url(self, run_id: str, experiment_id: str | None = None, *, tab: str = "") -> str:
        """The page of a run. `tab`: of that page, such as model-metrics, traces or artifacts/report.html."""
        # Without the workflow the page would be laid out for prompts and judges.
        page = f"experiments/{experiment_id or self.experiment_id}/runs/{run_id}{f'/{tab}' if tab else ''}"
        return self.build_ui_url(f"{page}?workflowType=machine_learning")

    def build_runs_url(self) -> str:
        """The table of the experiment's runs, with the columns that tell how they ended."""
        page = f"experiments/{self.experiment_id}/runs"
        return self.build_ui_url(
            f"{page}?viewStateShareKey={VIEW_KEY}&workflowType=machine_learning"
        )

    def build_charts_url(self, stage: str) -> str:
        """Charts of a stage's runs, the newest first, in the order of `build_experiment_view`."""
        page = f"experiments/{self.experiment_id}/runs"
        view = f"compareRunsMode=CHART&viewStateShareKey={build_stage_view_key(stage)}"
        return self.build_ui_url(f"{page}?{view}&workflowType=machine_learning")

    def build_version_url(self, name: str, version: int) -> str:
        """The page of a model version."""
        return self.build_ui_url(f"models/{name}/versions/{version}?workflowType=machine_learning")


def _should_log_record(record: logging.LogRecord) -> bool:
    """False = an error of the database that MLflow logs with its traceback and raises; `answers` says it in a line."""
    return record.exc_info is None


@contextmanager
def _skip_error_page_lexers() -> Iterator[None]:
    """Context in which Mako, which MLflow's migrations import, does without the lexers of its coloured error pages.

    Importing them takes longer than the rest of Mako and of Alembic.
    """
    name = "mako.ext.pygmentplugin"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # an ImportError, for which Mako is prepared
    try:
        yield
    finally:
        del sys.modules[name]


def is_refusal(error: Exception) -> bool:
    """True = the store understood the request and will never grant it."""
    return getattr(error, "error_code", None) in _REFUSAL_CODES


def is_missing_error(error: Exception) -> bool:
    """True = the store says that the object does not exist."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


def _is_programming_error(error: Exception) -> bool:
    # A missing artifact file or a programming fault is no reason to wait for the store.
    return isinstance(
        error, FileNotFoundError | IsADirectoryError | TypeError | AttributeError | KeyError
    )


_AUTOFLUSH = (  # before SQLAlchemy's messages, where the error came up in a query
    "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block if this flush is "
    "occurring prematurely)"
)


def shorten_error(error: Exception) -> str:
    """The first line of an error, without addresses of objects in memory and without passwords."""
    text = str(error).strip().removeprefix(_AUTOFLUSH).strip().splitlines()
    line = re.sub(r"<[^<>]* object at 0x[0-9a-f]+>", "", text[0] if text else type(error).__name__)
    line = re.sub(r"//[^/@\s]+@", "//", line)
    if "Connection refused" in line:
        return "connection refused"
    return line if len(line) <= 300 else line[:297] + "..."
