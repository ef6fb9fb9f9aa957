"""Explanation of `posttrain run --dry-run`: why stages ran or were cached, and what would make them run now."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup
from rl_core.errors import SettingsError
from tasks import stage_registry

if TYPE_CHECKING:
    from tasks.config import PipelineSettings
    from tasks.pipeline.stage_fingerprint import StageDecision
    from tasks.pipeline.stage_key import StageKeys


_MAX_DECISIONS = 5


def print_dry_run(arguments: argparse.Namespace) -> None:
    """Print why the stages of a configuration, or the one of `--only`, ran or were cached, and what a run would do."""
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    if settings.stages.custom:
        # The code of custom stages declares their settings and their position.
        settings = run_setup.load_pipeline_settings(arguments)
    from flows.runtime.progress import wrap_to_terminal
    from posttrain.cli.tables import print_json

    explanation = (
        explain_stage(settings, arguments.only) if arguments.only else explain_pipeline(settings)
    )
    if arguments.json:
        print_json(explanation.to_record())
    else:
        print(wrap_to_terminal(explanation.format_text()))


@dataclasses.dataclass(frozen=True)
class StageStatus:
    """Comparison of a stage's newest result with the current settings and code."""

    stage: str
    has_result: bool
    changes: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()  # of unfinished stages, the newest first

    @property
    def is_untouched(self) -> bool:
        """True if there is neither a result nor a checkpoint."""
        return not (self.has_result or self.changes or self.checkpoints)

    def format_lines(self) -> list[str]:
        """Format the status for the terminal."""
        state = "changed" if self.changes else "settings and code unchanged"
        return [
            f"{self.stage}: {state if self.has_result else 'has no result yet'}",
            *(f"  {change}" for change in self.changes),
            *(f"  not finished: a checkpoint ({checkpoint})" for checkpoint in self.checkpoints),
        ]


@dataclasses.dataclass(frozen=True)
class StageExplanation:
    """Decisions about a stage, the newest first, and what a run would find now in it and in each earlier stage."""

    stage: str
    folder: str  # of the pipeline
    decisions: tuple[StageDecision, ...]
    now: tuple[StageStatus, ...]
    log: str = ""  # of the newest run of the stage; "" = there is none

    def to_record(self) -> dict[str, Any]:
        """Return the explanation as a record."""
        return dataclasses.asdict(self)

    def format_text(self) -> str:
        """Format the explanation for the terminal."""
        lines = []
        for decision in self.decisions:
            lines.append(f"{decision.time}  {decision.key}  {decision}")
            lines += [f"    {change}" for change in decision.changes]
        if not lines:
            lines.append(f"{self.stage} was never run in {self.folder}")
        lines += [
            "",
            "now:",
            *(f"  {line}" for status in self.now for line in status.format_lines()),
        ]
        lines.append("  content of inputs is compared when the stage runs")
        if self.log:
            lines.append(f"  log of the newest run: {self.log}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class PipelineExplanation:
    """Newest decision about each stage in run order, and what a run would find now."""

    stages: tuple[StageExplanation, ...]

    def to_record(self) -> list[dict[str, Any]]:
        """Return the explanations as records."""
        return [stage.to_record() for stage in self.stages]

    def format_text(self) -> str:
        """Format the explanation for the terminal."""
        lines = []
        never_run = [stage for stage in self.stages if not stage.decisions]
        for explanation in self.stages:
            for decision in explanation.decisions:
                lines.append(f"{explanation.stage}: {decision.time}  {decision.key}  {decision}")
                lines += [f"    {change}" for change in decision.changes]
        if never_run:
            names = ", ".join(stage.stage for stage in never_run)
            lines.append(f"never run in {never_run[0].folder}: {names}")
        lines += ["", "now:"]
        statuses = [status for explanation in self.stages for status in explanation.now]
        for status in statuses:
            if not status.is_untouched:
                lines += [f"  {line}" for line in status.format_lines()]
        if untouched := [status.stage for status in statuses if status.is_untouched]:
            lines.append(f"  no result yet: {', '.join(untouched)}")
        lines.append("  content of inputs is compared when a stage runs")
        return "\n".join(lines)


def explain_pipeline(settings: PipelineSettings) -> PipelineExplanation:
    """Explain every active stage by its newest decision."""
    from tasks.pipeline.stage_key import StageKeys

    explanations = []
    keys = StageKeys(settings)
    for stage in stage_registry.list_stage_names():
        if stage in settings.stages.active:
            full = explain_stage(settings, stage, keys)
            explanations.append(
                dataclasses.replace(full, decisions=full.decisions[:1], now=full.now[-1:])
            )
    return PipelineExplanation(tuple(explanations))


def explain_stage(
    settings: PipelineSettings, stage: str, keys: StageKeys | None = None
) -> StageExplanation:
    """Explain the decisions about a stage, and how the current settings and code differ from its newest result.

    Args:
        keys: of the stages, as far as they are collected.
    Raises: SettingsError for a stage that the settings do not have.
    """
    from tasks.pipeline.stage_fingerprint import read_decisions
    from tasks.pipeline.stage_key import StageKeys

    if stage not in settings.stages.active:
        raise SettingsError(
            f"{settings.name}: {stage_registry.describe_unknown_stage(stage, settings.stages.active)}"
        )
    stages_folder = Path(settings.output).resolve() / settings.name / "stages"
    folder = stages_folder / stage
    order = stage_registry.list_stage_names()
    keys = keys or StageKeys(settings)
    now = tuple(
        _compare_with_newest(keys, name, stages_folder / name)
        for name in order[: order.index(stage) + 1]
        if getattr(settings.stages, name) is not None
    )
    newest = tuple(reversed(read_decisions(folder)[-_MAX_DECISIONS:]))
    return StageExplanation(stage, str(stages_folder.parent), newest, now, _find_newest_log(folder))


def _find_newest_log(folder: Path) -> str:
    """Return the stage's most recently written log, whether the run finished or not; "" = there is none."""
    from tasks.pipeline.stage_result import STAGE_LOG

    logs = sorted(
        folder.glob(f"*/{STAGE_LOG}"),
        key=lambda path: (path.stat().st_mtime, ".tracking" not in str(path)),
    )
    return str(logs[-1]) if logs else ""


def _compare_with_newest(keys: StageKeys, stage: str, folder: Path) -> StageStatus:
    """Compare the newest result with the current settings and code."""
    from tasks.pipeline.changed_conditions import (
        find_current_differences,
        list_unfinished_stages,
        read_newest_fingerprint,
    )

    if read_newest_fingerprint(folder) is None:
        return StageStatus(stage, has_result=False)
    changes = tuple(find_current_differences(folder, keys))
    checkpoints = tuple(str(checkpoint) for checkpoint in list_unfinished_stages(folder))
    return StageStatus(stage, True, changes, checkpoints)
