"""`posttrain gc`: prints or executes the plan of tasks/retention/plan.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import DataError, FolderBusy, nearest
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import remove_folder
from rl_core.storage.locks import FolderLock
from tasks.lifecycle.dead_runs import recorded_runs
from tasks.retention.plan import RetentionPlan, make_plan
from tasks.tracking import Tracking
from tasks.tracking.removal import remove_from_store

__all__ = ["collect"]


def collect(output: Path, uri: str | None, *, keep: int, pipelines: Sequence[str] = (), delete: bool = False) -> str:
    """Text of the retention plan; with `delete`, also executes it.

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
    lines, total = [], 0
    for name in pipelines or known:
        try:
            with FolderLock(output / name / ".lock"):  # held by running pipelines, which are skipped
                plan = make_plan(tracking, output / name, keep)
                lines += _said(name, plan)
                total += plan.bytes
                if delete:
                    lines += _remove(tracking, plan)
        except FolderBusy as error:
            lines.append(f"{name}: skipped, a run is writing ({error})")
    verb = "freed" if delete else "would free"
    lines.append(f"{verb} {_size(total)}" + ("" if delete else "; nothing was changed, --yes removes it"))
    return "\n".join(lines)


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
    return [f"  {problem}" for problem in problems]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
