"""Command `posttrain runs`: list runs with status and result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_config_and_output_options,
    add_json_format_option,
    parse_positive_integer,
)

EXAMPLES = (
    "runs",
    "runs --limit 5",
    "runs --format csv",
    "runs --where status=finished --where 'success_rate/policy>=0.5'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_and_output_options(parser)
    parser.add_argument(
        "--limit",
        type=parse_positive_integer,
        default=20,
        metavar="N",
        help="how many (default: 20)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "csv", "json"),
        default="table",
        help="csv and json hold settings, metrics, tags",
    )
    add_json_format_option(parser)
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs for which KEY OPERATOR VALUE holds, as in 'stages.policy.learning_rate<1e-3'; KEY: a setting, "
        "a metric, a tag, run, status, result; may be repeated",
    )
    parser.add_argument(
        "--no-settings", action="store_true", help="leave out the column of settings that differ"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """List runs with status and result."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.tables import format_runs_table
    from tasks.lifecycle.crashed_runs import find_crashed_runs
    from tasks.tracking import list_run_records, list_runs

    output, uri = run_setup.resolve_tracking_store(arguments, settings)

    def describe_crashed() -> dict[str, str]:
        return {
            run.mlflow_run_id: run.description
            for run in find_crashed_runs(output.resolve())
            if run.mlflow_run_id and not run.is_remote
        }

    if arguments.format != "table":
        records = list_run_records(
            output,
            uri=uri,
            limit=arguments.limit,
            where=arguments.where,
            find_crashed=describe_crashed,
        )
        print(_format_run_records(records, arguments.format), end="")
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


def _format_run_records(records: Sequence[dict[str, Any]], file_format: str) -> str:
    """Format records as JSON, or as CSV with a column for each metric and tag (metrics.NAME, tags.NAME)."""
    if file_format == "json":
        return json.dumps(records, indent=1) + "\n"
    import pandas as pd

    text: str = pd.json_normalize(list(records)).to_csv(index=False)
    return text if records else ""
