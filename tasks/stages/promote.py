"""Stage: the promotion gate. Champion and challenger play the same episodes; the alias moves only on evidence.

With `approve: manual`, a model that passes the gate waits for manual approval (tasks/lifecycle/approval.py);
the pipeline run then ends as waiting.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import PosttrainError, SettingsError
from rl_core.evaluation import Evaluation
from rl_core.settings import AnalysisSettings
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.manifest import digest_folder
from tasks.config import PromotionSettings
from tasks.lifecycle import promotion
from tasks.lifecycle.approval import (
    build_approval_request,
    expire_requests,
    read_approval_request,
    record_answer,
    request_approval,
)
from tasks.lifecycle.promotion import GateAttempt, build_figure_tags
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, has_begun, run_stage
from tasks.pipeline.stage_result import GAIN, REVIEW_FILE, StageResult, format_gain
from tasks.stage_registry import START_MODEL
from tasks.stages.evaluate import evaluate_models, read_evaluation
from tasks.stages.export import verify_proof
from tasks.stages.promotion_gate import (
    MetricCheck,
    check_suite_metrics,
    choose_episode_draw,
    compute_attempt_level,
    decide_promotion,
    explain_too_few_episodes,
    refuse_unknown_metrics,
)
from tasks.stages.promotion_review import ComparedModel, write_report, write_review
from tasks.stages.suites import load_suite_metrics, run_model_suites
from tasks.tracking import ModelVersion, Tracking, VersionByContent

logger = logging.getLogger(__name__)

AWAITING_APPROVAL = "awaiting approval"
CHALLENGER_NAME = "challenger"  # its name in an evaluation with the champion, on fresh episodes
MAX_COMPARISONS = 5  # with one champion after the other, if the champion keeps changing meanwhile


@dataclasses.dataclass(frozen=True)
class Opponent:
    """The champion that a challenger is compared with."""

    champion: ModelVersion
    evaluation: StageResult  # including the challenger's episodes, unless draw is 0
    comparison: str  # ID of the comparison of these two models
    draw: int  # number of the draw of held-out episodes
    suites: StageResult | None = None  # with its metrics, if a condition compares them

    @property
    def version(self) -> int:
        """The champion's version number."""
        return self.champion.version


class ChampionChanged(PosttrainError):
    """Error: another version became champion while the challenger was compared with the previous one."""


def promote_challenger(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    challenger: StageResult,
    data: StageResult | None,
    proof: StageResult,
    suites: StageResult | None = None,
) -> StageResult:
    """Run the stage.

    If the champion changes during the comparison, the challenger is compared with the new one too: no champion is
    replaced unseen.

    Args:
        evaluation: contains the challenger's episodes under the name of its stage.
        proof: contains the challenger's proof of export.
        suites: contains the challenger's metrics of other evaluators.
    Raises: ChampionChanged if that keeps happening; ExportMismatch for a model without a proof of export.
    """
    for _ in range(MAX_COMPARISONS - 1):
        try:
            return _run_promotion(pipeline_run, evaluation, challenger, data, proof, suites)
        except ChampionChanged as changed:
            logger.warning("promotion: %s; comparing with it", changed)
    return _run_promotion(pipeline_run, evaluation, challenger, data, proof, suites)


def _run_promotion(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    challenger: StageResult,
    data: StageResult | None,
    proof: StageResult,
    suites: StageResult | None,
) -> StageResult:
    proof_tags = verify_proof(proof, challenger.stage, challenger.model)
    settings = pipeline_run.settings.stages.promote or PromotionSettings()
    registered = pipeline_run.registered_model
    expire_requests(pipeline_run.tracking, registered)
    champion = pipeline_run.tracking.find_champion(registered)
    inputs: dict[str, Any] = {"evaluation": evaluation, "challenger": challenger, "proof": proof}
    if settings.metrics:
        inputs["suites"] = _require_suites(settings, suites, challenger.stage)
    opponent: Opponent | None = None
    challenger_digest = digest_folder(challenger.model)
    promoted_before = None  # the champion, if it is the challenger itself
    if champion is not None and champion.tags.get("model_sha256") == challenger_digest:
        if not _is_promoted_by_gate(pipeline_run, champion):
            return _build_already_champion_result(pipeline_run, challenger, champion)
        promoted_before, champion = champion, _find_previous_champion(pipeline_run, champion)
    if champion is not None:
        digest = champion.tags.get("model_sha256", "")
        folder = pipeline_run.tracking.download_version(
            registered, champion.version, pipeline_run.home / "champions"
        )
        comparison = promotion.compute_comparison_id(
            challenger_digest, digest or digest_folder(folder)
        )
        draw = choose_episode_draw(
            pipeline_run,
            settings,
            comparison,
            read_evaluation(evaluation.path, challenger.stage),
            data,
        )
        models: dict[str, Any] = {"champion": folder}
        if draw.number:
            models[CHALLENGER_NAME] = challenger
        champion_evaluation = evaluate_models(
            pipeline_run,
            models,
            data,
            label=f"evaluate champion{draw.label}",
            settings=draw.settings,
        )
        inputs["champion"] = champion_evaluation
        champion_suites: StageResult | None = None
        if any(condition.max_loss is not None for condition in settings.metrics.values()):
            champion_suites = inputs["champion_suites"] = run_model_suites(
                pipeline_run, {"champion": folder}, label="suites champion"
            )
        opponent = Opponent(champion, champion_evaluation, comparison, draw.number, champion_suites)
    if promoted_before is not None and not has_begun(
        pipeline_run, "promote", settings=settings, inputs=inputs
    ):
        return _build_already_champion_result(pipeline_run, challenger, promoted_before)

    def body(context: StageContext) -> dict[str, Any]:
        return _run_gate(context, challenger, opponent, proof_tags, suites)

    result = run_stage(pipeline_run, "promote", body, settings=settings, inputs=inputs)
    return _attach_approval_request(pipeline_run, result, champion.version if champion else None)


def _is_promoted_by_gate(pipeline_run: PipelineRun, champion: ModelVersion) -> bool:
    """Return whether the gate promoted the champion, possibly in this very run before it was killed."""
    return (
        pipeline_run.resumed
        and champion.tags.get("gate.decision") == "promoted"
        and read_approval_request(champion) is None
    )


def _find_previous_champion(
    pipeline_run: PipelineRun, champion: ModelVersion
) -> ModelVersion | None:
    """Find the version that the gate compared the present champion with; None = there was none."""
    previous = champion.tags.get("gate.champion_before", "")
    if not previous.isdigit():
        return None
    return pipeline_run.tracking.registry.fetch_version(champion.name, int(previous))


def _attach_approval_request(
    pipeline_run: PipelineRun, result: StageResult, champion: int | None
) -> StageResult:
    """Add the state of the approval request to the gate's result; request approval now if it is due."""
    if result.summary.get("decision") != AWAITING_APPROVAL:
        return result
    version = pipeline_run.tracking.registry.fetch_version(
        result.summary["registered_model"], int(result.summary["model_version"])
    )
    request = read_approval_request(version)
    # Request again if another comparison was requested since, or if the champion is back at this comparison's.
    if request is None or request.key != result.key or request.state == "superseded":
        flow_run = pipeline_run.options.flow_run
        origin = {
            "run": pipeline_run.parent.name,
            "run_id": pipeline_run.parent.run_id or "",
            "stage_run_id": result.run_id,
        }
        origin |= {"flow_run_id": flow_run.id, "prefect_api": flow_run.api}
        request = request_approval(
            pipeline_run.tracking, build_approval_request(result.summary, champion, **origin)
        )
    elif pipeline_run.resumed and not request.is_waiting:
        # the process that answered may have been killed before it recorded the answer
        record_answer(pipeline_run.tracking, request)
    pipeline_run.await_approval(request if request.is_waiting else None)
    pipeline_run.parent.set_tag("approval", request.state)
    decision = {"waiting": AWAITING_APPROVAL, "approved": "promoted"}.get(request.state, "rejected")
    answer = {"decision": decision, "approval": request.state, "note": request.summary}
    return dataclasses.replace(result, summary={**result.summary, **answer})


def _build_already_champion_result(
    pipeline_run: PipelineRun, challenger: StageResult, champion: ModelVersion
) -> StageResult:
    """Build the result for a challenger that is the champion already: there is nothing to decide."""
    request = read_approval_request(champion)
    approved = (
        f" ({request.summary})" if request is not None and request.state == "approved" else ""
    )
    note = f"version {champion.version} of {champion.name} is the champion already{approved}"
    result = StageResult(
        stage="promote",
        folder=challenger.folder,
        digest=challenger.digest,
        key=challenger.key,
        cached=True,
        seconds=0.0,
        run_id=champion.run_id or "",
        summary={
            "decision": "champion already",
            "note": note,
            "model_version": champion.version,
            "registered_model": champion.name,
        },
    )
    pipeline_run.tracker.record_cached_stage("promote", result.run_id or result.key)
    pipeline_run.parent.set_tag("gate.reason", note)
    return result


def _run_gate(
    context: StageContext,
    challenger: StageResult,
    opponent: Opponent | None,
    proof_tags: dict[str, str],
    suites: StageResult | None = None,
) -> dict[str, Any]:
    settings: PromotionSettings = context.settings
    pipeline_run = context.pipeline_run
    registered = pipeline_run.registered_model
    version = pipeline_run.models.ensure_version(challenger, pipeline_run.parent)
    new = ComparedModel(f"version {version}", Path(context.inputs["evaluation"]), challenger.stage)
    if opponent is not None and opponent.draw:
        new = ComparedModel(new.label, opponent.evaluation.path, CHALLENGER_NAME)
    evaluation = new.evaluation
    champion: ComparedModel | None = None
    champion_evaluation: Evaluation | None = None
    champion_version: int | None = None
    attempt: GateAttempt | None = None
    if opponent is not None:
        champion_version = opponent.version
        label = f"champion {champion_version}"
        champion = ComparedModel(label, opponent.evaluation.path, "champion")
        champion_evaluation = champion.evaluation
        attempt = _claim_gate_attempt(context, opponent, version, evaluation, champion_evaluation)
    promoted, reason, numbers = decide_promotion(
        evaluation,
        champion_evaluation,
        settings,
        champion_version,
        context.pipeline.seed,
        attempt.number or 1 if attempt else 1,
    )
    check = _check_suites(context, challenger.stage, suites, opponent, numbers)
    numbers |= check.numbers
    promoted = promoted and check.passed
    reason += f"; {check.text}" if check.text else ""
    start = _pair_with_start_model(context, new.label, challenger.stage)
    if start is not None:
        row = _read_evaluated_row(context, challenger.stage)
        numbers |= {key: value for key, value in row.items() if key.startswith(GAIN)}
        reason += f"; {text} over {START_MODEL}" if (text := format_gain(row)) else ""
    manual = promoted and settings.approve == "manual"
    decision = AWAITING_APPROVAL if manual else "promoted" if promoted else "rejected"
    if attempt is not None:
        attempt = dataclasses.replace(
            attempt, level=numbers.get("alpha"), p_value=numbers.get("p_value"), decision=decision
        )
        promotion.record_attempt(pipeline_run.tracking, registered, attempt)
    tags = {
        "gate.decision": decision,
        "gate.reason": reason,
        "gate.champion_before": str(champion_version or "none"),
        **{f"gate.{key}": f"{value:.6g}" for key, value in numbers.items()},
        **build_figure_tags(evaluation),
        **proof_tags,
    }
    inject_fault("gate.decided")
    _move_alias(pipeline_run.tracking, registered, version, tags, champion_version)
    inject_fault("gate.moved")
    alias = "champion" if decision == "promoted" else "challenger"
    context.tracker.log_alias(
        alias, VersionByContent(registered, digest_folder(challenger.model)), tags
    )
    metrics = {f"promotion/{key}": value for key, value in numbers.items()}
    context.tracker.log_metrics(metrics, 0)
    context.tracker.set_tag("gate.decision", decision)
    context.tracker.set_tag("gate.reason", reason)
    summary = {
        "decision": decision,
        "reason": reason,
        "registered_model": registered,
        "model_version": version,
        "champion_before": champion_version,
        "metrics": metrics,
        "note": f"version {version} of {registered} {decision}: {reason}",
    }
    if manual:
        summary["approval_timeout_seconds"] = settings.approval_timeout_seconds
    write_json_atomic(context.folder / "decision.json", summary)
    inject_fault("gate.written")
    verdict = f"It passes the gate: {reason}." if manual else str(summary["note"])
    _write_evidence(context, new, champion, start, verdict, attempt, report=manual)
    logger.info("promotion: %s", summary["note"])
    return summary


def _require_suites(
    settings: PromotionSettings, suites: StageResult | None, name: str
) -> StageResult:
    """Return the suites that have every metric of the conditions. Raises: SettingsError if one is missing."""
    if suites is None:
        raise SettingsError(
            "stages.promote.metrics: names metrics of suites, but the run has no stage suites; add stages.suites"
        )
    refuse_unknown_metrics(settings, load_suite_metrics(suites, name))
    return suites


def _check_suites(
    context: StageContext,
    name: str,
    suites: StageResult | None,
    opponent: Opponent | None,
    numbers: Mapping[str, float],
) -> MetricCheck:
    """Check the conditions on metrics of suites, at the attempt's level among the gate's numbers."""
    settings: PromotionSettings = context.settings
    if not settings.metrics:
        return MetricCheck(True, "", {})
    champion = None
    if opponent is not None and opponent.suites is not None:
        champion = load_suite_metrics(opponent.suites, "champion")
    challenger = load_suite_metrics(_require_suites(settings, suites, name), name)
    level = numbers.get("alpha", compute_attempt_level(settings).level)
    return check_suite_metrics(challenger, champion, settings, level, context.pipeline.seed)


def _read_evaluated_row(context: StageContext, name: str) -> dict[str, Any]:
    """Read the row of a model in the pipeline's evaluation."""
    summary = json.loads((Path(context.inputs["evaluation"]) / "summary.json").read_text())
    return dict(summary["models"].get(name, {}))


def _pair_with_start_model(
    context: StageContext, label: str, name: str
) -> tuple[ComparedModel, ComparedModel] | None:
    """Return the challenger and the model that training started from, on the pipeline's episodes.

    None if the start model was not evaluated, as with a preset.
    """
    if not _read_evaluated_row(context, START_MODEL):
        return None
    folder = Path(context.inputs["evaluation"])
    return ComparedModel(label, folder, name), ComparedModel(START_MODEL, folder, START_MODEL)


def _claim_gate_attempt(
    context: StageContext,
    opponent: Opponent,
    version: int,
    challenger_evaluation: Evaluation,
    champion_evaluation: Evaluation,
) -> GateAttempt | None:
    """Claim the number of this attempt on its episodes; None if too few were played to decide anything."""
    shared = {episode.key for episode in challenger_evaluation.episodes} & {
        episode.key for episode in champion_evaluation.episodes
    }
    if explain_too_few_episodes(len(shared), context.settings):
        return None
    attempt = promotion.build_attempt(
        context.pipeline.environment.name,
        opponent.comparison,
        opponent.draw,
        version=version,
        champion=opponent.version,
        challenger_evaluation=challenger_evaluation,
        champion_evaluation=champion_evaluation,
    )
    return promotion.claim_attempt(
        context.pipeline_run.tracking, context.pipeline_run.registered_model, attempt
    )


def _move_alias(
    tracking: Tracking, name: str, version: int, tags: dict[str, str], champion_version: int | None
) -> None:
    """Tag the version with the gate's decision, and make it champion if it is promoted, else challenger.

    Raises: ChampionChanged if the champion is no longer version `before`; then no alias has moved.
    """
    tracking.tag_version(name, version, tags)
    if tags["gate.decision"] != "promoted":
        tracking.set_challenger(name, version)
    elif not tracking.replace_champion(name, version, champion_version):
        tracking.tag_version(name, version, {"gate.decision": "compared anew"})
        raise ChampionChanged(
            f"{name} has another champion than {champion_version or 'none'} since the comparison began"
        )


def _write_evidence(
    context: StageContext,
    challenger: ComparedModel,
    champion: ComparedModel | None,
    start: tuple[ComparedModel, ComparedModel] | None,
    verdict: str,
    attempt: GateAttempt | None,
    *,
    report: bool,
) -> None:
    """Write what a reviewer needs to the stage's folder, its run and the pipeline's run."""
    pipeline_run = context.pipeline_run
    opponent = champion.label if champion else "no champion"
    title = f"{pipeline_run.registered_model}: {challenger.label} against {opponent}"
    trackers = (context.tracker, pipeline_run.parent)
    text = write_review(
        context.folder / REVIEW_FILE,
        challenger,
        champion,
        pipeline_run.results,
        context.settings,
        title=title,
        verdict=verdict,
        seed=context.pipeline.seed,
        attempts=_list_shared_attempts(context, attempt),
        start=start,
    )
    context.tracker.set_description(text)
    files = [context.folder / REVIEW_FILE]
    if report:
        analysis = context.pipeline.stages.analyze or AnalysisSettings()
        report_files = write_report(
            context.folder / "review",
            challenger,
            champion,
            pipeline_run.results,
            analysis,
            title,
            seed=context.seed,
        )
        files.append(report_files[0])
    for tracker in trackers:
        for path in files:
            tracker.log_artifact(path, "review")


def _list_shared_attempts(context: StageContext, attempt: GateAttempt | None) -> list[GateAttempt]:
    """List the attempts on these episodes, this one last."""
    if attempt is None:
        return []
    pipeline_run = context.pipeline_run
    attempts = promotion.read_attempts(pipeline_run.tracking, pipeline_run.registered_model)
    return [*promotion.list_earlier_attempts(attempts, attempt), attempt]
