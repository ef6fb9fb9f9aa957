"""State of the supervisor in operations/state.json, read by `status`, `down`, a second `up` and the runs.

The supervisor is alive if its lock is held; the kernel frees the lock however the process dies. Its process id is used
only together with its start time, so that a reused pid is never signalled.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.operations.processes import ProcessId
from rl_core.storage.atomic_files import make_folder, write_json_atomic, write_text_unsynced

VERSION = 1
Phase = Literal["starting", "up", "stopping"]
# waiting: for its next start.
ServicePhase = Literal["starting", "up", "waiting", "elsewhere", "stopped"]


@dataclass(frozen=True, slots=True)
class StatePaths:
    """Paths under an output folder."""

    output: Path

    @property
    def folder(self) -> Path:
        """Folder of everything but the logs."""
        return self.output / "operations"

    @property
    def state_file(self) -> Path:
        """State file."""
        return self.folder / "state.json"

    @property
    def lock_file(self) -> Path:
        """Lock file, held by the supervisor while it lives."""
        return self.folder / "supervisor.lock"

    @property
    def registration_file(self) -> Path:
        """Result file of the last registration."""
        return self.folder / "registration.json"

    @property
    def last_options_file(self) -> Path:
        """Options file of the last start."""
        return self.folder / "last.json"

    def resolve_log_path(self, name: str) -> Path:
        """Return the path of a server's log file."""
        return self.output / "logs" / f"{name}.log"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of `posttrain up`."""

    prefect_port: int = 4200
    mlflow_port: int = 5000
    database: str = "sqlite"  # or a PostgreSQL address without its password
    pool: str = "posttrain"
    runs: int | None = None  # concurrent flow runs on this machine; None = no limit
    gpu_slots: int | None = None  # None: number of GPUs
    deployments: str | None = None  # folder of prefect.yaml and automations.yaml; None: checkout's
    service: str | None = None  # YAML file of a training service to run
    serve: str | None = None  # config of the pipeline whose champion is served
    serve_port: int = 8321
    rollouts: str | None = None  # config of the pipeline whose inference server is run
    monitor_port: int | None = None  # of the live page; None = no live page
    learn: int = 0  # 1 = `serve` learns from its answers, because its config has `online:`


@dataclass(slots=True)
class ServiceState:
    """Current state of one server."""

    name: str
    url: str = ""
    phase: ServicePhase = "starting"
    process: ProcessId | None = None  # of its keeper
    since: float = 0.0  # seconds since 1970: of the last start
    restarts: int = 0
    retry_at: float = 0.0  # seconds since 1970, while waiting
    message: str = ""  # reason of the last restart
    log: str = ""
    access: str = ""  # where its clients find a key


@dataclass(slots=True)
class SupervisorState:
    """State of all servers of an output folder."""

    supervisor: ProcessId
    options: ServerOptions
    phase: Phase = "starting"
    services: list[ServiceState] = field(default_factory=list)
    repairs: int = 0  # number of further `up` calls served
    # Result of registration.py; {} = not done yet.
    registration: dict[str, Any] = field(default_factory=dict)
    # Address of an external MLflow server; "" = there is none, or its address contains a password.
    mlflow: str = ""

    def find_service(self, name: str) -> ServiceState:
        """Find a server by name."""
        return next(service for service in self.services if service.name == name)

    @property
    def problem(self) -> str:
        """Error of the last registration."""
        return str(self.registration.get("problem", ""))


def write_state(paths: StatePaths, state: SupervisorState) -> None:
    """Replace the file atomically, without fsync: it is informational, and a full disk must not stop the servers."""
    make_folder(paths.folder)
    write_text_unsynced(
        paths.state_file,
        json.dumps({"version": VERSION, **dataclasses.asdict(state)}, indent=2) + "\n",
    )


def read_state(paths: StatePaths) -> SupervisorState | None:
    """Read the state last written; None if the file is missing or unreadable."""
    try:
        data = json.loads(paths.state_file.read_text())
        if data.pop("version") != VERSION:
            return None
        services = [
            ServiceState(**{**service, "process": _parse_process_id(service["process"])})
            for service in data.pop("services")
        ]
        supervisor = _parse_process_id(data.pop("supervisor"))
        if supervisor is None:
            return None
        return SupervisorState(
            supervisor=supervisor,
            options=ServerOptions(**data.pop("options")),
            services=services,
            **data,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse_process_id(data: dict[str, Any] | None) -> ProcessId | None:
    if data is None:
        return None
    return ProcessId(int(data["pid"]), int(data["started"]), str(data["boot"]))


def is_running(paths: StatePaths) -> bool:
    """Return whether a supervisor holds the lock."""
    try:
        descriptor = os.open(paths.lock_file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def write_last_options(paths: StatePaths, options: ServerOptions, prefect_home: Path) -> None:
    """Write the options of a completed start, which the next start and `status` read."""
    record = {**dataclasses.asdict(options), "prefect_home": str(prefect_home)}
    write_json_atomic(paths.last_options_file, record)


def read_last_options(paths: StatePaths) -> dict[str, Any]:
    """Read the options of the last start; {} if there was none.

    `prefect_home` is present from version 0.2 on; before, it was `prefect` in the output folder.
    """
    try:
        record = json.loads(paths.last_options_file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {"prefect_home": str(paths.output / "prefect"), **record}
