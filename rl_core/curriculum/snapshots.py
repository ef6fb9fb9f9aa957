"""Snapshots taken at curriculum-stage entry, used for rollback.

A snapshot holds everything that training changes: weights, optimizers (moments, float32 masters, averages), the
trainer's own state (KL controller, reward normalisers, replay buffer) and the global random generators. Counters go on
over a rollback: iterations, optimizer steps and with them the learning-rate schedule, and the draws of episodes, which
follow from the iteration's number; so the iterations after a rollback play other rollouts than the discarded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import nn

from rl_core.distributed.sharding import is_sharded_tensor
from rl_core.errors import CheckpointError
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.storage.checkpoint import collect_rng_state, restore_rng_state

_COUNTERS = ("num_steps", "skipped_steps", "max_tokens")  # of an optimizer step, not restored


class RestorableOptimizer(Protocol):
    """The part of `training.optimizer_step.OptimizerStep` that a rollback needs."""

    num_steps: int
    skipped_steps: int
    max_tokens: int | None
    learning_rate_scale: float

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, masters, averages and counters."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""


class StageSnapshots:
    """Snapshots by the index of the stage that was entered, on the CPU, each as large as model and optimizer."""

    def __init__(self, model: nn.Module, optimizer_steps: Sequence[RestorableOptimizer]) -> None:
        """model: all that trains, the critic included. optimizer_steps: the policy's, and a separate critic's."""
        self.model = model
        self.optimizer_steps = tuple(optimizer_steps)
        self._snapshots: dict[int, dict[str, Any]] = {}

    def update_snapshots(
        self, index: int, restorable: Set[int], extra: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Called before every iteration, in stage `index`: take a snapshot at its entry, and drop unneeded ones.

        Args:
            restorable: stages that may have to be restored; only their snapshots are kept.
            extra: gives the trainer's own state, as `state_dict`s.
        """
        self._snapshots = {
            place: entry for place, entry in self._snapshots.items() if place in restorable
        }
        if index in restorable and index not in self._snapshots:
            self._snapshots[index] = {
                "model": collect_trainable_weights(self.model, copy=True),
                "optimizer_steps": [
                    _copy_state(optimizer_step.state_dict())
                    for optimizer_step in self.optimizer_steps
                ],
                "extra": _copy_state(extra()),
                "rng": collect_rng_state(),
            }

    def restore_stage(self, index: int, *, learning_rate_factor: float = 1.0) -> dict[str, Any]:
        """Restore weights, optimizers and random generators in place; the snapshot is kept for further rollbacks.

        Args:
            learning_rate_factor: multiplies the learning rate, on top of the factors of earlier rollbacks.
        Returns: a copy of the trainer's own state, for it to load.
        Raises: CheckpointError where there is no snapshot of the stage.
        """
        if index not in self._snapshots:
            raise CheckpointError(
                f"curriculum stage {index} cannot be restored: there is no snapshot of its entry"
            )
        entry = self._snapshots[index]
        load_trainable_weights(self.model, entry["model"])
        for optimizer_step, state in zip(
            self.optimizer_steps, entry["optimizer_steps"], strict=True
        ):
            kept = {name: getattr(optimizer_step, name) for name in _COUNTERS}
            scale = optimizer_step.learning_rate_scale * learning_rate_factor
            # a copy: an optimizer works on in the tensors that it loads
            optimizer_step.load_state_dict(_copy_state(state))
            for name, value in kept.items():
                setattr(optimizer_step, name, value)
            optimizer_step.learning_rate_scale = scale
        restore_rng_state(entry["rng"])
        return dict(_copy_state(entry["extra"]))

    def state_dict(self) -> dict[int, Any]:
        """All snapshots."""
        return dict(self._snapshots)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Inverse of `state_dict`."""
        self._snapshots = {int(index): dict(entry) for index, entry in state.items()}


def _copy_state(value: Any) -> Any:
    """The same nested state with every tensor copied to the CPU; sharded tensors stay sharded, on their device."""
    if is_sharded_tensor(value):  # this process's rows
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_state(item) for item in value)
    return value
