"""Prefect's settings for a run: location of its database, start without a server, verbosity.

The command line calls `set_prefect_environment` before it imports Prefect. Settings made by the user stay.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flows.runtime import prefect_access
from rl_core.storage.atomic_files import make_folder

_RANDOM_CONSUMERS = (
    "prefect.utilities.math",
    "websockets.client",
    "websockets.asyncio.connection",
)  # waits, pings
HEARTBEAT_SECONDS = 30  # the least that Prefect takes; its default is 180
PREFECT_PORT = 4200  # where `posttrain ui` serves the page


def build_prefect_environment(output: Path | None = None) -> dict[str, str]:
    """Environment variables for running Prefect without a separate server.

    Args:
        output: the output folder, which then also holds Prefect's database; None = the user's Prefect home.
    """
    values = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        # The first start of the embedded server creates its database; the default of 20 s is tight on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # A call to an API that is away waits 2 + 4 + 8 seconds, which outlast a restart; the default is a minute.
        "PREFECT_CLIENT_MAX_RETRIES": "3",
        # One that takes connections and is silent is waited for as often; the default is a minute each time.
        "PREFECT_API_REQUEST_TIMEOUT": "30",
        # A server with our automations takes three missing heartbeats for a crash (deployments/automations.yaml).
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rl_core,tasks,flows,posttrain",
        # The terminal shows our own progress and errors (flows/runtime/progress.py); the Prefect UI has the full log.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        # Prefect's threads say of every event that a server which went away does not take it; we say it once.
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        # The metric upload thread logs outside a flow context, of which Prefect would warn on the terminal.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    if output is not None and not {"PREFECT_API_URL", "PREFECT_PROFILE"} & os.environ.keys():
        values["PREFECT_HOME"] = str(output.resolve() / "prefect")
    return values


def set_prefect_environment(output: Path | None = None) -> None:
    """Set the variables that the user has not set. No effect once Prefect is imported."""
    for name, value in build_prefect_environment(output).items():
        os.environ.setdefault(name, value)
    if output is not None:
        make_folder(os.environ.get("PREFECT_HOME", output))


@contextlib.contextmanager
def apply_prefect_defaults() -> Iterator[None]:
    """The same defaults as Prefect settings, for a process that imported Prefect before `set_prefect_environment` was called.

    A script that imports a flow needs nothing else. Settings of the user, of a profile and of a test stay.
    """
    from prefect.logging.configuration import setup_logging
    from prefect.settings import get_current_settings, temporary_settings

    isolate_random_generator()
    given = get_current_settings().model_dump(exclude_unset=True)
    missing = {
        setting: value
        for name, value in {**build_prefect_environment(), **_resolve_embedded_access()}.items()
        if name not in os.environ
        and (setting := _find_prefect_setting(name)) is not None
        and not _is_set_by_user(setting, given)
    }
    if not missing:
        yield
        return
    handlers = {
        name: value
        for name, value in build_prefect_environment().items()
        if name.startswith("PREFECT_LOGGING_HANDLERS")
    }
    with temporary_settings(missing):
        with patch.dict(
            os.environ, {**handlers, **os.environ}
        ):  # no settings: read from the environment alone
            setup_logging()
        yield


def isolate_random_generator() -> None:
    """Have Prefect's client draw waits and pings from a generator of its own, in this process and for good.

    It would draw from Python's global one, whenever its threads come to it: rewards and environments of the user's that
    draw from `random` as well would not give the same numbers again.
    """
    for name in _RANDOM_CONSUMERS:
        module = importlib.import_module(name)
        if getattr(module, "random", None) is random:
            setattr(module, "random", random.Random())  # noqa: B010 mypy knows the module there


def _resolve_embedded_access() -> dict[str, str]:
    """Password of the embedded server and its client, new with each process; {} where another server is configured."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        return {}
    known = settings.server.api.auth_string or settings.api.auth_string
    return build_embedded_access(known.get_secret_value() if known is not None else "")


def build_embedded_access(password: str = "") -> dict[str, str]:
    """Variables of the embedded server and its client; the password is this process's own where none is given."""
    password = password or _create_process_password()
    # No page belongs to it: an origin that nothing has.
    return {
        prefect_access.SERVER_AUTH_VARIABLE: password,
        prefect_access.CLIENT_AUTH_VARIABLE: password,
        prefect_access.ORIGINS_VARIABLE: "http://none.invalid",
    }


@functools.cache
def _create_process_password() -> str:
    """One for all runs of this process, as they share the server."""
    return prefect_access.generate_password()


def _find_prefect_setting(variable: str) -> Any:
    """Prefect setting of an environment variable; None if there is none."""
    import prefect.settings

    return getattr(prefect.settings, variable, None)


def _is_set_by_user(setting: Any, user_settings: dict[str, Any]) -> bool:
    value: Any = user_settings
    for part in setting.accessor.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True
