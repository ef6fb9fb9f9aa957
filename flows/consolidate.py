"""Consolidation: the live snapshot of a learning service becomes a version of the registered model.

It goes the way of every model: held-out episodes, the promotion gate against the champion, manual approval where the
pipeline asks for it. Its lineage (service, snapshot, records, digests, parent version) is in the version's tags.
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
    flow_parameters,
    read_settings,
)
from flows.post_training import execute_pipeline, open_local_session, report_message
from flows.runtime import prefect_outage
from flows.runtime.approval_wait import run_with_approval
from flows.runtime.run_summary import PipelineResult
from rl_core.errors import SettingsError
from rl_core.online.build_worker import SNAPSHOTS_FOLDER
from rl_core.online.learning_folder import read_service_facts
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_file, read_manifest
from tasks.config import PipelineSettings, PromotionSettings
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
    """The live snapshot of a service, and where it came from."""

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
    """The live snapshot of the newest service in a folder that is not registered yet; a text = why there is none."""
    services = [
        (facts["began"], path, facts)
        for path in root.glob("*")
        if (facts := read_service_facts(path))
    ]
    if not services:
        return f"{root} holds no service: `posttrain serve CONFIG --learn` begins one"
    _, path, facts = max(services, key=lambda entry: entry[0])
    snapshots = WeightSnapshots(path / SNAPSHOTS_FOLDER)
    live = snapshots.read_live_version()
    if not live:
        return f"{path}: nothing that it learned is live yet"
    folder = snapshots.build_path(live)
    manifest = read_manifest(folder)
    digest = digest_file(folder / "weights.safetensors")
    if any(
        version.tags.get("online.weights_sha256") == digest and not _is_superseded(version)
        for version in versions
    ):
        return f"snapshot {live} of {path} is registered already"
    return LiveSnapshot(path, facts, live, digest, dict(manifest.get("facts", {})))


def _is_superseded(version: ModelVersion) -> bool:
    """True = another version became champion while this one waited for approval: it is compared again."""
    request = read_approval_request(version)
    return request is not None and request.state == SUPERSEDED


def build_consolidation_settings(
    settings: PipelineSettings, snapshot: LiveSnapshot
) -> PipelineSettings:
    """The pipeline that takes the snapshot to the promotion gate."""
    lora = settings.online.model.lora if settings.online is not None else None
    own = {
        "service": str(snapshot.service),
        "snapshot": snapshot.version,
        "weights_sha256": snapshot.weights_sha256,
        "base_sha256": snapshot.facts["model_sha256"],
        "lora": dataclasses.asdict(lora) if lora is not None else None,
    }
    version = snapshot.facts.get("version")
    start = (
        f"models:/{snapshot.facts['registered']}/{version}"
        if version
        else str(snapshot.service / "model")
    )
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
            promote=settings.stages.promote or PromotionSettings(),
            own={SNAPSHOT_STAGE: CustomStageSettings(use=SNAPSHOT_STAGE_IMPORT, settings=own)},
        ),
    )


def _build_run_name() -> str:
    name, overrides = (
        extract_pipeline_name(flow_run.parameters["settings"]),
        flow_run.parameters.get("overrides"),
    )
    return " · ".join(filter(None, (f"consolidate {name}", describe_overrides(overrides))))


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
    """Take the live snapshot of the pipeline's service to the promotion gate.

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
            found = find_live_snapshot(
                home / "online", tracking.list_versions(settings.registered_model)
            )
            if isinstance(found, str):
                skipped.append(found)
                return PipelineResult(results={}, rows=[], run_url="", seconds=0.0)
            typed = build_consolidation_settings(settings, found)
            stages, problems = load_custom_stages(typed.stages, typed.model, None)
            assert not problems, problems
            typed = dataclasses.replace(typed, stages=stages)
            inject_fault("consolidate.chosen")
            return execute_pipeline(typed, tags=found.tags, lock=lock, on_drift="anew")

    pipeline = run_with_approval(settings, run_once, report_message)
    if skipped and not pipeline.results:
        logger.info("consolidation: %s", skipped[-1])
        return ConsolidationResult("skipped", skipped[-1])
    said = pipeline.results["promote"].summary if "promote" in pipeline.results else pipeline.facts
    return ConsolidationResult(str(said.get("decision", "")), str(said.get("note", "")), pipeline)


def run_consolidation(settings: PipelineSettings, *, quiet: bool = False) -> ConsolidationResult:
    """Run the flow in this process, with live progress."""
    with open_local_session(settings, quiet=quiet), flow_parameters(settings) as stored:
        run = prefect_outage.run_flow(lambda: consolidate(stored))
        result: ConsolidationResult = run  # type: ignore[assignment]
    return result
