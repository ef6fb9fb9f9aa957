"""Command `posttrain status`: print the state of the servers of `posttrain up`."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_json_option, add_output_option

EXAMPLES = ("status", "status --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output_option(parser)
    add_json_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the state of the servers of `up`."""
    from posttrain.operations.commands import describe_status

    run_setup.refuse_unreadable_folder(arguments.output)
    text, is_up = describe_status(Path(arguments.output), as_json=arguments.json)
    print(text)
    return 0 if is_up else 1
