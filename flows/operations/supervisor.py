"""Supervisor: starts the servers, keeps them up, registers deployments, and stops everything in order."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from flows.operations.checks import explain
from flows.operations.database import prepare
from flows.operations.managed_service import ManagedService
from flows.operations.ports import check_ports
from flows.operations.processes import ProcessId, end_all, mark_of, spawn
from flows.operations.registration import RegistrationRequest
from flows.operations.services import ROOT, ServiceSpec, client_environment, mlflow_url, services
from flows.operations.state import Options, State, StatePaths, write_state
from flows.operations.steady_clock import SteadyClock
from flows.runtime.stopping import unbounded
from rl_core.errors import BackendError, FolderBusy
from rl_core.storage.folder_removal import clear_leftovers
from rl_core.storage.locks import FolderLock
from rl_core.storage.single_files import make_folder, write_json_atomic
from tasks.mlflow_environment import without_password
from tasks.shipped import shipped

__all__ = ["MoreServers", "Supervisor", "no_more"]

log = logging.getLogger(__name__)

STEP_SECONDS = 0.25
STOP_SECONDS = 100.0  # per server; its keeper kills it earlier
REPAIR = signal.SIGUSR1


MoreServers = Callable[[Path, str], list[ServiceSpec]]  # of an output folder and the address of MLflow


def no_more(output: Path, mlflow: str) -> list[ServiceSpec]:
    """No servers beside."""
    return []


class Stop(Exception):
    """A stop signal arrived."""


class Supervisor:
    """All servers of an output folder, from `start` to `stop`; `run` does both."""

    def __init__(
        self,
        output: Path,
        options: Options,
        address: str,
        *,
        mlflow_elsewhere: str = "",
        say: Callable[[str], None] = print,
        also: MoreServers = no_more,
    ) -> None:
        """`address`: database address with password; `options.database` is the version without it.

        also: servers beside Prefect, MLflow and the worker; it is called when the folder is locked and free.
        """
        self.output, self.options, self._address = output, options, address
        self._mlflow_elsewhere, self._say, self._also = mlflow_elsewhere, say, also
        self.places = StatePaths(output)
        own = ProcessId.of(os.getpid())
        assert own is not None
        is_shown = without_password(mlflow_elsewhere) == mlflow_elsewhere  # others may read the state
        self.state = State(supervisor=own, options=options, mlflow=mlflow_elsewhere if is_shown else "")
        self.servers: list[ManagedService] = []
        self._registration: subprocess.Popen[bytes] | None = None
        self._clock = SteadyClock()
        self._stops = 0
        self._repair = False
        self._written: dict[str, Any] = {}

    # -- from start to end --------------------------------------------------------------------------------------

    def run(self, ready: Callable[[State], None]) -> None:
        """Start everything, call `ready`, and keep it up until a signal; then stop everything.

        Raises: FolderBusy if another supervisor runs; SettingsError, BackendError if a server does not start.
        """
        with self._lock(), unbounded():  # runs and services save before they end, longer than a command has
            before = self._take_signals()
            try:
                self._start()
                ready(self.state)
                while True:
                    self._step()
            except Stop:
                self._say("stopping ...")
            finally:
                self._stop()
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _lock(self) -> FolderLock:
        """Acquire the lock, tolerating the brief holds of `is_running`."""
        clear_leftovers(make_folder(self.places.folder))
        return _Patient(self.places.lock)

    def _take_signals(self) -> dict[int, Any]:
        def stop(number: int, frame: FrameType | None) -> None:
            self._stops += 1

        def repair(number: int, frame: FrameType | None) -> None:
            self._repair = True

        # SIGINT too: shells start background jobs with SIGINT ignored.
        before: dict[int, Any] = {
            int(number): signal.signal(number, stop)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # stays ignored under nohup
        }
        before[REPAIR] = signal.signal(REPAIR, repair)
        return before

    def _start(self) -> None:
        if ended := end_all(mark_of(self.output), grace=15.0):
            self._say(f"ended {len(ended)} processes that an earlier `posttrain up` left behind")
        specs = services(self.output, self.options, prepare(self._address), self._mlflow_elsewhere)
        specs += self._also(self.output, self.mlflow)
        check_ports([(spec.port, f"the {spec.name} server", spec.option) for spec in specs if spec.port is not None])
        self.servers = [ManagedService(spec, self.places.log(spec.name)) for spec in specs]
        self.state.services = [server.state for server in self.servers]
        self._say(f"starting {', '.join(spec.name for spec in specs)} (logs: {self.output / 'logs'}) ...")
        while not all(server.is_up for server in self.servers):
            self._step()
            for server in self.servers:
                if server.state.restarts:
                    raise self._failed(server)
        write_json_atomic(self.places.last, dataclasses.asdict(self.options))
        self._register()
        while self._registration is not None:
            self._step()
        self.state.phase = "up"
        self._write()

    def _failed(self, server: ManagedService) -> BackendError:
        tail = server.tail()
        advice = explain(tail)
        return BackendError(
            f"the {server.service.name} server {server.state.message}"
            f"{f'; {advice}' if advice else ''}; its last lines ({server.state.log}):\n{tail}"
        )

    def _step(self) -> None:
        """One pass over all servers. Raises: Stop."""
        if self._stops:
            raise Stop
        now = self._clock()
        for server in self.servers:
            if server.process is not None or self._may_start(server.service):
                server.step(now)
        if self._repair and self._registration is None:
            self._repair = False
            for server in self.servers:
                server.at_once()
            self.state.repairs += 1
            self._register()
        self._look_at_registration()
        self._write()
        time.sleep(STEP_SECONDS)

    def _may_start(self, service: ServiceSpec) -> bool:
        return (
            not service.needs or next(server for server in self.servers if server.service.name == service.needs).is_up
        )

    # -- registration -------------------------------------------------------------------------------------------

    def _register(self) -> None:
        folder = Path(self.options.deployments or shipped("deployments"))
        root = folder.parent if self.options.deployments else ROOT
        request = RegistrationRequest(
            root=str(root), pool=self.options.pool, gpu_slots=self.options.gpu_slots,
            deployments=str(folder / "prefect.yaml"), automations=str(folder / "automations.yaml"),
        )  # fmt: skip
        asked = self.places.folder / "request.json"
        write_json_atomic(asked, dataclasses.asdict(request))
        self.places.registration.unlink(missing_ok=True)
        self.state.registration = {}
        environment = client_environment(self.output, "registration", self.options, self.mlflow)
        command = [sys.executable, "-m", "flows.operations.registration", str(asked), str(self.places.registration)]
        self._registration = spawn(command, environment, ROOT, self.places.log("registration"))

    def _look_at_registration(self) -> None:
        if self._registration is None or self._registration.poll() is None:
            return
        code, self._registration = self._registration.returncode, None
        try:
            self.state.registration = json.loads(self.places.registration.read_text())
        except (OSError, ValueError):
            problem = f"the registration ended with exit code {code}; see {self.places.log('registration')}"
            self.state.registration = {"at": time.time(), "problem": problem}

    @property
    def mlflow(self) -> str:
        """Address of the MLflow server for runs."""
        return self._mlflow_elsewhere or mlflow_url(self.options)

    # -- the end ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop the registration, the worker with its runs, then the servers that these report to."""
        self.state.phase = "stopping"
        self._write()
        if self._registration is not None and self._registration.poll() is None:
            self._registration.terminate()
            self._registration.wait()
        self._registration = None
        for group in ([s for s in self.servers if s.service.needs], [s for s in self.servers if not s.service.needs]):
            stops = self._stops
            for server in group:
                server.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            for server in group:
                while not server.stop(self._clock(), 0.2) and time.monotonic() < deadline:
                    if self._stops > stops:  # a second signal: do not wait for runs to save
                        stops = self._stops
                        for impatient in group:
                            impatient.signal(signal.SIGTERM)
            self._write()
        end_all(mark_of(self.output), grace=0.0)
        self.places.state.unlink(missing_ok=True)

    def _write(self) -> None:
        now = dataclasses.asdict(self.state)
        if now != self._written and self.servers:
            write_state(self.places, self.state)
            self._written = now


class _Patient(FolderLock):
    """Lock with retries for a second, as `is_running` holds it briefly."""

    def __enter__(self) -> FolderLock:
        for _ in range(10):
            try:
                return super().__enter__()
            except FolderBusy:
                time.sleep(0.1)
        return super().__enter__()
