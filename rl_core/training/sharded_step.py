"""A model trained by one or several processes: passes over it, gradients, and exchange of rows and states.

In a single process every method does the obvious thing, so trainers need no second code path.
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
from rl_core.errors import NonFiniteTensor, OutOfMemory
from rl_core.losses.host_reads import DeferredChecks, defer_checks, read_nested_scalars
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.heads import PolicyWithCritic
from rl_core.out_of_memory import MemoryFit, count_padded_tokens, is_out_of_memory

Batch = TypeVar("Batch")
Row = TypeVar("Row")
Result = TypeVar("Result")


class ShardedModel:
    """A model whose weights are sharded over the processes of a group, in place; not sharded in a group of one.

    All processes must call the same methods in the same order; otherwise they hang.
    """

    def __init__(self, model: nn.Module, process_group: ProcessGroup) -> None:
        self.model = model
        self.process_group = process_group
        self.shards: Shards | None = None
        if process_group.size > 1:
            policy = model.policy if isinstance(model, PolicyWithCritic) else model
            check_chunked_head(policy)  # before sharding, as its trial runs the model
            self.shards = Shards(model, process_group)

    def run_with_full_weights(self, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, run with full weights in the model; for a trainer's passes over it."""
        return compute() if self.shards is None else self.shards.run_with_full_weights(compute)

    def run_independently_with_full_weights(self, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, run with full weights in the model throughout, without gradient.

        For rollouts, and for passes over a process's share of some rows: each process may call the model any number of
        times.
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
        """Return `fn` of each batch of all processes, by rank, in eval mode, without gradient, in `autocast`.

        `fn` returns numbers or scalar tensors, also nested; they are read from an accelerator after the last batch, and
        arrive as plain numbers. In a single process a batch that does not fit into memory is measured in halves, with
        one result each.
        Raises: OutOfMemory; NonFiniteTensor.
        """
        results: list[Result] = []
        with use_eval_mode(self.model), torch.no_grad(), autocast, defer_checks() as checks:
            if self.shards is None:
                real_batches = (unwrap_dummy(batch) for batch in batches)
                results = MemoryFit("evaluation").compute_batches(real_batches, fn)
            else:
                for batch in batches:
                    result = self.run_with_full_weights(functools.partial(fn, unwrap_dummy(batch)))
                    if not isinstance(batch, DummyBatch):
                        results.append(result)
            checks.raise_failure()
        results = read_nested_scalars(results)
        if self.shards is None:
            return results
        gathered = self.process_group.all_gather(results)
        return [result for rank_results in gathered for result in rank_results]

    def gather_row_results(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        compute: Callable[[list[Row]], Sequence[Result]],
    ) -> list[Result]:
        """Return `compute` of each row, without gradient; each process computes a share, and all get all results.

        Args:
            lengths: tokens of each row.
            compute: returns one result per row, in order; results are sent between processes, so tensors must be on
                the CPU.
        """
        indices = self.process_group.select_local_rows(lengths)
        local_rows = [rows[index] for index in indices]
        local_results = self.run_independently_with_full_weights(lambda: compute(local_rows))
        shares = self.process_group.all_gather(dict(zip(indices, local_results, strict=True)))
        results = {index: result for share in shares for index, result in share.items()}
        return [results[index] for index in range(len(rows))]

    def accumulate_gradients(
        self,
        micro_batches: Sequence[Batch | DummyBatch[Batch]],
        loss_fn: Callable[[Batch], tuple[torch.Tensor, Mapping[str, Any]]],
        *,
        autocast: Callable[[], AbstractContextManager[None]],
        collect: Callable[[], None],
        checks: DeferredChecks,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Run backward for every micro-batch of every process, also in a process that cannot compute a loss.

        For several processes. If memory runs out the run ends: the other processes are in the middle of a pass that
        this one cannot repeat.

        Args:
            collect: called after each backward pass.
            checks: of the losses' inputs on an accelerator; read here, as every process needs the outcome of all.
        Returns: metrics of all micro-batches that are not dummies, by process; the tensor that was not finite, if a
            loss refused its input.
        Raises: OutOfMemory.
        """
        assert self.shards is not None
        rank = self.process_group.rank
        parts: list[dict[str, Any]] = []
        indices: list[int] = []  # micro-batch of each part
        problem: str | None = None
        for index, batch in enumerate(micro_batches):
            checks.part = index
            is_dummy = isinstance(batch, DummyBatch)
            try:
                with autocast():
                    loss, metrics, refusal = self.shards.run_loss(
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
            if refusal is not None and problem is None:
                problem = f"{refusal} (process {rank}, micro-batch {index})"
            if not is_dummy:
                parts.append(
                    {**metrics, "train/loss": loss.detach() if refusal is None else math.nan}
                )
                indices.append(index)
        parts, outcomes = read_nested_scalars((parts, checks.stack_outcomes()))
        if (failure := checks.find_failure(outcomes)) is not None:
            failed, cause = failure
            if not isinstance(cause, NonFiniteTensor):
                raise cause
            problem = problem or f"{cause} (process {rank}, micro-batch {failed})"
            parts = [
                part if number != failed else {"train/loss": math.nan}
                for number, part in zip(indices, parts, strict=True)
            ]
        checks.clear_checks()
        gathered = self.process_group.all_gather((parts, problem))
        all_parts = [part for rank_parts, _ in gathered for part in rank_parts]
        problems = [rank_problem for _, rank_problem in gathered if rank_problem is not None]
        return all_parts, problems[0] if problems else None

    def gather_state(self, state: Any) -> Any:
        """Return a nested state as a single process would have it: complete in rank 0, which writes it."""
        return gather_state(state, self.process_group)

    def scatter_state(self, state: Any, model: nn.Module | None = None) -> Any:
        """Send a checkpoint read by rank 0 to all processes; weights and moments are sharded again.

        Args:
            model: module with all weights in the checkpoint, if that is more than this model.
        """
        module = self.model if model is None else model
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return scatter_state(
            state,
            self.process_group,
            mesh=self.shards.mesh if self.shards else None,
            is_sharded=functools.partial(_is_sharded_path, names),
        )


def unwrap_dummy(batch: Batch | DummyBatch[Batch]) -> Batch:
    """Return the micro-batch without the marker of a dummy."""
    return batch.batch if isinstance(batch, DummyBatch) else batch


def _is_sharded_path(names: set[str], path: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Return whether the tensor at this path of a checkpoint is sharded: weights, and optimizer state shaped alike."""
    if path[:2] == ("trainer", "critic_optimizer_step"):
        path = path[1:]
    elif path[:2] == ("trainer", "entries"):  # of a stage: its model, or one of its optimizer steps
        path = path[4:] if path[3:4] == ("optimizer_steps",) else path[3:]
        path = ("optimizer_step", *path[1:]) if path and isinstance(path[0], int) else path
    if path[0] in ("optimizer_step", "critic_optimizer_step"):
        # A tensor with a shape has that of a weight here. Muon's are complete in every process.
        return len(shape) > 0 and path[1:3] != ("optimizer", "muon")
    return path[0] in ("model", "best_model") and path[1] in names
