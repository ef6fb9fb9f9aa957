"""Stage: proof of export. Plain transformers loads the written models and must reproduce the evaluated log-probs.

The registered folder is compared with two records of log-probs: those of the trainer's model, recorded by its stage
before it wrote the folder, and those of the evaluation's rollout engine. A reward model is compared with the scores of
its trainer's model on fixed sequences. `promote` accepts no model without this proof.
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

_FIGURE_NAMES = (
    "trained_difference_max",
    "trained_difference_mean",
    "evaluated_difference_max",
    "evaluated_difference_mean",
)


def prove_models(
    pipeline_run: PipelineRun,
    evaluation: StageResult,
    models: Mapping[str, StageResult | Path | str],
    reward_model: StageResult | None = None,
) -> StageResult:
    """Run the stage.

    Args:
        models: what the evaluation played; those that this run trained are proven.
    """
    trained = {name: model for name, model in models.items() if isinstance(model, StageResult)}
    if not trained:
        raise SettingsError(
            f"stages.export: this run trained none of the evaluated models ({', '.join(models)}), so there is nothing "
            "to prove or promote; remove `models`, or the stages export and promote"
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
    # Imported here: these load torch, which a cached run does not need.
    from rl_core.models.export_records import (
        EVALUATED_LOGPROBS_FILE,
        TRAINED_LOGPROBS_FILE,
        TRAINED_SCORES_FILE,
        read_records,
        read_scores,
    )
    from rl_core.models.export_verification import score_in_fresh_process, verify_export

    evaluated = read_records(Path(context.inputs["evaluation"]) / EVALUATED_LOGPROBS_FILE)
    context.tracker.progress(0, 1, f"loading {', '.join(models)} in a fresh process")
    model_settings, proofs = context.pipeline.model, dict[str, Any]()
    folders = {name: result.path / "model" for name, result in models.items()}
    digests = {name: digest_folder(folder) for name, folder in folders.items()}
    records = {
        name: read_records(result.path / TRAINED_LOGPROBS_FILE) for name, result in models.items()
    }
    for name in models:
        if rows := evaluated.get(name):
            records[name]["evaluated"] = rows
    scored = []
    if reward_model is not None:
        scores = read_scores(reward_model.path / TRAINED_SCORES_FILE)
        scored.append((reward_model.model, scores))
    answers = score_in_fresh_process(
        [(folders[name], records[name]) for name in models],
        model_settings,
        context.settings,
        scored,
    )
    for (name, result), answer in zip(models.items(), answers[: len(models)], strict=True):
        try:
            figures = verify_export(
                name, folders[name], records[name], answer, context.settings, model_settings.dtype
            )
        except ExportMismatch as mismatch:
            _tag_refusal(context, result, str(mismatch))
            raise
        proofs[name] = {"model_sha256": digests[name], **figures}
        _tag_proof(context, digests[name], context.pipeline_run.registered_model, figures)
        inject_fault("export.proved")
    if reward_model is not None:
        proofs[reward_model.stage] = _prove_reward_model(
            context, reward_model, scored[0][1], answers[-1]
        )
    metrics = {
        f"export/{name}/{figure}": value
        for name, figures in proofs.items()
        for figure, value in _collect_figures(figures).items()
    }
    context.tracker.log_metrics(metrics, 0)
    write_json_atomic(context.folder / PROOF_FILE, {"models": proofs})
    inject_fault("export.written")
    context.tracker.log_artifact(context.folder / PROOF_FILE)
    context.tracker.progress(1, 1)
    largest = {name: _find_largest_difference(figures) for name, figures in proofs.items()}
    note = ", ".join(f"{name} {largest[name]:.2g}" for name in models)
    if reward_model:
        note += f"; scores of {reward_model.stage} by {largest[reward_model.stage]:.2g}"
    return {
        "models": proofs,
        "metrics": metrics,
        "note": f"loaded by transformers in a fresh process, log-probs differ by at most (nats): {note}",
    }


def _prove_reward_model(
    context: StageContext,
    result: StageResult,
    records: Sequence[ScoreRecord],
    answer: Mapping[str, Any],
) -> dict[str, Any]:
    """Prove a reward model's export, and tag its version with the figures or with the refusal."""
    from rl_core.models.export_verification import verify_scores

    model_settings, digest = context.pipeline.model, digest_folder(result.model)
    try:
        figures = verify_scores(
            result.stage, result.model, records, answer, context.settings, model_settings.dtype
        )
    except ExportMismatch as mismatch:
        _tag_reward_model(context, result, {EXPORT_REFUSED_TAG: str(mismatch)[:4000]})
        raise
    _tag_reward_model(context, result, _build_proof_tags(digest, figures))
    if registered := result.summary.get("registered_model"):
        _tag_proof(context, digest, registered, figures)
    inject_fault("export.proved")
    return {"model_sha256": digest, **figures}


def _tag_reward_model(context: StageContext, result: StageResult, tags: Mapping[str, str]) -> None:
    """Tag the reward model's version, if it has one and the store answers.

    The proof contains the figures in any case.
    """
    name, version = result.summary.get("registered_model"), result.summary.get("model_version")
    if name is not None and version is not None:
        with contextlib.suppress(BackendError):
            context.pipeline_run.tracking.tag_version(name, int(version), dict(tags))


def _collect_figures(proof: Mapping[str, Any]) -> dict[str, float]:
    """Collect the differences of a proof by name, from the records that exist."""
    parts = {figure: figure.split("_difference_") for figure in _FIGURE_NAMES}
    return {
        figure: float(proof[record][kind])
        for figure, (record, kind) in parts.items()
        if record in proof
    }


def _find_largest_difference(proof: Mapping[str, Any]) -> float:
    return max(
        (float(proof[record]["max"]) for record in ("trained", "evaluated") if record in proof),
        default=0.0,
    )


def _tag_refusal(context: StageContext, result: StageResult, reason: str) -> None:
    """Tag the version as different from what was evaluated, if the store answers."""
    pipeline_run = context.pipeline_run
    with contextlib.suppress(BackendError):
        version = pipeline_run.models.ensure_version(result, pipeline_run.parent)
        pipeline_run.tracking.tag_version(
            pipeline_run.registered_model, version, {EXPORT_REFUSED_TAG: reason[:4000]}
        )


def _tag_proof(
    context: StageContext, digest: str, registered: str, figures: Mapping[str, Any]
) -> None:
    """Tag every version of exactly this model with its proof, and lift an earlier refusal under other settings."""
    tracking = context.pipeline_run.tracking
    with contextlib.suppress(BackendError):
        for version in tracking.list_versions(registered):
            if version.tags.get("model_sha256") == digest:
                lifted = {EXPORT_REFUSED_TAG: ""} if version.tags.get(EXPORT_REFUSED_TAG) else {}
                tracking.tag_version(
                    registered, version.version, {**_build_proof_tags(digest, figures), **lifted}
                )


def verify_proof(proof: StageResult, name: str, model: Path) -> dict[str, str]:
    """Verify the proof of a model and return the tags with its figures for the version.

    Args:
        proof: result of the stage `export`.
        name: of the model in it.
        model: the folder to promote.
    Raises: ExportMismatch if the proof does not belong to exactly this folder.
    """
    path = proof.path / PROOF_FILE
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))["models"].get(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportMismatch(
            f"{model}: is not promoted: {path} is not a valid proof of export ({type(error).__name__}); run the stage "
            "`export` again"
        ) from error
    digest = digest_folder(model)
    if entry is None or entry["model_sha256"] != digest:
        if entry is None:
            problem = "does not cover this model"
        else:
            problem = (
                f"is of the folder {entry['model_sha256'][:12]}, and this one is {digest[:12]}"
            )
        raise ExportMismatch(
            f"{model}: is not promoted: the proof of export in {path} {problem}; it was written after it was "
            "evaluated, so evaluate and prove it again (--fresh)"
        )
    return _build_proof_tags(digest, entry)


def _build_proof_tags(digest: str, figures: Mapping[str, Any]) -> dict[str, str]:
    """Build the tags of a proven version."""
    return {
        PROVEN_TAG: digest,
        **{
            f"export.{figure}": f"{value:.6g}"
            for figure, value in _collect_figures(figures).items()
        },
    }
