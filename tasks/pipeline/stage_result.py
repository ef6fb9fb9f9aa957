"""Results of finished stages: reading and verifying their folders."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptError
from rl_core.storage.folders import move_aside
from rl_core.storage.manifest import read_verified_file, verify_folder
from tasks.tracking.journal import DeliveryCursor

logger = logging.getLogger(__name__)

METRICS_HISTORY = "metrics_history.json"  # for dashboards: the newest values of every metric, written when a stage ends
METRICS_HISTORY_LINES = "metrics_history.jsonl"  # the same while it trains, a line an export

SCHEDULE_FILE = "schedule.jsonl"  # what each iteration of asynchronous rollouts learned from
RECENT_ROLLOUTS = (
    "recent_rollouts.jsonl"  # for people who look on: whole trajectories of the newest iterations
)

FAILED_EPISODES = "failed_episodes.jsonl"  # the first ones of a stage, kept as well when it fails; tracebacks hold paths

STAGE_LOG = "stage.log"  # for people: what the stage said, with times

EPOCH_MODELS = "epochs"  # folder of the models of epochs, where some are kept; beside the stage's result, no part of it

PAIR_FILES = (
    "pairs_train.jsonl",
    "pairs_heldout.jsonl",
)  # that a stage made from rollouts, as texts, for people

REVIEW_FILE = "review.md"  # of a promotion: the evidence behind the decision

# Files that hold timings or paths of this machine, or what a resumed run has less of, or that are for people alone:
# part of a stage's folder but not of its content digest, so that a stage that was run again to the same result does not
# make the ones after it run again.
NON_CONTENT_FILES = frozenset(
    {
        "summary.json",
        "metrics.jsonl",
        METRICS_HISTORY,
        METRICS_HISTORY_LINES,
        RECENT_ROLLOUTS,
        FAILED_EPISODES,
        STAGE_LOG,
        *PAIR_FILES,
    }
)


@dataclass(frozen=True)
class StageResult:
    """Result of a finished stage: a path and digests, never a model."""

    stage: str
    folder: str
    digest: str  # of the folder's content
    key: str
    cached: bool  # True = an earlier run's folder was used
    seconds: float  # spent on the whole stage, before a resume as well; 0 when cached
    run_id: str  # MLflow run that produced it
    summary: dict[str, Any]  # numbers for people, from summary.json

    @property
    def path(self) -> Path:
        """The finished folder."""
        return Path(self.folder)

    @property
    def model(self) -> Path:
        """The model folder that the stage wrote."""
        return self.path / "model"


def compute_content_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over names and digests of a finished folder's files, those that hold timings left out."""
    lines = [
        f"{name} {entry['sha256']}"
        for name, entry in sorted(manifest["files"].items())
        if name not in NON_CONTENT_FILES and not name.startswith(f"{EPOCH_MODELS}/")
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load_finished_stage(folder: Path, name: str, key: str) -> StageResult | None:
    """The finished stage in `folder`, or None. A folder that fails verification is set aside, with a warning."""
    if not folder.is_dir():
        return None
    try:
        manifest = verify_folder(folder)
        summary = json.loads(read_verified_file(folder, "summary.json", manifest))
    except CorruptError as error:
        aside = move_aside(folder, f"{folder.name}.corrupt")
        logger.warning(
            "%s: the finished folder is damaged (%s); set aside as %s, running again",
            name,
            error,
            aside,
        )
        return None
    # The tracking store may have answered only after the folder was sealed, or have lost everything since.
    delivered = DeliveryCursor.load(resolve_journal_folder(folder))
    if "registered_model" in summary and delivered.versions:
        summary["model_version"] = max(delivered.versions.values())
    return StageResult(
        stage=name,
        folder=str(folder),
        digest=compute_content_digest(manifest),
        key=key,
        cached=True,
        seconds=0.0,
        run_id=delivered.run_id or summary.get("run_id", ""),
        summary=summary,
    )


def resolve_journal_folder(folder: Path) -> Path:
    """Folder of the journal of a finished stage's run."""
    return folder.with_name(f"{folder.name}.tracking")
