"""Commands of `posttrain` in messages, with the output folder that they need."""

from __future__ import annotations

import shlex
from pathlib import Path


def format_posttrain_command(name: str, output: Path) -> str:
    """`posttrain NAME` for an output folder; `name` with its arguments, quoted where a shell needs it."""
    return f"posttrain {name}{format_output_option(output)}"


def format_output_option(output: Path) -> str:
    """` --output FOLDER`; "" where that is the default of the current folder."""
    return (
        ""
        if output.resolve() == Path("outputs").resolve()
        else f" --output {shlex.quote(str(output))}"
    )
