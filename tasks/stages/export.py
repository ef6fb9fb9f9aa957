"""Stage: proof of export. The written models are loaded by transformers alone, and have the evaluated log-probs.

A reward model has the scores that its trainer's own model had on fixed sequences.

The folder that is registered is compared with two records of log-probs: the trainer's own model's, which its stage left
before it wrote the folder, and those of the evaluation's rollout engine. `promote` takes no model without this proof.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import BackendError, ExportMismatch, SettingsError
from rl_core.settings import ExportSettings
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.manifest import digest_folder
from tasks.lifecycle.promotion import EXPORT_REFUSED_TAG, PROOF_FILE, PROVEN_TAG
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult

if TYPE_CHECKING:
    from rl_core.models.export_records import ScoreRecord


logger = logging.getLogger(__name__)


def prove_models(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    models: Mapping[str, StageResult | Path | str],
    reward_model: StageResult | None = None,
) -> StageResult:
    """Run the stage. `models`: what the evaluation played; those that this run trained are proven."""
    trained = {name: model for name, model in models.items() if isinstance(model, StageResult)}
    if not trained:
        raise SettingsError(
            f"stages.export: none of the models that were evaluated ({', '.join(models)}) was trained by this run, so "
            "there is none to prove or promote; leave models out, or the stages export and promote"
        )
    inputs: dict[str, StageResult | Path | str] = {"evaluation": evaluation}
    inputs |= {f"model.{name}": model for name, model in trained.items()}
    if reward_model is not None:
        inputs["reward_model"] = reward_model
    settings = pipeline_run.settings.stages.export or ExportSettings()

    def body(context: StageContext) -> dict[str, Any]:
        return _run_export_proof(context, trained, reward_model)

    return run_stage(pipeline_run, "export", body, settings=settings, inputs=inputs)


def _run_export_proof(
    context: StageContext,
    models: Mapping[str, StageResult],
    reward_model: StageResult | None = None,
) -> dict[str, Any]:
    from rl_core.models.export_records import (
        EVALUATED_LOGPROBS_FILE,
        TRAINED_LOGPROBS_FILE,
        TRAINED_SCORES_FILE,
        read_records,
        read_scores,
    )
    from rl_core.models.export_verification import (  # here: it loads torch, not needed if cached
        score_in_fresh_process,
        verify_export,
    )

    evaluated = read_records(Path(context.inputs["evaluation"]) / EVALUATED_LOGPROBS_FILE)
    context.tracker.progress(0, 1, f"loading {', '.join(models)} in a fresh process")
    kind, proofs = context.pipeline.model, dict[str, Any]()
    written = {name: result.path / "model" for name, result in models.items()}
    digests = {name: digest_folder(folder) for name, folder in written.items()}
    records = {
        name: read_records(result.path / TRAINED_LOGPROBS_FILE) for name, result in models.items()
    }
    for name in models:
        if rows := evaluated.get(name):
            records[name]["evaluated"] = rows
    scored = (
        []
        if reward_model is None
        else [(reward_model.model, read_scores(reward_model.path / TRAINED_SCORES_FILE))]
    )
    answers = score_in_fresh_process(
        [(written[name], records[name]) for name in models], kind, context.settings, scored
    )
    for (name, result), answer in zip(models.items(), answers[: len(models)], strict=True):
        try:
            facts = verify_export(
                name, written[name], records[name], answer, context.settings, kind.dtype
            )
        except ExportMismatch as refused:
            _tag_refusal(context, result, str(refused))
            raise
        proofs[name] = {"model_sha256": digests[name], **facts}
        _tag_proof(context, digests[name], context.pipeline_run.registered_model, facts)
        inject_fault("export.proved")
    if reward_model is not None:
        proofs[reward_model.stage] = _prove_reward_model(
            context, reward_model, scored[0][1], answers[-1]
        )
    metrics = {
        f"export/{name}/{figure}": value
        for name, facts in proofs.items()
        for figure, value in _collect_figures(facts).items()
    }
    context.tracker.log_metrics(metrics, 0)
    write_json_atomic(context.folder / PROOF_FILE, {"models": proofs})
    inject_fault("export.written")
    context.tracker.log_artifact(context.folder / PROOF_FILE)
    context.tracker.progress(1, 1)
    worst = ", ".join(f"{name} {_find_largest_difference(proofs[name]):.2g}" for name in models)
    also = (
        f"; scores of {reward_model.stage} by {_find_largest_difference(proofs[reward_model.stage]):.2g}"
        if reward_model
        else ""
    )
    return {
        "models": proofs,
        "metrics": metrics,
        "note": f"loaded by transformers in a fresh process, log-probs differ by at most (nats): {worst}{also}",
    }


def _prove_reward_model(
    context: StageContext,
    result: StageResult,
    records: Sequence[ScoreRecord],
    answer: Mapping[str, Any],
) -> dict[str, Any]:
    """Proof of a reward model; its version is tagged with the figures, or with the refusal."""
    from rl_core.models.export_verification import verify_scores

    kind, digest = context.pipeline.model, digest_folder(result.model)
    try:
        facts = verify_scores(
            result.stage, result.model, records, answer, context.settings, kind.dtype
        )
    except ExportMismatch as refused:
        _tag_reward_model(context, result, {EXPORT_REFUSED_TAG: str(refused)[:4000]})
        raise
    _tag_reward_model(context, result, _build_proof_tags(digest, facts))
    if registered := result.summary.get("registered_model"):
        _tag_proof(context, digest, registered, facts)
    inject_fault("export.proved")
    return {"model_sha256": digest, **facts}


def _tag_reward_model(context: StageContext, result: StageResult, tags: Mapping[str, str]) -> None:
    """Tag its version, where it has one and the store answers; the figures are in the proof in any case."""
    name, version = result.summary.get("registered_model"), result.summary.get("model_version")
    if name is not None and version is not None:
        with contextlib.suppress(BackendError):
            context.pipeline_run.tracking.tag_version(name, int(version), dict(tags))


_FIGURE_NAMES = (
    "trained_difference_max",
    "trained_difference_mean",
    "evaluated_difference_max",
    "evaluated_difference_mean",
)


def _collect_figures(facts: Mapping[str, Any]) -> dict[str, float]:
    """Differences of a proof by name; of a record that there is."""
    parts = {figure: figure.split("_difference_") for figure in _FIGURE_NAMES}
    return {figure: float(facts[of][kind]) for figure, (of, kind) in parts.items() if of in facts}


def _find_largest_difference(facts: Mapping[str, Any]) -> float:
    return max(
        (float(facts[of]["max"]) for of in ("trained", "evaluated") if of in facts), default=0.0
    )


def _tag_refusal(context: StageContext, result: StageResult, reason: str) -> None:
    """Have the version say that it is not what was evaluated, where the store answers."""
    pipeline_run = context.pipeline_run
    with contextlib.suppress(BackendError):
        version = pipeline_run.models.ensure_version(result, pipeline_run.parent)
        pipeline_run.tracking.tag_version(
            pipeline_run.registered_model, version, {EXPORT_REFUSED_TAG: reason[:4000]}
        )


def _tag_proof(
    context: StageContext, digest: str, registered: str, facts: Mapping[str, Any]
) -> None:
    """Tag every version with exactly this model with its proof; an earlier one, by other settings, refused it maybe."""
    tracking = context.pipeline_run.tracking
    with contextlib.suppress(BackendError):
        for version in tracking.list_versions(registered):
            if version.tags.get("model_sha256") == digest:
                lifted = {EXPORT_REFUSED_TAG: ""} if version.tags.get(EXPORT_REFUSED_TAG) else {}
                tracking.tag_version(
                    registered, version.version, {**_build_proof_tags(digest, facts), **lifted}
                )


def verify_proof(proof: StageResult, name: str, model: Path) -> dict[str, str]:
    """Tags of a version with the figures of its proof.

    Args:
        proof: result of the stage `export`. name: of the model in it. model: the folder that is to be promoted.
    Raises: ExportMismatch where the proof is not of exactly this folder.
    """
    path = proof.path / PROOF_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))["models"].get(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportMismatch(
            f"{model}: is not promoted: {path} is no proof of its export ({type(error).__name__}); run the stage "
            "`export` again"
        ) from error
    digest = digest_folder(model)
    if facts is None or facts["model_sha256"] != digest:
        of = (
            f"of the folder {facts['model_sha256'][:12]}"
            if facts is not None
            else "of no such model"
        )
        raise ExportMismatch(
            f"{model}: is not promoted: the proof of export in {path} is {of}, and this one is {digest[:12]}; it was "
            "written after it was evaluated, so evaluate and prove it anew (--fresh)"
        )
    return _build_proof_tags(digest, facts)


def _build_proof_tags(digest: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a proven version."""
    return {
        PROVEN_TAG: digest,
        **{f"export.{figure}": f"{value:.6g}" for figure, value in _collect_figures(facts).items()},
    }
