"""Command `posttrain stage`: run one stage."""

from __future__ import annotations

import argparse

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    STAGE_HELP,
    add_allow_drift_option,
    add_config_argument,
    add_quiet_option,
    parse_stage_name,
)
from rl_core.errors import SettingsError
from tasks import stage_registry

EXAMPLES = (
    "stage prepare_data demo",
    "stage policy demo --model outputs/my-sft-model",
    "stage sft demo --set stages.sft.epochs=1 --fresh",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", metavar="NAME", type=parse_stage_name, help=STAGE_HELP)
    add_config_argument(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="start from this model folder, hub name or models:/NAME@ALIAS",
    )
    parser.add_argument("--fresh", action="store_true", help="rerun the stage even if finished")
    add_allow_drift_option(parser)
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run one stage."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    if arguments.name not in settings.stages.active:
        missing = stage_registry.describe_unknown_stage(arguments.name, settings.stages.active)
        raise SettingsError(f"{arguments.config}: {missing}")
    run_setup.refuse_bad_rows(settings)
    if arguments.model is None:
        run_setup.refuse_unknown_base_model(settings)
    else:
        run_setup.refuse_unknown_models(settings, arguments.model)
    run_setup.configure_prefect(settings)
    from tasks.config import check_changed_settings
    from tasks.pipeline.run_options import select_settings_up_to
    from tasks.pipeline.stage_key import StageKeys

    shortened = select_settings_up_to(settings, arguments.name, arguments.model)
    shortened = check_changed_settings(shortened)
    keys = StageKeys(shortened)
    with run_setup.print_banner_and_start_prefect(
        shortened, keys=keys, quiet=arguments.quiet, fresh=arguments.fresh
    ):
        from flows.post_training import run_pipeline

    result = run_pipeline(
        shortened,
        only=arguments.name,
        fresh=arguments.fresh,
        quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
        keys=keys,
    )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1
