"""The MLflow store: its address, a client, and translated errors."""

from __future__ import annotations

import functools
import getpass
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import BackendError, DataError, SettingsError
from rl_core.storage.faults import fault
from tasks.mlflow_environment import default_uri, offline_environment, without_password
from tasks.tracking.database import ensure_database
from tasks.tracking.experiment_view import KEY as VIEW_KEY
from tasks.tracking.experiment_view import packed_view, shared_views, shows_view, stage_key
from tasks.tracking.served_pages import served_page

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = [
    "DEFAULT_PORT",
    "Cost",
    "Store",
    "default_uri",
    "missing",
    "offline_environment",
    "refused",
    "short",
    "user_name",
    "without_password",
]

log = logging.getLogger(__name__)

DEFAULT_PORT = 5000  # where `posttrain ui` serves a local store

# Codes with which MLflow says that the request, not the store, is at fault: asking again gives the same answer.
_REFUSED = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "NOT_IMPLEMENTED",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}

# What the experiment's page shows: runs and charts before prompts and judges, and how to read them.
_IDENTITY = "posttrain.identity"  # tag of an experiment: another database at the same address has another one
_EXPERIMENT = {
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
def user_name() -> str:
    """Name of the present user; their number in containers without a user database."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class Cost:
    """Seconds that tracking took: of the callers, who wait for it, and of processor time on its own threads."""

    def __init__(self) -> None:
        self.foreground_seconds = 0.0
        self.background_seconds = 0.0
        self._lock = threading.Lock()

    def add(self, *, foreground: float = 0.0, background: float = 0.0) -> None:
        """Add seconds."""
        with self._lock:
            self.foreground_seconds += foreground
            self.background_seconds += background

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as the caller's."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(foreground=time.perf_counter() - started)


class Store:
    """One MLflow tracking store and model registry, with one experiment in it. Threads may share it."""

    def __init__(self, uri: str | None, output: Path, experiment: str) -> None:
        """`uri` None: MLFLOW_TRACKING_URI where it is set, else sqlite under `output`. Nothing is opened yet."""
        self.output = output.resolve()
        self.default_uri = default_uri(self.output)
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or self.default_uri
        self.experiment = experiment
        self.cost = Cost()
        self._lock = threading.Lock()
        self._client: MlflowClient | None = None
        self._experiment_id: str | None = None
        self._identity = ""
        self._siblings: dict[str, Store] = {experiment: self}
        self._away = threading.Event()

    def of_experiment(self, experiment: str | None) -> Store:
        """The same store with another experiment; None = this one."""
        if experiment is None:
            return self
        if experiment not in self._siblings:
            other = Store(self.uri, self.output, experiment)
            other.cost, other._away, other._siblings = self.cost, self._away, self._siblings
            self._siblings[experiment] = other
        return self._siblings[experiment]

    @property
    def is_away(self) -> bool:
        """True = it did not answer the last time that something was delivered; then nobody waits long for it."""
        return self._away.is_set()

    @is_away.setter
    def is_away(self, away: bool) -> None:
        (self._away.set if away else self._away.clear)()

    @property
    def is_local(self) -> bool:
        """True = a database that this machine opens itself."""
        return not self.uri.startswith(("http://", "https://"))

    @property
    def label(self) -> str:
        """The store's address as it may be shown and written down."""
        return without_password(self.uri)

    def load(self) -> None:
        """Import MLflow, and what it opens a sqlite store with; its environment is set before."""
        for name, value in offline_environment().items():
            os.environ.setdefault(name, value)
        import mlflow

        if self.uri.startswith("sqlite:"):
            with _plain_error_pages():
                import mlflow.store.model_registry.sqlalchemy_store
                import mlflow.store.tracking.sqlalchemy_store

        for name in ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db.utils").addFilter(_is_not_raised)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the shipper says it once
        assert mlflow

    @property
    def client(self) -> MlflowClient:
        """The client; the first use of a new sqlite store creates its tables. Raises: BackendError, SettingsError."""
        with self._lock:
            if self._client is None:
                self.load()
                from mlflow import MlflowClient

                ensure_database(self.uri)
                try:
                    self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
                except Exception as error:
                    message = f"cannot open the tracking store {self.label}: {short(error)}"
                    kind = SettingsError if refused(error) else BackendError
                    raise kind(f"{message}; check MLFLOW_TRACKING_URI or tracking.uri") from error
            return self._client

    @property
    def experiment_id(self) -> str:
        """The experiment's id; it is created, or restored where someone deleted it. Raises: BackendError."""
        if self._experiment_id is None:
            with self.answers("open the experiment"):
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
                    tags={tag: packed_view(view) for tag, view in shared_views().items()}
                    | {**_EXPERIMENT, _IDENTITY: mark},
                )
                fault("store.experiment")
                self._identity = mark
                return made
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(self.experiment)  # another process was faster
                assert found is not None
        if found.lifecycle_stage == "deleted":
            log.warning("experiment '%s' was deleted in %s; it is restored", self.experiment, self.label)
            self.client.restore_experiment(found.experiment_id)
        for tag, view in shared_views().items():
            if not shows_view(found.tags.get(tag), view):  # made by an earlier version, or by hand
                self.client.set_experiment_tag(found.experiment_id, tag, packed_view(view))
        self._identity = found.tags.get(_IDENTITY, "")
        if not self._identity:
            self._identity = uuid.uuid4().hex
            self.client.set_experiment_tag(found.experiment_id, _IDENTITY, self._identity)
        return str(found.experiment_id)

    @contextmanager
    def answers(self, doing: str) -> Iterator[None]:
        """Turn MLflow's errors into ours: BackendError where asking again may help, DataError where not."""
        try:
            yield
        except (BackendError, SettingsError, DataError):
            raise
        except Exception as error:
            if refused(error):
                raise DataError(f"{self.label} refused to {doing}: {short(error)}") from error
            if _is_ours(error):
                raise
            raise BackendError(f"{self.label} could not {doing}: {short(error)}") from error

    def ui_url(self, path: str) -> str:
        """Address of a page of the UI: on the server, or where `posttrain ui` serves a local store."""
        return f"{self._ui()}/#/{path}"

    def _ui(self) -> str:
        served = served_page(self.output, "mlflow") or f"http://127.0.0.1:{DEFAULT_PORT}"
        return served if self.is_local else self.label.rstrip("/")

    def as_own_page(self, markdown: str) -> str:
        """Markdown for a page of MLflow: links to its other pages follow the server that shows them."""
        return markdown.replace(f"]({self._ui()}/#/", "](#/")

    def run_url(self, run_id: str, experiment_id: str | None = None, *, tab: str = "") -> str:
        """The page of a run. `tab`: of that page, such as model-metrics, traces or artifacts/report.html."""
        # Without the workflow the page would be laid out for prompts and judges.
        page = f"experiments/{experiment_id or self.experiment_id}/runs/{run_id}{f'/{tab}' if tab else ''}"
        return self.ui_url(f"{page}?workflowType=machine_learning")

    def runs_url(self) -> str:
        """The table of the experiment's runs, with the columns that tell how they ended."""
        page = f"experiments/{self.experiment_id}/runs"
        return self.ui_url(f"{page}?viewStateShareKey={VIEW_KEY}&workflowType=machine_learning")

    def charts_url(self, stage: str) -> str:
        """Charts of a stage's runs, the newest first, in the order of `experiment_view`."""
        page = f"experiments/{self.experiment_id}/runs"
        view = f"compareRunsMode=CHART&viewStateShareKey={stage_key(stage)}"
        return self.ui_url(f"{page}?{view}&workflowType=machine_learning")

    def version_url(self, name: str, version: int) -> str:
        """The page of a model version."""
        return self.ui_url(f"models/{name}/versions/{version}?workflowType=machine_learning")


def _is_not_raised(record: logging.LogRecord) -> bool:
    """False = an error of the database that MLflow logs with its traceback and raises; `answers` says it in a line."""
    return record.exc_info is None


@contextmanager
def _plain_error_pages() -> Iterator[None]:
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


def refused(error: Exception) -> bool:
    """True = the store understood the request and will never grant it."""
    return getattr(error, "error_code", None) in _REFUSED


def missing(error: Exception) -> bool:
    """True = the store says that the object does not exist."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


def _is_ours(error: Exception) -> bool:
    # A missing artifact file or a programming fault is no reason to wait for the store.
    return isinstance(error, FileNotFoundError | IsADirectoryError | TypeError | AttributeError | KeyError)


_AUTOFLUSH = (  # before SQLAlchemy's messages, where the error came up in a query
    "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block if this flush is "
    "occurring prematurely)"
)


def short(error: Exception) -> str:
    """The first line of an error, without addresses of objects in memory and without passwords."""
    text = str(error).strip().removeprefix(_AUTOFLUSH).strip().splitlines()
    line = re.sub(r"<[^<>]* object at 0x[0-9a-f]+>", "", text[0] if text else type(error).__name__)
    line = re.sub(r"//[^/@\s]+@", "//", line)
    if "Connection refused" in line:
        return "connection refused"
    return line if len(line) <= 300 else line[:297] + "..."
