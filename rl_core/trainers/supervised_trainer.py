"""Skeleton of trainers on a fixed set of examples: SFT, reward model, preference optimisation."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from rl_core.data.batches import DataOrder, plan_micro_batches
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
    """A `Trainer` (`training.trainer_protocol`): an optimizer step per iteration, on batch_size examples, seeded."""

    noun: ClassVar[str] = "row"  # one example, in errors
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
            pad_id: token id on the right of short rows.
            heldout: without any there is no evaluation.
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
        )  # iterations of the loop
        if self.step_limit_message:
            logger.info("%s", self.step_limit_message)
        self.optimizer_step = OptimizerStep(
            model,
            settings,
            self.total_steps,
            max_nonfinite=settings.max_nonfinite,
            process_group=process_group,
        )

    def describe_step_limit(self, steps: int) -> str:
        """`; ` and the limit that ended a training of so many steps; "" where only one was set, or neither ended it."""
        return (
            f"; {self.step_limit_message}"
            if self.step_limit_message and steps >= self.total_steps
            else ""
        )

    @abstractmethod
    def _count_tokens(self, example: Example) -> int:
        """Tokens of all rows of an example."""

    @abstractmethod
    def _count_longest_row(self, example: Example) -> int:
        """Tokens of the longest row of an example."""

    @abstractmethod
    def _build_batches(self, examples: Sequence[Example]) -> Sequence[Batch]:
        """Micro-batches of these examples; may be made where they are asked for."""

    @abstractmethod
    def _build_loss_fn(self, examples: Sequence[Example]) -> LossFn[Batch]:
        """Loss and metrics of a micro-batch of these examples, over the denominators of all of them."""

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch_size examples."""
        started = time.perf_counter()
        examples = [self._train[index] for index in self.order.next_batch()]
        num_tokens = sum(map(self._count_tokens, examples))
        loss_fn = self._build_loss_fn(examples)

        def named(batch: Batch) -> tuple[torch.Tensor, Mapping[str, Any]]:
            loss, metrics = loss_fn(batch)
            return loss, {f"train/{name}": value for name, value in metrics.items()}

        metrics = self.optimizer_step.run_step(list(self._build_local_batches(examples)), named)
        return {
            **metrics,
            "train/tokens": float(num_tokens),
            "train/epoch": self.optimizer_step.num_steps / self.order.batches_per_epoch,
            "perf/tokens_per_second": num_tokens / max(time.perf_counter() - started, 1e-9),
        }

    def evaluate(self) -> dict[str, float]:
        """Metrics over the held-out examples, as eval/...; {} without any."""
        if not self._heldout:
            return {}
        return {
            f"eval/{name}": value for name, value in self._evaluate_examples(self._heldout).items()
        }

    def _evaluate_examples(self, examples: Sequence[Example]) -> dict[str, float]:
        """Loss and metrics over these examples, without dropout and gradient."""
        loss_fn = self._build_loss_fn(examples)

        def measure(batch: Batch) -> dict[str, float]:
            loss, metrics = loss_fn(batch)
            return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}

        return combine_metrics(
            self.optimizer_step.sharded.measure_batches(
                self._build_local_batches(examples), measure, self.optimizer_step.enable_autocast()
            )
        )

    def _build_local_batches(
        self, examples: Sequence[Example]
    ) -> Sequence[Batch | DummyBatch[Batch]]:
        """This process's micro-batches of these examples."""
        lengths = [self._count_longest_row(example) for example in examples]
        return self.optimizer_step.process_group.build_local_batches(
            examples, lengths, self._build_batches
        )

    def state_dict(self) -> dict[str, Any]:
        """Position in the order of examples."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.order.load_state_dict(state["order"])


def compute_training_length(
    settings: SFTSettings | RewardModelSettings | PreferenceSettings, batches_per_epoch: int
) -> tuple[int, str]:
    """Optimizer steps of a training, and a sentence on which of `epochs` and `max_steps` binds, where both are set."""
    steps = math.ceil(settings.epochs * batches_per_epoch)
    if settings.max_steps is None:
        return steps, ""
    of_epochs = f"epochs: {settings.epochs:g} ({steps} steps)"
    if settings.max_steps < steps:
        seen = settings.max_steps / batches_per_epoch
        return (
            settings.max_steps,
            f"max_steps {settings.max_steps} ends it after {seen:.3g} epochs, not {of_epochs}",
        )
    return steps, f"{of_epochs} ends it, not max_steps {settings.max_steps}"


def build_pair_batches(
    longest_lengths: Sequence[int], max_tokens: int
) -> list[tuple[list[int], int]]:
    """Micro-batches of pairs, both rows of a pair in the same one: (indices of the pairs, common width of all rows).

    Args:
        widest: tokens of the longer row of each pair.
        max_tokens: padded tokens of a micro-batch at most (a longer pair stands alone).
    """
    groups = plan_micro_batches(longest_lengths, max(1, max_tokens // 2))
    return [(list(group), max(longest_lengths[index] for index in group)) for group in groups]
