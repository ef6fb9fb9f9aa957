"""Addresses and environment of MLflow, for processes that need neither MLflow nor torch to know them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

__all__ = ["default_uri", "offline_environment", "without_password"]


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


def without_password(uri: str) -> str:
    """The same address with user and password left out."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
