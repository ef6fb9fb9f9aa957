"""A teacher with another vocabulary: it reads the text of a rollout in its tokens, aligned with the policy's by bytes.

The teacher's row is the episode's opening messages in its chat template, the text of the completion in its tokens, and
its end of turn where the policy ended. Log-probs are compared over spans of both tokenisations
(`data.token_bytes.align_token_spans`).

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence, U teacher's completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import torch

from rl_core.data.chat import ChatRenderer
from rl_core.data.token_bytes import TokenBytes, align_token_spans, pair_equal_tokens
from rl_core.environments.environment import warn_once
from rl_core.errors import SettingsError
from rl_core.inference.teacher import LocalTeacher, ServedTeacher, Teacher
from rl_core.losses.advantages import aligned_distillation_advantages
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import PolicySettings
from rl_core.trainers.policy_gradient.samples import SampleGroup, TokenAlignment, TrainingSample
from rl_core.trainers.policy_gradient.self_distillation import (
    SelfTeacher,
    TaughtBuffer,
    build_teacher_batches,
)
from rl_core.types import Rollout, RolloutGroup, TrainBatch

_MIN_ALIGNED = (
    0.9  # share of spans with one token, below which distributions are not worth comparing
)


class AlignedTeacher:
    """A local or served teacher whose tokens are aligned with the policy's; with equal vocabularies, one to one."""

    def __init__(
        self,
        scorer: LocalTeacher | ServedTeacher,
        student: ChatRenderer,
        teacher: ChatRenderer,
        name: str,
        *,
        has_equal_tokens: bool = False,
        compares_distributions: bool = False,
    ) -> None:
        """Read both vocabularies.

        Args:
            scorer: computes log-probs of the teacher's tokens.
            student, teacher: renderers of both models.
            name: of the teacher, for errors.
            has_equal_tokens: both have the same vocabulary: the teacher reads the policy's rows.
            compares_distributions: the loss compares first tokens of spans, which should have one token each.
        Raises: SettingsError for a tokenizer without bytes, templates of which one opens a thought, or native tools.
        """
        self.scorer = scorer
        self.pad_id = teacher.pad_id
        self.has_equal_tokens = has_equal_tokens
        self.compares_distributions = compares_distributions
        self._student, self._teacher = student, teacher
        if has_equal_tokens:
            return
        if student.settings.native_tools:
            raise SettingsError(
                "model.native_tools: a teacher with another vocabulary reads an episode's messages alone, without the "
                "tools of the policy's chat template; remove it"
            )
        if student.opened_thought != teacher.opened_thought:
            raise SettingsError(
                f"teacher: the chat template of {name} begins every answer with {teacher.opened_thought!r}, the "
                f"policy's with {student.opened_thought!r}; set model.chat_template_kwargs or model.chat_template so "
                "that both begin alike"
            )
        self._student_bytes = TokenBytes(student.tokenizer, "the policy")
        self._teacher_bytes = TokenBytes(teacher.tokenizer, name)
        self._teacher_bytes.check_texts()

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Sizes of both vocabularies, the policy's and the teacher's."""
        student, teacher = self._student.tokenizer, self._teacher.tokenizer
        return len({*student.get_vocab().values()}), len({*teacher.get_vocab().values()})

    def pair_tokens(self) -> tuple[list[int], list[int]]:
        """Return the ids of the tokens that both vocabularies have, the policy's and the teacher's; the ends of turn
        are a pair.
        """
        if self.has_equal_tokens:
            ids = sorted(self._student.tokenizer.get_vocab().values())
            return ids, ids
        ends = (self._student.eos_id, self._teacher.eos_id)
        pairs = [
            pair
            for pair in pair_equal_tokens(self._student_bytes, self._teacher_bytes)
            if pair[0] != ends[0] and pair[1] != ends[1]
        ]
        pairs = sorted([*pairs, ends])
        return [left for left, _ in pairs], [right for _, right in pairs]

    def attach_rows(
        self, groups: Sequence[RolloutGroup], samples: Sequence[SampleGroup]
    ) -> dict[str, float]:
        """Give each sample the teacher's row and their spans; a text that the teacher cannot write carries no loss.

        A span of which a token of the policy carries no loss is left out.

        Args:
            samples: [P][G] of the groups' rollouts.
        Returns: {"train/taught_rate"}: the share of rollouts with a teacher's row; {"policy/aligned_rate"}: the share
            of spans with one token on both sides.
        Raises: SettingsError for a rollout of several contexts or turns, or without its opening messages.
        """
        num_rollouts = num_taught = num_spans = num_single = 0
        for group, group_samples in zip(groups, samples, strict=True):
            for rollout, sample in zip(group.rollouts, group_samples, strict=True):
                num_rollouts += 1
                aligned = self._align_rollout(rollout)
                row = sample.row
                if aligned is None:
                    sample.row = dataclasses.replace(row, loss_mask=[False] * len(row.loss_mask))
                    continue
                num_taught += 1
                prompt_ids, ids, *spans = aligned
                counts = self._attach_row(sample, prompt_ids, ids, spans[0], spans[1])
                num_spans, num_single = num_spans + counts[0], num_single + counts[1]
        if not num_taught and num_rollouts:
            warn_once(
                "teacher: no rollout of an iteration has a text that its tokenizer can write unchanged; nothing is "
                "learned from them"
            )
        metrics = {"train/taught_rate": num_taught / max(1, num_rollouts)}
        if num_spans:
            metrics["policy/aligned_rate"] = num_single / num_spans
            if self.compares_distributions and num_single < _MIN_ALIGNED * num_spans:
                warn_once(
                    "teacher: more than a tenth of an iteration's spans have several tokens (policy/aligned_rate). "
                    "uld and gold compare their first tokens, and may teach what the teacher would hardly say; "
                    "set divergence: sampled"
                )
        return metrics

    @torch.no_grad()
    def compute_row_logprobs(
        self, buffer: TaughtBuffer, plan: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Compute the teacher's log-probs [R, U] of its tokens in the rows of the plan, 0 where there is no loss."""
        rows = [sample.teacher_row for sample in buffer.samples]
        width = max((len(row.completion_ids) for row in rows if row is not None), default=0)
        logprobs_RU = torch.zeros((len(rows), width), device=buffer.device)
        optimizer_step = buffer.actor_critic.optimizer_step

        def fill(batch: TrainBatch) -> None:
            values_BS = self.scorer.compute_logprobs(batch)
            for index, values_S in zip(batch.rows, values_BS, strict=True):
                row = rows[index]
                assert row is not None
                start, length = len(row.prompt_ids), len(row.completion_ids)
                logprobs_RU[index, :length] = values_S[start : start + length].float()

        shares_prefixes = isinstance(
            self.scorer, LocalTeacher
        ) and optimizer_step.can_share_prefixes(self.scorer.model)

        def run() -> None:
            memory_fit = MemoryFit("scoring of rollouts by the teacher")
            for indices in plan:
                batches = build_teacher_batches(
                    buffer, indices, pad_id=self.pad_id, shares_prefixes=shares_prefixes
                )
                memory_fit.compute_batches(batches, fill)

        with optimizer_step.enable_autocast():
            optimizer_step.sharded.run_independently_with_full_weights(run)
        return optimizer_step.process_group.all_reduce_sum(logprobs_RU)

    def estimate_advantages(
        self,
        buffer: TaughtBuffer,
        student_logprobs_RS: torch.Tensor,
        teacher_logprobs_RU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages [R, S] of the policy's tokens, and KL(policy || teacher) summed over the rows (k1).

        Computed on the host, where sums have one order.
        """
        spans_RS = torch.full(buffer.shape, -1)
        spans_RU = torch.full(teacher_logprobs_RU.shape, -1)
        for index, sample in enumerate(buffer.samples):
            if sample.alignment is None:
                continue
            spans = torch.tensor(sample.alignment.student_spans, dtype=torch.long)
            start = len(sample.row.prompt_ids)
            spans_RS[index, start : start + len(spans)] = spans
            spans = torch.tensor(sample.alignment.teacher_spans, dtype=torch.long)
            spans_RU[index, : len(spans)] = spans
        student_RS, teacher_RU = student_logprobs_RS.cpu(), teacher_logprobs_RU.cpu()
        advantages_RS = aligned_distillation_advantages(
            student_RS, teacher_RU, spans_RS, spans_RU, gamma=buffer.settings.gamma
        )
        student_sum, teacher_sum = (
            logprobs[spans >= 0].double().sum().float()
            for logprobs, spans in ((student_RS, spans_RS), (teacher_RU, spans_RU))
        )
        return advantages_RS.to(buffer.device), (student_sum - teacher_sum).to(buffer.device)

    def _align_rollout(
        self, rollout: Rollout
    ) -> tuple[list[int], list[int], list[int], list[int]] | None:
        """Return the teacher's prompt and completion, and the spans of both completions; None = it cannot write the
        text.
        """
        rollout.check_one_context(
            "a teacher with another vocabulary, or whose distributions are compared,"
        )
        completion = rollout.completion_ids
        if self.has_equal_tokens:
            spans = [*range(len(completion))]
            return rollout.prompt_ids, completion, spans, spans
        if not rollout.messages or False in rollout.loss_mask:
            raise SettingsError(
                "teacher: one with another vocabulary reads an episode's opening messages in its chat template, and "
                "one answer to them; episodes of several turns or of an agent need a teacher with the policy's "
                "vocabulary"
            )
        has_end = bool(completion) and completion[-1] in self._student.eos_ids
        text_ids = completion[:-1] if has_end else completion
        student, teacher = self._student_bytes, self._teacher_bytes
        ids: list[int] = []
        waiting: list[bytes] = []  # text that is not in `ids` yet
        control = {number: text for text, number in student.control_ids.items()}
        for token in [*text_ids, None]:
            equal = teacher.control_ids.get(control.get(token, "")) if token is not None else None
            if token is not None and equal is None:
                waiting.append(student.read_bytes(token))
                continue
            encoded = teacher.encode_bytes(b"".join(waiting))
            if encoded is None:
                return None
            ids += encoded
            waiting = []
            if equal is not None:  # a control token that the teacher has too
                ids.append(equal)
        left, right = align_token_spans(
            [student.read_bytes(token) for token in text_ids],
            [teacher.read_bytes(token) for token in ids],
        )
        if has_end:
            end = max(left, default=-1) + 1
            left, right, ids = [*left, end], [*right, end], [*ids, self._teacher.eos_id]
        return self._teacher.prompt_ids(rollout.messages), ids, left, right

    @staticmethod
    def _attach_row(
        sample: TrainingSample,
        prompt_ids: list[int],
        ids: list[int],
        student_spans: list[int],
        teacher_spans: list[int],
    ) -> tuple[int, int]:
        """Set the sample's teacher's row and alignment; return the numbers of its spans and of those of one token."""
        row = sample.row
        left_out = {
            span for span, counts in zip(student_spans, row.loss_mask, strict=True) if not counts
        }
        left, right = (
            [-1 if span in left_out else span for span in spans]
            for spans in (student_spans, teacher_spans)
        )
        sample.row = dataclasses.replace(row, loss_mask=[span >= 0 for span in left])
        mask = [span >= 0 for span in right]
        sample.teacher_row = TrainRow(prompt_ids, ids, mask, None, row.temperature)
        sample.alignment = TokenAlignment(left, right)
        counts, teacher_counts = Counter(left), Counter(right)
        del counts[-1]
        return len(counts), sum(
            count == teacher_counts[span] == 1 for span, count in counts.items()
        )


AnyTeacher: TypeAlias = Teacher | SelfTeacher | AlignedTeacher


def check_teacher(settings: PolicySettings, teacher: AnyTeacher | None) -> None:
    """Refuse a teacher that does not fit the settings.

    Raises: SettingsError without the teacher of a distillation, for one that no setting uses, for distributions of one
        that is not loaded here, and for replayed rollouts, which have no row of an aligned teacher.
    """
    if settings.is_taught != (teacher is not None):
        raise SettingsError("teacher: a distillation needs one, and no other algorithm takes one")
    if settings.compares_distributions and not (
        isinstance(teacher, AlignedTeacher) and isinstance(teacher.scorer, LocalTeacher)
    ):
        raise SettingsError(
            "divergence: distributions are compared with those of a teacher that is loaded here; name it in "
            "teacher.model, or set sampled"
        )
    if isinstance(teacher, AlignedTeacher) and settings.replay is not None:
        raise SettingsError(
            "replay: rollouts of earlier iterations have no tokens of a teacher with another vocabulary; remove it"
        )
