"""Intake of log records: experiences get their first label and enter the buffer; feedback and signals are applied."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import DataError
from rl_core.online.drift_detection import DriftMonitor
from rl_core.online.experience import Experience, check_experience
from rl_core.online.experience_buffer import BufferedExperience, ExperienceBuffer
from rl_core.online.experience_log import ExperienceLogRecord
from rl_core.online.labels import (
    Label,
    PseudoLabelPrecision,
    choose_prevailing_label,
    create_pseudo_label,
)
from rl_core.online.voting import normalise_answer
from rl_core.settings import OnlineSettings
from rl_core.storage.manifest import digest_bytes

logger = logging.getLogger(__name__)


class ExperienceReader:
    """Worker's view of the traffic. Its state depends only on the records and their order."""

    def __init__(
        self,
        settings: OnlineSettings,
        vocab_size: int,
        *,
        on_alarm: Callable[[str, str], None],
        on_order: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Prepare an empty reader.

        Args:
            on_alarm: called with the signal and a sentence.
            on_order: called with an order; may raise DataError.
        """
        self.settings, self.vocab_size = settings, vocab_size
        self._on_alarm, self._on_order = on_alarm, on_order
        self.buffer = ExperienceBuffer(settings.buffer)
        self.drift = DriftMonitor(settings.drift)
        self.precision = PseudoLabelPrecision()
        # If False, pseudo-labels are measured but not learned from.
        self.trusts_consensus = settings.labels.use_consensus
        self.counts: Counter[str] = Counter()
        self.records = 0  # answers and labels read so far
        self.read_bytes = 0  # of all records
        self.last_digest = ""

    def process_record(
        self, record: ExperienceLogRecord, log_path: object, version: int, live: int
    ) -> None:
        """Process one record; an unusable one is counted and skipped.

        Args:
            log_path: for the warning.
            version: the worker's newest update.
            live: version that answers.
        """
        # Orders follow from updates and must not trigger any, so they do not count.
        self.records += record.kind != "control"
        self.read_bytes += record.size
        self.last_digest = digest_record(record)
        try:
            if record.kind == "experience":
                self._add_experience(record, version, live)
            elif record.kind == "label":
                self._apply_label(*record.parse_label())
            else:
                self._on_order(record.value)
        # The last four are raised for values of the wrong type.
        except (DataError, TypeError, ValueError, KeyError, AttributeError) as error:
            self.counts["refused"] += 1
            logger.warning("record %d of %s is skipped: %s", record.number, log_path, error)

    def observe_signal(self, signal: str, value: float, temperature: float = 1.0) -> None:
        """Pass a signal, of answers sampled at this temperature, to the drift monitor."""
        alarm = self.drift.observe(signal, value, temperature)
        if alarm is not None:
            self._on_alarm(signal, f"drift: {alarm}")

    def _add_experience(self, record: ExperienceLogRecord, version: int, live: int) -> None:
        experience = record.parse_experience()
        check_experience(
            experience, vocab_size=self.vocab_size, max_tokens=self.settings.buffer.max_tokens
        )
        if experience.policy_version > version:
            raise DataError(
                f"policy_version: {experience.policy_version} is of a later update than {version}, the latest of this "
                "worker; the log belongs to another worker"
            )
        self._observe_traffic(experience)
        label = self._choose_first_label(experience)
        self.counts["experiences"] += self.buffer.add_experience(
            record.number,
            experience,
            label,
            version=live,
            digest=self.last_digest,
            position=self.read_bytes,
        )

    def _observe_traffic(self, experience: Experience) -> None:
        rollouts = experience.rollouts
        turns = [turn for rollout in rollouts for turn in rollout.trajectory.turns]
        mean_tokens = sum(sum(rollout.loss_mask) for rollout in rollouts) / len(rollouts)
        signals = {
            "confidence": experience.vote.confidence,
            "length": mean_tokens / self.settings.drift.max_length,
            "refusals": sum(turn.is_error for turn in turns) / max(1, len(turns)),
        }
        for signal, value in signals.items():
            self.observe_signal(signal, value, experience.temperature)

    def _choose_first_label(self, experience: Experience) -> Label | None:
        label = self._create_consensus_label(experience) if self.trusts_consensus else None
        if label is not None:
            self.counts["pseudo_labels"] += 1
            return label
        return Label("played", "environment") if self.settings.labels.trust_environment else None

    def _create_consensus_label(self, experience: Experience) -> Label | None:
        labels = self.settings.labels
        return create_pseudo_label(
            experience.vote,
            min_confidence=labels.min_confidence,
            min_votes=labels.min_votes,
            confidence=labels.confidence,
        )

    def _apply_label(self, request_id: str, label: Label) -> None:
        buffered = self.buffer.find_experience(request_id)
        if buffered is None:
            self.counts["labels_without_experience"] += 1
            return
        self.counts["labels"] += 1
        chosen = choose_prevailing_label(buffered.label, label)
        if chosen is not label:
            return
        if label.source == "feedback":
            self._compare_with_feedback(buffered, label)
        self.buffer.set_label(request_id, label)
        self._review_trust()

    def _compare_with_feedback(self, buffered: BufferedExperience, label: Label) -> None:
        """Compare feedback with the pseudo-label (for its precision) and with the returned answer (for success)."""
        consensus = self._create_consensus_label(buffered.experience)
        if consensus is not None:
            self.precision.remove_observation(buffered.agreed)
            buffered.agreed = self.precision.observe(consensus, label)
        if buffered.label is not None and buffered.label.source == "feedback":
            return  # repeated feedback is not a change of the traffic
        returned_answer = buffered.experience.vote.answer
        if label.kind == "answer" and label.text is not None:
            is_right = returned_answer is not None and (
                normalise_answer(returned_answer) == normalise_answer(label.text)
            )
            value = float(is_right)
        elif label.score is not None:
            value = max(0.0, label.score)
        else:
            return
        self.observe_signal("success", value, buffered.experience.temperature)

    def _review_trust(self) -> None:
        """Drop the pseudo-labels when feedback shows that too few are right; use new ones again when it recovers."""
        labels = self.settings.labels
        trusts = labels.use_consensus and self.precision.is_at_least(labels.min_precision)
        if self.trusts_consensus and not trusts:
            num_dropped = self.buffer.drop_labels("consensus")
            self.counts["pseudo_labels_taken_back"] += num_dropped
            logger.warning(
                "pseudo-labels are no longer used: feedback confirmed %d of %d (labels.min_precision %g); "
                "%d in the buffer are dropped",
                self.precision.agreed,
                self.precision.agreed + self.precision.disagreed,
                labels.min_precision,
                num_dropped,
            )
        elif trusts and not self.trusts_consensus:
            logger.warning("pseudo-labels are used again: feedback confirms enough of them")
        self.trusts_consensus = trusts

    def collect_metrics(self) -> dict[str, float]:
        """Return records, counts, and the metrics of buffer, alarms and pseudo-labels."""
        metrics = {
            "online/records": float(self.records),
            "online/trusts_consensus": float(self.trusts_consensus),
        }
        for name, count in sorted(self.counts.items()):
            metrics[f"online/count/{name}"] = float(count)
        metrics |= self.buffer.compute_metrics() | self.drift.compute_metrics()
        return metrics | self.precision.compute_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the experiences, which are in the log."""
        return {
            "buffer": self.buffer.state_dict(),
            "drift": self.drift.state_dict(),
            "precision": [self.precision.agreed, self.precision.disagreed],
            "trusts_consensus": self.trusts_consensus,
            "counts": dict(self.counts),
            "records": self.records,
            "read_bytes": self.read_bytes,
            "last_digest": self.last_digest,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], experiences: Mapping[int, Experience]
    ) -> None:
        """Load a state; inverse of `state_dict`.

        Args:
            experiences: of the buffer, by record number.
        Raises: DataError.
        """
        self.drift.load_state_dict(state["drift"])
        self.precision.agreed, self.precision.disagreed = map(int, state["precision"])
        default_trust = self.settings.labels.use_consensus
        self.trusts_consensus = bool(state.get("trusts_consensus", default_trust))
        self.counts.clear()
        self.counts.update(state["counts"])
        self.records, self.read_bytes = int(state["records"]), int(state["read_bytes"])
        self.last_digest = str(state["last_digest"])
        self.buffer.load_state_dict(state["buffer"], experiences)


def digest_record(record: ExperienceLogRecord) -> str:
    """Return the digest of a record, by which a checkpoint recognises its log."""
    items = sorted(record.value.items(), key=lambda item: item[0])
    text = repr((record.number, record.kind, items))
    return digest_bytes(text.encode("utf-8", "surrogatepass"))
