"""Discovery of the servers of `posttrain up` by `posttrain run` and other commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.operations.checks import check_api, configured_api
from flows.operations.report import mlflow_of
from flows.operations.services import GPU_LIMIT, prefect_url
from flows.operations.state import State, StatePaths, is_running, read_state
from flows.runtime.prefect_access import CLIENT, password
from rl_core.errors import BackendError
from tasks.own_commands import own_command

__all__ = ["connect", "password_of", "running"]


def running(output: Path) -> State | None:
    """Servers of an output folder; None without a running supervisor."""
    places = StatePaths(output.resolve())
    return read_state(places) if is_running(places) else None


def connect(output: Path, *, prefect: bool = True) -> None:
    """Point Prefect and MLflow at the running servers of an output folder; settings of the user take precedence.

    Must be called before Prefect is imported.

    Args:
        prefect: True = Prefect is needed, so its server must respond.
    Raises: BackendError, SettingsError: see `checks`.
    """
    state = running(output)
    if state is not None and state.phase == "stopping":
        state = None
    # A server that is down for a moment is no reason to write past it: the tracker keeps what it cannot deliver.
    if state is not None and (address := mlflow_of(state)):
        os.environ.setdefault("MLFLOW_TRACKING_URI", address)
    if not prefect:
        return
    if state is not None:
        _use(state, output.resolve())
        return
    url, origin = configured_api()
    if url:
        _warn(check_api(url, origin))


def password_of(output: Path, api: str) -> str:
    """Password of the Prefect server at an address; "" unless it is that of the folder's `posttrain up`."""
    state = running(output)
    if state is None or not same_address(api, f"{prefect_url(state.options)}/api"):
        return ""
    return password(output.resolve())


def _use(state: State, output: Path) -> None:
    ours = f"{prefect_url(state.options)}/api"
    url, origin = configured_api()
    if url and not same_address(url, ours):
        _warn(
            f"this run is tracked by Prefect at {url} (from {origin}), not by the server of `posttrain up` at {ours}; "
            f"for that, {_how_to_leave(origin)}"
        )
        _warn(check_api(url, origin))
        return
    os.environ[CLIENT] = password(output)
    try:
        warning = check_api(ours, "posttrain up")
    except BackendError as error:
        phase = state.service("prefect").phase
        raise BackendError(
            f"the Prefect server of `posttrain up` does not answer ({phase}): {error}; "
            f"`{own_command('status', output)}` says why, `{own_command('up', output)}` starts it again, and after "
            f"`{own_command('down', output)}` runs do without it"
        ) from None
    os.environ["PREFECT_API_URL"] = ours
    os.environ.setdefault("POSTTRAIN_GPU_LIMIT", GPU_LIMIT)
    _warn(warning)


def _how_to_leave(origin: str) -> str:
    if origin == "PREFECT_API_URL":
        return "unset PREFECT_API_URL"
    return "unset PREFECT_PROFILE, or: prefect profile use ephemeral"


def same_address(one: str, other: str) -> bool:
    """True if two loopback addresses refer to the same server."""

    def plain(url: str) -> str:
        return url.rstrip("/").replace("//localhost:", "//127.0.0.1:")

    return plain(one) == plain(other)


def _warn(text: str) -> None:
    if text:
        print(f"posttrain: {text}", file=sys.stderr)
