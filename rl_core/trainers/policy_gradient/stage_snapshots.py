"""How stages of the curriculum were entered, kept so that training can go back there: all that learning changed.

That is weights, optimizer (moments, float32 masters, averages), whatever the trainer adds (KL controller, reward
normalisers, replay) and the global random generators. What only counts goes on over a rollback: iterations, optimizer
steps and with them the learning-rate schedule, and the draws of episodes, which follow from the iteration's number; so
the iterations after a rollback play other rollouts than those that were thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_core.errors import CheckpointError
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.training.resume import load_trainable_weights, restore_rng, rng_state, trainable_weights

__all__ = ["StageSnapshots"]


class StageSnapshots:
    """Snapshots by the index of the stage that was entered, on the CPU, each as large as model and optimizer."""

    def __init__(self, model: nn.Module, optimizer_steps: Sequence[OptimizerStep]) -> None:
        """model: all that trains, the critic included. optimizer_steps: the policy's, and a separate critic's."""
        self.model = model
        self.optimizer_steps = tuple(optimizer_steps)
        self._snapshots: dict[int, dict[str, Any]] = {}

    def keep(self, index: int, restorable: Set[int], extra: Callable[[], Mapping[str, Any]]) -> None:
        """Before an iteration of the stage `index`: remember how it is entered, once, and forget what is not needed.

        Args:
            restorable: stages that may have to be begun again; only they are kept.
            extra: gives what else goes back, as `state_dict`s.
        """
        self._snapshots = {place: entry for place, entry in self._snapshots.items() if place in restorable}
        if index in restorable and index not in self._snapshots:
            self._snapshots[index] = {
                "model": trainable_weights(self.model, copy=True),
                "optimizer_steps": [_copied(optimizer_step.state_dict()) for optimizer_step in self.optimizer_steps],
                "extra": _copied(extra()),
                "rng": rng_state(),
            }

    def restore(self, index: int, *, learning_rate_factor: float = 1.0) -> dict[str, Any]:
        """Put weights, optimizers and random generators back, in place; the snapshot stays for another time.

        The learning rate is multiplied by the factor on top of what earlier rollbacks took off it.
        Returns: a copy of what `extra` gave, for the trainer to load.
        """
        if index not in self._snapshots:
            raise CheckpointError(f"curriculum stage {index} has to be begun again, but its entry was not kept")
        entry = self._snapshots[index]
        load_trainable_weights(self.model, entry["model"])
        for optimizer_step, state in zip(self.optimizer_steps, entry["optimizer_steps"], strict=True):
            step, skipped, max_tokens = (
                optimizer_step.num_steps,
                optimizer_step.skipped_steps,
                optimizer_step.max_tokens,
            )
            scale = optimizer_step.learning_rate_scale * learning_rate_factor
            optimizer_step.load_state_dict(_copied(state))  # a copy: an optimizer works on in the tensors that it loads
            optimizer_step.num_steps, optimizer_step.skipped_steps, optimizer_step.max_tokens = (
                step,
                skipped,
                max_tokens,
            )
            optimizer_step.learning_rate_scale = scale
        restore_rng(entry["rng"])
        return dict(_copied(entry["extra"]))

    def state_dict(self) -> dict[int, Any]:
        """All that is kept."""
        return dict(self._snapshots)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Inverse of `state_dict`."""
        self._snapshots = {int(index): dict(entry) for index, entry in state.items()}


def _copied(value: Any) -> Any:
    """The same nested state with every tensor copied to the CPU; one that is shared out stays so."""
    if isinstance(value, DTensor):  # this process's rows, where they are
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
