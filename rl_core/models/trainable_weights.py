"""Trainable weights of a model: what checkpoints and snapshots store, without frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_core.distributed.sharding import is_sharded_tensor, to_local_rows
from rl_core.errors import CheckpointError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_DIGEST_CHUNK = 2**22  # entries that are widened at a time


def _list_frozen_names(model: nn.Module) -> set[str]:
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def collect_trainable_weights(model: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
    """Collect every trainable parameter and every persistent buffer; frozen weights (under LoRA) never change.

    Args:
        copy: a snapshot on the CPU that later updates do not change; False = the live tensors. Sharded weights are
            this process's rows, on their device.
    """
    frozen = _list_frozen_names(model)
    weights = {
        name: tensor.detach() for name, tensor in model.state_dict().items() if name not in frozen
    }
    if any(is_sharded_tensor(tensor) for tensor in weights.values()):
        return _collect_sharded_weights(model, weights, copy=copy)
    if not copy:
        return weights
    # one copy for all names of a tied weight
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    snapshot = {}
    for name, tensor in weights.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if memory not in copies or not tensor.numel():
            copies[memory] = tensor.to("cpu", copy=True)
        snapshot[name] = copies[memory]
    return snapshot


def _collect_sharded_weights(
    model: nn.Module, weights: dict[str, torch.Tensor], *, copy: bool
) -> dict[str, torch.Tensor]:
    """Collect sharded weights with one object for all names of a tied one.

    Objects identify ties alike in every process; memory addresses do not.
    """
    owners = {
        name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    unique: dict[Any, torch.Tensor] = {}
    result = {}
    for name, tensor in weights.items():
        owner = owners.get(name, name)
        if owner not in unique:
            unique[owner] = tensor.clone() if copy else tensor
        result[name] = unique[owner]
    return result


@torch.no_grad()
def digest_trainable_weights(model: nn.Module) -> int:
    """Return a 64-bit number that follows from all bits of the trainable parameters, of sharded ones this process's.

    It is a sum over entries, so numbers of shards add up. It detects that nothing has changed; it is no protection.
    """
    digest = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        rows = to_local_rows(parameter.detach()).contiguous().flatten()
        bits = rows.view(_INTEGERS[rows.element_size()])
        for chunk in bits.split(_DIGEST_CHUNK):
            chunk = chunk.long()
            # Of the sum alone, two opposite steps could cancel.
            digest += int(chunk.sum()) + 3 * int((chunk * chunk).sum())
    return digest % 2**64


def load_trainable_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights of `collect_trainable_weights`.

    Raises: CheckpointError if names or shapes differ.
    """
    expected = collect_trainable_weights(model)
    missing = sorted(expected.keys() - weights.keys())
    unexpected = sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"weights of another model: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{name}: shape {tuple(tensor.shape)}, the model has {tuple(expected[name].shape)}"
            )
    model.load_state_dict(dict(weights), strict=False)


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give the model these weights temporarily, in place; restore its own bit for bit afterwards."""
    previous = {name: tensor.clone() for name, tensor in collect_trainable_weights(model).items()}
    try:
        load_trainable_weights(model, weights)
        yield
    finally:
        load_trainable_weights(model, previous)
