"""The MLflow store: its address, a client, translated errors, and the tables of a sqlite store.

The tables of a new sqlite store are created in a temporary file and published as a whole. MLflow creates them in dozens
of steps, and cannot continue where a full disk or a kill ended one ("table ... exists"). The steps take seconds, so new
tables are cached for each version of MLflow, and other output folders start with a copy.
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
from rl_core.json_client import exempt_loopback_from_proxies
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
    check_environment_uri,
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

DATABASE_LOCK_SECONDS = 120.0  # longest wait for another process that creates the same database
DISK_FULL_HINT = "make room or raise the file size limit (ulimit -f); `posttrain store sync` then delivers what waits"

# MLflow's error codes for a faulty request, which gets the same answer when it is repeated.
_REFUSAL_CODES = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_IMPLEMENTED",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
# SQLAlchemy puts this before its message if the error occurred in a query.
_AUTOFLUSH = (
    "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block if this flush is "
    "occurring prematurely)"
)

# tag of an experiment; differs for another database at the same address
_IDENTITY_TAG = "posttrain.identity"
# The experiment's page shows runs and charts before prompts and judges, and explains how to read them.
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


def ensure_database(uri: str) -> None:
    """Create a sqlite store's database if it is missing; move an incomplete and empty database aside.

    Other stores, and databases of other versions that hold runs, stay unchanged. MLflow must be imported already.
    Raises: BackendError if the disk refuses.
    """
    name = uri.removeprefix("sqlite:///")
    if name == uri or name in ("", ":memory:") or "?" in name:
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
            f"{path}: the tracking database cannot be created: {error}; {DISK_FULL_HINT}"
        ) from error


def _is_complete_database(path: Path) -> bool:
    """Return whether the database has all tables, or holds data and must not be replaced."""
    from mlflow.store.db.utils import Base

    if not path.exists() or path.stat().st_size == 0:
        return False
    address = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=10.0)) as database:
        try:
            tables = _list_tables(database)
            if set(Base.metadata.tables) <= tables:
                return True
            return any(
                database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()
                for table in ("runs", "registered_models", "trace_info")
                if table in tables
            )
        except sqlite3.DatabaseError as error:
            # An OperationalError (locked, failing disk) says nothing about the contents. Others: no database at all.
            return isinstance(error, sqlite3.OperationalError)


def _list_tables(database: sqlite3.Connection) -> set[str]:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {row[0] for row in rows}


def _create_database(path: Path) -> None:
    clear_leftovers(path.parent)
    with reserve_temporary(path) as temporary:
        if not _copy_cached_tables(temporary):
            _create_tables(temporary)
            _cache_tables(temporary)
        if not path.parent.stat().st_mode & 0o077:  # a folder that only this user may open
            temporary.chmod(0o600)
        inject_fault("store.tables")
        if path.exists():
            aside = move_aside(path, f"{path.name}.half-made")
            log.warning("%s is incomplete and empty; moved to %s", path, aside.name)
        # A journal left behind belongs to the incomplete database.
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
        move_into_place(temporary, path)
        inject_fault("store.made")


def _create_tables(temporary: Path) -> None:
    """Create a database with all tables. Delete it if that fails."""
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    engine = create_engine(f"sqlite:///{temporary}")
    try:
        _initialize_tables(engine)
    except SQLAlchemyError as error:
        for file in (temporary, temporary.with_name(f"{temporary.name}-journal")):
            file.unlink(missing_ok=True)
        raise sqlite3.OperationalError(str(getattr(error, "orig", None) or error)) from error
    finally:
        engine.dispose()


def _copy_cached_tables(temporary: Path) -> bool:
    """Copy the cached tables. Return False if there are none, or no room. Never raises."""
    cached = _find_cached_tables()
    if cached is None or not _is_valid_cache(cached):
        return False
    try:
        with replace_file(temporary, binary=True) as file:
            file.write(cached.read_bytes())
        return True
    except (OSError, PosttrainError) as error:
        log.debug("MLflow's tables are created from scratch: %s", error)
        return False


def _cache_tables(database: Path) -> None:
    """Cache new tables, which hold no run yet, for other output folders. Never raises."""
    cached = _find_cached_tables()
    if cached is None:
        return
    try:
        make_folder(cached.parent)
        with replace_file(cached, binary=True) as file:
            file.write(database.read_bytes())
            inject_fault("store.kept")
    except (OSError, PosttrainError) as error:
        log.debug("MLflow's tables are not cached: %s", error)


def _find_cached_tables() -> Path | None:
    """Return the file of the cached tables; None if this user has no cache."""
    try:
        return resolve_cache_folder("mlflow") / f"{version('mlflow')}.db"
    except (OSError, PosttrainError):
        return None


def _is_valid_cache(cached: Path) -> bool:
    """Return whether this is an undamaged database with all tables, its migration number, and no run."""
    from mlflow.store.db.utils import Base

    if not cached.is_file():
        return False
    address = f"{cached.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            return (
                set(Base.metadata.tables) <= _list_tables(database)
                and database.execute("SELECT count(*) FROM alembic_version").fetchone()[0] == 1
                and database.execute("SELECT count(*) FROM runs").fetchone()[0] == 0
                and database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            )
    except sqlite3.Error:
        return False


@functools.cache
def read_user_name() -> str:
    """Return the current user's name, or their number in containers without a user database."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class TrackingCost:
    """Seconds that tracking took: waiting time of the callers, and processor time of its threads."""

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
        """Count the duration of the block as the caller's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(foreground=time.perf_counter() - started)


class TrackingStore:
    """MLflow tracking store and model registry, with one experiment in it. Thread-safe."""

    def __init__(self, uri: str | None, output: Path, experiment: str) -> None:
        """Choose the store without opening it.

        `uri` None: MLFLOW_TRACKING_URI if it is set, else sqlite under `output`. Raises: SettingsError.
        """
        self.output = output.resolve()
        self.default_uri = build_default_uri(self.output)
        if uri is None:
            check_environment_uri()
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
        """Return the same store with another experiment; None = this one."""
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
        """True if the store did not answer the last delivery. Nobody waits long for an unreachable store."""
        return self._unreachable.is_set()

    @is_unreachable.setter
    def is_unreachable(self, value: bool) -> None:
        if value:
            self._unreachable.set()
        else:
            self._unreachable.clear()

    @property
    def is_local(self) -> bool:
        """True if the store is a database that this machine opens itself."""
        return not self.uri.startswith(("http://", "https://"))

    @property
    def label(self) -> str:
        """The store's address without its password, for messages and records."""
        return strip_uri_password(self.uri)

    def import_mlflow(self) -> None:
        """Import MLflow, and its modules for sqlite stores, after setting its environment."""
        exempt_loopback_from_proxies()
        for name, value in build_offline_environment().items():
            os.environ.setdefault(name, value)
        if os.environ.get("MLFLOW_TRACKING_URI") == self.default_uri:
            # For a user's own calls of MLflow in this process: the store's experiment Default is deleted.
            os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", self.experiment)
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
        # The shipper reports an outage once.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        assert mlflow

    @property
    def client(self) -> MlflowClient:
        """The client. The first use of a new sqlite store creates its tables. Raises: BackendError, SettingsError."""
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
        """Id of the experiment, which is created if missing and restored if deleted. Raises: BackendError."""
        if self._experiment_id is None:
            with self.translate_errors("open the experiment"):
                self._experiment_id = self._open_experiment()
        assert self._experiment_id is not None
        return self._experiment_id

    @property
    def identity(self) -> str:
        """Mark of the experiment, created with it; a recreated database has a different one. Raises: BackendError."""
        return self._identity if self.experiment_id else ""

    def _open_experiment(self) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            created = self._create_experiment()
            if created is not None:
                return created
            experiment = self.client.get_experiment_by_name(self.experiment)
            assert experiment is not None
        experiment_id = str(experiment.experiment_id)
        if experiment.lifecycle_stage == "deleted":
            log.warning(
                "experiment '%s' was deleted in %s; it is restored", self.experiment, self.label
            )
            self.client.restore_experiment(experiment_id)
        for tag, view in build_shared_views().items():
            # The view may be missing or come from an earlier version.
            if not contains_view(experiment.tags.get(tag), view):
                self.client.set_experiment_tag(experiment_id, tag, pack_view(view))
        self._identity = experiment.tags.get(_IDENTITY_TAG, "")
        if not self._identity:
            self._identity = uuid.uuid4().hex
            self.client.set_experiment_tag(experiment_id, _IDENTITY_TAG, self._identity)
        return experiment_id

    def _create_experiment(self) -> str | None:
        """Create the experiment; return its id, or None if another process was faster."""
        from mlflow.exceptions import MlflowException

        location = None
        if self.uri == self.default_uri:
            location = (self.output / "mlflow" / "artifacts").as_uri()
        identity = uuid.uuid4().hex
        tags = {tag: pack_view(view) for tag, view in build_shared_views().items()}
        tags |= {**_EXPERIMENT_TAGS, _IDENTITY_TAG: identity}
        try:
            created = self.client.create_experiment(
                self.experiment, artifact_location=location, tags=tags
            )
            inject_fault("store.experiment")
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return None
        self._identity = identity
        if self.uri == self.default_uri:
            self._delete_empty_default()
        return str(created)

    def _delete_empty_default(self) -> None:
        """Delete the experiment Default, which MLflow creates in every store, so that pages do not list it empty."""
        default = self.client.get_experiment_by_name("Default")
        if (
            default is None
            or default.lifecycle_stage == "deleted"
            or default.name == self.experiment
        ):
            return
        if not self.client.search_runs([default.experiment_id], max_results=1):
            self.client.delete_experiment(default.experiment_id)

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Translate MLflow's errors: BackendError if a retry may help, otherwise DataError."""
        try:
            yield
        except (BackendError, SettingsError, DataError):
            raise
        except Exception as error:
            if is_refusal(error):
                raise DataError(
                    f"{self.label} refused to {action}: {shorten_error(error)}"
                ) from error
            if _is_programming_error(error):
                raise
            raise BackendError(
                f"{self.label} could not {action}: {shorten_error(error)}"
            ) from error

    def resolve_link(self, link: str) -> str:
        """Return the address of a page of MLflow; "" while nobody serves the pages of a local store.

        Args:
            link: one of `build_run_link` and so on, relative to MLflow's address.
        """
        address = find_served_page(self.output, "mlflow") if self.is_local else self.label
        return f"{address.rstrip('/')}/{link}" if address else ""

    def resolve_links(self, markdown: str) -> str:
        """Make links between MLflow's pages absolute; keep only their words while nobody serves the pages."""
        if address := self.resolve_link(""):
            return markdown.replace("](#/", f"]({address}#/")
        return re.sub(r"(?<!!)\[([^\]]*)\]\(#/[^)]*\)", r"\1", markdown)

    def build_run_link(
        self, run_id: str, experiment_id: str | None = None, *, tab: str = ""
    ) -> str:
        """Return the link to a run's page, relative, so that it follows the server that shows it.

        Args:
            tab: such as model-metrics, traces or artifacts/report.html.
        """
        page = f"#/experiments/{experiment_id or self.experiment_id}/runs/{run_id}"
        if tab:
            page += f"/{tab}"
        # Without the workflow type the page would be laid out for prompts and judges.
        return f"{page}?workflowType=machine_learning"

    def build_runs_link(self) -> str:
        """Return the link to the table of the experiment's runs, with the columns about their results."""
        page = f"#/experiments/{self.experiment_id}/runs"
        return f"{page}?viewStateShareKey={VIEW_KEY}&workflowType=machine_learning"

    def build_charts_link(self, stage: str) -> str:
        """Return the link to the charts of a stage's runs, newest first, in the order of `build_experiment_view`."""
        page = f"#/experiments/{self.experiment_id}/runs"
        view = f"compareRunsMode=CHART&viewStateShareKey={build_stage_view_key(stage)}"
        return f"{page}?{view}&workflowType=machine_learning"

    def build_version_link(self, name: str, version: int) -> str:
        """Return the link to the page of a model version."""
        return f"#/models/{name}/versions/{version}?workflowType=machine_learning"


def _should_log_record(record: logging.LogRecord) -> bool:
    """Return False for database errors that MLflow logs with a traceback: it raises them as well."""
    return record.exc_info is None


@contextmanager
def _skip_error_page_lexers() -> Iterator[None]:
    """Import Mako, which MLflow's migrations need, without the lexers of its coloured error pages.

    Importing the lexers takes longer than the rest of Mako and of Alembic.
    """
    name = "mako.ext.pygmentplugin"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # causes an ImportError, which Mako handles
    try:
        yield
    finally:
        del sys.modules[name]


def is_refusal(error: Exception) -> bool:
    """Return whether the store understood the request and will never grant it."""
    return getattr(error, "error_code", None) in _REFUSAL_CODES


def is_missing_error(error: Exception) -> bool:
    """Return whether the store reports that the object does not exist."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


def _is_programming_error(error: Exception) -> bool:
    # Waiting for the store does not fix a missing artifact file or a programming error.
    return isinstance(
        error, FileNotFoundError | IsADirectoryError | TypeError | AttributeError | KeyError
    )


def shorten_error(error: Exception) -> str:
    """Return the first line of an error, without memory addresses and passwords."""
    text = str(error).strip().removeprefix(_AUTOFLUSH).strip().splitlines()
    line = re.sub(r"<[^<>]* object at 0x[0-9a-f]+>", "", text[0] if text else type(error).__name__)
    line = re.sub(r"//[^/@\s]+@", "//", line)
    if "Connection refused" in line:
        return "connection refused"
    return line if len(line) <= 300 else line[:297] + "..."
