"""Exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_core.training.master_weights import MasterWeights
from rl_core.training.optimizers import load_averages

__all__ = ["EmaWeights"]


class EmaWeights:
    """Bias-corrected exponential moving average of weights, in float32.

    a_t = (1 - decay) / (1 - decay^t) sum over i = 1..t of decay^(t - i) w_i, over the weights after each update: the
    correction of Adam (arXiv:1412.6980, section 3). So a_1 = w_1, and the weights from before the first update have no
    part in it; an uncorrected average would hold them for about 1 / (1 - decay) updates. Kept up as
    a_t = a_(t-1) + (1 - decay) / (1 - decay^t) (w_t - a_(t-1)).
    """

    def __init__(self, master_weights: MasterWeights, decay: float | None) -> None:
        """decay: None = no average is kept, and every method does nothing."""
        self.decay = decay
        self.updates = 0  # t; at 0 the average is the weights themselves
        self.averages: dict[str, torch.Tensor] = {}
        self._master_weights = master_weights

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present weights."""
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
    def swapped_in(self) -> Iterator[None]:
        """The model holds the average inside; afterwards its weights are the very bits that they were before.

        In place, because a rollout engine holds on to the memory of the parameters.
        """
        weights = self._master_weights.weights
        before = {name: weights[name].detach().clone() for name in self.averages}
        self._write()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in before.items():
                    weights[name].copy_(weight)

    def adopt(self) -> None:
        """Leave the average in the model for good: training has ended."""
        if self.decay is not None:
            self._write()
            self._master_weights.refresh()

    @torch.no_grad()
    def _write(self) -> None:
        """The average into the model, in the weights' dtype."""
        for name, average in self.averages.items():
            self._master_weights.weights[name].copy_(average)

    def state_dict(self) -> dict[str, Any] | None:
        """The averages by parameter, and the number of updates in them; None where no average is kept."""
        return None if self.decay is None else {"updates": self.updates, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Inverse of `state_dict`; an average that only the settings or only the state know of starts afresh."""
        if self.decay is None or state is None:
            return
        self.updates = state["updates"]
        self.averages = load_averages(state["averages"], self._master_weights.masters)
