"""Supervised fine-tuning on completions.

B rows, S whole sequence.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rl_core.capabilities import sequence_packing
from rl_core.data.batches import DataOrder
from rl_core.distributed import SINGLE_PROCESS, DummyBatch, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.supervised import supervised_loss
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, make_batches
from rl_core.settings import SFTSettings
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

__all__ = ["SFTTrainer"]

logger = logging.getLogger(__name__)

Row = tuple[Sequence[int], Sequence[bool]]  # token ids, loss mask (True = token carries loss)


class SFTTrainer:
    """Minimises the mean cross-entropy of the tokens that carry loss; one iteration is one optimizer step.

    Args:
        model: a causal LM, in its place on its device.
        pad_id: token id on the right of short rows.
        rows_train, rows_heldout: (ids, loss_mask) of whole conversations; at least one loss token each, none at
            position 0, which has nothing before it. Without held-out rows there is no evaluation.
        seed: of the order of rows.
        process_group: the processes that train this model together, each with the same arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        rows_train: Sequence[Row],
        rows_heldout: Sequence[Row],
        settings: SFTSettings,
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        if not rows_train:
            raise DataError("rows_train: there is no row to train on")
        self.model = model
        self.settings = settings
        self._pad_id = pad_id
        self._train = [_train_row(row, f"rows_train[{index}]") for index, row in enumerate(rows_train)]
        self._heldout = [_train_row(row, f"rows_heldout[{index}]") for index, row in enumerate(rows_heldout)]
        self._device = next(model.parameters()).device
        self.order = DataOrder(len(rows_train), settings.batch_size, seed)
        steps = math.ceil(settings.epochs * self.order.batches_per_epoch)
        self.total_steps = min(steps, settings.max_steps or steps)  # iterations for the loop
        self.optimizer_step = OptimizerStep(
            model, settings, self.total_steps, max_nonfinite=settings.max_nonfinite, process_group=process_group
        )
        self._packing = settings.packing and sequence_packing(model).allowed
        if settings.packing and not self._packing:
            logger.warning(
                "packing: %s with attention '%s' mixes the sequences of a row, so rows are padded instead",
                type(model).__name__,
                getattr(model.config, "_attn_implementation", None),
            )

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch_size rows."""
        started = time.perf_counter()
        rows = [self._train[index] for index in self.order.next()]
        batches = self._batches(rows)
        num_loss_tokens = _loss_tokens(rows)
        num_tokens = sum(len(row.completion_ids) + 1 for row in rows)
        metrics = self.optimizer_step.apply(batches, lambda batch: self._loss(batch, num_loss_tokens))
        return {
            **metrics,
            "train/tokens": float(num_tokens),
            "train/epoch": self.optimizer_step.num_steps / self.order.batches_per_epoch,
            "perf/tokens_per_second": num_tokens / max(time.perf_counter() - started, 1e-9),
        }

    def evaluate(self) -> dict[str, float]:
        """eval/loss in nats per loss token over the held-out rows, and eval/perplexity, its exponential."""
        if not self._heldout:
            return {}
        num_loss_tokens = _loss_tokens(self._heldout)
        loss = math.fsum(
            self.optimizer_step.sharded.measure(
                self._batches(self._heldout),
                lambda batch: float(self._loss(batch, num_loss_tokens)[0]),
                self.optimizer_step.autocast(),
            )
        )
        return {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}

    def state_dict(self) -> dict[str, Any]:
        """Where the data order stands."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.order.load_state_dict(state["order"])

    def _batches(self, rows: Sequence[TrainRow]) -> list[TrainBatch | DummyBatch[TrainBatch]]:
        def build(some: list[TrainRow]) -> list[TrainBatch]:
            return make_batches(some, self.settings.micro_batch_tokens, self._pad_id, packing=self._packing)

        return self.optimizer_step.process_group.batches(rows, [len(row.completion_ids) + 1 for row in rows], build)

    def _loss(self, batch: TrainBatch, num_loss_tokens: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        batch = batch.to(self._device)
        logprobs_BS, _ = completion_logprobs(self.model, batch)
        loss, _ = supervised_loss(logprobs_BS, batch.loss_mask_BS, num_loss_tokens=num_loss_tokens)
        return loss, {}


def _loss_tokens(rows: Sequence[TrainRow]) -> int:
    return sum(sum(row.loss_mask) for row in rows)


def _train_row(row: Row, name: str) -> TrainRow:
    ids, mask = row
    if len(ids) != len(mask):
        raise DataError(f"{name}: {len(ids)} token ids, but a loss mask of {len(mask)}")
    if not any(mask):
        raise DataError(f"{name}: no token carries loss")
    if mask[0]:
        raise DataError(f"{name}: the first token carries loss, but nothing comes before it")
    return TrainRow(prompt_ids=ids[:1], completion_ids=ids[1:], loss_mask=mask[1:])
