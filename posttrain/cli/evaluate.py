"""Command `posttrain evaluate`: evaluate one model on the held-out episodes of a configuration."""

from __future__ import annotations

import argparse

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_quiet_option

EXAMPLES = (
    "evaluate models:/demo@champion --config demo",
    "evaluate path/to/model -c demo --set stages.evaluate.episodes=100",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "model", metavar="MODEL", help="model folder, hub name or models:/NAME@ALIAS"
    )
    add_config_argument(parser, option=True, required=True)
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Evaluate one model on a configuration's held-out episodes."""
    settings = run_setup.load_pipeline_settings(arguments)
    run_setup.refuse_unknown_models(settings, arguments.model)
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=arguments.quiet, fresh=True, stages=["evaluate"]
    ):
        from flows.single_stage import evaluate_model
        from posttrain.cli.model_references import format_model_name

    name = format_model_name(arguments.model)
    result = evaluate_model(settings, arguments.model, name=name, quiet=arguments.quiet)
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1
