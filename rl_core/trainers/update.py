"""One optimizer step: accumulate, guard, clip, step, schedule. The same for every trainer.

Suffixes: B rows of a micro-batch, S sequence.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from rl_core.errors import DataError, NonFiniteError, NonFiniteTensor, OutOfMemory
from rl_core.settings import OptimizerSettings

__all__ = ["LossFn", "Updater", "combine_metrics", "halve", "learning_rate_at"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
LossFn = Callable[[Batch], tuple[torch.Tensor, Mapping[str, Any]]]


def learning_rate_at(step: int, settings: OptimizerSettings, total_steps: int) -> float:
    """Learning rate of optimizer step number `step` (0 = the first).

    Warm-up: peak (step + 1) / warmup_steps, so that step "-1" would be at 0 and the last warm-up step is at the peak.
    Then constant, or a fall from the peak towards min_lr_ratio * peak, which it would reach at step `total_steps`.
    """
    peak = settings.learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    share = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


def combine_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of micro-batches as one: names ending in _max or _min combine so, all others add up.

    Losses normalise their metrics by the global denominator, which is why sums are right (tensors are read only here,
    so that an accelerator is waited for once a step).
    """
    columns: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            columns.setdefault(name, []).append(float(value))
    return {
        name: max(values) if name.endswith("_max") else min(values) if name.endswith("_min") else math.fsum(values)
        for name, values in columns.items()
    }


def halve(batch: Batch) -> tuple[Batch, Batch] | None:
    """A batch dataclass as its first and second half of rows; None when it has a single row.

    Every tensor and list field must have one entry a row (first axis); None and scalars go to both halves.
    """
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise DataError(f"a micro-batch must be a dataclass with one row per entry, not {type(batch).__name__}")
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    rows = next((len(value) for value in values.values() if isinstance(value, torch.Tensor) and value.ndim), 0)
    if rows < 2:
        return None

    def part(bounds: slice) -> Batch:
        cut = {
            name: value[bounds]
            for name, value in values.items()
            if (isinstance(value, torch.Tensor) and value.ndim) or isinstance(value, list)
        }
        return dataclasses.replace(batch, **cut)

    return part(slice(0, rows // 2)), part(slice(rows // 2, rows))


def _padded_tokens(batch: object) -> int:
    """Entries of the batch's largest tensor: its padded tokens."""
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    tensors = (getattr(batch, field.name) for field in fields)
    return max((tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)), default=0)


class Updater:
    """AdamW over a model's trainable parameters, with accumulation, guards, clipping and a schedule.

    Weights in bfloat16 or float16 get a float32 master copy, on which gradients accumulate and AdamW works; otherwise
    small updates would be rounded away.
    """

    def __init__(
        self, model: nn.Module, settings: OptimizerSettings, total_steps: int, *, max_nonfinite: int = 5
    ) -> None:
        self.model = model
        self.settings = settings
        self.total_steps = total_steps
        self.max_nonfinite = max_nonfinite
        self.step = 0  # updates tried, skipped ones included: the x axis of every metric
        self.skipped_steps = 0  # updates skipped because something was not finite
        self.skipped_in_row = 0
        self.max_tokens: int | None = None  # padded tokens that were seen to fit; None = nothing ever ran out of memory
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._weights:
            raise DataError("the model has no trainable parameter")
        self._masters = [
            weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for weight in self._weights
        ]
        # Decay on matrices only: norms and biases are scales, not directions (arXiv:1711.05101 leaves it open).
        groups = [
            {"params": [p for p in self._masters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self._masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate_at(self.step, self.settings, self.total_steps)

    def apply(self, micro_batches: Sequence[Batch], loss_fn: LossFn[Batch]) -> dict[str, float]:
        """One optimizer step over all micro-batches.

        Args:
            micro_batches: dataclasses with one row per entry (`TrainBatch`), in order.
            loss_fn: gives (loss, metrics) of a micro-batch; the loss is already divided by the step's global
                denominator, so that losses and metrics of micro-batches add up, however they are cut.
        Returns: combined metrics, with train/loss, train/grad_norm (before clipping), train/learning_rate and
            train/skipped_steps (updates skipped so far).
        Raises: NonFiniteError after `max_nonfinite` skipped updates in a row (weights stay as they were before them);
            OutOfMemory if a single row does not fit.
        """
        if not micro_batches:
            raise DataError("an optimizer step needs at least one micro-batch")
        self.model.train()
        parts, problem = self._accumulate(list(micro_batches), loss_fn)
        metrics = combine_metrics(parts)
        grads = [master.grad for master in self._masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        metrics["train/grad_norm"] = float(norm)
        metrics["train/learning_rate"] = self.learning_rate
        if problem is None and math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["train/grad_norm"]):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate
            torch.nn.utils.clip_grads_with_norm_(self._masters, self.settings.max_grad_norm, norm)
            self.optimizer.step()
            self._write_back()
            self.skipped_in_row = 0
            self.step += 1
        else:
            self._skip(parts, problem)
        self._clear()
        metrics["train/skipped_steps"] = float(self.skipped_steps)
        return metrics

    def _accumulate(
        self, micro_batches: list[Batch], loss_fn: LossFn[Batch]
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Backward of every micro-batch; on lack of memory, all again with the large ones cut in half.

        From the start, because a backward pass that failed half-way has already added part of its gradient.
        Returns: metrics of each micro-batch; what was not finite, where the loss refused its input.
        """
        while True:
            self._clear()
            micro_batches = self._cut(micro_batches)
            parts: list[dict[str, Any]] = []
            try:
                for batch in micro_batches:
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
                    f"one row of {_padded_tokens(failed)} tokens does not fit into memory; "
                    "shorten max_completion_tokens or the context, or use a smaller model or LoRA"
                )
            self.max_tokens = _padded_tokens(failed) - 1
            logger.warning("out of memory: micro-batches are cut to at most %d padded tokens", self.max_tokens)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _cut(self, micro_batches: list[Batch]) -> list[Batch]:
        """Micro-batches with those above `max_tokens` halved, again and again, down to single rows."""
        if self.max_tokens is None:
            return micro_batches
        cut: list[Batch] = []
        for batch in micro_batches:
            halves = halve(batch) if _padded_tokens(batch) > self.max_tokens else None
            cut.extend(self._cut(list(halves)) if halves else [batch])
        return cut

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
            if not bool(torch.isfinite(weight).all()):
                return f"weight {name}"
        if problem is not None:
            return problem
        for index, part in enumerate(parts):
            if not math.isfinite(float(part["train/loss"])):
                return f"loss of micro-batch {index}"
        for name, master in zip(self._names, self._masters, strict=True):
            if master.grad is not None and not bool(torch.isfinite(master.grad).all()):
                return f"gradient of {name}"
        return "global gradient norm"

    def refresh_masters(self) -> None:
        """Take over weights that were changed from outside (a restored model)."""
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                if weight is not master:
                    master.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer moments, float32 masters and counters; the schedule follows from `step`."""
        masters = {
            name: master.detach()
            for name, weight, master in zip(self._names, self._weights, self._masters, strict=True)
            if weight is not master
        }
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": masters,
            "step": self.step,
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self.skipped_in_row,
            "max_tokens": self.max_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the model's weights are loaded elsewhere, before this."""
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, weight, master in zip(self._names, self._weights, self._masters, strict=True):
                if weight is not master:
                    master.copy_(state["masters"][name])
        self.step = state["step"]
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_row = state["skipped_in_row"]
        self.max_tokens = state["max_tokens"]
