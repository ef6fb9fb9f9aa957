"""The optimizer steps of one iteration of policy optimisation.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rl_core.errors import DataError
from rl_core.losses.kl import kl_k3, kl_penalty
from rl_core.losses.masking import masked_max, masked_sum
from rl_core.losses.policy import clipped_policy_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, make_batches
from rl_core.settings import PolicySettings
from rl_core.trainers.rollout_metrics import mean_metrics
from rl_core.trainers.update import Updater
from rl_core.types import TrainBatch

__all__ = ["PolicyUpdate"]


class PolicyUpdate:
    """Epochs x minibatches of optimizer steps over fixed rows.

    L = clipped policy loss + kl_coef KL(policy || reference) - entropy_coef entropy. The clipped loss is summed over
    loss tokens and divided by those of the whole optimizer step (dr_grpo: by rollouts x max_completion_tokens); KL and
    entropy are means over loss tokens. Rows of advantage 0 add nothing to the clipped loss: unless a KL or entropy term
    needs them, they count in its denominator but are not run through the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reference_model: PreTrainedModel | None,
        updater: Updater,
        settings: PolicySettings,
        rows: Sequence[TrainRow],
        *,
        pad_id: int,
    ) -> None:
        """`rows`: one for each rollout, with one advantage each, and the sampler's log-probs as `old_logprobs`."""
        if any(row.advantage is None or row.old_logprobs is None for row in rows):
            raise DataError("rows: each needs an advantage and the sampler's log-probs")
        self.model = model
        self.reference_model = reference_model
        self.updater = updater
        self.settings = settings
        self.rows = rows
        self.pad_id = pad_id
        self.device = next(model.parameters()).device
        needs_all = settings.kl_coef > 0 or settings.entropy_coef > 0
        self.trained = {i for i, row in enumerate(rows) if needs_all or row.advantage != 0}
        self.old_logprobs_RS: torch.Tensor | None = None  # None = each update takes its own
        self.num_loss_tokens = 0  # of the optimizer step at hand
        self.num_run_tokens = 0  # of these, run through the model
        self.fixed_denominator: float | None = None
        if settings.algorithm == "dr_grpo":
            # A constant (arXiv:2503.20783, section 3.2): what was filtered or came out short counts too.
            rollouts = settings.prompts_per_iteration * settings.group_size / settings.minibatches
            self.fixed_denominator = rollouts * settings.sampling.max_completion_tokens

    def run(self, rng: np.random.Generator) -> dict[str, float]:
        """All optimizer steps; metrics are means over them (`_max`: the largest)."""
        steps = self.settings.epochs * self.settings.minibatches
        minibatches = self._minibatches(rng)
        if steps > 1:
            # One forward pass before the first update; a single update takes its own log-probs, at ratio exactly 1.
            self._remember_old_logprobs(minibatches)
        parts: list[dict[str, float]] = []
        for epoch in range(self.settings.epochs):
            if epoch > 0:
                minibatches = self._minibatches(rng)
            parts += [self._apply(indices) for indices in minibatches]
        applied = [part for part in parts if part]
        # An update without a single loss token is none, but it was tried: the step is the x axis of the metrics.
        self.updater.step += steps - len(applied)
        metrics = mean_metrics(applied)
        metrics["train/empty_updates"] = float(steps - len(applied))
        metrics["train/trained_rollouts"] = float(len(self.trained))
        metrics["train/skipped_steps"] = float(self.updater.skipped_steps)
        metrics.setdefault("train/learning_rate", self.updater.learning_rate)
        return metrics

    def _minibatches(self, rng: np.random.Generator) -> list[list[int]]:
        """Row indices of each optimizer step of one pass; in order where there is a single one."""
        count = self.settings.minibatches
        order = rng.permutation(len(self.rows)) if count > 1 else np.arange(len(self.rows))
        return [part.tolist() for part in np.array_split(order, count) if len(part)]

    def _batches(self, indices: Sequence[int]) -> list[TrainBatch]:
        """Micro-batches of the rows to be trained on; `rows` refers to all rows of the iteration."""
        picked = [i for i in indices if i in self.trained]
        if not picked:
            return []
        batches = make_batches([self.rows[i] for i in picked], self.settings.micro_batch_tokens, self.pad_id)
        for batch in batches:
            batch.rows = [picked[i] for i in batch.rows]
        return batches

    @torch.no_grad()
    def _remember_old_logprobs(self, minibatches: Sequence[Sequence[int]]) -> None:
        """Log-probs of the policy before the first update, in the micro-batches in which it will be updated."""
        width = max((len(row.prompt_ids) + len(row.completion_ids) for row in self.rows), default=0)
        self.old_logprobs_RS = torch.zeros(len(self.rows), width, device=self.device)
        with evaluating(self.model), self.updater.autocast():
            for indices in minibatches:
                for batch in self._batches(indices):
                    logprobs_BS, _ = completion_logprobs(self.model, batch.to(self.device))
                    self.old_logprobs_RS[batch.rows, : logprobs_BS.shape[1]] = logprobs_BS.float()

    def _apply(self, indices: Sequence[int]) -> dict[str, float]:
        """One optimizer step on these rows; {} when none of them has anything to teach."""
        batches = self._batches(indices)
        # Rows of advantage 0 that are not run count as well: their loss is 0, not absent.
        self.num_loss_tokens = sum(sum(self.rows[i].loss_mask) for i in indices)
        self.num_run_tokens = sum(batch.num_loss_tokens for batch in batches)
        return self.updater.apply(batches, self.loss) if batches else {}

    def loss(self, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss of one micro-batch over the denominators of the optimizer step; metrics per token that was run."""
        settings = self.settings
        batch = batch.to(self.device)
        mask_BS, sampler_logprobs_BS = batch.loss_mask_BS, batch.old_logprobs_BS
        logprobs_BS, entropy_BS = completion_logprobs(self.model, batch, with_entropy=True)
        assert entropy_BS is not None and sampler_logprobs_BS is not None and batch.advantages_BS is not None
        if self.old_logprobs_RS is None:
            old_logprobs_BS = logprobs_BS.detach()
        else:
            old_logprobs_BS = self.old_logprobs_RS[batch.rows, : logprobs_BS.shape[1]]
        loss, parts = clipped_policy_loss(
            logprobs_BS,
            old_logprobs_BS,
            batch.advantages_BS,
            mask_BS,
            num_loss_tokens=self.num_run_tokens,
            clip_eps=settings.clip_eps,
            clip_eps_high=settings.clip_eps_high,
            loss_denominator=self.fixed_denominator or self.num_loss_tokens,
        )
        bonus, entropy = entropy_bonus(entropy_BS, mask_BS, num_loss_tokens=self.num_run_tokens)
        parts |= entropy | _sampler_agreement(sampler_logprobs_BS, old_logprobs_BS, mask_BS, self.num_run_tokens)
        if settings.entropy_coef > 0:
            loss = loss + settings.entropy_coef * bonus
        if settings.kl_coef > 0:
            ref_logprobs_BS = self._ref_logprobs(batch)
            penalty, kl = kl_penalty(logprobs_BS, ref_logprobs_BS, mask_BS, num_loss_tokens=self.num_run_tokens)
            loss = loss + settings.kl_coef * penalty
            parts |= kl
        return loss, {f"policy/{name}": value for name, value in parts.items()}

    @torch.no_grad()
    def _ref_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        assert self.reference_model is not None
        with self.updater.autocast():
            return completion_logprobs(self.reference_model, batch)[0]


@torch.no_grad()
def _sampler_agreement(
    sampler_logprobs_BS: torch.Tensor, old_logprobs_BS: torch.Tensor, mask_BS: torch.Tensor, count: float
) -> dict[str, torch.Tensor]:
    """How far the rollout engine's log-probs lie from the trainer's for the same weights and tokens."""
    return {
        "sampler_kl": masked_sum(kl_k3(sampler_logprobs_BS, old_logprobs_BS), mask_BS) / count,
        "sampler_difference_max": masked_max((sampler_logprobs_BS - old_logprobs_BS).abs(), mask_BS),
    }
