"""A learned baseline: the value of a state from the policy's hidden states, pooled over all tokens before it.

B rows, S sequence, H hidden, N states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from rl_core.data.batches import micro_batches, pad_rows
from rl_core.errors import DataError
from rl_core.models.causal_lm import evaluating
from rl_core.models.lora import unwrap

__all__ = ["BaselineHead", "pooled_states"]


class BaselineHead(nn.Module):
    """A linear value head on pooled hidden states; 0 everywhere at the start.

    States are normalised and divided by sqrt(H), so that one learning rate suits models of every width.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Values, float32 [N]."""
        size = states_NH.shape[-1]
        return self.linear(functional.layer_norm(states_NH.float(), (size,)) * size**-0.5).squeeze(-1)


@torch.no_grad()
def pooled_states(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    *,
    pad_id: int,
    max_tokens: int = 16384,
) -> list[torch.Tensor]:
    """Mean of the last hidden states over the first `end` tokens of a row, for each of its ends; no gradient.

    Attention is causal, so one pass over the whole row gives the states of all its prefixes.

    Args:
        ends: for each row, prefix lengths within 1..len(row).
    Returns: for each row, float32 [len(ends), H] on the model's device.
    Raises: DataError for an end outside its row.
    """
    for index, (row, places) in enumerate(zip(rows, ends, strict=True)):
        if any(not 1 <= place <= len(row) for place in places):
            raise DataError(f"row {index}: ends {list(places)} must lie in 1..{len(row)}")
    base = unwrap(model)
    device = next(base.parameters()).device
    pooled: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    with evaluating(model):
        for group in micro_batches([len(row) for row in rows], max_tokens):
            ids_BS = pad_rows([rows[index] for index in group], pad_id).to(device)
            hidden_BSH = base.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
            sums_BSH = hidden_BSH.float().cumsum(1)
            for b, index in enumerate(group):
                ends_N = torch.tensor(list(ends[index]), dtype=torch.int64, device=device)
                pooled[index] = sums_BSH[b, ends_N - 1] / ends_N[:, None]
    return pooled
