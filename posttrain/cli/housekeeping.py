"""`posttrain gc`: prints or executes the plan of tasks/retention.py.

`posttrain sync`: deliver what runs recorded while their tracking store was away, or before it lost its database.
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
    """Plans by pipeline, and what became of them."""

    plans: dict[str, RetentionPlan] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # pipelines with a live run
    problems: dict[str, list[str]] = field(default_factory=dict)
    is_done: bool = False  # else a dry run

    @property
    def bytes(self) -> int:
        """Bytes of everything planned."""
        return sum(plan.bytes for plan in self.plans.values())

    def format_text(self) -> str:
        """For people."""
        lines = []
        for name, plan in self.plans.items():
            lines += [
                *_format_retention_plan(name, plan),
                *(f"  {problem}" for problem in self.problems.get(name, [])),
            ]
        lines += [
            f"{name}: skipped, a run is writing ({why})" for name, why in self.skipped.items()
        ]
        rest = "" if self.is_done else "; nothing was changed, --yes removes it"
        return "\n".join(
            [
                *lines,
                f"{'freed' if self.is_done else 'would free'} {_format_size(self.bytes)}{rest}",
            ]
        )

    def to_record(self) -> dict[str, Any]:
        """For programs."""
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
    """Retention plan of each pipeline; with `delete`, also executes it.

    Args:
        output: the output folder. uri: tracking store, as in a config.
        keep: newest runs per pipeline whose results are kept.
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
    found = CleanupReport(is_done=delete)
    for name in pipelines or known:
        try:
            with FolderLock(
                output / name / ".lock"
            ):  # held by running pipelines, which are skipped
                plan = found.plans[name] = plan_retention(tracking, output / name, num_kept_runs)
                if delete:
                    found.problems[name] = _remove_planned_data(tracking, plan)
        except FolderBusy as error:
            found.skipped[name] = str(error)
    return found


def _format_retention_plan(name: str, plan: RetentionPlan) -> list[str]:
    lines = [
        f"{name}: keeps {plan.num_retained_runs} runs, {plan.num_retained_folders} stage folders, versions "
        f"{', '.join(plan.retained_versions) or 'none'}"
    ]
    for item in plan.items:
        lines.append(f"  {_format_size(item.bytes):>10}  {item.kind}  {item.label}")
    return lines


def _remove_planned_data(tracking: Tracking, plan: RetentionPlan) -> list[str]:
    """Delete from the store first: a folder without its run is harmless, a run without its folder is misleading."""
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
    """Deliver all journals of an output folder; returns a report, and True if nothing waits any more.

    Args:
        uri: the tracking store; None = MLFLOW_TRACKING_URI, else the one that each run was recorded for.
    Raises: DataError if the folder has no journals.
    """
    output = output.resolve()
    folders = list(list_journals(output))
    if not folders:
        raise DataError(f"no runs in {output}; give the runs' --config, or their --output folder")
    known = Tracking(uri, output)
    given = uri is not None or known.store.uri != known.store.default_uri
    stores: dict[str, Tracking] = {}
    lines = []
    before = sum((count_undelivered(folder) for folder in folders), UndeliveredCounts())
    for folder in folders:
        recorded = str(read_start_record(folder).get("store") or "")
        tracking = (
            known if given or not recorded or recorded == known.uri else Tracking(recorded, output)
        )
        stores.setdefault(strip_uri_password(tracking.uri), tracking)
    for name, tracking in stores.items():
        chosen = [
            f
            for f in folders
            if len(stores) == 1 or str(read_start_record(f).get("store") or known.uri) == name
        ]
        tracking.deliver_journals(chosen)
        left = sum((count_undelivered(folder) for folder in chosen), UndeliveredCounts())
        lines.append(f"{name}: {_format_delivery(len(chosen), left, tracking)}")
    left = sum((count_undelivered(folder) for folder in folders), UndeliveredCounts())
    if before.total > left.total:
        lines.append(f"delivered: {before.total - left.total} records")
    return "\n".join(lines), left.total == 0


def _format_delivery(runs: int, left: UndeliveredCounts, tracking: Tracking) -> str:
    if not left.total:
        return f"has everything of {runs} runs"
    why = (
        "it does not answer"
        if tracking.store.is_unreachable
        else "their runs are alive, and deliver by themselves"
    )
    return f"{left} still wait: {why}"
