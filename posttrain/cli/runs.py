"""Command `posttrain runs`: list runs with status and result."""

from __future__ import annotations

import argparse

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_data_options, parse_positive_integer

EXAMPLES = (
    "runs",
    "runs demo    (of the output folder of a configuration)",
    "runs --limit 5 --csv",
    "runs --where status=finished --where 'success_rate/policy>=0.5'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True, was_option=True)
    parser.add_argument(
        "--limit",
        type=parse_positive_integer,
        default=20,
        metavar="N",
        help="how many (default: 20)",
    )
    add_data_options(parser, former_formats=("table", "csv", "json"))
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs for which KEY OPERATOR VALUE holds, as in 'stages.policy.learning_rate<1e-3'; KEY: a setting, "
        "a metric, a tag, id, run, status, result; may be repeated",
    )
    parser.add_argument(
        "--no-settings", action="store_true", help="leave out the column of settings that differ"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """List runs with status and result."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.tables import format_runs_table, print_requested_data
    from tasks.lifecycle.crashed_runs import find_crashed_runs
    from tasks.tracking import list_run_records, list_runs

    output, uri = run_setup.resolve_tracking_store(arguments, settings)

    def describe_crashed() -> dict[str, str]:
        return {
            run.mlflow_run_id: run.description
            for run in find_crashed_runs(output.resolve())
            if run.mlflow_run_id and not run.is_remote
        }

    if arguments.json or arguments.csv:
        records = list_run_records(
            output,
            uri=uri,
            limit=arguments.limit,
            where=arguments.where,
            find_crashed=describe_crashed,
        )
        print_requested_data(arguments, records)
        return 0
    rows = list_runs(
        output,
        uri=uri,
        limit=arguments.limit,
        where=arguments.where,
        settings=not arguments.no_settings,
        find_crashed=describe_crashed,
    )
    empty_message = (
        "no run fits"
        if arguments.where
        else f"no runs in {output.absolute()}; start one: posttrain run demo"
    )
    print(format_runs_table(rows) if rows else empty_message)
    return 0
