"""States of flow runs in Prefect: Stopped for stopped runs, Crashed for killed ones.

`posttrain check machine --repair` uploads pending records of killed runs, marks the runs and shows how to resume them.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rl_core.errors import Stopped
from tasks.lifecycle.approval import expire_requests, list_approval_requests
from tasks.lifecycle.crashed_runs import CrashedRun, close_crashed_runs
from tasks.mlflow_environment import build_default_uri
from tasks.tracking import Tracking
from tasks.tracking.run_ids import shorten_run_name

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

logger = logging.getLogger(__name__)


def mark_flow_run_stopped(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Set a stopped flow run to Cancelled with the name Stopped; a hook of flows that fail or crash.

    The terminal, the live page and `posttrain runs` use the same word.
    """
    error = state.data if isinstance(state.data, BaseException) else None
    if error is None:
        result = state.result(raise_on_failure=False)
        error = result if isinstance(result, BaseException) else None
    if not isinstance(error, Stopped | KeyboardInterrupt):
        return
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    message = f"{error}" or "stopped; the same command resumes from the last checkpoint"
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(
                flow_run.id, Cancelled(name="Stopped", message=message), force=True
            )
    except Exception as api_error:  # the run itself ended correctly; only its page is wrong
        logger.debug("Prefect could not record that the run was stopped: %s", api_error)


def repair_crashed_runs(output: Path, uri: str | None = None) -> list[str]:
    """Mark crashed runs in MLflow and Prefect and expire overdue approvals; return a report as lines."""
    output = output.resolve()
    tracking = Tracking(uri, output)
    local = build_default_uri(output)
    if not output.is_dir():
        return [f"nothing to repair: {output} does not exist"]
    crashed_runs = close_crashed_runs(tracking, output)
    lines = [_describe_crashed_run(run, output) for run in crashed_runs]
    flow_run_ids = [
        run.flow_run_id for run in crashed_runs if not run.is_remote and run.flow_run_id
    ]
    if flow_run_ids:
        from flows.runtime.embedded_server import start_embedded_server, use_embedded_address
        from flows.runtime.prefect_home import apply_prefect_defaults, set_prefect_environment

        set_prefect_environment(output)
        with apply_prefect_defaults():
            start_embedded_server()
            with use_embedded_address():
                num_marked = mark_flow_runs_crashed(flow_run_ids)
        noun = "run" if num_marked == 1 else "runs"
        lines.append(f"marked {num_marked} Prefect flow {noun} as Crashed")
    if tracking.store.uri != local or Path(local.removeprefix("sqlite:///")).exists():
        requests = list_approval_requests(tracking)
        for name in {request.name for request in requests if request.is_waiting}:
            lines += [request.summary for request in expire_requests(tracking, name)]
    return lines or ["nothing to repair: every run has ended or is alive"]


def _describe_crashed_run(run: CrashedRun, output: Path) -> str:
    if run.is_remote:
        return run.description
    text = f"{run.description}; marked as killed"
    if run.num_undelivered:
        text += f", {run.num_undelivered} records still wait for the tracking store"
    if run.is_pipeline and run.journal_folder.parent.name == "runs":
        name = shlex.quote(shorten_run_name(output, run.name))
        text += f"\n    posttrain resume {name} --output {shlex.quote(str(output))}"
    return text


def mark_flow_runs_crashed(ids: Iterable[str]) -> int:
    """Mark flow runs without a live process, and their open task runs, as Crashed; return their number.

    Only runs that Prefect considers active are marked. An unreachable Prefect API is logged, not raised.
    """
    flow_run_ids = sorted({flow_run_id for flow_run_id in ids if flow_run_id})
    if not flow_run_ids:
        return 0
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    message = "The process of this run no longer exists; posttrain detected that later."
    count = 0
    try:
        with get_client(sync_client=True) as client:
            for flow_run_id in flow_run_ids:
                try:
                    state = client.read_flow_run(UUID(flow_run_id)).state
                except (ObjectNotFound, ValueError):  # of another Prefect server, or not an id
                    continue
                if state is not None and (
                    state.is_running() or state.is_pending() or state.is_cancelling()
                ):
                    client.set_flow_run_state(
                        UUID(flow_run_id), Crashed(message=message), force=True
                    )
                    _mark_task_runs_crashed(client, UUID(flow_run_id), message)
                    count += 1
    except Exception as error:
        logger.warning(
            "%d crashed runs could not be marked in Prefect: %s: %s",
            len(flow_run_ids),
            type(error).__name__,
            error,
        )
    return count


def _mark_task_runs_crashed(client: SyncPrefectClient, flow_run_id: UUID, message: str) -> None:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.states import Crashed

    runs = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    )
    for run in runs:
        if run.state is not None and not run.state.is_final():
            client.set_task_run_state(run.id, Crashed(message=message), force=True)
