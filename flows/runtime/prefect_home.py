"""Prefect's settings for a run: location of its database, start without a server, verbosity.

The command line calls `set_prefect_environment` before it imports Prefect. Settings made by the user are kept.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from flows.runtime import prefect_access
from rl_core.json_client import exempt_loopback_from_proxies
from rl_core.storage.atomic_files import make_folder

# Modules that draw waits and pings from the global random generator.
_RANDOM_CONSUMERS = (
    "prefect.utilities.math",
    "websockets.client",
    "websockets.asyncio.connection",
)
FlowT = TypeVar("FlowT")

HEARTBEAT_SECONDS = 30  # Prefect's minimum; its default is 180


def locate_prefect_home(output: Path) -> Path:
    """Return the folder of Prefect's database for an output folder: PREFECT_HOME, else `prefect` in the output folder.

    Every command uses it: a run, `posttrain ui` and `posttrain up` see the same runs.
    """
    home = os.environ.get("PREFECT_HOME")
    return Path(home).expanduser().resolve() if home else output.resolve() / "prefect"


def build_prefect_environment(output: Path | None = None) -> dict[str, str]:
    """Build the environment variables for running Prefect without a separate server.

    Args:
        output: the output folder, which also holds Prefect's database unless PREFECT_HOME is set; None = Prefect's
            settings name the home.
    """
    values = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "true",
        # The first start of the embedded server creates its database; the default of 20 s is tight on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # A call to an unreachable API retries for 2 + 4 + 8 seconds, which outlasts a restart; the default is a minute.
        "PREFECT_CLIENT_MAX_RETRIES": "3",
        # An API that accepts connections but does not answer is retried as often; the default is a minute each time.
        "PREFECT_API_REQUEST_TIMEOUT": "30",
        # A server with our automations treats three missing heartbeats as a crash (deployments/automations.yaml).
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rl_core,tasks,flows,posttrain",
        # The terminal shows our own progress and errors (flows/runtime/progress.py); the Prefect UI has the full log.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        # Prefect's threads report every event that an unreachable server does not accept; we report it once.
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        # The metric upload thread logs outside a flow context; Prefect would warn about that on the terminal.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    if output is not None and not {"PREFECT_API_URL", "PREFECT_PROFILE"} & os.environ.keys():
        values["PREFECT_HOME"] = str(locate_prefect_home(output))
    return values


def set_prefect_environment(output: Path | None = None) -> None:
    """Set the variables that the user has not set. They have no effect once Prefect is imported."""
    exempt_loopback_from_proxies()
    for name, value in build_prefect_environment(output).items():
        os.environ.setdefault(name, value)
    if output is not None and "PREFECT_HOME" in os.environ:
        # Absolute, because servers start in another folder.
        os.environ["PREFECT_HOME"] = str(make_folder(locate_prefect_home(output)))
    elif output is not None:
        make_folder(output)


@contextlib.contextmanager
def apply_prefect_defaults() -> Iterator[None]:
    """Apply the same defaults as Prefect settings, for a process that has already imported Prefect.

    A script that imports a flow needs nothing else. Settings of the user, of a profile and of a test are kept.
    """
    from prefect.logging.configuration import setup_logging
    from prefect.settings import get_current_settings, temporary_settings

    exempt_loopback_from_proxies()
    isolate_random_generator()
    user_settings = get_current_settings().model_dump(exclude_unset=True)
    missing = {}
    for name, value in {**build_prefect_environment(), **_resolve_embedded_access()}.items():
        setting = _find_prefect_setting(name)
        is_known = name not in os.environ and setting is not None
        if is_known and not _is_set_by_user(setting, user_settings):
            missing[setting] = value
    if not missing:
        yield
        return
    handlers = {
        name: value
        for name, value in build_prefect_environment().items()
        if name.startswith("PREFECT_LOGGING_HANDLERS")
    }
    with temporary_settings(missing):
        # Prefect reads the handlers only from the environment.
        with patch.dict(os.environ, {**handlers, **os.environ}):
            setup_logging()
        yield


def exempt_loopback_in_calls(flow: FlowT) -> FlowT:
    """Let direct calls of a flow, as in a user's script, reach Prefect's servers on this machine without a proxy.

    Prefect's client starts before the flow's body, so the body would be too late.
    """
    flow_class: Any = type(flow)

    class LoopbackFlow(flow_class):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            exempt_loopback_from_proxies()
            return super().__call__(*arguments, **options)

    flow.__class__ = LoopbackFlow
    return flow


def isolate_random_generator() -> None:
    """Give Prefect's client its own random generator for waits and pings, permanently in this process.

    Its threads would draw from Python's global generator at arbitrary times, so rewards and environments of the user
    that use `random` would not be reproducible.
    """
    for name in _RANDOM_CONSUMERS:
        module = importlib.import_module(name)
        if getattr(module, "random", None) is random:
            setattr(module, "random", random.Random())  # noqa: B010 mypy knows the module there


def _resolve_embedded_access() -> dict[str, str]:
    """Return the password of the embedded server and its client, new in each process; {} with another server."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        return {}
    configured = settings.server.api.auth_string or settings.api.auth_string
    return build_embedded_access(configured.get_secret_value() if configured is not None else "")


def build_embedded_access(password: str = "") -> dict[str, str]:
    """Return variables of the embedded server and its client; without a password, use that of this process."""
    password = password or _create_process_password()
    # The server has no page, so the allowed origin matches nothing.
    return {
        prefect_access.SERVER_AUTH_VARIABLE: password,
        prefect_access.CLIENT_AUTH_VARIABLE: password,
        prefect_access.ORIGINS_VARIABLE: "http://none.invalid",
    }


@functools.cache
def _create_process_password() -> str:
    """Create one password for all runs of this process, which share the server."""
    return prefect_access.generate_password()


def _find_prefect_setting(variable: str) -> Any:
    """Return the Prefect setting of an environment variable; None if there is none."""
    import prefect.settings

    return getattr(prefect.settings, variable, None)


def _is_set_by_user(setting: Any, user_settings: dict[str, Any]) -> bool:
    value: Any = user_settings
    for part in setting.accessor.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True
