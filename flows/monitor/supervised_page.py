"""The live page among the servers of `posttrain up --monitor`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from flows.monitor.server import HOST, PORT
from flows.operations.services import ROOT, ServiceSpec, ask, base_environment
from flows.runtime.prefect_access import own_path
from rl_core.errors import SettingsError

__all__ = ["page_port", "supervised_page"]


def page_port(wanted: int | None) -> int:
    """Port of the page; None = the usual one. Raises: SettingsError where Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise SettingsError("--monitor: the live page needs Gradio: pip install 'posttrain[monitor]'")
    return wanted or PORT


def supervised_page(port: int, output: Path, mlflow: str) -> list[ServiceSpec]:
    """The page on exactly this port. `mlflow` is not used: the page reads files."""
    url = f"http://{HOST}:{port}"
    environment = base_environment(output, "monitor")
    environment["PYTHONPATH"] = own_path(environment)  # this posttrain, even if another version is installed
    command = (sys.executable, "-m", "flows.cli.main", "monitor", "--output", str(output), "--port", str(port))

    def works() -> bool:
        try:
            return bool(ask(f"{url}/healthz") == "ok")
        except (OSError, ValueError):
            return False

    return [ServiceSpec("monitor", command, environment, ROOT, url, works, "--monitor-port", port)]
