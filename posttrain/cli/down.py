"""Command `posttrain down`: stop everything that `posttrain up` started."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.arguments import add_output_option

EXAMPLES = ("down", "down --output /data/outputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    from posttrain.operations.commands import stop_servers

    print(stop_servers(Path(arguments.output)))
    return 0
