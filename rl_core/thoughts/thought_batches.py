"""Micro-batches of thoughts and correct answers: which tokens get an advantage, and which are imitated.

B rows, S whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_core.data.batches import micro_batches, pad_rows
from rl_core.thoughts.episodes import AnswerRows, ThoughtEpisode

__all__ = ["ThoughtBatch", "ThoughtRow", "thought_batches", "thought_rows"]


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


def thought_rows(
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
    rows = [ThoughtRow(ids, [False] * len(ids), [False] * len(ids), [0.0] * len(ids)) for ids in plan.rows]
    for row, episode, values in zip(rows[: len(episodes)], episodes, advantages, strict=True):
        for step, advantage in zip(episode.steps, values, strict=True):
            for place in step.choices:
                row.thought_mask[place], row.advantages[place] = True, advantage
    if with_answers:
        for span in (*plan.with_thought, *plan.without):
            rows[span.row].answer_mask[span.start : span.stop] = [True] * (span.stop - span.start)
    return [row for row in rows if any(row.thought_mask) or any(row.answer_mask)]


def thought_batches(rows: Sequence[ThoughtRow], max_tokens: int, pad_id: int) -> list[ThoughtBatch]:
    """Length-sorted, right-padded micro-batches of at most `max_tokens` padded tokens (a longer row stands alone)."""
    return [
        ThoughtBatch(
            input_ids_BS=pad_rows([rows[i].ids for i in group], pad_id),
            lengths_B=torch.tensor([len(rows[i].ids) for i in group]),
            thought_mask_BS=pad_rows([rows[i].thought_mask for i in group], False, dtype=torch.bool),
            answer_mask_BS=pad_rows([rows[i].answer_mask for i in group], False, dtype=torch.bool),
            advantages_BS=pad_rows([rows[i].advantages for i in group], 0.0, dtype=torch.float32),
        )
        for group in micro_batches([len(row.ids) for row in rows], max_tokens)
    ]
