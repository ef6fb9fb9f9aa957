"""Results of finished stages, and the verification of their folders."""

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

METRICS_HISTORY = "metrics_history.json"  # for dashboards: newest values of every metric, written when a stage ends
METRICS_HISTORY_LINES = "metrics_history.jsonl"  # the same during training, one line per export
SCHEDULE_FILE = "schedule.jsonl"  # rollouts that each iteration of asynchronous training used
RECENT_ROLLOUTS = "recent_rollouts.jsonl"  # for viewers: full trajectories of the newest iterations
FAILED_EPISODES = "failed_episodes.jsonl"  # the first ones of a stage, also kept if it fails; tracebacks hold paths
SERVER_LOG = "server.log"  # output of the inference server that the stage started
STAGE_LOG = "stage.log"  # log messages of the stage, with times
EPOCH_MODELS = "epochs"  # folder of the models of single epochs, if some are kept; not part of the stage's result
PAIR_FILES = ("pairs_train.jsonl", "pairs_heldout.jsonl")  # preference pairs from rollouts, as text
REVIEW_FILE = "review.md"  # of a promotion: the evidence behind the decision
GAIN = (
    "gain_over_base"  # of an evaluated model: key of its row and metric; also with _low and _high
)

# Files that hold timings, paths of this machine or text for people, or that a resumed run writes less of. They belong
# to a stage's folder but not to its content digest: a stage that reruns to the same result must not make later stages
# rerun.
NON_CONTENT_FILES = frozenset(
    {
        "summary.json",
        "metrics.jsonl",
        METRICS_HISTORY,
        METRICS_HISTORY_LINES,
        RECENT_ROLLOUTS,
        FAILED_EPISODES,
        SERVER_LOG,
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
    seconds: float  # spent on the stage, including time before a resume; 0 when cached
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
    """Compute the SHA-256 over names and digests of a finished folder's files.

    Leave out `NON_CONTENT_FILES` and epoch models.
    """
    lines = [
        f"{name} {entry['sha256']}"
        for name, entry in sorted(manifest["files"].items())
        if name not in NON_CONTENT_FILES and not name.startswith(f"{EPOCH_MODELS}/")
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load_finished_stage(folder: Path, name: str, key: str) -> StageResult | None:
    """Load the finished stage in `folder`, or return None.

    Move a folder that fails verification aside, with a warning.
    """
    if not folder.is_dir():
        return None
    try:
        manifest = verify_folder(folder)
        summary = json.loads(read_verified_file(folder, "summary.json", manifest))
    except CorruptError as error:
        moved_to = move_aside(folder, f"{folder.name}.corrupt")
        logger.warning(
            "%s: the finished folder is damaged (%s); set aside as %s, running again",
            name,
            error,
            moved_to,
        )
        return None
    # The store may have numbered the version after the folder was sealed, or may have lost everything since.
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
    """Return the folder of the journal of a finished stage's run."""
    return folder.with_name(f"{folder.name}.tracking")


def format_gain(row: Mapping[str, Any]) -> str:
    """Format an evaluated model's gain over the start model, with its interval; "" if it has none."""
    if row.get(GAIN) is None:
        return ""
    values = [row[GAIN], row[f"{GAIN}_low"], row[f"{GAIN}_high"]]
    if row.get("knows_success", True):
        gain, low, high = (f"{100 * value:+.1f}" for value in values)
        return f"{gain} points [{low}, {high}]"
    gain, low, high = (f"{value:+.3f}" for value in values)
    return f"{gain} in reward [{low}, {high}]"
