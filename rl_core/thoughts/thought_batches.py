"""Micro-batches of thoughts and correct answers, and forward passes of the thoughts trainer.

Batches mark the tokens that get an advantage and those that are imitated. In forward passes each process computes its
share of the rows, and all get every result.

Suffixes: B rows, S whole sequence, N spans, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_core.cpu.prefix_tree import encode_row
from rl_core.data.batches import pad_rows, plan_shared_batches
from rl_core.thoughts.baseline import compute_pooled_states
from rl_core.thoughts.episodes import AnswerRows, ThoughtEpisode, TokenSpan, compute_span_logprobs
from rl_core.training.sharded_step import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class ThoughtRow:
    """One sequence to train on; all lists have one entry per token."""

    ids: Sequence[int]
    thought_mask: list[bool]  # True = token of the thought, or the token that ends it
    answer_mask: list[bool]  # True = token of a correct answer
    advantages: list[float]  # 0 outside the thought


@dataclass
class ThoughtBatch:
    """Micro-batch with one row per sequence in every tensor, so that one that does not fit can be halved."""

    input_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    lengths_B: torch.Tensor  # int64 [B], real tokens
    thought_mask_BS: torch.Tensor  # bool [B, S], True = token of the thought, or the one ending it
    answer_mask_BS: torch.Tensor  # bool [B, S], True = token of a correct answer
    advantages_BS: torch.Tensor  # float32 [B, S], 0 outside the thought


def build_thought_rows(
    episodes: Sequence[ThoughtEpisode],
    plan: AnswerRows,
    advantages: Sequence[Sequence[float]],
    *,
    with_answers: bool,
) -> list[ThoughtRow]:
    """Build the rows of the plan that carry loss: thoughts with the advantage of their turn, correct answers.

    Args:
        advantages: one per turn of each episode.
        with_answers: imitate the correct answers, with the thought and without.
    """
    rows = [
        ThoughtRow(ids, [False] * len(ids), [False] * len(ids), [0.0] * len(ids))
        for ids in plan.rows
    ]
    for row, episode, values in zip(rows[: len(episodes)], episodes, advantages, strict=True):
        for step, advantage in zip(episode.steps, values, strict=True):
            for position in step.thought_positions:
                row.thought_mask[position], row.advantages[position] = True, advantage
    if with_answers:
        for span in (*plan.with_thought, *plan.without):
            rows[span.row].answer_mask[span.start : span.stop] = [True] * (span.stop - span.start)
    return [row for row in rows if any(row.thought_mask) or any(row.answer_mask)]


def build_thought_batches(
    rows: Sequence[ThoughtRow], max_tokens: int, pad_id: int, *, shares_prefixes: bool = False
) -> list[ThoughtBatch]:
    """Build right-padded micro-batches of at most `max_tokens` tokens (a longer row is alone): padded, or those of the
    prefix tree if the models share prefixes (`OptimizerStep.can_share_prefixes`).
    """
    batches = []
    encoded_rows = ([encode_row(row.ids)] for row in rows) if shares_prefixes else None
    for indices in plan_shared_batches([len(row.ids) for row in rows], max_tokens, encoded_rows):
        group = [rows[index] for index in indices]
        batches.append(
            ThoughtBatch(
                input_ids_BS=pad_rows([row.ids for row in group], pad_id),
                lengths_B=torch.tensor([len(row.ids) for row in group]),
                thought_mask_BS=pad_rows(
                    [row.thought_mask for row in group], False, dtype=torch.bool
                ),
                answer_mask_BS=pad_rows(
                    [row.answer_mask for row in group], False, dtype=torch.bool
                ),
                advantages_BS=pad_rows([row.advantages for row in group], 0.0, dtype=torch.float32),
            )
        )
    return batches


def gather_span_logprobs(
    model: PreTrainedModel,
    sharded: ShardedModel,
    rows: Sequence[Sequence[int]],
    spans: Sequence[TokenSpan],
    *,
    pad_id: int,
    max_tokens: int,
) -> torch.Tensor:
    """Compute `compute_span_logprobs` of all spans, float64 [N], distributed over the processes by rows."""
    span_indices: dict[int, list[int]] = {}  # by row
    for index, span in enumerate(spans):
        span_indices.setdefault(span.row, []).append(index)
    row_indices = sorted(span_indices)

    def compute_rows(local_rows: list[int]) -> list[list[float]]:
        local_spans = [
            spans[index]._replace(row=local_row)
            for local_row, row in enumerate(local_rows)
            for index in span_indices[row]
        ]
        local_logprobs_N = compute_span_logprobs(
            model,
            [rows[row] for row in local_rows],
            local_spans,
            pad_id=pad_id,
            max_tokens=max_tokens,
        )
        values = iter(local_logprobs_N.tolist())
        return [[next(values) for _ in span_indices[row]] for row in local_rows]

    lengths = [len(rows[row]) for row in row_indices]
    gathered = sharded.gather_row_results(row_indices, lengths, compute_rows)
    logprobs_N = torch.zeros(len(spans), dtype=torch.float64)
    for row, row_logprobs in zip(row_indices, gathered, strict=True):
        logprobs_N[span_indices[row]] = torch.tensor(row_logprobs, dtype=torch.float64)
    return logprobs_N


def gather_pooled_states(
    model: PreTrainedModel,
    sharded: ShardedModel,
    episodes: Sequence[ThoughtEpisode],
    *,
    pad_id: int,
    max_tokens: int,
) -> list[torch.Tensor]:
    """Compute mean states of prefixes of each episode, [2 turns + 1, H], on the CPU, distributed over the processes.

    First come the baseline's inputs, those before each turn and of all tokens; then those up to each thought's end.
    """

    def compute_rows(local_episodes: list[ThoughtEpisode]) -> list[torch.Tensor]:
        rows = [episode.ids for episode in local_episodes]
        ends = []
        for episode in local_episodes:
            starts = [step.start for step in episode.steps]
            ends.append([*starts, len(episode.ids), *(step.end for step in episode.steps)])
        pooled = compute_pooled_states(model, rows, ends, pad_id=pad_id, max_tokens=max_tokens)
        return [states.cpu() for states in pooled]

    lengths = [len(episode.ids) for episode in episodes]
    return sharded.gather_row_results(episodes, lengths, compute_rows)
