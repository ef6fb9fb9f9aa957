"""Commands of `posttrain` in messages, with the output folder that they need."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["own_command"]


def own_command(name: str, output: Path) -> str:
    """`posttrain NAME` for an output folder; without `--output` where that is the default of the current folder."""
    if output.resolve() == Path("outputs").resolve():
        return f"posttrain {name}"
    return f"posttrain {name} --output {shlex.quote(str(output))}"
