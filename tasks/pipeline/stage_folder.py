"""Log file of a stage: what it said, with times, for people.

<key>.tracking/stage.log      while it runs; appended to by a resumed run, and kept where the stage failed
<key>.tracking/stage.log.1    the part before it, once there is more than a MiB; older parts are removed
<key>/stage.log               both, when the stage has finished; no part of the digest of its content

Folder of one stage: reopened, sealed under its final name with its metrics and a manifest, or discarded.

Records that a stage leaves beside its model, handed to the tracking store as artifacts and data sets.

    rewards.jsonl          reward of every rollout, and its components
    metrics_history.json   the newest values of every metric
    pairs_train.jsonl, pairs_heldout.jsonl   preference pairs that the stage made from rollouts

They go through the stage's journal as everything does: once, also where the store was away. A stage that was killed
behind this records them again; equal names and digests are one artifact and one data set.
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
from rl_core.storage.atomic_files import make_folder, replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, remove_folder, seal_folder
from rl_core.storage.line_logs import RotatingLineLog, copy_intact_lines, read_checked_lines
from rl_core.storage.manifest import digest_bytes, digest_file
from tasks.config import dump_settings
from tasks.pipeline.changed_conditions import ARCHIVED_FILE
from tasks.pipeline.run_record import THREADS_FILE
from tasks.pipeline.stage_fingerprint import FINGERPRINT_FILE, read_stage_fingerprint
from tasks.pipeline.stage_result import (
    EPOCH_MODELS,
    FAILED_EPISODES,
    METRICS_HISTORY,
    METRICS_HISTORY_LINES,
    PAIR_FILES,
    RECENT_ROLLOUTS,
    SCHEDULE_FILE,
    STAGE_LOG,
    StageResult,
    compute_content_digest,
    resolve_journal_folder,
)
from tasks.processes.launch import WORKERS_FOLDER
from tasks.tracking import RunTracker

# Packages whose log messages are recorded from INFO on; other packages keep their own level.
LOGGED_PACKAGES = ("rl_core", "tasks", "flows", "posttrain")
PART_BYTES = 1 << 20
PROGRESS_SECONDS = 10.0  # between two lines about progress
TAIL_BYTES = 1 << 18  # of what the tracking store gets


class StageLog(logging.Handler):
    """Handler that writes every log record of this process, and progress, into a stage's log; a context manager.

    A disk that refuses a line is no reason to stop: the line is lost.
    """

    def __init__(self, folder: Path) -> None:
        """folder: of the stage's journal."""
        super().__init__(logging.INFO)
        self.path = folder / STAGE_LOG
        self._lines = RotatingLineLog(self.path, max_bytes=PART_BYTES, keep=1)
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
        """Write one record, with the traceback that it carries."""
        if getattr(self._thread_state, "is_writing", False):  # a message about the writing itself
            return
        try:
            text = record.getMessage()
        except Exception as error:  # as logging itself does: a wrong message ends nothing
            text = f"{record.msg!r} ({type(error).__name__}: {error})"
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        self.write_message(text, level=record.levelname, name=record.name, time_s=record.created)

    def write_message(
        self, text: str, *, level: str = "INFO", name: str = "stage", time_s: float | None = None
    ) -> None:
        """Write one message; further lines of it are indented."""
        time_s = time.time() if time_s is None else time_s
        begin = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(time_s))}.{int(time_s % 1 * 1000):03d} {level} {name}: "
        line = begin + _escape_control_characters(text).replace("\n", "\n    ") + "\n"
        self._thread_state.is_writing = True
        try:
            with (
                self.lock or contextlib.nullcontext(),
                contextlib.suppress(CheckpointError, OSError),
            ):
                self._lines.append_lines(line.encode("utf-8", "backslashreplace"))
        finally:
            self._thread_state.is_writing = False

    def write_progress(self, done: int, total: int, message: str = "") -> None:
        """Write how far the work is, at most every ten seconds, and its end."""
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
                    file.readline()  # the rest of a line
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _escape_control_characters(text: str) -> str:
    """The text with control characters as escapes: what a model wrote must not move the cursor of who reads it."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def copy_stage_log(journal: Path, folder: Path) -> None:
    """Put the log of a stage's journal into the stage's own folder, the older part first."""
    parts = [journal / name for name in (f"{STAGE_LOG}.1", STAGE_LOG) if (journal / name).is_file()]
    if parts:
        with replace_file(folder / STAGE_LOG, binary=True, synced=False) as whole:
            for part in parts:
                whole.write(part.read_bytes())


REWARD_RECORD = "rewards.jsonl"  # grows with training, so an interrupted run's is kept


@dataclass(frozen=True)
class KeyedStage:
    """One stage that is asked for, with its key."""

    name: str
    label: str
    settings: Any
    inputs: Mapping[str, StageResult | Path | str]
    digests: dict[str, str]  # of the inputs
    key: str
    final: Path  # the folder when it has finished
    fingerprint: dict[
        str, Any
    ]  # what the key is made of, for people (tasks/pipeline/stage_fingerprint.py)

    @property
    def folder(self) -> Path:
        """The folder while the stage runs."""
        return self.final.with_name(f"{self.key}.open")

    @property
    def journal(self) -> Path:
        """Folder of the stage's run: metrics and their delivery."""
        return resolve_journal_folder(self.final)


def seal_stage(stage: KeyedStage) -> str:
    """Move the folder to its final name, with its metrics and a manifest; returns the digest of its content.

    Damaged lines of what grew with the run are not sealed in; `count_damaged_lines` of the summary counts them.
    """
    for path in _list_growing_files(stage):
        copy_intact_lines(path, stage.folder / path.name)
    copy_stage_log(stage.journal, stage.folder)
    inject_fault("stage.copied")
    shutil.rmtree(stage.folder / "checkpoints", ignore_errors=True)
    (stage.folder / THREADS_FILE).unlink(missing_ok=True)  # in summary.json by now
    conditions = read_stage_fingerprint(stage.folder) or stage.fingerprint
    for name in (FINGERPRINT_FILE, ARCHIVED_FILE):
        (stage.folder / name).unlink(missing_ok=True)
    facts = {
        "stage": stage.name,
        "key": stage.key,
        "settings": dump_settings(stage.settings),
        "conditions": conditions,
    }
    manifest = seal_folder(stage.folder, stage.final, extra=facts)
    inject_fault("stage.sealed")
    return compute_content_digest(manifest)


def _list_growing_files(stage: KeyedStage) -> list[Path]:
    """Files of lines that were written all along the run, and may have been damaged since."""
    names = REWARD_RECORD, FAILED_EPISODES, METRICS_HISTORY_LINES
    paths = [stage.journal / "metrics.jsonl", *(stage.folder / name for name in names)]
    return [path for path in paths if path.is_file()]


def count_damaged_lines(stage: KeyedStage) -> dict[str, int]:
    """Number of damaged lines by file, where there are any."""
    counts = {
        path.name: sum(not line.is_intact for line in read_checked_lines(path))
        for path in _list_growing_files(stage)
    }
    return {name: count for name, count in counts.items() if count}


def list_saved_epochs(folder: Path) -> list[int]:
    """Epochs whose models lie in a stage's folder, ascending."""
    paths = (folder / EPOCH_MODELS).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def keep_checkpoints(folder: Path) -> None:
    """Keep the checkpoints of an interrupted run and what grows with them; everything else is written again."""
    make_folder(folder)
    kept = {
        "checkpoints",
        FAILED_EPISODES,
        REWARD_RECORD,
        WORKERS_FOLDER,
    }  # recover_events reads and removes the latter
    if (folder / "checkpoints").is_dir():
        kept |= {THREADS_FILE, FINGERPRINT_FILE, ARCHIVED_FILE, EPOCH_MODELS, METRICS_HISTORY_LINES}
        kept |= {RECENT_ROLLOUTS}  # nothing may be played any more
        kept |= {SCHEDULE_FILE}  # a replay begins with the first iteration
        clear_leftovers(folder / EPOCH_MODELS, locked=True)
    for path in folder.iterdir():
        if path.name in kept:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def discard_stage(final: Path) -> None:
    """Remove a finished or open folder and its journal; renamed first, so that no reader sees half of it."""
    for ending in ("", ".open", ".tracking"):
        remove_folder(final.with_name(f"{final.name}{ending}"))
        inject_fault("stage.discarded")


logger = logging.getLogger(__name__)

RECORDS_FOLDER = "records"  # of the run's artifacts
MEGABYTE = 1_000_000
_DATASET_CONTEXTS = {
    REWARD_RECORD: "rewards",
    METRICS_HISTORY: "metrics",
    PAIR_FILES[0]: "training",
    PAIR_FILES[1]: "heldout",
}
_TIMING_PREFIXES = ("perf/", "system/")  # metrics that no two runs have alike


def log_stage_records(
    tracker: RunTracker, folder: Path, final: Path, stage: str, *, max_megabytes: float
) -> None:
    """Record the files that are there.

    Args:
        folder: of the stage, being written. final: its name when it is finished, for the data sets' source.
        max_megabytes: a larger file becomes a data set alone, which says where it is; 0 = no file is copied.
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
                "%s: %s has %.0f MB and stays here; the store is told where",
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
    """SHA-256 of the values, without those that measure time: the same training has the same digest."""
    series = json.loads(path.read_bytes())["metrics"]
    kept = {
        name: points
        for name, points in sorted(series.items())
        if not name.startswith(_TIMING_PREFIXES)
    }
    return digest_bytes(json.dumps(kept).encode())
