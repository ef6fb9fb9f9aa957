"""Pending approvals for `posttrain promote`: list and decide them from any process that reaches the tracking store."""

from __future__ import annotations

import dataclasses
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import DataError, SettingsError, suggest_name
from rl_core.json_client import find_health_problem
from tasks.command_hints import format_posttrain_command

if TYPE_CHECKING:
    from tasks.lifecycle.approval import ApprovalRequest
    from tasks.tracking import Tracking


def list_pending_approvals(output: Path, uri: str | None) -> list[dict[str, Any]]:
    """Return the pending approvals as records."""
    from tasks.lifecycle.approval import list_approval_requests
    from tasks.tracking import Tracking
    from tasks.tracking.run_ids import shorten_run_name

    tracking = Tracking(uri, output)
    requests = list_approval_requests(tracking) if _has_tracking_store(tracking) else []
    return [
        {"id": shorten_run_name(output, request.run), **dataclasses.asdict(request)}
        for request in requests
        if request.is_waiting
    ]


def decide_approval(
    output: Path,
    uri: str | None,
    run: str | None,
    *,
    approve: bool | None,
    by: str = "",
    note: str = "",
    store_options: str = "",
) -> str:
    """Decide on a run's approval, or list the pending ones.

    Args:
        output: the output folder.
        uri: tracking store, as in a config.
        run: a run's name or id as listed by `posttrain runs`, or its pipeline; None = list pending approvals.
        approve: the decision; None = show the request.
        by: the reviewer.
        note: the reason.
        store_options: command-line options that select folder or store, for the printed commands.
    Returns: text to print.
    Raises: DataError for an unknown run; SettingsError if there is nothing to decide.
    """
    from flows.runtime.run_summary import format_approval_commands
    from tasks.lifecycle.approval import (
        APPROVED,
        REJECTED,
        answer_request,
        list_approval_requests,
        reapply_answer,
    )
    from tasks.tracking import Tracking
    from tasks.tracking.run_ids import shorten_run_name
    from tasks.tracking.store import read_user_name

    tracking = Tracking(uri, output)
    requests = list_approval_requests(tracking) if _has_tracking_store(tracking) else []
    if run is None:
        if approve is not None:
            raise SettingsError(
                "name the run to decide on; `posttrain promote --pending` lists pending approvals"
            )
        pending = [request for request in requests if request.is_waiting]
        return format_pending_requests(pending, output, store_options)
    if approve is not None:
        repeated = _find_repeated_decision(requests, run, APPROVED if approve else REJECTED)
        if repeated is not None:
            reapply_answer(tracking, repeated)
            resumed = _resume_waiting_flow(repeated, approve, tracking.output)
            return "\n".join([f"answered before: {repeated.summary}", *resumed])
    request = find_pending_request(tracking, requests, run)
    if approve is None:
        page = tracking.find_run_page(request.stage_run_id)
        page = page or f"`{format_posttrain_command('ui', tracking.output)}` shows it"
        return f"{request.summary}\n\nevidence  {page}\n{format_approval_commands(request, output, store_options)}"
    decided = answer_request(
        tracking,
        request,
        approve=approve,
        answered_by=by or f"{read_user_name()}@{platform.node()}",
        note=note,
    )
    lines = [decided.summary]
    if decided.state == "superseded":
        resume = format_posttrain_command(
            f"resume {shlex.quote(shorten_run_name(tracking.output, decided.run))}", tracking.output
        )
        lines.append(f"`{resume}` repeats the comparison; a waiting run does so itself")
    lines += _resume_waiting_flow(decided, approve, tracking.output)
    return "\n".join(lines)


def _has_tracking_store(tracking: Tracking) -> bool:
    from tasks.mlflow_environment import build_default_uri

    local = build_default_uri(tracking.output)
    return tracking.store.uri != local or Path(local.removeprefix("sqlite:///")).exists()


def _find_repeated_decision(
    requests: Sequence[ApprovalRequest], run: str, answer: str
) -> ApprovalRequest | None:
    """Return the newest request of a run if it has this very answer and none is pending.

    A command that was killed after it stored its answer is repeated: that is no error, and a flow run may still wait.
    """
    matching = [request for request in requests if _matches_run(request.run, request.run_id, run)]
    if (
        not matching
        or any(request.is_waiting for request in matching)
        or matching[0].state != answer
    ):
        return None
    return matching[0]


def find_pending_request(
    tracking: Tracking, known: Sequence[ApprovalRequest], run: str
) -> ApprovalRequest:
    """Return the pending approval request of a run. Raises: DataError, SettingsError."""
    matching = [request for request in known if _matches_run(request.run, request.run_id, run)]
    pending = [request for request in matching if request.is_waiting]
    if len(pending) == 1:
        return pending[0]
    if pending:
        names = ", ".join(f"'{request.run}'" for request in pending)
        raise SettingsError(
            f"'{run}' matches several pending runs: {names}; give one of these names"
        )
    if matching:
        raise SettingsError(f"'{run}' is not pending: {matching[0].summary}")
    rows = (
        [row for row in tracking.list_runs() if not row.parent_run_id]
        if _has_tracking_store(tracking)
        else []
    )
    if any(_matches_run(row.name, row.run_id, run) for row in rows):
        raise SettingsError(
            f"'{run}' asked for no approval: its promotion was not `approve: manual`, did not pass the gate, or has "
            "not been reached"
        )
    if not rows:
        raise DataError(f"no runs in {tracking.uri}; name the run's output folder with --output")
    raise DataError(
        f"no run '{run}' in {tracking.uri}; {suggest_name(run, [row.name for row in rows])}"
    )


def _matches_run(name: str, run_id: str, text: str) -> bool:
    """Return whether the user's text refers to this run: its name, its pipeline's name, or a prefix of its id."""
    return text in (name, name.partition(" · ")[0]) or (len(text) >= 6 and run_id.startswith(text))


def format_pending_requests(
    waiting: Sequence[ApprovalRequest], output: Path, store_options: str = ""
) -> str:
    """Format pending approvals with the commands that decide them."""
    from flows.runtime.run_summary import format_approval_commands

    if not waiting:
        return f"nothing in {output.absolute()} waits for approval"
    return "\n\n".join(
        f"{request.run}\n{request.summary}\n{format_approval_commands(request, output, store_options)}"
        for request in waiting
    )


def _resume_waiting_flow(request: ApprovalRequest, approve: bool, output: Path) -> list[str]:
    """Resume the flow run if it waits on a shared Prefect server; a waiting process polls instead."""
    if not request.prefect_api or not request.flow_run_id:
        return []
    from flows.runtime.prefect_home import set_prefect_environment

    set_prefect_environment()
    from prefect.exceptions import NotPausedError, ObjectNotFound
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows.runtime.approval_wait import resume_waiting_flow_run
    from posttrain.operations.connection import find_prefect_password

    password = find_prefect_password(output, request.prefect_api)
    access = {PREFECT_API_AUTH_STRING: password} if password else {}
    try:
        with temporary_settings({PREFECT_API_URL: request.prefect_api, **access}):
            resume_waiting_flow_run(
                request.flow_run_id, approve=approve, by=request.by, note=request.note
            )
    except (NotPausedError, ObjectNotFound):
        return []  # already resumed, or deleted
    except Exception as error:
        step = "repeat this command once Prefect's server answers again"
        if not find_health_problem(f"{request.prefect_api}/health"):
            page = f"{request.prefect_api.removesuffix('/api')}/runs/flow-run/{request.flow_run_id}"
            step = f"resume it on its page: {page}"
        return [
            "the decision is recorded, but the Prefect run could not be resumed "
            f"({type(error).__name__}: {error}); {step}"
        ]
    return []
