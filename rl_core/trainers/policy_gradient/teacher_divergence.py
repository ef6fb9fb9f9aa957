"""Loss of a distillation that compares whole distributions: ULD and GOLD, over spans of the same text.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence, N loss tokens, C of them in a chunk, J
spans, L later tokens of a span, V vocabulary, W the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rl_core.inference.teacher import LocalTeacher
from rl_core.losses.aggregation import aggregate
from rl_core.losses.distributions import gold_divergence, merge_span_logprobs, sorted_distance
from rl_core.losses.supervised import token_entropy
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.chunked_head import compute_chunk_tokens
from rl_core.models.logprobs import TokenOutputs, read_vocabulary_logprobs
from rl_core.rollouts.batching import build_batches
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.timing import span
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher
from rl_core.trainers.policy_gradient.losses import LossDenominators, compute_token_weights
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.types import TrainBatch

_BUFFERS = 4  # [tokens, V] that the divergence of a chunk holds, for each that its log-probs need
_MIN_CHUNK = 32  # tokens


@dataclass(slots=True)
class _SpanTokens:
    """Loss tokens of some spans of one side: indices into a batch's loss tokens, span after span."""

    indices: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # tokens of each span

    def locate_tokens(
        self, start: int, stop: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Return, for spans start to stop, their indices [C], the first tokens' places in them [J], and the later
        tokens' [J, L] with a mask.
        """
        before, lengths = sum(self.lengths[:start]), self.lengths[start:stop]
        firsts, place = [], 0
        for length in lengths:
            firsts.append(place)
            place += length
        width = max(1, max(lengths) - 1)
        later = [[first + 1 + n for n in range(width)] for first in firsts]
        mask = [[n + 1 < length for n in range(width)] for length in lengths]
        mask_JL = torch.tensor(mask, device=device)
        later_JL = torch.tensor(later, device=device).masked_fill(~mask_JL, 0)
        indices_C = torch.tensor(self.indices[before : before + place], device=device)
        return indices_C, torch.tensor(firsts, device=device), later_JL, mask_JL


class TeacherDivergence:
    """The divergence of the policy's distributions from the teacher's at the first token of each span.

    The trunks of both models run once per micro-batch; heads and divergence run in chunks of spans, which backward
    computes again, so that no [N, V] of a micro-batch exists.
    """

    def __init__(self, buffer: RolloutBuffer, settings: DistilledPolicySettings) -> None:
        """Pair the vocabularies, and mark the first token of each span."""
        teacher = buffer.actor_critic.teacher
        assert isinstance(teacher, AlignedTeacher) and isinstance(teacher.scorer, LocalTeacher)
        self.buffer, self.settings = buffer, settings
        self.teacher, self.scorer = teacher, teacher.scorer
        student_ids, teacher_ids = teacher.pair_tokens()
        self._ids = tuple(
            torch.tensor(ids, device=buffer.device) for ids in (student_ids, teacher_ids)
        )
        self.beta = 0.5 if settings.beta is None else settings.beta
        self.shared_weight = settings.shared_weight
        if self.shared_weight is None:
            self.shared_weight = len(teacher_ids) / teacher.num_tokens[1]
        self.host_mask_RS = torch.zeros(buffer.shape, dtype=torch.bool)  # True = first of a span
        for index, sample in enumerate(buffer.samples):
            spans = () if sample.alignment is None else sample.alignment.student_spans
            start, previous = len(sample.row.prompt_ids), -1
            for place, number in enumerate(spans):
                self.host_mask_RS[index, start + place] = number >= 0 and number != previous
                previous = number

    def compute_loss(
        self, batch: TrainBatch, counts: LossDenominators, span_counts: LossDenominators
    ) -> tuple[TokenOutputs, tuple[torch.Tensor, dict[str, Any]]]:
        """Compute the mean divergence over spans, by the settings' aggregation.

        Args:
            counts, span_counts: loss tokens and spans of the whole optimizer step.
        Returns: log-probs and entropies without gradient; the scalar loss with {"loss", "teacher_divergence" (mean
            over spans), "teacher_kl" (of the sampled tokens)}.
        """
        policy, device = self.buffer.actor_critic.policy, self.buffer.device
        with self.buffer.use_dropout_masks(batch):
            read_student = read_vocabulary_logprobs(policy, batch)
        ids_N = batch.input_ids_BS[batch.loss_mask_BS]
        logprobs_N, entropy_N = (torch.zeros(len(ids_N), device=device) for _ in range(2))
        teacher_sum = torch.zeros((), device=device)
        losses: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        for teacher_batch in self._build_teacher_batches(batch):
            read_teacher = self._read_teacher(teacher_batch)
            teacher_ids_N = teacher_batch.input_ids_BS[teacher_batch.loss_mask_BS]
            student, teacher = self._list_spans(batch, teacher_batch)
            for start, stop in self._split_spans(student, teacher):
                own = student.locate_tokens(start, stop, device)
                other = teacher.locate_tokens(start, stop, device)
                with torch.no_grad():
                    teacher_JW, teacher_logprobs_C, _ = _merge_spans(
                        read_teacher, teacher_ids_N, other
                    )

                def compare(own: Any = own, teacher_JW: torch.Tensor = teacher_JW) -> Any:
                    student_JV, sampled_C, entropy_C = _merge_spans(read_student, ids_N, own)
                    return self._compare(student_JV, teacher_JW), sampled_C.detach(), entropy_C

                loss_J, sampled_C, entropy_C = (
                    checkpoint(compare, use_reentrant=False, preserve_rng_state=False)
                    if stop - start < len(student.lengths)
                    else compare()
                )
                indices_C, firsts_J = own[:2]
                logprobs_N[indices_C] = sampled_C.to(logprobs_N.dtype)
                entropy_N[indices_C] = entropy_C.to(entropy_N.dtype)
                teacher_sum = teacher_sum + teacher_logprobs_C.sum()
                losses.append(loss_J)
                places.append(indices_C[firsts_J])
        losses_J = torch.cat(losses)
        divergence_N = losses_J.new_zeros(len(ids_N)).index_copy(0, torch.cat(places), losses_J)
        mask_BS = batch.loss_mask_BS
        zeros_BS = torch.zeros(mask_BS.shape, device=device)
        span_mask_BS = self.host_mask_RS[batch.rows, : mask_BS.shape[1]].to(device)
        divergence_BS = zeros_BS.to(losses_J.dtype).masked_scatter(mask_BS, divergence_N)
        loss = aggregate(
            divergence_BS,
            span_mask_BS,
            num_loss_tokens=span_counts.num_loss_tokens,
            loss_weights_BT=compute_token_weights(self.settings, span_mask_BS, span_counts),
        )
        outputs = TokenOutputs(
            zeros_BS.masked_scatter(mask_BS, logprobs_N),
            zeros_BS.masked_scatter(mask_BS, entropy_N),
        )
        metrics = {
            "loss": loss.detach(),
            "teacher_divergence": losses_J.detach().sum() / span_counts.num_forward_tokens,
            "teacher_kl": (logprobs_N.sum() - teacher_sum) / counts.num_forward_tokens,
        }
        return outputs, (loss, metrics)

    def _compare(self, student_JV: torch.Tensor, teacher_JW: torch.Tensor) -> torch.Tensor:
        if self.settings.divergence == "uld":
            return sorted_distance(student_JV, teacher_JW)
        assert self.shared_weight is not None
        return gold_divergence(
            student_JV, teacher_JW, *self._ids, beta=self.beta, shared_weight=self.shared_weight
        )

    @torch.no_grad()
    def _read_teacher(self, batch: TrainBatch) -> Callable[[torch.Tensor | None], torch.Tensor]:
        self.scorer.check_lengths(batch)
        with span("teacher"), use_eval_mode(self.scorer.model):
            return read_vocabulary_logprobs(self.scorer.model, batch)

    def _build_teacher_batches(self, batch: TrainBatch) -> list[TrainBatch]:
        """Build batches of the teacher's rows of a micro-batch; `TrainBatch.rows` indexes the rows of the iteration."""
        rows = [self.buffer.samples[index].teacher_row for index in batch.rows]
        taught = [index for index, row in zip(batch.rows, rows, strict=True) if row is not None]
        batches = build_batches(
            [row for row in rows if row is not None],
            self.settings.micro_batch_tokens,
            self.teacher.pad_id,
        )
        for teacher_batch in batches:
            teacher_batch.rows = [taught[index] for index in teacher_batch.rows]
        batches = [teacher_batch for teacher_batch in batches if teacher_batch.num_loss_tokens]
        return [teacher_batch.to(self.buffer.device) for teacher_batch in batches]

    def _list_spans(
        self, batch: TrainBatch, teacher_batch: TrainBatch
    ) -> tuple[_SpanTokens, _SpanTokens]:
        """List the spans of the teacher's batch, row after row, in the loss tokens of both batches."""
        sides = _SpanTokens(), _SpanTokens()
        firsts = [_list_first_tokens(batch), _list_first_tokens(teacher_batch)]
        for row in teacher_batch.rows:
            alignment = self.buffer.samples[row].alignment
            assert alignment is not None
            all_spans = (alignment.student_spans, alignment.teacher_spans)
            for side, spans, first in zip(sides, all_spans, firsts, strict=True):
                counted = [number for number in spans if number >= 0]
                side.indices += range(first[row], first[row] + len(counted))
                side.lengths += [len(list(run)) for _, run in groupby(counted)]
        return sides

    def _split_spans(self, student: _SpanTokens, teacher: _SpanTokens) -> list[tuple[int, int]]:
        """Split the spans into chunks of bounded size, each with at least one span."""
        size = max(self.teacher.num_tokens)
        limit = max(_MIN_CHUNK, compute_chunk_tokens(self.buffer.device.type, size) // _BUFFERS)
        chunks, start, held = [], 0, 0
        for index, lengths in enumerate(zip(student.lengths, teacher.lengths, strict=True)):
            if held and held + max(lengths) > limit:
                chunks.append((start, index))
                start, held = index, 0
            held += max(lengths)
        return [*chunks, (start, len(student.lengths))]


def _merge_spans(
    read: Callable[[torch.Tensor | None], torch.Tensor], ids_N: torch.Tensor, places: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the merged log-probs [J, V] of spans, and of all their tokens the sampled log-probs and the entropies."""
    indices_C, firsts_J, later_JL, mask_JL = places
    log_p_CV = read(indices_C)
    sampled_C = log_p_CV.gather(1, ids_N[indices_C][:, None]).squeeze(1)
    later_logprobs_JL = sampled_C[later_JL].masked_fill(~mask_JL, 0.0)
    merged_JV = merge_span_logprobs(log_p_CV.index_select(0, firsts_J), later_logprobs_JL)
    return merged_JV, sampled_C, token_entropy(log_p_CV.detach())


def _list_first_tokens(batch: TrainBatch) -> dict[int, int]:
    """Return, for each row of the iteration, the index of its first loss token among those of the batch."""
    counts = batch.loss_mask_BS.sum(1).tolist()
    firsts, place = {}, 0
    for row, count in zip(batch.rows, counts, strict=True):
        firsts[row] = place
        place += count
    return firsts
