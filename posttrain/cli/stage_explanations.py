"""`posttrain why`: why a stage was run or taken from an earlier run, and what would make it run now."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from tasks import stage_registry
from tasks.config import PipelineSettings
from tasks.pipeline.changed_conditions import (
    find_current_differences,
    list_unfinished_stages,
    read_newest_fingerprint,
)
from tasks.pipeline.stage_fingerprint import StageDecision, read_decisions
from tasks.pipeline.stage_result import STAGE_LOG

_MAX_DECISIONS = 5  # newest decisions


@dataclasses.dataclass(frozen=True)
class StageStatus:
    """Comparison of a stage's newest result with the settings and code of now."""

    stage: str
    has_result: bool
    changes: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()  # of unfinished stages, the newest first

    def format_lines(self) -> list[str]:
        """The same for people."""
        state = "changed" if self.changes else "settings and code as before"
        return [
            f"{self.stage}: {state if self.has_result else 'has no result yet'}",
            *(f"  {change}" for change in self.changes),
            *(f"  not finished: a checkpoint ({begun})" for begun in self.checkpoints),
        ]


@dataclasses.dataclass(frozen=True)
class StageExplanation:
    """Decisions about a stage, the newest first, and what a run would find now, of it and of each stage before it."""

    stage: str
    folder: str  # of the pipeline
    decisions: tuple[StageDecision, ...]
    now: tuple[StageStatus, ...]
    log: str = ""  # of the newest run of the stage; "" = there is none

    def to_record(self) -> dict[str, Any]:
        """The same for programs."""
        return dataclasses.asdict(self)

    def format_text(self) -> str:
        """The same for people."""
        lines = []
        for decision in self.decisions:
            lines.append(f"{decision.time}  {decision.key}  {decision}")
            lines += [f"    {change}" for change in decision.changes]
        if not lines:
            lines.append(f"{self.stage} was never run in {self.folder}")
        lines += ["", "now:", *(f"  {line}" for one in self.now for line in one.format_lines())]
        lines.append("  content of inputs is compared when the stage runs")
        return "\n".join([*lines, *([f"  log of the newest run: {self.log}"] if self.log else [])])


@dataclasses.dataclass(frozen=True)
class PipelineExplanation:
    """The newest decision about each stage, in the order in which they run, and what a run would find now."""

    stages: tuple[StageExplanation, ...]

    def to_record(self) -> list[dict[str, Any]]:
        """The same for programs."""
        return [one.to_record() for one in self.stages]

    def format_text(self) -> str:
        """The same for people."""
        lines = []
        for one in self.stages:
            if not one.decisions:
                lines.append(f"{one.stage}: was never run in {one.folder}")
            for decision in one.decisions:
                lines.append(f"{one.stage}: {decision.time}  {decision.key}  {decision}")
                lines += [f"    {change}" for change in decision.changes]
        lines += [
            "",
            "now:",
            *(f"  {line}" for one in self.stages for now in one.now for line in now.format_lines()),
        ]
        return "\n".join([*lines, "  content of inputs is compared when a stage runs"])


def explain_pipeline(settings: PipelineSettings) -> PipelineExplanation:
    """The newest decision about every stage that the settings have."""
    found = [
        explain_stage(settings, stage)
        for stage in stage_registry.list_stage_names()
        if stage in settings.stages.active
    ]
    return PipelineExplanation(
        tuple(
            dataclasses.replace(one, decisions=one.decisions[:1], now=one.now[-1:]) for one in found
        )
    )


def explain_stage(settings: PipelineSettings, stage: str) -> StageExplanation:
    """Decisions about a stage, and how the settings and code of now differ from its newest result.

    Raises: SettingsError for a stage that the settings do not have.
    """
    if stage not in settings.stages.active:
        raise SettingsError(
            f"{settings.name}: {stage_registry.describe_unknown_stage(stage, settings.stages.active)}"
        )
    stages_folder = Path(settings.output).resolve() / settings.name / "stages"
    folder = stages_folder / stage
    order = stage_registry.list_stage_names()
    now = tuple(
        _compare_with_newest(settings, name, stages_folder / name)
        for name in order[: order.index(stage) + 1]
        if getattr(settings.stages, name) is not None
    )
    newest = tuple(reversed(read_decisions(folder)[-_MAX_DECISIONS:]))
    return StageExplanation(stage, str(stages_folder.parent), newest, now, _find_newest_log(folder))


def _find_newest_log(folder: Path) -> str:
    """The stage's log that was written last, of a finished run or of one that goes on or failed; "" = there is none."""
    logs = sorted(
        folder.glob(f"*/{STAGE_LOG}"),
        key=lambda path: (path.stat().st_mtime, ".tracking" not in str(path)),
    )
    return str(logs[-1]) if logs else ""


def _compare_with_newest(settings: PipelineSettings, stage: str, folder: Path) -> StageStatus:
    """Differences that a run would find."""
    if read_newest_fingerprint(folder) is None:
        return StageStatus(stage, has_result=False)
    begun = tuple(str(one) for one in list_unfinished_stages(folder))
    return StageStatus(stage, True, tuple(find_current_differences(folder, settings)), begun)
