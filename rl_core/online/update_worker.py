"""The update worker: takes records out of the log, learns from them, saves, publishes snapshots.

Everything it computes follows from the records and their order: update k is due when exactly
first_update + (k - 1) update_every records have been read, whenever they arrived. So a worker that lags, is killed and
resumed, or runs later over the recorded log computes the same numbers, to the last bit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.errors import CheckpointError, CorruptError, DataError, ResumeRefused
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.online.drift_detection import DriftMonitor
from rl_core.online.experience import Experience, check_experience
from rl_core.online.experience_buffer import ExperienceBuffer, KeptExperience, sampling_beta
from rl_core.online.experience_log import LogReader, LogRecord, oldest_number, segments
from rl_core.online.labelled_rewards import ExperienceScorer, RewardTable
from rl_core.online.labels import Label, PseudoLabelPrecision, prevailing, pseudo_label
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
from rl_core.online.voting import plain_text
from rl_core.settings import OnlineSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import fault
from rl_core.storage.manifest import digest_bytes
from rl_core.storage.rng_state import restore_rng, rng_state

__all__ = ["UpdateWorker"]

logger = logging.getLogger(__name__)


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
        audit: UpdateAudit | None = None,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            folder: of the checkpoints. log: of the experience log, which another process may write.
            fingerprint: of settings and starting model; a checkpoint of another one is refused.
        """
        self.store = CheckpointStore(folder)
        self.log = Path(log)
        self.learner, self.scorer, self.settings = learner, scorer, settings
        self.vocab_size = vocab_size
        self.audit = audit
        self.fingerprint = dict(fingerprint or {})
        self.buffer = ExperienceBuffer(settings.buffer)
        self.drift = DriftMonitor(settings.drift)
        self.baseline = RunningBaseline(settings.update.baseline_decay)
        self.precision = PseudoLabelPrecision()
        self.reader = LogReader(self.log)
        self.records = 0  # read so far
        self.updates = 0  # due so far, refused ones included: the policy version
        self.served = 0  # version of the last snapshot
        self.live = 0  # version that an order of the log named as proven; an alarm goes back to it
        self.paused = ""  # why nothing is learned; "" = learning
        self.counts: Counter[str] = Counter()
        self.last_report: UpdateReport | None = None
        self._last_digest = ""
        self._referenced: set[int] = set()  # versions that the checkpoint before the last one referred to
        self._needed = 0  # first record that it needs

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

    def run_to_end(self) -> None:
        """Everything that the log holds by now, then save."""
        while self.step():
            pass
        self.save()

    def _due(self) -> int:
        """Records after which the next update is made."""
        return self.settings.update.first_update + self.updates * self.settings.update.update_every

    # Records

    def _take_in(self, record: LogRecord) -> None:
        self.records += 1
        self._last_digest = _digest(record)
        try:
            if record.kind == "experience":
                self._take_experience(record)
            elif record.kind == "label":
                self._take_label(*record.label())
            else:
                self._take_order(record.value)
        except (DataError, TypeError, ValueError, KeyError, AttributeError) as error:  # of values of another type
            self.counts["refused"] += 1
            logger.warning("record %d of %s is left out: %s", record.number, self.log, error)

    def _take_experience(self, record: LogRecord) -> None:
        experience = record.experience()
        check_experience(experience, vocab_size=self.vocab_size, max_tokens=self.settings.buffer.max_tokens)
        if experience.policy_version > self.updates:
            raise DataError(
                f"policy_version: {experience.policy_version} comes from a later update than {self.updates}, the last "
                "one here; the log belongs to another worker"
            )
        self._observe_traffic(experience)
        label = self._first_label(experience)
        self.counts["experiences"] += self.buffer.add(
            record.number, experience, label, version=self.updates, digest=self._last_digest
        )

    def _first_label(self, experience: Experience) -> Label | None:
        labels = self.settings.labels
        found = self._consensus(experience) if labels.use_consensus else None
        if found is not None:
            self.counts["pseudo_labels"] += 1
            return found
        return Label("played", "environment") if labels.trust_environment else None

    def _consensus(self, experience: Experience) -> Label | None:
        labels = self.settings.labels
        return pseudo_label(
            experience.vote,
            min_confidence=labels.min_confidence,
            min_votes=labels.min_votes,
            confidence=labels.confidence,
        )

    def _take_label(self, request_id: str, label: Label) -> None:
        kept = self.buffer.find(request_id)
        if kept is None:
            self.counts["labels_without_experience"] += 1
            return
        self.counts["labels"] += 1
        chosen = prevailing(kept.label, label)
        if chosen is not label:
            return
        if label.source == "feedback":
            self._judge(kept, label)
        self.buffer.set_label(request_id, label)

    def _judge(self, kept: KeptExperience, label: Label) -> None:
        """Precision of the pseudo-label, and success of the answer that was given."""
        consensus = self._consensus(kept.experience)
        if consensus is not None:
            self.precision.take_back(kept.agreed)
            kept.agreed = self.precision.observe(consensus, label)
        given = kept.experience.vote.answer
        if label.kind == "answer" and label.text is not None:
            self._observe("success", float(given is not None and plain_text(given) == plain_text(label.text)))
        elif label.score is not None:
            self._observe("success", max(0.0, label.score))

    def _take_order(self, order: Mapping[str, Any]) -> None:
        """`{"order": "resume"}` ends a pause; `{"order": "live", "version": v}` names a snapshot that is proven."""
        name = order.get("order")
        if name == "resume":
            self.paused = ""
            self.learner.refused_in_row = 0
            self.drift.reset()
        elif name == "live" and order.get("version") in self.learner.snapshots.versions():
            self._go_live(int(order["version"]))
        else:
            raise DataError(f"order: {dict(order)!r:.200} is unknown, or names a snapshot that is not there")

    def _go_live(self, version: int) -> None:
        try:
            self.learner.snapshots.point_to(version)
        except CheckpointError as error:
            raise DataError(f"order: {error}") from error
        self.live = version

    # Alarms

    def _observe_traffic(self, experience: Experience) -> None:
        drift, turns = self.settings.drift, [t for r in experience.rollouts for t in r.trajectory.turns]
        tokens = sum(sum(rollout.loss_mask) for rollout in experience.rollouts) / len(experience.rollouts)
        self._observe("confidence", experience.vote.confidence)
        self._observe("length", tokens / drift.max_length)
        self._observe("refusals", sum(turn.is_error for turn in turns) / max(1, len(turns)))

    def _observe(self, signal: str, value: float) -> None:
        alarm = self.drift.observe(signal, value)
        if alarm is not None:
            self._pause(f"drift: {alarm}")

    def _pause(self, why: str) -> None:
        """Stop learning and go back to the last proven snapshot."""
        self.paused = why
        self.counts["pauses"] += 1
        weights = self.learner.snapshots.find_weights(self.live)
        logger.warning("learning pauses: %s", why)
        if weights is None:
            logger.warning("snapshot %d is not there to go back to; the weights stay as they are", self.live)
        else:
            self.learner.restart_from(weights)
            self.learner.snapshots.point_to(self.live)

    # Updates

    def _update(self) -> None:
        number = self.updates + 1
        task: UpdateTask | None = None
        self.buffer.evict_old(self.updates)
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
            self._observe("kl", kl / self.settings.drift.max_kl)
        if not self.paused and self.learner.refused_in_row >= settings.max_refused:
            self._pause(f"{self.learner.refused_in_row} updates in a row were refused, the last one: {report.refused}")
        if self.updates % settings.snapshot_every == 0 and not self.paused:
            self._publish()
        if self.updates % settings.checkpoint_every == 0:
            self.save(prune=True)

    def _task(self, number: int) -> UpdateTask:
        settings, buffer = self.settings.update, self.settings.buffer
        rng = np.random.default_rng([self.settings.seed, number])
        beta = sampling_beta(number - 1, start=buffer.beta_start, updates=buffer.beta_updates)
        drawn = self.buffer.draw(settings.batch_size, beta, rng)
        different = {kept.number: kept for kept in drawn.kept}
        pairs = [(kept.experience, kept.label) for kept in different.values() if kept.label is not None]
        tables = dict(zip(different, self.scorer.score(pairs), strict=True))
        items = []
        for kept, weight in zip(drawn.kept, drawn.weights, strict=True):
            item = self._scored(kept, weight, tables[kept.number])
            items += [item] if item is not None else []
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

    def _scored(self, kept: KeptExperience, weight: float, found: RewardTable | str) -> ScoredExperience | None:
        if isinstance(found, str) or kept.label is None:
            self.buffer.learned(kept.experience.request_id, 0.0)
            return None
        advantages_R, errors_R = request_advantages(
            found.totals_R,
            found.is_known_R,
            self.baseline.value(kept.experience.place),
            self.settings.update.algorithm,
        )
        return ScoredExperience(kept, kept.label, weight, found, advantages_R, errors_R)

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
            "parent": self.served,
        }
        self.learner.snapshots.publish(self.updates, self.learner.served_weights(), facts)
        self.served = self.updates

    def save(self, *, prune: bool = False) -> None:
        """Publish a checkpoint. With `prune`, then remove snapshots and segments that nothing refers to any more.

        Which snapshots are there decides how the old distribution is known, so they are removed after the same updates
        in every run over the same records: not where a worker happens to be stopped.
        """
        self.store.save(
            {
                "model": dict(trainable_weights(self.learner.model)),
                "learner": self.learner.state_dict(),
                "worker": {**self._state(), "prune": prune},
                "rewards": self.scorer.rewards.state_dict(),
                "rng": rng_state(),
                "fingerprint": self.fingerprint,
            }
        )
        fault("online.saved")
        if prune:
            self._prune()

    def _prune(self) -> None:
        referenced = self.buffer.referenced_versions() | {self.live, self.served}
        # the checkpoint before this one may still be resumed from, where this one turns out to be damaged
        self.learner.snapshots.prune(self.settings.update.keep_snapshots, referenced | self._referenced)
        self._referenced = referenced
        if not self.settings.buffer.keep_segments:
            self._remove_segments()
        fault("online.pruned")

    def _remove_segments(self) -> None:
        """Remove segments whose records are read, and gone from the buffer since two checkpoints; the last stays."""
        needed = self.buffer.first_number()
        limit = self.reader.last if needed is None else min(needed, self.reader.last)
        for (_, path), (following, _) in pairwise(segments(self.log)):
            if following <= min(limit, self._needed):
                path.unlink(missing_ok=True)
        self._needed = limit

    def _state(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer.state_dict(),
            "drift": self.drift.state_dict(),
            "baseline": self.baseline.state_dict(),
            "precision": [self.precision.agreed, self.precision.disagreed],
            "records": self.records,
            "updates": self.updates,
            "served": self.served,
            "live": self.live,
            "paused": self.paused,
            "counts": dict(self.counts),
            "last_record": self.reader.last,
            "last_digest": self._last_digest,
            "referenced": sorted(self._referenced),
            "needed": self._needed,
        }

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
            return
        self._resume(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self.fingerprint:
            changed = sorted(
                name
                for name in {*state["fingerprint"], *self.fingerprint}
                if state["fingerprint"].get(name) != self.fingerprint.get(name)
            )
            raise ResumeRefused(
                f"{self.store.folder}: was made with another {', '.join(changed)}; put the old settings back, or go on "
                "in another folder"
            )
        worker = state["worker"]
        load_trainable_weights(self.learner.model, state["model"])
        self.learner.load_state_dict(state["learner"])
        self.scorer.rewards.load_state_dict(state["rewards"])
        self.drift.load_state_dict(worker["drift"])
        self.baseline.load_state_dict(worker["baseline"])
        self.precision = PseudoLabelPrecision(*worker["precision"])
        for name in ("records", "updates", "served", "live", "paused"):
            setattr(self, name, worker[name])
        self.counts = Counter(worker["counts"])
        self._last_digest = worker["last_digest"]
        self.buffer.load_state_dict(worker["buffer"], self._experiences(worker))
        self.reader = LogReader(self.log, after=worker["last_record"])
        self._referenced, self._needed = set(worker["referenced"]), int(worker["needed"])
        restore_rng(state["rng"])
        if worker["prune"]:  # it may have been killed before it did
            self._prune()

    def _experiences(self, worker: Mapping[str, Any]) -> dict[int, Experience]:
        """The buffer's experiences, from the log. Raises: CorruptError where the log is another one."""
        last = worker["last_record"]
        wanted = dict(zip(worker["buffer"]["numbers"], worker["buffer"]["digests"], strict=True))
        found = {}
        for record in LogReader(self.log, after=min(wanted, default=last) - 1).read():
            expected = wanted.get(record.number, worker["last_digest"] if record.number == last else None)
            if expected is not None and _digest(record) != expected:
                raise CorruptError(f"{self.log}: record {record.number} is another one than was learned from")
            if record.number in wanted:
                found[record.number] = record.experience()
            if record.number >= last:
                break
        if wanted.keys() - found.keys():
            raise CheckpointError(
                f"{self.log}: {len(wanted) - len(found)} records of the buffer are gone, the first is "
                f"{min(wanted.keys() - found.keys())}; put the log back, or begin in a new folder"
            )
        return found

    def metrics(self) -> dict[str, float]:
        """All numbers of the worker, by metric name."""
        report = self.last_report
        found = {
            "online/records": float(self.records),
            "online/updates": float(self.updates),
            "online/snapshot_version": float(self.served),
            "online/paused": float(bool(self.paused)),
            **{f"online/count/{name}": float(count) for name, count in sorted(self.counts.items())},
        }
        if report is not None and report.losses:
            found |= {f"online/loss/{name}": value for name, value in report.losses.items()}
            found |= {"online/grad_norm": report.gradients["norm"], "online/learning_rate": report.learning_rate}
            found |= {"online/kl_target": report.kl_control["target_kl"]}
            if "mean_kl" in report.kl_control:
                found["online/mean_kl"] = report.kl_control["mean_kl"]
        return found | self.learner.metrics() | self.buffer.metrics() | self.drift.metrics() | self.precision.metrics()


def _digest(record: LogRecord) -> str:
    text = repr((record.number, record.kind, sorted(record.value.items(), key=lambda pair: pair[0])))
    return digest_bytes(text.encode("utf-8", "surrogatepass"))
