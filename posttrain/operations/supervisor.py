"""Supervisor: starts the servers, keeps them up, registers deployments, and stops everything in order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from flows.runtime.prefect_home import locate_prefect_home
from flows.runtime.stopping import suspend_shutdown_bound
from flows.runtime.terminal import StatusLine
from posttrain.operations.connection import explain_known_error
from posttrain.operations.database import prepare_databases
from posttrain.operations.managed_service import ManagedService, stop_services
from posttrain.operations.processes import (
    ProcessId,
    check_ports,
    format_mark,
    terminate_marked,
)
from posttrain.operations.registration import RegistrationRequest
from posttrain.operations.services import (
    ROOT,
    ServiceSpec,
    build_client_environment,
    build_service_specs,
    format_mlflow_url,
)
from posttrain.operations.state import (
    ServerOptions,
    ServiceState,
    StatePaths,
    SupervisorState,
    write_last_options,
    write_state,
)
from rl_core.errors import BackendError, FolderBusy
from rl_core.processes.children import spawn_server
from rl_core.processes.supervision import MonotonicClock, handle_signals
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock
from tasks.mlflow_environment import strip_uri_password
from tasks.shipped import shipped

log = logging.getLogger(__name__)

STEP_SECONDS = 0.25
STOP_SECONDS = 100.0  # per server; its keeper kills it earlier
REPAIR_SIGNAL = signal.SIGUSR1

# Builds further servers for an output folder and the address of MLflow.
ExtraServers = Callable[[Path, str], list[ServiceSpec]]


def return_no_servers(output: Path, mlflow: str) -> list[ServiceSpec]:
    """Return no further servers."""
    return []


class StartProgress:
    """Progress of starting servers: a live line in a terminal, and a line for each server that is up."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        """Begin to count the seconds."""
        self._say, self._clock, self._started = say, clock, clock()
        self._status = StatusLine(sys.stdout)
        self._reported: set[str] = set()

    def report_services(self, services: Iterable[ServiceState]) -> None:
        """Report the servers that are up now, and those that are waited for."""
        seconds = self._clock() - self._started
        waiting = []
        for service in services:
            if service.phase != "up":
                waiting.append(service.name)
            elif service.name not in self._reported:
                self._reported.add(service.name)
                self._status.clear_line()
                self._say(f"{service.name:9}up after {seconds:.0f} s")
        if waiting:
            self._status(f"starting {', '.join(waiting)} ... {seconds:.0f} s")
        else:
            self._status(f"registering deployments and automations ... {seconds:.0f} s")

    def clear_line(self) -> None:
        """Remove the live line."""
        self._status.clear_line()


class StopRequested(Exception):
    """A stop signal arrived."""


class Supervisor:
    """All servers of an output folder, from their start to their end."""

    def __init__(
        self,
        output: Path,
        options: ServerOptions,
        address: str,
        *,
        external_mlflow: str = "",
        say: Callable[[str], None] = print,
        extra_servers: ExtraServers = return_no_servers,
    ) -> None:
        """Prepare the supervisor.

        Args:
            address: database address with password; `options.database` is the version without it.
            extra_servers: builds servers besides Prefect, MLflow and the worker; called when the folder is locked and
                the leftovers of earlier servers have ended.
        """
        self.output, self.options, self._address = output, options, address
        self._external_mlflow, self._say, self._extra_servers = external_mlflow, say, extra_servers
        self.paths = StatePaths(output)
        process = ProcessId.from_pid(os.getpid())
        assert process is not None
        # Other users may read the state.
        has_password = strip_uri_password(external_mlflow) != external_mlflow
        self.state = SupervisorState(
            supervisor=process, options=options, mlflow="" if has_password else external_mlflow
        )
        self.servers: list[ManagedService] = []
        self._registration: subprocess.Popen[bytes] | None = None
        self._clock = MonotonicClock()
        self._num_stop_signals = 0
        self._is_repair_requested = False
        self._written_state: dict[str, Any] = {}

    def run_until_stopped(self, ready: Callable[[SupervisorState], None]) -> None:
        """Start everything, call `ready`, and keep everything up until a signal; then stop everything.

        Raises: FolderBusy if another supervisor runs; SettingsError, BackendError if a server does not start.
        """
        # Runs and services save before they end, which takes longer than other commands may.
        with (
            self._acquire_lock(),
            self._hold_prefect_home(),
            suspend_shutdown_bound(),
            handle_signals(self._build_signal_handlers()),
        ):
            try:
                self._start_servers()
                ready(self.state)
                while True:
                    self._step_servers()
            except StopRequested:
                self._say("stopping ...")
            finally:
                self._stop_servers()

    def _acquire_lock(self) -> FolderLock:
        """Return the lock of the folder, which tolerates that `is_running` holds it briefly."""
        clear_leftovers(make_folder(self.paths.folder))
        return _RetryingLock(self.paths.lock_file)

    @contextlib.contextmanager
    def _hold_prefect_home(self) -> Iterator[None]:
        """Hold a home outside the output folder, so that no other worker runs its deployments. Raises: FolderBusy."""
        home = locate_prefect_home(self.output)
        if home.is_relative_to(self.output):
            yield
            return
        lock = FolderLock(make_folder(home) / "posttrain-up.lock")
        try:
            lock.__enter__()
        except FolderBusy:
            raise FolderBusy(
                f"PREFECT_HOME: another `posttrain up` uses {home}; stop it, set another PREFECT_HOME, or unset it to "
                f"have Prefect's database in {self.output}"
            ) from None
        with contextlib.ExitStack() as stack:
            stack.push(lock.__exit__)
            yield

    def _build_signal_handlers(self) -> dict[int, Callable[[int, FrameType | None], None]]:
        def stop(number: int, frame: FrameType | None) -> None:
            self._num_stop_signals += 1

        def repair(number: int, frame: FrameType | None) -> None:
            self._is_repair_requested = True

        # SIGINT too: shells start background jobs with SIGINT ignored.
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # stays ignored under nohup
            numbers.append(signal.SIGHUP)
        return {**dict.fromkeys(numbers, stop), REPAIR_SIGNAL: repair}

    def _start_servers(self) -> None:
        if ended := terminate_marked(format_mark(self.output), grace=15.0):
            self._say(f"ended {len(ended)} processes that an earlier `posttrain up` left behind")
        specs = build_service_specs(
            self.output, self.options, prepare_databases(self._address), self._external_mlflow
        )
        specs += self._extra_servers(self.output, self.mlflow)
        ports = [
            (spec.port, f"the {spec.name} server", spec.option)
            for spec in specs
            if spec.port is not None
        ]
        check_ports(ports)
        self.servers = [
            ManagedService(spec, self.paths.resolve_log_path(spec.name)) for spec in specs
        ]
        self.state.services = [server.state for server in self.servers]
        self._say(
            f"starting {', '.join(spec.name for spec in specs)} (logs: {self.output / 'logs'}) ..."
        )
        progress = StartProgress(self._say, self._clock)
        try:
            has_registered = False
            while not (has_registered and self._registration is None and self._are_all_up()):
                if not has_registered and self._can_register():
                    has_registered = True
                    self._start_registration()
                self._step_servers()
                progress.report_services(self.state.services)
                for server in self.servers:
                    if server.state.restarts:
                        raise self._build_start_error(server)
            write_last_options(self.paths, self.options, locate_prefect_home(self.output))
        finally:
            progress.clear_line()
        self.state.phase = "up"
        self._write_changed_state()

    def _are_all_up(self) -> bool:
        return all(server.is_up for server in self.servers)

    def _can_register(self) -> bool:
        """Return whether Prefect's server is up, which the registration calls; it does not wait for the others."""
        return all(server.is_up for server in self.servers if server.service.name == "prefect")

    def _build_start_error(self, server: ManagedService) -> BackendError:
        tail = server.read_log_tail()
        known_error = explain_known_error(tail)
        advice = f"; {known_error}" if known_error else ""
        return BackendError(
            f"the {server.service.name} server {server.state.message}{advice}; "
            f"its last lines ({server.state.log}):\n{tail}"
        )

    def _step_servers(self) -> None:
        """Step all servers once. Raises: StopRequested."""
        if self._num_stop_signals:
            raise StopRequested
        now = self._clock()
        for server in self.servers:
            if server.process is not None or self._can_start(server.service):
                server.step(now)
        if self._is_repair_requested and self._registration is None:
            self._is_repair_requested = False
            for server in self.servers:
                server.skip_restart_delay()
            self.state.repairs += 1
            self._start_registration()
        self._check_registration()
        self._write_changed_state()
        time.sleep(STEP_SECONDS)

    def _can_start(self, service: ServiceSpec) -> bool:
        required = service.required_service
        return not required or any(
            server.is_up for server in self.servers if server.service.name == required
        )

    def _start_registration(self) -> None:
        folder = Path(self.options.deployments or shipped("deployments"))
        root = folder.parent if self.options.deployments else ROOT
        request = RegistrationRequest(
            root=str(root),
            pool=self.options.pool,
            gpu_slots=self.options.gpu_slots,
            deployments=str(folder / "prefect.yaml"),
            automations=str(folder / "automations.yaml"),
        )
        request_file = self.paths.folder / "request.json"
        write_json_atomic(request_file, dataclasses.asdict(request))
        self.paths.registration_file.unlink(missing_ok=True)
        self.state.registration = {}
        environment = build_client_environment(
            self.output, "registration", self.options, self.mlflow
        )
        command = [
            sys.executable,
            "-m",
            "posttrain.operations.registration",
            str(request_file),
            str(self.paths.registration_file),
        ]
        self._registration = spawn_server(
            command, environment, ROOT, self.paths.resolve_log_path("registration")
        )

    def _check_registration(self) -> None:
        if self._registration is None or self._registration.poll() is None:
            return
        code, self._registration = self._registration.returncode, None
        try:
            self.state.registration = json.loads(self.paths.registration_file.read_text())
        except (OSError, ValueError):
            log_file = self.paths.resolve_log_path("registration")
            problem = f"the registration ended with exit code {code}; see {log_file}"
            self.state.registration = {"at": time.time(), "problem": problem}

    @property
    def mlflow(self) -> str:
        """Address of the MLflow server for runs."""
        return self._external_mlflow or format_mlflow_url(self.options)

    def _stop_servers(self) -> None:
        """Stop the registration, the worker with its runs, then the servers to which these report."""
        self.state.phase = "stopping"
        self._write_changed_state()
        if self._registration is not None and self._registration.poll() is None:
            self._registration.terminate()
            self._registration.wait()
        self._registration = None
        self._stop_group([server for server in self.servers if server.service.required_service])
        self._stop_group([server for server in self.servers if not server.service.required_service])
        terminate_marked(format_mark(self.output), grace=0.0)
        self.paths.state_file.unlink(missing_ok=True)

    def _stop_group(self, group: list[ManagedService]) -> None:
        stop_services(group, self._clock, lambda: self._num_stop_signals, STOP_SECONDS)
        self._write_changed_state()

    def _write_changed_state(self) -> None:
        state = dataclasses.asdict(self.state)
        if state != self._written_state and self.servers:
            write_state(self.paths, self.state)
            self._written_state = state


class _RetryingLock(FolderLock):
    """Lock that retries for a second, because `is_running` holds it briefly."""

    def __enter__(self) -> FolderLock:
        for _ in range(10):
            try:
                return super().__enter__()
            except FolderBusy:
                time.sleep(0.1)
        return super().__enter__()
