"""One optimizer step, the same for every trainer: accumulate, guard, clip, step, schedule.

Micro-batches that do not fit into memory are split; their metrics are combined.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from rl_core.capabilities import (
    check_prefix_sharing,
    check_training_forward,
    refuse_image_model,
)
from rl_core.cpu.allocator import keep_freed_memory
from rl_core.cpu.openmp_spin import limit_openmp_spin
from rl_core.distributed import SINGLE_PROCESS, DummyBatch, ProcessGroup, to_local_rows
from rl_core.errors import CheckpointError, DataError, NonFiniteError, NonFiniteTensor, OutOfMemory
from rl_core.losses.host_reads import DeferredChecks, defer_checks, read_scalars
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.cuda_defaults import uses_tf32
from rl_core.models.forward_modes import (
    enable_autocast,
    has_dropout,
    resolve_autocast,
    use_training_mode,
    warn_about_slow_weights,
)
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.out_of_memory import (
    copy_to_host,
    count_padded_tokens,
    format_first_line,
    halve_batch,
    has_room_for_copies,
    is_out_of_memory,
    record_out_of_memory,
    release_held_memory,
)
from rl_core.settings import LearningRateControlSettings, OptimizerSettings
from rl_core.storage.checkpoint import extract_moments, load_moments
from rl_core.timing import add_to_total, span
from rl_core.training.master_weights import EmaWeights, MasterWeights
from rl_core.training.optimizers import (
    Grokfast,
    adapt_learning_rate_scale,
    build_optimizer,
    clip_gradients,
    compute_learning_rate,
    compute_total_norm,
    enable_activation_checkpointing,
    step_adamw,
)
from rl_core.training.performance_metrics import count_step_flops, read_sequence_lengths
from rl_core.training.sharded_step import ShardedModel, unwrap_dummy

Batch = TypeVar("Batch")


class Loss(Protocol):
    """The part of a scalar tensor that a step uses; a loss may bring gradients of its own."""

    def backward(self) -> None:
        """Add the gradients to those of the parameters."""

    def detach(self) -> torch.Tensor:
        """Return the value as a scalar tensor."""


LossFn = Callable[[Batch], tuple[torch.Tensor, Mapping[str, Any]]]
StepLossFn = Callable[[Batch], tuple[Loss, Mapping[str, Any]]]  # every LossFn is one
CLIP_MARGIN = 0.99  # of max_grad_norm, so that torch's 1e-6 and rounding make no difference

logger = logging.getLogger(__name__)


def combine_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine metrics of micro-batches: names ending in _max or _min by max or min, all others by their sum.

    Sums are correct because losses divide their metrics by the global denominator. Tensors are read together.
    """
    columns: dict[str, list[float]] = {}
    for part in read_parts(parts, [])[0]:
        for name, value in part.items():
            columns.setdefault(name, []).append(value)
    combined = {}
    for name, values in columns.items():
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name.endswith("_min"):
            combined[name] = min(values)
        else:
            combined[name] = math.fsum(values)
    return combined


def read_parts(
    parts: Sequence[Mapping[str, Any]], others: Sequence[Any]
) -> tuple[list[dict[str, float]], list[float]]:
    """Return metrics of micro-batches and other scalars as floats, with one read of the accelerator for all."""
    flat = [value for part in parts for value in part.values()]
    values = iter(read_scalars([*flat, *others]))
    read = [{name: next(values) for name in part} for part in parts]
    return read, list(values)


def split_oversized_batches(micro_batches: list[Batch], max_tokens: int | None) -> list[Batch]:
    """Halve micro-batches above `max_tokens` padded tokens, repeatedly, down to single rows; None = no limit."""
    if max_tokens is None:
        return micro_batches
    split_batches: list[Batch] = []
    for batch in micro_batches:
        halves = halve_batch(batch) if count_padded_tokens(batch) > max_tokens else None
        split_batches.extend(
            split_oversized_batches(list(halves), max_tokens) if halves else [batch]
        )
    return split_batches


class OptimizerStep:
    """The optimizer of a model's trainable parameters, with accumulation, guards, clipping and a schedule.

    It works on float32 master weights (`master_weights`) and maintains their moving average (`ema`). If several
    processes train the model, its weights are sharded among them here (`sharded`); each process then calls the same
    methods in the same order with as many micro-batches as every other (`ProcessGroup.build_local_batches`).
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
        if process_group.size > 1:
            refuse_image_model(model, "processes", "several processes")
        keep_freed_memory()
        limit_openmp_spin()
        self.model = model
        self.process_group = process_group
        self.settings = settings
        self.total_steps = total_steps
        self.max_nonfinite = max_nonfinite
        self.num_steps = 0  # steps tried, including skipped ones: the x axis of every metric
        self.skipped_steps = 0  # steps skipped because something was not finite
        self.skipped_in_row = 0
        # Of this process, for the loop's report; a restored state counts as if its steps had never moved a weight.
        self.tried_steps = 0
        self.moved_steps = 0
        self.learning_rate_scale = 1.0  # of the whole schedule; a rollback reduces it
        # Padded tokens of a micro-batch that fit in memory; None = memory never ran out.
        self.max_tokens: int | None = None
        # the packed forward pass multiplies bfloat16 weights itself
        if not (hasattr(model, "base_model") and check_training_forward(model).allowed):
            warn_about_slow_weights(model)
        self.sharded = ShardedModel(model, process_group)
        self.master_weights = MasterWeights(model)
        if settings.activation_checkpointing:
            enable_activation_checkpointing(model)
        masters = self.master_weights.masters
        self.optimizer = build_optimizer(model, masters, settings)
        self._grokfast: Grokfast | None = None
        if settings.grokfast_lambda > 0:
            self._grokfast = Grokfast(
                masters, amplification=settings.grokfast_lambda, alpha=settings.grokfast_alpha
            )
        self.ema = EmaWeights(self.master_weights, settings.ema_decay)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        learning_rate = compute_learning_rate(self.num_steps, self.settings, self.total_steps)
        return self.learning_rate_scale * learning_rate

    def adapt_learning_rate(self, kl: float, control: LearningRateControlSettings | None) -> None:
        """Adapt the scale of the schedule to the KL of the newest updates, in nats per token; None = leave it."""
        if control is not None:
            self.learning_rate_scale = adapt_learning_rate_scale(
                self.learning_rate_scale,
                kl,
                target=control.desired_kl,
                factor=control.factor,
                low=control.lowest,
                high=control.highest,
            )

    @property
    def computes_in_bfloat16(self) -> bool:
        """True if matrix products are computed in bfloat16, by autocast or because of the weights' dtype."""
        weight = self.master_weights.first_weight
        if resolve_autocast(self.settings.autocast, weight.device.type) == "bfloat16":
            return True
        return weight.dtype == torch.bfloat16

    @property
    def computes_in_float32(self) -> bool:
        """True if products and weights are in float32, including those of a frozen base model; False for TF32."""
        weight = next(self.model.parameters())
        if self.computes_in_bfloat16 or uses_tf32(weight.device):
            return False
        return weight.dtype == torch.float32

    def enable_autocast(self) -> AbstractContextManager[None]:
        """Return the context in which the model computes: bfloat16 if the settings say so, float32 weights in any case.

        `run_step` runs its loss function in it; a trainer runs other passes over the model in it, so that log-probs
        agree.
        """
        return enable_autocast(self.settings.autocast, self.master_weights.first_weight.device)

    def can_share_prefixes(self, *models: Any) -> bool:
        """Return whether all passes of a step over these models compute common beginnings of rows once, so that
        `rl_core.rollouts.batching.build_batches` may count them once.
        """
        if self.settings.dropout and any(map(has_dropout, models)):
            return False
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.enable_autocast())
            for model in models:
                stack.enter_context(use_eval_mode(model))
            return all(check_prefix_sharing(model).allowed for model in models)

    def run_step(
        self, micro_batches: Sequence[Batch | DummyBatch[Batch]], loss_fn: StepLossFn[Batch]
    ) -> dict[str, float]:
        """Run one optimizer step over all micro-batches.

        Args:
            micro_batches: dataclasses with one row per entry (`TrainBatch`), in order.
            loss_fn: returns (loss, metrics) of a micro-batch; the loss is already divided by the step's global
                denominator, so that losses and metrics add up for every split into micro-batches.
        Returns: combined metrics, with train/loss, train/grad_norm (before Grokfast and clipping), train/learning_rate
            and train/skipped_steps (updates skipped so far); with Grokfast, train/grokfast_grad_norm (after it, before
            clipping).
        Raises: NonFiniteError after `max_nonfinite` skipped updates in a row (weights are those before them);
            OutOfMemory if a single row does not fit.
        """
        if not micro_batches:
            raise DataError("an optimizer step needs at least one micro-batch")
        # A dummy batch has no lengths.
        lengths = [length for batch in micro_batches for length in read_sequence_lengths(batch)]
        add_to_total("optimizer_flops", count_step_flops(self.model, lengths))
        self.tried_steps += 1
        with span("optimizer"):
            return self._run_step(micro_batches, loss_fn)

    def _run_step(
        self, micro_batches: Sequence[Batch | DummyBatch[Batch]], loss_fn: StepLossFn[Batch]
    ) -> dict[str, float]:
        with (
            use_training_mode(self.model, dropout=self.settings.dropout),
            defer_checks() as checks,
        ):
            if self.sharded.shards is None:
                device_parts, problem = self._accumulate_gradients(
                    [unwrap_dummy(batch) for batch in micro_batches], loss_fn, checks
                )
            else:
                self._clear_gradients()
                tensor_loss_fn: Any = loss_fn  # sharded models have losses of autograd
                device_parts, problem = self.sharded.accumulate_gradients(
                    micro_batches,
                    tensor_loss_fn,
                    autocast=self.enable_autocast,
                    collect=self.master_weights.collect_gradients,
                    checks=checks,
                )
        norm = self._compute_grad_norm()
        # The only read of an accelerator in a step (Grokfast needs a second one).
        parts, (norm_value, *outcomes) = read_parts(device_parts, [norm, *checks.stack_outcomes()])
        if (failure := checks.find_failure(outcomes)) is not None:
            part_number, error = failure
            if not isinstance(error, NonFiniteTensor):
                raise error
            parts = [*parts[:part_number], {"train/loss": math.nan}]
            problem = f"{error} (micro-batch {part_number})"
        metrics = combine_metrics(parts)
        metrics["train/grad_norm"] = norm_value
        metrics["train/learning_rate"] = self.learning_rate
        is_finite = (
            problem is None
            and math.isfinite(metrics["train/loss"])
            and math.isfinite(metrics["train/grad_norm"])
        )
        if is_finite and self._grokfast is not None:
            # After the check, so that no bad gradient enters the average; before clipping, so that max_grad_norm
            # bounds the gradient that the optimizer gets.
            self._grokfast.amplify_gradients()
            norm = self._compute_grad_norm()
            metrics["train/grokfast_grad_norm"] = float(norm)
            is_finite = math.isfinite(metrics["train/grokfast_grad_norm"])
        if is_finite:
            norm_value = metrics.get("train/grokfast_grad_norm", metrics["train/grad_norm"])
            self._update_weights(norm, norm_value)
        else:
            self._skip_update(parts, problem)
        self._clear_gradients()
        metrics["train/skipped_steps"] = float(self.skipped_steps)
        return metrics

    def _compute_grad_norm(self) -> torch.Tensor:
        masters = self.master_weights.masters.values()
        grads = [to_local_rows(master.grad) for master in masters if master.grad is not None]
        return self.process_group.compute_norm(compute_total_norm(grads))

    def _update_weights(self, norm: torch.Tensor, norm_value: float) -> None:
        """Clip, step, and copy the new weights to the model. `norm_value` is `norm` as a float."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        max_norm = self.settings.max_grad_norm
        if norm_value > CLIP_MARGIN * max_norm:  # below, clipping would multiply by exactly 1
            clip_gradients(list(self.master_weights.masters.values()), max_norm, norm)
        try:
            if type(self.optimizer) is torch.optim.AdamW:
                step_adamw(self.optimizer)
            else:
                self.optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"the optimizer's state does not fit into memory ({format_first_line(error)}); use LoRA, a smaller "
                "model, or more processes, which share the state"
            ) from error
        self.master_weights.write_weights_back()
        self.ema.update_averages()
        self.skipped_in_row = 0
        self.num_steps += 1
        self.moved_steps += norm_value > 0

    def _accumulate_gradients(
        self, micro_batches: list[Batch], loss_fn: StepLossFn[Batch], checks: DeferredChecks
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Run backward for every micro-batch; if memory runs out, start again with the large ones halved.

        It starts again because a failed backward pass has already added part of its gradient.
        Args: checks: of the losses' inputs on an accelerator, which are read after the last micro-batch.
        Returns: metrics of each micro-batch; the tensor that was not finite, if the loss refused its input.
        """
        while True:
            self._clear_gradients()
            checks.clear_checks()
            micro_batches = split_oversized_batches(micro_batches, self.max_tokens)
            parts: list[dict[str, Any]] = []
            try:
                for batch in micro_batches:
                    checks.part = len(parts)
                    with self.enable_autocast():
                        loss, metrics = loss_fn(batch)
                    loss.backward()
                    self.master_weights.collect_gradients()
                    parts.append({**metrics, "train/loss": loss.detach()})
                return parts, None
            except NonFiniteTensor as error:
                return [*parts, {"train/loss": math.nan}], f"{error} (micro-batch {len(parts)})"
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = format_first_line(error)
                loss = metrics = None  # type: ignore[assignment]  # frees the graph before retrying
            if release_held_memory():
                continue
            failed = micro_batches[len(parts)]
            if halve_batch(failed) is None:
                raise OutOfMemory(
                    f"one row of {count_padded_tokens(failed)} tokens does not fit into memory ({problem}); "
                    "shorten max_completion_tokens or the context, or use a smaller model or LoRA"
                )
            self.max_tokens = count_padded_tokens(failed) - 1
            record_out_of_memory("micro-batches", self.max_tokens, "padded tokens")

    def _clear_gradients(self) -> None:
        """Delete all gradients, of masters and weights."""
        for master in self.master_weights.masters.values():
            master.grad = None
        for weight in self.master_weights.weights.values():
            weight.grad = None

    def _skip_update(self, parts: Sequence[Mapping[str, Any]], problem: str | None) -> None:
        self.skipped_steps += 1
        self.skipped_in_row += 1
        bad_tensor = self._find_first_nonfinite(parts, problem)
        logger.warning(
            "optimizer step %d skipped, %d in a row: not finite: %s",
            self.num_steps,
            self.skipped_in_row,
            bad_tensor,
        )
        self.num_steps += 1
        if self.skipped_in_row >= self.max_nonfinite:
            self._clear_gradients()
            raise NonFiniteError(
                f"{self.skipped_in_row} non-finite optimizer steps in a row (max_nonfinite); the last at step "
                f"{self.num_steps - 1}, first bad tensor: {bad_tensor}. The weights are those of the last good step; "
                "try a lower learning_rate or max_grad_norm, and look at the data of that step"
            )

    def _find_first_nonfinite(self, parts: Sequence[Mapping[str, Any]], problem: str | None) -> str:
        """Return the name of the first bad tensor, causes before consequences: weights, a loss's input, losses,
        gradients.
        """
        for name, weight in self.master_weights.weights.items():
            if not self._is_finite(weight):
                return f"weight {name}"
        if problem is not None:
            return problem
        for index, part in enumerate(parts):
            if not math.isfinite(float(part["train/loss"])):
                return f"loss of micro-batch {index}"
        for name, master in self.master_weights.masters.items():
            if master.grad is not None and not self._is_finite(master.grad):
                return f"gradient of {name}"
        return "global gradient norm"

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        is_local_finite = bool(torch.isfinite(to_local_rows(tensor)).all())
        return not self.process_group.all_reduce_max(int(not is_local_finite))

    def copy_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return copies of the trainable weights and of `state_dict`, on their device if it has room for them."""
        weights, state = collect_trainable_weights(self.model), self.state_dict()
        if has_room_for_copies(self.master_weights.first_weight.device, (weights, state)):
            copies = {name: tensor.clone() for name, tensor in weights.items()}
            return copies, {**copy.deepcopy(state), "moved_steps": self.moved_steps}
        return copy_to_host(weights), {**copy_to_host(state), "moved_steps": self.moved_steps}

    def restore_state(self, state: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
        """Restore a `copy_state`; `num_steps` stays, since it counts the steps tried."""
        weights, optimizer_state = state
        load_trainable_weights(self.model, weights)
        self.load_state_dict({**optimizer_state, "num_steps": self.num_steps})
        self.moved_steps = optimizer_state["moved_steps"]

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer moments, float32 masters, averages and counters; the schedule follows from `num_steps`."""
        return {
            "optimizer": self._collect_moments(),
            "masters": self.master_weights.state_dict(),
            **({"grokfast": self._grokfast.state_dict()} if self._grokfast is not None else {}),
            "ema": self.ema.state_dict(),
            "num_steps": self.num_steps,
            "skipped_steps": self.skipped_steps,
            "skipped_in_row": self.skipped_in_row,
            "learning_rate_scale": self.learning_rate_scale,
            "max_tokens": self.max_tokens,
        }

    def _collect_moments(self) -> dict[str, Any]:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return extract_moments(self.optimizer)
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, after the model's weights, which are loaded elsewhere.

        Averages that only the settings or only the state contain start from scratch, or are left out (a resume with
        changed settings, which must be allowed explicitly). Raises: CheckpointError for the state of another optimizer.
        """
        if state["optimizer"].keys() != self._collect_moments().keys():
            raise CheckpointError(
                f"the checkpoint holds the state of another optimizer than '{self.settings.optimizer}'; "
                "restore the old setting, or start over in another folder"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            load_moments(self.optimizer, state["optimizer"])
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        if self._grokfast is not None and "grokfast" in state:
            self._grokfast.load_state_dict(state["grokfast"])
        self.ema.load_state_dict(state["ema"])
        self.master_weights.load_state_dict(state["masters"])
        self.num_steps = state["num_steps"]
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_row = state["skipped_in_row"]
        self.learning_rate_scale = state["learning_rate_scale"]
        self.max_tokens = state["max_tokens"]
