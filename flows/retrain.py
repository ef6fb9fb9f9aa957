"""Retraining on new data (or on request), from the champion, with promotion through the gate.

Everything from the data check to the promotion happens under the lock of the pipeline's folder: the second of two
overlapping runs waits (`run.wait_seconds`) or is refused, and then checks the data again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows.parameters import (
    MainForm,
    PipelineForm,
    describe_run_changes,
    extract_pipeline_name,
    read_settings,
)
from flows.post_training import execute_pipeline, report_message, run_local_flow
from flows.runtime import prefect_outage
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.flow_run_states import mark_flow_run_stopped
from flows.runtime.prefect_home import exempt_loopback_in_calls
from flows.runtime.progress import RemainingTimeEstimator
from flows.runtime.run_request import RunRequest
from flows.runtime.run_summary import PipelineResult
from rl_core.errors import PosttrainError
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings, check_changed_settings, digest_settings
from tasks.lifecycle.data_lineage import inspect_data_sources
from tasks.lifecycle.retraining import (
    RetrainingPlan,
    plan_retraining,
    record_outcome,
    record_start,
    settle_waiting_retrainings,
)
from tasks.pipeline.prefect_stages import publish_page
from tasks.pipeline.run_options import OnDrift
from tasks.pipeline.run_record import find_finished_run
from tasks.stages.promote import AWAITING_APPROVAL
from tasks.tracking import Tracking

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetrainResult:
    """Result of a retraining."""

    status: str  # skipped, or the gate's decision: promoted, rejected, ...
    message: str
    pipeline: PipelineResult | None = None  # None = skipped


def _build_run_name() -> str:
    name = extract_pipeline_name(flow_run.parameters["settings"])
    return " · ".join(filter(None, (f"retrain {name}", describe_run_changes(flow_run.parameters))))


@exempt_loopback_in_calls
@flow(
    name="retrain",
    flow_run_name=_build_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
    on_failure=[mark_flow_run_stopped],
    on_crashed=[mark_flow_run_stopped],
)
def retrain(
    settings: PipelineForm | str,
    main: MainForm | None = None,
    start: Literal["champion", "base"] | None = None,
    force: bool = False,
    reason: str = "",
    overrides: list[str] | None = None,
    allow_drift: bool = False,
    fresh: bool = False,
) -> State[RetrainResult]:
    """Retrain if there is new data, and promote the result if it passes the gate.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        main: the settings that are changed most; values that differ from the declared ones are applied to `settings`.
        start: champion, or base (the config's initial model); default: retrain.start of the settings.
        force: retrain even without new data.
        reason: origin of the request; stored with the resulting versions.
        overrides: key.path=value each, as in `--set`; applied to `settings`.
        allow_drift: resume an unfinished stage although its settings, data or code changed.
        fresh: restart the unfinished stage of an interrupted retraining.
    """
    typed = read_settings(settings, overrides, main)
    with prefect_outage.capture_outcome() as outcome:
        outcome.result = result = _retrain_and_promote(
            typed, start, force, reason, allow_drift=allow_drift, fresh=fresh
        )
    return Completed(message=result.message, data=result)


def _retrain_and_promote(
    settings: PipelineSettings,
    start: Literal["champion", "base"] | None,
    force: bool,
    reason: str,
    *,
    allow_drift: bool,
    fresh: bool,
) -> RetrainResult:
    output = Path(settings.output).resolve()
    home = output / settings.name
    tracking = Tracking(settings.tracking.uri, output, settings.experiment)
    plans: list[RetrainingPlan] = []

    def run_once() -> PipelineResult:
        with FolderLock(home / ".lock", wait_s=settings.run.wait_seconds) as lock:
            plan = plan_retraining(
                settings,
                inspect_data_sources(settings),
                tracking.find_champion(settings.registered_model),
                settle_waiting_retrainings(tracking, settings.registered_model, home),
                start=start,
                force=force,
                reason=reason,
                flow_run_id=str(flow_run.id or ""),
            )
            plans.append(plan)
            if plan.record is None:
                logger.info("retraining: %s", plan.reason)
                return PipelineResult(results={}, rows=[], run_url="", seconds=0.0)
            # A new retraining has other data or another start than an interrupted one, so its stages restart, and
            # the old checkpoints are archived with a warning.
            on_drift: OnDrift = "refuse" if plan.is_continuation else "anew"
            if allow_drift:
                on_drift = "resume"
            return _run_planned_training(home, plan, lock, on_drift, fresh)

    # Manual approval is awaited without the lock.
    pipeline = run_with_approval(settings, run_once, report_message)
    if plans and plans[-1].record is None:
        result = RetrainResult("skipped", plans[-1].reason)
    else:
        result = _build_retrain_result(pipeline)
        settle_waiting_retrainings(tracking, settings.registered_model, home)
    _publish_report(settings, plans[-1] if plans else None, result)
    return result


def _build_retrain_result(pipeline: PipelineResult) -> RetrainResult:
    """Build the result with the decision of the gate or of the reviewer."""
    verdict = _read_verdict(pipeline)
    status = str(verdict.get("decision", ""))
    if status == AWAITING_APPROVAL:
        status = "waiting"
    return RetrainResult(status, str(verdict.get("note", "")), pipeline)


def _read_verdict(pipeline: PipelineResult) -> dict[str, Any]:
    """Return the summary of the promotion, or the facts of a run without one."""
    if "promote" in pipeline.results:
        return pipeline.results["promote"].summary
    return pipeline.facts


def _run_planned_training(
    home: Path, plan: RetrainingPlan, lock: FolderLock, on_drift: OnDrift, restart: bool
) -> PipelineResult:
    """Run the planned pipeline and record its outcome."""
    record, settings = plan.record, plan.settings
    assert record is not None and settings is not None
    logger.info("retraining %d: %s", record.number, plan.reason, extra={"for_people": True})
    record_start(home, record)
    inject_fault("retrain.opened")
    tags = {
        "retrain.number": str(record.number),
        "retrain.start": f"version {record.start}" if record.start else "base",
        "retrain.reason": record.reason[:500],
    }
    # A retraining killed after its run ended and before its outcome was recorded continues with that run.
    started = find_finished_run(home, digest_settings(settings)) if plan.is_continuation else ""
    try:
        pipeline = execute_pipeline(
            settings, tags=tags, lock=lock, on_drift=on_drift, restart=restart, started=started
        )
    except PosttrainError as error:
        record_outcome(home, record, status="failed", note=f"{type(error).__name__}: {error}"[:500])
        raise
    result = _build_retrain_result(pipeline)
    verdict = _read_verdict(pipeline)
    record_outcome(
        home,
        record,
        status="failed"
        if result.status == "postponed"
        else result.status,  # a postponed promotion is retried
        version=verdict.get("model_version"),
        note=str(verdict.get("reason", result.message)),
    )
    inject_fault("retrain.closed")
    return pipeline


def _publish_report(
    settings: PipelineSettings, plan: RetrainingPlan | None, result: RetrainResult
) -> None:
    """Write a Prefect artifact with the plan and the outcome; `plan` is None in a run resumed only for the approval."""
    lines = [f"## {settings.name}: {result.status}", result.message]
    if plan is not None:
        lines += _format_plan(settings, plan, result)
    pipeline = result.pipeline
    if pipeline is not None:
        lines.append(pipeline.page)
    artifact = pipeline.artifact if pipeline is not None else ""
    publish_page(
        f"{settings.name}-retraining", "\n\n".join(lines), result.message, artifact_id=artifact
    )


def _format_plan(
    settings: PipelineSettings, plan: RetrainingPlan, result: RetrainResult
) -> list[str]:
    lines = [] if plan.reason == result.message else [f"Why: {plan.reason}"]
    if plan.record is not None:
        start = "the base model"
        if plan.record.start:
            start = f"version {plan.record.start} of {settings.registered_model}"
        lines.append(f"Retraining {plan.record.number} from {start}, seed {plan.record.seed}")
    if plan.record is not None and plan.record.dropped:
        lines.append(f"Skipped, without new data: {', '.join(plan.record.dropped)}")
    if plan.new_data.changes or plan.new_data.missing_files:
        rows = ["| data | file | change | new rows |", "|---|---|---|---|"]
        rows += [
            f"| {change.source} | {change.file.replace('|', '/')} | {change.kind} | {change.rows} |"
            for change in plan.new_data.changes
        ]
        rows += [
            f"| {name.replace('|', '/')} | | missing | |" for name in plan.new_data.missing_files
        ]
        lines.append("\n".join(rows))
    return lines


def run_retraining(
    settings: PipelineSettings,
    *,
    start: Literal["champion", "base"] | None = None,
    force: bool = False,
    reason: str = "",
    quiet: bool = False,
    allow_drift: bool = False,
    fresh: bool = False,
) -> RetrainResult:
    """Run the flow in this process, with live progress. Arguments: see `retrain`."""
    settings = check_changed_settings(settings)
    result: Any = run_local_flow(
        lambda stored: retrain(
            stored,
            start=start,
            force=force,
            reason=reason,
            allow_drift=allow_drift,
            fresh=fresh,
        ),
        RunRequest(settings=settings),
        quiet=quiet,
        time_left=RemainingTimeEstimator(settings.stages.active),
    )
    assert isinstance(result, RetrainResult)
    return result
