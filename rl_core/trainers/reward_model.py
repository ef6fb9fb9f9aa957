"""Bradley-Terry reward model on preference pairs.

B pairs, S whole sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rl_core.data.batches import DataOrder, micro_batches, pad_rows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.preference import bradley_terry_loss, calibration_error
from rl_core.models import heads
from rl_core.settings import RewardModelSettings
from rl_core.training.optimizer_step import OptimizerStep

__all__ = ["RewardModelTrainer", "longer_answer_baseline"]

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of the whole chosen and rejected sequences


def longer_answer_baseline(pairs: Sequence[tuple[Sized, Sized]]) -> float:
    """Accuracy of "the longer one is the chosen one"; equal lengths count half. Raises: DataError for no pair."""
    if not pairs:
        raise DataError("longer_answer_baseline: there is no pair")
    return sum((len(c) > len(r)) + 0.5 * (len(c) == len(r)) for c, r in pairs) / len(pairs)


@dataclass
class _ScoredPairBatch:
    """Some pairs; one row a pair in every tensor, so that the optimizer step can cut a batch that does not fit."""

    chosen_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    rejected_ids_BS: torch.Tensor  # int64 [B, S], padded to the same S
    chosen_lengths_B: torch.Tensor  # int64 [B], real tokens
    rejected_lengths_B: torch.Tensor


class RewardModelTrainer:
    """Minimises the Bradley-Terry loss; one iteration is one optimizer step.

    Args:
        model: a sequence classifier with one label (`rl_core.models.heads`), on its device.
        pad_id: token id on the right of short rows.
        pairs_train, pairs_heldout: (chosen_ids, rejected_ids). Without held-out pairs there is no evaluation.
        seed: of the order of pairs.
        process_group: the processes that train this model together, each with the same arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        pairs_train: Sequence[Pair],
        pairs_heldout: Sequence[Pair],
        settings: RewardModelSettings,
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        if not pairs_train:
            raise DataError("pairs_train: there is no pair to train on")
        for name, pairs in (("pairs_train", pairs_train), ("pairs_heldout", pairs_heldout)):
            empty = next((index for index, pair in enumerate(pairs) if not all(len(row) for row in pair)), None)
            if empty is not None:
                raise DataError(f"{name}[{empty}]: a sequence without tokens cannot be scored")
        self.model = model
        self.settings = settings
        self._pad_id = pad_id
        self._train = list(pairs_train)
        self._heldout = list(pairs_heldout)
        self._device = next(model.parameters()).device
        self.order = DataOrder(len(pairs_train), settings.batch_size, seed)
        steps = math.ceil(settings.epochs * self.order.batches_per_epoch)
        self.total_steps = min(steps, settings.max_steps or steps)
        self.optimizer_step = OptimizerStep(
            model, settings, self.total_steps, max_nonfinite=settings.max_nonfinite, process_group=process_group
        )

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch_size pairs."""
        started = time.perf_counter()
        pairs = [self._train[index] for index in self.order.next()]
        num_tokens = sum(len(row) for pair in pairs for row in pair)
        widest = [max(len(chosen), len(rejected)) for chosen, rejected in pairs]
        batches = self.optimizer_step.process_group.batches(pairs, widest, self._batches)
        metrics = self.optimizer_step.apply(batches, lambda batch: self._loss(batch, len(pairs)))
        return {
            **metrics,
            "train/tokens": float(num_tokens),
            "train/epoch": self.optimizer_step.num_steps / self.order.batches_per_epoch,
            "perf/tokens_per_second": num_tokens / max(time.perf_counter() - started, 1e-9),
        }

    def evaluate(self) -> dict[str, float]:
        """eval/loss, eval/accuracy (ties count half), eval/margin and eval/ece over the held-out pairs."""
        if not self._heldout:
            return {}
        scores_B = torch.tensor(self._scores([row for pair in self._heldout for row in pair]))
        chosen_B, rejected_B = scores_B[0::2], scores_B[1::2]
        loss, metrics = bradley_terry_loss(
            chosen_B, rejected_B, num_pairs=len(self._heldout), center_coef=self.settings.center_coef
        )
        return {
            "eval/loss": float(loss),
            "eval/accuracy": float(metrics["accuracy"]),
            "eval/margin": float(metrics["margin"]),
            "eval/ece": calibration_error(chosen_B - rejected_B),
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the order of pairs stands."""
        return {"order": self.order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.order.load_state_dict(state["order"])

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """`heads.score`, of which each process takes its share."""

        def build(some: list[int]) -> list[list[int]]:
            groups = heads.score_batches([len(rows[index]) for index in some], self.settings.micro_batch_tokens)
            return [[some[place] for place in group] for group in groups]

        def measure(indices: list[int]) -> list[tuple[int, float]]:
            values = heads.score_batch(self.model, [rows[index] for index in indices], pad_id=self._pad_id)
            return list(zip(indices, values, strict=True))

        batches = self.optimizer_step.process_group.batches(range(len(rows)), [len(row) for row in rows], build)
        scores = dict(
            pair
            for part in self.optimizer_step.sharded.measure(batches, measure, self.optimizer_step.autocast())
            for pair in part
        )
        return [scores[index] for index in range(len(rows))]

    def _batches(self, pairs: Sequence[Pair]) -> list[_ScoredPairBatch]:
        """Both rows of a pair in one micro-batch, pairs sorted by their longer row."""
        widest = [max(len(chosen), len(rejected)) for chosen, rejected in pairs]
        groups = micro_batches(widest, max(1, self.settings.micro_batch_tokens // 2))
        batches = []
        for group in groups:
            width = max(widest[index] for index in group)
            chosen, rejected = ([pairs[index][side] for index in group] for side in (0, 1))
            batches.append(
                _ScoredPairBatch(
                    pad_rows(chosen, self._pad_id, width=width),
                    pad_rows(rejected, self._pad_id, width=width),
                    torch.tensor([len(row) for row in chosen]),
                    torch.tensor([len(row) for row in rejected]),
                )
            )
        return batches

    def _loss(self, batch: _ScoredPairBatch, num_pairs: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        input_ids_BS = torch.cat([batch.chosen_ids_BS, batch.rejected_ids_BS]).to(self._device)
        lengths_B = torch.cat([batch.chosen_lengths_B, batch.rejected_lengths_B]).to(self._device)
        chosen_B, rejected_B = heads.sequence_scores(self.model, input_ids_BS, lengths_B).chunk(2)
        loss, metrics = bradley_terry_loss(
            chosen_B, rejected_B, num_pairs=num_pairs, center_coef=self.settings.center_coef
        )
        return loss, {f"train/{name}": value for name, value in metrics.items()}
