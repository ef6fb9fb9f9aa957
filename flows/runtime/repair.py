"""`posttrain doctor --repair`: pending records of killed runs are uploaded, the runs marked and offered for resume."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from tasks.lifecycle.approval import expire, requests
from tasks.lifecycle.dead_runs import DeadRun, close_dead_runs
from tasks.tracking import Tracking
from tasks.tracking.store import default_uri

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

__all__ = ["crash_flow_runs", "repair"]

logger = logging.getLogger(__name__)


def repair(output: Path, uri: str | None = None) -> list[str]:
    """Mark dead runs in MLflow and Prefect, reject overdue approvals; returns a report as lines."""
    output = output.resolve()
    tracking = Tracking(uri, output)
    local = default_uri(output)
    if not output.is_dir():
        return [f"nothing to repair: {output} does not exist"]
    found = close_dead_runs(tracking, output)
    lines = [_line(run, output) for run in found]
    dead = [run.flow_run_id for run in found if not run.elsewhere and run.flow_run_id]
    if dead:
        from flows.runtime.embedded_server import embedded_address, start_embedded_server
        from flows.runtime.prefect_home import prefect_defaults, prepare_prefect

        prepare_prefect(output)
        with prefect_defaults():
            start_embedded_server()
            with embedded_address():
                crashed = crash_flow_runs(dead)
        lines.append(f"marked {crashed} Prefect flow {'run' if crashed == 1 else 'runs'} as Crashed")
    if tracking.store.uri != local or Path(local.removeprefix("sqlite:///")).exists():
        for name in {request.name for request in requests(tracking) if request.is_waiting}:
            lines += [request.outcome for request in expire(tracking, name)]
    return lines or ["nothing to repair: every run has ended or is alive"]


def _line(run: DeadRun, output: Path) -> str:
    if run.elsewhere:
        return run.why
    text = f"{run.why}; marked as killed"
    if run.waiting:
        text += f", {run.waiting} records still wait for the tracking store"
    if run.is_pipeline and run.folder.parent.name == "runs":
        text += f"\n    posttrain resume {shlex.quote(run.name)} --output {shlex.quote(str(output))}"
    return text


def crash_flow_runs(ids: Iterable[str]) -> int:
    """Mark flow runs without a live process, and their open task runs, as Crashed; returns their number.

    Only runs that Prefect considers running. An unreachable Prefect API is logged, not raised.
    """
    wanted = sorted({flow_run_id for flow_run_id in ids if flow_run_id})
    if not wanted:
        return 0
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    message = "The process of this run is gone; posttrain found that out later."
    count = 0
    try:
        with get_client(sync_client=True) as client:
            for flow_run_id in wanted:
                try:
                    state = client.read_flow_run(UUID(flow_run_id)).state
                except (ObjectNotFound, ValueError):  # of another Prefect server, or not an id
                    continue
                if state is not None and (state.is_running() or state.is_pending() or state.is_cancelling()):
                    client.set_flow_run_state(UUID(flow_run_id), Crashed(message=message), force=True)
                    _crash_tasks(client, UUID(flow_run_id), message)
                    count += 1
    except Exception as error:
        logger.warning("Prefect could not be told of %d dead runs: %s: %s", len(wanted), type(error).__name__, error)
    return count


def _crash_tasks(client: SyncPrefectClient, flow_run_id: UUID, message: str) -> None:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.states import Crashed

    runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    for run in runs:
        if run.state is not None and not run.state.is_final():
            client.set_task_run_state(run.id, Crashed(message=message), force=True)
