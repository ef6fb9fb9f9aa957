"""Micro-batches of thoughts and correct answers: which tokens get an advantage, and which are imitated.

B rows, S whole sequence.

Forward passes of the thoughts trainer: each process computes its share of the rows, and all get every result.

Suffixes: N spans, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_core.data.batches import pad_rows, plan_micro_batches
from rl_core.thoughts.baseline import compute_pooled_states
from rl_core.thoughts.episodes import AnswerRows, ThoughtEpisode, TokenSpan, compute_span_logprobs
from rl_core.training.sharded_step import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class ThoughtRow:
    """One sequence to train on; all lists run over its tokens."""

    ids: Sequence[int]
    thought_mask: list[bool]  # True = a choice of the thought
    answer_mask: list[bool]  # True = token of a correct answer
    advantages: list[float]  # 0 off the thought


@dataclass
class ThoughtBatch:
    """A micro-batch with one row per sequence in every tensor, so that one that does not fit can be halved."""

    input_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    lengths_B: torch.Tensor  # int64 [B], real tokens
    thought_mask_BS: torch.Tensor  # bool [B, S], True = a choice of the thought
    answer_mask_BS: torch.Tensor  # bool [B, S], True = token of a correct answer
    advantages_BS: torch.Tensor  # float32 [B, S], 0 off the thought


def build_thought_rows(
    episodes: Sequence[ThoughtEpisode],
    plan: AnswerRows,
    advantages: Sequence[Sequence[float]],
    *,
    with_answers: bool,
) -> list[ThoughtRow]:
    """Rows of the plan that carry loss: thoughts with the advantage of their turn, correct answers.

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
            for place in step.thought_positions:
                row.thought_mask[place], row.advantages[place] = True, advantage
    if with_answers:
        for span in (*plan.with_thought, *plan.without):
            rows[span.row].answer_mask[span.start : span.stop] = [True] * (span.stop - span.start)
    return [row for row in rows if any(row.thought_mask) or any(row.answer_mask)]


def build_thought_batches(
    rows: Sequence[ThoughtRow], max_tokens: int, pad_id: int
) -> list[ThoughtBatch]:
    """Length-sorted, right-padded micro-batches of at most `max_tokens` padded tokens (a longer row stands alone)."""
    return [
        ThoughtBatch(
            input_ids_BS=pad_rows([rows[i].ids for i in group], pad_id),
            lengths_B=torch.tensor([len(rows[i].ids) for i in group]),
            thought_mask_BS=pad_rows(
                [rows[i].thought_mask for i in group], False, dtype=torch.bool
            ),
            answer_mask_BS=pad_rows([rows[i].answer_mask for i in group], False, dtype=torch.bool),
            advantages_BS=pad_rows([rows[i].advantages for i in group], 0.0, dtype=torch.float32),
        )
        for group in plan_micro_batches([len(row.ids) for row in rows], max_tokens)
    ]


def gather_span_logprobs(
    model: PreTrainedModel,
    sharded: ShardedModel,
    rows: Sequence[Sequence[int]],
    spans: Sequence[TokenSpan],
    *,
    pad_id: int,
    max_tokens: int,
) -> torch.Tensor:
    """`compute_span_logprobs` of all spans, float64 [N], distributed over the processes by rows."""
    of_row: dict[int, list[int]] = {}
    for index, place in enumerate(spans):
        of_row.setdefault(place.row, []).append(index)
    used = sorted(of_row)

    def compute(some: list[int]) -> list[list[float]]:
        here = [
            spans[index]._replace(row=place)
            for place, row in enumerate(some)
            for index in of_row[row]
        ]
        values = compute_span_logprobs(
            model, [rows[row] for row in some], here, pad_id=pad_id, max_tokens=max_tokens
        )
        found = iter(values.tolist())
        return [[next(found) for _ in of_row[row]] for row in some]

    logprobs_N = torch.zeros(len(spans), dtype=torch.float64)
    found = sharded.gather_row_results(used, [len(rows[row]) for row in used], compute)
    for row, values in zip(used, found, strict=True):
        logprobs_N[of_row[row]] = torch.tensor(values, dtype=torch.float64)
    return logprobs_N


def gather_pooled_states(
    model: PreTrainedModel,
    sharded: ShardedModel,
    episodes: Sequence[ThoughtEpisode],
    *,
    pad_id: int,
    max_tokens: int,
) -> list[torch.Tensor]:
    """Mean states of the tokens up to some places of each episode, [2 turns + 1, H], on the CPU.

    The baseline's inputs come first, those before each turn and of all tokens; then those up to each thought's end.
    """

    def compute(some: list[ThoughtEpisode]) -> list[torch.Tensor]:
        ends = [
            [step.start for step in episode.steps]
            + [len(episode.ids)]
            + [step.end for step in episode.steps]
            for episode in some
        ]
        ids = [episode.ids for episode in some]
        return [
            states.cpu()
            for states in compute_pooled_states(
                model, ids, ends, pad_id=pad_id, max_tokens=max_tokens
            )
        ]

    return sharded.gather_row_results(episodes, [len(episode.ids) for episode in episodes], compute)
