"""Command `posttrain status`: print the state of the servers of `posttrain up`."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_data_options, add_output_option

EXAMPLES = ("status", "status --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output_option(parser)
    add_data_options(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the state of the servers of `up`."""
    from posttrain.cli.tables import print_requested_data
    from posttrain.operations.commands import describe_status

    run_setup.refuse_unreadable_folder(arguments.output)
    record, text, is_up = describe_status(Path(arguments.output))
    if not print_requested_data(arguments, record, record.get("services", [])):
        print(text)
    return 0 if is_up else 1
