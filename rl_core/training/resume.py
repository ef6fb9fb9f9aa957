"""Parts of a resumable state: trainable weights, random generators, and the run's fingerprint."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_core.errors import CheckpointError, ResumeRefused

__all__ = [
    "check_fingerprint",
    "load_trainable_weights",
    "restore_rng",
    "rng_state",
    "runtime_fingerprint",
    "trainable_weights",
]

logger = logging.getLogger(__name__)


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def trainable_weights(model: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Every trainable parameter and persistent buffer; frozen weights (under LoRA) are loaded from the start model.

    `copy` gives a snapshot on the CPU that later updates do not change; otherwise the live tensors. Of sharded
    weights, it is this process's rows, on their device.
    """
    frozen = _frozen(model)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in frozen}
    if any(isinstance(tensor, DTensor) for tensor in weights.values()):
        return _sharded_weights(model, weights, copy=copy)
    if not copy:
        return weights
    copies: dict[tuple[Any, ...], torch.Tensor] = {}  # tied weights: one copy for all names of one parameter
    snapshot = {}
    for name, tensor in weights.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.to("cpu", copy=True)
        snapshot[name] = copies[memory]
    return snapshot


def _sharded_weights(model: nn.Module, weights: dict[str, torch.Tensor], *, copy: bool) -> dict[str, torch.Tensor]:
    """One object for all names of a tied weight: equal in every process, unlike addresses in memory."""
    owners = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    unique: dict[Any, torch.Tensor] = {}
    result = {}
    for name, tensor in weights.items():
        owner = owners.get(name, name)
        if owner not in unique:
            unique[owner] = tensor.clone() if copy else tensor
        result[name] = unique[owner]
    return result


def load_trainable_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `trainable_weights`. Raises CheckpointError if names or shapes differ."""
    expected = trainable_weights(model)
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(f"weights of another model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(f"{name}: shape {tuple(tensor.shape)}, the model has {tuple(expected[name].shape)}")
    model.load_state_dict(dict(weights), strict=False)


def rng_state() -> dict[str, Any]:
    """State of the global generators: python, numpy, torch, and each CUDA device's."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Inverse of `rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)


def runtime_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Properties of the runtime that change float sums: threads, torch version, device."""
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": name}


def _flatten(tree: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> canonical JSON of each leaf, so that tuples equal lists after a round trip."""
    if isinstance(tree, Mapping) and tree:
        leaves: dict[str, str] = {}
        for key, value in tree.items():
            leaves |= _flatten(value, f"{path}.{key}" if path else str(key))
        return leaves
    return {path: json.dumps(tree, sort_keys=True, default=str)}


def check_fingerprint(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    allow_changed: bool = False,
    besides: Collection[str] = (),
) -> None:
    """Compare key by key. Raises ResumeRefused naming every differing key with both values, unless allowed.

    besides: dotted keys that may differ.
    """
    old, new = _flatten(saved), _flatten(present)
    changed = [
        f"{key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in besides
    ]
    if not changed:
        return
    listing = "\n  ".join(changed)
    if allow_changed:
        logger.warning("resuming although these changed since the checkpoint:\n  %s", listing)
        return
    raise ResumeRefused(
        f"the checkpoint belongs to a run that differs from this one:\n  {listing}\n"
        "start afresh in another folder, put the old values back, or allow the change explicitly"
    )
