"""Stage: GGUF file of the run's new model with its ollama Modelfile, proven by reading it back.

If the pipeline promotes, only a promoted model is written: what lies in this stage's folder may be served.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from rl_core.errors import BackendError
from rl_core.settings import GgufSettings
from rl_core.storage.faults import inject_fault
from rl_core.storage.manifest import digest_file, digest_folder
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_result import StageResult

_MEGABYTE = 1e6
_WRITTEN_DECISIONS = ("promoted", "champion already")


def write_gguf(
    pipeline_run: PipelineRun, challenger: StageResult, decision: StageResult | None
) -> StageResult:
    """Run the stage.

    Args:
        challenger: the policy that was trained last.
        decision: result of the stage `promote`; None without one.
    Returns: for a model that is not promoted, a result that says so, in the model's folder.
    """
    settings = pipeline_run.settings.stages.gguf or GgufSettings()
    verdict = "promoted" if decision is None else str(decision.summary.get("decision"))
    if verdict not in _WRITTEN_DECISIONS:
        note = f"not written: the new model is {verdict}"
        if verdict == "awaiting approval":
            note += "; run the same command again once it is approved"
        return dataclasses.replace(
            challenger, stage="gguf", cached=True, seconds=0.0, summary={"note": note}
        )
    return run_stage(
        pipeline_run, "gguf", _write_gguf_folder, settings=settings, inputs={"model": challenger}
    )


def _write_gguf_folder(context: StageContext) -> dict[str, Any]:
    # Imported here: loads torch, which a cached run does not need.
    from rl_core.models.gguf_export import export_gguf_folder

    kind, source = context.settings.type, Path(context.inputs["model"]) / "model"
    context.tracker.progress(0, 1, "writing the file, then reading it back")
    proof = export_gguf_folder(source, context.folder, context.pipeline.name, kind)
    inject_fault("gguf.written")
    tags = {
        "gguf.file": proof.file,
        "gguf.type": kind,
        "gguf.sha256": digest_file(context.folder / proof.file),
        "gguf.kl": f"{proof.kl:.6g}",
    }
    _tag_versions(context, digest_folder(source), tags)
    for name, value in tags.items():
        context.tracker.set_tag(name, value)
    metrics = {
        "gguf/kl": proof.kl,
        "gguf/difference_max": proof.largest_difference,
        "gguf/megabytes": proof.bytes / _MEGABYTE,
    }
    context.tracker.log_metrics(metrics, 0)
    context.tracker.log_artifact(context.folder / "Modelfile")
    if proof.bytes <= context.pipeline.tracking.records_megabytes * _MEGABYTE:
        context.tracker.log_artifact(context.folder / proof.file)
    context.tracker.progress(1, 1)
    return {**tags, "metrics": metrics, "note": f"{proof.file}: {proof.describe()}"}


def _tag_versions(context: StageContext, digest: str, tags: dict[str, str]) -> None:
    """Tag every version of exactly this model, if the store answers."""
    pipeline_run = context.pipeline_run
    with contextlib.suppress(BackendError):
        for version in pipeline_run.tracking.list_versions(pipeline_run.registered_model):
            if version.tags.get("model_sha256") == digest:
                pipeline_run.tracking.tag_version(
                    pipeline_run.registered_model, version.version, tags
                )
