"""Hard limit of KL(old || new): an optimizer step beyond it is rolled back (`PolicySettings.kl_max`)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from rl_core.distributed import DummyBatch
from rl_core.losses.kl import kl_k3
from rl_core.losses.masking import masked_sum
from rl_core.memory import MemoryFit
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.trained_models import ActorCriticModels
from rl_core.types import TrainBatch

__all__ = ["KLLimit"]


class KLLimit:
    """Weights and optimizer as they were before a step, to which `check` goes back."""

    def __init__(self, actor_critic: ActorCriticModels, buffer: RolloutBuffer, limit: float) -> None:
        """Store weights and optimizer; `limit` in nats per token."""
        self.actor_critic = actor_critic
        self.buffer = buffer
        self.limit = limit
        optimizer_step = actor_critic.optimizer_step
        self._weights = {name: tensor.clone() for name, tensor in trainable_weights(optimizer_step.model).items()}
        self._state = copy.deepcopy(optimizer_step.state_dict())

    def check(self, batches: Sequence[TrainBatch | DummyBatch[TrainBatch]], num_run_tokens: float) -> dict[str, float]:
        """Metrics of the step that was made on these micro-batches; `refused` where it was rolled back."""
        kl = self._mean_kl(batches, num_run_tokens)
        if kl <= self.limit:
            return {"policy/kl_after_max": kl}
        load_trainable_weights(self.actor_critic.optimizer_step.model, self._weights)
        self.actor_critic.optimizer_step.load_state_dict(self._state)
        return {"policy/kl_after_max": kl, "refused": 1.0}

    def _mean_kl(self, batches: Sequence[TrainBatch | DummyBatch[TrainBatch]], num_run_tokens: float) -> float:
        """Mean KL(old || current policy) per loss token of the step, k3 estimator."""

        def own() -> float:
            real = [batch for batch in batches if not isinstance(batch, DummyBatch)]
            return sum(MemoryFit("KL after the update").compute(real, of_batch))

        def of_batch(batch: TrainBatch) -> float:
            batch = batch.to(self.actor_critic.device)
            with self.buffer.masks(batch):
                logprobs_BS, _ = completion_logprobs(self.actor_critic.policy, batch)
            old_BS = self.buffer.for_batch(self.buffer.old_logprobs_RS, batch)
            return float(masked_sum(kl_k3(old_BS, logprobs_BS), batch.loss_mask_BS))

        optimizer_step = self.actor_critic.optimizer_step
        with self.buffer.mode(self.actor_critic.policy), optimizer_step.autocast():
            total = optimizer_step.sharded.with_full_weights_independent(own)
        return sum(optimizer_step.process_group.all_gather(total)) / num_run_tokens
