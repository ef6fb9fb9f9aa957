"""The update worker: takes records out of the log, learns from them, saves, publishes snapshots.

Everything it computes follows from the records and their order: update k is due when exactly
first_update + (k - 1) update_every records have been read, whenever they arrived. So a worker that lags, is killed and
resumed, or runs later over the recorded log computes the same numbers, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.errors import CheckpointError, DataError
from rl_core.online.experience import Experience
from rl_core.online.experience_buffer import KeptExperience, sampling_beta
from rl_core.online.experience_log import LogReader, LogRecord, oldest_number
from rl_core.online.fresh_rollouts import FreshRollouts
from rl_core.online.labelled_rewards import ExperienceScorer, RewardTable
from rl_core.online.record_intake import RecordIntake
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_step import GuardedLearner, UpdateReport
from rl_core.online.update_task import (
    RunningBaseline,
    ScoredExperience,
    UpdateTask,
    adaptive_learning_rate,
    request_advantages,
    rms_error,
)
from rl_core.online.watched_signals import champion_kl, components_against_success
from rl_core.online.weight_snapshots import CHAMPION
from rl_core.online.worker_checkpoints import prune_worker, restore, save_worker, worker_state
from rl_core.settings import OnlineSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import fault

__all__ = ["UpdateWorker"]

logger = logging.getLogger(__name__)

_OF_LEARNING = ("kl",)  # signals about the weights that learn; the others are about the ones that answer
_PAST = 100  # versions that were live before, kept to go back to


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
        rollouts: FreshRollouts | None = None,
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
        self.intake = RecordIntake(settings, vocab_size, on_alarm=self._alarm, on_order=self._take_order)
        self.buffer, self.drift = self.intake.buffer, self.intake.drift
        self.precision, self.counts = self.intake.precision, self.intake.counts
        self.baseline = RunningBaseline(settings.update.baseline_decay)
        self.reader = LogReader(self.log)
        self.updates = 0  # due so far, refused ones included: the policy version
        self.served = 0  # version of the last snapshot
        self.in_snapshot = 0  # updates taken that it holds
        self.live = 0  # version that an order of the log named as proven
        self.past: list[int] = []  # versions that were live before it, the newest last
        self.held: int | None = None  # candidate of the gate, which stays on the disk
        self.paused = ""  # why nothing is learned; "" = learning
        self.last_report: UpdateReport | None = None
        self.signals: list[tuple[str, float]] = []  # of the present update, for the alarms
        self.referenced: set[int] = set()  # versions that the checkpoint before the last one referred to
        self.needed = 0  # first record that it needs

    def __enter__(self) -> UpdateWorker:
        self.store.__enter__()
        try:
            self._begin()
        except BaseException:
            self.store.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.store.__exit__(*error)

    @property
    def records(self) -> int:
        """Answers and labels read so far; orders do not count."""
        return self.intake.records

    # Steps

    def step(self) -> bool:
        """Read the records that are there, up to the next update, and make it if it is due; False = there were none."""
        had = False
        for record in self.reader.read():
            had = True
            self._take_in(record)
            if self.records == self._due():
                self._update()
                break
        return had

    def _due(self) -> int:
        """Records after which the next update is made."""
        return self.settings.update.first_update + self.updates * self.settings.update.update_every

    def _take_in(self, record: LogRecord) -> None:
        self.intake.take(record, self.log, self.updates, self.live)

    # Orders and alarms

    def _take_order(self, order: Mapping[str, Any]) -> None:
        """Follow an order of the log.

        `{"order": "resume"}` ends a pause; `{"order": "hold", "version": v}` keeps a snapshot on the disk while the
        gate tests it; `{"order": "live", "version": v}` names one that is proven.
        """
        name, version = order.get("order"), order.get("version")
        is_there = version in self.learner.snapshots.versions()
        if name == "resume":
            self.paused = ""
            self.learner.refused_in_row = 0
            self.drift.reset()
        elif name == "hold" and is_there:
            self.held = int(version)  # type: ignore[arg-type]
        elif name == "live" and self.paused:
            raise DataError(f"order: {dict(order)!r:.200} comes while learning is paused")
        elif name == "live" and is_there:
            self._go_live(int(version))  # type: ignore[arg-type]
        else:
            raise DataError(f"order: {dict(order)!r:.200} is unknown, or names a snapshot that is not there")

    def _go_live(self, version: int) -> None:
        try:
            self.learner.snapshots.point_to(version)
        except CheckpointError as error:
            raise DataError(f"order: {error}") from error
        if version != self.live:
            self.past = [*self.past, self.live][-_PAST:]
        self.live, self.held = version, None

    def _alarm(self, signal: str, why: str) -> None:
        """Pause; where the answers have changed, go back to the snapshot that was live before as well."""
        if signal not in _OF_LEARNING and (before := self._proven()):
            self.live = before[0]
        self._pause(why)

    def _proven(self) -> list[int]:
        """Snapshots on the disk that were live before the present one, the newest first."""
        there = self.learner.snapshots.versions()
        return [version for version in reversed(self.past) if version in there and version != self.live]

    def _pause(self, why: str) -> None:
        """Stop learning and go back to the live snapshot; where it cannot be read, to the newest before it that can."""
        self.paused = why
        self.counts["pauses"] += 1
        logger.warning("learning pauses: %s", why)
        for version in dict.fromkeys([self.live, *self._proven(), CHAMPION]):
            if (weights := self.learner.snapshots.find_weights(version)) is not None:
                break
            logger.warning("snapshot %d is not there to go back to", version)
        else:
            logger.warning("no snapshot can be read: the weights stay as they are")
            return
        self.live = version
        self.past = self.past[: self.past.index(version)] if version in self.past else self.past
        self.learner.restart_from(weights)
        self.in_snapshot = self.learner.taken
        self.learner.snapshots.point_to(version)

    # Updates

    def _update(self) -> None:
        number = self.updates + 1
        task: UpdateTask | None = None
        self.signals = []
        self.buffer.evict_old(self.live)
        if self.paused or not self.buffer.num_drawable:
            report = self.learner.refuse(UpdateReport(number), "paused" if self.paused else "empty")
        else:
            task = self._task(number)
            report = self.learner.update(task)
            for item in task.items:
                self.buffer.learned(item.kept.experience.request_id, item.error)
        self.updates = number
        self.last_report = report
        fault("online.updated")
        self._after(report, task)

    def _after(self, report: UpdateReport, task: UpdateTask | None) -> None:
        settings = self.settings.update
        if self.audit is not None:
            self.audit.write(report, task)
        kl = report.kl_control.get("mean_kl")
        if kl is not None and not report.refused:
            self.signals.append(("kl", kl / self.settings.drift.max_kl))
        for signal, value in self.signals:
            self.intake.observe(signal, value)
        if not self.paused and self.learner.refused_in_row >= settings.max_refused:
            self._pause(f"{self.learner.refused_in_row} updates in a row were refused, the last one: {report.refused}")
        is_new = self.learner.taken > self.in_snapshot  # the gate must not spend its error on what it knows already
        if self.updates % settings.snapshot_every == 0 and not self.paused and is_new:
            self._publish()
        if self.updates % settings.checkpoint_every == 0:
            self.save(prune=True)

    def _task(self, number: int) -> UpdateTask:
        settings, buffer = self.settings.update, self.settings.buffer
        rng = np.random.default_rng([self.settings.seed, number])
        beta = sampling_beta(number - 1, start=buffer.beta_start, updates=buffer.beta_updates)
        drawn = self.buffer.draw(settings.batch_size, beta, rng)
        different = {kept.number: kept for kept in drawn.kept}
        longest = self.buffer.longest_answer()
        fresh = self.rollouts.sample(list(different.values()), number, self.live, longest) if self.rollouts else {}
        learned = {kept.number: fresh.get(kept.number, kept.experience) for kept in drawn.kept}
        pairs = [(learned[kept.number], kept.label) for kept in different.values() if kept.label is not None]
        tables = dict(zip(different, self.scorer.score(pairs), strict=True))
        items = []
        for kept, weight in zip(drawn.kept, drawn.weights, strict=True):
            item = self._scored(kept, learned[kept.number], weight, tables[kept.number])
            items += [item] if item is not None else []
        self._note_signals(different.values(), tables)
        for number_of, found in tables.items():
            self._note_rewards(different[number_of], found)
        rate = adaptive_learning_rate(
            rms_error(items),
            base=settings.learning_rate,
            reference=settings.reference_error,
            low=settings.min_learning_rate,
            high=settings.max_learning_rate,
        )
        return UpdateTask(number, tuple(items), rate, self.learner.kl_coef)

    def _scored(
        self, kept: KeptExperience, experience: Experience, weight: float, found: RewardTable | str
    ) -> ScoredExperience | None:
        if isinstance(found, str) or kept.label is None:
            self.buffer.learned(kept.experience.request_id, 0.0)
            return None
        advantages_R, errors_R = request_advantages(
            found.totals_R,
            found.is_known_R,
            self.baseline.value(kept.experience.place),
            self.settings.update.algorithm,
        )
        return ScoredExperience(kept, experience, kept.label, weight, found, advantages_R, errors_R)

    def _note_signals(self, drawn: Iterable[KeptExperience], tables: Mapping[int, RewardTable | str]) -> None:
        """Signals of the experiences that are learned from for the first time."""
        watched, new = self.settings.drift.watched, [kept for kept in drawn if kept.times_learned == 0]
        if "champion_kl" in watched:
            kl = champion_kl(
                self.learner.model, self.learner.optimizer_step, self.learner.snapshots,
                [kept.experience for kept in new], pad_id=self.learner.pad_id,
            )  # fmt: skip
            if kl is not None:
                self.signals.append(("champion_kl", kl / self.settings.drift.max_champion_kl))
        for found in (tables[kept.number] for kept in new):
            share = None if isinstance(found, str) else components_against_success(found)
            self.signals += [("components", share)] if share is not None else []

    def _note_rewards(self, kept: KeptExperience, found: RewardTable | str) -> None:
        """The running mean takes each experience in once, under its first label that tells."""
        if isinstance(found, str):
            self.counts["unscorable"] += 1
            logger.warning("request %s cannot be scored: %s", kept.experience.request_id, found)
        elif kept.times_learned == 0 and found.is_known_R.any():
            self.baseline.update(kept.experience.place, float(found.totals_R[found.is_known_R].mean()))

    # Disk

    def _publish(self) -> None:
        facts = {
            "updates": self.updates,
            "records": self.records,
            "last_record": self.reader.last,
            "last_digest": self.intake.last_digest,
            "first_record": self.buffer.first_number() or 0,
            "parent": self.served,
        }
        self.learner.snapshots.publish(self.updates, self.learner.served_weights(), facts)
        self.served, self.in_snapshot = self.updates, self.learner.taken

    def save(self, *, prune: bool = False) -> None:
        """Publish a checkpoint. With `prune`, then remove snapshots and segments that nothing refers to any more."""
        save_worker(self, prune=prune)

    def _state(self) -> dict[str, Any]:
        return worker_state(self)

    def _begin(self) -> None:
        state = self.store.load_latest()
        if state is None:
            first = oldest_number(self.log)
            if first is not None and first > 1:
                raise DataError(
                    f"{self.log}: begins with record {first}; the earlier ones were removed after they were learned "
                    "from, so there is nothing to begin with but the checkpoint of that worker (buffer.keep_segments)"
                )
            self.learner.snapshots.publish(0, self.learner.served_weights(), {"updates": 0})
            if self.learner.snapshots.live() is None:
                self.learner.snapshots.point_to(0)
        elif restore(self, state):  # it may have been killed before it pruned
            prune_worker(self)

    def metrics(self) -> dict[str, float]:
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
            found |= {"online/grad_norm": report.gradients["norm"], "online/learning_rate": report.learning_rate}
            found |= {"online/kl_target": report.kl_control["target_kl"]}
            if "mean_kl" in report.kl_control:
                found["online/mean_kl"] = report.kl_control["mean_kl"]
        for signal, value in self.signals:
            if signal == "champion_kl":
                found["online/champion_kl"] = value * self.settings.drift.max_champion_kl
        if self.rollouts is not None:
            found |= self.rollouts.metrics()
        return found | self.learner.metrics() | self.intake.metrics()
