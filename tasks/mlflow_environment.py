"""Addresses and environment of MLflow, for processes that need neither MLflow nor torch to know them.

Addresses at which `posttrain ui` serves the pages of an output folder, for links to them.
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

_MLFLOW_APP_NAME = "posttrain"  # of pyproject.toml, in the group where MLflow looks for apps: tasks/tracking/server_app.py


def build_offline_environment() -> dict[str, str]:
    """Environment variables under which MLflow and its UI call nobody, fail soon, and read no pickles."""
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",  # MLflow knows the word "true" alone, Prefect any truth
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the shipper does the retrying; the default blocks for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_LOGGING_LEVEL": "WARNING",  # creating the tables of a new sqlite store is not news
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }


def build_default_uri(output: Path) -> str:
    """The sqlite store of an output folder."""
    return f"sqlite:///{output.resolve() / 'mlflow' / 'mlflow.db'}"


def build_server_options() -> tuple[str, str]:
    """Options of `mlflow server` under which it serves without MLflow's Assistant.

    Raises: SettingsError where what is installed is older than that app.
    """
    from importlib.metadata import entry_points

    if not entry_points(group="mlflow.app", name=_MLFLOW_APP_NAME):
        raise SettingsError(
            "the installed posttrain is older than this code and has no server of MLflow without the Assistant; "
            "install it again: `make setup`, or pip install with the options of the first time"
        )
    return ("--app-name", _MLFLOW_APP_NAME)


def strip_uri_password(uri: str) -> str:
    """The same address with user and password left out."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))


Page = Literal["mlflow", "prefect"]


def record_served_page(output: Path, page: Page, url: str) -> None:
    """Note that this process serves a page, as long as it lives."""
    path = _resolve_page_record_path(output, page)
    make_folder(path.parent)
    own = psutil.Process()
    write_text_unsynced(
        path, json.dumps({"url": url, "pid": own.pid, "created": own.create_time()})
    )


def find_served_page(output: Path, page: Page) -> str:
    """Address of a page whose process lives; "" = nobody serves it."""
    try:
        noted = json.loads(_resolve_page_record_path(output, page).read_text())
        if psutil.Process(int(noted["pid"])).create_time() == noted["created"]:
            return str(noted["url"])
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        pass
    return ""


def _resolve_page_record_path(output: Path, page: Page) -> Path:
    return Path(os.path.abspath(output)) / page / "page.json"
