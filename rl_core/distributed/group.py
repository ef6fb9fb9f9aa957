"""Process group that trains one model, and the exchange of everything but gradients.

Every process runs the same program on the same rows in the same order, and takes no decision alone: what only one
process knows (a stop signal, a loss that is not finite, a measurement) is exchanged first. In a single process every
method returns its input, so trainers need no second code path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from rl_core.errors import SettingsError, WorkerFailed

T = TypeVar("T")
Row = TypeVar("Row")
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class DummyBatch(Generic[Batch]):
    """Micro-batch with weight 0, used when other processes have one more: sharding needs equal numbers of passes."""

    batch: Batch


@dataclass(frozen=True)
class ProcessGroup:
    """Group of processes as seen from one of them. `ProcessGroup()` is a single process."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """True if this process writes metrics, checkpoints and models."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_reduce_max(self, number: int) -> int:
        """Return the largest number of any process."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over processes of a tensor that has the same shape in all of them."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def compute_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        """Return the Euclidean norm of a vector from the norm of this process's part."""
        if self.size == 1:
            return local_norm
        return self.all_reduce_sum(local_norm.float().square()).sqrt()

    def run_on_rank_zero(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and return its result in all processes: for work or decisions that must happen once.

        Raises: on rank 0 the error of `make`; in the others WorkerFailed.
        """
        if self.size == 1:
            return make()
        outcome: list[Any] = [None, None]  # result and error
        if self.is_rank_zero:
            try:
                outcome[0] = make()
            except BaseException as error:
                dist.broadcast_object_list([None, f"{type(error).__name__}: {error}"])
                raise
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise WorkerFailed(f"process 0 failed: {outcome[1]}")
        result: T = outcome[0]
        return result

    def select_local_rows(self, lengths: Sequence[int]) -> list[int]:
        """Return the indices of this process's rows, ascending; every row has one owner, and token counts are balanced.

        Rows are dealt longest first, forwards and backwards in turn, so the result depends only on the lengths.
        """
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        local = []
        for position, index in enumerate(order):
            turn, seat = divmod(position, self.size)
            owner = seat if turn % 2 == 0 else self.size - 1 - seat
            if self.rank == owner:
                local.append(index)
        return sorted(local)

    def build_local_batches(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        build: Callable[[Sequence[Row]], Sequence[Batch]],
    ) -> Sequence[Batch | DummyBatch[Batch]]:
        """Build the micro-batches of this process's share of `rows`; `DummyBatch`es make their number equal everywhere.

        Args:
            lengths: tokens of each row.
            build: makes micro-batches of some rows; in a single process it gets all rows, and its result is returned.
        """
        if self.size == 1:
            return build(rows)
        local = self.select_local_rows(lengths)
        batches: list[Batch | DummyBatch[Batch]] = []
        if local:
            batches += build([rows[index] for index in local])
        num_missing = self.all_reduce_max(len(batches)) - len(batches)
        if num_missing:
            shortest = min(range(len(lengths)), key=lambda index: lengths[index])
            batches += [DummyBatch(build([rows[shortest]])[0])] * num_missing
        return batches


SINGLE_PROCESS = ProcessGroup()


def join_process_group(*, timeout_s: float = 3600.0, on_cpu: bool = False) -> ProcessGroup:
    """Join the processes that torchrun started; return `SINGLE_PROCESS` without torchrun.

    Each process uses the GPU of its local rank if there are GPUs (nccl between them, gloo for CPU tensors), else the
    CPU
    (gloo). The generators of all but the first process are seeded differently, so that dropout differs.

    Args:
        timeout_s: of one exchange; the first process may prepare data or evaluate alone for that long.
        on_cpu: use the CPU even if there are GPUs.
    Raises: SettingsError if this machine has fewer GPUs than processes.
    """
    if "WORLD_SIZE" not in os.environ:
        return SINGLE_PROCESS
    size, rank, local_rank = (
        int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    )
    num_gpus = 0 if on_cpu else torch.cuda.device_count()
    if num_gpus:
        if local_rank >= num_gpus:
            raise SettingsError(
                f"launch.processes: {local_rank + 1} or more, but this machine has {num_gpus} GPUs; use {num_gpus}"
            )
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if num_gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if rank:
        torch.manual_seed(torch.initial_seed() + rank)
    return ProcessGroup(rank, size)
