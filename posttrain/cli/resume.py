"""Command `posttrain resume`: resume an interrupted run with its recorded settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.stopping import schedule_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    RUN_HELP,
    add_allow_drift_option,
    add_former_config_option,
    add_output_option,
    add_quiet_option,
    add_set_option,
    add_stop_after_option,
)
from rl_core.errors import DataError, FolderBusy, SettingsError

if TYPE_CHECKING:
    from tasks.lifecycle.crashed_runs import PipelineRunRecord

EXAMPLES = ("resume    (the newest unfinished run)", "resume demo-7f3a", "resume demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help=f"{RUN_HELP} (default: the newest unfinished run)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="restart the unfinished stage, without its checkpoint",
    )
    add_allow_drift_option(parser)
    add_former_config_option(parser)
    add_set_option(parser, argparse.SUPPRESS)
    add_output_option(parser)
    add_stop_after_option(parser)
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Resume an interrupted run."""
    schedule_sigterm(arguments.stop_after)
    arguments.config = getattr(arguments, "config", None)
    config_settings = run_setup.load_optional_settings(arguments)
    output = Path(config_settings.output if config_settings else arguments.output)
    run_setup.refuse_unreadable_folder(output)
    from posttrain.cli.recorded_settings import load_recorded_settings
    from tasks.tracking.run_ids import resolve_run_name, shorten_run_name

    run = arguments.run
    record = find_resumable_run(output, None if run is None else resolve_run_name(output, run))
    settings = load_recorded_settings(record, output)
    run_setup.configure_prefect(settings)
    print(
        escape_control_characters(
            f"resuming {shorten_run_name(output, record.name)}, which is {record.status}"
        ),
        flush=True,
    )
    from tasks.pipeline.stage_key import StageKeys

    keys = StageKeys(settings)
    with run_setup.print_banner_and_start_prefect(settings, keys=keys, quiet=arguments.quiet):
        from flows.post_training import run_pipeline

    result = run_pipeline(
        settings,
        only=record.only,
        models=record.evaluated_models,
        quiet=arguments.quiet,
        started=record.started,
        allow_drift=arguments.allow_drift,
        restart=arguments.fresh,
        keys=keys,
    )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def find_resumable_run(output: Path, run: str | None) -> PipelineRunRecord:
    """Return the run to resume: by name, by id or a prefix of it, or a pipeline's newest unfinished run.

    Args:
        run: None = the newest resumable run.
    Raises: DataError for an unknown run, a sweep or a trial; SettingsError for a finished run; FolderBusy for a
        running one.
    """
    from tasks.lifecycle.crashed_runs import list_recorded_runs

    if run == "":
        raise DataError("the name of the run is empty; leave it out to resume the newest one")
    records = list_recorded_runs(output.resolve())
    if not records:
        raise DataError(f"no runs in {output.resolve()}; name the output folder with --output")
    matching = [
        record
        for record in records
        if run is None or run in (record.name, record.pipeline) or _matches_run_id(record, run)
    ]
    if not matching:
        from tasks.tracking.run_ids import describe_unknown_run, list_named_runs

        named = list_named_runs(output.resolve())
        if any(run == other.name and not other.is_pipeline for other in named):
            raise DataError(
                f"'{run}' is a sweep or one of its trials; the same `posttrain sweep` command continues it"
            )
        raise DataError(describe_unknown_run(named, str(run), output.resolve()))
    for record in matching:
        if record.status not in ("running", "finished"):
            return record
    from tasks.tracking.run_ids import shorten_run_name

    newest = matching[0]
    short_id = shorten_run_name(output, newest.name)
    if newest.status == "running":
        where = f" on {newest.host}" if newest.host else ""
        raise FolderBusy(f"run '{short_id}' is still running{where}; `posttrain logs` follows it")
    raise SettingsError(
        f"run '{short_id}' has finished; `posttrain run` with its config runs it again"
    )


def _matches_run_id(record: PipelineRunRecord, text: str) -> bool:
    return len(text) >= 6 and (record.run_id.startswith(text) or record.key.startswith(text))
