"""Checks of Prefect's address, profile and version before use, and explanations of known server errors.

Each error names the value found, its origin and the next step.
"""

from __future__ import annotations

import os
import re
import tomllib
import urllib.error
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from flows.operations.services import ask
from flows.runtime.prefect_access import CLIENT
from rl_core.errors import BackendError, SettingsError, nearest
from tasks.mlflow_environment import without_password

__all__ = ["check_api", "check_mlflow", "configured_api", "explain"]

VERSION_SECONDS = 10.0  # to wait for a server's version
# Prefect's built-in profiles, which have no server.
_BUILT_IN = {"ephemeral", "local", "cloud", "test"}


def _profiles_path(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("PREFECT_HOME", "~/.prefect")).expanduser()
    return Path(environment.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()


def configured_api(environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Prefect API configured by the user's environment or profile, with its origin.

    Returns: address ("" = none: runs start their own server), and its origin as text.
    Raises: SettingsError for a profile that does not exist or cannot be read.
    """
    environment = os.environ if environment is None else environment
    if environment.get("PREFECT_API_URL"):
        return environment["PREFECT_API_URL"], "PREFECT_API_URL"
    path = _profiles_path(environment)
    try:
        data = tomllib.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: Prefect's profiles cannot be read: {error}; fix the file or move it") from None
    profiles = data.get("profiles", {})
    name = environment.get("PREFECT_PROFILE") or str(data.get("active", ""))
    if not name:
        return "", ""
    if name not in profiles and name not in _BUILT_IN:
        origin = "PREFECT_PROFILE" if environment.get("PREFECT_PROFILE") else f"the active one in {path}"
        raise SettingsError(
            f"Prefect's profile '{name}' ({origin}) does not exist; {nearest(name, [*profiles, *_BUILT_IN])} "
            "Unset PREFECT_PROFILE, or choose one: prefect profile use NAME"
        )
    return str(profiles.get(name, {}).get("PREFECT_API_URL", "")), f"profile '{name}' of {path}"


def check_api(url: str, origin: str) -> str:
    """Check that a Prefect server of a compatible version responds at an API address.

    Returns: warning about a server that is slow, or older than the client, which Prefect does not support; "" = none.
    Raises: BackendError without a response; SettingsError if it is not a Prefect API or has another major version.
    """
    shown = without_password(url)
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"{shown!r} (from {origin}) is no address of a server; one is http://127.0.0.1:4200/api")
    if not url.startswith("http://"):  # Prefect Cloud, or certificates and tokens that only Prefect's client knows
        return ""
    try:
        found = ask(f"{url.rstrip('/')}/admin/version", timeout=VERSION_SECONDS, auth=os.environ.get(CLIENT, ""))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):  # it wants a token, which the client has; its own message is clear
            return ""
        raise SettingsError(
            f"{shown} (from {origin}) is no Prefect API: it answered {error.code}; the address ends in /api, "
            "as in http://127.0.0.1:4200/api"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):  # it takes connections: slow is no reason to do without it
            return (
                f"the Prefect server at {shown} (from {origin}) took longer than {VERSION_SECONDS:g} s for its version"
            )
        raise BackendError(
            f"no Prefect server answers at {shown} (from {origin}): {reason}; start it (`posttrain up`), or unset "
            f"{origin if origin.isupper() else 'the profile (prefect profile use ephemeral)'} to run without one"
        ) from None
    return _check_version(str(found), shown, origin)


def _check_version(server: str, shown: str, origin: str) -> str:
    client = metadata.version("prefect")
    try:
        theirs, ours = Version(server), Version(client)
    except InvalidVersion:
        raise SettingsError(
            f"{shown} (from {origin}) is no Prefect API: it does not say its version; the address ends in /api"
        ) from None
    if theirs.major != ours.major:
        raise SettingsError(
            f"the Prefect server at {shown} (from {origin}) has version {theirs}, this client {ours}: the first "
            f"numbers must be the same; upgrade the older one, here with: pip install 'prefect=={theirs}'"
        )
    if theirs < ours:
        return (
            f"the Prefect server at {shown} has version {theirs}, older than this client ({ours}); upgrade the server: "
            "restart it from this environment (`posttrain down`, then `posttrain up`)"
        )
    return ""


def check_mlflow(url: str, origin: str) -> None:
    """Check that an MLflow server of the same major version responds. Raises: BackendError, SettingsError."""
    shown = without_password(url)
    try:
        found = str(ask(f"{url.rstrip('/')}/version", timeout=10.0)).strip()
        theirs = Version(found)
    except InvalidVersion:
        raise SettingsError(f"{shown} (from {origin}) is no MLflow server: it does not say its version") from None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return
        raise SettingsError(f"{shown} (from {origin}) is no MLflow server: it answered {error.code}") from None
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
_KNOWN: tuple[tuple[str, str], ...] = (
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
    (r"too many clients|remaining connection slots", "PostgreSQL has no free connection; raise its max_connections"),
    (r"No space left on device", "the disk is full; free some space"),
    (r"database is locked", "another process holds the sqlite file; end it, or use --database postgresql://..."),
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
    (r"No module named '?(?P<module>[\w.]+)", "a package is missing; pip install -c constraints.txt -e ."),
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


def explain(text: str) -> str:
    """Next step for the output of a server or command; "" if no known error is in it."""
    for pattern, advice in _KNOWN:
        if match := re.search(pattern, text):
            return advice.format(**{name: " ".join(str(value).split()) for name, value in match.groupdict().items()})
    return ""
