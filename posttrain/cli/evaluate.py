"""Command `posttrain evaluate`: evaluate one model on the held-out episodes of a configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_quiet_option
from rl_core.errors import SettingsError

EXAMPLES = (
    "evaluate demo models:/demo@champion",
    "evaluate demo demo-7f3a    (the model of a run)",
    "evaluate demo path/to/model --set stages.evaluate.episodes=100",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True, was_option=True)
    parser.add_argument(
        "model", metavar="MODEL", help="model folder, hub name, models:/NAME@ALIAS, or a run"
    )
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Evaluate one model on a configuration's held-out episodes."""
    if arguments.config is None:
        raise SettingsError(
            f"name the configuration whose episodes it plays: posttrain evaluate CONFIG {arguments.model}"
        )
    settings = run_setup.load_pipeline_settings(arguments)
    from posttrain.cli.model_references import format_model_name, resolve_run_model

    model = resolve_run_model(arguments.model, Path(settings.output))
    run_setup.refuse_unknown_models(settings, model)
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=arguments.quiet, fresh=True, stages=["evaluate"]
    ):
        from flows.single_stage import evaluate_model

    name = format_model_name(model)
    result = evaluate_model(settings, model, name=name, quiet=arguments.quiet)
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1
