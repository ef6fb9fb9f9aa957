"""Direct preference optimisation: DPO, conservative DPO, IPO. The reference is the model that training starts from.

B pairs, S whole sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rl_core.data.batches import DataOrder, attention_mask, micro_batches, pad_rows
from rl_core.data.pairs import Pair, PairSide
from rl_core.distributed import SINGLE_PROCESS, DummyBatch, ProcessGroup
from rl_core.errors import DataError
from rl_core.losses.preference import chosen_nll, dpo_loss, ipo_loss
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.precision import Autocast, autocast
from rl_core.rollouts.batching import TrainRow, make_batches
from rl_core.settings import PreferenceSettings
from rl_core.training.optimizer_step import OptimizerStep, combine_metrics
from rl_core.types import TrainBatch

__all__ = ["PreferenceTrainer", "reference_logprobs"]

Reference = tuple[float, float]  # log-probs of (chosen, rejected) under the reference, nats, summed over loss tokens


def reference_logprobs(
    model: PreTrainedModel, pairs: Sequence[Pair], *, pad_id: int, max_tokens: int, precision: Autocast = "none"
) -> list[Reference]:
    """Log-probabilities of both sides of every pair under `model` as it is now, without dropout and gradient.

    Length-sorted micro-batches of at most `max_tokens` padded tokens. Draws no random number.
    Returns: (chosen, rejected) of each pair, in nats, summed over the tokens that carry loss.
    """
    rows = [
        TrainRow(side.prompt_ids, side.completion_ids, side.loss_mask)
        for pair in pairs
        for side in (pair.chosen, pair.rejected)
    ]
    sums = [0.0] * len(rows)
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad(), autocast(precision, device):
        for batch in make_batches(rows, max_tokens, pad_id):
            logprobs_B = completion_logprobs(model, batch.to(device))[0].sum(1)
            for row, value in zip(batch.rows, logprobs_B.tolist(), strict=True):
                sums[row] = value
    return list(zip(sums[0::2], sums[1::2], strict=True))


@dataclass
class _ComparedPairBatch:
    """Some pairs; one row a pair in every tensor, so that the optimizer step can cut a batch that does not fit."""

    chosen_ids_BS: torch.Tensor  # int64 [B, S], right-padded
    rejected_ids_BS: torch.Tensor  # int64 [B, S], padded to the same S
    chosen_mask_BS: torch.Tensor  # bool [B, S], True = token carries loss
    rejected_mask_BS: torch.Tensor
    chosen_lengths_B: torch.Tensor  # int64 [B], real tokens
    rejected_lengths_B: torch.Tensor
    ref_chosen_B: torch.Tensor  # float32 [B], nats, summed over loss tokens
    ref_rejected_B: torch.Tensor


class PreferenceTrainer:
    """Minimises the preference loss; one iteration is one optimizer step.

    The reference log-probabilities are computed here, from `model` as it is handed over, which is before a resume loads
    trained weights into it. They also lie in the checkpoint.

    Args:
        model: a causal LM with the weights that training starts from, on its device. New adapters change nothing yet,
            so under LoRA it is its own reference as well.
        pad_id: token id on the right of short rows.
        pairs_train, pairs_heldout: without held-out pairs there is no evaluation.
        seed: of the order of pairs.
        references: (of the training pairs, of the held-out ones), where the same weights gave them before.
        process_group: the processes that train this model together, each with the same arguments.
    Raises: DataError naming a pair that cannot be learnt from, or references that do not fit the pairs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        pairs_train: Sequence[Pair],
        pairs_heldout: Sequence[Pair],
        settings: PreferenceSettings,
        seed: int,
        references: tuple[Sequence[Reference], Sequence[Reference]] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        if not pairs_train:
            raise DataError("pairs_train: there is no pair to train on")
        self.model = model
        self.settings = settings
        self._pad_id = pad_id
        self._pairs = {"train": list(pairs_train), "heldout": list(pairs_heldout)}
        for name, pairs in self._pairs.items():
            for index, pair in enumerate(pairs):
                _check_pair(pair, f"pairs_{name}[{index}]")
        self._device = next(model.parameters()).device
        self.order = DataOrder(len(pairs_train), settings.batch_size, seed)
        steps = math.ceil(settings.epochs * self.order.batches_per_epoch)
        self.total_steps = min(steps, settings.max_steps or steps)  # iterations for the loop
        given = dict(zip(self._pairs, references, strict=True)) if references is not None else {}
        self.references = {
            name: list(given[name]) if name in given else self._reference(pairs) for name, pairs in self._pairs.items()
        }
        for name, rows in self.references.items():
            _check_references(rows, len(self._pairs[name]), name)
        self.optimizer_step = OptimizerStep(
            model, settings, self.total_steps, max_nonfinite=settings.max_nonfinite, process_group=process_group
        )

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch_size pairs."""
        started = time.perf_counter()
        indices = self.order.next()
        pairs = [self._pairs["train"][index] for index in indices]
        batches = self._shared_batches(pairs, [self.references["train"][index] for index in indices])
        num_loss_tokens = _loss_tokens(pairs)
        num_tokens = sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)

        def loss_of(batch: _ComparedPairBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = self._loss(batch, len(pairs), num_loss_tokens)
            return loss, {f"train/{name}": value for name, value in metrics.items()}

        metrics = self.optimizer_step.apply(batches, loss_of)
        return {
            **metrics,
            "train/tokens": float(num_tokens),
            "train/epoch": self.optimizer_step.num_steps / self.order.batches_per_epoch,
            "perf/tokens_per_second": num_tokens / max(time.perf_counter() - started, 1e-9),
        }

    def evaluate(self) -> dict[str, float]:
        """The training metrics over the held-out pairs, as eval/...: loss, accuracy (ties count half), margin, ..."""
        pairs = self._pairs["heldout"]
        if not pairs:
            return {}
        num_loss_tokens = _loss_tokens(pairs)

        def measure(batch: _ComparedPairBatch) -> dict[str, float]:
            loss, metrics = self._loss(batch, len(pairs), num_loss_tokens)
            return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}

        parts = self.optimizer_step.sharded.measure(
            self._shared_batches(pairs, self.references["heldout"]), measure, self.optimizer_step.autocast()
        )
        return {f"eval/{name}": value for name, value in combine_metrics(parts).items()}

    def state_dict(self) -> dict[str, Any]:
        """Where the order of pairs stands, and the reference log-probabilities [pairs, 2]."""
        references = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in self.references.items()}
        return {"order": self.order.state_dict(), "references": references}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.order.load_state_dict(state["order"])
        for name, pairs in self._pairs.items():
            rows = [(float(row[0]), float(row[1])) for row in state["references"][name].tolist()]
            _check_references(rows, len(pairs), name)
            self.references[name] = rows

    def _reference(self, pairs: Sequence[Pair]) -> list[Reference]:
        return reference_logprobs(
            self.model,
            pairs,
            pad_id=self._pad_id,
            max_tokens=self.settings.micro_batch_tokens,
            precision=self.settings.autocast,
        )

    def _shared_batches(
        self, pairs: Sequence[Pair], references: Sequence[Reference]
    ) -> list[_ComparedPairBatch | DummyBatch[_ComparedPairBatch]]:
        """This process's micro-batches of these pairs."""
        rows = list(zip(pairs, references, strict=True))
        widest = [max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]
        return self.optimizer_step.process_group.batches(
            rows, widest, lambda some: self._batches(*zip(*some, strict=True))
        )

    def _batches(self, pairs: Sequence[Pair], references: Sequence[Reference]) -> list[_ComparedPairBatch]:
        """Both rows of a pair in one micro-batch, pairs sorted by their longer row."""
        widest = [max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]
        batches = []
        for group in micro_batches(widest, max(1, self.settings.micro_batch_tokens // 2)):
            width = max(widest[index] for index in group)
            chosen, rejected = [pairs[i].chosen for i in group], [pairs[i].rejected for i in group]
            batches.append(
                _ComparedPairBatch(
                    pad_rows([side.ids for side in chosen], self._pad_id, width=width),
                    pad_rows([side.ids for side in rejected], self._pad_id, width=width),
                    _loss_mask(chosen, width),
                    _loss_mask(rejected, width),
                    torch.tensor([len(side.ids) for side in chosen]),
                    torch.tensor([len(side.ids) for side in rejected]),
                    torch.tensor([references[i][0] for i in group], dtype=torch.float32),
                    torch.tensor([references[i][1] for i in group], dtype=torch.float32),
                )
            )
        return batches

    def _loss(
        self, batch: _ComparedPairBatch, num_pairs: int, num_loss_tokens: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and metrics of some pairs, divided by the pairs (or loss tokens) of the whole step."""
        settings = self.settings
        width = batch.chosen_ids_BS.shape[1]
        lengths_B = torch.cat([batch.chosen_lengths_B, batch.rejected_lengths_B])
        both = TrainBatch(
            input_ids_BS=torch.cat([batch.chosen_ids_BS, batch.rejected_ids_BS]),
            attention_mask_BS=attention_mask(lengths_B.tolist(), width),
            loss_mask_BS=torch.cat([batch.chosen_mask_BS, batch.rejected_mask_BS]),
        ).to(self._device)
        chosen_B, rejected_B = completion_logprobs(self.model, both)[0].sum(1).chunk(2)
        ref_chosen_B, ref_rejected_B = batch.ref_chosen_B.to(self._device), batch.ref_rejected_B.to(self._device)
        chosen_tokens_B, rejected_tokens_B = both.loss_mask_BS.sum(1).chunk(2)
        if settings.loss == "ipo":
            loss, metrics = ipo_loss(
                chosen_B / chosen_tokens_B,
                rejected_B / rejected_tokens_B,
                ref_chosen_B / chosen_tokens_B,
                ref_rejected_B / rejected_tokens_B,
                num_pairs=num_pairs,
                beta=settings.beta,
            )
        else:
            loss, metrics = dpo_loss(
                chosen_B,
                rejected_B,
                ref_chosen_B,
                ref_rejected_B,
                num_pairs=num_pairs,
                beta=settings.beta,
                label_smoothing=settings.label_smoothing,
            )
        if settings.sft_coef > 0:
            nll, nll_metrics = chosen_nll(chosen_B, chosen_tokens_B, num_pairs=num_pairs)
            loss, metrics = loss + settings.sft_coef * nll, metrics | nll_metrics
        with torch.no_grad():
            # k1 from samples of the reference: an estimate of KL(reference || policy) where it wrote the pairs
            moved = (ref_chosen_B + ref_rejected_B - chosen_B - rejected_B).sum()
            metrics |= {
                "chosen_logprob": chosen_B.sum() / num_pairs,  # nats of a whole completion
                "rejected_logprob": rejected_B.sum() / num_pairs,
                "reference_kl": moved / num_loss_tokens,  # nats per token
            }
        return loss, metrics


def _loss_mask(sides: Sequence[PairSide], width: int) -> torch.Tensor:
    rows = [[False] * len(side.prompt_ids) + list(side.loss_mask) for side in sides]
    return pad_rows(rows, False, dtype=torch.bool, width=width)


def _loss_tokens(pairs: Sequence[Pair]) -> int:
    return sum(sum(pair.chosen.loss_mask) + sum(pair.rejected.loss_mask) for pair in pairs)


def _check_pair(pair: Pair, name: str) -> None:
    for which, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not side.prompt_ids:
            raise DataError(f"{name}.{which}: has no prompt, so its first token could carry no loss")
        if len(side.loss_mask) != len(side.completion_ids):
            count = len(side.completion_ids)
            raise DataError(f"{name}.{which}: {count} completion tokens, but a loss mask of {len(side.loss_mask)}")
        if not any(side.loss_mask):
            raise DataError(f"{name}.{which}: no token carries loss")


def _check_references(rows: Sequence[Reference], count: int, name: str) -> None:
    if len(rows) != count:
        raise DataError(f"references of {name}: {len(rows)} rows for {count} pairs")
    bad = next((index for index, row in enumerate(rows) if not all(map(math.isfinite, row))), None)
    if bad is not None:
        raise DataError(f"references of {name}: row {bad} is {rows[bad]}; the starting model gives no finite number")
