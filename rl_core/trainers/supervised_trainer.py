"""Base class of trainers on a fixed set of examples: SFT, reward model, preference optimisation."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from rl_core.cpu.prefix_tree import encode_row
from rl_core.data.batches import DataOrder, plan_shared_batches
from rl_core.distributed import DummyBatch, ProcessGroup
from rl_core.errors import DataError
from rl_core.settings import PreferenceSettings, RewardModelSettings, SFTSettings
from rl_core.training.optimizer_step import LossFn, OptimizerStep, combine_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

Example = TypeVar("Example")  # a row, or a pair of rows
Batch = TypeVar("Batch")  # a dataclass with one entry per example in every tensor


class SupervisedTrainer(ABC, Generic[Example, Batch]):
    """A `Trainer` (see `training.callbacks`): one optimizer step per iteration on batch_size examples, in a seeded
    order.
    """

    noun: ClassVar[str] = "row"  # what an example is called in errors
    selection_metric: ClassVar[str] = (
        "eval/loss"  # of the best weights, if the training is stopped early
    )
    settings: SFTSettings | RewardModelSettings | PreferenceSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        train: Sequence[Example],
        heldout: Sequence[Example],
        settings: SFTSettings | RewardModelSettings | PreferenceSettings,
        seed: int,
        process_group: ProcessGroup,
    ) -> None:
        """Build the data order and the optimizer.

        Args:
            pad_id: token id that fills short rows on the right.
            heldout: may be empty; then there is no evaluation.
            seed: of the order of examples.
            process_group: the processes that train this model together, each with the same arguments.
        Raises: DataError without a training example.
        """
        if not train:
            raise DataError(f"{self.noun}s_train: there is no {self.noun} to train on")
        self.model = model
        self.settings = settings
        self._pad_id = pad_id
        self._train = train
        self._heldout = heldout
        self._device = next(model.parameters()).device
        self.order = DataOrder(len(train), settings.batch_size, seed)
        self.total_steps, self.step_limit_message = compute_training_length(
            settings, self.order.batches_per_epoch
        )
        if self.step_limit_message:
            logger.info("%s", self.step_limit_message)
        self.optimizer_step = OptimizerStep(
            model,
            settings,
            self.total_steps,
            max_nonfinite=settings.max_nonfinite,
            process_group=process_group,
        )

    @property
    def best_metric(self) -> str | None:
        """Metric that selects the best weights; None = the last weights are kept."""
        return self.selection_metric if self.settings.selects_best else None

    def describe_step_limit(self, steps: int) -> str:
        """Return `; ` and the limit that ended a training of so many steps; "" if only one was set or neither was
        reached.
        """
        if not self.step_limit_message or steps < self.total_steps:
            return ""
        return f"; {self.step_limit_message}"

    @abstractmethod
    def _count_tokens(self, example: Example) -> int:
        """Count the tokens of all rows of an example."""

    @abstractmethod
    def _count_longest_row(self, example: Example) -> int:
        """Count the tokens of the longest row of an example."""

    @abstractmethod
    def _build_batches(self, examples: Sequence[Example]) -> Sequence[Batch]:
        """Build micro-batches of these examples; may build each only when accessed."""

    @abstractmethod
    def _build_loss_fn(self, examples: Sequence[Example]) -> LossFn[Batch]:
        """Return a function that computes loss and metrics of a micro-batch, over the denominators of all examples."""

    def step(self) -> dict[str, float]:
        """Run one optimizer step on the next batch_size examples."""
        started = time.perf_counter()
        examples = [self._train[index] for index in self.order.next_batch()]
        num_tokens = sum(map(self._count_tokens, examples))
        loss_fn = self._build_loss_fn(examples)

        def compute_prefixed_loss(batch: Batch) -> tuple[torch.Tensor, Mapping[str, Any]]:
            loss, metrics = loss_fn(batch)
            return loss, {f"train/{name}": value for name, value in metrics.items()}

        metrics = self.optimizer_step.run_step(
            list(self._build_local_batches(examples)), compute_prefixed_loss
        )
        return {
            **metrics,
            "train/tokens": float(num_tokens),
            "train/epoch": self.optimizer_step.num_steps / self.order.batches_per_epoch,
            "perf/tokens_per_second": num_tokens / max(time.perf_counter() - started, 1e-9),
        }

    def evaluate(self) -> dict[str, float]:
        """Return metrics over the held-out examples, as eval/...; {} without any."""
        if not self._heldout:
            return {}
        return {
            f"eval/{name}": value for name, value in self._evaluate_examples(self._heldout).items()
        }

    def _evaluate_examples(self, examples: Sequence[Example]) -> dict[str, float]:
        """Compute loss and metrics over these examples, without dropout or gradient."""
        loss_fn = self._build_loss_fn(examples)

        def measure(batch: Batch) -> dict[str, Any]:
            loss, metrics = loss_fn(batch)
            return {"loss": loss, **metrics}

        batches = self._build_local_batches(examples)
        autocast = self.optimizer_step.enable_autocast()
        return combine_metrics(
            self.optimizer_step.sharded.measure_batches(batches, measure, autocast)
        )

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of a micro-batch to the model's device, without waiting for the device."""
        return tensor.to(self._device, non_blocking=True)

    def _build_local_batches(
        self, examples: Sequence[Example]
    ) -> Sequence[Batch | DummyBatch[Batch]]:
        """Build this process's micro-batches of these examples."""
        lengths = [self._count_longest_row(example) for example in examples]
        return self.optimizer_step.process_group.build_local_batches(
            examples, lengths, self._build_batches
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of examples."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.order.load_state_dict(state["order"])


def compute_training_length(
    settings: SFTSettings | RewardModelSettings | PreferenceSettings, batches_per_epoch: int
) -> tuple[int, str]:
    """Compute the number of optimizer steps; if both limits are set, name the one that binds in a sentence."""
    steps = math.ceil(settings.epochs * batches_per_epoch)
    if settings.max_steps is None:
        return steps, ""
    max_steps, epochs = settings.max_steps, f"epochs: {settings.epochs:g} ({steps} steps)"
    if max_steps < steps:
        num_epochs = max_steps / batches_per_epoch
        return (
            max_steps,
            f"max_steps {max_steps} ends it after {num_epochs:.3g} epochs, not {epochs}",
        )
    return steps, f"{epochs} ends it, not max_steps {max_steps}"


def build_pair_batches(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], max_tokens: int, *, shares_prefixes: bool
) -> list[tuple[list[int], int]]:
    """Group pairs into micro-batches, both rows of a pair in the same one.

    Args:
        pairs: token ids of both rows of each pair.
        max_tokens: limit of tokens per micro-batch (a longer pair gets its own): padded, or those of the prefix tree.
        shares_prefixes: the model computes common beginnings of rows once (`OptimizerStep.can_share_prefixes`).
    Returns: indices of the pairs and common width of all rows, for each micro-batch.
    """
    lengths = [max(map(len, pair)) for pair in pairs]
    encoded = ([encode_row(ids) for ids in pair] for pair in pairs) if shares_prefixes else None
    groups = plan_shared_batches(lengths, max_tokens, encoded, sides=2)
    return [(group, max(lengths[index] for index in group)) for group in groups]
