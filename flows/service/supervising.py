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

from flows.operations.managed_service import ManagedService
from flows.operations.ports import check_port
from flows.operations.processes import check_platform, end_all, mark_of
from flows.operations.services import ROOT, ServiceSpec, ask, base_environment
from flows.operations.steady_clock import SteadyClock
from flows.runtime.prefect_access import own_path
from flows.runtime.stopping import unbounded
from flows.service.store import ServiceStore
from rl_core.errors import BackendError
from rl_core.settings import ServiceSettings
from rl_core.storage.locks import FolderLock
from rl_core.storage.single_files import make_folder, write_json_atomic
from tasks.config import resolve
from tasks.mlflow_environment import without_password

__all__ = ["address_of", "beside_pipelines", "log_of", "same_store", "supervise"]

STEP_SECONDS = 0.2
ENDED = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)  # exit codes of a worker that has saved all runs
END_SECONDS = 5.0  # beyond `worker.stop_seconds`, until the worker is killed


def address_of(settings: ServiceSettings) -> str:
    """Address that clients take as their base URL."""
    host = settings.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def same_store(settings: ServiceSettings) -> str:
    """Options by which another `posttrain service` command finds the store of these settings."""
    changed = {name: getattr(settings, name) for name in ("folder", "store")}
    usual = ServiceSettings()
    return "".join(
        f" --set {shlex.quote(f'{name}={value}')}" for name, value in changed.items() if value != getattr(usual, name)
    )


def log_of(settings: ServiceSettings, name: str) -> Path:
    """Log of `server` or `worker`."""
    return Path(settings.folder) / "logs" / f"{name}.log"


def beside_pipelines(settings: ServiceSettings, output: Path, mlflow: str) -> list[ServiceSpec]:
    """The service's processes among the servers of `posttrain up`, marked as theirs, with their MLflow server.

    Raises: BackendError where the store does not answer.
    """
    folder = make_folder(Path(settings.folder))
    ServiceStore(settings.store_url).close()
    write_json_atomic(folder / "settings.json", resolve(settings))
    option = "the service's file: server.port"
    is_shown = without_password(settings.store) == settings.store  # others may read what `up` keeps
    access = f"a key: posttrain service key create NAME{same_store(settings)}" if is_shown else ""
    return [
        dataclasses.replace(
            spec, name=name, option=option if spec.port is not None else "", access=access if spec.url else "",
            environment={**spec.environment, **base_environment(output, name), "MLFLOW_TRACKING_URI": mlflow,
                         "PYTHONPATH": spec.environment["PYTHONPATH"]},
        )
        for spec, name in zip(_specs(settings), ("engine", "service"), strict=True)
    ]  # fmt: skip


def _specs(settings: ServiceSettings) -> list[ServiceSpec]:
    folder, url = Path(settings.folder), address_of(settings)

    def answers() -> bool:
        try:
            return bool(ask(f"{url}/api/v1/healthz"))
        except (OSError, ValueError):
            return False

    def environment(name: str) -> dict[str, str]:
        found = base_environment(folder, name)
        return found | {"PYTHONPATH": own_path(found)}

    def command(role: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "flows.service.process", role, str(folder / "settings.json"))

    return [
        ServiceSpec("worker", command("worker"), environment("worker"), ROOT, "", lambda: True, watched=False,
                    soft=_saving_seconds(settings), grace=_saving_seconds(settings)),
        ServiceSpec("server", command("server"), environment("server"), ROOT, url, answers, "--set server.port",
                    settings.server.port),
    ]  # fmt: skip


def _saving_seconds(settings: ServiceSettings) -> float:
    return settings.worker.stop_seconds + END_SECONDS


def supervise(settings: ServiceSettings, say: Callable[[str], None] = print) -> None:
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

    with FolderLock(folder / "supervisor.lock"), unbounded():  # the worker may take `stop_seconds` to save
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        servers: list[ManagedService] = []
        try:
            end_all(mark_of(folder), grace=_saving_seconds(settings))
            store = ServiceStore(settings.store_url)
            listed = store.keys()
            has_keys = any(key.revoked is None for key in listed)
            store.close()
            check_port(settings.server.port, "the training service", "--set server.port=N")
            write_json_atomic(folder / "settings.json", resolve(settings))
            servers += [ManagedService(spec, log_of(settings, spec.name)) for spec in _specs(settings)]
            _keep_up(servers, stops, lambda: _announce(settings, has_keys, say))
        finally:
            is_saved = _stop(servers, stops)
            for number, handler in before.items():
                signal.signal(number, handler)
    if is_saved:
        say("stopped; every run is saved")
    else:
        say("stopped before every run was saved; the next start computes the rest again from the last snapshots")


def _keep_up(servers: list[ManagedService], stops: list[int], ready: Callable[[], None]) -> None:
    clock, is_announced = SteadyClock(), False
    while not stops:
        for server in servers:
            server.step(clock())
            if server.state.restarts and not is_announced:
                raise BackendError(
                    f"the {server.service.name} {server.state.message}; its last lines ({server.state.log}):\n"
                    f"{server.tail()}"
                )
        if not is_announced and all(server.is_up for server in servers):
            ready()
            is_announced = True
        time.sleep(STEP_SECONDS)


def _announce(settings: ServiceSettings, has_keys: bool, say: Callable[[str], None]) -> None:
    say(f"training service  {address_of(settings)}  (logs: {log_of(settings, 'server').parent})")
    say(f"base models       {', '.join(sorted(settings.engine.bases)) or 'none; name some in engine.bases'}")
    if not has_keys:
        say(f"no API key yet    posttrain service key create NAME{same_store(settings)}")
    say("Ctrl-C stops it; runs are saved and go on at the next start")


def _stop(servers: list[ManagedService], stops: list[int]) -> bool:
    """Stop all processes; a further signal ends them at once. Returns True where the worker came to its end."""
    worker = servers[0].process if servers else None
    for server in servers:
        server.signal(signal.SIGTERM)
    known = len(stops)
    while not all([server.stop(time.time(), STEP_SECONDS) for server in servers]):  # their keepers bound it
        if len(stops) > known:
            known = len(stops)
            for server in servers:
                server.signal(signal.SIGTERM)
    return worker is not None and worker.returncode in ENDED
