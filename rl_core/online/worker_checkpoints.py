"""Checkpoints of the update worker: what is saved, how it is resumed, what is removed afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from rl_core.errors import CheckpointError, CorruptError, ResumeRefused
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.online.experience import Experience
from rl_core.online.experience_buffer import ExperienceBuffer
from rl_core.online.experience_log import LogReader, segments
from rl_core.online.fresh_rollouts import FreshRollouts
from rl_core.online.labelled_rewards import ExperienceScorer
from rl_core.online.record_intake import RecordIntake, record_digest
from rl_core.online.update_step import GuardedLearner
from rl_core.online.update_task import RunningBaseline
from rl_core.online.weight_snapshots import CHAMPION
from rl_core.settings import OnlineSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import fault
from rl_core.storage.rng_state import restore_rng, rng_state

__all__ = ["prune_worker", "restore", "save_worker", "worker_state"]


class CheckpointedWorker(Protocol):
    """The parts of an `UpdateWorker` that are saved, restored and pruned."""

    store: CheckpointStore
    log: Path
    learner: GuardedLearner
    scorer: ExperienceScorer
    settings: OnlineSettings
    fingerprint: dict[str, Any]
    intake: RecordIntake
    buffer: ExperienceBuffer
    baseline: RunningBaseline
    rollouts: FreshRollouts | None
    reader: LogReader
    updates: int
    served: int
    in_snapshot: int
    live: int
    past: list[int]
    held: int | None
    paused: str
    referenced: set[int]
    needed: int


_PLAIN = ("updates", "served", "in_snapshot", "live", "past", "held", "paused")


def save_worker(worker: CheckpointedWorker, *, prune: bool = False) -> None:
    """Publish a checkpoint. With `prune`, then remove snapshots and segments that nothing refers to any more.

    Which snapshots are there decides how the old distribution is known, so they are removed after the same updates in
    every run over the same records: not where a worker happens to be stopped.
    """
    worker.store.save(
        {
            "model": dict(trainable_weights(worker.learner.model)),
            "learner": worker.learner.state_dict(),
            "worker": {**worker_state(worker), "prune": prune},
            "rewards": worker.scorer.rewards.state_dict(),
            "rng": rng_state(),
            "fingerprint": worker.fingerprint,
        }
    )
    fault("online.saved")
    if prune:
        prune_worker(worker)


def worker_state(worker: CheckpointedWorker) -> dict[str, Any]:
    """State of the worker besides weights, optimizer and rewards."""
    return {
        **{name: getattr(worker, name) for name in _PLAIN},
        "intake": worker.intake.state_dict(),
        "baseline": worker.baseline.state_dict(),
        "fresh": dict(worker.rollouts.counts) if worker.rollouts is not None else {},
        "last_record": worker.reader.last,
        "referenced": sorted(worker.referenced),
        "needed": worker.needed,
    }


def restore(worker: CheckpointedWorker, state: Mapping[str, Any]) -> bool:
    """Load a checkpoint; returns True where it was to be followed by `prune_worker`.

    Raises: ResumeRefused for one of other settings; CheckpointError where the log lacks records of the buffer.
    """
    _check_fingerprint(worker, state["fingerprint"])
    saved = state["worker"]
    load_trainable_weights(worker.learner.model, state["model"])
    worker.learner.load_state_dict(state["learner"])
    worker.scorer.rewards.load_state_dict(state["rewards"])
    worker.baseline.load_state_dict(saved["baseline"])
    if worker.rollouts is not None:
        worker.rollouts.counts = Counter(saved["fresh"])
    for name in _PLAIN:
        setattr(worker, name, saved[name])
    worker.past = list(saved["past"])
    worker.intake.load_state_dict(saved["intake"], _experiences(worker, saved))
    worker.reader = LogReader(worker.log, after=saved["last_record"])
    worker.referenced, worker.needed = set(saved["referenced"]), int(saved["needed"])
    restore_rng(state["rng"])
    return bool(saved["prune"])


def prune_worker(worker: CheckpointedWorker) -> None:
    """Remove snapshots and segments that nothing refers to any more. The gate compares with the champion: it stays."""
    referenced = {CHAMPION} | worker.buffer.referenced_versions() | {worker.live, worker.served, *worker.past[-1:]}
    referenced |= {worker.held} if worker.held is not None else set()
    # the checkpoint before this one may still be resumed from, where this one turns out to be damaged
    snapshots, keep = worker.learner.snapshots, worker.settings.update.keep_snapshots
    snapshots.prune(keep, referenced | worker.referenced, newest=worker.updates)
    worker.referenced = referenced
    if not worker.settings.buffer.keep_segments:
        _remove_segments(worker)
    fault("online.pruned")


def _remove_segments(worker: CheckpointedWorker) -> None:
    """Remove segments whose records are read, and gone from the buffer since two checkpoints; the last stays."""
    first = worker.buffer.first_number()
    limit = worker.reader.last if first is None else min(first, worker.reader.last)
    for (_, path), (following, _) in pairwise(segments(worker.log)):
        if following <= min(limit, worker.needed):
            path.unlink(missing_ok=True)
    worker.needed = limit


def _check_fingerprint(worker: CheckpointedWorker, saved: Mapping[str, Any]) -> None:
    if saved != worker.fingerprint:
        names = {*saved, *worker.fingerprint}
        changed = sorted(name for name in names if saved.get(name) != worker.fingerprint.get(name))
        raise ResumeRefused(
            f"{worker.store.folder}: was made with another {', '.join(changed)}; put the old settings back, or go on "
            "in another folder"
        )


def _experiences(worker: CheckpointedWorker, saved: Mapping[str, Any]) -> dict[int, Experience]:
    """The buffer's experiences, from the log. Raises: CorruptError where the log is another one."""
    intake, last = saved["intake"], saved["last_record"]
    wanted = dict(zip(intake["buffer"]["numbers"], intake["buffer"]["digests"], strict=True))
    found = {}
    for record in LogReader(worker.log, after=min(wanted, default=last) - 1).read():
        expected = wanted.get(record.number, intake["last_digest"] if record.number == last else None)
        if expected is not None and record_digest(record) != expected:
            raise CorruptError(f"{worker.log}: record {record.number} is another one than was learned from")
        if record.number in wanted:
            found[record.number] = record.experience()
        if record.number >= last:
            break
    if wanted.keys() - found.keys():
        raise CheckpointError(
            f"{worker.log}: {len(wanted) - len(found)} records of the buffer are gone, the first is "
            f"{min(wanted.keys() - found.keys())}; put the log back, or begin in a new folder"
        )
    return found
