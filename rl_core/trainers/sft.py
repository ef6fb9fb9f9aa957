"""Supervised fine-tuning on completions.

Suffixes: B rows, S whole sequence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import check_sequence_packing
from rl_core.data.row_sequences import LazyRows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.supervised import supervised_loss
from rl_core.models.logprobs import check_router, compute_token_outputs
from rl_core.rollouts.batching import TrainRow, build_lazy_batches
from rl_core.settings import SFTSettings, build_settings
from rl_core.trainers.supervised_trainer import SupervisedTrainer
from rl_core.training.optimizer_step import LossFn
from rl_core.types import ImagePixels, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

# token ids, loss mask (True = token carries loss), images in the order of their tokens if there are any
SFTRow = (
    tuple[Sequence[int], Sequence[bool]]
    | tuple[Sequence[int], Sequence[bool], Sequence[ImagePixels]]
)


class SFTTrainer(SupervisedTrainer[TrainRow, TrainBatch]):
    """Trainer on the mean cross-entropy of the tokens that carry loss; one iteration is one optimizer step."""

    settings: SFTSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        rows_train: Sequence[SFTRow],
        rows_heldout: Sequence[SFTRow],
        settings: SFTSettings | Mapping[str, Any],
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Check the rows; see `SupervisedTrainer`.

        Args:
            model: a causal LM on its device.
            rows_train, rows_heldout: (ids, loss_mask), or with images as a third entry, of whole conversations; at
                least one loss token each, none at position 0, which has nothing before it.
        Raises: DataError naming a row that cannot be trained on.
        """
        settings = build_settings(settings, SFTSettings)
        check_router(model, settings.router_aux_loss_coef)
        train = _check_train_rows(rows_train, "rows_train")
        heldout = _check_train_rows(rows_heldout, "rows_heldout")
        super().__init__(model, pad_id, train, heldout, settings, seed, process_group)
        self._packing = settings.packing and check_sequence_packing(model).allowed
        if settings.packing and not self._packing:
            logger.warning(
                "packing: %s with attention '%s' mixes the sequences of a row, so rows are padded instead",
                type(model).__name__,
                getattr(model.config, "_attn_implementation", None),
            )

    def _evaluate_examples(self, examples: Sequence[TrainRow]) -> dict[str, float]:
        """Return the loss in nats per loss token (without a router's), and perplexity, its exponential."""
        metrics = super()._evaluate_examples(examples)
        loss = metrics.get("nll", metrics["loss"])
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}

    def _count_tokens(self, example: TrainRow) -> int:
        return len(example.completion_ids) + 1

    def _count_longest_row(self, example: TrainRow) -> int:
        return len(example.completion_ids) + 1

    def _build_batches(self, examples: Sequence[TrainRow]) -> Sequence[TrainBatch]:
        return build_lazy_batches(
            examples,
            self.settings.micro_batch_tokens,
            self._pad_id,
            packing=self._packing,
            shares_prefixes=self.optimizer_step.can_share_prefixes(self.model),
        )

    def _build_loss_fn(self, examples: Sequence[TrainRow]) -> LossFn[TrainBatch]:
        num_loss_tokens = sum(sum(row.loss_mask) for row in examples)
        num_tokens = sum(map(self._count_tokens, examples))
        return lambda batch: self._compute_loss(batch, num_loss_tokens, num_tokens)

    def _compute_loss(
        self, batch: TrainBatch, num_loss_tokens: int, num_tokens: int
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Compute the loss over the step's loss tokens; add a router's loss by the share of real tokens."""
        batch, coef = batch.to(self._device), self.settings.router_aux_loss_coef
        outputs = compute_token_outputs(self.model, batch, with_load_balancing=coef > 0)
        loss, metrics = supervised_loss(
            outputs.logprobs_BS, batch.loss_mask_BS, num_loss_tokens=num_loss_tokens
        )
        if outputs.load_balancing_loss is None:
            return loss, {}
        token_share = batch.attention_mask_BS.sum() / num_tokens
        router_loss = outputs.load_balancing_loss * token_share
        return loss + coef * router_loss, metrics | {"router_aux_loss": router_loss.detach()}


def _check_train_rows(rows: Sequence[SFTRow], name: str) -> LazyRows[TrainRow]:
    """Check all rows; convert them only when accessed, as their container may be more compact than lists."""
    converted = LazyRows(
        len(rows), lambda index: _convert_train_row(rows[index], f"{name}[{index}]")
    )
    for _ in converted:  # conversion checks the row
        pass
    return converted


def _convert_train_row(row: SFTRow, name: str) -> TrainRow:
    ids, mask = row[:2]
    images = row[2] if len(row) == 3 else ()
    if len(ids) != len(mask):
        raise DataError(f"{name}: {len(ids)} token ids, but a loss mask of {len(mask)}")
    if not any(mask):
        raise DataError(f"{name}: no token carries loss")
    if mask[0]:
        raise DataError(f"{name}: the first token carries loss, but nothing comes before it")
    return TrainRow(
        prompt_ids=ids[:1], completion_ids=ids[1:], loss_mask=mask[1:], images=tuple(images)
    )
