"""Rollout buffer of one iteration: samples by group, old and reference log-probs, values, advantages.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence, G rollouts per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_core.distributed import DummyBatch
from rl_core.errors import DataError
from rl_core.inference.sampling import sequence_seed
from rl_core.losses.advantages import distillation_advantages
from rl_core.losses.importance import effective_sample_size, importance_ratios
from rl_core.losses.kl import kl_k1
from rl_core.losses.masking import fill_masked, masked_sum, masked_whiten
from rl_core.losses.value import explained_variance
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import evaluating
from rl_core.models.dropout import repeatable_masks, training_mode
from rl_core.models.logprobs import check_contexts, completion_logprobs
from rl_core.models.lora import without_adapter
from rl_core.rollouts.batching import make_batches
from rl_core.settings import PolicySettings
from rl_core.timing import span
from rl_core.trainers.policy_gradient.advantages import comparison_advantages, fill_masked_rewards, value_advantages
from rl_core.trainers.policy_gradient.replay_buffer import Sample
from rl_core.trainers.policy_gradient.trained_models import ActorCriticModels
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RolloutBuffer"]

Plan = Sequence[Sequence[int]]  # row indices of each optimizer step


class RolloutBuffer:
    """Groups of samples, and tensors [R, S] over all their rows, 0 where a token carries no loss; nothing has gradient.

    Row r is the r-th sample, group after group. Up to four distributions give log-probs of the same tokens:
    `sampler_logprobs_RS`, of the policy that sampled; `old_logprobs_RS`, of the policy before this iteration's update;
    `ref_logprobs_RS`, of the reference; `teacher_logprobs_RS`, of the teacher.

    Training with dropout (`mask_seed`) gives a row the same masks in every pass of the iteration: of the old policy, of
    all epochs, of the critic, and of the reference, which is the policy's own network as it was. So ratios and KL are
    those of the weights, 1 and 0 before the first step. Masks follow from shapes too, hence each row is a micro-batch
    of its own; so they depend neither on the other rows, nor on minibatches, nor on the number of processes.
    """

    def __init__(
        self, actor_critic: ActorCriticModels, settings: PolicySettings, groups: Sequence[Sequence[Sample]]
    ) -> None:
        """`groups`: fresh ones, without advantages, and replayed ones."""
        self.groups = [list(group) for group in groups]
        self.samples = [sample for group in self.groups for sample in group]
        if not self.samples or any(sample.row.sampler_logprobs is None for sample in self.samples):
            raise DataError("samples: at least one is needed, each with the sampler's log-probs")
        if any(sample.row.temperature <= 0 for sample in self.samples):
            raise DataError("samples: one was sampled greedily (temperature 0), so there is no policy to improve")
        if any(sample.row.context_starts for sample in self.samples):
            check_contexts(actor_critic.policy)
        self.actor_critic = actor_critic
        self.settings = settings
        self.device = actor_critic.device
        width = max(len(sample.row.prompt_ids) + len(sample.row.completion_ids) for sample in self.samples)
        self.shape = (len(self.samples), width)
        mask_RS = torch.zeros(self.shape, dtype=torch.bool)
        for index, sample in enumerate(self.samples):
            start, mask = len(sample.row.prompt_ids), sample.row.loss_mask
            mask_RS[index, start : start + len(mask)] = torch.tensor(mask, dtype=torch.bool)
        self.mask_RS = mask_RS.to(self.device)  # True = counts in the loss
        self.advantages_RS = torch.zeros(self.shape, device=self.device)
        self.returns_RS: torch.Tensor | None = None
        self.old_logprobs_RS: torch.Tensor | None = None  # None = each update takes its own
        self.sampler_logprobs_RS: torch.Tensor | None = None  # None = not needed beyond the micro-batches
        self.ref_logprobs_RS: torch.Tensor | None = None
        self.teacher_logprobs_RS: torch.Tensor | None = None
        self.values_RS: torch.Tensor | None = None  # before the update
        self.value_after_R: torch.Tensor | None = None
        self.mask_seed: int | None = None  # of the rows' dropout masks; None = no dropout

    # Micro-batches

    def batches(self, indices: Sequence[int]) -> list[TrainBatch | DummyBatch[TrainBatch]]:
        """Micro-batches of this process's share of these rows; `TrainBatch.rows` indexes the rows of the iteration."""
        process_group = self.actor_critic.optimizer_step.process_group
        if process_group.size > 1:  # a share without a loss token would leave a process without a micro-batch
            has_loss = self.mask_RS.any(1).tolist()
            indices = [index for index in indices if has_loss[index]]
        if not indices:
            return []
        rows = [self.samples[index].row for index in indices]
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
        return [*process_group.batches(indices, lengths, self._build_batches)]

    def _build_batches(self, indices: Sequence[int]) -> list[TrainBatch]:
        rows = [self.samples[index].row for index in indices]
        max_tokens = self.settings.micro_batch_tokens if self.mask_seed is None else 1  # 1 = each row alone
        batches = make_batches(rows, max_tokens, self.actor_critic.pad_id)
        for batch in batches:
            batch.rows = [indices[index] for index in batch.rows]
            batch.loss_mask_BS &= self.mask_RS[batch.rows, : batch.loss_mask_BS.shape[1]].cpu()
        return [batch for batch in batches if batch.num_loss_tokens]

    def for_batch(self, values_RS: torch.Tensor | None, batch: TrainBatch) -> torch.Tensor:
        """The rows of a micro-batch [B, S] of a tensor over all rows, 0 where no loss is."""
        assert values_RS is not None, "not computed"
        return fill_masked(values_RS[batch.rows, : batch.loss_mask_BS.shape[1]], batch.loss_mask_BS)

    # Log-probs and values under the models as they are

    def mode(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context of a pass that an update is compared with: eval mode, or training mode where it drops out."""
        return evaluating(model) if self.mask_seed is None else training_mode(model, dropout=True)

    def masks(self, batch: TrainBatch) -> AbstractContextManager[None]:
        """Context in which a pass over this micro-batch draws its row's dropout masks, every time the same ones."""
        if self.mask_seed is None:
            return nullcontext()
        return repeatable_masks(self.device, sequence_seed(self.mask_seed, *batch.rows))

    @torch.no_grad()
    def compute_old_logprobs(self, plan: Plan) -> None:
        """Log-probs of the policy before the first update, in the micro-batches in which it will be updated."""
        with span("measure"):
            self.old_logprobs_RS = self._logprobs(self.actor_critic.policy, plan)

    def copy_sampler_logprobs(self, plan: Plan) -> None:
        """Log-probs of the sampler as a tensor, to stand for the old ones in a KL reward; see `estimate_advantages`."""
        logprobs_RS = torch.zeros(self.shape, device=self.device)
        for batch in self._own_batches(plan):
            assert batch.sampler_logprobs_BS is not None
            logprobs_RS[batch.rows, : batch.sampler_logprobs_BS.shape[1]] = batch.sampler_logprobs_BS
        self.sampler_logprobs_RS = self.actor_critic.optimizer_step.process_group.all_reduce_sum(logprobs_RS)

    @torch.no_grad()
    def compute_ref_logprobs(self, plan: Plan) -> None:
        """Log-probs of the reference, once for all epochs."""
        reference = self.actor_critic.reference
        assert reference is not None
        own = without_adapter(reference) if reference is self.actor_critic.policy else nullcontext()
        with span("reference"), own:
            self.ref_logprobs_RS = self._logprobs(reference, plan)

    @torch.no_grad()
    def compute_teacher_logprobs(self, plan: Plan) -> None:
        """Log-probs of the teacher, once for all epochs."""
        assert self.actor_critic.teacher is not None
        with span("teacher"):
            self.teacher_logprobs_RS = self._filled(plan, self.actor_critic.teacher.logprobs)

    @torch.no_grad()
    def compute_values(self, plan: Plan) -> None:
        """Values before every loss token, and after the last token of each row."""
        critic = self.actor_critic.critic
        assert critic is not None
        values_RS = torch.zeros(self.shape, device=self.device)
        after_R = torch.zeros(self.shape[0], device=self.device)

        def fill(batch: TrainBatch) -> None:
            with self.masks(batch):
                values_BS, after_B = critic.values(batch)
            values_RS[batch.rows, : values_BS.shape[1]] = values_BS.float()
            after_R[batch.rows] = after_B.float()

        optimizer_step = self.actor_critic.critic_optimizer_step or self.actor_critic.optimizer_step
        with span("measure"), self.mode(critic), optimizer_step.autocast():
            optimizer_step.sharded.with_full_weights_independent(lambda: self._for_each_batch(plan, fill))
        self.values_RS, self.value_after_R = (
            optimizer_step.process_group.all_reduce_sum(values_RS),
            optimizer_step.process_group.all_reduce_sum(after_R),
        )

    def _logprobs(self, model: PreTrainedModel, plan: Plan) -> torch.Tensor:
        def masked(batch: TrainBatch) -> torch.Tensor:
            with self.masks(batch):
                return completion_logprobs(model, batch)[0]

        with self.mode(model):
            return self._filled(plan, masked)

    def _filled(self, plan: Plan, logprobs: Callable[[TrainBatch], torch.Tensor]) -> torch.Tensor:
        """Log-probs [R, S] of all rows of the plan, each micro-batch by the process that it is dealt to."""
        logprobs_RS = torch.zeros(self.shape, device=self.device)

        def fill(batch: TrainBatch) -> None:
            logprobs_BS = logprobs(batch)
            logprobs_RS[batch.rows, : logprobs_BS.shape[1]] = logprobs_BS.float()

        optimizer_step = self.actor_critic.optimizer_step
        with optimizer_step.autocast():
            optimizer_step.sharded.with_full_weights_independent(lambda: self._for_each_batch(plan, fill))
        return optimizer_step.process_group.all_reduce_sum(logprobs_RS)  # each process has filled in its own rows

    def _for_each_batch(self, plan: Plan, function: Callable[[TrainBatch], None]) -> None:
        MemoryFit("scoring of rollouts").compute(self._own_batches(plan), function)

    def _own_batches(self, plan: Plan) -> Iterator[TrainBatch]:
        """This process's micro-batches, on the policy's device."""
        for indices in plan:
            for batch in self.batches(indices):
                if not isinstance(batch, DummyBatch):
                    yield batch.to(self.device)

    # Advantages

    def estimate_advantages(self, kl_reward_coef: float = 0.0) -> dict[str, float]:
        """Fill in advantages, and returns where there are values; a replayed sample keeps its own advantage.

        Args:
            kl_reward_coef: weight of k1 to the reference in the reward, per token; needs old (or the sampler's)
                log-probs and the reference's.
        Returns: value/... and policy/ref_kl, where they apply.
        """
        rewards_R = torch.tensor([sample.reward for sample in self.samples], dtype=torch.float64)
        metrics: dict[str, float] = {}
        penalty_RS: torch.Tensor | None = None
        if kl_reward_coef > 0:
            before_RS = self.old_logprobs_RS if self.old_logprobs_RS is not None else self.sampler_logprobs_RS
            assert before_RS is not None and self.ref_logprobs_RS is not None
            kl_RS = fill_masked(kl_k1(before_RS, self.ref_logprobs_RS), self.mask_RS)
            penalty_RS = kl_reward_coef * kl_RS
            metrics["policy/ref_kl"] = float(kl_RS.sum() / self.mask_RS.sum().clamp(min=1))
        if self.actor_critic.teacher is not None:
            metrics |= self._imitate()
        elif self.settings.value_function is not None:
            metrics |= self._estimate_from_values(rewards_R, penalty_RS)
        else:
            if penalty_RS is not None:
                rewards_R = rewards_R - penalty_RS.sum(1).double().cpu()
            metrics |= self._compare_rewards(rewards_R)
        if self.settings.uses_whitening and bool(self.mask_RS.any()):
            self.advantages_RS = masked_whiten(self.advantages_RS, self.mask_RS)
        return metrics

    def _compare_rewards(self, rewards_R: torch.Tensor) -> dict[str, float]:
        """Group-relative or batch advantages of the fresh groups; filtered and masked samples lose their mask."""
        rewards = rewards_R.split([len(group) for group in self.groups])
        fresh = [index for index, group in enumerate(self.groups) if not any(sample.is_replayed for sample in group)]
        masked = [torch.tensor([sample.is_masked for sample in self.groups[index]]) for index in fresh]
        filled = fill_masked_rewards([rewards[index] for index in fresh], masked)
        compared, metrics = self._compared(filled, fresh)
        for index, advantages_G in zip(fresh, compared, strict=True):
            for sample, advantage in zip(self.groups[index], advantages_G.tolist(), strict=True):
                sample.advantage = 0.0 if sample.is_masked else advantage
        for row, sample in enumerate(self.samples):
            assert sample.advantage is not None
            if sample.is_masked or abs(sample.advantage) < self.settings.filter_threshold:
                self.mask_RS[row] = False  # carries no loss, and counts in no denominator
            self.advantages_RS[row][self.mask_RS[row]] = sample.advantage
        return metrics

    def _compared(
        self, groups: Sequence[torch.Tensor], indices: Sequence[int]
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Advantages [G] of groups of rewards, by the user's estimator (with metrics) or the algorithm's."""
        own = self.actor_critic.own.advantages
        if own is None:
            return comparison_advantages(groups, self.settings.algorithm), {}
        lengths = [sum(sample.row.loss_mask) for index in indices for sample in self.groups[index]]
        # by one process for all: a function of the user's may give other numbers at another call
        found, metrics = self.actor_critic.optimizer_step.process_group.on_rank_zero(lambda: own(groups, lengths))
        return found, {f"train/advantages/{name}": value for name, value in metrics.items()}

    def _estimate_from_values(self, rewards_R: torch.Tensor, penalty_RS: torch.Tensor | None) -> dict[str, float]:
        """GAE and returns of all rows; masked rows and filtered tokens lose their mask."""
        assert self.values_RS is not None and self.value_after_R is not None
        ratios_RS = self._trace_ratios()
        self.advantages_RS, self.returns_RS = value_advantages(
            rewards_R.to(device=self.device, dtype=torch.float32),
            torch.tensor([sample.is_truncated for sample in self.samples], device=self.device),
            self.values_RS,
            self.value_after_R,
            self.mask_RS,
            gamma=self.settings.gamma,
            gae_lambda=self.settings.gae_lambda,
            kl_penalty_RS=penalty_RS,
            ratios_RS=ratios_RS,
            rho_cap=self.settings.weight_cap,
            c_cap=self.settings.vtrace_c,
        )
        masked_R1 = torch.tensor([[sample.is_masked] for sample in self.samples], device=self.device)
        self.mask_RS = self.mask_RS & ~masked_R1  # carries no loss, for the critic neither
        self.advantages_RS = fill_masked(self.advantages_RS, self.mask_RS)
        count = self.mask_RS.sum().clamp(min=1)
        metrics = {
            "value/explained_variance": explained_variance(self.values_RS, self.returns_RS, self.mask_RS),
            "value/returns_mean": float(masked_sum(self.returns_RS, self.mask_RS) / count),
            "value/values_mean": float(masked_sum(self.values_RS, self.mask_RS) / count),
        }
        if ratios_RS is not None:
            weights_RS = ratios_RS.clamp(max=self.settings.weight_cap)
            metrics["policy/importance_mean"] = float(masked_sum(weights_RS, self.mask_RS) / count)
            size = effective_sample_size(weights_RS, self.mask_RS)
            metrics["policy/effective_sample_share"] = size / float(count)
        if self.settings.filter_threshold:
            self.mask_RS = self.mask_RS & (self.advantages_RS.abs() >= self.settings.filter_threshold)
            self.advantages_RS = fill_masked(self.advantages_RS, self.mask_RS)
        return metrics

    def _imitate(self) -> dict[str, float]:
        """Advantages of a distillation: what each token, and at a discount the later ones, adds to minus the KL."""
        student_RS = self.old_logprobs_RS if self.old_logprobs_RS is not None else self.sampler_logprobs_RS
        assert student_RS is not None and self.teacher_logprobs_RS is not None
        self.advantages_RS = distillation_advantages(
            student_RS, self.teacher_logprobs_RS, self.mask_RS, gamma=self.settings.gamma
        )
        kl_RS = kl_k1(student_RS, self.teacher_logprobs_RS)
        return {"policy/teacher_kl": float(masked_sum(kl_RS, self.mask_RS) / self.mask_RS.sum().clamp(min=1))}

    def _trace_ratios(self) -> torch.Tensor | None:
        """Ratio of the old policy to the sampler at each loss token, for V-trace; None = not asked for."""
        if self.settings.importance != "vtrace":
            return None
        assert self.old_logprobs_RS is not None and self.sampler_logprobs_RS is not None
        return importance_ratios(self.old_logprobs_RS, self.sampler_logprobs_RS, self.mask_RS)
