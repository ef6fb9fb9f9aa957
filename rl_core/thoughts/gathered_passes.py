"""Forward passes of the thoughts trainer: each process computes its share of the rows, and all get every result.

Suffixes: N spans, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rl_core.thoughts.baseline import pooled_states
from rl_core.thoughts.episodes import Span, ThoughtEpisode, span_logprobs
from rl_core.training.sharded_step import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["gather_pooled_states", "gather_span_logprobs"]


def gather_span_logprobs(
    model: PreTrainedModel,
    sharded: ShardedModel,
    rows: Sequence[Sequence[int]],
    spans: Sequence[Span],
    *,
    pad_id: int,
    max_tokens: int,
) -> torch.Tensor:
    """`span_logprobs` of all spans, float64 [N], distributed over the processes by rows."""
    of_row: dict[int, list[int]] = {}
    for index, place in enumerate(spans):
        of_row.setdefault(place.row, []).append(index)
    used = sorted(of_row)

    def compute(some: list[int]) -> list[list[float]]:
        here = [spans[index]._replace(row=place) for place, row in enumerate(some) for index in of_row[row]]
        values = span_logprobs(model, [rows[row] for row in some], here, pad_id=pad_id, max_tokens=max_tokens)
        found = iter(values.tolist())
        return [[next(found) for _ in of_row[row]] for row in some]

    logprobs_N = torch.zeros(len(spans), dtype=torch.float64)
    found = sharded.all_gather_rows(used, [len(rows[row]) for row in used], compute)
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
            [step.start for step in episode.steps] + [len(episode.ids)] + [step.end for step in episode.steps]
            for episode in some
        ]
        ids = [episode.ids for episode in some]
        return [states.cpu() for states in pooled_states(model, ids, ends, pad_id=pad_id, max_tokens=max_tokens)]

    return sharded.all_gather_rows(episodes, [len(episode.ids) for episode in episodes], compute)
