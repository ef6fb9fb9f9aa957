"""`posttrain sync`: deliver what runs recorded while their tracking store was away, or before it lost its database."""

from __future__ import annotations

from pathlib import Path

from rl_core.errors import DataError
from tasks.mlflow_environment import without_password
from tasks.tracking import Tracking, Waiting
from tasks.tracking.replay import journals, start_of, waiting_in

__all__ = ["sync"]


def sync(output: Path, uri: str | None) -> tuple[str, bool]:
    """Deliver all journals of an output folder; returns a report, and True if nothing waits any more.

    Args:
        uri: the tracking store; None = MLFLOW_TRACKING_URI, else the one that each run was recorded for.
    Raises: DataError if the folder has no journals.
    """
    output = output.resolve()
    folders = list(journals(output))
    if not folders:
        raise DataError(f"no runs in {output}; give the runs' --config, or their --output folder")
    known = Tracking(uri, output)
    given = uri is not None or known.store.uri != known.store.default_uri
    stores: dict[str, Tracking] = {}
    lines = []
    before = sum((waiting_in(folder) for folder in folders), Waiting())
    for folder in folders:
        recorded = str(start_of(folder).get("store") or "")
        tracking = known if given or not recorded or recorded == known.uri else Tracking(recorded, output)
        stores.setdefault(without_password(tracking.uri), tracking)
    for name, tracking in stores.items():
        chosen = [f for f in folders if len(stores) == 1 or str(start_of(f).get("store") or known.uri) == name]
        tracking.replay_folders(chosen)
        left = sum((waiting_in(folder) for folder in chosen), Waiting())
        lines.append(f"{name}: {_said(len(chosen), left, tracking)}")
    left = sum((waiting_in(folder) for folder in folders), Waiting())
    if before.total > left.total:
        lines.append(f"delivered: {before.total - left.total} records")
    return "\n".join(lines), left.total == 0


def _said(runs: int, left: Waiting, tracking: Tracking) -> str:
    if not left.total:
        return f"has everything of {runs} runs"
    why = "it does not answer" if tracking.store.is_away else "their runs are alive, and deliver by themselves"
    return f"{left} still wait: {why}"
