"""Stage: the promotion gate. Champion and challenger play the same episodes; the alias moves only on evidence.

With `approve: manual`, a model that passes the gate waits for manual approval (tasks/lifecycle/approval.py);
the pipeline run then ends as waiting.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from rl_core.errors import PosttrainError
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
from tasks.pipeline.stage_result import REVIEW_FILE, StageResult
from tasks.stages.evaluate import evaluate_models, read_evaluation
from tasks.stages.export import verify_proof
from tasks.stages.promotion_gate import (
    choose_episode_draw,
    decide_promotion,
    explain_too_few_episodes,
)
from tasks.stages.promotion_review import ComparedModel, write_report, write_review
from tasks.tracking import ModelVersion, Tracking, VersionByContent

logger = logging.getLogger(__name__)

AWAITING_APPROVAL = "awaiting approval"
CHALLENGER_NAME = "challenger"  # its name in an evaluation beside the champion, on fresh episodes
MAX_COMPARISONS = (
    5  # that a challenger is compared with, one after the other, while they change under its hands
)


@dataclasses.dataclass(frozen=True)
class Opponent:
    """The champion that a challenger is compared with."""

    champion: ModelVersion
    evaluation: StageResult  # with the challenger's episodes too, unless draw is 0
    comparison: str  # of these two models
    draw: int  # of the held-out episodes

    @property
    def version(self) -> int:
        """Its version."""
        return self.champion.version


class ChampionChanged(PosttrainError):
    """Another version became champion while the challenger was compared with the one before."""


def promote_challenger(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    challenger: StageResult,
    data: StageResult | None,
    proof: StageResult,
) -> StageResult:
    """Run the stage. `evaluation` holds the challenger's episodes under the name of its stage, `proof` its export's.

    A champion that came while the comparison was made is compared with in turn: none is replaced unseen.
    Raises: ChampionChanged where that happens again and again; ExportMismatch for a model without a proof of export.
    """
    for _ in range(MAX_COMPARISONS - 1):
        try:
            return _run_promotion(pipeline_run, evaluation, challenger, data, proof)
        except ChampionChanged as changed:
            logger.warning("promotion: %s; comparing with it", changed)
    return _run_promotion(pipeline_run, evaluation, challenger, data, proof)


def _run_promotion(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    challenger: StageResult,
    data: StageResult | None,
    proof: StageResult,
) -> StageResult:
    proven = verify_proof(proof, challenger.stage, challenger.model)
    settings = pipeline_run.settings.stages.promote or PromotionSettings()
    registered = pipeline_run.registered_model
    expire_requests(pipeline_run.tracking, registered)
    champion = pipeline_run.tracking.find_champion(registered)
    inputs: dict[str, Any] = {"evaluation": evaluation, "challenger": challenger, "proof": proof}
    opponent: Opponent | None = None
    ours = None  # the champion, where it is the challenger itself
    if champion is not None and champion.tags.get("model_sha256") == digest_folder(
        challenger.model
    ):
        if not _is_promoted_by_gate(pipeline_run, champion):
            return _build_already_champion_result(pipeline_run, challenger, champion)
        ours, champion = champion, _find_previous_champion(pipeline_run, champion)
    if champion is not None:
        digest = champion.tags.get("model_sha256", "")
        folder = pipeline_run.tracking.download_version(
            registered, champion.version, pipeline_run.home / "champions"
        )
        comparison = promotion.compute_comparison_id(
            digest_folder(challenger.model), digest or digest_folder(folder)
        )
        draw = choose_episode_draw(
            pipeline_run,
            settings,
            comparison,
            read_evaluation(evaluation.path, challenger.stage),
            data,
        )
        models: dict[str, Any] = (
            {"champion": folder}
            if not draw.number
            else {"champion": folder, CHALLENGER_NAME: challenger}
        )
        champion_evaluation = evaluate_models(
            pipeline_run,
            models,
            data,
            label=f"evaluate champion{draw.label}",
            settings=draw.settings,
        )
        inputs["champion"] = champion_evaluation
        opponent = Opponent(champion, champion_evaluation, comparison, draw.number)
    if ours is not None and not has_begun(
        pipeline_run, "promote", settings=settings, inputs=inputs
    ):
        return _build_already_champion_result(pipeline_run, challenger, ours)

    def body(context: StageContext) -> dict[str, Any]:
        return _run_gate(context, challenger, opponent, proven)

    result = run_stage(pipeline_run, "promote", body, settings=settings, inputs=inputs)
    return _attach_approval_request(pipeline_run, result, champion.version if champion else None)


def _is_promoted_by_gate(pipeline_run: PipelineRun, champion: ModelVersion) -> bool:
    """True = the gate made it champion, maybe of this very run, which was killed before it could write that down."""
    return (
        pipeline_run.resumed
        and champion.tags.get("gate.decision") == "promoted"
        and read_approval_request(champion) is None
    )


def _find_previous_champion(
    pipeline_run: PipelineRun, champion: ModelVersion
) -> ModelVersion | None:
    """The version that the gate compared the present champion with; None = there was none."""
    before = champion.tags.get("gate.champion_before", "")
    return (
        pipeline_run.tracking.registry.fetch_version(champion.name, int(before))
        if before.isdigit()
        else None
    )


def _attach_approval_request(
    pipeline_run: PipelineRun, result: StageResult, champion: int | None
) -> StageResult:
    """The gate's result with the state of its approval request, which is made now if it is due."""
    if result.summary.get("decision") != AWAITING_APPROVAL:
        return result
    version = pipeline_run.tracking.registry.fetch_version(
        result.summary["registered_model"], int(result.summary["model_version"])
    )
    request = read_approval_request(version)
    # Another comparison was asked about since, or the champion came back to the one of this comparison: ask again.
    if request is None or request.key != result.key or request.state == "superseded":
        flow_run = pipeline_run.options.flow_run
        place = {
            "run": pipeline_run.parent.name,
            "run_id": pipeline_run.parent.run_id or "",
            "stage_run_id": result.run_id,
        }
        place |= {"flow_run_id": flow_run.id, "prefect_api": flow_run.api}
        request = request_approval(
            pipeline_run.tracking, build_approval_request(result.summary, champion, **place)
        )
    elif pipeline_run.resumed and not request.is_waiting:
        record_answer(
            pipeline_run.tracking, request
        )  # whoever answered may have been killed before
    pipeline_run.await_approval(request if request.is_waiting else None)
    pipeline_run.parent.set_tag("approval", request.state)
    decision = {"waiting": AWAITING_APPROVAL, "approved": "promoted"}.get(request.state, "rejected")
    told = {"decision": decision, "approval": request.state, "note": request.summary}
    return dataclasses.replace(result, summary={**result.summary, **told})


def _build_already_champion_result(
    pipeline_run: PipelineRun, challenger: StageResult, champion: ModelVersion
) -> StageResult:
    """The challenger is the champion already: nothing to decide."""
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
    proven: dict[str, str],
) -> dict[str, Any]:
    settings: PromotionSettings = context.settings
    pipeline_run = context.pipeline_run
    registered = pipeline_run.registered_model
    version = pipeline_run.models.ensure_version(challenger, pipeline_run.parent)
    ours = ComparedModel(f"version {version}", Path(context.inputs["evaluation"]), challenger.stage)
    if opponent is not None and opponent.draw:
        ours = ComparedModel(ours.label, opponent.evaluation.path, CHALLENGER_NAME)
    theirs = (
        ComparedModel(f"champion {opponent.version}", opponent.evaluation.path, "champion")
        if opponent
        else None
    )
    result = ours.evaluation
    attempt = (
        _claim_gate_attempt(context, opponent, version, result, theirs.evaluation)
        if opponent and theirs
        else None
    )
    promoted, reason, numbers = decide_promotion(
        result,
        theirs.evaluation if theirs else None,
        settings,
        opponent.version if opponent else None,
        context.pipeline.seed,
        attempt.number or 1 if attempt else 1,
    )
    manual = promoted and settings.approve == "manual"
    decision = AWAITING_APPROVAL if manual else "promoted" if promoted else "rejected"
    before = opponent.version if opponent else None
    if attempt is not None:
        attempt = dataclasses.replace(
            attempt, level=numbers["alpha"], p_value=numbers["p_value"], decision=decision
        )
        promotion.record_attempt(pipeline_run.tracking, registered, attempt)
    tags = {
        "gate.decision": decision,
        "gate.reason": reason,
        "gate.champion_before": str(before or "none"),
        **{f"gate.{key}": f"{value:.6g}" for key, value in numbers.items()},
        **build_figure_tags(result),
        **proven,
    }
    inject_fault("gate.decided")
    _move_alias(pipeline_run.tracking, registered, version, tags, before)
    inject_fault("gate.moved")
    alias = "champion" if decision == "promoted" else "challenger"
    context.tracker.log_alias(
        alias, VersionByContent(registered, digest_folder(challenger.model)), tags
    )
    context.tracker.log_metrics({f"promotion/{key}": value for key, value in numbers.items()}, 0)
    context.tracker.set_tag("gate.decision", decision)
    context.tracker.set_tag("gate.reason", reason)
    summary = {
        "decision": decision,
        "reason": reason,
        "registered_model": registered,
        "model_version": version,
        "champion_before": before,
        "metrics": {f"promotion/{key}": value for key, value in numbers.items()},
        "note": f"version {version} of {registered} {decision}: {reason}",
    }
    if manual:
        summary["approval_timeout_seconds"] = settings.approval_timeout_seconds
    write_json_atomic(context.folder / "decision.json", summary)
    inject_fault("gate.written")
    verdict = f"It passes the gate: {reason}." if manual else str(summary["note"])
    _write_evidence(context, ours, theirs, verdict, attempt, report=manual)
    logger.info("promotion: %s", summary["note"])
    return summary


def _claim_gate_attempt(
    context: StageContext, opponent: Opponent, version: int, ours: Evaluation, theirs: Evaluation
) -> GateAttempt | None:
    """The number of this attempt on its episodes; None where too few were played to decide anything."""
    shared = {episode.key for episode in ours.episodes} & {
        episode.key for episode in theirs.episodes
    }
    if explain_too_few_episodes(len(shared), context.settings):
        return None
    attempt = promotion.build_attempt(
        context.pipeline.environment.name,
        opponent.comparison,
        opponent.draw,
        version=version,
        champion=opponent.version,
        challenger_evaluation=ours,
        champion_evaluation=theirs,
    )
    return promotion.claim_attempt(
        context.pipeline_run.tracking, context.pipeline_run.registered_model, attempt
    )


def _move_alias(
    tracking: Tracking, name: str, version: int, tags: dict[str, str], before: int | None
) -> None:
    """Tag the version with the gate's decision, and make it champion if it is promoted, else challenger.

    Raises: ChampionChanged if the champion is no longer version `before`; nothing has moved then.
    """
    tracking.tag_version(name, version, tags)
    if tags["gate.decision"] != "promoted":
        tracking.set_challenger(name, version)
    elif not tracking.replace_champion(name, version, before):
        tracking.tag_version(name, version, {"gate.decision": "compared anew"})
        raise ChampionChanged(
            f"{name} has another champion than {before or 'none'} since the comparison began"
        )


def _write_evidence(
    context: StageContext,
    ours: ComparedModel,
    theirs: ComparedModel | None,
    verdict: str,
    attempt: GateAttempt | None,
    *,
    report: bool,
) -> None:
    """Leave what a reviewer needs in the stage's folder, in its run and in the pipeline's."""
    pipeline_run = context.pipeline_run
    title = f"{pipeline_run.registered_model}: {ours.label} against {theirs.label if theirs else 'no champion'}"
    trackers = (context.tracker, pipeline_run.parent)
    text = write_review(
        context.folder / REVIEW_FILE,
        ours,
        theirs,
        pipeline_run.results,
        context.settings,
        title=title,
        verdict=verdict,
        seed=context.pipeline.seed,
        attempts=_list_shared_attempts(context, attempt),
    )
    context.tracker.set_description(text)
    files = [context.folder / REVIEW_FILE]
    if report:
        analysis = context.pipeline.stages.analyze or AnalysisSettings()
        found = write_report(
            context.folder / "review",
            ours,
            theirs,
            pipeline_run.results,
            analysis,
            title,
            seed=context.seed,
        )
        files.append(found[0])
    for tracker in trackers:
        for path in files:
            tracker.log_artifact(path, "review")


def _list_shared_attempts(context: StageContext, attempt: GateAttempt | None) -> list[GateAttempt]:
    """The attempts on these episodes, this one last."""
    if attempt is None:
        return []
    pipeline_run = context.pipeline_run
    found = promotion.read_attempts(pipeline_run.tracking, pipeline_run.registered_model)
    return [*promotion.list_earlier_attempts(found, attempt), attempt]
