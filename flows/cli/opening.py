"""First lines of a run: what runs, where its files are, where it can be watched."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

__all__ = ["opening"]

_WIDTH = 79


def opening(settings: PipelineSettings) -> str:
    """Lines to print before anything heavy is imported."""
    stages = " -> ".join(name.replace("_", " ") for name in settings.stages.active)
    output = Path(settings.output)
    where = "" if output.resolve() == Path("outputs").resolve() else f" --output {shlex.quote(str(output))}"
    width = max(36, min(_WIDTH, shutil.get_terminal_size().columns - 1))
    lines = textwrap.wrap(f"{settings.name}: {stages}", width, subsequent_indent="  ", break_on_hyphens=False)
    lines.append(f"files    {output.resolve() / settings.name}")
    if find_spec("gradio") is not None:
        lines.append(f"live     posttrain monitor{where}")
    lines.append(f"results  posttrain runs{where}, posttrain ui{where}")
    return "\n".join(lines)
