"""Weights sent to workers: packed bytes, digests, and a model's structure without its weights."""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_core.errors import DataError


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as plain bytes, which processes on one machine share without copying."""

    dtype: str  # "float32"
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [bytes]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> PackedTensor:
        """Pack a tensor; a CPU tensor is not copied."""
        host_tensor = tensor.detach().cpu().contiguous()
        return cls(
            str(host_tensor.dtype).removeprefix("torch."),
            tuple(host_tensor.shape),
            _view_bytes(host_tensor),
        )

    def unpack_tensor(self) -> torch.Tensor:
        """Return a read-only tensor over the same memory."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # torch warns that shared memory is read-only
            flat = torch.from_numpy(self.data)
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version of the weights: the tensors that changed since the previous version."""

    number: int  # version
    changed: dict[str, PackedTensor]
    digest: str  # of all trained weights after the update

    @property
    def num_bytes(self) -> int:
        """Size of the sent tensors."""
        return sum(packed.data.nbytes for packed in self.changed.values())


def pack_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, PackedTensor]:
    """Pack every tensor."""
    return {name: PackedTensor.from_tensor(tensor) for name, tensor in weights.items()}


def digest_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Compute the SHA-256 of each tensor's type, shape and bytes, in parallel because hashing releases the
    interpreter lock.
    """
    with ThreadPoolExecutor(min(len(weights), 4, os.cpu_count() or 1) or 1) as pool:
        digests = pool.map(
            lambda tensor: _digest_tensor(tensor.detach().cpu().contiguous()), weights.values()
        )
        return dict(zip(weights, digests, strict=True))


def combine_digests(by_name: Mapping[str, str]) -> str:
    """Combine the digests of all tensors into one, independent of their order."""
    lines = "\n".join(f"{name} {by_name[name]}" for name in sorted(by_name))
    return hashlib.sha256(lines.encode()).hexdigest()


def _digest_tensor(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_view_bytes(tensor).data)
    return digest.hexdigest()


def _view_bytes(tensor: torch.Tensor) -> np.ndarray:
    if not tensor.numel():
        return np.zeros(0, dtype=np.uint8)
    return tensor.reshape(-1).view(torch.uint8).numpy()


def collect_unique_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect every parameter and persistent buffer, tied ones under one name."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def copy_without_weights(model: nn.Module) -> Any:
    """Copy the model's structure and everything but its weights; the copy is small enough to send."""
    memo: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def restore_weights(empty: Any, weights: Mapping[str, PackedTensor], device: str = "cpu") -> Any:
    """Fill the result of `copy_without_weights` with packed weights of `collect_unique_weights`, in their own memory.

    Raises: DataError if one is missing.
    """
    by_tensor: dict[int, torch.Tensor] = {}
    for name, tensor in empty.state_dict(keep_vars=True).items():
        if name in weights:
            weight = weights[name].unpack_tensor().clone()
            if isinstance(tensor, nn.Parameter):
                weight = nn.Parameter(weight, tensor.requires_grad)
            by_tensor[id(tensor)] = weight
    for module in empty.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in _list_meta_tensors(table):
                if id(tensor) not in by_tensor:
                    raise DataError(f"weight {name} of {type(module).__name__} was not sent")
                table[name] = by_tensor[id(tensor)]
    return empty.to(device)


def _list_meta_tensors(
    table: Mapping[str, torch.Tensor | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(
        [(name, tensor) for name, tensor in table.items() if tensor is not None and tensor.is_meta]
    )
