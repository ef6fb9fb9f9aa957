"""Checks of Prefect's address, profile and version before use, and explanations of known server errors.

Each error names the value found, its origin and the next step.

Output of `up` and `status`.

Discovery of the servers of `posttrain up` by `posttrain run` and other commands.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import tomllib
import urllib.error
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from flows.runtime.prefect_access import (
    CLIENT_AUTH_VARIABLE,
    load_or_create_password,
    locate_password_file,
)
from posttrain.operations.services import (
    GPU_LIMIT,
    fetch_json,
    format_mlflow_url,
    format_prefect_url,
)
from posttrain.operations.state import (
    ServiceState,
    StatePaths,
    SupervisorState,
    is_running,
    read_state,
)
from rl_core.errors import BackendError, SettingsError, suggest_name
from tasks.command_hints import format_posttrain_command
from tasks.mlflow_environment import strip_uri_password

VERSION_SECONDS = 10.0  # to wait for a server's version
# Prefect's built-in profiles, which have no server.
_BUILT_IN_PROFILES = {"ephemeral", "local", "cloud", "test"}


def _resolve_profiles_path(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    return Path(environment.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()


def read_configured_api(environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Prefect API configured by the user's environment or profile, with its origin.

    Returns: address ("" = none: runs start their own server), and its origin as text.
    Raises: SettingsError for a profile that does not exist or cannot be read.
    """
    environment = os.environ if environment is None else environment
    if environment.get("PREFECT_API_URL"):
        return environment["PREFECT_API_URL"], "PREFECT_API_URL"
    path = _resolve_profiles_path(environment)
    try:
        data = tomllib.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{path}: Prefect's profiles cannot be read: {error}; fix the file or move it"
        ) from None
    profiles = data.get("profiles", {})
    name = environment.get("PREFECT_PROFILE") or str(data.get("active", ""))
    if not name:
        return "", ""
    if name not in profiles and name not in _BUILT_IN_PROFILES:
        origin = (
            "PREFECT_PROFILE" if environment.get("PREFECT_PROFILE") else f"the active one in {path}"
        )
        raise SettingsError(
            f"Prefect's profile '{name}' ({origin}) does not exist; {suggest_name(name, [*profiles, *_BUILT_IN_PROFILES])} "
            "Unset PREFECT_PROFILE, or choose one: prefect profile use NAME"
        )
    return str(profiles.get(name, {}).get("PREFECT_API_URL", "")), f"profile '{name}' of {path}"


def check_prefect_api(url: str, origin: str) -> str:
    """Check that a Prefect server of a compatible version responds at an API address.

    Returns: warning about a server that is slow, or older than the client, which Prefect does not support; "" = none.
    Raises: BackendError without a response; SettingsError if it is not a Prefect API or has another major version.
    """
    shown = strip_uri_password(url)
    if not url.startswith(("http://", "https://")):
        raise SettingsError(
            f"{shown!r} (from {origin}) is no address of a server; one is http://127.0.0.1:4200/api"
        )
    if not url.startswith(
        "http://"
    ):  # Prefect Cloud, or certificates and tokens that only Prefect's client knows
        return ""
    try:
        found = fetch_json(
            f"{url.rstrip('/')}/admin/version",
            timeout=VERSION_SECONDS,
            auth=os.environ.get(CLIENT_AUTH_VARIABLE, ""),
        )
    except urllib.error.HTTPError as error:
        if error.code in (
            401,
            403,
        ):  # it wants a token, which the client has; its own message is clear
            return ""
        raise SettingsError(
            f"{shown} (from {origin}) is no Prefect API: it answered {error.code}; the address ends in /api, "
            "as in http://127.0.0.1:4200/api"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(
            reason, TimeoutError
        ):  # it takes connections: slow is no reason to do without it
            return f"the Prefect server at {shown} (from {origin}) took longer than {VERSION_SECONDS:g} s for its version"
        raise BackendError(
            f"no Prefect server answers at {shown} (from {origin}): {reason}; start it (`posttrain up`), or unset "
            f"{origin if origin.isupper() else 'the profile (prefect profile use ephemeral)'} to run without one"
        ) from None
    return _check_prefect_version(str(found), shown, origin)


def _check_prefect_version(server: str, public_url: str, origin: str) -> str:
    client = metadata.version("prefect")
    try:
        theirs, ours = Version(server), Version(client)
    except InvalidVersion:
        raise SettingsError(
            f"{public_url} (from {origin}) is no Prefect API: it does not say its version; the address ends in /api"
        ) from None
    if theirs.major != ours.major:
        raise SettingsError(
            f"the Prefect server at {public_url} (from {origin}) has version {theirs}, this client {ours}: the first "
            f"numbers must be the same; upgrade the older one, here with: pip install 'prefect=={theirs}'"
        )
    if theirs < ours:
        return (
            f"the Prefect server at {public_url} has version {theirs}, older than this client ({ours}); upgrade the server: "
            "restart it from this environment (`posttrain down`, then `posttrain up`)"
        )
    return ""


def check_mlflow_server(url: str, origin: str) -> None:
    """Check that an MLflow server of the same major version responds. Raises: BackendError, SettingsError."""
    shown = strip_uri_password(url)
    try:
        found = str(fetch_json(f"{url.rstrip('/')}/version", timeout=10.0)).strip()
        theirs = Version(found)
    except InvalidVersion:
        raise SettingsError(
            f"{shown} (from {origin}) is no MLflow server: it does not say its version"
        ) from None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return
        raise SettingsError(
            f"{shown} (from {origin}) is no MLflow server: it answered {error.code}"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BackendError(
            f"no MLflow server answers at {shown} (from {origin}): {reason}; start it, or unset {origin}, and "
            "`posttrain up` starts one"
        ) from None
    ours = Version(metadata.version("mlflow"))
    if theirs.major != ours.major:
        raise SettingsError(
            f"the MLflow server at {shown} (from {origin}) has version {theirs}, this client {ours}: the first numbers "
            f"must be the same; upgrade the older one, here with: pip install 'mlflow=={theirs}'"
        )


# Pattern in the output of servers and Prefect's commands -> advice. First match.
_KNOWN_ERRORS: tuple[tuple[str, str], ...] = (
    (
        r"Address already in use|address already in use",
        "another process took the port meanwhile; `posttrain status` says which, or choose another port",
    ),
    (
        r"Can't locate revision identified by '(?P<revision>\w+)'|Detected out-of-date database schema",
        "the database was made by another version of this server: install that version again, or move the database "
        "away (sqlite: the file under the output folder; PostgreSQL: another name in --database)",
    ),
    (
        r"password authentication failed for user \"?(?P<user>[^\"\s]+)",
        "PostgreSQL refuses the login; check user and password of --database",
    ),
    (
        r"too many clients|remaining connection slots",
        "PostgreSQL has no free connection; raise its max_connections",
    ),
    (r"No space left on device", "the disk is full; free some space"),
    (
        r"database is locked",
        "another process holds the sqlite file; end it, or use --database postgresql://...",
    ),
    (
        r"database disk image is malformed|file is not a database",
        "the sqlite file is broken; restore it or move it away",
    ),
    (
        r"No module named '?vllm",
        "rollouts.server.python has no vLLM; install deployments/vllm/requirements.txt into its environment",
    ),
    (
        r"less than desired GPU memory utilization",
        "another program, the trainer maybe, has the GPU's memory; free some, or start vLLM first",
    ),
    (
        r"No module named '?(?P<module>[\w.]+)",
        "a package is missing; pip install -c constraints.txt -e .",
    ),
    (
        r"references work pool\s+'(?P<pool>[^']+)'\s+which\s+does\s+not\s+exist",
        "work pool '{pool}' does not exist; name the one of `posttrain up` (work_pool: {{name: posttrain}}), or make "
        "it: prefect work-pool create {pool} --type process",
    ),
    (
        r"Validation failed for field '(?P<field>[^']+)'\.\s+Failure reason: (?P<reason>[^\"\n]+)",
        "parameter '{field}': {reason}; correct it under `parameters` of the deployment",
    ),
    (
        r"Flow function with name '(?P<flow>\w+)' not found in\s+'(?P<file>[^']+)'",
        "{file} has no flow '{flow}'; correct the deployment's `entrypoint`",
    ),
)


def explain_known_error(text: str) -> str:
    """Next step for the output of a server or command; "" if no known error is in it."""
    for pattern, advice in _KNOWN_ERRORS:
        if match := re.search(pattern, text):
            return advice.format(
                **{name: " ".join(str(value).split()) for name, value in match.groupdict().items()}
            )
    return ""


def resolve_mlflow_url(state: SupervisorState) -> str:
    """Address of the MLflow server that the worker's runs use; "" = elsewhere, at an address that holds a password."""
    has_own = any(service.name == "mlflow" for service in state.services)
    return format_mlflow_url(state.options) if has_own else state.mlflow


def format_links(state: SupervisorState, output: Path) -> str:
    """Links, registered deployments, and environment variables for the prefect and mlflow commands."""
    lines = [
        f"{service.name:9}{service.url}{_format_access(service)}".rstrip()
        for service in state.services
    ]
    mlflow = resolve_mlflow_url(state)
    if not any(service.name == "mlflow" for service in state.services):
        lines.append(f"mlflow   {mlflow or 'as MLFLOW_TRACKING_URI said'} (runs elsewhere)")
    lines += _format_registration(state)
    here = format_posttrain_command("COMMAND", output)
    lines.append(f"`{here}` uses these servers; for prefect's and mlflow's own commands:")
    tracking = f" MLFLOW_TRACKING_URI={mlflow}" if mlflow else ""
    lines.append(f"  export PREFECT_API_URL={format_prefect_url(state.options)}/api{tracking}")
    lines.append(
        f'  export {CLIENT_AUTH_VARIABLE}="$(cat {shlex.quote(str(locate_password_file(output)))})"'
    )
    lines.append("Prefect's page asks once for that password")
    return "\n".join(lines)


def _format_access(service: ServiceState) -> str:
    return f"    ({service.access})" if service.access else ""


def _format_registration(state: SupervisorState) -> list[str]:
    done = state.registration
    if not done:
        return []
    lines = []
    if "pool" in done:
        slots = done.get("gpu_slots")
        limit = f"; limit '{GPU_LIMIT}' of {slots} at once" if slots else ""
        lines.append(f"pool     {state.options.pool}{limit}")
    for name in done.get("deployments", []):
        lines.append(f"deployed {name}")
    for one in done.get("automations", []):
        note = f" ({one['note']})" if one["note"] else ""
        lines.append(f"automation {one['name']}: {one['what']}{note}")
    return [*lines, *(f"note: {note}" for note in done.get("notes", []))]


def format_status_table(
    state: SupervisorState, output: Path, now: float | None = None, auth: str = ""
) -> str:
    """Table of `posttrain status`."""
    now = time.time() if now is None else now
    lines = [
        f"{state.phase}; supervisor: process {state.supervisor.pid}; database: {state.options.database}",
        f"{'server':9}{'state':10}{'process':9}{'for':>8}  {'restarts':9}",
    ]
    lines += [_format_server_line(service, now) for service in state.services]
    if problem := _describe_pool_problem(state, output, auth):
        lines.append(problem)
    lines += _format_registration(state)
    if state.problem:
        lines.append(f"not registered: {state.problem}")
    return "\n".join(line.rstrip() for line in lines)


def _format_server_line(service: ServiceState, now: float) -> str:
    pid = service.process.pid if service.process and service.process.is_alive else ""
    span = _format_duration(now - service.since) if pid else ""
    line = f"{service.name:9}{service.phase:10}{pid!s:9}{span:>8}  {service.restarts:<9}"
    notes = [service.url]
    if service.phase == "waiting":
        notes = [
            f"{service.message}; next start in {max(0.0, service.retry_at - now):.0f} s; log: {service.log}"
        ]
    elif service.message:
        notes.append(f"(before: {service.message})")
    return f"{line}{' '.join(notes)}"


def _format_duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _describe_pool_problem(state: SupervisorState, output: Path, auth: str) -> str:
    """Problem of a deleted or paused pool; "" = none."""
    import urllib.error

    pool = state.options.pool
    if not any(service.name == "prefect" and service.phase == "up" for service in state.services):
        return ""
    try:
        found = fetch_json(f"{format_prefect_url(state.options)}/api/work_pools/{pool}", auth=auth)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return f"work pool '{pool}' is gone, so no deployment can run; `{format_posttrain_command('up', output)}` makes it again"
        return ""
    except (OSError, ValueError):
        return ""
    return (
        f"work pool '{pool}' is paused; prefect work-pool resume {pool}"
        if found.get("is_paused")
        else ""
    )


def find_running_servers(output: Path) -> SupervisorState | None:
    """Servers of an output folder; None without a running supervisor."""
    places = StatePaths(output.resolve())
    return read_state(places) if is_running(places) else None


def connect_to_servers(output: Path, *, needs_prefect: bool = True) -> None:
    """Point Prefect and MLflow at the running servers of an output folder; settings of the user take precedence.

    Must be called before Prefect is imported.

    Args:
        prefect: True = Prefect is needed, so its server must respond.
    Raises: BackendError, SettingsError: see `checks`.
    """
    state = find_running_servers(output)
    if state is not None and state.phase == "stopping":
        state = None
    # A server that is down for a moment is no reason to write past it: the tracker keeps what it cannot deliver.
    if state is not None and (address := resolve_mlflow_url(state)):
        os.environ.setdefault("MLFLOW_TRACKING_URI", address)
    if not needs_prefect:
        return
    if state is not None:
        _use_running_servers(state, output.resolve())
        return
    url, origin = read_configured_api()
    if url:
        _print_warning(check_prefect_api(url, origin))


def find_prefect_password(output: Path, api: str) -> str:
    """Password of the Prefect server at an address; "" unless it is that of the folder's `posttrain up`."""
    state = find_running_servers(output)
    if state is None or not is_same_address(api, f"{format_prefect_url(state.options)}/api"):
        return ""
    return load_or_create_password(output.resolve())


def _use_running_servers(state: SupervisorState, output: Path) -> None:
    ours = f"{format_prefect_url(state.options)}/api"
    url, origin = read_configured_api()
    if url and not is_same_address(url, ours):
        _print_warning(
            f"this run is tracked by Prefect at {url} (from {origin}), not by the server of `posttrain up` at {ours}; "
            f"for that, {_describe_unset_command(origin)}"
        )
        _print_warning(check_prefect_api(url, origin))
        return
    os.environ[CLIENT_AUTH_VARIABLE] = load_or_create_password(output)
    try:
        warning = check_prefect_api(ours, "posttrain up")
    except BackendError as error:
        phase = state.find_service("prefect").phase
        raise BackendError(
            f"the Prefect server of `posttrain up` does not answer ({phase}): {error}; "
            f"`{format_posttrain_command('status', output)}` says why, `{format_posttrain_command('up', output)}` starts it again, and after "
            f"`{format_posttrain_command('down', output)}` runs do without it"
        ) from None
    os.environ["PREFECT_API_URL"] = ours
    os.environ.setdefault("POSTTRAIN_GPU_LIMIT", GPU_LIMIT)
    _print_warning(warning)


def _describe_unset_command(origin: str) -> str:
    if origin == "PREFECT_API_URL":
        return "unset PREFECT_API_URL"
    return "unset PREFECT_PROFILE, or: prefect profile use ephemeral"


def is_same_address(one: str, other: str) -> bool:
    """True if two loopback addresses refer to the same server."""

    def plain(url: str) -> str:
        return url.rstrip("/").replace("//localhost:", "//127.0.0.1:")

    return plain(one) == plain(other)


def _print_warning(text: str) -> None:
    if text:
        print(f"posttrain: {text}", file=sys.stderr)
