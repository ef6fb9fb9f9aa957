"""Next-token distributions of one or two models on the same texts: likelihood, entropy and exact KL of every text.

Logits are those of the models, in their own precision; everything after them is float64. R texts, N positions that a
token follows, C of them at a time, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rl_core.cpu.kernels import linear
from rl_core.data.batches import micro_batches, unscored_batch
from rl_core.errors import ServiceError
from rl_core.losses.kl import exact_forward_kl
from rl_core.losses.supervised import token_entropy
from rl_core.models.hidden_states import hidden_states
from rl_core.service.served_base import ServedBase

__all__ = ["LogitReader", "OpenRows", "SavedReader", "TextSums", "score_texts"]

CHUNK_CELLS = 1 << 22  # logits of one model at a time: 32 MiB in float64


class OpenRows(Protocol):
    """Rows that a model has read."""

    def logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits [C, V] of the positions from `begin` to `end`; a row has one position less than tokens."""


class LogitReader(Protocol):
    """A model that reads token rows."""

    def read(self, rows: Sequence[Sequence[int]]) -> OpenRows:
        """The rows, each of 2 tokens at least."""


class SavedReader:
    """A base model, with other weights if any are given."""

    def __init__(self, base: ServedBase, weights: Mapping[str, torch.Tensor]) -> None:
        self.base, self._weights = base, weights

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]]) -> OpenRows:
        """See `LogitReader`."""
        batch = unscored_batch([list(row) for row in rows], self.base.pad_id).to(self.base.device)
        with self.base.holding(self._weights) as model:
            states_BSH = hidden_states(model, batch)
            head = model.get_output_embeddings()
            weight_VH, bias_V = head.weight, head.bias
        states_NH = torch.cat([states_BSH[index, : len(row) - 1] for index, row in enumerate(rows)])
        return _States(states_NH, weight_VH, bias_V)


class _States:
    def __init__(self, states_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> None:
        self._states_NH, self._weight_VH, self._bias_V = states_NH, weight_VH, bias_V

    @torch.no_grad()
    def logits(self, begin: int, end: int) -> torch.Tensor:
        logits_CV = linear(self._states_NH[begin:end], [self._weight_VH])
        return logits_CV if self._bias_V is None else logits_CV + self._bias_V


class TextSums(NamedTuple):
    """Sums over the scored tokens of each text, float64 [R], nats; those of the other model None without one."""

    tokens_R: np.ndarray  # int64
    nll_R: np.ndarray
    entropy_R: np.ndarray
    against_nll_R: np.ndarray | None = None
    against_entropy_R: np.ndarray | None = None
    kl_R: np.ndarray | None = None  # KL(model || against)
    reverse_kl_R: np.ndarray | None = None


def score_texts(
    model: LogitReader, against: LogitReader | None, rows: Sequence[Sequence[int]], pass_tokens: int
) -> TextSums:
    """Sums of each text. `rows`: of 2 tokens at least; `pass_tokens`: padded tokens of one pass."""
    found: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for chosen in micro_batches([len(row) for row in rows], pass_tokens):
        some = [rows[index] for index in chosen]
        numbers = _positions(model.read(some), None if against is None else against.read(some), some)
        ends = np.cumsum([0, *(len(row) - 1 for row in some)]).tolist()
        for index, (begin, end) in zip(chosen, pairwise(ends), strict=True):
            found[index] = numbers[:, begin:end].sum(1)
    sums = np.stack(found, 1)
    return TextSums(np.array([len(row) - 1 for row in rows]), *sums)


@torch.no_grad()
def _positions(model: OpenRows, against: OpenRows | None, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Numbers of every position, [2 or 6, N], in the order of `TextSums`."""
    targets_N = torch.tensor([token for row in rows for token in row[1:]])
    parts: list[torch.Tensor] = []
    begin, size = 0, 1
    while begin < len(targets_N):
        end = min(len(targets_N), begin + size)
        logits_CV = model.logits(begin, end)
        size = max(1, CHUNK_CELLS // logits_CV.shape[1])  # the first position told the width
        columns = _alone(logits_CV, targets_N[begin:end])
        if against is not None:
            other_CV = against.logits(begin, end)
            if other_CV.shape != logits_CV.shape:
                raise ServiceError(
                    f"the models predict {logits_CV.shape[1]} and {other_CV.shape[1]} tokens: their distributions "
                    "cannot be compared",
                    "user",
                )
            columns += _alone(other_CV, targets_N[begin:end])
            columns += [exact_forward_kl(*pair) for pair in _both_ways(logits_CV, other_CV)]
        parts.append(torch.stack([column.cpu() for column in columns]))
        begin = end
    return torch.cat(parts, 1).numpy()


def _alone(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> list[torch.Tensor]:
    """-log p of the targets, and entropy: float64 [C] each."""
    log_p_CV = torch.log_softmax(logits_CV, -1, dtype=torch.float64)
    nll_C = -log_p_CV.gather(1, targets_C.to(log_p_CV.device)[:, None])[:, 0]
    return [nll_C, token_entropy(log_p_CV)]


def _both_ways(left_CV: torch.Tensor, right_CV: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    left_CV, right_CV = left_CV.double().cpu(), right_CV.double().cpu()
    return (left_CV, right_CV), (right_CV, left_CV)
