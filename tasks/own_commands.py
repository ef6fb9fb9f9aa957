"""Commands of `posttrain` in messages, with the output folder that they need."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["output_option", "own_command"]


def own_command(name: str, output: Path) -> str:
    """`posttrain NAME` for an output folder; `name` with its arguments, quoted where a shell needs it."""
    return f"posttrain {name}{output_option(output)}"


def output_option(output: Path) -> str:
    """` --output FOLDER`; "" where that is the default of the current folder."""
    return "" if output.resolve() == Path("outputs").resolve() else f" --output {shlex.quote(str(output))}"
