"""`posttrain service up`: HTTP server and worker of a service's folder, started again when they die."""

from __future__ import annotations

import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flows.runtime.prefect_access import build_python_path
from flows.runtime.stopping import suspend_shutdown_bound
from posttrain.operations.managed_service import ManagedService, MonotonicClock
from posttrain.operations.processes import check_platform, check_port, format_mark, terminate_marked
from posttrain.operations.services import ROOT, ServiceSpec, build_base_environment, fetch_json
from posttrain.training_service.store import ServiceStore
from rl_core.errors import BackendError
from rl_core.settings import ServiceSettings
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.locks import FolderLock
from tasks.config import dump_settings
from tasks.mlflow_environment import strip_uri_password

STEP_SECONDS = 0.2
CLEAN_EXIT_CODES = (
    0,
    128 + signal.SIGTERM,
    128 + signal.SIGINT,
)  # exit codes of a worker that has saved all runs
KILL_SLACK_SECONDS = 5.0  # beyond `worker.stop_seconds`, until the worker is killed


def format_base_url(settings: ServiceSettings) -> str:
    """Address that clients take as their base URL."""
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def format_store_options(settings: ServiceSettings) -> str:
    """Options by which another `posttrain service` command finds the store of these settings."""
    changed = {name: getattr(settings, name) for name in ("folder", "store")}
    usual = ServiceSettings()
    return "".join(
        f" --set {shlex.quote(f'{name}={value}')}"
        for name, value in changed.items()
        if value != getattr(usual, name)
    )


def resolve_log_path(settings: ServiceSettings, name: str) -> Path:
    """Log of `server` or `worker`."""
    return Path(settings.folder) / "logs" / f"{name}.log"


def prepare_pipeline_specs(
    settings: ServiceSettings, output: Path, mlflow: str
) -> list[ServiceSpec]:
    """The service's processes among the servers of `posttrain up`, marked as theirs, with their MLflow server.

    Raises: BackendError where the store does not answer.
    """
    folder = make_folder(Path(settings.folder))
    ServiceStore(settings.store_url).close()
    write_json_atomic(folder / "settings.json", dump_settings(settings))
    option = "the service's file: server.port"
    is_shown = (
        strip_uri_password(settings.store) == settings.store
    )  # others may read what `up` keeps
    access = (
        f"a key: posttrain service key create NAME{format_store_options(settings)}"
        if is_shown
        else ""
    )
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
        except (OSError, ValueError):
            return False

    def environment(name: str) -> dict[str, str]:
        found = build_base_environment(folder, name)
        return found | {"PYTHONPATH": build_python_path(found)}

    def command(role: str) -> tuple[str, ...]:
        return (
            sys.executable,
            "-P",
            "-m",
            "posttrain.training_service.process",
            role,
            str(folder / "settings.json"),
        )

    return [
        ServiceSpec(
            "worker",
            command("worker"),
            environment("worker"),
            ROOT,
            "",
            lambda: True,
            restart_if_hung=False,
            soft=_compute_stop_seconds(settings),
            grace=_compute_stop_seconds(settings),
        ),
        ServiceSpec(
            "server",
            command("server"),
            environment("server"),
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

    Raises: SettingsError for a port that is taken; FolderBusy where another supervisor runs; BackendError where the
        store does not answer, or a process does not start.
    """
    check_platform()
    folder = make_folder(Path(settings.folder))
    stops: list[int] = []
    is_saved = True

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    with (
        FolderLock(folder / "supervisor.lock"),
        suspend_shutdown_bound(),
    ):  # the worker may take `stop_seconds` to save
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        servers: list[ManagedService] = []
        try:
            terminate_marked(format_mark(folder), grace=_compute_stop_seconds(settings))
            store = ServiceStore(settings.store_url)
            listed = store.list_keys()
            has_keys = any(key.revoked is None for key in listed)
            store.close()
            check_port(settings.server.port, "the training service", "--set server.port=N")
            write_json_atomic(folder / "settings.json", dump_settings(settings))
            servers += [
                ManagedService(spec, resolve_log_path(settings, spec.name))
                for spec in _build_specs(settings)
            ]
            _keep_servers_up(servers, stops, lambda: _print_started(settings, has_keys, say))
        finally:
            is_saved = _stop_servers(servers, stops)
            for number, handler in before.items():
                signal.signal(number, handler)
    if is_saved:
        say("stopped; every run is saved")
    else:
        say(
            "stopped before every run was saved; the next start computes the rest again from the last snapshots"
        )


def _keep_servers_up(
    servers: list[ManagedService], stops: list[int], ready: Callable[[], None]
) -> None:
    clock, is_announced = MonotonicClock(), False
    while not stops:
        for server in servers:
            server.step(clock())
            if server.state.restarts and not is_announced:
                raise BackendError(
                    f"the {server.service.name} {server.state.message}; its last lines ({server.state.log}):\n"
                    f"{server.read_log_tail()}"
                )
        if not is_announced and all(server.is_up for server in servers):
            ready()
            is_announced = True
        time.sleep(STEP_SECONDS)


def _print_started(settings: ServiceSettings, has_keys: bool, say: Callable[[str], None]) -> None:
    say(
        f"training service  {format_base_url(settings)}  (logs: {resolve_log_path(settings, 'server').parent})"
    )
    say(
        f"base models       {', '.join(sorted(settings.engine.bases)) or 'none; name some in engine.bases'}"
    )
    if not has_keys:
        say(f"no API key yet    posttrain service key create NAME{format_store_options(settings)}")
    say("Ctrl-C stops it; runs are saved and go on at the next start")


def _stop_servers(servers: list[ManagedService], stops: list[int]) -> bool:
    """Stop all processes; a further signal ends them at once. Returns True where the worker came to its end."""
    worker = servers[0].process if servers else None
    for server in servers:
        server.send_signal(signal.SIGTERM)
    known = len(stops)
    while not all(
        [server.wait_for_exit(time.time(), STEP_SECONDS) for server in servers]
    ):  # their keepers bound it
        if len(stops) > known:
            known = len(stops)
            for server in servers:
                server.send_signal(signal.SIGTERM)
    return worker is not None and worker.returncode in CLEAN_EXIT_CODES
