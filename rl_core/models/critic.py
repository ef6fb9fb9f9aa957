"""Value functions over token sequences: a critic with a trunk of its own, or a head on the policy's.

B rows, S sequence, N positions, H hidden.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_core.errors import DataError
from rl_core.models.hidden_states import hidden_states
from rl_core.models.logprobs import TokenOutputs, token_outputs
from rl_core.models.lora import unwrap
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PolicyWithCritic", "SeparateCritic", "ValueHead", "hidden_size"]


def hidden_size(model: PreTrainedModel) -> int:
    """Width of the hidden states that the model's head reads."""
    return int(unwrap(model).get_output_embeddings().weight.shape[1])


class ValueHead(nn.Module):
    """Linear map of hidden states to values in float32. It starts at 0: the first advantages use no values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, 1)  # a name that ends in `head` keeps it out of Muon
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N] (float64 for float64)."""
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight, bias = self.head.weight.to(dtype), self.head.bias.to(dtype)
            return nn.functional.linear(hidden_NH.to(dtype), weight, bias).squeeze(-1)


class SeparateCritic(nn.Module):
    """A copy of a causal model's trunk, adapters included, with a value head. Its training never changes the policy."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.trunk: Any = copy.deepcopy(unwrap(model).base_model)
        reference = next(model.parameters())
        self.head = ValueHead(hidden_size(model)).to(device=reference.device)

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Value of the state before each loss token, [B, S] (0 elsewhere), and after each row's last real token, [B].

        Raises: DataError when position 0 carries loss.
        """
        mask_BS = batch.loss_mask_BS
        if bool(mask_BS[:, 0].any()):
            raise DataError("loss_mask is True at position 0, which has no token before it")
        hidden_BSH = hidden_states(self.trunk, batch)
        after_BS = self.head(hidden_BSH.reshape(-1, hidden_BSH.shape[-1])).view(mask_BS.shape)
        before_BS = torch.cat([after_BS.new_zeros(len(after_BS), 1), after_BS[:, :-1]], dim=1)
        last_B1 = batch.attention_mask_BS.sum(1, keepdim=True) - 1
        return torch.where(mask_BS, before_BS, before_BS.new_zeros(())), after_BS.gather(1, last_B1).squeeze(1)


class PolicyWithCritic(nn.Module):
    """A policy and its value function as one module, so that one checkpoint holds both."""

    def __init__(self, policy: PreTrainedModel, critic: SeparateCritic | ValueHead) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def value_head(self) -> ValueHead | None:
        """The head on the policy's own hidden states, where there is one."""
        return self.critic if isinstance(self.critic, ValueHead) else None

    def values(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Values before each loss token, [B, S], and after each row's last real token, [B]."""
        if isinstance(self.critic, SeparateCritic):
            values_BS, after_B = self.critic(batch)
            return values_BS, after_B
        outputs: TokenOutputs = token_outputs(self.policy, batch, value_head=self.critic)
        assert outputs.values_BS is not None and outputs.value_after_B is not None
        return outputs.values_BS, outputs.value_after_B

    def get_output_embeddings(self) -> nn.Module | None:
        """The policy's output head."""
        return self.policy.get_output_embeddings()
