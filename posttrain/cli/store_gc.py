"""Command `posttrain store gc`: print or execute the plan of tasks/retention.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_config_argument,
    add_json_option,
    parse_positive_integer,
)
from rl_core.errors import DataError, FolderBusy, suggest_name
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import remove_folder
from rl_core.storage.locks import FolderLock

if TYPE_CHECKING:
    from tasks.retention import RetentionPlan
    from tasks.tracking import Tracking

EXAMPLES = ("store gc --keep 5", "store gc --keep 5 --pipeline demo --yes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True, was_option=True)
    parser.add_argument(
        "--keep",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="newest runs to keep per pipeline (default: 5)",
    )
    parser.add_argument(
        "--pipeline",
        metavar="NAME",
        action="append",
        default=[],
        help="only this pipeline; may be repeated",
    )
    parser.add_argument("--yes", action="store_true", help="actually remove")
    add_json_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """List or remove unreferenced data."""
    settings = run_setup.load_optional_settings(arguments)
    output, uri = run_setup.resolve_tracking_store(arguments, settings)
    report = collect_garbage(
        output,
        uri,
        num_kept_runs=arguments.keep,
        pipelines=arguments.pipeline,
        delete=arguments.yes,
    )
    from posttrain.cli.tables import print_requested_data

    if not print_requested_data(arguments, report.to_record()):
        run_setup.print_wrapped(report.format_text())
    return 0


@dataclass
class CleanupReport:
    """Retention plans by pipeline, and the outcome of executing them."""

    plans: dict[str, RetentionPlan] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # pipelines with a live run
    problems: dict[str, list[str]] = field(default_factory=dict)
    is_done: bool = False  # else a dry run

    @property
    def bytes(self) -> int:
        """Bytes of all planned items."""
        return sum(plan.bytes for plan in self.plans.values())

    def format_text(self) -> str:
        """Format the report for the terminal."""
        lines = []
        for name, plan in self.plans.items():
            lines += _format_retention_plan(name, plan)
            lines += [f"  {problem}" for problem in self.problems.get(name, [])]
        for name, reason in self.skipped.items():
            lines.append(f"{name}: skipped, a run is writing ({reason})")
        size = _format_size(self.bytes)
        if self.is_done:
            lines.append(f"freed {size}")
        else:
            lines.append(f"would free {size}; nothing was changed, --yes removes it")
        return "\n".join(lines)

    def to_record(self) -> dict[str, Any]:
        """Return the report as a record."""
        pipelines = {
            name: {
                "kept_runs": plan.num_retained_runs,
                "kept_folders": plan.num_retained_folders,
                "kept_versions": list(plan.retained_versions),
                "items": [
                    {"bytes": item.bytes, "what": item.kind, "label": item.label}
                    for item in plan.items
                ],
                "problems": self.problems.get(name, []),
            }
            for name, plan in self.plans.items()
        }
        return {
            "removed": self.is_done,
            "bytes": self.bytes,
            "pipelines": pipelines,
            "skipped": self.skipped,
        }


def collect_garbage(
    output: Path,
    uri: str | None,
    *,
    num_kept_runs: int,
    pipelines: Sequence[str] = (),
    delete: bool = False,
) -> CleanupReport:
    """Plan the retention of each pipeline; with `delete`, also execute it.

    Args:
        output: the output folder.
        uri: tracking store, as in a config.
        num_kept_runs: newest runs per pipeline whose results are kept.
        pipelines: only these; () = all in the folder.
    Raises: DataError for an unknown pipeline.
    """
    from tasks.lifecycle.crashed_runs import list_recorded_runs
    from tasks.retention import plan_retention
    from tasks.tracking import Tracking

    output = output.resolve()
    known = sorted({record.pipeline for record in list_recorded_runs(output)})
    if not known:
        raise DataError(f"no runs in {output}; name the output folder with --output")
    for name in pipelines:
        if name not in known:
            raise DataError(f"no pipeline '{name}' in {output}; {suggest_name(name, known)}")
    tracking = Tracking(uri, output)
    report = CleanupReport(is_done=delete)
    for name in pipelines or known:
        try:
            # Running pipelines hold the lock and are skipped.
            with FolderLock(output / name / ".lock"):
                plan = report.plans[name] = plan_retention(tracking, output / name, num_kept_runs)
                if delete:
                    report.problems[name] = _remove_planned_data(tracking, plan)
        except FolderBusy as error:
            report.skipped[name] = str(error)
    return report


def _format_retention_plan(name: str, plan: RetentionPlan) -> list[str]:
    lines = [
        f"{name}: keeps {plan.num_retained_runs} runs, {plan.num_retained_folders} stage folders, versions "
        f"{', '.join(plan.retained_versions) or 'none'}"
    ]
    for item in plan.items:
        lines.append(f"  {_format_size(item.bytes):>10}  {item.kind}  {item.label}")
    return lines


def _remove_planned_data(tracking: Tracking, plan: RetentionPlan) -> list[str]:
    """Delete the planned data and return problems.

    The store comes first: a folder without its run is harmless, a run without its folder is misleading.
    """
    from tasks.tracking.removal import remove_from_store

    inject_fault("gc.planned")
    problems = remove_from_store(tracking.store, plan.runs, plan.versions, plan.models, plan.traces)
    inject_fault("gc.store")
    for path in plan.paths:
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
        inject_fault("gc.path")
    return list(problems)


def _format_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
