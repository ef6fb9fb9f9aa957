"""Addresses and environment of MLflow, for processes that need neither MLflow nor torch to know them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rl_core.errors import SettingsError

__all__ = ["default_uri", "offline_environment", "server_options", "without_password"]

_APP = "posttrain"  # of pyproject.toml, in the group where MLflow looks for apps: tasks/tracking/server_app.py


def offline_environment() -> dict[str, str]:
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


def default_uri(output: Path) -> str:
    """The sqlite store of an output folder."""
    return f"sqlite:///{output.resolve() / 'mlflow' / 'mlflow.db'}"


def server_options() -> tuple[str, str]:
    """Options of `mlflow server` under which it serves without MLflow's Assistant.

    Raises: SettingsError where what is installed is older than that app.
    """
    from importlib.metadata import entry_points

    if not entry_points(group="mlflow.app", name=_APP):
        raise SettingsError(
            "the installed posttrain is older than this code and has no server of MLflow without the Assistant; "
            "install it again: `make setup`, or pip install with the options of the first time"
        )
    return ("--app-name", _APP)


def without_password(uri: str) -> str:
    """The same address with user and password left out."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
