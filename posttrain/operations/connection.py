"""Connection to running servers: discovery, checks of addresses and versions, known errors, status output.

Each error names the value at fault, its origin and the next step.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from flows.runtime.prefect_access import (
    CLIENT_AUTH_VARIABLE,
    PREFECT_FIRST_PAGE,
    build_basic_auth_header,
    load_or_create_password,
    locate_password_file,
)
from posttrain.operations.services import GPU_LIMIT, format_mlflow_url, format_prefect_url
from posttrain.operations.state import (
    ServiceState,
    StatePaths,
    SupervisorState,
    is_running,
    read_state,
)
from rl_core.errors import BackendError, SettingsError, suggest_name
from rl_core.json_client import RequestError, fetch_json
from tasks.command_hints import INSTALL_COMMAND, format_posttrain_command
from tasks.mlflow_environment import strip_uri_password

VERSION_SECONDS = 10.0  # to wait for a server's version
# Prefect's built-in profiles, which have no server.
_BUILT_IN_PROFILES = {"ephemeral", "local", "cloud", "test"}


def _resolve_profiles_path(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    return Path(environment.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()


def read_configured_api(environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Read the Prefect API that the user's environment or profile configures.

    Returns: address, or "" if none is configured and runs start a server themselves; its origin as text.
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
        is_from_variable = bool(environment.get("PREFECT_PROFILE"))
        origin = "PREFECT_PROFILE" if is_from_variable else f"the active one in {path}"
        suggestion = suggest_name(name, [*profiles, *_BUILT_IN_PROFILES])
        raise SettingsError(
            f"Prefect's profile '{name}' ({origin}) does not exist; {suggestion} "
            "Unset PREFECT_PROFILE, or choose one: prefect profile use NAME"
        )
    return str(profiles.get(name, {}).get("PREFECT_API_URL", "")), f"profile '{name}' of {path}"


def check_prefect_api(url: str, origin: str) -> str:
    """Check that a Prefect server of a compatible version responds at an API address.

    Returns: warning about a server that is slow, or older than the client, which Prefect does not support; "" = none.
    Raises: BackendError without a response; SettingsError if it is not a Prefect API or has another major version.
    """
    public_url = strip_uri_password(url)
    if not url.startswith(("http://", "https://")):
        raise SettingsError(
            f"{public_url!r} (from {origin}) is no address of a server; one is http://127.0.0.1:4200/api"
        )
    if not url.startswith("http://"):
        return ""  # Prefect Cloud, or certificates and tokens that only Prefect's client knows
    headers = build_basic_auth_header(os.environ.get(CLIENT_AUTH_VARIABLE, ""))
    try:
        version = fetch_json(
            f"{url.rstrip('/')}/admin/version", timeout_s=VERSION_SECONDS, headers=headers
        )
    except RequestError as error:
        if error.status in (401, 403):  # it wants a token; the client reports that clearly
            return ""
        if error.status:
            raise SettingsError(
                f"{public_url} (from {origin}) is no Prefect API: it answered {error.status}; the address ends in "
                "/api, as in http://127.0.0.1:4200/api"
            ) from None
        # it accepts connections, so it is only slow
        if isinstance(error.__cause__, TimeoutError):
            return (
                f"the Prefect server at {public_url} (from {origin}) took longer than {VERSION_SECONDS:g} s for its "
                "version"
            )
        setting = origin
        if not origin.isupper():
            setting = "the profile (prefect profile use ephemeral)"
        raise BackendError(
            f"no Prefect server answers at {public_url} (from {origin}): {error.reason}; start it (`posttrain up`), "
            f"or unset {setting} to run without one"
        ) from None
    return _check_prefect_version(str(version), public_url, origin)


def _check_prefect_version(server: str, public_url: str, origin: str) -> str:
    client = metadata.version("prefect")
    try:
        theirs, ours = Version(server), Version(client)
    except InvalidVersion:
        raise SettingsError(
            f"{public_url} (from {origin}) is no Prefect API: it does not report its version; the address ends in /api"
        ) from None
    if theirs.major != ours.major:
        raise SettingsError(
            f"the Prefect server at {public_url} (from {origin}) has version {theirs}, this client {ours}: the first "
            f"numbers must be the same; upgrade the older one, here with: pip install 'prefect=={theirs}'"
        )
    if theirs < ours:
        return (
            f"the Prefect server at {public_url} has version {theirs}, older than this client ({ours}); upgrade the "
            "server: restart it from this environment (`posttrain down`, then `posttrain up`)"
        )
    return ""


def check_mlflow_server(url: str, origin: str) -> None:
    """Check that an MLflow server of the same major version responds. Raises: BackendError, SettingsError."""
    public_url = strip_uri_password(url)
    try:
        version = str(fetch_json(f"{url.rstrip('/')}/version", timeout_s=VERSION_SECONDS)).strip()
        theirs = Version(version)
    except InvalidVersion:
        raise SettingsError(
            f"{public_url} (from {origin}) is no MLflow server: it does not report its version"
        ) from None
    except RequestError as error:
        if error.status in (401, 403):
            return
        if error.status:
            raise SettingsError(
                f"{public_url} (from {origin}) is no MLflow server: it answered {error.status}"
            ) from None
        raise BackendError(
            f"no MLflow server answers at {public_url} (from {origin}): {error.reason}; start it, or unset {origin}, "
            "and `posttrain up` starts one"
        ) from None
    ours = Version(metadata.version("mlflow"))
    if theirs.major != ours.major:
        raise SettingsError(
            f"the MLflow server at {public_url} (from {origin}) has version {theirs}, this client {ours}: the first "
            f"numbers must be the same; upgrade the older one, here with: pip install 'mlflow=={theirs}'"
        )


# Pattern in the output of servers and Prefect's commands -> advice. The first match counts.
_KNOWN_ERRORS: tuple[tuple[str, str], ...] = (
    (
        r"Address already in use|address already in use",
        "another process has taken the port; `posttrain status` names it, or choose another port",
    ),
    (
        r"Can't locate revision identified by '(?P<revision>\w+)'|Detected out-of-date database schema",
        "the database was created by another version of this server: install that version again, or move the database "
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
        "another program, perhaps the trainer, uses the GPU's memory; free some, or start vLLM first",
    ),
    (
        r"No module named '?(?P<module>[\w.]+)",
        f"a package is missing; {INSTALL_COMMAND}",
    ),
    (
        r"references work pool\s+'(?P<pool>[^']+)'\s+which\s+does\s+not\s+exist",
        "work pool '{pool}' does not exist; name that of `posttrain up` (work_pool: {{name: posttrain}}), or create "
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
    (
        r"\b(?:Read|Connect|Write|Pool)Timeout\b",
        "Prefect's server did not answer in time: the machine is busy, or the server is still starting",
    ),
)


def explain_known_error(text: str) -> str:
    """Return the next step for the output of a server or command; "" if it contains no known error."""
    for pattern, advice in _KNOWN_ERRORS:
        if match := re.search(pattern, text):
            groups = match.groupdict().items()
            return advice.format(**{name: " ".join(str(value).split()) for name, value in groups})
    return ""


def resolve_mlflow_url(state: SupervisorState) -> str:
    """Return the address of the MLflow server that runs use; "" = an external one whose address has a password."""
    return format_mlflow_url(state.options) if _has_mlflow_server(state) else state.mlflow


def _has_mlflow_server(state: SupervisorState) -> bool:
    return any(service.name == "mlflow" for service in state.services)


def format_links(state: SupervisorState, output: Path) -> str:
    """Format links, registered deployments, and environment variables for the prefect and mlflow commands."""
    lines = []
    for service in state.services:
        access = f"    ({service.access})" if service.access else ""
        first_page = PREFECT_FIRST_PAGE if service.name == "prefect" else ""
        lines.append(f"{service.name:9}{service.url}{first_page}{access}".rstrip())
    mlflow = resolve_mlflow_url(state)
    if not _has_mlflow_server(state):
        lines.append(f"mlflow   {mlflow or 'as MLFLOW_TRACKING_URI said'} (runs elsewhere)")
    if runs := state.registration.get("runs_url"):
        lines.append(f"runs     {runs}")
    lines += _format_registration(state)
    command = format_posttrain_command("COMMAND", output)
    lines.append(f"`{command}` uses these servers; for the commands of prefect and mlflow:")
    tracking = f" MLFLOW_TRACKING_URI={mlflow}" if mlflow else ""
    lines.append(f"  export PREFECT_API_URL={format_prefect_url(state.options)}/api{tracking}")
    password_file = shlex.quote(str(locate_password_file(output)))
    lines.append(f'  export {CLIENT_AUTH_VARIABLE}="$(cat {password_file})"')
    lines.append("Prefect's page asks once for that password")
    return "\n".join(lines)


def _format_registration(state: SupervisorState) -> list[str]:
    result = state.registration
    lines = []
    if "pool" in result:
        slots = result.get("gpu_slots")
        limit = f"; limit '{GPU_LIMIT}' of {slots} at once" if slots else ""
        lines.append(f"pool     {state.options.pool}{limit}")
    for name in result.get("deployments", []):
        lines.append(f"deployed {name}")
    for automation in result.get("automations", []):
        note = f" ({automation['note']})" if automation["note"] else ""
        lines.append(f"automation {automation['name']}: {automation['what']}{note}")
    return [*lines, *(f"note: {note}" for note in result.get("notes", []))]


def format_status_table(
    state: SupervisorState, output: Path, now: float | None = None, auth: str = ""
) -> str:
    """Format the table of `posttrain status`."""
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
    note = service.url
    if service.phase == "waiting":
        delay = max(0.0, service.retry_at - now)
        note = f"{service.message}; next start in {delay:.0f} s; log: {service.log}"
    elif service.message:
        note = f"{note} (before: {service.message})"
    return f"{line}{note}"


def _format_duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _describe_pool_problem(state: SupervisorState, output: Path, auth: str) -> str:
    """Describe the problem of a deleted or paused pool; "" = none."""
    pool = state.options.pool
    if not any(service.name == "prefect" and service.phase == "up" for service in state.services):
        return ""
    try:
        entry = fetch_json(
            f"{format_prefect_url(state.options)}/api/work_pools/{pool}",
            headers=build_basic_auth_header(auth),
        )
    except RequestError as error:
        if error.status == 404 and "pool" in state.registration:  # else it is not made yet
            command = format_posttrain_command("up", output)
            return f"work pool '{pool}' was deleted, so no deployment can run; `{command}` creates it again"
        return ""
    if entry.get("is_paused"):
        return f"work pool '{pool}' is paused; prefect work-pool resume {pool}"
    return ""


def find_running_servers(output: Path) -> SupervisorState | None:
    """Find the running servers of an output folder; None without a running supervisor."""
    paths = StatePaths(output.resolve())
    return read_state(paths) if is_running(paths) else None


def connect_to_servers(output: Path, *, needs_prefect: bool = True) -> None:
    """Point Prefect and MLflow at the running servers of an output folder; settings of the user take precedence.

    Call it before Prefect is imported.
    Args:
        needs_prefect: True = Prefect's server must respond.
    Raises: BackendError, SettingsError; see `check_prefect_api`.
    """
    state = find_running_servers(output)
    if state is not None and state.phase == "stopping":
        state = None
    # Use MLflow's address even if it is down at the moment: the tracker stores what it cannot deliver.
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
    """Find the password of the Prefect server at an address; "" unless it is that of the folder's `posttrain up`."""
    state = find_running_servers(output)
    if state is None or not is_same_address(api, f"{format_prefect_url(state.options)}/api"):
        return ""
    return load_or_create_password(output.resolve())


def _use_running_servers(state: SupervisorState, output: Path) -> None:
    running_url = f"{format_prefect_url(state.options)}/api"
    url, origin = read_configured_api()
    if url and not is_same_address(url, running_url):
        remedy = "unset PREFECT_PROFILE, or: prefect profile use ephemeral"
        if origin == "PREFECT_API_URL":
            remedy = "unset PREFECT_API_URL"
        _print_warning(
            f"this run is tracked by Prefect at {url} (from {origin}), not by the server of `posttrain up` at "
            f"{running_url}; for that, {remedy}"
        )
        _print_warning(check_prefect_api(url, origin))
        return
    os.environ[CLIENT_AUTH_VARIABLE] = load_or_create_password(output)
    try:
        warning = check_prefect_api(running_url, "posttrain up")
    except BackendError as error:
        phase = state.find_service("prefect").phase
        status, up, down = (
            format_posttrain_command(command, output) for command in ("status", "up", "down")
        )
        raise BackendError(
            f"the Prefect server of `posttrain up` does not answer ({phase}): {error}; `{status}` says why, `{up}` "
            f"starts it again, and after `{down}` runs do without it"
        ) from None
    os.environ["PREFECT_API_URL"] = running_url
    os.environ.setdefault("POSTTRAIN_GPU_LIMIT", GPU_LIMIT)
    _print_warning(warning)


def is_same_address(url: str, other_url: str) -> bool:
    """Return whether two loopback addresses refer to the same server."""

    def normalize(url: str) -> str:
        return url.rstrip("/").replace("//localhost:", "//127.0.0.1:")

    return normalize(url) == normalize(other_url)


def _print_warning(text: str) -> None:
    if text:
        print(f"posttrain: {text}", file=sys.stderr)
