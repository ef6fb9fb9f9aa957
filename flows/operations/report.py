"""Output of `up` and `status`."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from flows.operations.services import GPU_LIMIT, ask, mlflow_url, prefect_url
from flows.operations.state import ServiceState, State
from flows.runtime.prefect_access import CLIENT, auth_file
from tasks.own_commands import own_command

__all__ = ["links", "mlflow_of", "table"]


def mlflow_of(state: State) -> str:
    """Address of the MLflow server that the worker's runs use; "" = elsewhere, at an address that holds a password."""
    has_own = any(service.name == "mlflow" for service in state.services)
    return mlflow_url(state.options) if has_own else state.mlflow


def links(state: State, output: Path) -> str:
    """Links, registered deployments, and environment variables for the prefect and mlflow commands."""
    lines = [f"{service.name:9}{service.url}{_access(service)}".rstrip() for service in state.services]
    mlflow = mlflow_of(state)
    if not any(service.name == "mlflow" for service in state.services):
        lines.append(f"mlflow   {mlflow or 'as MLFLOW_TRACKING_URI said'} (runs elsewhere)")
    lines += _registered(state)
    here = own_command("COMMAND", output)
    lines.append(f"`{here}` uses these servers; for prefect's and mlflow's own commands:")
    tracking = f" MLFLOW_TRACKING_URI={mlflow}" if mlflow else ""
    lines.append(f"  export PREFECT_API_URL={prefect_url(state.options)}/api{tracking}")
    lines.append(f'  export {CLIENT}="$(cat {shlex.quote(str(auth_file(output)))})"')
    lines.append("Prefect's page asks once for that password")
    return "\n".join(lines)


def _access(service: ServiceState) -> str:
    return f"    ({service.access})" if service.access else ""


def _registered(state: State) -> list[str]:
    done = state.registration
    if not done:
        return []
    lines = []
    if "pool" in done:
        slots = done.get("gpu_slots")
        limit = f"; limit '{GPU_LIMIT}' of {slots} at once" if slots else ""
        lines.append(f"pool     {state.options.pool}{limit}")
    for name in done.get("deployments", []):
        lines.append(f"deployed {name}")
    for one in done.get("automations", []):
        note = f" ({one['note']})" if one["note"] else ""
        lines.append(f"automation {one['name']}: {one['what']}{note}")
    return [*lines, *(f"note: {note}" for note in done.get("notes", []))]


def table(state: State, output: Path, now: float | None = None, auth: str = "") -> str:
    """Table of `posttrain status`."""
    now = time.time() if now is None else now
    lines = [
        f"{state.phase}; supervisor: process {state.supervisor.pid}; database: {state.options.database}",
        f"{'server':9}{'state':10}{'process':9}{'for':>8}  {'restarts':9}",
    ]
    lines += [_line(service, now) for service in state.services]
    if problem := _pool_problem(state, output, auth):
        lines.append(problem)
    lines += _registered(state)
    if state.problem:
        lines.append(f"not registered: {state.problem}")
    return "\n".join(line.rstrip() for line in lines)


def _line(service: ServiceState, now: float) -> str:
    pid = service.process.pid if service.process and service.process.alive else ""
    span = _span(now - service.since) if pid else ""
    line = f"{service.name:9}{service.phase:10}{pid!s:9}{span:>8}  {service.restarts:<9}"
    notes = [service.url]
    if service.phase == "waiting":
        notes = [f"{service.message}; next start in {max(0.0, service.retry_at - now):.0f} s; log: {service.log}"]
    elif service.message:
        notes.append(f"(before: {service.message})")
    return f"{line}{' '.join(notes)}"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _pool_problem(state: State, output: Path, auth: str) -> str:
    """Problem of a deleted or paused pool; "" = none."""
    import urllib.error

    pool = state.options.pool
    if not any(service.name == "prefect" and service.phase == "up" for service in state.services):
        return ""
    try:
        found = ask(f"{prefect_url(state.options)}/api/work_pools/{pool}", auth=auth)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return f"work pool '{pool}' is gone, so no deployment can run; `{own_command('up', output)}` makes it again"
        return ""
    except (OSError, ValueError):
        return ""
    return f"work pool '{pool}' is paused; prefect work-pool resume {pool}" if found.get("is_paused") else ""
