"""`posttrain gc`: prints or executes the plan of tasks/retention/plan.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, FolderBusy, nearest
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import remove_folder
from rl_core.storage.locks import FolderLock
from tasks.lifecycle.dead_runs import recorded_runs
from tasks.retention.plan import RetentionPlan, make_plan
from tasks.tracking import Tracking
from tasks.tracking.removal import remove_from_store

__all__ = ["Collected", "collect"]


@dataclass
class Collected:
    """Plans by pipeline, and what became of them."""

    plans: dict[str, RetentionPlan] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # pipelines with a live run
    problems: dict[str, list[str]] = field(default_factory=dict)
    is_done: bool = False  # else a dry run

    @property
    def bytes(self) -> int:
        """Bytes of everything planned."""
        return sum(plan.bytes for plan in self.plans.values())

    def text(self) -> str:
        """For people."""
        lines = []
        for name, plan in self.plans.items():
            lines += [*_said(name, plan), *(f"  {problem}" for problem in self.problems.get(name, []))]
        lines += [f"{name}: skipped, a run is writing ({why})" for name, why in self.skipped.items()]
        rest = "" if self.is_done else "; nothing was changed, --yes removes it"
        return "\n".join([*lines, f"{'freed' if self.is_done else 'would free'} {_size(self.bytes)}{rest}"])

    def record(self) -> dict[str, Any]:
        """For programs."""
        pipelines = {
            name: {
                "kept_runs": plan.kept_runs, "kept_folders": plan.kept_folders,
                "kept_versions": list(plan.kept_versions),
                "items": [{"bytes": item.bytes, "what": item.what, "label": item.label} for item in plan.items],
                "problems": self.problems.get(name, []),
            }
            for name, plan in self.plans.items()
        }  # fmt: skip
        return {"removed": self.is_done, "bytes": self.bytes, "pipelines": pipelines, "skipped": self.skipped}


def collect(
    output: Path, uri: str | None, *, keep: int, pipelines: Sequence[str] = (), delete: bool = False
) -> Collected:
    """Retention plan of each pipeline; with `delete`, also executes it.

    Args:
        output: the output folder. uri: tracking store, as in a config.
        keep: newest runs per pipeline whose results are kept.
        pipelines: only these; () = all in the folder.
    Raises: DataError for an unknown pipeline.
    """
    output = output.resolve()
    known = sorted({record.pipeline for record in recorded_runs(output)})
    if not known:
        raise DataError(f"no runs in {output}; give the runs' --config, or their --output folder")
    for name in pipelines:
        if name not in known:
            raise DataError(f"no pipeline '{name}' in {output}; {nearest(name, known)}")
    tracking = Tracking(uri, output)
    found = Collected(is_done=delete)
    for name in pipelines or known:
        try:
            with FolderLock(output / name / ".lock"):  # held by running pipelines, which are skipped
                plan = found.plans[name] = make_plan(tracking, output / name, keep)
                if delete:
                    found.problems[name] = _remove(tracking, plan)
        except FolderBusy as error:
            found.skipped[name] = str(error)
    return found


def _said(name: str, plan: RetentionPlan) -> list[str]:
    lines = [f"{name}: keeps {plan.kept_runs} runs, {plan.kept_folders} stage folders, versions "
             f"{', '.join(plan.kept_versions) or 'none'}"]  # fmt: skip
    for item in plan.items:
        lines.append(f"  {_size(item.bytes):>10}  {item.what}  {item.label}")
    return lines


def _remove(tracking: Tracking, plan: RetentionPlan) -> list[str]:
    """Delete from the store first: a folder without its run is harmless, a run without its folder is misleading."""
    fault("gc.planned")
    problems = remove_from_store(tracking.store, plan.runs, plan.versions, plan.models, plan.traces)
    fault("gc.store")
    for path in plan.paths:
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)
        fault("gc.path")
    return list(problems)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
