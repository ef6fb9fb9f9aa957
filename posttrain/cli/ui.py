"""Command `posttrain ui`: live page, MLflow and Prefect pages of an output folder, served on loopback until Ctrl-C.

The pages are child processes in separate process groups that end with this process, even on SIGKILL. A service that
runs elsewhere (an http tracking store, PREFECT_API_URL) is not started; its link is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, get_args

from flows.runtime import prefect_access
from flows.runtime.embedded_server import build_migration_environment, prepare_database
from flows.runtime.prefect_access import build_python_path
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, parse_port
from rl_core.errors import BackendError, DataError, SettingsError
from rl_core.json_client import find_health_problem
from rl_core.processes.children import kill_group, signal_group, start_child
from rl_core.storage.atomic_files import make_folder
from tasks.mlflow_environment import build_server_options, record_served_page

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # a first start creates databases
STOP_SECONDS = 8.0  # grace period before the group is killed
MAX_PORTS_TRIED = 100
LIVE_PAGE_HINT = (
    "the live page needs posttrain[monitor]: python -m posttrain.install --extras monitor"
)

PageName = Literal["live", "mlflow", "prefect"]

EXAMPLES = (
    "ui    (all pages, until Ctrl-C)",
    "ui demo-7f3a --live    (the live page of one run)",
    "ui --mlflow --mlflow-port 5100",
    "ui demo-7f3a --export numbers    (the run's curves as CSV and JSON, without a page)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(
        parser,
        optional=True,
        was_option=True,
        metavar="CONFIG|RUN",
        help_text="a configuration, whose output folder is shown, or a run (default: follow the newest)",
    )
    for page, help_text in (
        ("live", "the live page of running and finished runs (needs posttrain[monitor])"),
        ("mlflow", "MLflow's pages: runs, curves, models"),
        ("prefect", "Prefect's pages: flow runs, schedules"),
    ):
        parser.add_argument(f"--{page}", action="store_true", help=f"serve {help_text}")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of MLflow and Prefect (default: 127.0.0.1, loopback)",
    )
    parser.add_argument(
        "--port",
        type=parse_port,
        metavar="PORT",
        help="of the live page (default: 7860, or the next free port)",
    )
    for server, number in (("mlflow", 5000), ("prefect", 4200)):
        parser.add_argument(
            f"--{server}-port",
            type=parse_port,
            default=number,
            metavar="PORT",
            help=f"default: {number}, or the next free port",
        )
    parser.add_argument(
        "--export",
        metavar="FOLDER",
        help="write the run (of a configuration: its newest run) as CSV and JSON into FOLDER instead of serving pages",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Serve the chosen pages until Ctrl-C, or export a run as files."""
    check_loopback_host(arguments.host)
    target = run_setup.resolve_target(arguments)
    if target.run is not None:
        from tasks.tracking.run_ids import refuse_sweep

        refuse_sweep(target.run)
    run = "" if target.run is None else target.run.short_id
    if arguments.export is not None:
        from posttrain.monitor.server import export_run_files

        if target.settings is not None:
            run = _find_newest_run(target.output, target.settings.name)
        for path in export_run_files(target.output, run, Path(arguments.export)):
            print(path)
        return 0
    pages = [page for page in get_args(PageName) if getattr(arguments, page)]
    has_live_page = importlib.util.find_spec("gradio") is not None
    wants_live_page = "live" in pages or (not pages and has_live_page)
    if pages == ["live"]:  # which checks folder and run before it needs Gradio
        return _serve_live_page(target.output, run, arguments.port)
    if "live" in pages and not has_live_page:
        raise SettingsError(LIVE_PAGE_HINT)
    from posttrain.operations.connection import find_running_servers, format_links

    if not pages:
        pages = ["mlflow", "prefect"]
        if not has_live_page:
            print(f"posttrain: {LIVE_PAGE_HINT}", file=sys.stderr)
    state = find_running_servers(target.output)
    if state is not None:
        print(f"`posttrain up` serves these:\n{format_links(state, target.output)}", flush=True)
        pages = []
        wants_live_page &= all(service.name != "monitor" for service in state.services)
    pages = [page for page in pages if page != "live"]
    if pages:
        serve_web_pages(
            target.output,
            target.tracking_uri,
            host=arguments.host,
            mlflow_port=arguments.mlflow_port,
            prefect_port=arguments.prefect_port,
            pages=["live", *pages] if wants_live_page else pages,
            live_options=LivePageOptions(run, arguments.port),
        )
    elif wants_live_page:
        return _serve_live_page(target.output, run, arguments.port)
    return 0


def _find_newest_run(output: Path, pipeline: str) -> str:
    """Return the short id of a pipeline's newest run. Raises: DataError without runs."""
    from tasks.tracking.run_ids import list_named_runs

    runs = list_named_runs(output.resolve())
    newest = [run.short_id for run in runs if run.is_pipeline and run.pipeline == pipeline]
    if not newest:
        raise DataError(
            f"no runs of '{pipeline}' in {output.resolve()}; name another run to export"
        )
    return newest[-1]


def _serve_live_page(output: Path, run: str, port: int | None) -> int:
    from posttrain.monitor.server import serve_page

    serve_page(output, run, port)
    return 0


@dataclass(frozen=True)
class LivePageOptions:
    """Options of the live page."""

    run: str = ""  # short id of the run to show; "" = follow the newest
    port: int | None = None  # None = the default one, or the next free one


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


def check_loopback_host(host: str) -> None:
    """Refuse an address that other machines reach. Raises: SettingsError."""
    if host not in ("127.0.0.1", "localhost", "::1"):
        raise SettingsError(
            f"host: '{host}' is not loopback; the MLflow page asks for no password, so use an SSH tunnel"
        )


class PageServers:
    """Context manager that serves the web pages; each is a child process, started in the order of `pages`."""

    def __init__(
        self,
        output: Path,
        tracking_uri: str | None = None,
        *,
        host: str = "127.0.0.1",
        mlflow_port: int = 5000,
        prefect_port: int = 4200,
        pages: Sequence[str] = ("mlflow", "prefect"),
        live_options: LivePageOptions | None = None,
        on_answer: Callable[[PageServer], None] | None = None,
    ) -> None:
        """Configure the pages; nothing starts before `with`. Raises: SettingsError for a host that is not loopback.

        Args:
            on_answer: called with each page once it answers, in the order in which they do.
        """
        from posttrain.monitor.server import DEFAULT_PORT
        from tasks.tracking import Tracking

        check_loopback_host(host)
        self.output, self.host = Path(output).resolve(), host
        self._tracking = Tracking(tracking_uri, self.output)
        self._live = live_options or LivePageOptions()
        self._pages, self._on_answer = pages, on_answer or (lambda service: None)
        self._ports = {
            "MLflow": mlflow_port,
            "Prefect": prefect_port,
            "live": self._live.port or DEFAULT_PORT,
        }
        self._reserved_ports: set[int] = set()
        self.services: list[PageServer] = []

    def __enter__(self) -> PageServers:
        try:
            starts = {
                "live": self._start_live_page,
                "mlflow": self._start_mlflow,
                "prefect": self._start_prefect,
            }
            for page in self._pages:
                self.services.append(starts[page]())
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

    def _start_live_page(self) -> PageServer:
        from posttrain.web.server_setup import LOOPBACK_HOST

        service = self._build_service("live", "/healthz", LOOPBACK_HOST)  # its only address
        command = ["posttrain.cli.main", "ui", "--live", "--output", str(self.output)]
        command += ["--port", str(self._ports["live"])]
        if self._live.run:
            command.append(self._live.run)
        self._start_process(service, command, {"PYTHONPATH": build_python_path(os.environ)})
        return service

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
            f"{_format_netloc(self.host, port)},127.0.0.1:{port},localhost:{port}",
            "--cors-allowed-origins",
            prefect_access.format_loopback_origins(port),
            *build_server_options(),
        ]
        environment = {**build_offline_environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._start_process(service, arguments, environment)
        return service

    def _start_prefect(self) -> PageServer:
        from flows.runtime.prefect_home import build_prefect_environment, locate_prefect_home

        external_url = os.environ.get("PREFECT_API_URL")
        if external_url:
            return PageServer(
                "Prefect",
                external_url.removesuffix("/").removesuffix("/api"),
                notes=["(runs elsewhere)"],
            )
        home = locate_prefect_home(self.output)
        prepare_database(home, os.environ)
        migrations = build_migration_environment(home, os.environ)
        service = self._build_service("Prefect", "/api/health")
        port = self._ports["Prefect"]
        environment = {
            **build_prefect_environment(self.output),
            **migrations,
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

    def _build_service(self, name: str, health: str, host: str = "") -> PageServer:
        host = host or self.host
        preferred = self._ports[name]
        port = self._ports[name] = self._find_free_port(host, preferred)
        url = f"http://{_format_netloc(host, port)}"
        service = PageServer(
            name, url, url + health, self.output / "logs" / f"{name.lower()}-ui.log"
        )
        if port != preferred:
            service.notes.append(f"(port {preferred} is taken)")
        return service

    def _find_free_port(self, host: str, preferred: int) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in range(preferred, min(65536, preferred + MAX_PORTS_TRIED)):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Like servers: a port with connections in TIME_WAIT counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
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
            f"no free port on {host} from {preferred} on; name another with --port, --mlflow-port or "
            "--prefect-port"
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
        waiting = list(self.services)
        while waiting:
            for service in list(waiting):
                service.check_alive()
                if service.process is None or service.is_healthy():
                    waiting.remove(service)
                    self._on_answer(service)
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
        """Terminate the process groups of all pages, with SIGKILL after the grace period."""
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


def _format_netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _select_forced_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that override the user's.

    Otherwise a page sends telemetry, prompts, lets others in, or starts in another folder with a relative home.
    """
    names = (
        "MLFLOW_DISABLE_TELEMETRY",
        "PREFECT_HOME",
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


def _announce_page(output: Path, service: PageServer) -> None:
    """Print the link of a page that answers, and record it for `posttrain open`."""
    if service.process is not None and service.name != "live":  # which records itself
        record_served_page(output, "mlflow" if service.name == "MLflow" else "prefect", service.url)
    url = service.url + (prefect_access.PREFECT_FIRST_PAGE if service.name == "Prefect" else "")
    print(f"{service.name:8} {url} {' '.join(service.notes)}".rstrip(), flush=True)


def _print_runs_page(output: Path, tracking_uri: str | None) -> None:
    """Print the address of the newest pipeline's table of runs, which MLflow's first page does not show."""
    from tasks.tracking import Tracking

    if url := Tracking(tracking_uri, output).find_newest_runs_url():
        print(f"{'runs':8} {url}", flush=True)


def serve_web_pages(
    output: Path,
    tracking_uri: str | None = None,
    *,
    host: str = "127.0.0.1",
    mlflow_port: int = 5000,
    prefect_port: int = 4200,
    pages: Sequence[str] = ("mlflow", "prefect"),
    live_options: LivePageOptions | None = None,
) -> None:
    """Serve pages until Ctrl-C or SIGTERM; print each link once its page answers.

    Args:
        output: the output folder, whose stores are shown.
        tracking_uri: the MLflow store; None as for runs (MLFLOW_TRACKING_URI, else the folder's store).
        host: a loopback name; MLflow's page has no password.
        mlflow_port, prefect_port: if taken, the next free port is used.
        pages: of live, mlflow and prefect, in this order.
    Raises: SettingsError; BackendError if a server does not start, or ends unexpectedly.
    """
    make_folder(output)
    # SIGINT too: shells start background jobs with SIGINT ignored.
    previous_handlers = {
        number: signal.signal(number, _raise_interrupt)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        print(f"starting the web UI ({', '.join(pages)}) ...", flush=True)
        servers = PageServers(
            output,
            tracking_uri,
            host=host,
            mlflow_port=mlflow_port,
            prefect_port=prefect_port,
            pages=pages,
            live_options=live_options,
            on_answer=lambda service: _announce_page(output, service),
        )
        with servers as running:
            if any(service.name == "MLflow" for service in running.services):
                _print_runs_page(output, tracking_uri)
            print("Ctrl-C stops the web UI; runs continue", flush=True)
            running.watch_processes()
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
