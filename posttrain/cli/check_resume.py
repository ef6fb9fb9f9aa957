"""Command `posttrain check resume`: compare an uninterrupted run with an interrupted one."""

from __future__ import annotations

import argparse

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, parse_duration, parse_positive_integer

EXAMPLES = (
    "check resume demo --set stages.policy.iterations=8 --set stages.sft.max_steps=60",
    "check resume my_task/config.yaml --kills 10 --seed 1",
    "check resume my_task/config.yaml --slices 60    (SIGTERM every 60 s, as a scheduler sends it)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--kills",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="interruptions by SIGKILL (default: 5)",
    )
    parser.add_argument(
        "--slices",
        type=parse_duration,
        metavar="SECONDS",
        help="stop by SIGTERM after every SECONDS instead",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the times and fault points of the kills (default: 0)",
    )
    parser.add_argument(
        "--minutes",
        type=parse_duration,
        default=60.0,
        metavar="M",
        help="limit for everything; half for the first run (default: 60). Only --set shortens the settings",
    )
    parser.add_argument("--keep", action="store_true", help="keep both runs even if they are equal")


def run_command(arguments: argparse.Namespace) -> int:
    """Compare an uninterrupted run with an interrupted one."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    run_setup.refuse_unknown_base_model(settings)
    from posttrain.verification.verify_resume import VerificationPlan, verify_resume

    plan = VerificationPlan(
        arguments.kills, arguments.slices, arguments.seed, arguments.minutes, arguments.keep
    )
    return verify_resume(arguments.config, arguments.set, settings, plan)
