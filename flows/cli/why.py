"""`posttrain why`: why a stage was run or taken from an earlier run, and what would make it run now."""

from __future__ import annotations

from pathlib import Path

from rl_core.errors import SettingsError
from tasks import stage_registry
from tasks.config import PipelineSettings
from tasks.pipeline.decisions import decisions
from tasks.pipeline.drift import differences_now, newest_conditions, unfinished
from tasks.pipeline.result import STAGE_LOG

__all__ = ["explain"]

_SHOWN = 5  # newest decisions


def explain(settings: PipelineSettings, stage: str) -> str:
    """Decisions about a stage, the newest first, and how the settings and code of now differ from its newest result.

    Raises: SettingsError for a stage that the settings do not have.
    """
    if stage not in settings.stages.active:
        raise SettingsError(f"stages: has no '{stage}', only {', '.join(settings.stages.active)}")
    stages_folder = Path(settings.output).resolve() / settings.name / "stages"
    folder = stages_folder / stage
    lines = []
    for decision in reversed(decisions(folder)[-_SHOWN:]):
        lines.append(f"{decision.time}  {decision.key}  {decision}")
        lines += [f"    {change}" for change in decision.changes]
    if not lines:
        lines.append(f"{stage} was never run in {stages_folder.parent}")
    lines += ["", "now:", *_now(settings, stage, stages_folder)]
    lines += [f"  log of the newest run: {path}" for path in _newest_log(folder)]
    return "\n".join(lines)


def _newest_log(folder: Path) -> list[Path]:
    """The stage's log that was written last, of a finished run or of one that goes on or failed; [] = there is none."""
    logs = sorted(folder.glob(f"*/{STAGE_LOG}"), key=lambda path: (path.stat().st_mtime, ".tracking" not in str(path)))
    return logs[-1:]


def _now(settings: PipelineSettings, stage: str, stages_folder: Path) -> list[str]:
    """Differences that a run would find: of the stage, and of each one before it, whose results it starts from."""
    order = stage_registry.names()
    lines = []
    for name in order[: order.index(stage) + 1]:
        if getattr(settings.stages, name) is None:
            continue
        if newest_conditions(stages_folder / name) is None:
            lines.append(f"  {name}: has no result yet")
            continue
        found = differences_now(stages_folder / name, settings)
        lines.append(f"  {name}: {'changed' if found else 'settings and code as before'}")
        lines += [f"    {line}" for line in found]
        lines += [f"    not finished: a checkpoint ({begun})" for begun in unfinished(stages_folder / name)]
    return [*lines, "  content of inputs is compared when the stage runs"]
