"""Addresses and environment variables of MLflow, for processes that load neither MLflow nor torch.

Also the addresses at which `posttrain ui` serves the pages of an output folder, for links to them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import psutil

from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, write_text_unsynced
from tasks.command_hints import INSTALL_COMMAND

# Entry point of tasks/tracking/server_app.py in pyproject.toml, in the group where MLflow looks for apps.
_MLFLOW_APP_NAME = "posttrain"

URI_VARIABLE = "MLFLOW_TRACKING_URI"
STORE_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_FILE_SCHEMES = ("", "file")  # folders, which MLflow reads from the variable, but settings refuse

Page = Literal["live", "mlflow", "prefect"]


def build_offline_environment() -> dict[str, str]:
    """Build the environment variables under which MLflow and its UI contact nobody, fail fast, and read no pickles."""
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",  # MLflow accepts only the word "true", Prefect any true value
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # delivery retries by itself; the default blocks for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_LOGGING_LEVEL": "WARNING",  # creating the tables of a new sqlite store is not news
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }


def build_default_uri(output: Path) -> str:
    """Build the URI of an output folder's sqlite store."""
    return f"sqlite:///{output.resolve() / 'mlflow' / 'mlflow.db'}"


def build_server_options() -> tuple[str, str]:
    """Build the options of `mlflow server` that switch off MLflow's Assistant.

    Raises: SettingsError if the installed package is older than the app.
    """
    from importlib.metadata import entry_points

    if not entry_points(group="mlflow.app", name=_MLFLOW_APP_NAME):
        raise SettingsError(
            "the installed posttrain is older than this code and has no MLflow server without the Assistant; "
            f"install it again: {INSTALL_COMMAND}"
        )
    return ("--app-name", _MLFLOW_APP_NAME)


def check_environment_uri() -> None:
    """Refuse a MLFLOW_TRACKING_URI that no store of MLflow serves. Raises: SettingsError."""
    from importlib.metadata import entry_points

    uri = os.environ.get(URI_VARIABLE, "")
    try:
        scheme = urlsplit(uri).scheme.split("+")[0]
    except ValueError as error:
        raise SettingsError(f"{URI_VARIABLE}: {uri!r} is not an address: {error}") from None
    if scheme in (*STORE_SCHEMES, *_FILE_SCHEMES):
        return
    if not entry_points(group="mlflow.tracking_store", name=scheme):
        raise SettingsError(
            f"{URI_VARIABLE}: {strip_uri_password(uri)!r} is not a store that MLflow accepts; set it to "
            "http://host:port, sqlite:///absolute/path.db or postgresql://..., or unset it for a sqlite file in the "
            "output folder"
        )


def strip_uri_password(uri: str) -> str:
    """Return the same address without user and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))


def record_served_page(output: Path, page: Page, url: str) -> None:
    """Record that this process serves a page, for as long as the process lives."""
    path = _resolve_page_record_path(output, page)
    make_folder(path.parent)
    process = psutil.Process()
    write_text_unsynced(
        path, json.dumps({"url": url, "pid": process.pid, "created": process.create_time()})
    )


def find_served_page(output: Path, page: Page) -> str:
    """Find the address of a page whose process lives; "" = nobody serves it."""
    try:
        record = json.loads(_resolve_page_record_path(output, page).read_text())
        if psutil.Process(int(record["pid"])).create_time() == record["created"]:
            return str(record["url"])
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        pass
    return ""


def _resolve_page_record_path(output: Path, page: Page) -> Path:
    if page == "live":  # which has no folder for its data
        return Path(os.path.abspath(output)) / "logs" / "live-page.json"
    return Path(os.path.abspath(output)) / page / "page.json"
