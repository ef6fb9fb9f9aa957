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

from flows.parameters import PipelineForm, pipeline_name, read_settings, told_overrides
from flows.post_training import execute
from flows.runtime.pipeline_result import PipelineResult
from flows.runtime.stopped_state import name_stopped
from rl_core.analysis.statistics import Rate
from rl_core.storage.faults import fault
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings, settings_digest
from tasks.lifecycle.champion import (
    ChampionVerdict,
    count_checks,
    figure_of,
    figure_tags,
    judge,
    note_check,
    settings_of_check,
)
from tasks.pipeline.prefect_artifacts import publish_page
from tasks.pipeline.record import finished_run
from tasks.stages.evaluate import read_evaluation
from tasks.tracking import ModelVersion, Tracking

__all__ = ["EVENT", "CheckResult", "announce", "evaluate_champion"]

logger = logging.getLogger(__name__)

EVENT = "posttrain.champion.regressed"


@dataclass(frozen=True)
class CheckResult:
    """Result of the check."""

    message: str
    regressed: bool = False
    version: int | None = None  # None = no champion
    pipeline: PipelineResult | None = None


def _run_name() -> str:
    overrides = told_overrides(flow_run.parameters.get("overrides"))
    name = pipeline_name(flow_run.parameters["settings"])
    return " · ".join(filter(None, (f"evaluate champion {name}", overrides)))


@flow(
    name="evaluate-champion",
    flow_run_name=_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
    on_failure=[name_stopped],
    on_crashed=[name_stopped],
)
def evaluate_champion(settings: PipelineForm | str, overrides: list[str] | None = None) -> State[CheckResult]:
    """Evaluate the champion on held-out episodes and compare with its registered success rate.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        overrides: key.path=value each, as in `--set`; applied to `settings`.
    """
    result = _check(read_settings(settings, overrides, ask_servers=False))
    logger.info("%s", result.message)
    return Completed(message=result.message, data=result)


def _check(settings: PipelineSettings) -> CheckResult:
    output = Path(settings.output).resolve()
    home = output / settings.name
    tracking = Tracking(settings.tracking.uri, output, settings.experiment)
    name = settings.registered_model
    with FolderLock(home / ".lock", wait_s=settings.run.wait_seconds) as lock:
        champion = tracking.champion(name)
        if champion is None:
            return CheckResult(f"{name} has no champion yet; posttrain run or retrain makes one")
        number = count_checks(home, champion.version)
        typed = settings_of_check(settings, champion, number)
        tags = {"check.version": str(champion.version), "check.number": str(number + 1)}
        # One that was killed when its run had ended, and before it was noted, goes on with that run.
        started = finished_run(home, settings_digest(typed))
        pipeline = execute(typed, models={"champion": champion.reference}, tags=tags, lock=lock, started=started)
        result = read_evaluation(pipeline.results["evaluate"].path, "champion")
        fault("check.played")
        registered = figure_of(champion.tags)
        now = Rate(result.success_rate, *result.interval, result.samples)
        verdict = judge(result, registered, settings.retrain.margin) if registered else None
        if verdict is None:
            tracking.tag_version(name, champion.version, figure_tags(result))
        tracking.tag_version(name, champion.version, {"checked.success_rate": f"{now.rate:.6g}"})
        note_check(home, champion.version, verdict, now)
        fault("check.noted")
    subject = f"champion version {champion.version} of {name}"
    if verdict is None:
        message = f"{subject}: success {now.rate:.1%}, registered now; later checks are compared with it"
    else:
        message = f"{subject} {'got worse' if verdict.regressed else 'is as good as it was'}: {verdict}"
    text = f"## {settings.name}: champion\n\n**{message}**\n\n{pipeline.page}"
    publish_page(f"{settings.name}-champion", text, message, before=pipeline.artifact)
    if verdict is not None and verdict.regressed:
        announce(name, champion, verdict)
    return CheckResult(message, verdict is not None and verdict.regressed, champion.version, pipeline)


def announce(name: str, champion: ModelVersion, verdict: ChampionVerdict) -> None:
    """Emit the regression event."""
    emit_event(
        event=EVENT,
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
