"""Update worker: reads records from the log, learns from them, saves checkpoints and publishes snapshots.

Everything it computes depends only on the records and their order: update k is due when exactly
first_update + (k - 1) update_every records have been read, whenever they arrived. So a worker that lags, is killed and
resumed, or runs later over the recorded log computes the same values, bit for bit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.errors import CheckpointError, CorruptError, DataError, ResumeRefused
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.online.drift_detection import measure_champion_kl, measure_component_misranking
from rl_core.online.experience import Experience
from rl_core.online.experience_buffer import (
    BufferedExperience,
    compute_sampling_beta,
)
from rl_core.online.experience_log import (
    ExperienceLogReader,
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

logger = logging.getLogger(__name__)

_SAVED_ATTRIBUTES = ("updates", "served", "in_snapshot", "live", "past", "held", "paused")
# Signals about the learning weights; all others are about the answering weights.
_LEARNING_SIGNALS = ("kl",)
_MAX_PAST_VERSIONS = 100  # formerly live versions, for rollbacks


class UpdateWorker:
    """Worker of one folder; a context manager that locks the folder of its checkpoints."""

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
        """Prepare a worker that has read nothing.

        Args:
            folder: of the checkpoints.
            log: of the experience log, which another process may write.
            rollouts: sampler of fresh answers; None = learn from the recorded ones.
            fingerprint: of settings and initial model; a checkpoint with another one is refused.
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
        self.precision = self.experience_reader.precision
        self.counts = self.experience_reader.counts
        self.baseline = RunningRewardBaseline(settings.update.baseline_decay)
        self.log_reader = ExperienceLogReader(self.log)
        self.updates = 0  # due so far, including refused ones: the policy version
        self.served = 0  # version of the last snapshot
        self.in_snapshot = 0  # number of applied updates in that snapshot
        self.live = 0  # version that an order in the log declared live
        self.past: list[int] = []  # formerly live versions, newest last
        self.held: int | None = None  # candidate of the gate, whose snapshot is retained
        self.paused = ""  # why learning is paused; "" = learning
        self.last_report: UpdateReport | None = None
        # Name, value and temperature of the current update's, for the alarms.
        self.signals: list[tuple[str, float, float]] = []
        self.referenced: set[int] = set()  # versions that the last checkpoint refers to
        self.first_needed_record = 0  # first record that the last checkpoint needs

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
        """Number of answers and labels read so far; orders do not count."""
        return self.experience_reader.records

    def step(self) -> bool:
        """Read the available records up to the next update, and run it if it is due; return False without records."""
        has_read = False
        for record in self.log_reader.read_records():
            has_read = True
            self.experience_reader.process_record(record, self.log, self.updates, self.live)
            if self.records == self._count_records_until_update():
                self._run_update()
                break
        return has_read

    def _count_records_until_update(self) -> int:
        """Return the number of records after which the next update is due."""
        return self.settings.update.first_update + self.updates * self.settings.update.update_every

    def _follow_order(self, order: Mapping[str, Any]) -> None:
        """Follow an order of the log.

        `{"order": "resume"}` ends a pause; `{"order": "hold", "version": v}` retains a snapshot while the gate tests
        it;
        `{"order": "live", "version": v}` makes a snapshot that passed the gate live.
        """
        name, version = order.get("order"), order.get("version")
        exists = version in self.learner.snapshots.list_versions()
        if name == "resume":
            self.paused = ""
            self.learner.refused_in_row = 0
            self.drift.reset()
        elif name == "hold" and exists:
            self.held = int(version)  # type: ignore[arg-type]
        elif name == "live" and self.paused:
            raise DataError(f"order: {dict(order)!r:.200} arrived while learning is paused")
        elif name == "live" and exists:
            self._set_live_version(int(version))  # type: ignore[arg-type]
        else:
            raise DataError(
                f"order: {dict(order)!r:.200} is unknown, or names a snapshot that does not exist"
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
        """Pause; if the answers have changed, also roll back to the snapshot that was live before."""
        earlier_versions = self._list_proven_versions()
        if signal not in _LEARNING_SIGNALS and earlier_versions:
            self.live = earlier_versions[0]
        self._pause_learning(reason)

    def _list_proven_versions(self) -> list[int]:
        """Return the existing snapshots that were live before the current one, newest first."""
        existing = self.learner.snapshots.list_versions()
        return [
            version
            for version in reversed(self.past)
            if version in existing and version != self.live
        ]

    def _pause_learning(self, reason: str) -> None:
        """Pause learning and restart from the live snapshot, or from the newest readable one before it."""
        self.paused = reason
        self.counts["pauses"] += 1
        logger.warning("learning pauses: %s", reason)
        for version in dict.fromkeys([self.live, *self._list_proven_versions(), CHAMPION_VERSION]):
            weights = self.learner.snapshots.load_weights_if_valid(version)
            if weights is not None:
                break
            logger.warning("cannot roll back to snapshot %d, which is not available", version)
        else:
            logger.warning("no snapshot can be read; the weights stay unchanged")
            return
        self.live = version
        if version in self.past:
            self.past = self.past[: self.past.index(version)]
        self.learner.restart_from_weights(weights)
        self.in_snapshot = self.learner.num_taken
        self.learner.snapshots.set_live_version(version)

    def _run_update(self) -> None:
        number = self.updates + 1
        task: UpdateTask | None = None
        self.signals = []
        self.buffer.evict_outdated(self.live)
        if self.paused or not self.buffer.num_drawable:
            reason = "paused" if self.paused else "empty"
            report = self.learner.refuse_update(UpdateReport(number), reason)
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
            self.signals.append(("kl", kl / self.settings.drift.max_kl, 1.0))
        for signal, value, temperature in self.signals:
            self.experience_reader.observe_signal(signal, value, temperature)
        if not self.paused and self.learner.refused_in_row >= settings.max_refused:
            self._pause_learning(
                f"{self.learner.refused_in_row} updates in a row were refused, the last one: {report.refused}"
            )
        # The gate must not spend its error on weights that it has already tested.
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
        distinct = {buffered.number: buffered for buffered in drawn.experiences}
        fresh: dict[int, Experience] = {}
        if self.rollouts:
            longest = self.buffer.count_longest_answer_tokens()
            fresh = self.rollouts.sample_rollouts(
                list(distinct.values()), number, self.live, longest
            )
        experiences = {key: fresh.get(key, distinct[key].experience) for key in distinct}
        pairs = [
            (experiences[key], buffered.label)
            for key, buffered in distinct.items()
            if buffered.label is not None
        ]
        tables = dict(zip(distinct, self.scorer.score_experiences(pairs), strict=True))
        items = []
        for buffered, weight in zip(drawn.experiences, drawn.weights, strict=True):
            key = buffered.number
            item = self._build_scored_experience(buffered, experiences[key], weight, tables[key])
            if item is not None:
                items.append(item)
        self._record_signals(distinct.values(), tables)
        for key, table in tables.items():
            self._record_rewards(distinct[key], table)
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
        buffered: BufferedExperience,
        experience: Experience,
        weight: float,
        table: RewardTable | str,
    ) -> ScoredExperience | None:
        if isinstance(table, str) or buffered.label is None:
            self.buffer.record_error(buffered.experience.request_id, 0.0)
            return None
        advantages_R, errors_R = compute_request_advantages(
            table.totals_R,
            table.is_known_R,
            self.baseline.read_mean(buffered.experience.environment_level),
            self.settings.update.algorithm,
        )
        return ScoredExperience(
            buffered, experience, buffered.label, weight, table, advantages_R, errors_R
        )

    def _record_signals(
        self, drawn: Iterable[BufferedExperience], tables: Mapping[int, RewardTable | str]
    ) -> None:
        """Compute the signals of the experiences that are learned from for the first time."""
        new = [buffered for buffered in drawn if buffered.times_learned == 0]
        if "champion_kl" in self.settings.drift.watched:
            # Temperatures apart, as a KL of flat distributions is smaller.
            for temperature in dict.fromkeys(buffered.experience.temperature for buffered in new):
                kl = measure_champion_kl(
                    self.learner.model,
                    self.learner.optimizer_step,
                    self.learner.snapshots,
                    [b.experience for b in new if b.experience.temperature == temperature],
                    pad_id=self.learner.pad_id,
                )
                if kl is not None:
                    value = kl / self.settings.drift.max_champion_kl
                    self.signals.append(("champion_kl", value, temperature))
        for buffered in new:
            table = tables[buffered.number]
            share = None if isinstance(table, str) else measure_component_misranking(table)
            if share is not None:
                self.signals.append(("components", share, buffered.experience.temperature))

    def _record_rewards(self, buffered: BufferedExperience, table: RewardTable | str) -> None:
        """Add each experience's rewards to the running mean once, under the first label that determines them."""
        experience = buffered.experience
        if isinstance(table, str):
            self.counts["unscorable"] += 1
            logger.warning("request %s cannot be scored: %s", experience.request_id, table)
        elif buffered.times_learned == 0 and table.is_known_R.any():
            mean_reward = float(table.totals_R[table.is_known_R].mean())
            self.baseline.add_reward(experience.environment_level, mean_reward)

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
        """Publish a checkpoint. With `prune`, then remove snapshots and segments that are no longer referenced."""
        save_worker_checkpoint(self, prune=prune)

    def _load_or_start(self) -> None:
        state = self.store.load_latest()
        if state is None:
            first = find_oldest_number(self.log)
            if first is not None and first > 1:
                raise DataError(
                    f"{self.log}: begins with record {first}; the earlier ones were removed after they were learned "
                    "from, so only the checkpoint of that worker can continue (buffer.keep_segments)"
                )
            initial_weights = self.learner.copy_served_weights()
            self.learner.snapshots.publish_snapshot(0, initial_weights, {"updates": 0})
            if self.learner.snapshots.read_live_version() is None:
                self.learner.snapshots.set_live_version(0)
        elif restore_worker(self, state):  # the worker may have been killed before pruning
            prune_worker_files(self)

    def collect_metrics(self) -> dict[str, float]:
        """Return all metrics of the worker by name."""
        report = self.last_report
        metrics = {
            "online/updates": float(self.updates),
            "online/snapshot_version": float(self.served),
            "online/live_version": float(self.live),
            "online/held_version": float(-1 if self.held is None else self.held),
            "online/paused": float(bool(self.paused)),
        }
        if report is not None and report.losses:
            metrics |= {f"online/loss/{name}": value for name, value in report.losses.items()}
            metrics["online/grad_norm"] = report.gradients["norm"]
            metrics["online/learning_rate"] = report.learning_rate
            for metric, name in (("online/kl_target", "target_kl"), ("online/mean_kl", "mean_kl")):
                if name in report.kl_control:
                    metrics[metric] = report.kl_control[name]
        for signal, value, _ in self.signals:
            if signal == "champion_kl":
                metrics["online/champion_kl"] = value * self.settings.drift.max_champion_kl
        if self.rollouts is not None:
            metrics |= self.rollouts.collect_metrics()
        return metrics | self.learner.collect_metrics() | self.experience_reader.collect_metrics()


def save_worker_checkpoint(worker: UpdateWorker, *, prune: bool = False) -> None:
    """Publish a checkpoint. With `prune`, then remove snapshots and segments that are no longer referenced.

    The existing snapshots determine which old distributions are known. So they are removed after the same updates in
    every
    run over the same records, not when a worker happens to stop.
    """
    state = {
        "model": dict(collect_trainable_weights(worker.learner.model)),
        "learner": worker.learner.state_dict(),
        "worker": {**collect_worker_state(worker), "prune": prune},
        "rewards": worker.scorer.rewards.state_dict(),
        "rng": collect_rng_state(),
        "fingerprint": worker.fingerprint,
    }
    worker.store.save_version(state)
    inject_fault("online.saved")
    if prune:
        prune_worker_files(worker)


def collect_worker_state(worker: UpdateWorker) -> dict[str, Any]:
    """Return the worker's state without weights, optimizer and rewards."""
    return {
        **{name: getattr(worker, name) for name in _SAVED_ATTRIBUTES},
        "intake": worker.experience_reader.state_dict(),
        "baseline": worker.baseline.state_dict(),
        "fresh": dict(worker.rollouts.counts) if worker.rollouts is not None else {},
        "last_record": worker.log_reader.last_number,
        "referenced": sorted(worker.referenced),
        "needed": worker.first_needed_record,
    }


def restore_worker(worker: UpdateWorker, state: Mapping[str, Any]) -> bool:
    """Load a checkpoint; return whether `prune_worker_files` has to follow.

    Raises: ResumeRefused for other settings; CheckpointError if the log lacks records of the buffer.
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
    experiences = _load_buffered_experiences(worker, saved)
    worker.experience_reader.load_state_dict(saved["intake"], experiences)
    worker.log_reader = ExperienceLogReader(worker.log, after=saved["last_record"])
    worker.referenced, worker.first_needed_record = set(saved["referenced"]), int(saved["needed"])
    restore_rng_state(state["rng"])
    return bool(saved["prune"])


def prune_worker_files(worker: UpdateWorker) -> None:
    """Remove snapshots and segments that are no longer referenced. The gate needs the champion, so it stays."""
    referenced = {CHAMPION_VERSION, worker.live, worker.served, *worker.past[-1:]}
    referenced |= worker.buffer.collect_referenced_versions()
    if worker.held is not None:
        referenced.add(worker.held)
    # Also keep what the previous checkpoint refers to, in case this one turns out to be damaged.
    snapshots, keep = worker.learner.snapshots, worker.settings.update.keep_snapshots
    snapshots.prune_snapshots(keep, referenced | worker.referenced, newest=worker.updates)
    worker.referenced = referenced
    if not worker.settings.buffer.keep_segments:
        _remove_read_segments(worker)
    inject_fault("online.pruned")


def _remove_read_segments(worker: UpdateWorker) -> None:
    """Remove segments with only records that are read and not in the buffer, now and at the previous checkpoint.

    The last segment stays.
    """
    first_needed = worker.log_reader.last_number
    first_buffered = worker.buffer.find_first_number()
    if first_buffered is not None:
        first_needed = min(first_buffered, first_needed)
    for (_, path), (next_number, _) in pairwise(list_segments(worker.log)):
        if next_number <= min(first_needed, worker.first_needed_record):
            path.unlink(missing_ok=True)
    worker.first_needed_record = first_needed


def _check_fingerprint(worker: UpdateWorker, saved: Mapping[str, Any]) -> None:
    if saved != worker.fingerprint:
        names = {*saved, *worker.fingerprint}
        changed = sorted(name for name in names if saved.get(name) != worker.fingerprint.get(name))
        raise ResumeRefused(
            f"{worker.store.folder}: was created with another {', '.join(changed)}; restore the old settings, or "
            "continue in another folder"
        )


def _load_buffered_experiences(
    worker: UpdateWorker, saved: Mapping[str, Any]
) -> dict[int, Experience]:
    """Load the buffer's experiences from the log. Raises: CorruptError if the log is not the same."""
    intake, last = saved["intake"], saved["last_record"]
    digests = dict(zip(intake["buffer"]["numbers"], intake["buffer"]["digests"], strict=True))
    experiences = {}
    reader = ExperienceLogReader(worker.log, after=min(digests, default=last) - 1)
    for record in reader.read_records():
        last_digest = intake["last_digest"] if record.number == last else None
        expected = digests.get(record.number, last_digest)
        if expected is not None and digest_record(record) != expected:
            raise CorruptError(
                f"{worker.log}: record {record.number} differs from the one that was learned from"
            )
        if record.number in digests:
            experiences[record.number] = record.parse_experience()
        if record.number >= last:
            break
    missing = digests.keys() - experiences.keys()
    if missing:
        raise CheckpointError(
            f"{worker.log}: {len(missing)} records of the buffer are missing, the first is {min(missing)}; restore "
            "the log, or start in a new folder"
        )
    return experiences
