"""Scheduled held-out evaluation of the champion; emits an event if it regressed since its promotion.

The event is `posttrain.champion.regressed` with resource `posttrain.model.<name>`; deployments/automations.yaml starts
a retraining on it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows.parameters import PipelineForm, describe_overrides, extract_pipeline_name, read_settings
from flows.post_training import execute_pipeline
from flows.runtime.flow_run_states import mark_flow_run_stopped
from flows.runtime.prefect_home import exempt_loopback_in_calls
from flows.runtime.run_summary import PipelineResult
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings, digest_settings
from tasks.lifecycle.promotion import (
    ChampionCheck,
    build_check_settings,
    build_figure_tags,
    check_champion_regression,
    count_checks,
    read_success_figure,
    read_success_rate,
    record_check,
)
from tasks.pipeline.prefect_stages import publish_page
from tasks.pipeline.run_record import find_finished_run
from tasks.stages.evaluate import read_evaluation
from tasks.tracking import ModelVersion, Tracking

logger = logging.getLogger(__name__)

REGRESSION_EVENT = "posttrain.champion.regressed"


@dataclass(frozen=True)
class ChampionCheckResult:
    """Result of a champion check."""

    message: str
    regressed: bool = False
    version: int | None = None  # None = no champion
    pipeline: PipelineResult | None = None


def _build_run_name() -> str:
    overrides = describe_overrides(flow_run.parameters.get("overrides"))
    name = extract_pipeline_name(flow_run.parameters["settings"])
    return " · ".join(filter(None, (f"evaluate champion {name}", overrides)))


@exempt_loopback_in_calls
@flow(
    name="evaluate-champion",
    flow_run_name=_build_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
    on_failure=[mark_flow_run_stopped],
    on_crashed=[mark_flow_run_stopped],
)
def evaluate_champion(
    settings: PipelineForm | str, overrides: list[str] | None = None
) -> State[ChampionCheckResult]:
    """Evaluate the champion on held-out episodes and compare with its registered success rate.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        overrides: key.path=value each, as in `--set`; applied to `settings`.
    """
    result = _check_champion(read_settings(settings, overrides, check_servers=False))
    logger.info("%s", result.message)
    return Completed(message=result.message, data=result)


def _check_champion(settings: PipelineSettings) -> ChampionCheckResult:
    output = Path(settings.output).resolve()
    home = output / settings.name
    tracking = Tracking(settings.tracking.uri, output, settings.experiment)
    name = settings.registered_model
    with FolderLock(home / ".lock", wait_s=settings.run.wait_seconds) as lock:
        champion = tracking.find_champion(name)
        if champion is None:
            return ChampionCheckResult(
                f"{name} has no champion yet; posttrain run or retrain makes one"
            )
        number = count_checks(home, champion.version)
        typed = build_check_settings(settings, champion, number)
        tags = {"check.version": str(champion.version), "check.number": str(number + 1)}
        # A check that was killed after its run ended and before it was recorded continues with that run.
        started = find_finished_run(home, digest_settings(typed))
        pipeline = execute_pipeline(
            typed, models={"champion": champion.reference}, tags=tags, lock=lock, started=started
        )
        result = read_evaluation(pipeline.results["evaluate"].path, "champion")
        inject_fault("check.played")
        registered = read_success_figure(champion.tags)
        now = read_success_rate(result)
        verdict = None
        if registered:
            verdict = check_champion_regression(result, registered, settings.retrain.margin)
        else:
            tracking.tag_version(name, champion.version, build_figure_tags(result))
        tracking.tag_version(name, champion.version, {"checked.success_rate": f"{now.rate:.6g}"})
        record_check(home, champion.version, verdict, now)
        inject_fault("check.noted")
    subject = f"champion version {champion.version} of {name}"
    if verdict is None:
        message = (
            f"{subject}: success {now.rate:.1%}, registered now; later checks are compared with it"
        )
    else:
        trend = "got worse" if verdict.regressed else "is as good as it was"
        message = f"{subject} {trend}: {verdict}"
    text = f"## {settings.name}: champion\n\n**{message}**\n\n{pipeline.page}"
    publish_page(f"{settings.name}-champion", text, message, artifact_id=pipeline.artifact)
    if verdict is None or not verdict.regressed:
        return ChampionCheckResult(message, False, champion.version, pipeline)
    emit_regression_event(name, champion, verdict)
    return ChampionCheckResult(message, True, champion.version, pipeline)


def emit_regression_event(name: str, champion: ModelVersion, verdict: ChampionCheck) -> None:
    """Emit the regression event."""
    emit_event(
        event=REGRESSION_EVENT,
        resource={"prefect.resource.id": f"posttrain.model.{name}", "prefect.resource.name": name},
        payload={
            "version": champion.version,
            "success_rate": verdict.now.rate,
            "registered": verdict.registered.rate,
            "change": verdict.change.difference,
            "change_high": verdict.change.high,
            "margin": verdict.margin,
            "text": str(verdict),
        },
    )
