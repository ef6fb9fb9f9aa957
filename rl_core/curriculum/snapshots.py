"""Snapshots at the entry of curriculum stages, for rollback.

A snapshot holds everything that training changes: weights, optimizers (moments, float32 masters, averages), the
trainer's state (KL controller, reward normalisers, replay buffer) and the global random generators. Counters continue
across a rollback: iterations, optimizer steps (with the learning-rate schedule) and the draws of episodes, which depend
on the iteration number. So the iterations after a rollback play different rollouts from the discarded ones.
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
    """Part of `training.optimizer_step.OptimizerStep` that a rollback needs."""

    num_steps: int
    skipped_steps: int
    max_tokens: int | None
    learning_rate_scale: float

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, masters, averages and counters."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`."""


class StageSnapshots:
    """Snapshots on the CPU by the index of the entered stage, each as large as model and optimizer."""

    def __init__(self, model: nn.Module, optimizer_steps: Sequence[RestorableOptimizer]) -> None:
        """Start without snapshots.

        Args:
            model: everything that is trained, including the critic.
            optimizer_steps: of the policy, and of a separate critic.
        """
        self.model = model
        self.optimizer_steps = tuple(optimizer_steps)
        self._snapshots: dict[int, dict[str, Any]] = {}

    def update_snapshots(
        self, index: int, restorable: Set[int], extra: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Take a snapshot at the entry of stage `index` and drop unneeded ones. Call it before every iteration.

        Args:
            restorable: stages that may have to be restored; only their snapshots are kept.
            extra: returns the trainer's state as `state_dict`s.
        """
        self._snapshots = {
            stage: snapshot for stage, snapshot in self._snapshots.items() if stage in restorable
        }
        if index in restorable and index not in self._snapshots:
            self._snapshots[index] = {
                "model": collect_trainable_weights(self.model, copy=True),
                "optimizer_steps": [
                    _copy_state(step.state_dict()) for step in self.optimizer_steps
                ],
                "extra": _copy_state(extra()),
                "rng": collect_rng_state(),
            }

    def restore_stage(self, index: int, *, learning_rate_factor: float = 1.0) -> dict[str, Any]:
        """Restore weights, optimizers and random generators in place; the snapshot stays for further rollbacks.

        Args:
            learning_rate_factor: multiplies the learning rate, in addition to the factors of earlier rollbacks.
        Returns: a copy of the trainer's state for it to load.
        Raises: CheckpointError without a snapshot of the stage.
        """
        if index not in self._snapshots:
            raise CheckpointError(
                f"curriculum stage {index} cannot be restored: there is no snapshot of its entry"
            )
        snapshot = self._snapshots[index]
        load_trainable_weights(self.model, snapshot["model"])
        states = snapshot["optimizer_steps"]
        for optimizer_step, state in zip(self.optimizer_steps, states, strict=True):
            counters = {name: getattr(optimizer_step, name) for name in _COUNTERS}
            scale = optimizer_step.learning_rate_scale * learning_rate_factor
            # Copied, because an optimizer updates the tensors that it loads.
            optimizer_step.load_state_dict(_copy_state(state))
            for name, value in counters.items():
                setattr(optimizer_step, name, value)
            optimizer_step.learning_rate_scale = scale
        restore_rng_state(snapshot["rng"])
        return dict(_copy_state(snapshot["extra"]))

    def state_dict(self) -> dict[int, Any]:
        """Return all snapshots."""
        return dict(self._snapshots)

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Load a state; inverse of `state_dict`."""
        self._snapshots = {int(index): dict(snapshot) for index, snapshot in state.items()}


def _copy_state(value: Any) -> Any:
    """Copy a nested state with every tensor moved to the CPU; sharded tensors stay sharded, on their device."""
    if is_sharded_tensor(value):  # this process's rows
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copy_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_state(item) for item in value)
    return value
