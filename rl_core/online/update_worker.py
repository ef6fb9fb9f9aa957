"""Checkpoints of the update worker: what is saved, how it is resumed, what is removed afterwards.

The update worker: takes records out of the log, learns from them, saves, publishes snapshots.

Everything it computes follows from the records and their order: update k is due when exactly
first_update + (k - 1) update_every records have been read, whenever they arrived. So a worker that lags, is killed and
resumed, or runs later over the recorded log computes the same numbers, to the last bit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rl_core.errors import CheckpointError, CorruptError, DataError, ResumeRefused
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.online.drift_detection import measure_champion_kl, measure_component_misranking
from rl_core.online.experience import Experience
from rl_core.online.experience_buffer import (
    BufferedExperience,
    ExperienceBuffer,
    compute_sampling_beta,
)
from rl_core.online.experience_log import (
    ExperienceLogReader,
    ExperienceLogRecord,
    find_oldest_number,
    list_segments,
)
from rl_core.online.experience_reader import ExperienceReader, digest_record
from rl_core.online.fresh_rollouts import FreshRolloutSampler
from rl_core.online.labelled_rewards import ExperienceScorer, RewardTable
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_step import (
    GuardedLearner,
    RunningRewardBaseline,
    ScoredExperience,
    UpdateReport,
    UpdateTask,
    compute_adaptive_learning_rate,
    compute_request_advantages,
    compute_rms_error,
)
from rl_core.online.weight_snapshots import CHAMPION_VERSION
from rl_core.settings import OnlineSettings
from rl_core.storage.checkpoint import CheckpointStore, collect_rng_state, restore_rng_state
from rl_core.storage.faults import inject_fault


class CheckpointedWorker(Protocol):
    """The parts of an `UpdateWorker` that are saved, restored and pruned."""

    store: CheckpointStore
    log: Path
    learner: GuardedLearner
    scorer: ExperienceScorer
    settings: OnlineSettings
    fingerprint: dict[str, Any]
    experience_reader: ExperienceReader
    buffer: ExperienceBuffer
    baseline: RunningRewardBaseline
    rollouts: FreshRolloutSampler | None
    log_reader: ExperienceLogReader
    updates: int
    served: int
    in_snapshot: int
    live: int
    past: list[int]
    held: int | None
    paused: str
    referenced: set[int]
    first_needed_record: int


_SAVED_ATTRIBUTES = ("updates", "served", "in_snapshot", "live", "past", "held", "paused")


def save_worker_checkpoint(worker: CheckpointedWorker, *, prune: bool = False) -> None:
    """Publish a checkpoint. With `prune`, then remove snapshots and segments that nothing refers to any more.

    Which snapshots are there decides how the old distribution is known, so they are removed after the same updates in
    every run over the same records: not where a worker happens to be stopped.
    """
    worker.store.save_version(
        {
            "model": dict(collect_trainable_weights(worker.learner.model)),
            "learner": worker.learner.state_dict(),
            "worker": {**collect_worker_state(worker), "prune": prune},
            "rewards": worker.scorer.rewards.state_dict(),
            "rng": collect_rng_state(),
            "fingerprint": worker.fingerprint,
        }
    )
    inject_fault("online.saved")
    if prune:
        prune_worker_files(worker)


def collect_worker_state(worker: CheckpointedWorker) -> dict[str, Any]:
    """State of the worker besides weights, optimizer and rewards."""
    return {
        **{name: getattr(worker, name) for name in _SAVED_ATTRIBUTES},
        "intake": worker.experience_reader.state_dict(),
        "baseline": worker.baseline.state_dict(),
        "fresh": dict(worker.rollouts.counts) if worker.rollouts is not None else {},
        "last_record": worker.log_reader.last_number,
        "referenced": sorted(worker.referenced),
        "needed": worker.first_needed_record,
    }


def restore_worker(worker: CheckpointedWorker, state: Mapping[str, Any]) -> bool:
    """Load a checkpoint; returns True where it was to be followed by `prune_worker_files`.

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
    for name in _SAVED_ATTRIBUTES:
        setattr(worker, name, saved[name])
    worker.past = list(saved["past"])
    worker.experience_reader.load_state_dict(
        saved["intake"], _load_buffered_experiences(worker, saved)
    )
    worker.log_reader = ExperienceLogReader(worker.log, after=saved["last_record"])
    worker.referenced, worker.first_needed_record = set(saved["referenced"]), int(saved["needed"])
    restore_rng_state(state["rng"])
    return bool(saved["prune"])


def prune_worker_files(worker: CheckpointedWorker) -> None:
    """Remove snapshots and segments that nothing refers to any more. The gate compares with the champion: it stays."""
    referenced = (
        {CHAMPION_VERSION}
        | worker.buffer.collect_referenced_versions()
        | {worker.live, worker.served, *worker.past[-1:]}
    )
    referenced |= {worker.held} if worker.held is not None else set()
    # the checkpoint before this one may still be resumed from, where this one turns out to be damaged
    snapshots, keep = worker.learner.snapshots, worker.settings.update.keep_snapshots
    snapshots.prune_snapshots(keep, referenced | worker.referenced, newest=worker.updates)
    worker.referenced = referenced
    if not worker.settings.buffer.keep_segments:
        _remove_read_segments(worker)
    inject_fault("online.pruned")


def _remove_read_segments(worker: CheckpointedWorker) -> None:
    """Remove segments whose records are read, and gone from the buffer since two checkpoints; the last stays."""
    first = worker.buffer.find_first_number()
    limit = (
        worker.log_reader.last_number
        if first is None
        else min(first, worker.log_reader.last_number)
    )
    for (_, path), (following, _) in pairwise(list_segments(worker.log)):
        if following <= min(limit, worker.first_needed_record):
            path.unlink(missing_ok=True)
    worker.first_needed_record = limit


def _check_fingerprint(worker: CheckpointedWorker, saved: Mapping[str, Any]) -> None:
    if saved != worker.fingerprint:
        names = {*saved, *worker.fingerprint}
        changed = sorted(name for name in names if saved.get(name) != worker.fingerprint.get(name))
        raise ResumeRefused(
            f"{worker.store.folder}: was made with another {', '.join(changed)}; put the old settings back, or go on "
            "in another folder"
        )


def _load_buffered_experiences(
    worker: CheckpointedWorker, saved: Mapping[str, Any]
) -> dict[int, Experience]:
    """The buffer's experiences, from the log. Raises: CorruptError where the log is another one."""
    intake, last = saved["intake"], saved["last_record"]
    wanted = dict(zip(intake["buffer"]["numbers"], intake["buffer"]["digests"], strict=True))
    found = {}
    for record in ExperienceLogReader(
        worker.log, after=min(wanted, default=last) - 1
    ).read_records():
        expected = wanted.get(
            record.number, intake["last_digest"] if record.number == last else None
        )
        if expected is not None and digest_record(record) != expected:
            raise CorruptError(
                f"{worker.log}: record {record.number} is another one than was learned from"
            )
        if record.number in wanted:
            found[record.number] = record.parse_experience()
        if record.number >= last:
            break
    if wanted.keys() - found.keys():
        raise CheckpointError(
            f"{worker.log}: {len(wanted) - len(found)} records of the buffer are gone, the first is "
            f"{min(wanted.keys() - found.keys())}; put the log back, or begin in a new folder"
        )
    return found


logger = logging.getLogger(__name__)

# signals about the weights that learn; the others are about the ones that answer
_LEARNING_SIGNALS = ("kl",)
_MAX_PAST_VERSIONS = 100  # versions that were live before, kept to go back to


class UpdateWorker:
    """One worker of one folder; a context manager that holds the folder of its checkpoints."""

    def __init__(
        self,
        folder: Path | str,
        log: Path | str,
        learner: GuardedLearner,
        scorer: ExperienceScorer,
        settings: OnlineSettings,
        *,
        vocab_size: int,
        rollouts: FreshRolloutSampler | None = None,
        audit: UpdateAudit | None = None,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            folder: of the checkpoints. log: of the experience log, which another process may write.
            rollouts: sampler of fresh answers; None = the recorded ones are learned from.
            fingerprint: of settings and starting model; a checkpoint of another one is refused.
        """
        self.store = CheckpointStore(folder)
        self.log = Path(log)
        self.learner, self.scorer, self.settings = learner, scorer, settings
        self.rollouts, self.audit = rollouts, audit
        self.fingerprint = dict(fingerprint or {})
        self.experience_reader = ExperienceReader(
            settings, vocab_size, on_alarm=self._pause_on_alarm, on_order=self._follow_order
        )
        self.buffer, self.drift = self.experience_reader.buffer, self.experience_reader.drift
        self.precision, self.counts = (
            self.experience_reader.precision,
            self.experience_reader.counts,
        )
        self.baseline = RunningRewardBaseline(settings.update.baseline_decay)
        self.log_reader = ExperienceLogReader(self.log)
        self.updates = 0  # due so far, refused ones included: the policy version
        self.served = 0  # version of the last snapshot
        self.in_snapshot = 0  # updates taken that it holds
        self.live = 0  # version that an order of the log named as proven
        self.past: list[int] = []  # versions that were live before it, the newest last
        self.held: int | None = None  # candidate of the gate, which stays on the disk
        self.paused = ""  # why nothing is learned; "" = learning
        self.last_report: UpdateReport | None = None
        self.signals: list[tuple[str, float]] = []  # of the present update, for the alarms
        # versions that the checkpoint before the last one referred to
        self.referenced: set[int] = set()
        self.first_needed_record = 0  # first record that it needs

    def __enter__(self) -> UpdateWorker:
        self.store.__enter__()
        try:
            self._load_or_start()
        except BaseException:
            self.store.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.store.__exit__(*error)

    @property
    def records(self) -> int:
        """Answers and labels read so far; orders do not count."""
        return self.experience_reader.records

    # Steps

    def step(self) -> bool:
        """Read the records that are there, up to the next update, and make it if it is due; False = there were none."""
        had = False
        for record in self.log_reader.read_records():
            had = True
            self._process_record(record)
            if self.records == self._count_records_until_update():
                self._run_update()
                break
        return had

    def _count_records_until_update(self) -> int:
        """Records after which the next update is made."""
        return self.settings.update.first_update + self.updates * self.settings.update.update_every

    def _process_record(self, record: ExperienceLogRecord) -> None:
        self.experience_reader.process_record(record, self.log, self.updates, self.live)

    # Orders and alarms

    def _follow_order(self, order: Mapping[str, Any]) -> None:
        """Follow an order of the log.

        `{"order": "resume"}` ends a pause; `{"order": "hold", "version": v}` keeps a snapshot on the disk while the
        gate tests it; `{"order": "live", "version": v}` names one that is proven.
        """
        name, version = order.get("order"), order.get("version")
        is_there = version in self.learner.snapshots.list_versions()
        if name == "resume":
            self.paused = ""
            self.learner.refused_in_row = 0
            self.drift.reset()
        elif name == "hold" and is_there:
            self.held = int(version)  # type: ignore[arg-type]
        elif name == "live" and self.paused:
            raise DataError(f"order: {dict(order)!r:.200} comes while learning is paused")
        elif name == "live" and is_there:
            self._set_live_version(int(version))  # type: ignore[arg-type]
        else:
            raise DataError(
                f"order: {dict(order)!r:.200} is unknown, or names a snapshot that is not there"
            )

    def _set_live_version(self, version: int) -> None:
        try:
            self.learner.snapshots.set_live_version(version)
        except CheckpointError as error:
            raise DataError(f"order: {error}") from error
        if version != self.live:
            self.past = [*self.past, self.live][-_MAX_PAST_VERSIONS:]
        self.live, self.held = version, None

    def _pause_on_alarm(self, signal: str, reason: str) -> None:
        """Pause; where the answers have changed, go back to the snapshot that was live before as well."""
        if signal not in _LEARNING_SIGNALS and (before := self._list_proven_versions()):
            self.live = before[0]
        self._pause_learning(reason)

    def _list_proven_versions(self) -> list[int]:
        """Snapshots on the disk that were live before the present one, the newest first."""
        there = self.learner.snapshots.list_versions()
        return [
            version for version in reversed(self.past) if version in there and version != self.live
        ]

    def _pause_learning(self, reason: str) -> None:
        """Stop learning and go back to the live snapshot; where it cannot be read, to the newest before it that can."""
        self.paused = reason
        self.counts["pauses"] += 1
        logger.warning("learning pauses: %s", reason)
        for version in dict.fromkeys([self.live, *self._list_proven_versions(), CHAMPION_VERSION]):
            if (weights := self.learner.snapshots.load_weights_if_valid(version)) is not None:
                break
            logger.warning("snapshot %d is not there to go back to", version)
        else:
            logger.warning("no snapshot can be read: the weights stay as they are")
            return
        self.live = version
        self.past = self.past[: self.past.index(version)] if version in self.past else self.past
        self.learner.restart_from_weights(weights)
        self.in_snapshot = self.learner.num_taken
        self.learner.snapshots.set_live_version(version)

    # Updates

    def _run_update(self) -> None:
        number = self.updates + 1
        task: UpdateTask | None = None
        self.signals = []
        self.buffer.evict_outdated(self.live)
        if self.paused or not self.buffer.num_drawable:
            report = self.learner.refuse_update(
                UpdateReport(number), "paused" if self.paused else "empty"
            )
        else:
            task = self._build_update_task(number)
            report = self.learner.apply_update(task)
            for item in task.items:
                self.buffer.record_error(item.buffered.experience.request_id, item.error)
        self.updates = number
        self.last_report = report
        inject_fault("online.updated")
        self._finish_update(report, task)

    def _finish_update(self, report: UpdateReport, task: UpdateTask | None) -> None:
        settings = self.settings.update
        if self.audit is not None:
            self.audit.enqueue_update(report, task)
        kl = report.kl_control.get("mean_kl")
        if kl is not None and not report.refused:
            self.signals.append(("kl", kl / self.settings.drift.max_kl))
        for signal, value in self.signals:
            self.experience_reader.observe_signal(signal, value)
        if not self.paused and self.learner.refused_in_row >= settings.max_refused:
            self._pause_learning(
                f"{self.learner.refused_in_row} updates in a row were refused, the last one: {report.refused}"
            )
        # the gate must not spend its error on what it knows already
        is_new = self.learner.num_taken > self.in_snapshot
        if self.updates % settings.snapshot_every == 0 and not self.paused and is_new:
            self._publish_snapshot()
        if self.updates % settings.checkpoint_every == 0:
            self.save_checkpoint(prune=True)

    def _build_update_task(self, number: int) -> UpdateTask:
        settings, buffer = self.settings.update, self.settings.buffer
        rng = np.random.default_rng([self.settings.seed, number])
        beta = compute_sampling_beta(
            number - 1, start=buffer.beta_start, updates=buffer.beta_updates
        )
        drawn = self.buffer.sample_experiences(settings.batch_size, beta, rng)
        different = {kept.number: kept for kept in drawn.experiences}
        longest = self.buffer.count_longest_answer_tokens()
        fresh = (
            self.rollouts.sample_rollouts(list(different.values()), number, self.live, longest)
            if self.rollouts
            else {}
        )
        learned = {
            kept.number: fresh.get(kept.number, kept.experience) for kept in drawn.experiences
        }
        pairs = [
            (learned[kept.number], kept.label)
            for kept in different.values()
            if kept.label is not None
        ]
        tables = dict(zip(different, self.scorer.score_experiences(pairs), strict=True))
        items = []
        for kept, weight in zip(drawn.experiences, drawn.weights, strict=True):
            item = self._build_scored_experience(
                kept, learned[kept.number], weight, tables[kept.number]
            )
            items += [item] if item is not None else []
        self._record_signals(different.values(), tables)
        for number_of, found in tables.items():
            self._record_rewards(different[number_of], found)
        rate = compute_adaptive_learning_rate(
            compute_rms_error(items),
            base=settings.learning_rate,
            reference=settings.reference_error,
            low=settings.min_learning_rate,
            high=settings.max_learning_rate,
        )
        return UpdateTask(number, tuple(items), rate, self.learner.kl_coef)

    def _build_scored_experience(
        self,
        kept: BufferedExperience,
        experience: Experience,
        weight: float,
        found: RewardTable | str,
    ) -> ScoredExperience | None:
        if isinstance(found, str) or kept.label is None:
            self.buffer.record_error(kept.experience.request_id, 0.0)
            return None
        advantages_R, errors_R = compute_request_advantages(
            found.totals_R,
            found.is_known_R,
            self.baseline.read_mean(kept.experience.environment_level),
            self.settings.update.algorithm,
        )
        return ScoredExperience(kept, experience, kept.label, weight, found, advantages_R, errors_R)

    def _record_signals(
        self, drawn: Iterable[BufferedExperience], tables: Mapping[int, RewardTable | str]
    ) -> None:
        """Signals of the experiences that are learned from for the first time."""
        watched, new = (
            self.settings.drift.watched,
            [kept for kept in drawn if kept.times_learned == 0],
        )
        if "champion_kl" in watched:
            kl = measure_champion_kl(
                self.learner.model,
                self.learner.optimizer_step,
                self.learner.snapshots,
                [kept.experience for kept in new],
                pad_id=self.learner.pad_id,
            )
            if kl is not None:
                self.signals.append(("champion_kl", kl / self.settings.drift.max_champion_kl))
        for found in (tables[kept.number] for kept in new):
            share = None if isinstance(found, str) else measure_component_misranking(found)
            self.signals += [("components", share)] if share is not None else []

    def _record_rewards(self, kept: BufferedExperience, found: RewardTable | str) -> None:
        """The running mean takes each experience in once, under its first label that tells."""
        if isinstance(found, str):
            self.counts["unscorable"] += 1
            logger.warning("request %s cannot be scored: %s", kept.experience.request_id, found)
        elif kept.times_learned == 0 and found.is_known_R.any():
            self.baseline.add_reward(
                kept.experience.environment_level, float(found.totals_R[found.is_known_R].mean())
            )

    # Disk

    def _publish_snapshot(self) -> None:
        facts = {
            "updates": self.updates,
            "records": self.records,
            "last_record": self.log_reader.last_number,
            "last_digest": self.experience_reader.last_digest,
            "first_record": self.buffer.find_first_number() or 0,
            "parent": self.served,
        }
        self.learner.snapshots.publish_snapshot(
            self.updates, self.learner.copy_served_weights(), facts
        )
        self.served, self.in_snapshot = self.updates, self.learner.num_taken

    def save_checkpoint(self, *, prune: bool = False) -> None:
        """Publish a checkpoint. With `prune`, then remove snapshots and segments that nothing refers to any more."""
        save_worker_checkpoint(self, prune=prune)

    def _collect_state(self) -> dict[str, Any]:
        return collect_worker_state(self)

    def _load_or_start(self) -> None:
        state = self.store.load_latest()
        if state is None:
            first = find_oldest_number(self.log)
            if first is not None and first > 1:
                raise DataError(
                    f"{self.log}: begins with record {first}; the earlier ones were removed after they were learned "
                    "from, so there is nothing to begin with but the checkpoint of that worker (buffer.keep_segments)"
                )
            self.learner.snapshots.publish_snapshot(
                0, self.learner.copy_served_weights(), {"updates": 0}
            )
            if self.learner.snapshots.read_live_version() is None:
                self.learner.snapshots.set_live_version(0)
        elif restore_worker(self, state):  # it may have been killed before it pruned
            prune_worker_files(self)

    def collect_metrics(self) -> dict[str, float]:
        """All numbers of the worker, by metric name."""
        report = self.last_report
        found = {
            "online/updates": float(self.updates),
            "online/snapshot_version": float(self.served),
            "online/live_version": float(self.live),
            "online/held_version": float(-1 if self.held is None else self.held),
            "online/paused": float(bool(self.paused)),
        }
        if report is not None and report.losses:
            found |= {f"online/loss/{name}": value for name, value in report.losses.items()}
            found |= {
                "online/grad_norm": report.gradients["norm"],
                "online/learning_rate": report.learning_rate,
            }
            found |= {"online/kl_target": report.kl_control["target_kl"]}
            if "mean_kl" in report.kl_control:
                found["online/mean_kl"] = report.kl_control["mean_kl"]
        for signal, value in self.signals:
            if signal == "champion_kl":
                found["online/champion_kl"] = value * self.settings.drift.max_champion_kl
        if self.rollouts is not None:
            found |= self.rollouts.collect_metrics()
        return found | self.learner.collect_metrics() | self.experience_reader.collect_metrics()
