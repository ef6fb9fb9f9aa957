"""The process group that trains one model, and its exchange of everything beside gradients.

Every process runs the same program on the same rows in the same order, and decides nothing by itself: what one alone
knows (a stop signal, a loss that is not finite, a number that it measured) is exchanged first. In one process every
method gives back what it was given, so trainers need no second path.
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
    """A micro-batch with weight 0, where other processes have one more: sharding needs equal numbers of passes."""

    batch: Batch


@dataclass(frozen=True)
class ProcessGroup:
    """The processes, seen from one of them. `ProcessGroup()` is a single process."""

    rank: int = 0
    size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """True = this process writes metrics, checkpoints and models."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_reduce_max(self, number: int) -> int:
        """The largest number of any process."""
        if self.size == 1:
            return number
        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes of a tensor that has one shape in all of them."""
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def compute_norm(self, local_norm: torch.Tensor) -> torch.Tensor:
        """Euclidean norm of a vector of which `own` is the norm of this process's part."""
        if self.size == 1:
            return local_norm
        return self.all_reduce_sum(local_norm.float().square()).sqrt()

    def run_on_rank_zero(self, make: Callable[[], T]) -> T:
        """Result of `make` in rank 0, broadcast to all: for what must not be done, or decided, twice.

        Raises: in rank 0 the error of `make`; in the others WorkerFailed.
        """
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_rank_zero:
            try:
                box[0] = make()
            except BaseException as error:
                dist.broadcast_object_list([None, f"{type(error).__name__}: {error}"])
                raise
        dist.broadcast_object_list(box)
        if box[1] is not None:
            raise WorkerFailed(f"process 0 failed: {box[1]}")
        made: T = box[0]
        return made

    def select_local_rows(self, lengths: Sequence[int]) -> list[int]:
        """Indices of this process's rows, ascending; every row has one owner, and token counts are balanced.

        Longest first, dealt out there and back again, so that the lengths alone decide.
        """
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        mine = []
        for place, index in enumerate(order):
            turn, seat = divmod(place, self.size)
            if self.rank == (seat if turn % 2 == 0 else self.size - 1 - seat):
                mine.append(index)
        return sorted(mine)

    def build_local_batches(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        build: Callable[[Sequence[Row]], Sequence[Batch]],
    ) -> Sequence[Batch | DummyBatch[Batch]]:
        """Micro-batches of this process's share of `rows`, as many in every process: the missing ones are `DummyBatch`.

        Args:
            lengths: tokens of each row.
            build: makes micro-batches of some rows; in one process it gets all of them, and what it gives is returned.
        """
        if self.size == 1:
            return build(rows)
        mine = self.select_local_rows(lengths)
        own: list[Batch | DummyBatch[Batch]] = (
            [*build([rows[index] for index in mine])] if mine else []
        )
        missing = self.all_reduce_max(len(own)) - len(own)
        if missing:
            shortest = min(range(len(lengths)), key=lambda index: lengths[index])
            own += [DummyBatch(build([rows[shortest]])[0])] * missing
        return own


SINGLE_PROCESS = ProcessGroup()


def join_process_group(*, timeout_s: float = 3600.0, on_cpu: bool = False) -> ProcessGroup:
    """Meet the processes that torchrun started with this one; `SINGLE_PROCESS` where it started none.

    Each process takes the GPU of its local rank where there are GPUs (nccl between them, gloo for what lies on the
    CPU), else the CPU (gloo). The generators of all but the first process are seeded apart, so that dropout differs.

    Args:
        timeout_s: of one exchange; the first process may make data or evaluate alone for so long.
        on_cpu: compute there, though there are GPUs.
    Raises: SettingsError where this machine has fewer GPUs than processes.
    """
    if "WORLD_SIZE" not in os.environ:
        return SINGLE_PROCESS
    size, rank, seat = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    gpus = 0 if on_cpu else torch.cuda.device_count()
    if gpus:
        if seat >= gpus:
            raise SettingsError(
                f"launch.processes: {seat + 1} or more, but this machine has {gpus} GPUs; use {gpus}"
            )
        torch.cuda.set_device(seat)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(seconds=timeout_s)
    )
    if rank:
        torch.manual_seed(torch.initial_seed() + rank)
    return ProcessGroup(rank, size)
