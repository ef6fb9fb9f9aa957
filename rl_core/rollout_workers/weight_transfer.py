"""Weights on their way to a worker: packed bytes, digests, and a model's structure without its weights."""

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
    """A tensor as plain bytes, which processes on one machine share without a copy."""

    dtype: str  # "float32"
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [bytes]

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> PackedTensor:
        """Pack a tensor; one on the CPU is not copied."""
        plain = tensor.detach().cpu().contiguous()
        return cls(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), _view_bytes(plain))

    def unpack_tensor(self) -> torch.Tensor:
        """The tensor over the same memory, to be read alone."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # shared memory cannot be written to
            flat = torch.from_numpy(self.data)
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version of the weights: the tensors that changed since the version before it."""

    number: int  # of the version
    changed: dict[str, PackedTensor]
    digest: str  # of all weights that the trainer changes, after it

    @property
    def num_bytes(self) -> int:
        """Size of what is sent."""
        return sum(packed.data.nbytes for packed in self.changed.values())


def pack_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, PackedTensor]:
    """Pack every tensor."""
    return {name: PackedTensor.from_tensor(tensor) for name, tensor in weights.items()}


def digest_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's type, shape and bytes; large ones beside each other, as hashing holds no lock."""
    with ThreadPoolExecutor(min(len(weights), 4, os.cpu_count() or 1) or 1) as pool:
        found = pool.map(
            lambda tensor: _digest_tensor(tensor.detach().cpu().contiguous()), weights.values()
        )
        return dict(zip(weights, found, strict=True))


def combine_digests(by_name: Mapping[str, str]) -> str:
    """One digest of the digests of all tensors, whatever their order."""
    return hashlib.sha256(
        "\n".join(f"{name} {by_name[name]}" for name in sorted(by_name)).encode()
    ).hexdigest()


def _digest_tensor(tensor: torch.Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    found.update(_view_bytes(tensor).data)
    return found.hexdigest()


def _view_bytes(tensor: torch.Tensor) -> np.ndarray:
    return (
        tensor.reshape(-1).view(torch.uint8).numpy()
        if tensor.numel()
        else np.zeros(0, dtype=np.uint8)
    )


def collect_unique_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, a tied one under one name."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def copy_without_weights(model: nn.Module) -> Any:
    """A copy of the model's structure with everything but its weights, small enough to be sent."""
    memo: dict[int, Any] = {}
    for tensor in model.state_dict(keep_vars=True).values():
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def restore_weights(empty: Any, weights: Mapping[str, PackedTensor], device: str = "cpu") -> Any:
    """Give a `skeleton` the weights that `pack(collect_unique_weights(model))` took, as memory of its own.

    Raises: DataError where one is missing.
    """
    by_tensor: dict[int, torch.Tensor] = {}
    for name, tensor in empty.state_dict(keep_vars=True).items():
        if name in weights:
            real = weights[name].unpack_tensor().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            by_tensor[id(tensor)] = (
                nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            )
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
