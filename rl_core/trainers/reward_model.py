"""Bradley-Terry reward model on preference pairs.

B pairs, S whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rl_core.data.batches import pad_rows
from rl_core.data.lazy_rows import LazyRows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.preference import bradley_terry_loss, calibration_error
from rl_core.models import heads
from rl_core.settings import RewardModelSettings
from rl_core.trainers.supervised_trainer import SupervisedTrainer, pair_micro_batches
from rl_core.training.optimizer_step import LossFn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RewardModelTrainer", "ScoredPair", "longer_answer_baseline"]


class ScoredPair(NamedTuple):
    """Token ids of the whole chosen and rejected sequences, and by how much the first is to score higher."""

    chosen_ids: Sequence[int]
    rejected_ids: Sequence[int]
    margin: float = 0.0


def _scored(pairs: Sequence[tuple[Sequence[int], Sequence[int]] | ScoredPair]) -> LazyRows[ScoredPair]:
    return LazyRows(len(pairs), lambda place: ScoredPair(*pairs[place]))


def _side(pair: ScoredPair, which: int) -> Sequence[int]:
    return pair.rejected_ids if which else pair.chosen_ids


def longer_answer_baseline(lengths: Sequence[tuple[int, int]]) -> float:
    """Accuracy of "the longer one is the chosen one" on lengths (chosen, rejected); equal ones count half.

    Raises: DataError for no pair.
    """
    if not lengths:
        raise DataError("longer_answer_baseline: there is no pair")
    return sum((c > r) + 0.5 * (c == r) for c, r in lengths) / len(lengths)


@dataclass
class _ScoredPairBatch:
    """A micro-batch with one row per pair in every tensor; the optimizer step halves one that does not fit."""

    chosen_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    rejected_ids_BS: torch.Tensor  # int64 [B, S], padded to the same S
    chosen_lengths_B: torch.Tensor  # int64 [B], real tokens
    rejected_lengths_B: torch.Tensor
    margin_B: torch.Tensor  # float32 [B]


class RewardModelTrainer(SupervisedTrainer[ScoredPair, _ScoredPairBatch]):
    """Minimises the Bradley-Terry loss; one iteration is one optimizer step."""

    noun: ClassVar[str] = "pair"
    settings: RewardModelSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        pairs_train: Sequence[tuple[Sequence[int], Sequence[int]] | ScoredPair],
        pairs_heldout: Sequence[tuple[Sequence[int], Sequence[int]] | ScoredPair],
        settings: RewardModelSettings,
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Check the pairs; see `SupervisedTrainer`.

        Args:
            model: a sequence classifier with one label (`rl_core.models.heads`), on its device.
            pairs_train, pairs_heldout: (chosen_ids, rejected_ids), or with a margin as `ScoredPair`.
        Raises: DataError naming a pair with an empty sequence, or a margin that is negative or not finite.
        """
        examples = [_scored(pairs) for pairs in (pairs_train, pairs_heldout)]
        for name, part in zip(("pairs_train", "pairs_heldout"), examples, strict=True):
            for place, pair in enumerate(part):
                if not (len(pair.chosen_ids) and len(pair.rejected_ids)):
                    raise DataError(f"{name}[{place}]: a sequence without tokens cannot be scored")
                if not 0 <= pair.margin < math.inf:
                    raise DataError(f"{name}[{place}]: margin {pair.margin} must be finite and at least 0")
        super().__init__(model, pad_id, examples[0], examples[1], settings, seed, process_group)

    def _evaluate(self, examples: Sequence[ScoredPair]) -> dict[str, float]:
        """Loss, accuracy (ties count half), margin, and calibration error."""
        rows = LazyRows(2 * len(examples), lambda place: _side(examples[place // 2], place % 2))
        scores_B = torch.tensor(self._scores(rows))
        chosen_B, rejected_B = scores_B[0::2], scores_B[1::2]
        loss, metrics = bradley_terry_loss(
            chosen_B,
            rejected_B,
            num_pairs=len(examples),
            margin_B=torch.tensor([pair.margin for pair in examples]),
            center_coef=self.settings.center_coef,
        )
        return {
            "loss": float(loss),
            "accuracy": float(metrics["accuracy"]),
            "margin": float(metrics["margin"]),
            "ece": calibration_error(chosen_B - rejected_B),
        }

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """`heads.score`, distributed over the processes."""

        lengths = [len(row) for row in rows]

        def build(some: Sequence[int]) -> list[list[int]]:
            groups = heads.score_batches([lengths[index] for index in some], self.settings.micro_batch_tokens)
            return [[some[place] for place in group] for group in groups]

        def measure(indices: list[int]) -> list[tuple[int, float]]:
            values = heads.score_batch(self.model, [rows[index] for index in indices], pad_id=self._pad_id)
            return list(zip(indices, values, strict=True))

        batches = self.optimizer_step.process_group.batches(range(len(rows)), lengths, build)
        scores = dict(
            pair
            for part in self.optimizer_step.sharded.measure(batches, measure, self.optimizer_step.autocast())
            for pair in part
        )
        return [scores[index] for index in range(len(rows))]

    def _num_tokens(self, example: ScoredPair) -> int:
        return len(example.chosen_ids) + len(example.rejected_ids)

    def _length(self, example: ScoredPair) -> int:
        return max(len(example.chosen_ids), len(example.rejected_ids))

    def _build_batches(self, examples: Sequence[ScoredPair]) -> Sequence[_ScoredPairBatch]:
        groups = pair_micro_batches([self._length(pair) for pair in examples], self.settings.micro_batch_tokens)

        def made(number: int) -> _ScoredPairBatch:
            group, width = groups[number]
            some = [examples[index] for index in group]
            chosen, rejected = [pair.chosen_ids for pair in some], [pair.rejected_ids for pair in some]
            return _ScoredPairBatch(
                pad_rows(chosen, self._pad_id, width=width),
                pad_rows(rejected, self._pad_id, width=width),
                torch.tensor([len(row) for row in chosen]),
                torch.tensor([len(row) for row in rejected]),
                torch.tensor([pair.margin for pair in some]),
            )

        return LazyRows(len(groups), made)

    def _loss_fn(self, examples: Sequence[ScoredPair]) -> LossFn[_ScoredPairBatch]:
        return lambda batch: self._loss(batch, len(examples))

    def _loss(self, batch: _ScoredPairBatch, num_pairs: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        input_ids_BS = torch.cat([batch.chosen_ids_BS, batch.rejected_ids_BS]).to(self._device)
        lengths_B = torch.cat([batch.chosen_lengths_B, batch.rejected_lengths_B]).to(self._device)
        chosen_B, rejected_B = heads.sequence_scores(self.model, input_ids_BS, lengths_B).chunk(2)
        return bradley_terry_loss(
            chosen_B,
            rejected_B,
            num_pairs=num_pairs,
            margin_B=batch.margin_B.to(chosen_B),
            center_coef=self.settings.center_coef,
        )
