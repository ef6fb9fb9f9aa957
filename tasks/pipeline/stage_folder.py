"""The folder of one stage: its log file, sealing and discarding, and the records that it hands to the tracking store.

    <key>.tracking/stage.log      while it runs; a resumed run appends to it; kept if the stage fails
    <key>.tracking/stage.log.1    the part before it, once there is more than a MiB; older parts are removed
    <key>/stage.log               both, when the stage has finished; not part of its content digest

A finished folder is sealed under its final name with its metrics and a manifest. These files become artifacts and data
sets of the stage's run:

    rewards.jsonl          reward of every rollout, and its components
    metrics_history.json   the newest values of every metric
    pairs_train.jsonl, pairs_heldout.jsonl   preference pairs that the stage built from rollouts

They go through the stage's journal like everything else: exactly once, even if the store was down. A stage that is
killed after this step records them again; equal names and digests stay one artifact and one data set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_core.errors import CheckpointError
from rl_core.storage.append_log import (
    AppendLog,
    copy_intact_lines,
    list_log_files,
    read_checked_lines,
)
from rl_core.storage.atomic_files import make_folder, replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, remove_folder, seal_folder
from rl_core.storage.manifest import digest_bytes, digest_file
from tasks.config import dump_settings
from tasks.pipeline.changed_conditions import ARCHIVED_FILE
from tasks.pipeline.cpu_threads import THREADS_FILE
from tasks.pipeline.stage_fingerprint import FINGERPRINT_FILE, read_stage_fingerprint
from tasks.pipeline.stage_result import (
    EPOCH_MODELS,
    FAILED_EPISODES,
    METRICS_HISTORY,
    METRICS_HISTORY_LINES,
    PAIR_FILES,
    RECENT_ROLLOUTS,
    SCHEDULE_FILE,
    SERVER_LOG,
    STAGE_LOG,
    StageResult,
    compute_content_digest,
    resolve_journal_folder,
)
from tasks.processes.launch import WORKERS_FOLDER
from tasks.tracking import RunTracker

logger = logging.getLogger(__name__)

# These packages log from INFO on; other packages log at their configured level.
LOGGED_PACKAGES = ("rl_core", "tasks", "flows", "posttrain")
PART_BYTES = 1 << 20
PROGRESS_SECONDS = 10.0  # between two lines about progress
TAIL_BYTES = 1 << 18  # sent to the tracking store
REWARD_RECORD = "rewards.jsonl"  # grows during training, so it is kept when a run is interrupted
RECORDS_FOLDER = "records"  # of the run's artifacts
MEGABYTE = 1_000_000
_DATASET_CONTEXTS = {
    REWARD_RECORD: "rewards",
    METRICS_HISTORY: "metrics",
    PAIR_FILES[0]: "training",
    PAIR_FILES[1]: "heldout",
}
_TIMING_PREFIXES = ("perf/", "system/")  # metrics that differ between any two runs


class StageLog(logging.Handler):
    """A log handler that writes every record of this process, and progress, to a stage's log file; a context manager.

    If the disk refuses a line, the line is lost and the stage continues.
    """

    def __init__(self, folder: Path) -> None:
        """Create the handler.

        Args:
            folder: of the stage's journal.
        """
        super().__init__(logging.INFO)
        self.path = folder / STAGE_LOG
        self._lines = AppendLog(self.path, max_bytes=PART_BYTES, keep=1)
        self._levels: dict[str, int] = {}
        self._last_progress = -PROGRESS_SECONDS
        self._thread_state = threading.local()

    def __enter__(self) -> StageLog:
        for name in LOGGED_PACKAGES:
            logger = logging.getLogger(name)
            if not logger.isEnabledFor(logging.INFO):
                self._levels[name] = logger.level
                logger.setLevel(logging.INFO)
        logging.getLogger().addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger().removeHandler(self)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its traceback if it has one."""
        if getattr(self._thread_state, "is_writing", False):  # a message from the writing below
            return
        try:
            text = record.getMessage()
        except (
            Exception
        ) as error:  # as in logging itself, a malformed message must not stop the stage
            text = f"{record.msg!r} ({type(error).__name__}: {error})"
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        self.write_message(text, level=record.levelname, name=record.name, time_s=record.created)

    def write_message(
        self, text: str, *, level: str = "INFO", name: str = "stage", time_s: float | None = None
    ) -> None:
        """Write one message; indent its further lines."""
        time_s = time.time() if time_s is None else time_s
        second = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
        prefix = f"{second}.{int(time_s % 1 * 1000):03d} {level} {name}: "
        line = prefix + _escape_control_characters(text).replace("\n", "\n    ") + "\n"
        self._thread_state.is_writing = True
        try:
            with (
                self.lock or contextlib.nullcontext(),
                contextlib.suppress(CheckpointError, OSError),
            ):
                make_folder(self.path.parent)
                self._lines.append_lines(line.encode("utf-8", "backslashreplace"))
        finally:
            self._thread_state.is_writing = False

    def write_progress(self, done: int, total: int, message: str = "") -> None:
        """Write the progress, at most every ten seconds, and always at the end."""
        now = time.monotonic()
        if done >= total or now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.write_message(
                f"{done}/{total}{f': {message}' if message else ''}", name="progress"
            )

    @property
    def tail(self) -> str:
        """The newest lines, a quarter of a MiB at most."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                if size > TAIL_BYTES:
                    file.readline()  # skip the partial line
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _escape_control_characters(text: str) -> str:
    """Escape control characters, so that text from a model cannot move the cursor of a reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def copy_stage_log(journal: Path, folder: Path) -> None:
    """Copy the log from a stage's journal into its folder, the older part first."""
    parts = list_log_files(journal / STAGE_LOG)
    if parts:
        with replace_file(folder / STAGE_LOG, binary=True, synced=False) as file:
            for part in parts:
                file.write(part.read_bytes())


@dataclass(frozen=True)
class KeyedStage:
    """One requested stage, with its key."""

    name: str
    label: str
    settings: Any
    inputs: Mapping[str, StageResult | Path | str]
    digests: dict[str, str]  # of the inputs
    key: str
    final: Path  # the folder when it has finished
    fingerprint: dict[str, Any]  # readable content of the key (tasks/pipeline/stage_fingerprint.py)

    @property
    def folder(self) -> Path:
        """The folder while the stage runs."""
        return self.final.with_name(f"{self.key}.open")

    @property
    def journal(self) -> Path:
        """Folder of the stage's tracking journal: metrics and their delivery state."""
        return resolve_journal_folder(self.final)


def seal_stage(stage: KeyedStage) -> str:
    """Move the folder to its final name, with its metrics and a manifest; return the digest of its content.

    Damaged lines of growing files are left out; `count_damaged_lines` counts them for the summary.
    """
    for path in _list_growing_files(stage):
        copy_intact_lines(path, stage.folder / path.name)
    copy_stage_log(stage.journal, stage.folder)
    inject_fault("stage.copied")
    shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)
    (stage.folder / THREADS_FILE).unlink(missing_ok=True)  # recorded in summary.json by now
    fingerprint = read_stage_fingerprint(stage.folder) or stage.fingerprint
    for name in (FINGERPRINT_FILE, ARCHIVED_FILE):
        (stage.folder / name).unlink(missing_ok=True)
    details = {
        "stage": stage.name,
        "key": stage.key,
        "settings": dump_settings(stage.settings),
        "conditions": fingerprint,
    }
    manifest = seal_folder(stage.folder, stage.final, extra=details)
    inject_fault("stage.sealed")
    return compute_content_digest(manifest)


def _list_growing_files(stage: KeyedStage) -> list[Path]:
    """List the line files that were written throughout the run and may be damaged."""
    names = REWARD_RECORD, FAILED_EPISODES, METRICS_HISTORY_LINES
    paths = [stage.journal / "metrics.jsonl", *(stage.folder / name for name in names)]
    return [path for path in paths if path.is_file()]


def count_damaged_lines(stage: KeyedStage) -> dict[str, int]:
    """Count the damaged lines by file; files without any are left out."""
    counts = {
        path.name: sum(not line.is_intact for line in read_checked_lines(path))
        for path in _list_growing_files(stage)
    }
    return {name: count for name, count in counts.items() if count}


def list_saved_epochs(folder: Path) -> list[int]:
    """List the epochs whose models are in a stage's folder, ascending."""
    paths = (folder / EPOCH_MODELS).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def keep_checkpoints(folder: Path) -> None:
    """Keep the checkpoints of an interrupted run and the files that grow with them; remove everything else."""
    make_folder(folder)
    # recover_events reads and removes WORKERS_FOLDER
    kept_names = {"checkpoints", FAILED_EPISODES, REWARD_RECORD, SERVER_LOG, WORKERS_FOLDER}
    if (folder / "checkpoints").is_dir():
        kept_names |= {
            THREADS_FILE,
            FINGERPRINT_FILE,
            ARCHIVED_FILE,
            EPOCH_MODELS,
            METRICS_HISTORY_LINES,
            RECENT_ROLLOUTS,  # a resumed run may play no more rollouts
            SCHEDULE_FILE,  # a replay starts at the first iteration
        }
        clear_leftovers(folder / EPOCH_MODELS, locked=True)
    for path in folder.iterdir():
        if path.name in kept_names:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def discard_stage(final: Path) -> None:
    """Remove a finished or open folder and its journal. Each is renamed first, so that no reader sees half of it."""
    for suffix in ("", ".open", ".tracking"):
        remove_folder(final.with_name(f"{final.name}{suffix}"))
        inject_fault("stage.discarded")


def log_stage_records(
    tracker: RunTracker, folder: Path, final: Path, stage: str, *, max_megabytes: float
) -> None:
    """Record the files that exist as artifacts and data sets of the stage's run.

    Args:
        folder: of the stage, while it is being written.
        final: name of that folder when it is finished, used as the data sets' source.
        max_megabytes: a larger file becomes only a data set that says where it is; 0 = no file is copied.
    """
    for name, context in _DATASET_CONTEXTS.items():
        path = folder / name
        if not path.is_file():
            continue
        size = path.stat().st_size
        if size <= max_megabytes * MEGABYTE and max_megabytes > 0:
            tracker.log_artifact(path, RECORDS_FOLDER)
        elif max_megabytes > 0:
            logger.info(
                "%s: %s has %.0f MB and is not copied; the store records its path",
                stage,
                name,
                size / MEGABYTE,
            )
        profile = {"bytes": size}
        if name.endswith(".jsonl"):
            profile["num_rows"] = _count_lines(path)
        digest = _digest_history(path) if name == METRICS_HISTORY else digest_file(path)
        tracker.log_dataset(
            final / name, digest, f"{stage} {name.partition('.')[0]}", context, profile=profile
        )
        inject_fault("records.logged")


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _digest_history(path: Path) -> str:
    """Compute the SHA-256 of the metric values without timings: equal trainings have equal digests."""
    series = json.loads(path.read_bytes())["metrics"]
    reproducible = {
        name: points
        for name, points in sorted(series.items())
        if not name.startswith(_TIMING_PREFIXES)
    }
    return digest_bytes(json.dumps(reproducible).encode())
