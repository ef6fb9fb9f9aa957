"""First lines of a run: what runs, what is there already, where its files are, where it can be watched."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import PosttrainError

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

__all__ = ["opening"]

_WIDTH = 79


def opening(settings: PipelineSettings, *, fresh: bool = False, stages: Sequence[str] | None = None) -> str:
    """Lines to print before anything heavy is imported.

    Args:
        fresh: finished stages are run again. stages: those that are run; None = all of the settings.
    """
    names = list(settings.stages.active if stages is None else stages)
    output = Path(settings.output)
    where = "" if output.resolve() == Path("outputs").resolve() else f" --output {shlex.quote(str(output))}"
    width = max(36, min(_WIDTH, shutil.get_terminal_size().columns - 1))
    chain = " -> ".join(name.replace("_", " ") for name in names)
    lines = textwrap.wrap(f"{settings.name}: {chain}", width, subsequent_indent="  ", break_on_hyphens=False)
    home = output.resolve() / settings.name
    if done := [] if fresh else [name for name in _finished(settings, home) if name in names]:
        told = f"cached   {', '.join(name.replace('_', ' ') for name in done)}, unless data files have changed"
        lines += textwrap.wrap(told, width, subsequent_indent=" " * 9, break_on_hyphens=False)
    lines.append(f"files    {home}")
    if find_spec("gradio") is not None:
        lines.append(f"live     posttrain monitor{where}")
    lines.append(f"results  posttrain runs{where}, posttrain ui{where}")
    return "\n".join(lines)


def _finished(settings: PipelineSettings, home: Path) -> list[str]:
    """Stages that are finished under these settings; [] where that cannot be told, which the run then says."""
    if not (home / "stages").is_dir():
        return []
    from tasks.pipeline.drift import finished_now

    try:
        return finished_now(home / "stages", settings)
    except (PosttrainError, OSError):
        return []
