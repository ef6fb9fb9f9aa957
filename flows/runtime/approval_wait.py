"""Manual approval of a promotion: a deployment's run is suspended, any other run waits in its process.

A run of a deployment ends its process and is started again when the form in the Prefect UI is filled in, or when
`posttrain approve` resumes it. Any other run waits here: for the form, the command or the deadline, whichever is first.
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

from flows.runtime.approval_commands import how_to_answer
from flows.runtime.pipeline_result import PipelineResult
from rl_core.errors import BackendError, SettingsError
from rl_core.storage.single_files import make_folder, write_json_atomic
from tasks.config import PipelineSettings
from tasks.lifecycle.approval import ApprovalRequest, answer, asked, expire
from tasks.pipeline.prefect_artifacts import publish_page
from tasks.tracking import Tracking

__all__ = ["run_with_approval"]

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # polling interval for an answer
WAITS = "posttrain.approval.waits"  # event that deployments/automations.yaml takes for an orderly wait
GRACE_SECONDS = 120  # Prefect's own timeout comes after ours, whose message is clearer


class Approval(RunInput):
    """Approval form of the Prefect UI."""

    decision: Literal["approve", "reject"] = Field(description="approve moves the alias champion to this version")
    reviewer: str = Field(description="who decides; kept with the version", min_length=1)
    note: str = Field(default="", description="why; kept with the version")


def run_with_approval(
    settings: PipelineSettings, run_once: Callable[[], PipelineResult], say: Callable[[str], None]
) -> PipelineResult:
    """Run the pipeline, wait for manual approval if its promotion needs one, and return the result with the decision.

    If another version has become champion meanwhile, the pipeline runs once more: its stages are cached, and the
    challenger is compared with the new champion.

    Args:
        run_once: runs the pipeline; `waiting` of its result is the pending approval, if any.
        say: prints to the terminal.
    """
    tracking = Tracking(settings.tracking.uri, Path(settings.output), settings.experiment)
    result = _suspended_before(settings)
    while True:
        back = result is not None
        if result is None:
            result = run_once()
        if result.waiting is None or (not back and _asked_by_another(result.waiting)):
            return result
        if not back:
            say(f"promote: {result.waiting.outcome}\n{how_to_answer(settings, result.waiting)}")
        request = _wait(settings, tracking, result, back)
        say(f"promote: {request.outcome}")
        if request.state != "superseded":
            return _with_answer(result, request)
        result = None


def _asked_by_another(request: ApprovalRequest) -> bool:
    """True if another deployment run waits for the same approval; then this run ends."""
    return bool(deployment.id) and request.flow_run_id not in ("", str(flow_run.id))


def _with_answer(result: PipelineResult, request: ApprovalRequest) -> PipelineResult:
    """Result with the decision in place of the pending approval."""
    rows = [{**row, "note": request.outcome} if row["stage"] == "promote" else row for row in result.rows]
    stages = dict(result.results)
    decision = "promoted" if request.state == "approved" else "rejected"
    if "promote" in stages:
        summary = {**stages["promote"].summary, "decision": decision, "note": request.outcome}
        stages["promote"] = dataclasses.replace(stages["promote"], summary=summary)
    facts = {**result.facts, "decision": decision, "note": request.outcome}
    page = f"**{request.outcome}**\n\n{result.page}"
    if result.artifact:
        publish_page("", page, request.outcome, before=result.artifact)
    return dataclasses.replace(result, rows=rows, results=stages, facts=facts, waiting=None, page=page)


def _wait(settings: PipelineSettings, tracking: Tracking, result: PipelineResult, back: bool) -> ApprovalRequest:
    """Wait until the request is decided. A deployment run is suspended here and restarted later.

    Args:
        back: the run was restarted: the form was submitted in time, even if a worker became free only later.
    """
    request = result.waiting
    assert request is not None
    left = request.deadline - time.time()
    if (left > 0 or back) and deployment.id and not flow_run.parent_flow_run_id:
        _remember(settings, result)
        try:
            form = suspend_flow_run(
                wait_for_input=_form(request, tracking), timeout=max(1, int(left)), key=_key(request)
            )
        except Pause:
            _tell_that_it_waits()
            raise
        _settle(tracking, request, form, in_time=True)
        _place(settings).unlink(missing_ok=True)
    elif left > 0:
        _wait_here(tracking, request)
    if (found := asked(tracking, request)).is_waiting:
        expire(tracking, request.name)
        found = asked(tracking, request)
    return found


def _tell_that_it_waits() -> None:
    """Emit an event of the suspended flow run, behind its last heartbeat.

    Prefect's heartbeats end with the flow's body, so one may come between the suspension and that end. Nothing follows
    it then, and the automation `posttrain-crash-zombies` would take the run that waits for one whose process is gone.
    """
    emit_event(event=WAITS, resource={"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"})


def _key(request: ApprovalRequest) -> str:
    """Pause key; Prefect pauses once per key, so a repeated request needs a new one."""
    return re.sub(r"[^0-9a-f]+", "-", f"{request.key}-{request.asked}".lower())


def _form(request: ApprovalRequest, tracking: Tracking) -> type[Approval]:
    page = tracking.run_url(request.stage_run_id, tab="artifacts")  # "" while the store is away
    review = f"[`review/` in MLflow]({page})" if page else "`review/` in the MLflow run"
    return Approval.with_initial_data(
        description=f"{request.outcome}\n\nThe evidence is the artifact `...-promote` of this run, and {review}."
    )


def _settle(tracking: Tracking, request: ApprovalRequest, form: Approval, *, in_time: bool = False) -> None:
    """Apply the form's decision, unless the request was decided elsewhere."""
    if not asked(tracking, request).is_waiting:
        return
    try:
        by = f"{form.reviewer} (Prefect form)"
        answer(tracking, request, approve=form.decision == "approve", by=by, note=form.note, in_time=in_time)
    except SettingsError as error:  # too late, or already decided: see the tags
        logger.warning("%s", error)


def _wait_here(tracking: Tracking, request: ApprovalRequest) -> None:
    """Pause the flow run, so that its page shows the form, while polling for an answer from elsewhere."""
    watch = _Watch(tracking, request)
    form: Approval | None = None
    watch.start()
    try:
        try:
            limit = int(request.deadline - time.time()) + GRACE_SECONDS
            form = pause_flow_run(
                wait_for_input=_form(request, tracking), timeout=limit, poll_interval=2, key=_key(request)
            )
        except Exception as error:
            # The Prefect API is unavailable or refuses: the command line still works.
            logger.warning("the Prefect page cannot take the answer (%s: %s)", type(error).__name__, error)
        if form is None:
            watch.answered.wait()
    finally:
        watch.end()
    if form is not None and not watch.answered.is_set():
        _settle(tracking, request, form)


class _Watch(threading.Thread):
    """Thread that polls the tracking store and the deadline, then resumes the paused flow run."""

    def __init__(self, tracking: Tracking, request: ApprovalRequest) -> None:
        super().__init__(name="approval", daemon=True)
        self.tracking, self.request = tracking, request
        self.answered = threading.Event()
        self._ended = threading.Event()
        self._context = contextvars.copy_context()  # Prefect's settings

    def end(self) -> None:
        """Stop polling."""
        self._ended.set()

    def run(self) -> None:
        """Poll until decided, overdue or stopped."""
        while not self._ended.wait(POLL_SECONDS):
            try:
                if time.time() > self.request.deadline:
                    expire(self.tracking, self.request.name)
                if not asked(self.tracking, self.request).is_waiting:
                    break
            except BackendError as error:
                logger.debug("asking again: %s", error)
        else:
            return
        self.answered.set()
        while not self._ended.wait(0.5):  # until the pause is registered, and ends
            try:
                self._context.copy().run(resume, self.request.flow_run_id, approve=False, by="", note="")
            except Exception as error:
                logger.debug("the flow run is not to be resumed yet: %s", error)


def resume(flow_run_id: str, *, approve: bool, by: str, note: str) -> None:
    """Resume a waiting flow run; its process reads the decision from the tracking store."""
    form = {"decision": "approve" if approve else "reject", "reviewer": by or "posttrain", "note": note}
    resume_flow_run(UUID(flow_run_id), run_input=form)


# ---------------------------------------------------------------------------------------- runs of deployments come back


def _place(settings: PipelineSettings) -> Path:
    return Path(settings.output).resolve() / settings.name / "approvals" / f"{flow_run.id}.json"


def _remember(settings: PipelineSettings, result: PipelineResult) -> None:
    """Store the pending result, so that the restarted run (possibly with newer code) need not recompute it."""
    path = _place(settings)
    make_folder(path.parent)
    kept: dict[str, Any] = {
        "rows": result.rows,
        "run_url": result.run_url,
        "seconds": result.seconds,
        "facts": result.facts,
        "page": result.page,
        "artifact": result.artifact,
        "waiting": dataclasses.asdict(result.waiting) if result.waiting else None,
    }
    write_json_atomic(path, kept)


def _suspended_before(settings: PipelineSettings) -> PipelineResult | None:
    """Stored result of this flow run from its suspension; None if it was not suspended."""
    path = _place(settings)
    if not flow_run.id or not path.is_file():
        return None
    kept = json.loads(path.read_text())
    waiting = ApprovalRequest(**kept.pop("waiting"))
    return PipelineResult(results={}, waiting=waiting, **kept)
