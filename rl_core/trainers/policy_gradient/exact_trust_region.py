"""Trust region by the exact KL(old || new): over the whole vocabulary, from a copy of the old weights.

Suffixes: B rows of a micro-batch, S whole sequence, N loss tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from rl_core.losses.aggregation import aggregate
from rl_core.losses.kl import exact_forward_kl
from rl_core.models.logprobs import vocabulary_logprobs
from rl_core.models.trainable_weights import swapped_weights, trainable_weights
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.types import TrainBatch

__all__ = ["ExactTrustRegion"]


class ExactTrustRegion:
    """The policy before an iteration's update, and the divergence of the present one from it.

    Holds a copy of the trainable weights, and [N, V] of one micro-batch twice. `begin` comes before the pass that has
    a gradient: it swaps weights in place, which a graph that holds on to them would not survive.
    """

    def __init__(self, buffer: RolloutBuffer) -> None:
        """Copy the weights of the policy as it is."""
        self.buffer = buffer
        self.policy = buffer.actor_critic.policy
        self.is_first_step = True  # old and new are the same: KL and gradient are 0
        self._weights = {name: tensor.clone() for name, tensor in trainable_weights(self.policy).items()}
        self._old_NV: torch.Tensor | None = None  # log-probs of the old policy at the micro-batch's loss tokens

    @torch.no_grad()
    def begin(self, batch: TrainBatch) -> None:
        """Compute the old policy's distributions of a micro-batch."""
        if self.is_first_step:
            return
        with swapped_weights(self.policy, self._weights), self.buffer.masks(batch):
            self._old_NV = vocabulary_logprobs(self.policy, batch)

    def penalty(
        self, batch: TrainBatch, loss_weights_BS: torch.Tensor, num_loss_tokens: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """KL(old || new) of the micro-batch that was begun, as a loss term, at the temperatures of its tokens.

        Args:
            loss_weights_BS: float [B, S], weight of each token, see `aggregation.token_weights`.
            num_loss_tokens: of the whole optimizer step.
        Returns: scalar with gradient; {"update_kl_exact"}: the mean per loss token in nats, detached.
        """
        mask_BS, old_NV = batch.loss_mask_BS, self._old_NV
        if old_NV is None:
            zero = loss_weights_BS.new_zeros(())
            return zero, {"update_kl_exact": zero}
        with self.buffer.masks(batch):
            new_NV = vocabulary_logprobs(self.policy, batch)
        kl_N = exact_forward_kl(old_NV, new_NV)
        kl_BS = torch.zeros(mask_BS.shape, dtype=kl_N.dtype, device=kl_N.device).masked_scatter(mask_BS, kl_N)
        moved = aggregate(kl_BS, mask_BS, num_loss_tokens=num_loss_tokens, loss_weights_BT=loss_weights_BS)
        return moved, {"update_kl_exact": kl_N.detach().sum() / num_loss_tokens}
