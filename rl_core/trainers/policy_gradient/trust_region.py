"""Divergences of the current policy from the one before an iteration's update, over more than the sampled tokens.

`ExactTrustRegion` is a loss term over the whole vocabulary; `TopKRegion` the divergence by which `dppo` masks tokens.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence, N loss tokens, V vocabulary, K likeliest
tokens and the sampled one.
"""

from __future__ import annotations

import torch

from rl_core.losses.aggregation import aggregate
from rl_core.losses.kl import NO_TOKEN, DivergenceKind, exact_forward_kl, top_k_divergence
from rl_core.models.logprobs import compute_vocabulary_logprobs
from rl_core.models.trainable_weights import collect_trainable_weights, swap_weights
from rl_core.timing import span
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer, StepPlan
from rl_core.types import TrainBatch


class ExactTrustRegion:
    """The policy before an iteration's update, and the divergence of the current policy from it.

    Holds a copy of the trainable weights, and [N, V] of one micro-batch twice. Call `prepare_batch` before the pass
    that builds a graph: it swaps weights in place, which an existing graph would not survive.
    """

    def __init__(self, buffer: RolloutBuffer) -> None:
        """Copy the current weights of the policy."""
        self.buffer = buffer
        self.policy = buffer.actor_critic.policy
        self.is_first_step = True  # old and new policy are equal: KL and gradient are 0
        self._weights = {
            name: tensor.clone() for name, tensor in collect_trainable_weights(self.policy).items()
        }
        # Log-probs of the old policy at the micro-batch's loss tokens.
        self._old_NV: torch.Tensor | None = None

    @torch.no_grad()
    def prepare_batch(self, batch: TrainBatch) -> None:
        """Compute the old policy's distributions of a micro-batch."""
        if self.is_first_step:
            return
        with swap_weights(self.policy, self._weights), self.buffer.use_dropout_masks(batch):
            self._old_NV = compute_vocabulary_logprobs(self.policy, batch)

    def compute_penalty(
        self, batch: TrainBatch, loss_weights_BS: torch.Tensor, num_loss_tokens: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute KL(old || new) of the prepared micro-batch as a loss term, at the temperatures of its tokens.

        Args:
            loss_weights_BS: float [B, S], weight of each token, see `aggregation.token_weights`.
            num_loss_tokens: of the whole optimizer step.
        Returns: scalar with gradient; {"update_kl_exact"}: the mean per loss token in nats, detached.
        """
        mask_BS, old_NV = batch.loss_mask_BS, self._old_NV
        if old_NV is None:
            zero = loss_weights_BS.new_zeros(())
            return zero, {"update_kl_exact": zero}
        with self.buffer.use_dropout_masks(batch):
            new_NV = compute_vocabulary_logprobs(self.policy, batch)
        kl_N = exact_forward_kl(old_NV, new_NV)
        zeros_BS = torch.zeros(mask_BS.shape, dtype=kl_N.dtype, device=kl_N.device)
        penalty = aggregate(
            zeros_BS.masked_scatter(mask_BS, kl_N),
            mask_BS,
            num_loss_tokens=num_loss_tokens,
            loss_weights_BT=loss_weights_BS,
        )
        return penalty, {"update_kl_exact": kl_N.detach().sum() / num_loss_tokens}


class TopKRegion:
    """The likeliest tokens of the policy before an iteration's update, with their probabilities, at every loss token.

    The sampled token is always among them. Holds two tensors [R, S, K] on the policy's device.
    """

    def __init__(self, buffer: RolloutBuffer, num_tokens: int, kind: DivergenceKind) -> None:
        """Record nothing yet; `num_tokens`: K without the sampled token, at most the vocabulary's."""
        self.buffer = buffer
        self.policy = buffer.actor_critic.policy
        self.num_tokens = num_tokens
        self.kind = kind
        self._ids_RSK: torch.Tensor | None = None
        self._logprobs_RSK: torch.Tensor | None = None

    @torch.no_grad()
    def record_distributions(self, plan: StepPlan) -> None:
        """Record the current policy's likeliest tokens for the rows of the plan."""

        def record_batch(batch: TrainBatch) -> None:
            logprobs_NV = compute_vocabulary_logprobs(self.policy, batch)
            sampled_N1 = batch.input_ids_BS[batch.loss_mask_BS][:, None]
            top_NK, ids_NK = logprobs_NV.topk(min(self.num_tokens, logprobs_NV.shape[1]), dim=1)
            is_known_N1 = (ids_NK == sampled_N1).any(1, keepdim=True)
            sampled_logprobs_N1 = logprobs_NV.gather(1, sampled_N1).masked_fill(
                is_known_N1, NO_TOKEN
            )
            ids_NK = torch.cat([ids_NK, sampled_N1], dim=1)
            top_NK = torch.cat([top_NK, sampled_logprobs_N1], dim=1)
            if self._ids_RSK is None or self._logprobs_RSK is None:
                shape = (*self.buffer.shape, ids_NK.shape[1])
                self._ids_RSK = ids_NK.new_zeros(shape)
                self._logprobs_RSK = top_NK.new_zeros(shape)
            self._ids_RSK[self._find_places(batch)] = ids_NK
            self._logprobs_RSK[self._find_places(batch)] = top_NK

        optimizer_step = self.buffer.actor_critic.optimizer_step
        with (
            span("measure"),
            self.buffer.use_pass_mode(self.policy),
            optimizer_step.enable_autocast(),
        ):
            self.buffer.run_on_each_batch(plan, record_batch)

    @torch.no_grad()
    def measure_divergence(self, batch: TrainBatch) -> torch.Tensor:
        """Compute the divergence of the recorded from the current policy, float [B, S], 0 where the mask is False."""
        assert self._ids_RSK is not None and self._logprobs_RSK is not None
        places = self._find_places(batch)
        old_NK = self._logprobs_RSK[places]
        new_NK = compute_vocabulary_logprobs(self.policy, batch).gather(1, self._ids_RSK[places])
        new_NK = new_NK.to(old_NK.dtype).masked_fill(old_NK <= NO_TOKEN, NO_TOKEN)
        divergence_N = top_k_divergence(new_NK, old_NK, self.kind)
        zeros_BS = torch.zeros(
            batch.loss_mask_BS.shape, dtype=divergence_N.dtype, device=divergence_N.device
        )
        return zeros_BS.masked_scatter(batch.loss_mask_BS, divergence_N)

    def _find_places(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of the iteration and positions [N] of the batch's loss tokens."""
        rows_N, positions_N = batch.loss_mask_BS.nonzero(as_tuple=True)
        return self.buffer.index_rows(batch)[rows_N], positions_N
