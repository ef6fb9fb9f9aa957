"""Commands of `posttrain` for messages, with the output folder that they need."""

from __future__ import annotations

import shlex
from pathlib import Path

INSTALL_COMMAND = "python -m posttrain.install"  # works in a checkout and from a wheel


def format_posttrain_command(name: str, output: Path) -> str:
    """Format `posttrain NAME` for an output folder.

    Args:
        name: the command with its arguments, quoted for a shell.
    """
    return f"posttrain {name}{format_output_option(output)}"


def format_output_option(output: Path) -> str:
    """Format ` --output FOLDER`; "" if the folder is the default of the current directory."""
    if output.resolve() == Path("outputs").resolve():
        return ""
    return f" --output {shlex.quote(str(output))}"
