"""Bradley-Terry reward model on preference pairs, of which some may be ties.

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
from rl_core.losses.ties import tied_bradley_terry_loss
from rl_core.models import heads
from rl_core.settings import RewardModelSettings
from rl_core.trainers.sharded_scoring import sharded_scores
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
    tie: bool = False  # True = neither is to score higher


class _Counts(NamedTuple):
    """Denominators of a step or an evaluation, over all its micro-batches and processes."""

    pairs: int
    ordered: int  # that are no ties


def _counts(examples: Sequence[ScoredPair]) -> _Counts:
    return _Counts(len(examples), sum(not pair.tie for pair in examples))


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
    ties_B: torch.Tensor  # bool [B]


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
        Raises: DataError naming a pair with an empty sequence, or a margin that is negative or not finite; held-out
            pairs that are all ties.
        """
        examples = [_scored(pairs) for pairs in (pairs_train, pairs_heldout)]
        self._has_ties = False
        for name, part in zip(("pairs_train", "pairs_heldout"), examples, strict=True):
            num_ties = 0
            for place, pair in enumerate(part):
                num_ties += pair.tie
                if not (len(pair.chosen_ids) and len(pair.rejected_ids)):
                    raise DataError(f"{name}[{place}]: a sequence without tokens cannot be scored")
                if not 0 <= pair.margin < math.inf:
                    raise DataError(f"{name}[{place}]: margin {pair.margin} must be finite and at least 0")
            self._has_ties = self._has_ties or num_ties > 0
            if name == "pairs_heldout" and num_ties and num_ties == len(part):
                raise DataError(f"pairs_heldout: all {len(part)} are ties, so no order can be checked; hold out more")
        super().__init__(model, pad_id, examples[0], examples[1], settings, seed, process_group)

    def _evaluate(self, examples: Sequence[ScoredPair]) -> dict[str, float]:
        """Loss, accuracy and margin of the ordered pairs (equal scores count half), and their calibration error."""
        rows = LazyRows(2 * len(examples), lambda place: _side(examples[place // 2], place % 2))
        scores_B = torch.tensor(self._scores(rows))
        chosen_B, rejected_B = scores_B[0::2], scores_B[1::2]
        ties_B = torch.tensor([pair.tie for pair in examples])
        margin_B = torch.tensor([pair.margin for pair in examples])
        loss, metrics = self._ranking_loss(chosen_B, rejected_B, margin_B, ties_B, _counts(examples))
        shown = ("accuracy", "margin", "tie_gap")
        return {
            "loss": float(loss),
            **{name: float(metrics[name]) for name in shown if name in metrics},
            "ece": calibration_error((chosen_B - rejected_B)[~ties_B]),
        }

    def _ranking_loss(
        self,
        chosen_B: torch.Tensor,
        rejected_B: torch.Tensor,
        margin_B: torch.Tensor,
        ties_B: torch.Tensor,
        counts: _Counts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Bradley-Terry; with its model of ties where the data has some."""
        center_coef = self.settings.center_coef
        if not self._has_ties:
            return bradley_terry_loss(
                chosen_B, rejected_B, num_pairs=counts.pairs, margin_B=margin_B, center_coef=center_coef
            )
        return tied_bradley_terry_loss(
            chosen_B, rejected_B, ties_B, num_pairs=counts.pairs, num_ordered=counts.ordered, margin_B=margin_B,
            center_coef=center_coef, model=self.settings.ties, tie_probability=self.settings.tie_probability,
        )  # fmt: skip

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """`heads.score`, distributed over the processes."""
        return sharded_scores(
            self.optimizer_step, self.model, rows, max_tokens=self.settings.micro_batch_tokens, pad_id=self._pad_id
        )

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
                torch.tensor([pair.tie for pair in some]),
            )

        return LazyRows(len(groups), made)

    def _loss_fn(self, examples: Sequence[ScoredPair]) -> LossFn[_ScoredPairBatch]:
        counts = _counts(examples)
        return lambda batch: self._loss(batch, counts)

    def _loss(self, batch: _ScoredPairBatch, counts: _Counts) -> tuple[torch.Tensor, Mapping[str, Any]]:
        input_ids_BS = torch.cat([batch.chosen_ids_BS, batch.rejected_ids_BS]).to(self._device)
        lengths_B = torch.cat([batch.chosen_lengths_B, batch.rejected_lengths_B]).to(self._device)
        chosen_B, rejected_B = heads.sequence_scores(self.model, input_ids_BS, lengths_B).chunk(2)
        margin_B, ties_B = batch.margin_B.to(chosen_B), batch.ties_B.to(chosen_B.device)
        return self._ranking_loss(chosen_B, rejected_B, margin_B, ties_B, counts)
