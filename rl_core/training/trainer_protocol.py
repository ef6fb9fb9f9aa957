"""Interface of a trainer, as the training loop uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from rl_core.training.optimizer_step import OptimizerStep

__all__ = ["Trainer"]


class Trainer(Protocol):
    """Interface of a trainer. The loop itself saves the model's trainable weights, the optimizer step and global RNGs.

    A trainer may also have a property `finished -> str | None`: the reason why it wants no further iteration.
    """

    @property
    def model(self) -> nn.Module:
        """The module whose trainable parameters and buffers are saved, and restored from the best evaluation."""

    @property
    def optimizer_step(self) -> OptimizerStep:
        """Owner of the optimizer; `optimizer_step.num_steps` is the x axis of the metrics."""

    def step(self) -> Mapping[str, float]:
        """One iteration; its metrics, fully named (`train/loss`)."""

    def evaluate(self) -> Mapping[str, float]:
        """Metrics of the present weights on held-out data; changes nothing that training depends on but the RNG.

        With ema_decay the loop has put the averaged weights into the model, in place.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything else that the next step depends on: data order, curriculum, own generators, histories."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
