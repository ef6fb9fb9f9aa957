"""Scores of rows by the reward model that is being trained, distributed over its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.models import heads
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["sharded_scores"]


def sharded_scores(
    optimizer_step: OptimizerStep,
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    pad_id: int,
) -> list[float]:
    """`heads.score`, each process computing its share; all of them get all scores.

    Args:
        max_tokens: padded tokens of a pass at most (a longer row stands alone).
    """
    lengths = [len(row) for row in rows]

    def build(some: Sequence[int]) -> list[list[int]]:
        groups = heads.score_batches([lengths[index] for index in some], max_tokens)
        return [[some[place] for place in group] for group in groups]

    def measure(indices: list[int]) -> list[tuple[int, float]]:
        values = heads.score_batch(model, [rows[index] for index in indices], pad_id=pad_id)
        return list(zip(indices, values, strict=True))

    batches = optimizer_step.process_group.batches(range(len(rows)), lengths, build)
    parts = optimizer_step.sharded.measure(batches, measure, optimizer_step.autocast())
    scores = dict(pair for part in parts for pair in part)
    return [scores[index] for index in range(len(rows))]
