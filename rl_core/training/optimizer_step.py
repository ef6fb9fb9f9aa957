"""One optimizer step: accumulate, guard, clip, step, schedule. The same for every trainer.

Suffixes: B rows of a micro-batch, S sequence.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from rl_core.capabilities import plain_head
from rl_core.cpu.allocator import keep_freed_memory
from rl_core.distributed import SINGLE_PROCESS, DummyBatch, ProcessGroup, Shards, gather_state, local
from rl_core.errors import CheckpointError, DataError, NonFiniteError, NonFiniteTensor, OutOfMemory
from rl_core.models.causal_lm import evaluating
from rl_core.models.critic import PolicyWithCritic
from rl_core.models.precision import autocast
from rl_core.settings import OptimizerSettings
from rl_core.timing import count, span
from rl_core.training.micro_batches import combine_metrics, cut, halve, padded_tokens
from rl_core.training.optimizers import (
    Grokfast,
    WeightAverage,
    build_optimizer,
    enable_activation_checkpointing,
    learning_rate_at,
)
from rl_core.training.sharded_step import accumulate_together, plain, scatter_checkpoint
from rl_core.training.throughput import sequence_lengths, step_flops

__all__ = ["LossFn", "Updater"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Row = TypeVar("Row")
Result = TypeVar("Result")
LossFn = Callable[[Batch], tuple[torch.Tensor, Mapping[str, Any]]]


class Updater:
    """The optimizer of a model's trainable parameters, with accumulation, guards, clipping and a schedule.

    Weights in bfloat16 or float16 get a float32 master copy, on which gradients accumulate and the optimizer works;
    otherwise small updates would be rounded away. With ema_decay an average of the weights is kept beside them.

    Where several processes train the model, its weights are sharded among them here. Each of them then calls the
    same methods in the same order with micro-batches of its own, as many as every other (`ProcessGroup.batches`).
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        total_steps: int,
        *,
        max_nonfinite: int = 5,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        keep_freed_memory()
        self.model = model
        self.process_group = process_group
        self.settings = settings
        self.total_steps = total_steps
        self.max_nonfinite = max_nonfinite
        self.step = 0  # updates tried, skipped ones included: the x axis of every metric
        self.skipped_steps = 0  # updates skipped because something was not finite
        self.skipped_in_row = 0
        self.learning_rate_scale = 1.0  # of the whole schedule; a rollback makes it smaller
        self.max_tokens: int | None = None  # padded tokens that were seen to fit; None = nothing ever ran out of memory
        self._shards: Shards | None = None
        if process_group.size > 1:
            policy = model.policy if isinstance(model, PolicyWithCritic) else model
            plain_head(policy)  # its trial runs the model, which has to be whole for that
            self._shards = Shards(model, process_group)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._weights:
            raise DataError("the model has no trainable parameter")
        self._masters = [
            weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for weight in self._weights
        ]
        if settings.activation_checkpointing:
            enable_activation_checkpointing(model)
        masters = dict(zip(self._names, self._masters, strict=True))
        self.optimizer = build_optimizer(model, masters, settings)
        self._grokfast: Grokfast | None = None
        if settings.grokfast_lambda > 0:
            self._grokfast = Grokfast(masters, amplification=settings.grokfast_lambda, alpha=settings.grokfast_alpha)
        self._average = WeightAverage(masters, settings.ema_decay) if settings.ema_decay is not None else None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return self.learning_rate_scale * learning_rate_at(self.step, self.settings, self.total_steps)

    @property
    def computes_in_bfloat16(self) -> bool:
        """Whether matrix products are taken in bfloat16, by autocast or because the weights are."""
        return self.settings.autocast == "bfloat16" or self._weights[0].dtype == torch.bfloat16

    def autocast(self) -> AbstractContextManager[None]:
        """Context in which the model computes: bfloat16 where the settings ask for it, float32 weights either way.

        `apply` runs its loss function in it; a trainer runs its own passes over the model in it, so that log-probs
        agree.
        """
        return autocast(self.settings.autocast, self._weights[0].device)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds its averaged weights inside, if ema_decay asks for them; afterwards the very bits it held."""
        if self._average is None:
            yield
            return
        with self._average.written(dict(zip(self._names, self._weights, strict=True))):
            yield

    def adopt_average(self) -> None:
        """Leave the averaged weights in the model for good, if ema_decay asks for them: training has ended."""
        if self._average is not None:
            self._average.write(dict(zip(self._names, self._weights, strict=True)))
            self.refresh_masters()

    def apply(self, micro_batches: Sequence[Batch | DummyBatch[Batch]], loss_fn: LossFn[Batch]) -> dict[str, float]:
        """One optimizer step over all micro-batches.

        Args:
            micro_batches: dataclasses with one row per entry (`TrainBatch`), in order.
            loss_fn: gives (loss, metrics) of a micro-batch; the loss is already divided by the step's global
                denominator, so that losses and metrics of micro-batches add up, however they are cut.
        Returns: combined metrics, with train/loss, train/grad_norm (before Grokfast and clipping),
            train/learning_rate and train/skipped_steps (updates skipped so far); with Grokfast,
            train/grokfast_grad_norm (after it, before clipping).
        Raises: NonFiniteError after `max_nonfinite` skipped updates in a row (weights stay as they were before them);
            OutOfMemory if a single row does not fit.
        """
        if not micro_batches:
            raise DataError("an optimizer step needs at least one micro-batch")
        lengths = [length for batch in micro_batches for length in sequence_lengths(batch)]  # an idle one has none
        count("optimizer_flops", step_flops(self.model, lengths))
        with span("optimizer"):
            return self._apply(micro_batches, loss_fn)

    def _apply(self, micro_batches: Sequence[Batch | DummyBatch[Batch]], loss_fn: LossFn[Batch]) -> dict[str, float]:
        self.model.train()
        if self._shards is None:
            parts, problem = self._accumulate([plain(batch) for batch in micro_batches], loss_fn)
        else:
            self._clear()
            parts, problem = accumulate_together(
                self._shards,
                self.process_group,
                micro_batches,
                loss_fn,
                autocast=self.autocast,
                collect=self._collect_gradients,
            )
        metrics = combine_metrics(parts)
        norm = self._grad_norm()
        metrics["train/grad_norm"] = float(norm)
        metrics["train/learning_rate"] = self.learning_rate
        is_finite = (
            problem is None and math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["train/grad_norm"])
        )
        if is_finite and self._grokfast is not None:
            # After the check, so that no bad gradient enters its average; before clipping, so that max_grad_norm bounds
            # what the optimizer gets, amplified or not.
            self._grokfast.amplify()
            norm = self._grad_norm()
            metrics["train/grokfast_grad_norm"] = float(norm)
            is_finite = math.isfinite(metrics["train/grokfast_grad_norm"])
        if is_finite:
            self._optimize(norm)
        else:
            self._skip(parts, problem)
        self._clear()
        metrics["train/skipped_steps"] = float(self.skipped_steps)
        return metrics

    def measure(self, batches: Sequence[Batch | DummyBatch[Batch]], fn: Callable[[Batch], Result]) -> list[Result]:
        """What `fn` gives for each batch, of all processes, by rank: without dropout and gradient, in `autocast`.

        `fn` returns plain numbers, as they travel between processes.
        """
        results: list[Result] = []
        with evaluating(self.model), torch.no_grad(), self.autocast():
            for batch in batches:
                result = self.with_full_weights(functools.partial(fn, plain(batch)))
                if not isinstance(batch, DummyBatch):
                    results.append(result)
        return [result for part in self.process_group.all_gather(results) for result in part]

    def with_full_weights(self, compute: Callable[[], Result]) -> Result:
        """`compute()`, with whole weights in the model: a trainer's own passes run in it where weights are shared."""
        return compute() if self._shards is None else self._shards.with_full_weights(compute)

    def with_full_weights_independent(self, compute: Callable[[], Result]) -> Result:
        """`compute()` with whole weights in the model, which each worker may run as often as it likes; no gradient.

        For rollouts, and for passes over a worker's own share of some rows.
        """
        if self._shards is not None:
            return self._shards.with_full_weights_independent(compute)
        with torch.no_grad():
            return compute()

    def all_gather_rows(
        self, rows: Sequence[Row], lengths: Sequence[int], compute: Callable[[list[Row]], Sequence[Result]]
    ) -> list[Result]:
        """What `compute` gives for each row, without gradient; each worker does its share, and all get everything.

        Args:
            lengths: tokens of each row.
            compute: one result a row, in order; results travel between processes, so their tensors lie on the CPU.
        """
        mine = self.process_group.share(lengths)
        own = self.with_full_weights_independent(lambda: compute([rows[index] for index in mine]))
        shares = self.process_group.all_gather(dict(zip(mine, own, strict=True)))
        results = {index: result for share in shares for index, result in share.items()}
        return [results[index] for index in range(len(rows))]

    def gather_state(self, state: Any) -> Any:
        """A nested state as one process would have it: complete in the first worker, for whom it is written."""
        return gather_state(state, self.process_group)

    def scatter_state(self, state: Any, model: nn.Module | None = None) -> Any:
        """A checkpoint that the first worker has read, in all of them; weights and moments are shared out again.

        model: all that the checkpoint holds, where that is more than this updater's.
        """
        return scatter_checkpoint(state, self.model if model is None else model, self._shards, self.process_group)

    def _grad_norm(self) -> torch.Tensor:
        grads = [local(master.grad) for master in self._masters if master.grad is not None]
        return self.process_group.norm(torch.nn.utils.get_total_norm(grads))

    def _optimize(self, norm: torch.Tensor) -> None:
        """Clip, step, and take the new weights over."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        torch.nn.utils.clip_grads_with_norm_(self._masters, self.settings.max_grad_norm, norm)
        self.optimizer.step()
        self._write_back()
        if self._average is not None:
            self._average.update()
        self.skipped_in_row = 0
        self.step += 1

    def _accumulate(
        self, micro_batches: list[Batch], loss_fn: LossFn[Batch]
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Backward of every micro-batch; on lack of memory, all again with the large ones cut in half.

        From the start, because a backward pass that failed half-way has already added part of its gradient.
        Returns: metrics of each micro-batch; what was not finite, where the loss refused its input.
        """
        while True:
            self._clear()
            micro_batches = cut(micro_batches, self.max_tokens)
            parts: list[dict[str, Any]] = []
            try:
                for batch in micro_batches:
                    with self.autocast():
                        loss, metrics = loss_fn(batch)
                    loss.backward()
                    self._collect_gradients()
                    parts.append({**metrics, "train/loss": loss.detach()})
                return parts, None
            except NonFiniteTensor as error:
                return [*parts, {"train/loss": math.nan}], f"{error} (micro-batch {len(parts)})"
            except torch.OutOfMemoryError:
                loss = metrics = None  # type: ignore[assignment]  # frees the graph before the next try
            failed = micro_batches[len(parts)]
            if halve(failed) is None:
                raise OutOfMemory(
                    f"one row of {padded_tokens(failed)} tokens does not fit into memory; "
                    "shorten max_completion_tokens or the context, or use a smaller model or LoRA"
                )
            self.max_tokens = padded_tokens(failed) - 1
            logger.warning("out of memory: micro-batches are cut to at most %d padded tokens", self.max_tokens)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _collect_gradients(self) -> None:
        """Add low-precision gradients to the float32 gradients of their masters."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight is master or weight.grad is None:
                continue
            grad = weight.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            weight.grad = None

    def _write_back(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    weight.copy_(master)

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for weight in self._weights:
            weight.grad = None

    def _skip(self, parts: Sequence[Mapping[str, Any]], problem: str | None) -> None:
        self.skipped_steps += 1
        self.skipped_in_row += 1
        bad = self._first_nonfinite(parts, problem)
        logger.warning("optimizer step %d skipped, %d in a row: not finite: %s", self.step, self.skipped_in_row, bad)
        self.step += 1
        if self.skipped_in_row >= self.max_nonfinite:
            self._clear()
            raise NonFiniteError(
                f"{self.skipped_in_row} non-finite optimizer steps in a row (max_nonfinite); the last at step "
                f"{self.step - 1}, first bad tensor: {bad}. The weights are those of the last good step; "
                "try a lower learning_rate or max_grad_norm, and look at the data of that step"
            )

    def _first_nonfinite(self, parts: Sequence[Mapping[str, Any]], problem: str | None) -> str:
        """Name of the first bad tensor, causes before consequences: weights, a loss's input, losses, gradients."""
        for name, weight in zip(self._names, self._weights, strict=True):
            if not self._is_finite(weight):
                return f"weight {name}"
        if problem is not None:
            return problem
        for index, part in enumerate(parts):
            if not math.isfinite(float(part["train/loss"])):
                return f"loss of micro-batch {index}"
        for name, master in zip(self._names, self._masters, strict=True):
            if master.grad is not None and not self._is_finite(master.grad):
                return f"gradient of {name}"
        return "global gradient norm"

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        return not self.process_group.all_reduce_max(int(not bool(torch.isfinite(local(tensor)).all())))

    def refresh_masters(self) -> None:
        """Take over weights that were changed from outside (a restored model)."""
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    master.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer moments, float32 masters, averages and counters; the schedule follows from `step`."""
        masters = {
            name: master.detach()
            for name, weight, master in zip(self._names, self._weights, self._masters, strict=True)
            if weight is not master
        }
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": masters,
            "grokfast": self._grokfast.state_dict() if self._grokfast is not None else None,
            "average": self._average.state_dict() if self._average is not None else None,
            "step": self.step,
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self.skipped_in_row,
            "learning_rate_scale": self.learning_rate_scale,
            "max_tokens": self.max_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the model's weights are loaded elsewhere, before this.

        Averages that only the settings or only the state know of start afresh, or are left out (a resume with changed
        settings, which has to be allowed explicitly). Raises: CheckpointError for the state of another optimizer.
        """
        if state["optimizer"].keys() != self.optimizer.state_dict().keys():
            raise CheckpointError(
                f"the checkpoint holds the state of another optimizer than '{self.settings.optimizer}'; "
                "put the old setting back, or start afresh in another folder"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for part, saved in ((self._grokfast, state["grokfast"]), (self._average, state["average"])):
            if part is not None and saved is not None:
                part.load_state_dict(saved)
        with torch.no_grad():
            for name, weight, master in zip(self._names, self._weights, self._masters, strict=True):
                if weight is not master:
                    master.copy_(state["masters"][name])
        self.step = state["step"]
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_row = state["skipped_in_row"]
        self.learning_rate_scale = state["learning_rate_scale"]
        self.max_tokens = state["max_tokens"]
