"""Moments of an optimizer as a state: without its settings, which are those of the run that resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.errors import CheckpointError

__all__ = ["load_moments", "moments"]


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{"state": {number of the parameter: its moments}}."""
    return {"state": optimizer.state_dict()["state"]}


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Inverse of `moments`. Learning rate, decay and the like stay as the optimizer was made.

    Raises: CheckpointError for moments of other parameters: torch's fused kernels would read beyond them.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in state["state"].items():
        if not isinstance(number, int) or not 0 <= number < len(parameters):
            raise CheckpointError(f"optimizer: moments of parameter {number}, but {len(parameters)} are trained")
        shape = parameters[number].shape
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != shape:
                raise CheckpointError(
                    f"optimizer: {name} of parameter {number} has shape {tuple(value.shape)}, not {tuple(shape)}"
                )
    optimizer.load_state_dict({"state": dict(state["state"]), "param_groups": groups})
