"""Command `posttrain run`: run a pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path

from flows.runtime.stopping import schedule_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_allow_drift_option,
    add_config_argument,
    add_quiet_option,
    add_stop_after_option,
)

EXAMPLES = (
    "run demo",
    "run demo --set stages.policy.learning_rate=1e-3 --set seed=1",
    "run demo --set stages.analyze=null --set 'stages.evaluate.levels=[easy, hard]'",
    "run gsm8k --set environment.options.path=train.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="rerun all stages, finished ones included"
    )
    parser.add_argument(
        "--monitor", action="store_true", help="serve the live page for as long as the run takes"
    )
    parser.add_argument(
        "--replay-schedule",
        metavar="FILE",
        help="schedule.jsonl of a run with asynchronous rollouts: train on the same tokens again, bit for bit",
    )
    add_stop_after_option(parser)
    add_allow_drift_option(parser)
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the pipeline of a configuration."""
    schedule_sigterm(arguments.stop_after)
    if arguments.replay_schedule is not None:
        arguments.set = [
            *arguments.set,
            f"stages.policy.rollouts.replay_schedule={arguments.replay_schedule}",
        ]
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    run_setup.refuse_bad_rows(settings)
    from tasks.pipeline.stage_key import StageKeys

    keys = StageKeys(settings)
    run_setup.refuse_unknown_base_model(settings, keys)
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, keys=keys, quiet=arguments.quiet, fresh=arguments.fresh
    ):
        from flows.post_training import run_pipeline
        from posttrain.cli.monitor_process import serve_monitor_page

    with serve_monitor_page(Path(settings.output), arguments.monitor):
        result = run_pipeline(
            settings,
            fresh=arguments.fresh,
            quiet=arguments.quiet,
            allow_drift=arguments.allow_drift,
            changed=arguments.set,
            keys=keys,
        )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1
