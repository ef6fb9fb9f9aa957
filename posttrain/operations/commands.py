"""Commands `posttrain up`, `posttrain down` and `posttrain status`."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.runtime.prefect_access import build_python_path, load_or_create_password
from flows.runtime.prefect_home import locate_prefect_home
from posttrain.operations.connection import (
    check_mlflow_server,
    format_links,
    format_status_table,
    is_same_address,
)
from posttrain.operations.database import SQLITE, describe_sqlite_locks, strip_password
from posttrain.operations.processes import (
    check_platform,
    find_marked_processes,
    format_mark,
    terminate_marked,
)
from posttrain.operations.services import format_prefect_url
from posttrain.operations.state import (
    ServerOptions,
    StatePaths,
    SupervisorState,
    is_running,
    read_last_options,
    read_state,
)
from posttrain.operations.supervisor import (
    REPAIR_SIGNAL,
    ExtraServers,
    StartProgress,
    Supervisor,
    return_no_servers,
)
from rl_core.errors import BackendError, DataError, FolderBusy, SettingsError
from rl_core.processes.children import start_child
from rl_core.storage.atomic_files import make_folder
from tasks.command_hints import format_posttrain_command

# Alternative to --database, which other users of the machine can read.
DATABASE_VARIABLE = "POSTTRAIN_DATABASE"
READY_SECONDS = 900.0  # timeout of a background start or a repair
DOWN_SECONDS = 150.0
MAX_REPAIR_FAILURES = 3  # failures of a server during a repair; the supervisor keeps retrying
COMMAND = (sys.executable, "-P", "-m", "posttrain.cli.main")
OPTION_NAMES = {
    "prefect_port": "--prefect-port",
    "mlflow_port": "--mlflow-port",
    "database": "--database",
    "pool": "--pool",
    "runs": "--runs",
    "gpu_slots": "--gpu-slots",
    "deployments": "--deployments",
    "service": "--service",
    "serve": "--serve",
    "serve_port": "--serve-port",
    "rollouts": "--rollouts",
    "monitor_port": "--monitor-port",
    "learn": "`online:` of the config of --serve",
}


def start_servers(
    output: Path,
    option_values: dict[str, Any],
    *,
    detach: bool = False,
    extra_servers: ExtraServers = return_no_servers,
) -> None:
    """Start the servers of an output folder, or repair running ones.

    Args:
        output: the folder.
        option_values: fields of `ServerOptions` set on the command line; others have their defaults.
        detach: run the supervisor in the background; otherwise return when the servers are stopped.
        extra_servers: builds further servers.
    Raises: SettingsError, BackendError, FolderBusy; DataError if the servers are up but a registration failed.
    """
    check_platform()
    output = output.resolve()
    make_folder(output)
    paths = StatePaths(output)
    address = str(option_values.get("database") or os.environ.get(DATABASE_VARIABLE) or "")
    if address:
        option_values = {**option_values, "database": strip_password(address)}
    if option_values.get("deployments"):
        folder = _check_deployments_folder(Path(option_values["deployments"]))
        option_values = {**option_values, "deployments": folder}
    _check_same_prefect_home(paths)
    if is_running(paths):
        _repair_servers(paths, option_values)
        return
    options = ServerOptions(**option_values)
    _check_same_database(paths, options)
    external_mlflow = _find_external_mlflow(options)
    _check_environment(options)
    if detach:
        _start_in_background(paths, option_values, address)
        return
    supervisor = Supervisor(
        output,
        options,
        address or SQLITE,
        external_mlflow=external_mlflow,
        say=_print_line,
        extra_servers=extra_servers,
    )
    supervisor.run_until_stopped(lambda state: _print_started(state, output))
    _print_line("stopped; nothing is left running")


def _check_deployments_folder(folder: Path) -> str:
    if not (folder / "prefect.yaml").is_file():
        raise SettingsError(
            f"--deployments: {folder} has no prefect.yaml; name the folder that holds it"
        )
    return str(folder.resolve())


def _print_line(text: str) -> None:
    print(text, flush=True)


def _print_started(state: SupervisorState, output: Path) -> None:
    _print_line(format_links(state, output))
    if state.problem:
        print(f"posttrain: {state.problem}", file=sys.stderr, flush=True)
    _print_line(f"Ctrl-C (or `{format_posttrain_command('down', output)}`) stops all of it")


def _check_same_database(paths: StatePaths, options: ServerOptions) -> None:
    """Refuse another database than that of the last start: the servers would come up empty. Raises: SettingsError."""
    last = read_last_options(paths).get("database")
    if last is not None and last != options.database:
        raise SettingsError(
            f"--database: the servers of {paths.output} were last on {last}, not {options.database}; name the same "
            f"database (--database, or {DATABASE_VARIABLE}), or remove {paths.last_options_file} to start over"
        )


def _check_same_prefect_home(paths: StatePaths) -> None:
    """Refuse another PREFECT_HOME than that of the last start on sqlite: Prefect would come up empty.

    Raises: SettingsError.
    """
    last = read_last_options(paths)
    home = str(locate_prefect_home(paths.output))
    if last.get("database") == SQLITE and last["prefect_home"] != home:
        default = str(paths.output / "prefect")
        remedy = (
            "unset it" if last["prefect_home"] == default else f"set it to {last['prefect_home']}"
        )
        raise SettingsError(
            f"PREFECT_HOME: Prefect's database of {paths.output} was last in {last['prefect_home']}, not {home}; "
            f"{remedy}, or remove {paths.last_options_file} to start over"
        )


def _find_external_mlflow(options: ServerOptions) -> str:
    """Find the MLflow server configured in the user's environment; "" = start one."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri or is_same_address(uri, f"http://127.0.0.1:{options.mlflow_port}"):
        return ""
    if not uri.startswith(("http://", "https://")):
        raise SettingsError(
            "MLFLOW_TRACKING_URI names a database; unset it, and `posttrain up` serves that of the output folder, or "
            "PostgreSQL with --database"
        )
    check_mlflow_server(uri, "MLFLOW_TRACKING_URI")
    return uri


def _check_environment(options: ServerOptions) -> None:
    """Refuse a PREFECT_API_URL of another server, which would track the shell's runs. Raises: SettingsError."""
    url, local_url = os.environ.get("PREFECT_API_URL", ""), f"{format_prefect_url(options)}/api"
    if url and not is_same_address(url, local_url):
        raise SettingsError(
            f"PREFECT_API_URL is {url}, but `posttrain up` starts a Prefect server at {local_url}: runs from this "
            "shell would not be on it; unset PREFECT_API_URL, or use only that server: prefect worker start --pool "
            f"{options.pool} --type process"
        )


def _repair_servers(paths: StatePaths, option_values: dict[str, Any]) -> None:
    """Restart the servers that are down, register again, and print what runs.

    Raises: SettingsError for other options; BackendError if a server does not start; DataError if a registration fails.
    """
    state = _wait_for_state(paths, lambda state: state.phase == "up", "is still starting")
    options = dataclasses.asdict(state.options)
    for name, value in option_values.items():
        if options[name] != value:
            change = _describe_option_change(name, options[name], value)
            raise SettingsError(
                f"{OPTION_NAMES[name]}: the servers of {paths.output} run {change}; "
                f"`{format_posttrain_command('down', paths.output)}` first, then `posttrain up` with the new value"
            )
    down = ",".join(service.name for service in state.services if service.phase != "up")
    problem = f", but not {down}: starting" if down else ""
    _print_line(f"already running{problem}; registering again ...")
    repairs_before = state.repairs
    restarts_before = {service.name: service.restarts for service in state.services}
    state.supervisor.send_signal(REPAIR_SIGNAL)

    def is_repaired(state: SupervisorState) -> bool:
        for service in state.services:
            if service.restarts - restarts_before[service.name] >= MAX_REPAIR_FAILURES:
                raise BackendError(
                    f"the {service.name} server {service.message} repeatedly; log: {service.log}"
                )
        are_all_up = all(service.phase == "up" for service in state.services)
        return state.repairs > repairs_before and bool(state.registration) and are_all_up

    state = _wait_for_state(paths, is_repaired, "does not get everything up")
    _print_line(format_links(state, paths.output))
    if state.problem:
        raise DataError(state.problem)


def _describe_option_change(name: str, present: Any, wanted: Any) -> str:
    """Describe an option of the running servers that differs from the requested value."""
    if name == "learn":
        return "with it" if present else "without it"
    return "without it" if present is None else f"with {present}, not {wanted}"


def _wait_for_state(
    paths: StatePaths, until: Callable[[SupervisorState], bool], problem: str, child: Any = None
) -> SupervisorState:
    """Wait for a state of the supervisor, or for the end of its process `child`. Raises: BackendError and others."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        state = read_state(paths)
        if state is not None and until(state) and is_running(paths):
            return state
        if child is not None and child.poll() is not None:
            raise _read_child_error(paths, child.returncode)
        if child is None and not is_running(paths):
            raise BackendError(
                f"the servers of {paths.output} have just been stopped; "
                f"`{format_posttrain_command('up', paths.output)}` starts them"
            )
        time.sleep(0.2)
    raise BackendError(
        f"the supervisor {problem} after {READY_SECONDS:.0f} s; see "
        f"`{format_posttrain_command('status', paths.output)}` and {paths.resolve_log_path('up')}"
    )


def _start_in_background(paths: StatePaths, option_values: dict[str, Any], address: str) -> None:
    command = [*COMMAND, "up", "--output", str(paths.output)]
    for name, value in option_values.items():
        if name not in ("database", "learn"):  # the pipeline's config decides whether it learns
            command += [OPTION_NAMES[name], str(value)]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": build_python_path(os.environ),
    }
    if address:
        environment[DATABASE_VARIABLE] = address
    log = paths.resolve_log_path("up")
    child = start_child(command, log=log, environment=environment)
    _print_line(f"starting in the background (log: {log}) ...")

    progress = StartProgress(_print_line, time.monotonic)

    def is_up(state: SupervisorState) -> bool:
        if state.supervisor.pid != child.pid:
            return False
        progress.report_services(state.services)
        return state.phase == "up"

    try:
        state = _wait_for_state(paths, is_up, "is slow", child)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        _print_line("stopping what was started ...")
        child.wait()  # a second Ctrl-C stops only the waiting
        raise
    finally:
        progress.clear_line()
    _print_line(format_links(state, paths.output))
    _print_line(f"`{format_posttrain_command('down', paths.output)}` stops all of it")
    if state.problem:
        raise DataError(state.problem)


def _read_child_error(paths: StatePaths, code: int) -> Exception:
    """Read the error that the supervisor printed, as an exception."""
    log = paths.resolve_log_path("up")
    message = log.read_text(errors="replace").rpartition("posttrain: ")[2].strip()
    message = message or f"exit code {code}; see {log}"
    for kind in (BackendError, FolderBusy):
        if message.startswith(f"{kind.__name__}: "):
            return kind(message.partition(": ")[2])
    return SettingsError(message) if code == 2 else BackendError(message)


def stop_servers(output: Path) -> str:
    """Stop all servers of an output folder, in order. Return a report.

    Raises: BackendError if something cannot be stopped.
    """
    output = output.resolve()
    paths, mark = StatePaths(output), format_mark(output)
    report = ""
    if is_running(paths):
        state = read_state(paths)
        if state is None:
            raise BackendError(
                f"{paths.state_file}: cannot be read though a supervisor runs; try again in a moment"
            )
        _print_line(
            "stopping: the worker and its runs (they save their state), then the servers ..."
        )
        state.supervisor.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DOWN_SECONDS
        while is_running(paths) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_running(paths):
            state.supervisor.send_signal(signal.SIGKILL)  # its keepers end the servers
            time.sleep(1.0)
        report = "stopped"
    if ended := terminate_marked(mark, grace=45.0):
        leftovers = f"no supervisor was running; ended {len(ended)} processes that one left behind"
        report = report or leftovers
    paths.state_file.unlink(missing_ok=True)
    if remaining := find_marked_processes(mark):
        pids = ", ".join(str(process.pid) for process in remaining)
        raise BackendError(
            f"processes {pids} do not end; kill -9 them, or check what they wait for (an unreachable file system?)"
        )
    return report or f"nothing was running for {output}"


def describe_status(output: Path) -> tuple[dict[str, Any], str, bool]:
    """Describe the state of the servers of an output folder: as a record, as text, and True if all are up."""
    output = output.resolve()
    paths = StatePaths(output)
    state = read_state(paths) if is_running(paths) else None
    if state is None:
        return *_describe_missing_state(paths), False
    are_all_up = state.phase == "up" and all(service.phase == "up" for service in state.services)
    is_good = are_all_up and not state.problem
    home = Path(read_last_options(paths).get("prefect_home", output / "prefect"))
    locks = describe_sqlite_locks(output, home) if state.options.database == SQLITE else []
    text = format_status_table(state, output, auth=load_or_create_password(output))
    record = {**dataclasses.asdict(state), "locks": locks}
    return record, "\n".join([text, *locks]), is_good


def _describe_missing_state(paths: StatePaths) -> tuple[dict[str, Any], str]:
    """Describe an output folder without a readable state: starting, stopped, or with leftover processes."""
    output = paths.output
    leftovers = find_marked_processes(format_mark(output))
    record = {"phase": "down", "left": [process.pid for process in leftovers]}
    if is_running(paths):
        return record, "starting; no state yet"
    up = format_posttrain_command("up", output)
    if leftovers:
        return record, (
            f"no supervisor is running, but {len(leftovers)} of its processes are (first: {leftovers[0].pid}); "
            f"`{up}` ends them and starts new ones, `{format_posttrain_command('down', output)}` ends them"
        )
    return record, f"not running for {output}; start it: {up}"
