"""Housekeeping of an output folder: `posttrain gc` and `posttrain sync`.

`gc` prints or executes the plan of tasks/retention.py. `sync` delivers what runs recorded while their tracking store
was unreachable, or before it lost its database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, FolderBusy, suggest_name
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import remove_folder
from rl_core.storage.locks import FolderLock
from tasks.lifecycle.crashed_runs import list_recorded_runs
from tasks.mlflow_environment import strip_uri_password
from tasks.retention import RetentionPlan, plan_retention
from tasks.tracking import Tracking, UndeliveredCounts
from tasks.tracking.removal import remove_from_store
from tasks.tracking.replay import count_undelivered, list_journals, read_start_record


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
    output = output.resolve()
    known = sorted({record.pipeline for record in list_recorded_runs(output)})
    if not known:
        raise DataError(f"no runs in {output}; give the runs' --config, or their --output folder")
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


def deliver_journals(output: Path, uri: str | None) -> tuple[str, bool]:
    """Deliver all journals of an output folder; return a report, and True if nothing is left to deliver.

    Args:
        uri: the tracking store; None = MLFLOW_TRACKING_URI, else the one that each run was recorded for.
    Raises: DataError if the folder has no journals.
    """
    output = output.resolve()
    folders = list(list_journals(output))
    if not folders:
        raise DataError(f"no runs in {output}; give the runs' --config, or their --output folder")
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
    return sum((count_undelivered(folder) for folder in folders), UndeliveredCounts())


def _format_delivery(num_runs: int, remaining: UndeliveredCounts, tracking: Tracking) -> str:
    if not remaining.total:
        return f"has everything of {num_runs} runs"
    if tracking.store.is_unreachable:
        return f"{remaining} still wait: the store does not answer"
    return f"{remaining} still wait: their runs are alive and deliver them themselves"
