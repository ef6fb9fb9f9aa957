"""Consolidation: the live snapshot of a learning service becomes a version of the registered model.

Like every model it is evaluated on held-out episodes, compared with the champion by the promotion gate, and approved
manually if the pipeline requires it. The version's tags hold its lineage: service, snapshot, records, digests, parent.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows.parameters import (
    PipelineForm,
    describe_overrides,
    extract_pipeline_name,
    read_settings,
)
from flows.post_training import execute_pipeline, report_message, run_local_flow
from flows.runtime import prefect_outage
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.prefect_home import exempt_loopback_in_calls
from flows.runtime.run_request import RunRequest
from flows.runtime.run_summary import PipelineResult
from rl_core.errors import SettingsError
from rl_core.online.learning_folder import read_service_facts
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_file, read_manifest
from tasks.config import PipelineSettings, PromotionSettings, check_changed_settings
from tasks.config.settings import CustomStageSettings, StagesSettings
from tasks.config.user_code import load_custom_stages
from tasks.lifecycle.approval import SUPERSEDED, read_approval_request
from tasks.tracking import ModelVersion, Tracking

logger = logging.getLogger(__name__)

SNAPSHOT_STAGE = "online_snapshot"
SNAPSHOT_STAGE_IMPORT = "tasks.stages.online_snapshot:STAGE"


@dataclass(frozen=True)
class ConsolidationResult:
    """Result of a consolidation."""

    status: str  # skipped, or the gate's decision
    message: str
    pipeline: PipelineResult | None = None  # None = skipped


@dataclass(frozen=True)
class LiveSnapshot:
    """Live snapshot of a service, with its origin."""

    service: Path
    facts: dict[str, Any]  # of the service
    version: int
    weights_sha256: str
    lineage: dict[str, Any]  # facts of the snapshot: updates, records

    @property
    def tags(self) -> dict[str, str]:
        """Lineage as tags of a registered version."""
        facts = self.lineage
        return {
            "online.service": str(self.service),
            "online.snapshot": str(self.version),
            "online.base_sha256": str(self.facts["model_sha256"]),
            "online.weights_sha256": self.weights_sha256,
            "online.records": f"{facts.get('first_record', 0)}-{facts.get('last_record', 0)}",
            "online.last_record_sha256": str(facts.get("last_digest", "")),
            "online.updates": str(facts.get("updates", self.version)),
            "online.parent_version": str(self.facts.get("version", "")),
        }


def find_live_snapshot(root: Path, versions: list[ModelVersion]) -> LiveSnapshot | str:
    """Return the unregistered live snapshot of a folder's newest service, or the reason why there is none."""
    # Imported here because both import torch, which the registration of the flow does not need.
    from rl_core.online.build_worker import SNAPSHOTS_FOLDER
    from rl_core.online.weight_snapshots import WeightSnapshots

    services = []
    for path in root.glob("*"):
        facts = read_service_facts(path)
        if facts:
            services.append((facts["began"], path, facts))
    if not services:
        return f"{root} holds no service: `posttrain serve CONFIG --learn` starts one"
    _, path, facts = max(services, key=lambda service: service[0])
    snapshots = WeightSnapshots(path / SNAPSHOTS_FOLDER)
    live = snapshots.read_live_version()
    if not live:
        return f"{path}: no snapshot is live yet"
    folder = snapshots.build_path(live)
    manifest = read_manifest(folder)
    digest = digest_file(folder / "weights.safetensors")
    for version in versions:
        is_same = version.tags.get("online.weights_sha256") == digest
        if is_same and not _is_superseded(version):
            return f"snapshot {live} of {path} is registered already"
    return LiveSnapshot(path, facts, live, digest, dict(manifest.get("facts", {})))


def _is_superseded(version: ModelVersion) -> bool:
    """Return whether another version became champion while this one awaited approval; it is then compared again."""
    request = read_approval_request(version)
    return request is not None and request.state == SUPERSEDED


def build_consolidation_settings(
    settings: PipelineSettings, snapshot: LiveSnapshot
) -> PipelineSettings:
    """Build the pipeline that submits the snapshot to the promotion gate."""
    lora = settings.online.model.lora if settings.online is not None else None
    stage_settings = {
        "service": str(snapshot.service),
        "snapshot": snapshot.version,
        "weights_sha256": snapshot.weights_sha256,
        "base_sha256": snapshot.facts["model_sha256"],
        "lora": dataclasses.asdict(lora) if lora is not None else None,
    }
    version = snapshot.facts.get("version")
    start = str(snapshot.service / "model")
    if version:
        start = f"models:/{snapshot.facts['registered']}/{version}"
    if settings.stages.evaluate is None:
        raise SettingsError(
            "stages.evaluate: the promotion gate compares held-out episodes; add it (`evaluate: {}`)"
        )
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=start, lora=None),
        stages=StagesSettings(
            prepare_data=settings.stages.prepare_data,
            evaluate=settings.stages.evaluate,
            suites=settings.stages.suites,
            promote=settings.stages.promote or PromotionSettings(),
            custom={
                SNAPSHOT_STAGE: CustomStageSettings(
                    use=SNAPSHOT_STAGE_IMPORT, settings=stage_settings
                )
            },
        ),
    )


def _build_run_name() -> str:
    name = extract_pipeline_name(flow_run.parameters["settings"])
    overrides = describe_overrides(flow_run.parameters.get("overrides"))
    return " · ".join(filter(None, (f"consolidate {name}", overrides)))


@exempt_loopback_in_calls
@flow(
    name="consolidate",
    flow_run_name=_build_run_name,
    description=(__doc__ or "").strip(),
    validate_parameters=False,
    persist_result=False,
)
def consolidate(
    settings: PipelineForm | str, overrides: list[str] | None = None
) -> State[ConsolidationResult]:
    """Submit the live snapshot of the pipeline's service to the promotion gate.

    Args:
        settings: contents of a config file, or its path (relative to the flow's working directory).
        overrides: key.path=value each, as in `--set`; applied to `settings`.
    """
    typed = read_settings(settings, overrides, check_servers=False)
    with prefect_outage.capture_outcome() as outcome:
        outcome.result = result = _consolidate_snapshot(typed)
    return Completed(message=result.message, data=result)


def _consolidate_snapshot(settings: PipelineSettings) -> ConsolidationResult:
    output = Path(settings.output).resolve()
    home = output / settings.name
    tracking = Tracking(settings.tracking.uri, output, settings.experiment)
    skipped: list[str] = []

    def run_once() -> PipelineResult:
        with FolderLock(home / ".lock", wait_s=settings.run.wait_seconds) as lock:
            versions = tracking.list_versions(settings.registered_model)
            snapshot = find_live_snapshot(home / "online", versions)
            if isinstance(snapshot, str):
                skipped.append(snapshot)
                return PipelineResult(results={}, rows=[], run_url="", seconds=0.0)
            typed = build_consolidation_settings(settings, snapshot)
            stages, problems = load_custom_stages(typed.stages, typed.model, None)
            assert not problems, problems
            typed = dataclasses.replace(typed, stages=stages)
            inject_fault("consolidate.chosen")
            return execute_pipeline(typed, tags=snapshot.tags, lock=lock, on_drift="anew")

    pipeline = run_with_approval(settings, run_once, report_message)
    if skipped and not pipeline.results:
        logger.info("consolidation: %s", skipped[-1])
        return ConsolidationResult("skipped", skipped[-1])
    verdict = pipeline.facts
    if "promote" in pipeline.results:
        verdict = pipeline.results["promote"].summary
    return ConsolidationResult(
        str(verdict.get("decision", "")), str(verdict.get("note", "")), pipeline
    )


def run_consolidation(settings: PipelineSettings, *, quiet: bool = False) -> ConsolidationResult:
    """Run the flow in this process, with live progress."""
    settings = check_changed_settings(settings, check_servers=False)
    result: Any = run_local_flow(consolidate, RunRequest(settings=settings), quiet=quiet)
    assert isinstance(result, ConsolidationResult)
    return result
