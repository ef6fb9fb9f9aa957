"""`posttrain up`, `posttrain down`, `posttrain status`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.runtime.prefect_access import build_python_path, load_or_create_password
from posttrain.operations.connection import (
    check_mlflow_server,
    format_links,
    format_status_table,
    is_same_address,
)
from posttrain.operations.database import SQLITE, strip_password
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
    read_state,
)
from posttrain.operations.supervisor import (
    REPAIR_SIGNAL,
    ExtraServers,
    Supervisor,
    return_no_servers,
)
from rl_core.errors import BackendError, DataError, FolderBusy, SettingsError
from rl_core.storage.atomic_files import make_folder, open_log_file
from tasks.command_hints import format_posttrain_command

DATABASE_VARIABLE = (
    "POSTTRAIN_DATABASE"  # alternative to --database, which other users of the machine can read
)
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
        given: fields of `Options` set on the command line; others have their defaults.
        detach: run the supervisor in the background; otherwise return when the servers are stopped.
        also: servers beside, for the address of MLflow.
    Raises: SettingsError, BackendError, FolderBusy; DataError if the servers are up but a registration failed.
    """
    check_platform()
    output = output.resolve()
    make_folder(output)
    places = StatePaths(output)
    address = str(option_values.get("database") or os.environ.get(DATABASE_VARIABLE) or "")
    if address:
        option_values = {**option_values, "database": strip_password(address)}
    if option_values.get("deployments"):
        option_values = {
            **option_values,
            "deployments": _check_deployments_folder(Path(option_values["deployments"])),
        }
    if is_running(places):
        _repair_servers(places, option_values)
        return
    options = ServerOptions(**option_values)
    _check_same_database(places, options)
    elsewhere = _find_external_mlflow(options)
    _check_environment(options)
    if detach:
        _start_in_background(places, option_values, address)
        return
    supervisor = Supervisor(
        output,
        options,
        address or SQLITE,
        external_mlflow=elsewhere,
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
    """Raise if the database differs from that of the last start, as servers would come up empty."""
    try:
        last = str(json.loads(paths.last_options_file.read_text())["database"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if last != options.database:
        raise SettingsError(
            f"--database: the servers of {paths.output} were last on {last}, now {options.database} is asked for; "
            f"give the same again (--database, or {DATABASE_VARIABLE}), or remove {paths.last_options_file} to start over"
        )


def _find_external_mlflow(options: ServerOptions) -> str:
    """MLflow server configured in the user's environment; "" = start one."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    own = f"http://127.0.0.1:{options.mlflow_port}"
    if not uri or is_same_address(uri, own):
        return ""
    if not uri.startswith(("http://", "https://")):
        raise SettingsError(
            "MLFLOW_TRACKING_URI names a database; unset it, and `posttrain up` serves the output folder's own, or "
            "PostgreSQL with --database"
        )
    check_mlflow_server(uri, "MLFLOW_TRACKING_URI")
    return uri


def _check_environment(options: ServerOptions) -> None:
    """Raise if the shell's PREFECT_API_URL points to another server, whose runs these servers would not see."""
    url, own = os.environ.get("PREFECT_API_URL", ""), f"{format_prefect_url(options)}/api"
    if url and not is_same_address(url, own):
        raise SettingsError(
            f"PREFECT_API_URL is {url}, but `posttrain up` starts a Prefect server at {own}: runs from this shell "
            "would not be on it; unset PREFECT_API_URL, or use that server alone: prefect worker start --pool "
            f"{options.pool} --type process"
        )


# ------------------------------------------------------------------------------------------------- while it is running


def _repair_servers(paths: StatePaths, option_values: dict[str, Any]) -> None:
    """Print what runs, restart what does not, register again."""
    state = _wait_for_state(paths, lambda state: state.phase == "up", "is still starting")
    options = dataclasses.asdict(state.options)
    for name, value in option_values.items():
        if options[name] != value:
            raise SettingsError(
                f"{OPTION_NAMES[name]}: the servers of {paths.output} run {_describe_option_change(name, options[name], value)}; "
                f"`{format_posttrain_command('down', paths.output)}` first, then `posttrain up` with the new value"
            )
    broken = [service.name for service in state.services if service.phase != "up"]
    _print_line(
        f"already running{f', but not {chr(44).join(broken)}: starting' if broken else ''}; registering again ..."
    )
    asked = state.repairs
    state.supervisor.send_signal(REPAIR_SIGNAL)

    before = {service.name: service.restarts for service in state.services}

    def done(state: SupervisorState) -> bool:
        for service in state.services:
            if service.restarts - before[service.name] >= MAX_REPAIR_FAILURES:
                raise BackendError(
                    f"the {service.name} server {service.message}, again and again; log: {service.log}"
                )
        return (
            state.repairs > asked
            and bool(state.registration)
            and all(s.phase == "up" for s in state.services)
        )

    state = _wait_for_state(paths, done, "does not get everything up")
    _print_line(format_links(state, paths.output))
    if state.problem:
        raise DataError(state.problem)


def _describe_option_change(name: str, present: Any, wanted: Any) -> str:
    """An option of the running servers, in words, where another value is asked for."""
    if name == "learn":
        return "with it" if present else "without it"
    return "without it" if present is None else f"with {present}, not {wanted}"


def _wait_for_state(
    paths: StatePaths, until: Callable[[SupervisorState], bool], problem: str, child: Any = None
) -> SupervisorState:
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
        if name not in ("database", "learn"):  # the pipeline's config says whether it learns
            command += [OPTION_NAMES[name], str(value)]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": build_python_path(os.environ),
    }
    if address:
        environment[DATABASE_VARIABLE] = address
    log = paths.resolve_log_path("up")
    make_folder(log.parent)
    with open_log_file(log) as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    _print_line(f"starting in the background (log: {log}) ...")
    try:
        state = _wait_for_state(
            paths,
            lambda state: state.phase == "up" and state.supervisor.pid == child.pid,
            "is slow",
            child,
        )
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        _print_line("stopping what was started ...")
        child.wait()  # a second Ctrl-C leaves it to end by itself
        raise
    _print_line(format_links(state, paths.output))
    _print_line(f"`{format_posttrain_command('down', paths.output)}` stops all of it")
    if state.problem:
        raise DataError(state.problem)


def _read_child_error(paths: StatePaths, code: int) -> Exception:
    """Error printed by the supervisor, as an exception."""
    text = paths.resolve_log_path("up").read_text(errors="replace")
    message = (
        text.rpartition("posttrain: ")[2].strip()
        or f"exit code {code}; see {paths.resolve_log_path('up')}"
    )
    for kind in (BackendError, FolderBusy):
        if message.startswith(f"{kind.__name__}: "):
            return kind(message.partition(": ")[2])
    return SettingsError(message) if code == 2 else BackendError(message)


# ------------------------------------------------------------------------------------------------------ down and status


def stop_servers(output: Path) -> str:
    """Stop all servers of an output folder, in order; returns a report.

    Raises: BackendError if something cannot be stopped.
    """
    output = output.resolve()
    places, mark = StatePaths(output), format_mark(output)
    done = ""
    if is_running(places):
        state = read_state(places)
        if state is None:
            raise BackendError(
                f"{places.state_file}: cannot be read though a supervisor runs; try again in a moment"
            )
        _print_line(
            "stopping: the worker and its runs (they save where they are), then the servers ..."
        )
        state.supervisor.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DOWN_SECONDS
        while is_running(places) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_running(places):
            state.supervisor.send_signal(signal.SIGKILL)  # its keepers end the servers
            time.sleep(1.0)
        done = "stopped"
    if ended := terminate_marked(mark, grace=45.0):
        done = (
            done or f"no supervisor was running; ended {len(ended)} processes that one left behind"
        )
    places.state_file.unlink(missing_ok=True)
    if left := find_marked_processes(mark):
        raise BackendError(
            f"processes {', '.join(str(process.pid) for process in left)} do not end; kill -9 them, or look at what "
            "they wait for (a file system that is gone?)"
        )
    return done or f"nothing was running for {output}"


def describe_status(output: Path, *, as_json: bool = False) -> tuple[str, bool]:
    """State of the servers of an output folder as text; True if all are up."""
    output = output.resolve()
    places = StatePaths(output)
    state = read_state(places) if is_running(places) else None
    if state is None:
        left = find_marked_processes(format_mark(output))
        if as_json:
            return json.dumps({"phase": "down", "left": [process.pid for process in left]}), False
        if is_running(places):
            return "starting; nothing to see yet", False
        if left:
            return (
                f"no supervisor is running, but {len(left)} of its processes are (first: {left[0].pid}); "
                f"`{format_posttrain_command('up', output)}` ends them and starts new ones, "
                f"`{format_posttrain_command('down', output)}` ends them",
                False,
            )
        return (
            f"not running for {output}; start it: {format_posttrain_command('up', output)}",
            False,
        )
    good = (
        state.phase == "up"
        and all(service.phase == "up" for service in state.services)
        and not state.problem
    )
    if as_json:
        return json.dumps(dataclasses.asdict(state), indent=2), good
    return format_status_table(state, output, auth=load_or_create_password(output)), good
