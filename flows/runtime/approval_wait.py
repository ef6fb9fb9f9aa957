"""Manual approval of a promotion: a deployment's run is suspended, any other run waits in its process.

A deployment's run ends its process. It is restarted when the form in the Prefect UI is submitted, or when `posttrain
approve` resumes it. Any other run waits for the form, the command or the deadline, whichever comes first.
"""

from __future__ import annotations

import contextvars
import dataclasses
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect.events import emit_event
from prefect.exceptions import Pause
from prefect.flow_runs import pause_flow_run, resume_flow_run, suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.runtime.run_summary import PipelineResult, format_approval_instructions
from rl_core.errors import BackendError, SettingsError
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from tasks.config import PipelineSettings
from tasks.lifecycle.approval import (
    ApprovalRequest,
    answer_request,
    expire_requests,
    reload_request,
)
from tasks.pipeline.prefect_stages import publish_page
from tasks.tracking import Tracking

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # polling interval for an answer
WAITING_EVENT = (
    "posttrain.approval.waits"  # deployments/automations.yaml treats it as an orderly wait
)
PAUSE_GRACE_SECONDS = 120  # Prefect's own timeout comes after ours, whose message is clearer


class Approval(RunInput):
    """Approval form of the Prefect UI."""

    decision: Literal["approve", "reject"] = Field(
        description="approve moves the alias champion to this version"
    )
    reviewer: str = Field(description="who decides; stored with the version", min_length=1)
    note: str = Field(default="", description="reason; stored with the version")


def run_with_approval(
    settings: PipelineSettings, run_once: Callable[[], PipelineResult], say: Callable[[str], None]
) -> PipelineResult:
    """Run the pipeline, wait for manual approval if its promotion needs one, and return the result with the decision.

    If another version became champion meanwhile, the pipeline runs once more: its stages are cached, and the
        challenger is compared with the new champion.
    Args:
        run_once: runs the pipeline; `waiting` of its result is the pending approval, if any.
        say: prints to the terminal.
    """
    tracking = Tracking(settings.tracking.uri, Path(settings.output), settings.experiment)
    result = _load_pending_result(settings)
    while True:
        is_restarted = result is not None
        if result is None:
            result = run_once()
        if result.waiting is None:
            return result
        if not is_restarted and _is_requested_by_other_run(result.waiting):
            return result
        if not is_restarted:
            instructions = format_approval_instructions(settings, result.waiting)
            say(f"promote: {result.waiting.summary}\n{instructions}")
        request = _wait_for_decision(settings, tracking, result, is_restarted)
        say(f"promote: {request.summary}")
        if request.state != "superseded":
            return _apply_decision(result, request)
        result = None


def _is_requested_by_other_run(request: ApprovalRequest) -> bool:
    """Return whether another deployment run waits for the same approval; this run then ends."""
    return bool(deployment.id) and request.flow_run_id not in ("", str(flow_run.id))


def _apply_decision(result: PipelineResult, request: ApprovalRequest) -> PipelineResult:
    """Return the result with the decision instead of the pending approval."""
    rows = [
        {**row, "note": request.summary} if row["stage"] == "promote" else row
        for row in result.rows
    ]
    results = dict(result.results)
    decision = "promoted" if request.state == "approved" else "rejected"
    if "promote" in results:
        summary = {**results["promote"].summary, "decision": decision, "note": request.summary}
        results["promote"] = dataclasses.replace(results["promote"], summary=summary)
    facts = {**result.facts, "decision": decision, "note": request.summary}
    page = f"**{request.summary}**\n\n{result.page}"
    if result.artifact:
        publish_page("", page, request.summary, artifact_id=result.artifact)
    return dataclasses.replace(
        result, rows=rows, results=results, facts=facts, waiting=None, page=page
    )


def _wait_for_decision(
    settings: PipelineSettings, tracking: Tracking, result: PipelineResult, is_restarted: bool
) -> ApprovalRequest:
    """Wait until the request is decided. A deployment run is suspended here and restarted later.

    Args:
        is_restarted: the form was submitted in time, even if a worker became free only later.
    """
    request = result.waiting
    assert request is not None
    seconds_left = request.deadline - time.time()
    if (seconds_left > 0 or is_restarted) and deployment.id and not flow_run.parent_flow_run_id:
        _store_pending_result(settings, result)
        try:
            form = suspend_flow_run(
                wait_for_input=_build_approval_form(request, tracking),
                timeout=max(1, int(seconds_left)),
                key=_build_pause_key(request),
            )
        except Pause:
            _emit_waiting_event()
            raise
        _apply_form_decision(tracking, request, form, ignore_deadline=True)
        _locate_pending_result(settings).unlink(missing_ok=True)
    elif seconds_left > 0:
        _pause_flow_run(tracking, request)
    reloaded = reload_request(tracking, request)
    if reloaded.is_waiting:
        expire_requests(tracking, request.name)
        reloaded = reload_request(tracking, request)
    return reloaded


def _emit_waiting_event() -> None:
    """Emit an event of the suspended flow run after its last heartbeat.

    Prefect's heartbeats end with the flow's body, so one may follow the suspension. Without a later event the
    automation `posttrain-crash-zombies` would treat the waiting run as crashed.
    """
    emit_event(
        event=WAITING_EVENT, resource={"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
    )


def _build_pause_key(request: ApprovalRequest) -> str:
    """Return the pause key; Prefect pauses once per key, so a repeated request needs a new one."""
    return re.sub(r"[^0-9a-f]+", "-", f"{request.key}-{request.asked}".lower())


def _build_approval_form(request: ApprovalRequest, tracking: Tracking) -> type[Approval]:
    # "" while the store is unreachable.
    review = tracking.format_run_reference(
        request.stage_run_id, "the files in MLflow", tab="artifacts"
    )
    review = review or "the files in the folder review of the MLflow run"
    return Approval.with_initial_data(
        description=f"{request.summary}\n\nThe evidence is the artifact `...-promote` of this run, and {review}."
    )


def _apply_form_decision(
    tracking: Tracking, request: ApprovalRequest, form: Approval, *, ignore_deadline: bool = False
) -> None:
    """Apply the form's decision, unless the request was decided elsewhere."""
    if not reload_request(tracking, request).is_waiting:
        return
    try:
        answer_request(
            tracking,
            request,
            approve=form.decision == "approve",
            answered_by=f"{form.reviewer} (Prefect form)",
            note=form.note,
            in_time=ignore_deadline,
        )
    except SettingsError as error:  # too late, or already decided: see the tags
        logger.warning("%s", error)


def _pause_flow_run(tracking: Tracking, request: ApprovalRequest) -> None:
    """Pause the flow run, so that its page shows the form, while polling for an answer from elsewhere."""
    watcher = _ApprovalWatcher(tracking, request)
    form: Approval | None = None
    watcher.start()
    try:
        try:
            timeout = int(request.deadline - time.time()) + PAUSE_GRACE_SECONDS
            form = pause_flow_run(
                wait_for_input=_build_approval_form(request, tracking),
                timeout=timeout,
                poll_interval=2,
                key=_build_pause_key(request),
            )
        except Exception as error:
            # The Prefect API is unavailable or refuses: the command line still works.
            logger.warning(
                "the Prefect page cannot take the answer (%s: %s)", type(error).__name__, error
            )
        if form is None:
            watcher.is_decided.wait()
    finally:
        watcher.stop_polling()
    if form is not None and not watcher.is_decided.is_set():
        _apply_form_decision(tracking, request, form)


class _ApprovalWatcher(threading.Thread):
    """Thread that polls the tracking store and the deadline, then resumes the paused flow run."""

    def __init__(self, tracking: Tracking, request: ApprovalRequest) -> None:
        super().__init__(name="approval", daemon=True)
        self.tracking, self.request = tracking, request
        self.is_decided = threading.Event()
        self._stop_polling = threading.Event()
        self._context = contextvars.copy_context()  # Prefect's settings

    def stop_polling(self) -> None:
        """Stop polling."""
        self._stop_polling.set()

    def run(self) -> None:
        """Poll until decided, overdue or stopped."""
        while not self._stop_polling.wait(POLL_SECONDS):
            try:
                if time.time() > self.request.deadline:
                    expire_requests(self.tracking, self.request.name)
                if not reload_request(self.tracking, self.request).is_waiting:
                    break
            except BackendError as error:
                logger.debug("asking again: %s", error)
        else:
            return
        self.is_decided.set()
        while not self._stop_polling.wait(0.5):  # until the pause is registered, and ends
            try:
                self._context.copy().run(
                    resume_waiting_flow_run, self.request.flow_run_id, approve=False, by="", note=""
                )
            except Exception as error:
                logger.debug("the flow run cannot be resumed yet: %s", error)


def resume_waiting_flow_run(flow_run_id: str, *, approve: bool, by: str, note: str) -> None:
    """Resume a waiting flow run; its process reads the decision from the tracking store."""
    form = {
        "decision": "approve" if approve else "reject",
        "reviewer": by or "posttrain",
        "note": note,
    }
    resume_flow_run(UUID(flow_run_id), run_input=form)


def _locate_pending_result(settings: PipelineSettings) -> Path:
    return Path(settings.output).resolve() / settings.name / "approvals" / f"{flow_run.id}.json"


def _store_pending_result(settings: PipelineSettings, result: PipelineResult) -> None:
    """Store the pending result, so that the restarted run, possibly with newer code, need not recompute it."""
    path = _locate_pending_result(settings)
    make_folder(path.parent)
    fields: dict[str, Any] = {
        "rows": result.rows,
        "run_url": result.run_url,
        "seconds": result.seconds,
        "facts": result.facts,
        "page": result.page,
        "artifact": result.artifact,
        "waiting": dataclasses.asdict(result.waiting) if result.waiting else None,
    }
    write_json_atomic(path, fields)


def _load_pending_result(settings: PipelineSettings) -> PipelineResult | None:
    """Load the result of this flow run from its suspension; None if it was not suspended."""
    path = _locate_pending_result(settings)
    if not flow_run.id or not path.is_file():
        return None
    fields = json.loads(path.read_text())
    waiting = ApprovalRequest(**fields.pop("waiting"))
    return PipelineResult(results={}, waiting=waiting, **fields)
