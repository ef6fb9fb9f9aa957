"""Records that a stage leaves beside its model, handed to the tracking store as artifacts and data sets.

    rewards.jsonl          reward of every rollout, and its components
    metrics_history.json   the newest values of every metric
    pairs_train.jsonl, pairs_heldout.jsonl   preference pairs that the stage made from rollouts

They go through the stage's journal as everything does: once, also where the store was away. A stage that was killed
behind this records them again; equal names and digests are one artifact and one data set.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rl_core.storage.faults import fault
from rl_core.storage.manifest import digest_bytes, digest_file
from tasks.pipeline.result import METRICS_HISTORY, PAIRS
from tasks.pipeline.stage_folder import REWARD_RECORD
from tasks.tracking import RunTracker

__all__ = ["log_records"]

logger = logging.getLogger(__name__)

FOLDER = "records"  # of the run's artifacts
MEGABYTE = 1_000_000
_CONTEXTS = {REWARD_RECORD: "rewards", METRICS_HISTORY: "metrics", PAIRS[0]: "training", PAIRS[1]: "heldout"}
_TIMED = ("perf/", "system/")  # metrics that no two runs have alike


def log_records(tracker: RunTracker, folder: Path, final: Path, stage: str, *, max_megabytes: float) -> None:
    """Record the files that are there.

    Args:
        folder: of the stage, being written. final: its name when it is finished, for the data sets' source.
        max_megabytes: a larger file becomes a data set alone, which says where it is; 0 = no file is copied.
    """
    for name, context in _CONTEXTS.items():
        path = folder / name
        if not path.is_file():
            continue
        size = path.stat().st_size
        if size <= max_megabytes * MEGABYTE and max_megabytes > 0:
            tracker.log_artifact(path, FOLDER)
        elif max_megabytes > 0:
            logger.info("%s: %s has %.0f MB and stays here; the store is told where", stage, name, size / MEGABYTE)
        profile = {"bytes": size}
        if name.endswith(".jsonl"):
            profile["num_rows"] = _lines(path)
        digest = _history_digest(path) if name == METRICS_HISTORY else digest_file(path)
        tracker.log_dataset(final / name, digest, f"{stage} {name.partition('.')[0]}", context, profile=profile)
        fault("records.logged")


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _history_digest(path: Path) -> str:
    """SHA-256 of the values, without those that measure time: the same training has the same digest."""
    series = json.loads(path.read_bytes())["metrics"]
    kept = {name: points for name, points in sorted(series.items()) if not name.startswith(_TIMED)}
    return digest_bytes(json.dumps(kept).encode())
