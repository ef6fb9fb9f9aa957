"""Sharded tensors and modules, told apart without torch's packages for them, which take seconds to import.

As long as nobody has imported such a package, there is nothing of it.

A model whose weights are sharded among processes: FSDP2 (`torch.distributed.fsdp.fully_shard`).

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


def is_sharded_tensor(value: Any) -> TypeGuard[DTensor]:
    """True for a `torch.distributed.tensor.DTensor`."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def is_sharded_module(module: Any) -> TypeGuard[FSDPModule]:
    """True for a module of `torch.distributed.fsdp.fully_shard`."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)


T = TypeVar("T")
Path = tuple[Any, ...]


class _ForwardShell(nn.Module):
    """The module whose forward pass is any computation with the model.

    Trainers read hidden states, heads and single weights of a model rather than call it, and FSDP has the whole weights
    in place only within the forward pass of the module that it is the root of.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class Shards:
    """Sharding of a model's weights, gradients and optimizer state: each process holds rows of every tensor.

    After construction the model's parameters are DTensors; computations with the model run in `run_with_full_weights`.
    Gradients are summed over processes, not averaged: losses are divided by what the whole step counts.
    """

    def __init__(
        self, model: nn.Module, process_group: ProcessGroup, *, by_layer: bool | None = None
    ) -> None:
        """Shard the weights, in place.

        Args:
            by_layer: collect the weights of one block at a time, which is what saves memory; None = on GPUs. Otherwise
                all at once, so that code that reads a block's weights without calling it (`cpu/packed_forward.py`)
                finds them.
        """
        from torch.distributed.fsdp import (  # takes seconds to import
            MixedPrecisionPolicy,
            fully_shard,
        )

        device = next(model.parameters()).device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (process_group.size,))
        self.shell = _ForwardShell(model)
        self._last_states: torch.Tensor | None = None
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                reduce_dtype=torch.float32
            ),  # sums over processes, in any precision
        }
        blocks = (
            list(_find_blocks(model))
            if (device.type == "cuda" if by_layer is None else by_layer)
            else []
        )
        for block in blocks:
            fully_shard(block, **options)
        if blocks:
            blocks[-1].register_forward_hook(self._store_last_states)
        fully_shard(self.shell, **options, reshard_after_forward=False)
        for module in self.shell.modules():
            if is_sharded_module(module):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def run_with_full_weights(self, compute: Callable[[], T]) -> T:
        """Result of `compute()`, with full weights in the model while it runs."""
        try:
            result: T = self.shell(compute)
        finally:
            self._last_states = None
        # no backward pass will let go of the weights, which may change before the next
        if not torch.is_grad_enabled():
            self.shell.reshard()  # type: ignore[operator]  # FSDP made it an FSDPModule
        return result

    @torch.no_grad()
    def run_independently_with_full_weights(self, compute: Callable[[], T]) -> T:
        """Result of `compute()`, with the weights of every block in place until it ends; without gradient.

        Nothing is exchanged meanwhile, so the processes need not call the blocks equally often (in `run_with_full_weights`
        they do).
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
        """(loss, metrics, None); where the loss refuses its input, (a loss of 0, {}, why).

        The backward pass of that 0 reaches every weight, as other processes wait for this one's share of gradients.
        """
        problem: list[str] = []

        def guarded() -> tuple[torch.Tensor, Mapping[str, Any]]:
            try:
                loss, metrics = compute()
            except NonFiniteTensor as error:
                problem.append(str(error))
                return self._build_zero_loss(), {}
            return loss * weight if weight != 1.0 else loss, metrics

        loss, metrics = self.run_with_full_weights(guarded)
        return loss, metrics, problem[0] if problem else None

    def _build_zero_loss(self) -> torch.Tensor:
        present = [
            p for p in self.shell.parameters() if p.requires_grad and not is_sharded_tensor(p)
        ]
        parts = [parameter.float().sum() for parameter in present]
        if self._last_states is not None:
            parts.append(self._last_states.float().sum())
        return torch.stack(parts).sum() * 0.0

    def _store_last_states(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._last_states = output[0] if isinstance(output, tuple) else output


def _find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer blocks, as transformers names their classes."""
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    yield from [module for module in model.modules() if type(module).__name__ in names]


def to_local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """This process's rows of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if is_sharded_tensor(tensor) else tensor


def gather_state(state: Any, process_group: ProcessGroup) -> Any:
    """A nested state with every sharded tensor whole, on the CPU of rank 0 (empty elsewhere).

    All processes have to call it, with states of one structure. A tensor that stands at two places is gathered once.
    """
    if process_group.size == 1:
        return state
    seen: dict[int, torch.Tensor] = {}

    def whole(path: Path, value: torch.Tensor) -> torch.Tensor:
        if not is_sharded_tensor(value):
            return value
        if id(value) not in seen:
            full = value.full_tensor()
            seen[id(value)] = full.to("cpu") if process_group.is_rank_zero else full.new_empty(0)
        return seen[id(value)]

    return _map_state(state, whole)


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
    """Rank 0's nested state in every process; the inverse of `gather_state`. Tensors travel one by one.

    Args:
        state: read in rank 0 alone.
        is_sharded: whether the tensor at a path (keys and indices) of some shape is to be sharded over `mesh`; the
            others come whole, on the CPU.
    """
    if process_group.size == 1:
        return state
    tensors: list[torch.Tensor] = []

    def slot(path: Path, value: torch.Tensor) -> _TensorPlaceholder:
        tensors.append(value)
        return _TensorPlaceholder(tuple(value.shape), value.dtype)

    box = [_map_state(state, slot) if process_group.is_rank_zero else None]
    dist.broadcast_object_list(box)
    waiting = iter(tensors)

    def fill(path: Path, place: _TensorPlaceholder) -> torch.Tensor:
        value = (
            next(waiting)
            if process_group.is_rank_zero
            else torch.empty(place.shape, dtype=place.dtype)
        )
        if mesh is not None and is_sharded(path, place.shape):
            from torch.distributed.tensor import Shard, distribute_tensor

            return distribute_tensor(value.to(mesh.device_type), mesh, [Shard(0)])
        value = value.cpu().contiguous()
        dist.broadcast(value, src=0)
        return value

    return _map_state(box[0], fill)


def _map_state(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A nested state with every tensor (or slot) changed."""
    if isinstance(value, torch.Tensor | _TensorPlaceholder):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _map_state(item, change, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _map_state(item, change, (*path, index)) for index, item in enumerate(value)
        )
    return value
