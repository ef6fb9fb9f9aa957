"""Float32 master copies of a model's trainable weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rl_core.errors import DataError

__all__ = ["MasterWeights"]


class MasterWeights:
    """A model's trainable weights and the float32 parameters that the optimizer works on.

    Weights in bfloat16 or float16 get a float32 copy, on which gradients accumulate; otherwise small updates would be
    rounded away. Float32 weights are their own masters.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises: DataError when nothing in the model trains."""
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise DataError("the model has no trainable parameter")
        self.weights: dict[str, nn.Parameter] = trainable
        self.masters: dict[str, nn.Parameter] = {
            name: weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for name, weight in trainable.items()
        }
        self._copied = [  # (name, weight, master) where the two differ
            (name, weight, self.masters[name]) for name, weight in trainable.items() if weight.dtype != torch.float32
        ]

    @property
    def first(self) -> nn.Parameter:
        """A weight of the model, for its device and dtype."""
        return next(iter(self.weights.values()))

    def collect_gradients(self) -> None:
        """Add low-precision gradients to the float32 gradients of their masters."""
        for _, weight, master in self._copied:
            if weight.grad is None:
                continue
            grad = weight.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            weight.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Masters into the model, in place."""
        for _, weight, master in self._copied:
            weight.copy_(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters from the model, whose weights were changed from outside (a restored model)."""
        for _, weight, master in self._copied:
            master.copy_(weight)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The copies by name."""
        return {name: master.detach() for name, _, master in self._copied}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the model's weights are loaded elsewhere."""
        for name, _, master in self._copied:
            master.copy_(state[name])
