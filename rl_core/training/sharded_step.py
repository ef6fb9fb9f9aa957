"""The parts of an optimizer step and of a resume that differ where several processes share one model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from rl_core.distributed import DummyBatch, ProcessGroup, Shards, scatter_state
from rl_core.errors import OutOfMemory
from rl_core.training.micro_batches import padded_tokens

__all__ = ["accumulate_together", "plain", "scatter_checkpoint"]

Batch = TypeVar("Batch")


def plain(batch: Batch | DummyBatch[Batch]) -> Batch:
    """The micro-batch itself."""
    return batch.batch if isinstance(batch, DummyBatch) else batch


def accumulate_together(
    shards: Shards,
    process_group: ProcessGroup,
    micro_batches: Sequence[Batch | DummyBatch[Batch]],
    loss_fn: Callable[[Batch], tuple[torch.Tensor, Mapping[str, Any]]],
    *,
    autocast: Callable[[], AbstractContextManager[None]],
    collect: Callable[[], None],
) -> tuple[list[dict[str, Any]], str | None]:
    """Backward of every micro-batch of every process. One that cannot compute a loss does its part all the same.

    Lack of memory ends the run: the others are in the middle of a pass that this one cannot take up again.

    Args:
        collect: called after each backward pass.
    Returns: metrics of all micro-batches that are not idle, by process; what was not finite, where a loss refused its
        input.
    Raises: OutOfMemory.
    """
    parts: list[dict[str, Any]] = []
    problem: str | None = None
    for index, batch in enumerate(micro_batches):
        idle = isinstance(batch, DummyBatch)
        try:
            with autocast():
                loss, metrics, why = shards.run_loss(
                    functools.partial(loss_fn, plain(batch)), weight=0.0 if idle else 1.0
                )
            loss.backward()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"a micro-batch of {padded_tokens(plain(batch))} padded tokens does not fit into the memory of "
                f"process {process_group.rank}; lower micro_batch_tokens"
            ) from error
        collect()
        if why is not None and problem is None:
            problem = f"{why} (process {process_group.rank}, micro-batch {index})"
        if not idle:
            part = {**metrics, "train/loss": loss.detach() if why is None else math.nan}
            parts.append({name: float(value) for name, value in part.items()})
    told = process_group.all_gather((parts, problem))
    problems = [why for _, why in told if why is not None]
    return [part for some, _ in told for part in some], problems[0] if problems else None


def scatter_checkpoint(state: Any, model: nn.Module, shards: Shards | None, process_group: ProcessGroup) -> Any:
    """A checkpoint that the first process has read, in all of them; weights and moments are shared out again."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def is_shared(path: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
        if path[:2] == ("trainer", "critic_updater"):
            path = path[1:]
        elif path[:2] == ("trainer", "entries"):  # ... of a stage: its model, or which of its updaters
            path = path[4:] if path[3:4] == ("updaters",) else path[3:]
            path = ("updater", *path[1:]) if path and isinstance(path[0], int) else path
        if path[0] in ("updater", "critic_updater"):  # what has a shape there has that of a weight
            return len(shape) > 0 and path[1:3] != ("optimizer", "muon")  # Muon's are whole everywhere
        return path[0] in ("model", "best_model") and path[1] in names

    return scatter_state(state, process_group, mesh=shards.mesh if shards else None, is_shared=is_shared)
