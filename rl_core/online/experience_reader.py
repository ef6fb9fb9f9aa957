"""Intake of the log's records: experiences into the buffer with their first label, feedback, signals of the traffic."""

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
    """The worker's view of the traffic. What it holds follows from the records and their order alone."""

    def __init__(
        self,
        settings: OnlineSettings,
        vocab_size: int,
        *,
        on_alarm: Callable[[str, str], None],
        on_order: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """on_alarm: called with the signal and a sentence. on_order: called with an order; may raise DataError."""
        self.settings, self.vocab_size = settings, vocab_size
        self._on_alarm, self._on_order = on_alarm, on_order
        self.buffer = ExperienceBuffer(settings.buffer)
        self.drift = DriftMonitor(settings.drift)
        self.precision = PseudoLabelPrecision()
        # False = pseudo-labels are measured alone
        self.trusts_consensus = settings.labels.use_consensus
        self.counts: Counter[str] = Counter()
        self.records = 0  # answers and labels read so far
        self.read_bytes = 0  # of all records read so far
        self.last_digest = ""

    def process_record(
        self, record: ExperienceLogRecord, log_path: object, version: int, live: int
    ) -> None:
        """Take one record in; one that cannot be used is counted and left out.

        Args:
            place: of the log, for the warning. version: the worker's newest update. live: version that answers.
        """
        # orders follow from updates, and must not cause any
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
        except (
            DataError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
        ) as error:  # of values of another type
            self.counts["refused"] += 1
            logger.warning("record %d of %s is left out: %s", record.number, log_path, error)

    def observe_signal(self, signal: str, value: float) -> None:
        """Hand a signal to the drift monitor."""
        alarm = self.drift.observe(signal, value)
        if alarm is not None:
            self._on_alarm(signal, f"drift: {alarm}")

    def _add_experience(self, record: ExperienceLogRecord, version: int, live: int) -> None:
        experience = record.parse_experience()
        check_experience(
            experience, vocab_size=self.vocab_size, max_tokens=self.settings.buffer.max_tokens
        )
        if experience.policy_version > version:
            raise DataError(
                f"policy_version: {experience.policy_version} comes from a later update than {version}, the last "
                "one here; the log belongs to another worker"
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
        drift, turns = (
            self.settings.drift,
            [t for r in experience.rollouts for t in r.trajectory.turns],
        )
        tokens = sum(sum(rollout.loss_mask) for rollout in experience.rollouts) / len(
            experience.rollouts
        )
        self.observe_signal("confidence", experience.vote.confidence)
        self.observe_signal("length", tokens / drift.max_length)
        self.observe_signal("refusals", sum(turn.is_error for turn in turns) / max(1, len(turns)))

    def _choose_first_label(self, experience: Experience) -> Label | None:
        labels = self.settings.labels
        found = self._create_consensus_label(experience) if self.trusts_consensus else None
        if found is not None:
            self.counts["pseudo_labels"] += 1
            return found
        return Label("played", "environment") if labels.trust_environment else None

    def _create_consensus_label(self, experience: Experience) -> Label | None:
        labels = self.settings.labels
        return create_pseudo_label(
            experience.vote,
            min_confidence=labels.min_confidence,
            min_votes=labels.min_votes,
            confidence=labels.confidence,
        )

    def _apply_label(self, request_id: str, label: Label) -> None:
        kept = self.buffer.find_experience(request_id)
        if kept is None:
            self.counts["labels_without_experience"] += 1
            return
        self.counts["labels"] += 1
        chosen = choose_prevailing_label(kept.label, label)
        if chosen is not label:
            return
        if label.source == "feedback":
            self._compare_with_feedback(kept, label)
        self.buffer.set_label(request_id, label)
        self._review_trust()

    def _compare_with_feedback(self, kept: BufferedExperience, label: Label) -> None:
        """Precision of the pseudo-label, and success of the answer that was given."""
        consensus = self._create_consensus_label(kept.experience)
        if consensus is not None:
            self.precision.remove_observation(kept.agreed)
            kept.agreed = self.precision.observe(consensus, label)
        if kept.label is not None and kept.label.source == "feedback":
            return  # one who says it again and again is no change of the traffic
        given = kept.experience.vote.answer
        if label.kind == "answer" and label.text is not None:
            self.observe_signal(
                "success",
                float(
                    given is not None and normalise_answer(given) == normalise_answer(label.text)
                ),
            )
        elif label.score is not None:
            self.observe_signal("success", max(0.0, label.score))

    def _review_trust(self) -> None:
        """Take back the pseudo-labels once feedback has shown that too few are right; later ones count again."""
        labels = self.settings.labels
        trusts = labels.use_consensus and self.precision.is_at_least(labels.min_precision)
        if self.trusts_consensus and not trusts:
            taken_back = self.buffer.drop_labels("consensus")
            self.counts["pseudo_labels_taken_back"] += taken_back
            agreed, checked = (
                self.precision.agreed,
                self.precision.agreed + self.precision.disagreed,
            )
            logger.warning(
                "pseudo-labels are not learned from any more: feedback confirmed %d of %d (labels.min_precision %g); "
                "%d in the buffer are taken back",
                agreed,
                checked,
                labels.min_precision,
                taken_back,
            )
        elif trusts and not self.trusts_consensus:
            logger.warning("pseudo-labels are learned from again: feedback confirms enough of them")
        self.trusts_consensus = trusts

    def collect_metrics(self) -> dict[str, float]:
        """Records, counts, and the numbers of the buffer, the alarms and the pseudo-labels."""
        found = {
            "online/records": float(self.records),
            "online/trusts_consensus": float(self.trusts_consensus),
        }
        found |= {
            f"online/count/{name}": float(count) for name, count in sorted(self.counts.items())
        }
        return (
            found
            | self.buffer.compute_metrics()
            | self.drift.compute_metrics()
            | self.precision.compute_metrics()
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the experiences themselves, which are in the log."""
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
        """Inverse of `state_dict`. Args: experiences: of the buffer, by record number. Raises: DataError."""
        self.drift.load_state_dict(state["drift"])
        self.precision.agreed, self.precision.disagreed = (
            int(count) for count in state["precision"]
        )
        self.trusts_consensus = bool(
            state.get("trusts_consensus", self.settings.labels.use_consensus)
        )
        self.counts.clear()
        self.counts.update(state["counts"])
        self.records, self.read_bytes = int(state["records"]), int(state["read_bytes"])
        self.last_digest = str(state["last_digest"])
        self.buffer.load_state_dict(state["buffer"], experiences)


def digest_record(record: ExperienceLogRecord) -> str:
    """Digest of a record, by which a checkpoint knows its log again."""
    text = repr(
        (record.number, record.kind, sorted(record.value.items(), key=lambda pair: pair[0]))
    )
    return digest_bytes(text.encode("utf-8", "surrogatepass"))
