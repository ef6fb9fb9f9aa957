"""Reward models: Bradley-Terry on preference pairs, some of them ties; regression on scores (1 to 5, thumbs); labels
of steps.

Suffixes: B pairs or rows, S whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rl_core.cpu.prefix_tree import encode_row
from rl_core.data.batches import pad_rows, plan_shared_batches
from rl_core.data.row_sequences import LazyRows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.preference import (
    bradley_terry_loss,
    calibration_error,
    pairwise_concordance,
    reward_regression_loss,
    tied_bradley_terry_loss,
)
from rl_core.losses.process_rewards import step_score_loss
from rl_core.models import heads
from rl_core.settings import RewardModelSettings, build_settings
from rl_core.trainers.supervised_trainer import SupervisedTrainer, build_pair_batches
from rl_core.training.optimizer_step import LossFn, OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_COMPARED_ROWS = 2000  # held-out rows of which all pairs are compared


def compute_sharded_scores(
    optimizer_step: OptimizerStep,
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    pad_id: int,
) -> list[float]:
    """Score rows with the reward model being trained; each process computes a share and gets all scores.

    Args:
        max_tokens: limit of padded tokens per pass (a longer row gets its own).
    """
    lengths = [len(row) for row in rows]

    def build_batches(indices: Sequence[int]) -> list[list[int]]:
        groups = heads.build_score_batches([lengths[index] for index in indices], max_tokens)
        return [[indices[position] for position in group] for group in groups]

    def score_batch(indices: list[int]) -> list[tuple[int, float]]:
        values = heads.score_batch(model, [rows[index] for index in indices], pad_id=pad_id)
        return list(zip(indices, values, strict=True))

    batches = optimizer_step.process_group.build_local_batches(
        range(len(rows)), lengths, build_batches
    )
    scored_batches = optimizer_step.sharded.measure_batches(
        batches, score_batch, optimizer_step.enable_autocast()
    )
    scores = dict(scored_row for batch in scored_batches for scored_row in batch)
    return [scores[index] for index in range(len(rows))]


class ScoredPair(NamedTuple):
    """Token ids of the whole chosen and rejected sequences, and the margin by which the first should score higher."""

    chosen_ids: Sequence[int]
    rejected_ids: Sequence[int]
    margin: float = 0.0
    tie: bool = False  # True = neither should score higher


class _PairCounts(NamedTuple):
    """Denominators of a step or an evaluation, over all its micro-batches and processes."""

    pairs: int
    ordered: int  # pairs that are not ties


def _count_pairs(examples: Sequence[ScoredPair]) -> _PairCounts:
    return _PairCounts(len(examples), sum(not pair.tie for pair in examples))


def _wrap_scored_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]] | ScoredPair],
) -> LazyRows[ScoredPair]:
    return LazyRows(len(pairs), lambda index: ScoredPair(*pairs[index]))


def compute_longer_answer_baseline(lengths: Sequence[tuple[int, int]]) -> float:
    """Compute the accuracy of "the longer one is chosen" on lengths (chosen, rejected); equal lengths count half.

    Raises: DataError for no pair.
    """
    if not lengths:
        raise DataError("longer_answer_baseline: there is no pair")
    correct = sum((chosen > rejected) + 0.5 * (chosen == rejected) for chosen, rejected in lengths)
    return correct / len(lengths)


@dataclass
class _ScoredPairBatch:
    """Micro-batch with one row per pair in every tensor; the optimizer step halves one that does not fit in memory."""

    chosen_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    rejected_ids_BS: torch.Tensor  # int64 [B, S], padded to the same S
    chosen_lengths_B: torch.Tensor  # int64 [B], real tokens
    rejected_lengths_B: torch.Tensor
    margin_B: torch.Tensor  # float32 [B]
    ties_B: torch.Tensor  # bool [B]


class RewardModelTrainer(SupervisedTrainer[ScoredPair, _ScoredPairBatch]):
    """Trainer on the Bradley-Terry loss; one iteration is one optimizer step."""

    noun: ClassVar[str] = "pair"
    selection_metric: ClassVar[str] = "eval/accuracy"
    settings: RewardModelSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        pairs_train: Sequence[tuple[Sequence[int], Sequence[int]] | ScoredPair],
        pairs_heldout: Sequence[tuple[Sequence[int], Sequence[int]] | ScoredPair],
        settings: RewardModelSettings | Mapping[str, Any],
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
        settings = build_settings(settings, RewardModelSettings)
        examples = _wrap_scored_pairs(pairs_train), _wrap_scored_pairs(pairs_heldout)
        self._has_ties = False
        for name, pairs in zip(("pairs_train", "pairs_heldout"), examples, strict=True):
            num_ties = 0
            for index, pair in enumerate(pairs):
                num_ties += pair.tie
                if not (len(pair.chosen_ids) and len(pair.rejected_ids)):
                    raise DataError(f"{name}[{index}]: a sequence without tokens cannot be scored")
                if not 0 <= pair.margin < math.inf:
                    raise DataError(
                        f"{name}[{index}]: margin {pair.margin} must be finite and at least 0"
                    )
            self._has_ties = self._has_ties or num_ties > 0
            if name == "pairs_heldout" and num_ties and num_ties == len(pairs):
                raise DataError(
                    f"pairs_heldout: all {num_ties} are ties, so no order can be checked; hold out more"
                )
        super().__init__(model, pad_id, examples[0], examples[1], settings, seed, process_group)

    def _evaluate_examples(self, examples: Sequence[ScoredPair]) -> dict[str, float]:
        """Return loss, accuracy and margin of the ordered pairs (equal scores count half), and calibration error."""

        def select_side(index: int) -> Sequence[int]:
            pair = examples[index // 2]
            return pair.rejected_ids if index % 2 else pair.chosen_ids

        rows = LazyRows(2 * len(examples), select_side)
        scores_B = torch.tensor(self._score_rows(rows))
        chosen_B, rejected_B = scores_B[0::2], scores_B[1::2]
        ties_B = torch.tensor([pair.tie for pair in examples])
        margin_B = torch.tensor([pair.margin for pair in examples])
        loss, metrics = self._compute_ranking_loss(
            chosen_B, rejected_B, margin_B, ties_B, _count_pairs(examples)
        )
        names = ("accuracy", "margin", "tie_gap")
        return {
            "loss": float(loss),
            **{name: float(metrics[name]) for name in names if name in metrics},
            "ece": calibration_error((chosen_B - rejected_B)[~ties_B]),
        }

    def _compute_ranking_loss(
        self,
        chosen_B: torch.Tensor,
        rejected_B: torch.Tensor,
        margin_B: torch.Tensor,
        ties_B: torch.Tensor,
        counts: _PairCounts,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the Bradley-Terry loss, with its model of ties if the data has some."""
        center_coef = self.settings.center_coef
        if not self._has_ties:
            return bradley_terry_loss(
                chosen_B,
                rejected_B,
                num_pairs=counts.pairs,
                margin_B=margin_B,
                center_coef=center_coef,
            )
        return tied_bradley_terry_loss(
            chosen_B,
            rejected_B,
            ties_B,
            num_pairs=counts.pairs,
            num_ordered=counts.ordered,
            margin_B=margin_B,
            center_coef=center_coef,
            model=self.settings.ties,
            tie_probability=self.settings.tie_probability,
        )

    def _score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Score rows, distributed over the processes."""
        return compute_sharded_scores(
            self.optimizer_step,
            self.model,
            rows,
            max_tokens=self.settings.micro_batch_tokens,
            pad_id=self._pad_id,
        )

    def _count_tokens(self, example: ScoredPair) -> int:
        return len(example.chosen_ids) + len(example.rejected_ids)

    def _count_longest_row(self, example: ScoredPair) -> int:
        return max(len(example.chosen_ids), len(example.rejected_ids))

    def _build_batches(self, examples: Sequence[ScoredPair]) -> Sequence[_ScoredPairBatch]:
        groups = build_pair_batches(
            LazyRows(
                len(examples),
                lambda index: (examples[index].chosen_ids, examples[index].rejected_ids),
            ),
            self.settings.micro_batch_tokens,
            shares_prefixes=self.optimizer_step.can_share_prefixes(self.model),
        )

        def build_batch(number: int) -> _ScoredPairBatch:
            indices, width = groups[number]
            pairs = [examples[index] for index in indices]
            chosen = [pair.chosen_ids for pair in pairs]
            rejected = [pair.rejected_ids for pair in pairs]
            return _ScoredPairBatch(
                pad_rows(chosen, self._pad_id, width=width),
                pad_rows(rejected, self._pad_id, width=width),
                torch.tensor([len(row) for row in chosen]),
                torch.tensor([len(row) for row in rejected]),
                torch.tensor([pair.margin for pair in pairs]),
                torch.tensor([pair.tie for pair in pairs]),
            )

        return LazyRows(len(groups), build_batch)

    def _build_loss_fn(self, examples: Sequence[ScoredPair]) -> LossFn[_ScoredPairBatch]:
        counts = _count_pairs(examples)
        return lambda batch: self._compute_loss(batch, counts)

    def _compute_loss(
        self, batch: _ScoredPairBatch, counts: _PairCounts
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        input_ids_BS = self._upload(torch.cat([batch.chosen_ids_BS, batch.rejected_ids_BS]))
        lengths_B = torch.cat([batch.chosen_lengths_B, batch.rejected_lengths_B])
        scores_B = heads.compute_sequence_scores(self.model, input_ids_BS, lengths_B)
        chosen_B, rejected_B = scores_B.chunk(2)
        margin_B = self._upload(batch.margin_B).to(chosen_B.dtype)
        ties_B = self._upload(batch.ties_B)
        return self._compute_ranking_loss(chosen_B, rejected_B, margin_B, ties_B, counts)


class ScoredRow(NamedTuple):
    """Token ids of prompt and completion, and their score."""

    ids: Sequence[int]
    score: float


@dataclass
class _ScoredRowBatch:
    """Micro-batch of rows; the optimizer step halves one that does not fit in memory."""

    ids_BS: torch.Tensor  # int64 [B, S], right-padded
    lengths_B: torch.Tensor  # int64 [B], real tokens
    targets_B: torch.Tensor  # float32 [B], standardised


class RewardRegressionTrainer(SupervisedTrainer[ScoredRow, _ScoredRowBatch]):
    """Trainer on the squared error; one iteration is one optimizer step.

    Scores are standardised by mean and standard deviation of the training rows: the head has no offset, and a policy's
    reward should not depend on the rating scale.
    """

    noun: ClassVar[str] = "row"
    selection_metric: ClassVar[str] = "eval/accuracy"
    settings: RewardModelSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        rows_train: Sequence[ScoredRow],
        rows_heldout: Sequence[ScoredRow],
        settings: RewardModelSettings | Mapping[str, Any],
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Check the rows; see `SupervisedTrainer`.

        Args:
            model: a sequence classifier with one label (`rl_core.models.heads`), on its device.
        Raises: DataError naming a row without tokens or with a score that is not finite; training or held-out rows
            that all have one score.
        """
        settings = build_settings(settings, RewardModelSettings)
        for name, rows in (("rows_train", rows_train), ("rows_heldout", rows_heldout)):
            scores = set()
            for index, row in enumerate(rows):
                if not len(row.ids):
                    raise DataError(f"{name}[{index}]: a sequence without tokens cannot be scored")
                if not math.isfinite(row.score):
                    raise DataError(f"{name}[{index}]: score {row.score} must be finite")
                scores.add(row.score)
            if len(scores) == 1:
                raise DataError(
                    f"{name}: all {len(rows)} scores are {scores.pop():g}, so there is nothing to learn"
                )
        scores_B = torch.tensor([row.score for row in rows_train], dtype=torch.float64)
        self.mean = float(scores_B.mean()) if len(scores_B) else 0.0
        self.std = float(scores_B.std(correction=0)) if len(scores_B) else 1.0
        super().__init__(model, pad_id, rows_train, rows_heldout, settings, seed, process_group)

    def _evaluate_examples(self, examples: Sequence[ScoredRow]) -> dict[str, float]:
        """Return loss and absolute error (standardised), explained variance, and share of correctly ordered pairs."""
        scores = compute_sharded_scores(
            self.optimizer_step,
            self.model,
            LazyRows(len(examples), lambda index: examples[index].ids),
            max_tokens=self.settings.micro_batch_tokens,
            pad_id=self._pad_id,
        )
        scores_B = torch.tensor(scores)
        targets_B = torch.tensor([self._standardise_score(row.score) for row in examples])
        loss, metrics = reward_regression_loss(scores_B, targets_B, num_rows=len(examples))
        return {
            "loss": float(loss),
            "absolute_error": float(metrics["absolute_error"]),
            "explained_variance": 1 - float((scores_B - targets_B).var() / targets_B.var()),
            "accuracy": pairwise_concordance(
                scores_B[:MAX_COMPARED_ROWS], targets_B[:MAX_COMPARED_ROWS]
            ),
        }

    def _standardise_score(self, score: float) -> float:
        return (score - self.mean) / self.std

    def _count_tokens(self, example: ScoredRow) -> int:
        return len(example.ids)

    def _count_longest_row(self, example: ScoredRow) -> int:
        return len(example.ids)

    def _build_batches(self, examples: Sequence[ScoredRow]) -> Sequence[_ScoredRowBatch]:
        lengths = [len(row.ids) for row in examples]
        encoded_rows = None
        if self.optimizer_step.can_share_prefixes(self.model):
            encoded_rows = ([encode_row(row.ids)] for row in examples)
        groups = plan_shared_batches(lengths, self.settings.micro_batch_tokens, encoded_rows)

        def build_batch(number: int) -> _ScoredRowBatch:
            rows = [examples[index] for index in groups[number]]
            return _ScoredRowBatch(
                pad_rows([row.ids for row in rows], self._pad_id),
                torch.tensor([len(row.ids) for row in rows]),
                torch.tensor([self._standardise_score(row.score) for row in rows]),
            )

        return LazyRows(len(groups), build_batch)

    def _build_loss_fn(self, examples: Sequence[ScoredRow]) -> LossFn[_ScoredRowBatch]:
        def compute_loss(batch: _ScoredRowBatch) -> tuple[torch.Tensor, Mapping[str, Any]]:
            scores_B = heads.compute_sequence_scores(
                self.model, self._upload(batch.ids_BS), batch.lengths_B
            )
            targets_B = self._upload(batch.targets_B).to(scores_B.dtype)
            return reward_regression_loss(scores_B, targets_B, num_rows=len(examples))

        return compute_loss


class SteppedRow(NamedTuple):
    """Token ids of prompt and completion, and (index of its last token, label from 0 to 1) of each step."""

    ids: Sequence[int]
    steps: Sequence[tuple[int, float]]


@dataclass
class _SteppedRowBatch:
    """Micro-batch of rows; the optimizer step halves one that does not fit in memory."""

    ids_BS: torch.Tensor  # int64 [B, S], right-padded
    lengths_B: torch.Tensor  # int64 [B], real tokens
    labels_BS: torch.Tensor  # float32 [B, S], label at the last token of each step, NaN elsewhere


class StepRewardTrainer(SupervisedTrainer[SteppedRow, _SteppedRowBatch]):
    """Trainer of a reward model of steps, on the cross-entropy of labels at their last tokens.

    One iteration is one optimizer step; each step of a completion counts the same.
    """

    noun: ClassVar[str] = "row"
    selection_metric: ClassVar[str] = "eval/loss"
    settings: RewardModelSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        rows_train: Sequence[SteppedRow],
        rows_heldout: Sequence[SteppedRow],
        settings: RewardModelSettings | Mapping[str, Any],
        seed: int,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Check the rows, and mark the model as one of steps; see `SupervisedTrainer`.

        Args:
            model: a sequence classifier with one label (`rl_core.models.heads`), on its device.
        Raises: DataError naming a row without a step, or a step outside its tokens; training rows with one label.
        """
        settings = build_settings(settings, RewardModelSettings)
        for name, rows in (("rows_train", rows_train), ("rows_heldout", rows_heldout)):
            labels = set()
            for index, row in enumerate(rows):
                ends = [end for end, _ in row.steps]
                if (
                    not ends
                    or ends != sorted(set(ends))
                    or not 0 <= ends[0] <= ends[-1] < len(row.ids)
                ):
                    raise DataError(
                        f"{name}[{index}]: steps end at {ends}; each needs a token of its own among {len(row.ids)}"
                    )
                labels |= {label for _, label in row.steps}
            if name == "rows_train" and len(labels) == 1:
                raise DataError(
                    f"{name}: all steps have the label {labels.pop():g}, so there is nothing to learn"
                )
        heads.mark_step_model(model)
        super().__init__(model, pad_id, rows_train, rows_heldout, settings, seed, process_group)

    def _evaluate_examples(self, examples: Sequence[SteppedRow]) -> dict[str, float]:
        """Return loss, accuracy, and accuracy on right and on wrong steps, whose shares differ, and their mean."""
        optimizer_step = self.optimizer_step
        lengths = [len(row.ids) for row in examples]

        def score_batch(batch: _SteppedRowBatch) -> tuple[list[float], list[float]]:
            scores_N, labels_N = self._score_batch(batch)
            return scores_N.tolist(), labels_N.tolist()

        def build_batches(indices: Sequence[int]) -> list[_SteppedRowBatch]:
            groups = heads.build_score_batches(
                [lengths[index] for index in indices], self.settings.micro_batch_tokens
            )
            return [
                self._pad_steps([examples[indices[position]] for position in group])
                for group in groups
            ]

        batches = optimizer_step.process_group.build_local_batches(
            range(len(examples)), lengths, build_batches
        )
        scored = optimizer_step.sharded.measure_batches(
            batches, score_batch, optimizer_step.enable_autocast()
        )
        scores_N = torch.tensor([value for scores, _ in scored for value in scores])
        labels_N = torch.tensor([value for _, labels in scored for value in labels])
        loss, metrics = step_score_loss(scores_N, labels_N, num_steps=len(labels_N))
        is_right_N = labels_N >= 0.5
        correct_N = ((scores_N > 0) == is_right_N).float()
        parts = {"accuracy_right": correct_N[is_right_N], "accuracy_wrong": correct_N[~is_right_N]}
        by_label = {name: float(part.mean()) for name, part in parts.items() if len(part)}
        return {"loss": float(loss), "accuracy": float(metrics["accuracy"]), **by_label}

    def _count_tokens(self, example: SteppedRow) -> int:
        return len(example.ids)

    def _count_longest_row(self, example: SteppedRow) -> int:
        return len(example.ids)

    def _build_batches(self, examples: Sequence[SteppedRow]) -> Sequence[_SteppedRowBatch]:
        lengths = [len(row.ids) for row in examples]
        encoded_rows = None
        if self.optimizer_step.can_share_prefixes(self.model):
            encoded_rows = ([encode_row(row.ids)] for row in examples)
        groups = plan_shared_batches(lengths, self.settings.micro_batch_tokens, encoded_rows)
        return LazyRows(
            len(groups),
            lambda number: self._pad_steps([examples[index] for index in groups[number]]),
        )

    def _pad_steps(self, rows: Sequence[SteppedRow]) -> _SteppedRowBatch:
        ids_BS = pad_rows([row.ids for row in rows], self._pad_id)
        labels_BS = torch.full(ids_BS.shape, math.nan)
        for index, row in enumerate(rows):
            for end, label in row.steps:
                labels_BS[index, end] = label
        return _SteppedRowBatch(ids_BS, torch.tensor([len(row.ids) for row in rows]), labels_BS)

    def _build_loss_fn(self, examples: Sequence[SteppedRow]) -> LossFn[_SteppedRowBatch]:
        count = sum(len(row.steps) for row in examples)

        def compute_loss(
            batch: _SteppedRowBatch,
        ) -> tuple[torch.Tensor, Mapping[str, Any]]:
            scores_N, labels_N = self._score_batch(batch)
            return step_score_loss(scores_N, labels_N, num_steps=count)

        return compute_loss

    def _score_batch(self, batch: _SteppedRowBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and labels [N] of the steps of a micro-batch, row after row."""
        labels_BS = batch.labels_BS.cpu()
        positions = [
            row_S.isnan().logical_not().nonzero().flatten().tolist() for row_S in labels_BS
        ]
        scores_N = heads.compute_step_scores(
            self.model, self._upload(batch.ids_BS), batch.lengths_B.cpu(), positions
        )
        return scores_N, self._upload(labels_BS[~labels_BS.isnan()])
