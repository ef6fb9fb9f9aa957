"""Command `posttrain store sync`: deliver records that the tracking store has not received yet."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument
from rl_core.errors import DataError

if TYPE_CHECKING:
    from tasks.tracking import Tracking, UndeliveredCounts

EXAMPLES = ("store sync", "store sync gsm8k", "store sync demo-7f3a", "store sync -o /data/outputs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(
        parser,
        optional=True,
        was_option=True,
        metavar="CONFIG|RUN",
        help_text="a configuration, whose runs are delivered, or one run (default: all of the output folder)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Deliver records that the tracking store has not received yet."""
    target = run_setup.resolve_target(arguments)
    output = run_setup.connect_mlflow(target.output)
    run_folder = None if target.record is None else target.record.folder
    text, is_complete = deliver_journals(output, target.tracking_uri, run_folder)
    run_setup.print_wrapped(text)
    return 0 if is_complete else 1


def deliver_journals(
    output: Path, uri: str | None, run_folder: Path | None = None
) -> tuple[str, bool]:
    """Deliver all journals of an output folder; return a report, and True if nothing is left to deliver.

    Args:
        uri: the tracking store; None = MLFLOW_TRACKING_URI, else the one that each run was recorded for.
        run_folder: deliver this run and its stages alone; None = all.
    Raises: DataError if the folder has no journals.
    """
    from tasks.mlflow_environment import strip_uri_password
    from tasks.tracking import Tracking
    from tasks.tracking.replay import list_journals, read_start_record

    output = output.resolve()
    folders = [
        folder
        for folder in list_journals(output)
        if run_folder is None
        or folder == run_folder
        or read_start_record(folder).get("parent_folder") == str(run_folder)
    ]
    if not folders:
        raise DataError(f"no runs in {output}; name the output folder with --output")
    default_tracking = Tracking(uri, output)
    is_explicit = (
        uri is not None or default_tracking.store.uri != default_tracking.store.default_uri
    )
    stores: dict[str, Tracking] = {}
    recorded_stores = {
        folder: str(read_start_record(folder).get("store") or "") for folder in folders
    }
    for recorded in recorded_stores.values():
        if is_explicit or recorded in ("", default_tracking.uri):
            tracking = default_tracking
        else:
            tracking = Tracking(recorded, output)
        stores.setdefault(strip_uri_password(tracking.uri), tracking)
    lines = []
    num_before = _count_undelivered(folders).total
    for name, tracking in stores.items():
        delivered = [
            folder
            for folder in folders
            if len(stores) == 1 or (recorded_stores[folder] or default_tracking.uri) == name
        ]
        tracking.deliver_journals(delivered)
        remaining = _count_undelivered(delivered)
        lines.append(f"{name}: {_format_delivery(len(delivered), remaining, tracking)}")
    num_remaining = _count_undelivered(folders).total
    if num_before > num_remaining:
        lines.append(f"delivered: {num_before - num_remaining} records")
    return "\n".join(lines), num_remaining == 0


def _count_undelivered(folders: Sequence[Path]) -> UndeliveredCounts:
    from tasks.tracking import UndeliveredCounts
    from tasks.tracking.replay import count_undelivered

    return sum((count_undelivered(folder) for folder in folders), UndeliveredCounts())


def _format_delivery(num_runs: int, remaining: UndeliveredCounts, tracking: Tracking) -> str:
    if not remaining.total:
        return f"has everything of {num_runs} runs"
    if tracking.store.is_unreachable:
        return f"{remaining} still wait: the store does not answer"
    return f"{remaining} still wait: their runs are alive and deliver them themselves"
