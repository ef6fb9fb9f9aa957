"""Prefect's settings for a run: where its database is, how it starts without a server, what it prints.

Imported before Prefect itself. Whatever the user has set stays.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from unittest.mock import patch

__all__ = ["PREFECT_PORT", "prefect_environment", "prepare_prefect", "start_embedded_server"]

PREFECT_PORT = 4200  # where `posttrain ui` serves the page


def prefect_environment(output: Path | None = None) -> dict[str, str]:
    """Environment variables under which Prefect works beside this project without a server of its own.

    Args:
        output: the output folder, which then also holds Prefect's database; None leaves the user's own place.
    """
    values = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        # The first start of the embedded server makes its database; 20 s, the default, is tight on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rl_core,tasks,flows",
        # The terminal shows our own progress and errors (flows/display.py); the Prefect UI has the log in full.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    }
    if output is not None and not {"PREFECT_API_URL", "PREFECT_PROFILE"} & os.environ.keys():
        values["PREFECT_HOME"] = str(output.resolve() / "prefect")
    return values


def prepare_prefect(output: Path | None = None) -> None:
    """Set them, where the user has not. Has no effect on a Prefect that was imported before."""
    for name, value in prefect_environment(output).items():
        os.environ.setdefault(name, value)
    if output is not None:
        Path(os.environ.get("PREFECT_HOME", output)).mkdir(parents=True, exist_ok=True)


def start_embedded_server() -> None:
    """Start Prefect's embedded server, where no other one is set, out of reach of this terminal's Ctrl-C.

    Prefect starts it in our process group, where Ctrl-C ends it together with the run: the run then has nobody to tell
    that it was stopped, and its client goes on asking for minutes. In a session of its own it lives until we end.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None or not settings.server.ephemeral.enabled:
        return
    from prefect.server.api.server import SubprocessASGIServer

    in_own_session = functools.partial(subprocess.Popen, start_new_session=True)
    with patch("prefect.server.api.server.subprocess.Popen", in_own_session):
        SubprocessASGIServer().start()
