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

from flows.operations.checks import check_mlflow
from flows.operations.connect import same_address
from flows.operations.database import SQLITE, shown
from flows.operations.processes import check_platform, end_all, leftovers, mark_of
from flows.operations.report import links, table
from flows.operations.services import prefect_url
from flows.operations.state import Options, State, StatePaths, is_running, read_state
from flows.operations.supervisor import REPAIR, MoreServers, Supervisor, no_more
from flows.runtime.prefect_access import own_path, password
from rl_core.errors import BackendError, DataError, FolderBusy, SettingsError
from rl_core.storage.single_files import make_folder, open_log
from tasks.own_commands import own_command

__all__ = ["DATABASE_VARIABLE", "down", "status", "up"]

DATABASE_VARIABLE = "POSTTRAIN_DATABASE"  # alternative to --database, which other users of the machine can read
READY_SECONDS = 900.0  # timeout of a background start or a repair
DOWN_SECONDS = 150.0
GIVE_UP_AFTER = 3  # failures of a server during a repair; the supervisor keeps retrying
COMMAND = (sys.executable, "-P", "-m", "flows.cli.main")
OPTION_NAMES = {
    "prefect_port": "--prefect-port", "mlflow_port": "--mlflow-port", "database": "--database", "pool": "--pool",
    "runs": "--runs", "gpu_slots": "--gpu-slots", "deployments": "--deployments", "service": "--service",
    "serve": "--serve", "serve_port": "--serve-port", "rollouts": "--rollouts",
    "monitor_port": "--monitor-port", "learn": "`online:` of the config of --serve",
}  # fmt: skip


def up(output: Path, given: dict[str, Any], *, detach: bool = False, also: MoreServers = no_more) -> None:
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
    address = str(given.get("database") or os.environ.get(DATABASE_VARIABLE) or "")
    if address:
        given = {**given, "database": shown(address)}
    if given.get("deployments"):
        given = {**given, "deployments": _deployments(Path(given["deployments"]))}
    if is_running(places):
        _repair(places, given)
        return
    options = Options(**given)
    _check_same_database(places, options)
    elsewhere = _mlflow_elsewhere(options)
    _check_environment(options)
    if detach:
        _start_in_background(places, given, address)
        return
    supervisor = Supervisor(output, options, address or SQLITE, mlflow_elsewhere=elsewhere, say=_say, also=also)
    supervisor.run(lambda state: _announce(state, output))
    _say("stopped; nothing is left running")


def _deployments(folder: Path) -> str:
    if not (folder / "prefect.yaml").is_file():
        raise SettingsError(f"--deployments: {folder} has no prefect.yaml; name the folder that holds it")
    return str(folder.resolve())


def _say(text: str) -> None:
    print(text, flush=True)


def _announce(state: State, output: Path) -> None:
    _say(links(state, output))
    if state.problem:
        print(f"posttrain: {state.problem}", file=sys.stderr, flush=True)
    _say(f"Ctrl-C (or `{own_command('down', output)}`) stops all of it")


def _check_same_database(places: StatePaths, options: Options) -> None:
    """Raise if the database differs from that of the last start, as servers would come up empty."""
    try:
        last = str(json.loads(places.last.read_text())["database"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if last != options.database:
        raise SettingsError(
            f"--database: the servers of {places.output} were last on {last}, now {options.database} is asked for; "
            f"give the same again (--database, or {DATABASE_VARIABLE}), or remove {places.last} to start over"
        )


def _mlflow_elsewhere(options: Options) -> str:
    """MLflow server configured in the user's environment; "" = start one."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    own = f"http://127.0.0.1:{options.mlflow_port}"
    if not uri or same_address(uri, own):
        return ""
    if not uri.startswith(("http://", "https://")):
        raise SettingsError(
            "MLFLOW_TRACKING_URI names a database; unset it, and `posttrain up` serves the output folder's own, or "
            "PostgreSQL with --database"
        )
    check_mlflow(uri, "MLFLOW_TRACKING_URI")
    return uri


def _check_environment(options: Options) -> None:
    """Raise if the shell's PREFECT_API_URL points to another server, whose runs these servers would not see."""
    url, own = os.environ.get("PREFECT_API_URL", ""), f"{prefect_url(options)}/api"
    if url and not same_address(url, own):
        raise SettingsError(
            f"PREFECT_API_URL is {url}, but `posttrain up` starts a Prefect server at {own}: runs from this shell "
            "would not be on it; unset PREFECT_API_URL, or use that server alone: prefect worker start --pool "
            f"{options.pool} --type process"
        )


# ------------------------------------------------------------------------------------------------- while it is running


def _repair(places: StatePaths, given: dict[str, Any]) -> None:
    """Print what runs, restart what does not, register again."""
    state = _wait(places, lambda state: state.phase == "up", "is still starting")
    options = dataclasses.asdict(state.options)
    for name, value in given.items():
        if options[name] != value:
            raise SettingsError(
                f"{OPTION_NAMES[name]}: the servers of {places.output} run {_other(name, options[name], value)}; "
                f"`{own_command('down', places.output)}` first, then `posttrain up` with the new value"
            )
    broken = [service.name for service in state.services if service.phase != "up"]
    _say(f"already running{f', but not {chr(44).join(broken)}: starting' if broken else ''}; registering again ...")
    asked = state.repairs
    state.supervisor.signal(REPAIR)

    before = {service.name: service.restarts for service in state.services}

    def done(state: State) -> bool:
        for service in state.services:
            if service.restarts - before[service.name] >= GIVE_UP_AFTER:
                raise BackendError(f"the {service.name} server {service.message}, again and again; log: {service.log}")
        return state.repairs > asked and bool(state.registration) and all(s.phase == "up" for s in state.services)

    state = _wait(places, done, "does not get everything up")
    _say(links(state, places.output))
    if state.problem:
        raise DataError(state.problem)


def _other(name: str, present: Any, wanted: Any) -> str:
    """An option of the running servers, in words, where another value is asked for."""
    if name == "learn":
        return "with it" if present else "without it"
    return "without it" if present is None else f"with {present}, not {wanted}"


def _wait(places: StatePaths, until: Callable[[State], bool], what: str, child: Any = None) -> State:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        state = read_state(places)
        if state is not None and until(state) and is_running(places):
            return state
        if child is not None and child.poll() is not None:
            raise _child_failed(places, child.returncode)
        if child is None and not is_running(places):
            raise BackendError(
                f"the servers of {places.output} have just been stopped; "
                f"`{own_command('up', places.output)}` starts them"
            )
        time.sleep(0.2)
    raise BackendError(
        f"the supervisor {what} after {READY_SECONDS:.0f} s; see "
        f"`{own_command('status', places.output)}` and {places.log('up')}"
    )


def _start_in_background(places: StatePaths, given: dict[str, Any], address: str) -> None:
    command = [*COMMAND, "up", "--output", str(places.output)]
    for name, value in given.items():
        if name not in ("database", "learn"):  # the pipeline's config says whether it learns
            command += [OPTION_NAMES[name], str(value)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": own_path(os.environ)}
    if address:
        environment[DATABASE_VARIABLE] = address
    log = places.log("up")
    make_folder(log.parent)
    with open_log(log) as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    _say(f"starting in the background (log: {log}) ...")
    try:
        state = _wait(places, lambda state: state.phase == "up" and state.supervisor.pid == child.pid, "is slow", child)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        _say("stopping what was started ...")
        child.wait()  # a second Ctrl-C leaves it to end by itself
        raise
    _say(links(state, places.output))
    _say(f"`{own_command('down', places.output)}` stops all of it")
    if state.problem:
        raise DataError(state.problem)


def _child_failed(places: StatePaths, code: int) -> Exception:
    """Error printed by the supervisor, as an exception."""
    text = places.log("up").read_text(errors="replace")
    message = text.rpartition("posttrain: ")[2].strip() or f"exit code {code}; see {places.log('up')}"
    for kind in (BackendError, FolderBusy):
        if message.startswith(f"{kind.__name__}: "):
            return kind(message.partition(": ")[2])
    return SettingsError(message) if code == 2 else BackendError(message)


# ------------------------------------------------------------------------------------------------------ down and status


def down(output: Path) -> str:
    """Stop all servers of an output folder, in order; returns a report.

    Raises: BackendError if something cannot be stopped.
    """
    output = output.resolve()
    places, mark = StatePaths(output), mark_of(output)
    done = ""
    if is_running(places):
        state = read_state(places)
        if state is None:
            raise BackendError(f"{places.state}: cannot be read though a supervisor runs; try again in a moment")
        _say("stopping: the worker and its runs (they save where they are), then the servers ...")
        state.supervisor.signal(signal.SIGTERM)
        deadline = time.monotonic() + DOWN_SECONDS
        while is_running(places) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_running(places):
            state.supervisor.signal(signal.SIGKILL)  # its keepers end the servers
            time.sleep(1.0)
        done = "stopped"
    if ended := end_all(mark, grace=45.0):
        done = done or f"no supervisor was running; ended {len(ended)} processes that one left behind"
    places.state.unlink(missing_ok=True)
    if left := leftovers(mark):
        raise BackendError(
            f"processes {', '.join(str(process.pid) for process in left)} do not end; kill -9 them, or look at what "
            "they wait for (a file system that is gone?)"
        )
    return done or f"nothing was running for {output}"


def status(output: Path, *, as_json: bool = False) -> tuple[str, bool]:
    """State of the servers of an output folder as text; True if all are up."""
    output = output.resolve()
    places = StatePaths(output)
    state = read_state(places) if is_running(places) else None
    if state is None:
        left = leftovers(mark_of(output))
        if as_json:
            return json.dumps({"phase": "down", "left": [process.pid for process in left]}), False
        if is_running(places):
            return "starting; nothing to see yet", False
        if left:
            return (
                f"no supervisor is running, but {len(left)} of its processes are (first: {left[0].pid}); "
                f"`{own_command('up', output)}` ends them and starts new ones, "
                f"`{own_command('down', output)}` ends them",
                False,
            )
        return f"not running for {output}; start it: {own_command('up', output)}", False
    good = state.phase == "up" and all(service.phase == "up" for service in state.services) and not state.problem
    if as_json:
        return json.dumps(dataclasses.asdict(state), indent=2), good
    return table(state, output, auth=password(output)), good
