"""Float32 master copies of a model's trainable weights, and their exponential moving average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_core.errors import DataError
from rl_core.training.optimizers import load_averages


class MasterWeights:
    """The trainable weights of a model and the float32 parameters that the optimizer works on.

    Weights in bfloat16 or float16 get a float32 copy, on which gradients accumulate; otherwise small updates would be
    rounded away. Float32 weights are their own masters.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy low-precision weights. Raises: DataError if nothing in the model is trainable."""
        trainable = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if not trainable:
            raise DataError("the model has no trainable parameter")
        self.weights: dict[str, nn.Parameter] = trainable
        self.masters: dict[str, nn.Parameter] = {
            name: weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for name, weight in trainable.items()
        }
        self._copied = [  # (name, weight, master) if the two differ
            (name, weight, self.masters[name])
            for name, weight in trainable.items()
            if weight.dtype != torch.float32
        ]

    @property
    def first_weight(self) -> nn.Parameter:
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
    def write_weights_back(self) -> None:
        """Copy the masters into the model, in place."""
        for _, weight, master in self._copied:
            weight.copy_(master)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copy the model's weights, which were changed from outside (a restored model), into the masters."""
        for _, weight, master in self._copied:
            master.copy_(weight)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the copies by name."""
        return {name: master.detach() for name, _, master in self._copied}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; the model's weights are loaded elsewhere."""
        for name, _, master in self._copied:
            master.copy_(state[name])


class EmaWeights:
    """Bias-corrected exponential moving average of weights, in float32.

    a_t = (1 - decay) / (1 - decay^t) sum over i = 1..t of decay^(t - i) w_i, over the weights after each update: the
    correction of Adam (arXiv:1412.6980, section 3). Hence a_1 = w_1, and the weights before the first update have no
    influence; an uncorrected average would contain them for about 1 / (1 - decay) updates. Updated as
    a_t = a_(t-1) + (1 - decay) / (1 - decay^t) (w_t - a_(t-1)).
    """

    def __init__(self, master_weights: MasterWeights, decay: float | None) -> None:
        """Start without an average. `decay`: None = keep no average; every method then does nothing."""
        self.decay = decay
        self.updates = 0  # t; at 0 the average is the weights themselves
        self.averages: dict[str, torch.Tensor] = {}
        self._master_weights = master_weights

    @torch.no_grad()
    def update_averages(self) -> None:
        """Add the current weights to the averages."""
        if self.decay is None:
            return
        self.updates += 1
        share = (1.0 - self.decay) / (1.0 - self.decay**self.updates)
        for name, master in self._master_weights.masters.items():
            if self.updates == 1:
                self.averages[name] = master.detach().clone()
            else:
                self.averages[name].lerp_(master, share)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Put the averages into the model inside the context; afterwards restore its weights bit for bit.

        In place, because a rollout engine holds references to the memory of the parameters.
        """
        weights = self._master_weights.weights
        original_weights = {name: weights[name].detach().clone() for name in self.averages}
        self._write_averages()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in original_weights.items():
                    weights[name].copy_(weight)

    def adopt_averages(self) -> None:
        """Leave the averages in the model, as training has ended."""
        if self.decay is not None:
            self._write_averages()
            self._master_weights.refresh_masters()

    @torch.no_grad()
    def _write_averages(self) -> None:
        """Copy the averages into the model, in the weights' dtype."""
        for name, average in self.averages.items():
            self._master_weights.weights[name].copy_(average)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the averages by parameter and the number of updates in them; None without averages."""
        if self.decay is None:
            return None
        return {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a `state_dict`; an average that only the settings or only the state contain starts from scratch."""
        if self.decay is None or state is None:
            return
        self.updates = state["updates"]
        self.averages = load_averages(state["averages"], self._master_weights.masters)
