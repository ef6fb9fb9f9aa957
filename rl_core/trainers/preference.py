"""Preference optimisation: DPO, conservative DPO, IPO, SimPO, ORPO; KTO on labelled completions.

The reference is the model that training starts from; SimPO and ORPO have none.

Suffixes: B pairs, S whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rl_core.capabilities import check_prefix_sharing
from rl_core.data.batches import attention_mask, pad_rows
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.data.row_sequences import LazyRows
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import DataError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.losses.host_reads import read_nested_scalars
from rl_core.losses.labelled import kto_loss, kto_reference_point
from rl_core.losses.preference import chosen_nll, dpo_loss, ipo_loss, tied_dpo_loss, tied_ipo_loss
from rl_core.losses.reference_free import orpo_loss, simpo_loss
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.forward_modes import (
    AutocastPrecision,
    enable_autocast,
    has_dropout,
    seed_dropout_masks,
    use_training_mode,
)
from rl_core.models.logprobs import completion_logprobs
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import TrainRow, build_lazy_batches
from rl_core.settings import PreferenceSettings, build_settings
from rl_core.trainers.supervised_trainer import SupervisedTrainer, build_pair_batches
from rl_core.training.optimizer_step import LossFn
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PairTensors = tuple[torch.Tensor, ...]  # (chosen, rejected), each [B]
# Log-probs of (chosen, rejected) under the reference, in nats, summed over loss tokens.
PairReference = tuple[float, float]
NO_REFERENCE = (0.0, 0.0)


def compute_pair_loss(
    settings: PreferenceSettings,
    logprobs: PairTensors,
    references: PairTensors,
    tokens: PairTensors,
    num_pairs: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss that the settings name: dpo from sums over the tokens, the others from means."""
    if settings.loss == "dpo":
        return dpo_loss(
            *logprobs,
            *references,
            num_pairs=num_pairs,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
        )
    means = logprobs[0] / tokens[0], logprobs[1] / tokens[1]
    if settings.loss == "simpo":
        return simpo_loss(
            *means, num_pairs=num_pairs, beta=settings.beta, gamma=settings.simpo_gamma
        )
    if settings.loss == "orpo":
        return orpo_loss(*means, num_pairs=num_pairs, beta=settings.beta)
    ref_means = references[0] / tokens[0], references[1] / tokens[1]
    return ipo_loss(*means, *ref_means, num_pairs=num_pairs, beta=settings.beta)


def compute_tied_pair_loss(
    settings: PreferenceSettings,
    logprobs: PairTensors,
    references: PairTensors,
    tokens: PairTensors,
    ties_B: torch.Tensor,
    num_pairs: int,
    num_ordered: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss on pairs of which some are ties: dpo from sums over the tokens, ipo from means."""
    divisors = (
        [torch.ones_like(count_B) for count_B in tokens] if settings.loss == "dpo" else tokens
    )
    chosen_B, rejected_B = (
        settings.beta * (policy_B - ref_B) / divisor_B
        for policy_B, ref_B, divisor_B in zip(logprobs, references, divisors, strict=True)
    )
    if settings.loss == "dpo":
        return tied_dpo_loss(
            chosen_B,
            rejected_B,
            ties_B,
            num_pairs=num_pairs,
            num_ordered=num_ordered,
            model=settings.ties,
            tie_probability=settings.tie_probability,
        )
    return tied_ipo_loss(
        chosen_B,
        rejected_B,
        ties_B,
        num_pairs=num_pairs,
        num_ordered=num_ordered,
        beta=settings.beta,
    )


def compute_reference_logprobs(
    model: PreTrainedModel,
    pairs: Sequence[PreferencePair],
    *,
    pad_id: int,
    max_tokens: int,
    precision: AutocastPrecision = "none",
) -> list[PairReference]:
    """Compute log-probabilities of both sides of every pair under the current `model`, without dropout or gradient.

    Uses micro-batches of at most `max_tokens` tokens (`build_batches`). Draws no random number.
    Returns: (chosen, rejected) of each pair, in nats, summed over the tokens that carry loss.
    """

    def build_row(index: int) -> TrainRow:
        pair = pairs[index // 2]
        side = pair.rejected if index % 2 else pair.chosen
        return TrainRow(side.prompt_ids, side.completion_ids, side.loss_mask)

    rows = LazyRows(2 * len(pairs), build_row)
    sums = [0.0] * len(rows)
    device = next(model.parameters()).device

    def compute_sums(batch: TrainBatch) -> tuple[list[int], torch.Tensor]:
        return batch.rows, completion_logprobs(model, batch.to(device))[0].sum(1)

    with use_eval_mode(model), torch.no_grad(), enable_autocast(precision, device):
        shares_prefixes = check_prefix_sharing(model).allowed
        batches = build_lazy_batches(rows, max_tokens, pad_id, shares_prefixes=shares_prefixes)
        results = MemoryFit("reference log-probabilities").compute_batches(batches, compute_sums)
    indices = [index for batch_rows, _ in results for index in batch_rows]
    values = torch.cat([logprobs_B for _, logprobs_B in results]).tolist() if results else []
    for index, value in zip(indices, values, strict=True):
        sums[index] = value
    return list(zip(sums[0::2], sums[1::2], strict=True))


def check_references(
    pairs: Sequence[PreferencePair], rows: Sequence[PairReference], name: str
) -> list[PairReference]:
    """Return the references as a list. Raises: DataError unless there is a finite one for every pair."""
    if len(rows) != len(pairs):
        raise DataError(f"references of {name}: {len(rows)} rows for {len(pairs)} pairs")
    for index, row in enumerate(rows):
        if not all(map(math.isfinite, row)):
            raise DataError(
                f"references of {name}: row {index} is {row}; the starting model gives no finite number"
            )
    return list(rows)


class _ReferencedPair(NamedTuple):
    """A pair and its log-probabilities under the reference."""

    pair: PreferencePair
    reference: PairReference
    pair_index: int  # among the pairs of its set


@dataclass
class _ComparedPairBatch:
    """Micro-batch with one row per pair in every tensor; the optimizer step halves one that does not fit in memory."""

    chosen_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    rejected_ids_BS: torch.Tensor  # int64 [B, S], padded to the same S
    chosen_mask_BS: torch.Tensor  # bool [B, S], True = token carries loss
    rejected_mask_BS: torch.Tensor
    chosen_lengths_B: torch.Tensor  # int64 [B], real tokens
    rejected_lengths_B: torch.Tensor
    ref_chosen_B: torch.Tensor  # float32 [B], nats, summed over loss tokens
    ref_rejected_B: torch.Tensor
    pair_indices_B: torch.Tensor  # int64 [B], `_ReferencedPair.pair_index`
    desirable_B: torch.Tensor  # bool [B], labels of KTO; False for pairs
    ties_B: torch.Tensor  # bool [B], True = neither side is better


class _Denominators(NamedTuple):
    """Denominators of a step, over all its micro-batches and processes."""

    pairs: int
    loss_tokens: int
    desirable: int
    reference_point: float  # of KTO
    ordered: int  # pairs that are not ties


class PreferenceTrainer(SupervisedTrainer[_ReferencedPair, _ComparedPairBatch]):
    """Trainer on a preference loss; one iteration is one optimizer step.

    The reference log-probabilities are computed in the constructor from `model` as passed, before a resume loads
    trained weights into it. They are also stored in the checkpoint. Losses without a reference neither compute nor
    store any.

    With dropout, each training pair has its own masks, the same at every visit, and the reference uses the same ones,
    as it is the same network: the noise cancels, so the loss starts at ln 2 (IPO: at 1 / (4 beta^2)) and changes only
    with the weights. Each pair is then its own micro-batch, as masks depend on the shape. Held-out pairs are measured
    without dropout on either side.
    """

    noun: ClassVar[str] = "pair"
    settings: PreferenceSettings

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        pairs_train: Sequence[PreferencePair],
        pairs_heldout: Sequence[PreferencePair],
        settings: PreferenceSettings | Mapping[str, Any],
        seed: int,
        references: tuple[Sequence[PairReference], Sequence[PairReference]] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Check the pairs and compute their reference log-probabilities; see `SupervisedTrainer`.

        Args:
            model: a causal LM with the weights that training starts from, on its device. New adapters change nothing
                yet, so under LoRA it serves as the reference as well.
            references: (of the training pairs, of the held-out ones) from an earlier run with the same weights and
                without dropout; those of the training pairs are ignored if training uses dropout.
        Raises: DataError naming a pair that cannot be trained on, or references that do not fit the pairs.
        """
        settings = build_settings(settings, PreferenceSettings)
        uses_masks = settings.needs_reference and settings.dropout and has_dropout(model)
        self._mask_seed = compute_sequence_seed(seed, "masks") if uses_masks else None
        self.settings = settings
        self._pad_id = pad_id
        self._device = next(model.parameters()).device
        self._has_ties = False
        self._pairs = (pairs_train, pairs_heldout)
        self._references: list[list[PairReference]] = []
        for index, (name, pairs) in enumerate(zip(("train", "heldout"), self._pairs, strict=True)):
            num_ties = 0
            for pair_index, pair in enumerate(pairs):
                _check_pair(pair, f"pairs_{name}[{pair_index}]", settings)
                num_ties += pair.tie
            self._has_ties = self._has_ties or num_ties > 0
            if name == "heldout" and num_ties and num_ties == len(pairs):
                raise DataError(
                    f"pairs_heldout: all {num_ties} are ties, so no order can be checked; hold out more"
                )
            rows: Sequence[PairReference] = [NO_REFERENCE] * len(pairs)
            if not settings.needs_reference:
                pass
            elif name == "train" and self._mask_seed is not None:
                rows = self._compute_references_with_dropout(model, pairs, settings.autocast)
            elif references is not None:
                rows = references[index]
            else:
                rows = compute_reference_logprobs(
                    model,
                    pairs,
                    pad_id=pad_id,
                    max_tokens=settings.micro_batch_tokens,
                    precision=settings.autocast,
                )
            self._references.append(check_references(pairs, rows, name))
        train = _attach_references(pairs_train, self._references[0])
        heldout = _attach_references(pairs_heldout, self._references[1])
        super().__init__(model, pad_id, train, heldout, settings, seed, process_group)

    @property
    def references(self) -> dict[str, list[PairReference]]:
        """Reference log-probabilities of the pairs: train, heldout; {} for a loss without reference."""
        if not self.settings.needs_reference:
            return {}
        return dict(zip(("train", "heldout"), self._references, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order of pairs, and the reference log-probabilities [pairs, 2]."""
        references = {
            name: torch.tensor(rows, dtype=torch.float64) for name, rows in self.references.items()
        }
        return {**super().state_dict(), "references": references}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        super().load_state_dict(state)
        if not self.settings.needs_reference:
            return
        for index, name in enumerate(("train", "heldout")):
            rows = [(float(row[0]), float(row[1])) for row in state["references"][name].tolist()]
            self._references[index] = check_references(self._pairs[index], rows, name)
        self._train = _attach_references(self._pairs[0], self._references[0])
        self._heldout = _attach_references(self._pairs[1], self._references[1])

    def _compute_references_with_dropout(
        self, model: PreTrainedModel, pairs: Sequence[PreferencePair], precision: AutocastPrecision
    ) -> list[PairReference]:
        """Compute reference log-probabilities with the dropout masks that each pair is trained with."""
        references = [NO_REFERENCE] * len(pairs)
        batches = self._build_batches(_attach_references(pairs, references.copy()))

        def compute_references(batch: _ComparedPairBatch) -> tuple[int, torch.Tensor, torch.Tensor]:
            chosen_B, rejected_B, _ = self._compute_pair_logprobs(model, batch)
            return int(batch.pair_indices_B), chosen_B, rejected_B

        with (
            use_training_mode(model, dropout=True),
            torch.no_grad(),
            enable_autocast(precision, self._device),
        ):
            results = MemoryFit("reference log-probabilities").compute_batches(
                batches, compute_references
            )
        for index, chosen, rejected in read_nested_scalars(results):
            references[index] = (chosen, rejected)
        return references

    def _compute_pair_logprobs(
        self, model: PreTrainedModel, batch: _ComparedPairBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probs [B] of the chosen and of the rejected sides, and their loss mask [2 B, S]."""
        both = self._build_train_batch(
            torch.cat([batch.chosen_ids_BS, batch.rejected_ids_BS]),
            torch.cat([batch.chosen_mask_BS, batch.rejected_mask_BS]),
            torch.cat([batch.chosen_lengths_B, batch.rejected_lengths_B]),
        )
        masks: AbstractContextManager[None] = nullcontext()
        if self._mask_seed is not None:
            seed = compute_sequence_seed(self._mask_seed, *batch.pair_indices_B.tolist())
            masks = seed_dropout_masks(self._device, seed)
        with masks:
            chosen_B, rejected_B = completion_logprobs(model, both)[0].sum(1).chunk(2)
        return chosen_B, rejected_B, both.loss_mask_BS

    def _count_tokens(self, example: _ReferencedPair) -> int:
        return len(example.pair.chosen_ids) + len(example.pair.rejected_ids)

    def _count_longest_row(self, example: _ReferencedPair) -> int:
        return max(len(example.pair.chosen_ids), len(example.pair.rejected_ids))

    def _build_batches(self, examples: Sequence[_ReferencedPair]) -> Sequence[_ComparedPairBatch]:
        # With dropout masks each pair is its own micro-batch: no second one fits into one token.
        max_tokens = self.settings.micro_batch_tokens if self._mask_seed is None else 1

        def read_pair(index: int) -> tuple[Sequence[int], Sequence[int]]:
            pair = examples[index].pair
            return pair.chosen_ids, pair.rejected_ids

        groups = build_pair_batches(
            LazyRows(len(examples), read_pair),
            max_tokens,
            shares_prefixes=self._mask_seed is None
            and self.optimizer_step.can_share_prefixes(self.model),
        )

        def build_batch(number: int) -> _ComparedPairBatch:
            indices, width = groups[number]
            batch = [examples[index] for index in indices]
            chosen = [example.pair.chosen for example in batch]
            rejected = [example.pair.rejected for example in batch]
            return _ComparedPairBatch(
                pad_rows([side.ids for side in chosen], self._pad_id, width=width),
                pad_rows([side.ids for side in rejected], self._pad_id, width=width),
                _build_loss_mask(chosen, width),
                _build_loss_mask(rejected, width),
                torch.tensor([len(side.ids) for side in chosen]),
                torch.tensor([len(side.ids) for side in rejected]),
                torch.tensor([example.reference[0] for example in batch], dtype=torch.float32),
                torch.tensor([example.reference[1] for example in batch], dtype=torch.float32),
                torch.tensor([example.pair_index for example in batch]),
                torch.tensor([bool(example.pair.desirable) for example in batch]),
                torch.tensor([example.pair.tie for example in batch]),
            )

        return LazyRows(len(groups), build_batch)

    def _build_loss_fn(self, examples: Sequence[_ReferencedPair]) -> LossFn[_ComparedPairBatch]:
        """Return the loss function; for KTO after a pass over all examples, for the reference point."""
        pairs = [example.pair for example in examples]
        if self.settings.loss == "kto":
            denominators = _Denominators(
                len(pairs),
                sum(sum(pair.chosen.loss_mask) for pair in pairs),
                sum(bool(pair.desirable) for pair in pairs),
                self._estimate_reference_point(examples),
                0,
            )
            return lambda batch: self._compute_labelled_loss(batch, denominators)
        num_tokens = sum(
            sum(pair.chosen.loss_mask) + sum(pair.rejected.loss_mask) for pair in pairs
        )
        num_ordered = sum(not pair.tie for pair in pairs)
        denominators = _Denominators(len(pairs), num_tokens, 0, 0.0, num_ordered)
        return lambda batch: self._compute_loss(batch, denominators)

    def _estimate_reference_point(self, examples: Sequence[_ReferencedPair]) -> float:
        """Estimate KTO's z from the mismatched completions of these examples, without gradient or dropout."""

        def measure(batch: _ComparedPairBatch) -> torch.Tensor:
            rows = self._build_train_batch(
                batch.rejected_ids_BS, batch.rejected_mask_BS, batch.rejected_lengths_B
            )
            logprobs_B = completion_logprobs(self.model, rows)[0].sum(1)
            return (logprobs_B - self._upload(batch.ref_rejected_B)).double().sum()

        sums: Any = self.optimizer_step.sharded.measure_batches(
            self._build_local_batches(examples), measure, self.optimizer_step.enable_autocast()
        )
        return kto_reference_point(math.fsum(sums), num_rows=len(examples))

    def _build_train_batch(
        self, ids_BS: torch.Tensor, mask_BS: torch.Tensor, lengths_B: torch.Tensor
    ) -> TrainBatch:
        return TrainBatch(
            input_ids_BS=ids_BS,
            attention_mask_BS=attention_mask(lengths_B.tolist(), ids_BS.shape[1]),
            loss_mask_BS=mask_BS,
        ).to(self._device)

    def _compute_labelled_loss(
        self, batch: _ComparedPairBatch, denominators: _Denominators
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute KTO on the rows of a micro-batch; their mismatched completions only serve the reference point."""
        settings = self.settings
        rows = self._build_train_batch(
            batch.chosen_ids_BS, batch.chosen_mask_BS, batch.chosen_lengths_B
        )
        logprobs_B = completion_logprobs(self.model, rows)[0].sum(1)
        ref_B, desirable_B = self._upload(batch.ref_chosen_B), self._upload(batch.desirable_B)
        num_undesirable = denominators.pairs - denominators.desirable
        loss, metrics = kto_loss(
            logprobs_B,
            ref_B,
            desirable_B,
            reference_point=denominators.reference_point,
            num_desirable=denominators.desirable,
            num_undesirable=num_undesirable,
            beta=settings.beta,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
        )
        with torch.no_grad():
            logprobs_B = logprobs_B.detach()
            chosen_sum = (logprobs_B * desirable_B).sum()
            rejected_sum = (logprobs_B * ~desirable_B).sum()
            metrics |= {
                "chosen_logprob": chosen_sum / max(denominators.desirable, 1),
                "rejected_logprob": rejected_sum / max(num_undesirable, 1),
                "reference_kl": (ref_B - logprobs_B).sum() / denominators.loss_tokens,
            }
        return loss, metrics

    def _compute_loss(
        self, batch: _ComparedPairBatch, denominators: _Denominators
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute loss and metrics of some pairs, divided by the pairs (or loss tokens) of the whole step."""
        settings, num_pairs = self.settings, denominators.pairs
        chosen_B, rejected_B, loss_mask_BS = self._compute_pair_logprobs(self.model, batch)
        logprobs = chosen_B, rejected_B
        references = self._upload(batch.ref_chosen_B), self._upload(batch.ref_rejected_B)
        tokens = loss_mask_BS.sum(1).chunk(2)
        if self._has_ties:
            loss, metrics = compute_tied_pair_loss(
                settings,
                logprobs,
                references,
                tokens,
                self._upload(batch.ties_B),
                num_pairs,
                denominators.ordered,
            )
        else:
            loss, metrics = compute_pair_loss(settings, logprobs, references, tokens, num_pairs)
        if settings.sft_coef > 0:
            nll, nll_metrics = chosen_nll(logprobs[0], tokens[0], num_pairs=num_pairs)
            loss, metrics = loss + settings.sft_coef * nll, metrics | nll_metrics
        with torch.no_grad():
            metrics |= {
                "chosen_logprob": logprobs[0].sum() / num_pairs,  # nats of a whole completion
                "rejected_logprob": logprobs[1].sum() / num_pairs,
            }
            if settings.needs_reference:
                # k1 at samples of the reference: estimates KL(reference || policy) if it wrote the pairs.
                kl_sum = (references[0] + references[1] - logprobs[0] - logprobs[1]).sum()
                metrics["reference_kl"] = kl_sum / denominators.loss_tokens  # nats per token
        return loss, metrics


def _build_loss_mask(sides: Sequence[PairSide], width: int) -> torch.Tensor:
    rows = [[False] * len(side.prompt_ids) + list(side.loss_mask) for side in sides]
    return pad_rows(rows, False, dtype=torch.bool, width=width)


def _check_pair(pair: PreferencePair, name: str, settings: PreferenceSettings) -> None:
    if pair.tie:
        unsupported: str = "" if settings.loss in ("dpo", "ipo") else settings.loss
        if settings.label_smoothing > 0:
            unsupported = "label_smoothing"
        elif settings.sft_coef > 0:
            unsupported = "sft_coef"
        if unsupported:
            raise DataError(f"{name}: is a tie, which {unsupported} does not take; leave ties out")
    if (pair.desirable is None) == (settings.loss == "kto"):
        needed = "labelled completions" if settings.loss == "kto" else "pairs, chosen and rejected"
        raise DataError(f"{name}: the loss {settings.loss} needs {needed}")
    for side_name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not side.prompt_ids:
            raise DataError(
                f"{name}.{side_name}: has no prompt, so its first token could carry no loss"
            )
        if len(side.loss_mask) != len(side.completion_ids):
            count = len(side.completion_ids)
            raise DataError(
                f"{name}.{side_name}: {count} completion tokens, but a loss mask of {len(side.loss_mask)}"
            )
        if not any(side.loss_mask):
            raise DataError(f"{name}.{side_name}: no token carries loss")


def _attach_references(
    pairs: Sequence[PreferencePair], rows: Sequence[PairReference]
) -> LazyRows[_ReferencedPair]:
    """Attach their reference log-probabilities to pairs, each when accessed."""
    return LazyRows(len(pairs), lambda index: _ReferencedPair(pairs[index], rows[index], index))
