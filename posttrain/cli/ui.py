"""Command `posttrain ui`: MLflow and Prefect pages of an output folder, served on loopback until Ctrl-C.

Both are child processes in separate process groups that end with this process, even on SIGKILL. A service that runs
elsewhere (an http tracking store, PREFECT_API_URL) is not started; its link is printed.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

from flows.runtime import prefect_access
from flows.runtime.embedded_server import locate_database
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_and_output_options, parse_port
from rl_core.errors import BackendError, SettingsError
from rl_core.json_client import find_health_problem
from rl_core.processes.children import kill_group, signal_group, start_child
from rl_core.storage.atomic_files import make_folder, protect_database
from tasks.mlflow_environment import build_server_options, record_served_page

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # a first start creates databases
STOP_SECONDS = 8.0  # grace period before the group is killed
MAX_PORTS_TRIED = 100

EXAMPLES = ("ui", "ui --output outputs --mlflow-port 5000 --prefect-port 4200")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_and_output_options(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, loopback)"
    )
    for server, number in (("mlflow", 5000), ("prefect", 4200)):
        parser.add_argument(
            f"--{server}-port",
            type=parse_port,
            default=number,
            metavar="PORT",
            help=f"default: {number}, or the next free port",
        )


def run_command(arguments: argparse.Namespace) -> int:
    """Serve the MLflow and the Prefect pages until Ctrl-C."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.operations.connection import find_running_servers, format_links

    output = Path(settings.output if settings else arguments.output)
    state = find_running_servers(output)
    if state is not None:
        print(f"`posttrain up` serves both:\n{format_links(state, output)}")
        return 0
    serve_tracking_pages(
        output,
        settings.tracking.uri if settings else None,
        host=arguments.host,
        mlflow_port=arguments.mlflow_port,
        prefect_port=arguments.prefect_port,
    )
    return 0


@dataclass
class PageServer:
    """Web page: name, link, and serving process (None = runs elsewhere)."""

    name: str
    url: str
    health: str = ""
    log_path: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    notes: list[str] = field(default_factory=list)

    def is_healthy(self) -> bool:
        """Return whether the page is up."""
        return not find_health_problem(self.health, timeout_s=2.0)

    def read_log_tail(self) -> str:
        """Return the last output lines of the process."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])

    def check_alive(self) -> None:
        """Raise BackendError with the last output lines if the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            code = self.process.returncode
            raise BackendError(
                f"the {self.name} server ended (exit code {code}); its last lines:\n{self.read_log_tail()}"
            )


class PageServers:
    """Context manager that serves both pages."""

    def __init__(
        self,
        output: Path,
        tracking_uri: str | None = None,
        *,
        host: str = "127.0.0.1",
        mlflow_port: int = 5000,
        prefect_port: int = 4200,
    ) -> None:
        """Configure the pages; nothing starts before `with`. Raises: SettingsError for a host that is not loopback."""
        from tasks.tracking import Tracking

        if host not in ("127.0.0.1", "localhost", "::1"):
            raise SettingsError(
                f"host: '{host}' is not loopback; the MLflow page asks for no password, so use an SSH tunnel"
            )
        self.output, self.host = Path(output).resolve(), host
        self._tracking = Tracking(tracking_uri, self.output)
        self._ports = {"MLflow": mlflow_port, "Prefect": prefect_port}
        self._reserved_ports: set[int] = set()
        self.services: list[PageServer] = []

    def __enter__(self) -> PageServers:
        try:
            self.services.append(self._start_mlflow())
            self.services.append(self._start_prefect())
            self._wait_until_healthy()
        except BaseException:
            self.stop_processes()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_processes()

    def _start_mlflow(self) -> PageServer:
        from tasks.tracking import build_offline_environment

        store = self._tracking.store
        if not store.is_local:
            return PageServer("MLflow", store.label, notes=["(runs elsewhere)"])
        if store.uri.startswith("sqlite:///"):
            make_folder(Path(store.uri.removeprefix("sqlite:///")).parent)
        artifacts = self.output / "mlflow" / "artifacts"
        service = self._build_service("MLflow", "/health")
        port = self._ports["MLflow"]
        arguments = [
            "mlflow",
            "server",
            "--backend-store-uri",
            store.uri,
            "--default-artifact-root",
            artifacts.as_uri(),
            "--host",
            self.host,
            "--port",
            str(port),
            "--workers",
            "1",
            "--allowed-hosts",
            f"{self._format_netloc(port)},127.0.0.1:{port},localhost:{port}",
            "--cors-allowed-origins",
            prefect_access.format_loopback_origins(port),
            *build_server_options(),
        ]
        environment = {**build_offline_environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._start_process(service, arguments, environment)
        return service

    def _start_prefect(self) -> PageServer:
        from flows.runtime.prefect_home import build_prefect_environment

        external_url = os.environ.get("PREFECT_API_URL")
        if external_url:
            return PageServer(
                "Prefect",
                external_url.removesuffix("/").removesuffix("/api"),
                notes=["(runs elsewhere)"],
            )
        protect_database(locate_database(self.output / "prefect"))
        service = self._build_service("Prefect", "/api/health")
        port = self._ports["Prefect"]
        environment = {
            **build_prefect_environment(self.output),
            "PREFECT_CLI_PROMPT": "false",
            "PREFECT_UI_API_URL": f"{service.url}/api",
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
            **prefect_access.build_server_environment(self.output, port),
        }
        password_file = shlex.quote(str(prefect_access.locate_password_file(self.output)))
        service.notes.append(f"(asks once for the password: cat {password_file})")
        command = [
            prefect_access.__name__,
            "server",
            "start",
            "--host",
            self.host,
            "--port",
            str(port),
        ]
        self._start_process(service, command, environment)
        return service

    def _format_netloc(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def _build_service(self, name: str, health: str) -> PageServer:
        preferred = self._ports[name]
        port = self._ports[name] = self._find_free_port(preferred)
        url = f"http://{self._format_netloc(port)}"
        service = PageServer(
            name, url, url + health, self.output / "logs" / f"{name.lower()}-ui.log"
        )
        if port != preferred:
            service.notes.append(f"(port {preferred} is taken)")
        return service

    def _find_free_port(self, preferred: int) -> int:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        for port in range(preferred, min(65536, preferred + MAX_PORTS_TRIED)):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Like servers: a port with connections in TIME_WAIT counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except PermissionError as error:
                    raise SettingsError(
                        f"port {preferred}: {error.strerror}; use one above 1023"
                    ) from None
                except OSError:
                    continue
            if port not in self._reserved_ports:
                self._reserved_ports.add(port)
                return port
        raise BackendError(
            f"no free port on {self.host} from {preferred} on; name another with --mlflow-port/--prefect-port"
        )

    def _start_process(
        self, service: PageServer, arguments: list[str], environment: dict[str, str]
    ) -> None:
        assert service.log_path is not None
        service.process = start_child(
            [sys.executable, "-P", "-m", *arguments],
            log=service.log_path,
            environment={**environment, **os.environ, **_select_forced_variables(environment)},
            folder=self.output,
            death_signal=signal.SIGTERM,
        )

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        waiting = [service for service in self.services if service.process is not None]
        while waiting:
            for service in list(waiting):
                service.check_alive()
                if service.is_healthy():
                    waiting.remove(service)
            if waiting and time.monotonic() > deadline:
                silent = waiting[0]
                raise BackendError(
                    f"the {silent.name} server does not answer at {silent.url}; last lines:\n{silent.read_log_tail()}"
                )
            time.sleep(0.1)

    def watch_processes(self) -> None:
        """Watch the servers; never return. Raises: BackendError if a server ends unexpectedly."""
        while True:
            for service in self.services:
                service.check_alive()
            time.sleep(0.5)

    def stop_processes(self) -> None:
        """Terminate both process groups, with SIGKILL after the grace period."""
        running = [service.process for service in self.services if service.process is not None]
        for process in running:
            signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.info("process %d takes too long to stop and is killed", process.pid)
            # Descendants may outlive their group leader.
            while signal_group(process, 0) and time.monotonic() < deadline:
                time.sleep(0.05)
            kill_group(process)
        self.services = []


def _select_forced_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that override the user's: otherwise a page sends telemetry, prompts, or lets others in."""
    names = (
        "MLFLOW_DISABLE_TELEMETRY",
        "PREFECT_SERVER_ANALYTICS_ENABLED",
        "PREFECT_CLI_PROMPT",
        "PREFECT_UI_API_URL",
        "PYTHONPATH",
        prefect_access.SERVER_AUTH_VARIABLE,
        prefect_access.ORIGINS_VARIABLE,
    )
    return {name: environment[name] for name in names if name in environment}


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def serve_tracking_pages(
    output: Path,
    tracking_uri: str | None = None,
    *,
    host: str = "127.0.0.1",
    mlflow_port: int = 5000,
    prefect_port: int = 4200,
) -> None:
    """Serve both pages until Ctrl-C or SIGTERM; print the links once both answer.

    Args:
        output: the output folder, whose stores are shown.
        tracking_uri: the MLflow store; None as for runs (MLFLOW_TRACKING_URI, else the folder's store).
        host: a loopback name; MLflow's page has no password.
        mlflow_port, prefect_port: if taken, the next free port is used.
    Raises: SettingsError; BackendError if a server does not start, or ends unexpectedly.
    """
    make_folder(output)
    # SIGINT too: shells start background jobs with SIGINT ignored.
    previous_handlers = {
        number: signal.signal(number, _raise_interrupt)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        print("starting the MLflow and Prefect pages ...", flush=True)
        pages = PageServers(
            output, tracking_uri, host=host, mlflow_port=mlflow_port, prefect_port=prefect_port
        )
        with pages as running:
            for service in running.services:
                if service.process is not None:
                    record_served_page(
                        output, "mlflow" if service.name == "MLflow" else "prefect", service.url
                    )
                print(
                    f"{service.name:8} {service.url} {' '.join(service.notes)}".rstrip(), flush=True
                )
            print("Ctrl-C stops both", flush=True)
            running.watch_processes()
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
