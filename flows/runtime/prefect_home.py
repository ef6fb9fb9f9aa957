"""Prefect's settings for a run: location of its database, start without a server, verbosity.

The command line calls `prepare_prefect` before it imports Prefect. Settings made by the user stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flows.runtime import prefect_access
from rl_core.errors import BackendError
from rl_core.storage.faults import fault
from rl_core.storage.single_files import REMEDIES, make_folder

__all__ = [
    "PREFECT_PORT", "leave_global_generator", "prefect_environment", "prefect_defaults", "prepare_prefect",
    "start_embedded_server",
]  # fmt: skip

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LEAST_BYTES = 5_000_000  # of Prefect's database and its log
_DRAWING = ("prefect.utilities.math", "websockets.client", "websockets.asyncio.connection")  # waits, pings
PREFECT_PORT = 4200  # where `posttrain ui` serves the page


def prefect_environment(output: Path | None = None) -> dict[str, str]:
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
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rl_core,tasks,flows",
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


def prepare_prefect(output: Path | None = None) -> None:
    """Set the variables that the user has not set. No effect once Prefect is imported."""
    for name, value in prefect_environment(output).items():
        os.environ.setdefault(name, value)
    if output is not None:
        make_folder(os.environ.get("PREFECT_HOME", output))


@contextlib.contextmanager
def prefect_defaults() -> Iterator[None]:
    """The same defaults as Prefect settings, for a process that imported Prefect before `prepare_prefect` was called.

    A script that imports a flow needs nothing else. Settings of the user, of a profile and of a test stay.
    """
    from prefect.logging.configuration import setup_logging
    from prefect.settings import get_current_settings, temporary_settings

    leave_global_generator()
    given = get_current_settings().model_dump(exclude_unset=True)
    missing = {
        setting: value
        for name, value in {**prefect_environment(), **_embedded_access()}.items()
        if name not in os.environ and (setting := _setting(name)) is not None and not _is_given(setting, given)
    }
    if not missing:
        yield
        return
    handlers = {
        name: value for name, value in prefect_environment().items() if name.startswith("PREFECT_LOGGING_HANDLERS")
    }
    with temporary_settings(missing):
        with patch.dict(os.environ, {**handlers, **os.environ}):  # no settings: read from the environment alone
            setup_logging()
        yield


def leave_global_generator() -> None:
    """Have Prefect's client draw waits and pings from a generator of its own, in this process and for good.

    It would draw from Python's global one, whenever its threads come to it: rewards and environments of the user's that
    draw from `random` as well would not give the same numbers again.
    """
    for name in _DRAWING:
        module = importlib.import_module(name)
        if getattr(module, "random", None) is random:
            setattr(module, "random", random.Random())  # noqa: B010 mypy knows the module there


def _embedded_access() -> dict[str, str]:
    """Password of the embedded server and its client, new with each run; {} where another server is configured."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        return {}
    known = settings.server.api.auth_string or settings.api.auth_string
    word = known.get_secret_value() if known is not None else prefect_access.new_password()
    # No page belongs to it: an origin that nothing has.
    return {prefect_access.SERVER: word, prefect_access.CLIENT: word, prefect_access.ORIGINS: "http://none.invalid"}


def _setting(variable: str) -> Any:
    """Prefect setting of an environment variable; None if there is none."""
    import prefect.settings

    return getattr(prefect.settings, variable, None)


def _is_given(setting: Any, given: dict[str, Any]) -> bool:
    value: Any = given
    for part in setting.accessor.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def own_session() -> Callable[..., subprocess.Popen[Any]]:
    """`Popen` in a new session; the child gets SIGTERM when the thread that started it ends (Linux)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):  # not Linux: children of a killed run survive
        return functools.partial(subprocess.Popen, start_new_session=True)
    return functools.partial(
        subprocess.Popen, start_new_session=True, preexec_fn=functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    )


def start_embedded_server() -> None:
    """Start Prefect's embedded server in its own session, unless another server is configured.

    Prefect starts it in our process group, where Ctrl-C ends it together with the run: the run then cannot report that
    it was stopped, and its client retries for minutes. In its own session it lives until we end, and on Linux no
    longer, even if we are killed.
    Raises: BackendError if it does not answer in time.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is not None or not settings.server.ephemeral.enabled:
        return
    from prefect.server.api.server import SubprocessASGIServer

    _refuse_full_disk(settings.home)
    fault("prefect.starting")
    in_own_session = own_session()
    server = SubprocessASGIServer()

    def checked(args: list[str], *, env: dict[str, str], **more: Any) -> subprocess.Popen[Any]:
        """The server behind our check of hosts and origins, from wherever this project is imported."""
        ours = [f"{prefect_access.__name__}:create_app" if part.endswith(":create_app") else part for part in args]
        return in_own_session(ours, env={**env, "PYTHONPATH": prefect_access.own_path(env)}, **more)

    try:
        with patch("prefect.server.api.server.subprocess.Popen", checked):
            server.start()
            fault("prefect.started")
    except KeyboardInterrupt:  # or SIGTERM
        server.stop()
        raise
    except Exception as error:  # RuntimeError, or any client error while the server is starting
        server.stop()
        limit = settings.server.ephemeral.startup_timeout_seconds
        raise BackendError(
            f"Prefect's embedded server did not start within about {limit} s: {error} Is this machine very busy? Try "
            "again, give it longer with PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=600, or use a server that "
            "runs already: PREFECT_API_URL=http://127.0.0.1:4200/api"
        ) from error


def _refuse_full_disk(home: Path) -> None:
    """Refuse at once where the server could not write its database, for which it would be waited in vain."""
    if home.is_dir() and (free := shutil.disk_usage(home).free) < LEAST_BYTES:
        raise BackendError(
            f"{home}: {os.strerror(errno.ENOSPC)} for Prefect's database: {free / 1e6:.1f} MB are free, it needs "
            f"{LEAST_BYTES / 1e6:.0f}; {REMEDIES[errno.ENOSPC]}"
        )
