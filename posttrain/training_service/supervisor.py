"""Supervisor behind `posttrain service up`: runs HTTP server and worker, and restarts them when they crash."""

from __future__ import annotations

import dataclasses
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flows.runtime.prefect_access import build_python_path
from flows.runtime.stopping import suspend_shutdown_bound
from posttrain.operations.managed_service import ManagedService, stop_services
from posttrain.operations.processes import check_platform, check_port, format_mark, terminate_marked
from posttrain.operations.services import ROOT, ServiceSpec, build_base_environment
from posttrain.training_service.store import open_service_store
from rl_core.errors import BackendError
from rl_core.json_client import RequestError, fetch_json
from rl_core.processes.supervision import MonotonicClock, handle_signals
from rl_core.settings import ServiceSettings
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.locks import FolderLock
from tasks.config import dump_settings
from tasks.mlflow_environment import strip_uri_password

STEP_SECONDS = 0.2
# Exit codes of a worker that has saved all runs.
CLEAN_EXIT_CODES = (
    0,
    128 + signal.SIGTERM,
    128 + signal.SIGINT,
)
KILL_SLACK_SECONDS = 5.0  # the worker is killed this long after `worker.stop_seconds`


def format_base_url(settings: ServiceSettings) -> str:
    """Return the base URL for clients."""
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def format_store_options(settings: ServiceSettings) -> str:
    """Return the options by which another `posttrain service` command finds the store of these settings."""
    defaults = ServiceSettings()
    options = ""
    for name in ("folder", "store"):
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            options += f" --set {shlex.quote(f'{name}={value}')}"
    return options


def resolve_log_path(settings: ServiceSettings, name: str) -> Path:
    """Return the log file of `server` or `worker`."""
    return Path(settings.folder) / "logs" / f"{name}.log"


def prepare_pipeline_specs(
    settings: ServiceSettings, output: Path, mlflow: str
) -> list[ServiceSpec]:
    """Describe the service's processes for `posttrain up`, which runs them with its MLflow server.

    Raises: BackendError if the store does not answer.
    """
    folder = make_folder(Path(settings.folder))
    open_service_store(settings).close()
    write_json_atomic(folder / "settings.json", dump_settings(settings))
    option = "the service's file: server.port"
    # Other users may read the records of `up`, so a store URL with a password is not shown.
    has_password = strip_uri_password(settings.store) != settings.store
    key_command = f"posttrain service key create NAME{format_store_options(settings)}"
    access = "" if has_password else f"a key: {key_command}"
    return [
        dataclasses.replace(
            spec,
            name=name,
            option=option if spec.port is not None else "",
            access=access if spec.url else "",
            environment={
                **spec.environment,
                **build_base_environment(output, name),
                "MLFLOW_TRACKING_URI": mlflow,
                "PYTHONPATH": spec.environment["PYTHONPATH"],
            },
        )
        for spec, name in zip(_build_specs(settings), ("engine", "service"), strict=True)
    ]


def _build_specs(settings: ServiceSettings) -> list[ServiceSpec]:
    folder, url = Path(settings.folder), format_base_url(settings)

    def answers() -> bool:
        try:
            return bool(fetch_json(f"{url}/api/v1/healthz"))
        except RequestError:
            return False

    def build_environment(name: str) -> dict[str, str]:
        environment = build_base_environment(folder, name)
        return environment | {"PYTHONPATH": build_python_path(environment)}

    def build_command(role: str) -> tuple[str, ...]:
        module = "posttrain.training_service.process"
        return (sys.executable, "-P", "-m", module, role, str(folder / "settings.json"))

    return [
        ServiceSpec(
            "worker",
            build_command("worker"),
            build_environment("worker"),
            ROOT,
            "",
            lambda: True,
            restart_if_hung=False,
            soft=_compute_stop_seconds(settings),
            grace=_compute_stop_seconds(settings),
        ),
        ServiceSpec(
            "server",
            build_command("server"),
            build_environment("server"),
            ROOT,
            url,
            answers,
            "--set server.port",
            settings.server.port,
        ),
    ]


def _compute_stop_seconds(settings: ServiceSettings) -> float:
    return settings.worker.stop_seconds + KILL_SLACK_SECONDS


def supervise_service(settings: ServiceSettings, say: Callable[[str], None] = print) -> None:
    """Run both processes until SIGTERM or Ctrl-C.

    Raises: SettingsError if the port is taken; FolderBusy if another supervisor runs; BackendError if the store does
        not answer or a process does not start.
    """
    check_platform()
    folder = make_folder(Path(settings.folder))
    signals: list[int] = []
    is_saved = True

    def record_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    # The shutdown bound is suspended because the worker may take `stop_seconds` to save.
    with (
        FolderLock(folder / "supervisor.lock"),
        suspend_shutdown_bound(),
        handle_signals({signal.SIGTERM: record_signal, signal.SIGINT: record_signal}),
    ):
        servers: list[ManagedService] = []
        try:
            terminate_marked(format_mark(folder), grace=_compute_stop_seconds(settings))
            store = open_service_store(settings)
            has_keys = any(key.revoked is None for key in store.list_keys())
            store.close()
            check_port(settings.server.port, "the training service", "--set server.port=N")
            write_json_atomic(folder / "settings.json", dump_settings(settings))
            servers += [
                ManagedService(spec, resolve_log_path(settings, spec.name))
                for spec in _build_specs(settings)
            ]
            _keep_servers_up(servers, signals, lambda: _print_started(settings, has_keys, say))
        finally:
            is_saved = _stop_servers(servers, signals)
    if is_saved:
        say("stopped; every run is saved")
    else:
        say(
            "stopped before every run was saved; the next start recomputes the rest from the last snapshots"
        )


def _keep_servers_up(
    servers: list[ManagedService], signals: list[int], on_ready: Callable[[], None]
) -> None:
    clock, is_announced = MonotonicClock(), False
    while not signals:
        for server in servers:
            server.step(clock())
            if server.state.restarts and not is_announced:
                raise BackendError(
                    f"the {server.service.name} {server.state.message}; its last lines ({server.state.log}):\n"
                    f"{server.read_log_tail()}"
                )
        if not is_announced and all(server.is_up for server in servers):
            on_ready()
            is_announced = True
        time.sleep(STEP_SECONDS)


def _print_started(settings: ServiceSettings, has_keys: bool, say: Callable[[str], None]) -> None:
    logs = resolve_log_path(settings, "server").parent
    bases = ", ".join(sorted(settings.engine.bases)) or "none; name some in engine.bases"
    say(f"training service  {format_base_url(settings)}  (logs: {logs})")
    say(f"base models       {bases}")
    if not has_keys:
        say(f"no API key yet    posttrain service key create NAME{format_store_options(settings)}")
    say("Ctrl-C stops it; runs are saved and resume at the next start")


def _stop_servers(servers: list[ManagedService], signals: list[int]) -> bool:
    """Stop all processes; a further signal kills them. Return whether the worker exited after saving all runs."""
    worker = servers[0].process if servers else None
    # Each server bounds its own shutdown.
    stop_services(servers, MonotonicClock(), lambda: len(signals), math.inf)
    return worker is not None and worker.returncode in CLEAN_EXIT_CODES
