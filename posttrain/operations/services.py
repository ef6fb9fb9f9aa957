"""Specifications of the servers: command, environment and health check of each."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.runtime.embedded_server import build_migration_environment, prepare_database
from flows.runtime.prefect_access import (
    CLIENT_AUTH_VARIABLE,
    build_basic_auth_header,
    build_server_environment,
    format_loopback_origins,
    load_or_create_password,
)
from flows.runtime.prefect_home import build_prefect_environment, locate_prefect_home
from posttrain.operations.database import DatabaseAddresses
from posttrain.operations.processes import HOST, MARK_VARIABLE, format_mark
from posttrain.operations.state import ServerOptions
from rl_core.json_client import RequestError, fetch_json, find_health_problem
from tasks.mlflow_environment import (
    build_default_uri,
    build_offline_environment,
    build_server_options,
)
from tasks.shipped import CHECKOUT

# Working directory of deployment runs and base of their outputs: the checkout, else that of `up`.
ROOT = CHECKOUT or Path.cwd()
# Folder of the packages: the checkout, else site-packages.
PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
# Prefect's command line behind a check of hosts and origins.
PREFECT_ACCESS_MODULE = "flows.runtime.prefect_access"
# Name of the global concurrency limit; stages acquire it in tasks/pipeline/prefect_stages.py.
GPU_LIMIT = "gpu"

# Variables of a user's environment or profile about other servers, removed for these servers.
_EXTERNAL_SERVER_VARIABLES = (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING",
    "PREFECT_PROFILE",
    "PREFECT_UI_API_URL",
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "PREFECT_SERVER_API_HOST",
    "PREFECT_SERVER_API_PORT",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_REGISTRY_STORE_URI",
    "MLFLOW_REGISTRY_URI",
    "POSTTRAIN_DATABASE",
)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Specification of one server."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    url: str
    check_health: Callable[[], bool]
    option: str = ""  # command-line option for its port
    port: int | None = None
    restart_if_hung: bool = True  # restart if it runs but does not respond
    required_service: str = ""  # server that must be up before the start
    lead: float = 0.0  # seconds for its descendants to end before its SIGTERM
    soft: float = 5.0  # seconds from its SIGTERM to that of its descendants
    grace: float = 15.0  # seconds from SIGTERM to SIGKILL
    access: str = ""  # where its clients find a key; "" = it needs none


def format_prefect_url(options: ServerOptions) -> str:
    """Format the URL of the Prefect UI; the API is under /api."""
    return f"http://{HOST}:{options.prefect_port}"


def format_mlflow_url(options: ServerOptions) -> str:
    """Format the URL of the MLflow UI and API."""
    return f"http://{HOST}:{options.mlflow_port}"


def build_base_environment(output: Path, name: str) -> dict[str, str]:
    """Build the environment of a server: this process's, marked, without variables about other servers."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _EXTERNAL_SERVER_VARIABLES
    }
    environment |= {
        **build_prefect_environment(None),
        **build_offline_environment(),
        MARK_VARIABLE: format_mark(output, name),
        "PREFECT_HOME": str(locate_prefect_home(output)),
        # Ignores the user's profile.
        "PREFECT_PROFILES_PATH": str(output / "prefect" / "profiles.toml"),
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # files in the working directory of `up` are not imported
        "NO_COLOR": "1",  # output goes to log files
    }
    return environment


def build_client_environment(
    output: Path, name: str, options: ServerOptions, mlflow: str
) -> dict[str, str]:
    """Build the environment of a client of the servers: the worker, its runs, the registration."""
    environment = build_base_environment(output, name)
    path = [
        str(PACKAGES_FOLDER),
        str(ROOT),
        *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    environment |= {
        "PREFECT_API_URL": f"{format_prefect_url(options)}/api",
        CLIENT_AUTH_VARIABLE: load_or_create_password(output),
        "MLFLOW_TRACKING_URI": mlflow,
        "POSTTRAIN_GPU_LIMIT": GPU_LIMIT,
        # The worker's runs import this posttrain, even if another version is installed or a `tasks.py` is in ROOT.
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
    }
    return environment


def build_service_specs(
    output: Path, options: ServerOptions, databases: DatabaseAddresses, external_mlflow: str = ""
) -> list[ServiceSpec]:
    """Build the specifications of all servers in start order; they stop in reverse order.

    Args:
        external_mlflow: address of an external MLflow server; then none is started.
    """
    specs = [] if external_mlflow else [_build_mlflow_spec(output, options, databases)]
    specs.append(_build_prefect_spec(output, options, databases))
    specs.append(_build_worker_spec(output, options, external_mlflow))
    if options.serve is not None:
        specs.append(_build_serve_spec(output, options, external_mlflow))
    return specs


def _build_mlflow_spec(
    output: Path, options: ServerOptions, databases: DatabaseAddresses
) -> ServiceSpec:
    url, port = format_mlflow_url(options), options.mlflow_port
    command = (
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(port),
        "--workers",
        "1",
        "--default-artifact-root",
        (output / "mlflow" / "artifacts").as_uri(),
        "--allowed-hosts",
        f"{HOST}:{port},localhost:{port}",
        "--cors-allowed-origins",
        format_loopback_origins(port),
        "--uvicorn-opts",
        "--no-access-log",
        *build_server_options(),
    )
    environment = build_base_environment(output, "mlflow") | {
        # Not on the command line, where every user of the machine could read the password.
        "MLFLOW_BACKEND_STORE_URI": databases.mlflow or build_default_uri(output),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    return ServiceSpec(
        "mlflow",
        command,
        environment,
        output,
        url,
        lambda: not find_health_problem(f"{url}/health"),
        "--mlflow-port",
        port,
    )


def _build_prefect_spec(
    output: Path, options: ServerOptions, databases: DatabaseAddresses
) -> ServiceSpec:
    url, port = format_prefect_url(options), options.prefect_port
    environment = build_base_environment(output, "prefect") | {
        "PREFECT_UI_API_URL": f"{url}/api",
        **build_server_environment(output, port),
    }
    if databases.prefect:
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = databases.prefect
    else:
        home = Path(environment["PREFECT_HOME"])
        prepare_database(home, environment)
        environment |= build_migration_environment(home, environment)
    command = (
        sys.executable,
        "-m",
        PREFECT_ACCESS_MODULE,
        "server",
        "start",
        "--host",
        HOST,
        "--port",
        str(port),
    )
    return ServiceSpec(
        "prefect",
        command,
        environment,
        output,
        url,
        lambda: not find_health_problem(f"{url}/api/health"),
        "--prefect-port",
        port,
    )


def format_worker_name() -> str:
    """Format the name of this machine's worker in its pool; a restarted worker replaces the previous one."""
    return f"posttrain-{platform.node() or 'here'}"


def _build_worker_spec(output: Path, options: ServerOptions, external_mlflow: str) -> ServiceSpec:
    api = f"{format_prefect_url(options)}/api"
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--type",
        "process",
        "--pool",
        options.pool,
        "--name",
        format_worker_name(),
        "--install-policy",
        "never",
    ]
    if options.runs is not None:
        command += ["--limit", str(options.runs)]

    def check_health() -> bool:
        password = load_or_create_password(output)
        try:
            workers = fetch_json(
                f"{api}/work_pools/{options.pool}/workers/filter",
                {},
                headers=build_basic_auth_header(password),
            )
        except RequestError:
            return False
        return any(
            worker["name"] == format_worker_name() and worker["status"] == "ONLINE"
            for worker in workers
        )

    return ServiceSpec(
        "worker",
        tuple(command),
        build_client_environment(
            output, "worker", options, external_mlflow or format_mlflow_url(options)
        ),
        ROOT,
        f"{format_prefect_url(options)}/work-pools/work-pool/{options.pool}",
        check_health,
        restart_if_hung=False,  # its status comes from the Prefect server, which may be down itself
        required_service="prefect",
        # On SIGTERM a worker waits for its runs, possibly for hours, or fails to report them. So the runs are signalled
        # first: they save and stop, and the worker reports that they crashed.
        lead=40.0,
    )


def _build_serve_spec(output: Path, options: ServerOptions, external_mlflow: str) -> ServiceSpec:
    """Build the specification of `posttrain serve`, which waits for a champion if there is none yet."""
    assert options.serve is not None
    url, port = f"http://{HOST}:{options.serve_port}", options.serve_port
    command = (
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "serve",
        options.serve,
        "--wait",
        "--output",
        str(output),
        "--port",
        str(port),
        *(("--learn",) if options.learn else ()),
    )
    environment = build_client_environment(
        output, "serve", options, external_mlflow or format_mlflow_url(options)
    )
    return ServiceSpec(
        "serve",
        command,
        environment,
        ROOT,
        f"{url}/v1",
        lambda: not find_health_problem(f"{url}/healthz"),
        "--serve-port",
        port,
        required_service="" if external_mlflow else "mlflow",
        access=f"API key in {output / 'serving' / 'token'}",
    )
