"""Command `posttrain retrain`: retrain on new data, from the champion; promote through the gate.

Its exit code tells a scheduler that nothing was new (3) from a promotion or rejection (0) and a failure (1).
"""

from __future__ import annotations

import argparse

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_allow_drift_option, add_config_argument, add_quiet_option
from posttrain.cli.parser import ExitCode

EXAMPLES = (
    "retrain demo",
    "retrain demo --force --reason 'tools have changed'",
    "retrain gsm8k --start base --set environment.options.path=train.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--start",
        choices=("champion", "base"),
        help="initial model: the champion, or the configuration's model (default: its retrain.start)",
    )
    parser.add_argument("--force", action="store_true", help="retrain even without new data")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="restart the unfinished stage of an interrupted retraining",
    )
    add_allow_drift_option(parser)
    parser.add_argument(
        "--reason", default="", help="origin of the request; stored with the versions"
    )
    parser.add_argument(
        "--nothing-new-is-ok",
        action="store_true",
        help="exit with 0, not 3, if there is no new data; for schedulers that know only success and failure",
    )
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Retrain on new data, from the champion; promote through the gate."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    run_setup.refuse_bad_rows(settings)
    run_setup.configure_prefect(settings)
    # Retraining uses new episodes, so finished stages run again.
    with run_setup.print_banner_and_start_prefect(settings, quiet=arguments.quiet, fresh=True):
        from flows.retrain import run_retraining

    result = run_retraining(
        settings,
        start=arguments.start,
        force=arguments.force,
        reason=arguments.reason,
        quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
        fresh=arguments.fresh,
    )
    if result.pipeline is not None:
        print(escape_control_characters(result.pipeline.format_table()))
    print(escape_control_characters(result.message))
    if result.pipeline is None:
        return ExitCode.OK if arguments.nothing_new_is_ok else ExitCode.NOTHING_NEW
    return ExitCode.OK if result.pipeline.ok else ExitCode.FAILED
