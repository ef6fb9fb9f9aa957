"""Sharding of a model's weights among processes: FSDP2 (`torch.distributed.fsdp.fully_shard`).

Sharded tensors and modules are recognised without importing torch's packages for them, which takes seconds: as long as
no code has imported such a package, none of its objects can exist.

Source: Zhao et al. 2023, arXiv:2304.11277 (FSDP); Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_core.distributed.group import ProcessGroup
from rl_core.errors import NonFiniteTensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


T = TypeVar("T")
Path = tuple[Any, ...]


def is_sharded_tensor(value: Any) -> TypeGuard[DTensor]:
    """Return whether the value is a `torch.distributed.tensor.DTensor`."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def is_sharded_module(module: Any) -> TypeGuard[FSDPModule]:
    """Return whether the module was sharded by `torch.distributed.fsdp.fully_shard`."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)


class _ForwardShell(nn.Module):
    """Module whose forward pass is any computation with the model.

    Trainers read hidden states, heads and single weights of a model instead of calling it, and FSDP provides the full
    weights only within the forward pass of its root module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class Shards:
    """Sharding of a model's weights, gradients and optimizer state: each process holds rows of every tensor.

    After construction the model's parameters are DTensors; computations with the model run in `run_with_full_weights`.
    Gradients are summed over processes, not averaged: losses are divided by the counts of the complete step.
    """

    def __init__(
        self, model: nn.Module, process_group: ProcessGroup, *, by_layer: bool | None = None
    ) -> None:
        """Shard the weights in place.

        Args:
            by_layer: gather the weights of one block at a time, which is what saves memory; None = on GPUs. Otherwise
                all
                at once, so that code that reads a block's weights without calling it (`cpu/packed_forward.py`) works.
        """
        # Imported here, because it takes seconds.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        device = next(model.parameters()).device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (process_group.size,))
        self.shell = _ForwardShell(model)
        self._last_states: torch.Tensor | None = None
        options: dict[str, Any] = {
            "mesh": self.mesh,
            # Gradients are summed over processes in float32 for any precision.
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        if by_layer is None:
            by_layer = device.type == "cuda"
        blocks = list(_find_blocks(model)) if by_layer else []
        for block in blocks:
            fully_shard(block, **options)
        if blocks:
            blocks[-1].register_forward_hook(self._store_last_states)
        fully_shard(self.shell, **options, reshard_after_forward=False)
        for module in self.shell.modules():
            if is_sharded_module(module):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums

    def run_with_full_weights(self, compute: Callable[[], T]) -> T:
        """Return the result of `compute()`, run with full weights in the model."""
        try:
            result: T = self.shell(compute)
        finally:
            self._last_states = None
        # No backward pass will release the weights, which may change before the next call.
        if not torch.is_grad_enabled():
            self.shell.reshard()  # type: ignore[operator]  # FSDP made it an FSDPModule
        return result

    @torch.no_grad()
    def run_independently_with_full_weights(self, compute: Callable[[], T]) -> T:
        """Return the result of `compute()`, run without gradient and with the weights of every block in place.

        Nothing is exchanged meanwhile, so processes may call the blocks a different number of times, which
        `run_with_full_weights` does not allow.
        """
        blocks = [module for module in self.shell.model.modules() if is_sharded_module(module)]

        def with_blocks_unsharded() -> T:
            for block in blocks:
                block.set_reshard_after_forward(False, recurse=False)
                block.unshard()
            try:
                return compute()
            finally:
                for block in blocks:
                    block.reshard()
                    block.set_reshard_after_forward(True, recurse=False)

        return self.run_with_full_weights(with_blocks_unsharded)

    def run_loss(
        self, compute: Callable[[], tuple[torch.Tensor, Mapping[str, Any]]], weight: float = 1.0
    ) -> tuple[torch.Tensor, Mapping[str, Any], str | None]:
        """Return (loss, metrics, None); if the loss rejects its input, (a loss of 0, {}, error).

        The backward pass of that 0 reaches every weight, because other processes wait for this one's share of
        gradients.
        """
        problem: str | None = None

        def compute_or_zero() -> tuple[torch.Tensor, Mapping[str, Any]]:
            nonlocal problem
            try:
                loss, metrics = compute()
            except NonFiniteTensor as error:
                problem = str(error)
                return self._build_zero_loss(), {}
            return loss * weight if weight != 1.0 else loss, metrics

        loss, metrics = self.run_with_full_weights(compute_or_zero)
        return loss, metrics, problem

    def _build_zero_loss(self) -> torch.Tensor:
        sums = [
            parameter.float().sum()
            for parameter in self.shell.parameters()
            if parameter.requires_grad and not is_sharded_tensor(parameter)
        ]
        if self._last_states is not None:
            sums.append(self._last_states.float().sum())
        return torch.stack(sums).sum() * 0.0

    def _store_last_states(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._last_states = output[0] if isinstance(output, tuple) else output


def _find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the transformer blocks, identified by transformers' class names."""
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    yield from [module for module in model.modules() if type(module).__name__ in names]


def to_local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor


def gather_state(state: Any, process_group: ProcessGroup) -> Any:
    """Return a nested state with every sharded tensor complete, on the CPU of rank 0 (empty elsewhere).

    All processes must call it, with states of the same structure. A tensor that occurs twice is gathered once.
    """
    if process_group.size == 1:
        return state
    gathered: dict[int, torch.Tensor] = {}

    def gather(path: Path, value: torch.Tensor) -> torch.Tensor:
        if not is_sharded_tensor(value):
            return value
        key = id(value)
        if key not in gathered:
            full = value.full_tensor()
            gathered[key] = full.to("cpu") if process_group.is_rank_zero else full.new_empty(0)
        return gathered[key]

    return _map_state(state, gather)


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder of a tensor in a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def scatter_state(
    state: Any,
    process_group: ProcessGroup,
    *,
    mesh: DeviceMesh | None,
    is_sharded: Callable[[Path, tuple[int, ...]], bool],
) -> Any:
    """Return rank 0's nested state in every process; inverse of `gather_state`. Tensors are sent one by one.

    Args:
        state: read only on rank 0.
        is_sharded: whether the tensor at a path (keys and indices) of some shape is sharded over `mesh`; the others
            arrive complete, on the CPU.
    """
    if process_group.size == 1:
        return state
    tensors: list[torch.Tensor] = []

    def replace(path: Path, value: torch.Tensor) -> _TensorPlaceholder:
        tensors.append(value)
        return _TensorPlaceholder(tuple(value.shape), value.dtype)

    structure = [_map_state(state, replace) if process_group.is_rank_zero else None]
    dist.broadcast_object_list(structure)
    remaining = iter(tensors)

    def fill(path: Path, placeholder: _TensorPlaceholder) -> torch.Tensor:
        if process_group.is_rank_zero:
            value = next(remaining)
        else:
            value = torch.empty(placeholder.shape, dtype=placeholder.dtype)
        if mesh is not None and is_sharded(path, placeholder.shape):
            from torch.distributed.tensor import Shard, distribute_tensor

            return distribute_tensor(value.to(mesh.device_type), mesh, [Shard(0)])
        value = value.cpu().contiguous()
        dist.broadcast(value, src=0)
        return value

    return _map_state(structure[0], fill)


def _map_state(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a nested state with every tensor (or placeholder) changed."""
    if isinstance(value, torch.Tensor | _TensorPlaceholder):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _map_state(item, change, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        items = (_map_state(item, change, (*path, index)) for index, item in enumerate(value))
        return type(value)(items)
    return value
