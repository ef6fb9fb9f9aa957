"""Command `posttrain promote`: move the alias `champion`."""

from __future__ import annotations

import argparse

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_note_option, parse_positive_integer

EXAMPLES = (
    "promote --config demo --note 'loops on hard questions'    (back to the champion before)",
    "promote --version 3 --config demo",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--version",
        type=parse_positive_integer,
        metavar="N",
        help="version of the registered model",
    )
    add_note_option(parser)
    add_config_argument(parser, option=True, required=True)


def run_command(arguments: argparse.Namespace) -> int:
    """Move the alias `champion`."""
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    run_setup.connect_mlflow(settings.output)
    from tasks.lifecycle.promotion import promote_version

    run_setup.print_wrapped(promote_version(settings, arguments.version, arguments.note))
    return 0
