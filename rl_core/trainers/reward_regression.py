"""Reward model by regression on scores that people gave (1 to 5, thumbs). B rows, S whole sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rl_core.data.batches import micro_batches, pad_rows
from rl_core.data.lazy_rows import LazyRows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.regression import concordance, reward_regression_loss
from rl_core.models import heads
from rl_core.settings import RewardModelSettings
from rl_core.trainers.sharded_scoring import sharded_scores
from rl_core.trainers.supervised_trainer import SupervisedTrainer
from rl_core.training.optimizer_step import LossFn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RewardRegressionTrainer", "ScoredRow"]

MOST_COMPARED = 2000  # held-out rows of which all pairs are compared


class ScoredRow(NamedTuple):
    """Token ids of prompt and completion, and the score that was given."""

    ids: Sequence[int]
    score: float


@dataclass
class _ScoredRowBatch:
    """A micro-batch; the optimizer step halves one that does not fit."""

    ids_BS: torch.Tensor  # int64 [B, S], right-padded
    lengths_B: torch.Tensor  # int64 [B], real tokens
    targets_B: torch.Tensor  # float32 [B], standardised


class RewardRegressionTrainer(SupervisedTrainer[ScoredRow, _ScoredRowBatch]):
    """Minimises the squared error; one iteration is one optimizer step.

    Scores are standardised by mean and standard deviation of the training rows: the head has no offset, and a policy's
    reward should not depend on the scale that people were given.
    """

    noun: ClassVar[str] = "row"
    settings: RewardModelSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        rows_train: Sequence[ScoredRow],
        rows_heldout: Sequence[ScoredRow],
        settings: RewardModelSettings,
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Check the rows; see `SupervisedTrainer`.

        Args:
            model: a sequence classifier with one label (`rl_core.models.heads`), on its device.
        Raises: DataError naming a row without tokens or with a score that is not finite; training or held-out rows
            that all have one score.
        """
        for name, rows in (("rows_train", rows_train), ("rows_heldout", rows_heldout)):
            found = set()
            for place, row in enumerate(rows):
                if not len(row.ids):
                    raise DataError(f"{name}[{place}]: a sequence without tokens cannot be scored")
                if not math.isfinite(row.score):
                    raise DataError(f"{name}[{place}]: score {row.score} must be finite")
                found.add(row.score)
            if len(found) == 1:
                raise DataError(f"{name}: all {len(rows)} scores are {found.pop():g}, so there is nothing to learn")
        scores = torch.tensor([row.score for row in rows_train], dtype=torch.float64)
        self.mean = float(scores.mean()) if len(scores) else 0.0
        self.std = float(scores.std(correction=0)) if len(scores) else 1.0
        super().__init__(model, pad_id, rows_train, rows_heldout, settings, seed, process_group)

    def _evaluate(self, examples: Sequence[ScoredRow]) -> dict[str, float]:
        """Loss and absolute error (of standardised scores), explained variance, share of pairs ordered rightly."""
        rows = LazyRows(len(examples), lambda place: examples[place].ids)
        scores_B = torch.tensor(
            sharded_scores(
                self.optimizer_step, self.model, rows, max_tokens=self.settings.micro_batch_tokens, pad_id=self._pad_id
            )
        )
        targets_B = torch.tensor([self._standardised(row.score) for row in examples])
        loss, metrics = reward_regression_loss(scores_B, targets_B, num_rows=len(examples))
        return {
            "loss": float(loss),
            "absolute_error": float(metrics["absolute_error"]),
            "explained_variance": 1 - float((scores_B - targets_B).var() / targets_B.var()),
            "accuracy": concordance(scores_B[:MOST_COMPARED], targets_B[:MOST_COMPARED]),
        }

    def _standardised(self, score: float) -> float:
        return (score - self.mean) / self.std

    def _num_tokens(self, example: ScoredRow) -> int:
        return len(example.ids)

    def _length(self, example: ScoredRow) -> int:
        return len(example.ids)

    def _build_batches(self, examples: Sequence[ScoredRow]) -> Sequence[_ScoredRowBatch]:
        groups = micro_batches([len(row.ids) for row in examples], self.settings.micro_batch_tokens)

        def made(number: int) -> _ScoredRowBatch:
            some = [examples[index] for index in groups[number]]
            return _ScoredRowBatch(
                pad_rows([row.ids for row in some], self._pad_id),
                torch.tensor([len(row.ids) for row in some]),
                torch.tensor([self._standardised(row.score) for row in some]),
            )

        return LazyRows(len(groups), made)

    def _loss_fn(self, examples: Sequence[ScoredRow]) -> LossFn[_ScoredRowBatch]:
        def loss(batch: _ScoredRowBatch) -> tuple[torch.Tensor, Mapping[str, Any]]:
            lengths_B = batch.lengths_B.to(self._device)
            scores_B = heads.sequence_scores(self.model, batch.ids_BS.to(self._device), lengths_B)
            return reward_regression_loss(scores_B, batch.targets_B.to(scores_B), num_rows=len(examples))

        return loss
