"""Learned baseline: a value head, linear or an MLP, on the policy's hidden states, averaged over all tokens so far.

Suffixes: B rows, S sequence, H hidden, N states, W width of a hidden layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional

from rl_core.data.batches import build_unscored_batch, plan_micro_batches
from rl_core.errors import DataError
from rl_core.losses.value import value_loss
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.lora import unwrap_model
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import ThoughtsSettings
from rl_core.storage.checkpoint import extract_moments, load_moments

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BaselineHead(nn.Module):
    """Value head on pooled hidden states: linear, or with hidden layers and tanh between; initially 0 everywhere.

    States are normalised and divided by sqrt(H), so that one learning rate suits models of every width. Hidden layers
    see them only normalised; the output layer sees the units of the last hidden layer divided by sqrt(width).
    """

    def __init__(self, hidden_size: int, layers: int = 1, width: int = 256, seed: int = 0) -> None:
        """Build the layers.

        Args:
            layers: 1 = linear. width: units of the hidden layers. seed: of their weights, orthogonal with gain 1.
        """
        super().__init__()
        sizes = [hidden_size, *[width] * (layers - 1)]
        with torch.random.fork_rng(
            devices=[]
        ):  # torch's default initialisation draws random numbers
            hidden = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.hidden = nn.ModuleList(hidden)
        self.linear = nn.Linear(sizes[-1], 1)
        generator = torch.Generator().manual_seed(seed)
        for layer in hidden:
            nn.init.orthogonal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Compute values, float32 [N]."""
        units_NW = functional.layer_norm(states_NH.float(), (states_NH.shape[-1],))
        for layer in self.hidden:
            units_NW = torch.tanh(layer(units_NW))
        return self.linear(units_NW * units_NW.shape[-1] ** -0.5).squeeze(-1)


class LearnedBaseline:
    """Value head with its own optimizer; no gradient reaches the policy.

    The optimizer is separate because values need another learning rate than weights; the head is thus not part of the
    policy.
    """

    def __init__(
        self,
        hidden_size: int,
        learning_rate: float,
        device: torch.device,
        *,
        layers: int = 1,
        width: int = 256,
        coef: float = 1.0,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        seed: int = 0,
    ) -> None:
        """Build head and optimizer.

        Args:
            layers, width, seed: as in `BaselineHead`. coef: weight of the loss. optimizer: sgd is without momentum.
        """
        self.head = BaselineHead(hidden_size, layers, width, seed).to(device)
        self.coef = coef
        self.optimizer: torch.optim.Optimizer
        if optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(
                self.head.parameters(), lr=learning_rate, weight_decay=0.0
            )
        else:
            self.optimizer = torch.optim.SGD(self.head.parameters(), lr=learning_rate)

    @classmethod
    def from_settings(
        cls, settings: ThoughtsSettings, hidden_size: int, device: torch.device, seed: int
    ) -> LearnedBaseline:
        """Build the baseline that the settings describe."""
        return cls(
            hidden_size,
            settings.baseline_learning_rate,
            device,
            layers=settings.baseline_layers,
            width=settings.baseline_width,
            coef=settings.baseline_coef,
            optimizer=settings.baseline_optimizer,
            seed=seed,
        )

    @torch.no_grad()
    def predict_values(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Predict values, float32 [N]."""
        return self.head(states_NH)

    def fit_returns(self, states_NH: torch.Tensor, returns_N: torch.Tensor) -> float:
        """Run one optimizer step on coef / 2 mean((v - R)^2). Returns: the loss before the step, without coef."""
        mask_1N = torch.ones(1, len(returns_N), dtype=torch.bool, device=returns_N.device)
        with torch.enable_grad():
            values_1N = self.head(states_NH)[None]
            loss, _ = value_loss(
                values_1N, returns_N[None].float(), mask_1N, num_loss_tokens=len(returns_N)
            )
            self.optimizer.zero_grad(set_to_none=True)
            (loss if self.coef == 1 else self.coef * loss).backward()
        self.optimizer.step()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer moments."""
        return {"head": self.head.state_dict(), "optimizer": extract_moments(self.optimizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.head.load_state_dict(state["head"])
        load_moments(self.optimizer, state["optimizer"])


@torch.no_grad()
def compute_pooled_states(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    *,
    pad_id: int,
    max_tokens: int = 16384,
) -> list[torch.Tensor]:
    """Compute the mean last hidden state over the first `end` tokens of a row, for each of its ends; no gradient.

    Attention is causal, so one pass over the whole row yields the states of all its prefixes.

    Args:
        ends: for each row, prefix lengths within 1..len(row).
    Returns: for each row, float32 [len(ends), H] on the model's device.
    Raises: DataError for an end outside its row.
    """
    for index, (row, row_ends) in enumerate(zip(rows, ends, strict=True)):
        if any(not 1 <= end <= len(row) for end in row_ends):
            raise DataError(f"row {index}: ends {list(row_ends)} must lie in 1..{len(row)}")
    base = unwrap_model(model)
    device = next(base.parameters()).device
    pooled: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    lengths = [len(row) for row in rows]

    def fill_pooled(indices: list[int]) -> None:
        batch = build_unscored_batch([rows[index] for index in indices], pad_id)
        hidden_BSH = compute_hidden_states(base, batch.to(device))
        sums_BSH = hidden_BSH.float().cumsum(1)
        for b, index in enumerate(indices):
            ends_N = torch.tensor(list(ends[index]), dtype=torch.int64, device=device)
            pooled[index] = sums_BSH[b, ends_N - 1] / ends_N[:, None]

    with use_eval_mode(model):
        groups = plan_micro_batches(lengths, max_tokens)
        MemoryFit("states for the baseline").compute_batches(groups, fill_pooled, lengths=lengths)
    return pooled
