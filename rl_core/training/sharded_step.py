"""A model that one or several processes train: passes over it, gradients, and exchange of rows and states.

In one process every method does the plain thing, so trainers need no second path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from rl_core.capabilities import check_chunked_head
from rl_core.distributed import DummyBatch, ProcessGroup, Shards, gather_state, scatter_state
from rl_core.errors import OutOfMemory
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.heads import PolicyWithCritic
from rl_core.out_of_memory import MemoryFit, count_padded_tokens, is_out_of_memory

Batch = TypeVar("Batch")
Row = TypeVar("Row")
Result = TypeVar("Result")


class ShardedModel:
    """A model whose weights are sharded over the processes of a group, in place; whole where the group has one.

    All processes call the same methods in the same order. A bug here is a hang.
    """

    def __init__(self, model: nn.Module, process_group: ProcessGroup) -> None:
        self.model = model
        self.process_group = process_group
        self.shards: Shards | None = None
        if process_group.size > 1:
            policy = model.policy if isinstance(model, PolicyWithCritic) else model
            check_chunked_head(policy)  # its trial runs the model, which has to be whole for that
            self.shards = Shards(model, process_group)

    def run_with_full_weights(self, compute: Callable[[], Result]) -> Result:
        """Result of `compute()`, run with whole weights in the model: a trainer's own passes run in it."""
        return compute() if self.shards is None else self.shards.run_with_full_weights(compute)

    def run_independently_with_full_weights(self, compute: Callable[[], Result]) -> Result:
        """Result of `compute()`, run with whole weights in the model for as long as it takes; without gradient.

        For rollouts, and for passes over a process's own share of some rows: each process may call the model as often
        as it likes.
        """
        if self.shards is not None:
            return self.shards.run_independently_with_full_weights(compute)
        with torch.no_grad():
            return compute()

    def measure_batches(
        self,
        batches: Sequence[Batch | DummyBatch[Batch]],
        fn: Callable[[Batch], Result],
        autocast: AbstractContextManager[None],
    ) -> list[Result]:
        """`fn` of each batch of all processes, by rank: in eval mode, without gradient, in `autocast`.

        `fn` returns plain numbers, as they travel between processes. In one process a batch that does not fit into
        memory is measured in halves, with a result each.
        Raises: OutOfMemory.
        """
        results: list[Result] = []
        with use_eval_mode(self.model), torch.no_grad(), autocast:
            if self.shards is None:
                return MemoryFit("evaluation").compute_batches(
                    (unwrap_dummy(batch) for batch in batches), fn
                )
            for batch in batches:
                result = self.run_with_full_weights(functools.partial(fn, unwrap_dummy(batch)))
                if not isinstance(batch, DummyBatch):
                    results.append(result)
        return [result for part in self.process_group.all_gather(results) for result in part]

    def gather_row_results(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        compute: Callable[[list[Row]], Sequence[Result]],
    ) -> list[Result]:
        """`compute` of each row, without gradient; each process does its share, and all get everything.

        Args:
            lengths: tokens of each row.
            compute: one result a row, in order; results travel between processes, so their tensors lie on the CPU.
        """
        mine = self.process_group.select_local_rows(lengths)
        own = self.run_independently_with_full_weights(
            lambda: compute([rows[index] for index in mine])
        )
        shares = self.process_group.all_gather(dict(zip(mine, own, strict=True)))
        results = {index: result for share in shares for index, result in share.items()}
        return [results[index] for index in range(len(rows))]

    def accumulate_gradients(
        self,
        micro_batches: Sequence[Batch | DummyBatch[Batch]],
        loss_fn: Callable[[Batch], tuple[torch.Tensor, Mapping[str, Any]]],
        *,
        autocast: Callable[[], AbstractContextManager[None]],
        collect: Callable[[], None],
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Backward of every micro-batch of every process. One that cannot compute a loss does its part all the same.

        For several processes. Lack of memory ends the run: the others are in the middle of a pass that this one cannot
        take up again.

        Args:
            collect: called after each backward pass.
        Returns: metrics of all micro-batches that are no dummies, by process; the tensor that was not finite, where a
            loss refused its input.
        Raises: OutOfMemory.
        """
        assert self.shards is not None
        rank = self.process_group.rank
        parts: list[dict[str, Any]] = []
        problem: str | None = None
        for index, batch in enumerate(micro_batches):
            is_dummy = isinstance(batch, DummyBatch)
            try:
                with autocast():
                    loss, metrics, why = self.shards.run_loss(
                        functools.partial(loss_fn, unwrap_dummy(batch)),
                        weight=0.0 if is_dummy else 1.0,
                    )
                loss.backward()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemory(
                    f"a micro-batch of {count_padded_tokens(unwrap_dummy(batch))} padded tokens does not fit into the "
                    f"memory of process {rank}; lower micro_batch_tokens"
                ) from error
            collect()
            if why is not None and problem is None:
                problem = f"{why} (process {rank}, micro-batch {index})"
            if not is_dummy:
                part = {**metrics, "train/loss": loss.detach() if why is None else math.nan}
                parts.append({name: float(value) for name, value in part.items()})
        gathered = self.process_group.all_gather((parts, problem))
        problems = [why for _, why in gathered if why is not None]
        return [part for some, _ in gathered for part in some], problems[0] if problems else None

    def gather_state(self, state: Any) -> Any:
        """A nested state as one process would have it: complete in rank 0, which writes it."""
        return gather_state(state, self.process_group)

    def scatter_state(self, state: Any, model: nn.Module | None = None) -> Any:
        """A checkpoint that rank 0 has read, in all processes; weights and moments are sharded again.

        Args:
            model: all that the checkpoint holds, where that is more than this model.
        """
        whole = self.model if model is None else model
        names = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
        return scatter_state(
            state,
            self.process_group,
            mesh=self.shards.mesh if self.shards else None,
            is_sharded=functools.partial(_is_sharded_path, names),
        )


def unwrap_dummy(batch: Batch | DummyBatch[Batch]) -> Batch:
    """The micro-batch itself."""
    return batch.batch if isinstance(batch, DummyBatch) else batch


def _is_sharded_path(names: set[str], path: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """True = the tensor at this place of a checkpoint is sharded: weights, and optimizer state of their shapes."""
    if path[:2] == ("trainer", "critic_optimizer_step"):
        path = path[1:]
    elif path[:2] == (
        "trainer",
        "entries",
    ):  # ... of a stage: its model, or which of its optimizer steps
        path = path[4:] if path[3:4] == ("optimizer_steps",) else path[3:]
        path = ("optimizer_step", *path[1:]) if path and isinstance(path[0], int) else path
    if path[0] in (
        "optimizer_step",
        "critic_optimizer_step",
    ):  # what has a shape there has that of a weight
        return len(shape) > 0 and path[1:3] != ("optimizer", "muon")  # Muon's are whole everywhere
    return path[0] in ("model", "best_model") and path[1] in names
