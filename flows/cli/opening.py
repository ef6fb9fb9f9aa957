"""First lines of a run: what runs, what is there already, where its files are, where it can be watched."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import PosttrainError
from tasks.own_commands import output_option

if TYPE_CHECKING:
    from flows.sweep.plan import SweepPlan
    from tasks.config import PipelineSettings

__all__ = ["opening", "sweep_opening"]

_WIDTH = 79


def opening(settings: PipelineSettings, *, fresh: bool = False, stages: Sequence[str] | None = None) -> str:
    """Lines to print before anything heavy is imported.

    Args:
        fresh: finished stages are run again. stages: those that are run; None = all of the settings.
    """
    names = list(settings.stages.active if stages is None else stages)
    lines = _wrapped(f"{settings.name}: {' -> '.join(name.replace('_', ' ') for name in names)}", "  ")
    home = Path(settings.output).resolve() / settings.name
    if done := [] if fresh else [name for name in _finished(settings, home) if name in names]:
        told = f"cached   {', '.join(name.replace('_', ' ') for name in done)}, unless data files have changed"
        lines += _wrapped(told, " " * 9)
    return "\n".join([*lines, *_places(settings, home)])


def sweep_opening(plan: SweepPlan, base: PipelineSettings) -> str:
    """The same of a sweep: what varies, how many trials, and its folder. Raises: SettingsError."""
    from flows.sweep.space import grid

    varied = [f"{one.key} ({len(one.choices) or 'range'})" for one in plan.dimensions]
    configurations = len(grid(plan.dimensions)) if plan.method == "grid" else plan.trials
    seeds = f" x {plan.seeds} seeds" if plan.seeds > 1 else ""
    trials = f"{configurations} configuration{'s' * (configurations != 1)}{seeds}"
    lines = _wrapped(f"{base.name}: sweep over {', '.join(varied) or 'seeds'}: {trials}, {plan.method}", "  ")
    return "\n".join([*lines, *_places(base, plan.home(base))])


def _wrapped(text: str, indent: str) -> list[str]:
    width = max(36, min(_WIDTH, shutil.get_terminal_size().columns - 1))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _places(settings: PipelineSettings, home: Path) -> list[str]:
    """Folder of the files, and the commands that show how it goes."""
    where = output_option(Path(settings.output))
    served = _served(Path(settings.output))
    lines = [f"files    {home}"]
    if "monitor" in served or find_spec("gradio") is not None:
        lines.append(f"live     {served.get('monitor', f'posttrain monitor{where}')}")
    pages = [url for name in ("mlflow", "prefect") if (url := served.get(name))] or [f"posttrain ui{where}"]
    return [*lines, f"results  {', '.join((f'posttrain runs{where}', *pages))}"]


def _served(output: Path) -> dict[str, str]:
    """Addresses of the pages that `posttrain up` serves for a folder, by name; {} where it does not run."""
    from flows.operations.connect import running

    state = running(output)
    return {service.name: service.url for service in state.services} if state is not None else {}


def _finished(settings: PipelineSettings, home: Path) -> list[str]:
    """Stages that are finished under these settings; [] where that cannot be told, which the run then says."""
    if not (home / "stages").is_dir():
        return []
    from tasks.pipeline.drift import finished_now

    try:
        return finished_now(home / "stages", settings)
    except (PosttrainError, OSError):
        return []
