"""Policy update of one iteration: epochs x minibatches of optimizer steps on a rollout buffer.

Two limits of the update by KL(old || new): `trust_region.ExactTrustRegion` is a loss term over the whole vocabulary,
from a copy of the old weights; `run_guarded_step` undoes an optimizer step beyond `PolicySettings.kl_max`.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.distributed import DummyBatch
from rl_core.errors import SamplerMismatch
from rl_core.losses.host_reads import read_scalars
from rl_core.losses.kl import kl_k3, kl_penalty
from rl_core.losses.masking import masked_sum
from rl_core.losses.supervised import entropy_bonus
from rl_core.losses.value import value_loss
from rl_core.models.forward_modes import has_dropout
from rl_core.models.logprobs import (
    TokenOutputs,
    completion_logprobs,
    compute_token_outputs,
)
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.rollout_metrics import aggregate_step_metrics
from rl_core.settings import PolicySettings
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.trainers.policy_gradient.actor_critic import ActorCriticModels
from rl_core.trainers.policy_gradient.losses import (
    LossDenominators,
    compute_custom_policy_loss,
    compute_importance_weights,
    compute_policy_loss,
    compute_token_weights,
    measure_policy_kl,
    measure_sampler_agreement,
)
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.policy_gradient.teacher_divergence import TeacherDivergence
from rl_core.trainers.policy_gradient.trust_region import ExactTrustRegion, TopKRegion
from rl_core.training.guarded_step import run_guarded_step
from rl_core.types import TrainBatch

Batches = Sequence[TrainBatch | DummyBatch[TrainBatch]]


class PolicyUpdate:
    """One iteration's update: old and reference log-probs, values, advantages, then epochs x minibatches of steps.

    L = policy loss + kl_coef KL(policy || reference) + trust_region_coef KL(old || policy) - entropy_coef entropy
    (+ value_coef value loss with a shared head) (+ router_aux_loss_coef times the mean of the micro-batches'
    load-balancing losses, weighted by their real tokens). All terms except the value loss, a mean over loss tokens,
    and the router's are summed with the same weight of each token (`loss_aggregation`), so that a coefficient means
    the same for every divisor. Rows of advantage 0 contribute nothing to the policy loss: unless another term needs
    them, they count in its denominator but are not run through the model.
    """

    def __init__(
        self,
        actor_critic: ActorCriticModels,
        settings: PolicySettings,
        groups: Sequence[Sequence[TrainingSample]],
        *,
        kl_coef: float | None = None,
        entropy_coef: float | None = None,
        critic_only: bool = False,
    ) -> None:
        """Build the rollout buffer; nothing is computed yet.

        Args:
            groups: see `RolloutBuffer`.
            kl_coef, entropy_coef: of this iteration; None = the settings'.
            critic_only: do not train the policy.
        """
        self.actor_critic = actor_critic
        self.settings = settings
        self.buffer = RolloutBuffer(actor_critic, settings, groups)
        self.kl_coef = settings.kl_coef if kl_coef is None else kl_coef
        self.entropy_coef = settings.entropy_coef if entropy_coef is None else entropy_coef
        self.critic_only = critic_only
        self.trained_rows = set(range(len(self.buffer.samples)))  # rows run through the policy
        self.denominators = LossDenominators(1, 1, 1, 1)  # of the current optimizer step
        self.num_routed_tokens = 1  # real tokens of the current step, for a router's loss
        # Old log-probs that the first step records while it runs over all rows; None = it does not, or is done.
        self._first_logprobs_RS: torch.Tensor | None = None
        # None = no trust region, or one estimated at the sampled tokens.
        self._trust_region: ExactTrustRegion | None = None
        self._top_k_region: TopKRegion | None = None  # None = the loss reads no top-K divergence
        self._teacher_divergence: TeacherDivergence | None = None  # None = a policy gradient
        if isinstance(settings, DistilledPolicySettings) and settings.compares_distributions:
            self._teacher_divergence = TeacherDivergence(self.buffer, settings)
        self.span_denominators = self.denominators  # the same, in spans of the teacher's divergence

    def run_optimizer_steps(self, rng: np.random.Generator) -> dict[str, float]:
        """Run all optimizer steps; metrics are means over them (`_max`: the largest)."""
        settings, buffer = self.settings, self.buffer
        optimizer_step = self.actor_critic.optimizer_step
        if settings.dropout and has_dropout(self.actor_critic.policy):
            buffer.mask_seed = int(rng.integers(2**63))
        num_steps = settings.epochs * settings.minibatches
        minibatches = self._split_minibatches(rng)
        metrics = self._prepare_buffer(minibatches, num_steps)
        uses_trust_region = settings.trust_region_coef > 0 and settings.trust_region_kl == "exact"
        if uses_trust_region and not self.critic_only:
            self._trust_region = ExactTrustRegion(buffer)
        if settings.uses_top_k and num_steps > 1:  # else both policies are equal
            self._top_k_region = TopKRegion(buffer, settings.dppo_topk, settings.divergence_kind)
            self._top_k_region.record_distributions(
                [self._select_trained_rows(indices) for indices in minibatches]
            )
        all_step_metrics: list[dict[str, float]] = []
        refused = 0.0
        for number in range(num_steps):
            epoch, index = divmod(number, settings.minibatches)
            if index == 0 and epoch > 0:
                minibatches = self._split_minibatches(rng)
            step_metrics = {}
            if index < len(minibatches):
                step_metrics = self._run_optimizer_step(minibatches[index])
            if self._first_logprobs_RS is not None:
                buffer.old_logprobs_RS, self._first_logprobs_RS = self._first_logprobs_RS, None
            if self._trust_region is not None and "train/loss" in step_metrics:
                self._trust_region.is_first_step = False
            refused = step_metrics.pop("refused", 0.0)
            if step_metrics:
                all_step_metrics.append(step_metrics)
            if refused:
                break
        num_updates = sum("train/loss" in step_metrics for step_metrics in all_step_metrics)
        # Steps without a loss token count too: num_steps is the x axis of the metrics.
        optimizer_step.num_steps += num_steps - num_updates
        metrics |= aggregate_step_metrics(all_step_metrics)
        metrics["train/empty_updates"] = float(num_steps - num_updates)
        metrics["train/trained_rollouts"] = float(len(self.trained_rows))
        metrics["train/skipped_steps"] = float(optimizer_step.skipped_steps)
        if settings.kl_max is not None:
            metrics["policy/refused_steps"] = refused
        metrics.setdefault("train/learning_rate", optimizer_step.learning_rate)
        return metrics

    def check_sampler(self, metrics: Mapping[str, float]) -> None:
        """Raise SamplerMismatch if fresh rollouts were not sampled from the distribution that is trained."""
        kl, limit = metrics.get("policy/sampler_kl"), self._resolve_sampler_kl_max()
        if kl is None or limit is None or not kl > limit:  # NaN: the step was skipped
            return
        raise SamplerMismatch(
            f"KL(sampler || trainer) is {kl:.3g} nats per token on fresh rollouts (largest difference of a log-prob "
            f"{metrics['policy/sampler_difference_max']:.3g}), and sampler_kl_max is {limit:g}: they were not sampled "
            "from the weights, temperature and adapter that are trained. Nothing of this iteration is saved. To train "
            "on rollouts of other weights on purpose, set importance: token"
        )

    def _prepare_buffer(self, minibatches: Sequence[Sequence[int]], steps: int) -> dict[str, float]:
        """Fill the rollout buffer under the current models, and choose the rows to run through the policy.

        If the first step runs over all rows, it records the old log-probs, at a ratio of exactly 1.
        """
        settings, buffer, critic = self.settings, self.buffer, self.actor_critic.critic
        in_reward = settings.kl_in == "reward" and self.kl_coef > 0
        in_loss = settings.kl_in == "loss" and self.kl_coef > 0
        if critic is not None:
            buffer.compute_values(minibatches)
        needs_old = steps > 1 or settings.kl_max is not None
        uses_vtrace = settings.importance == "vtrace"
        has_teacher = self.actor_critic.teacher is not None and self._teacher_divergence is None
        if in_reward:
            buffer.compute_ref_logprobs(minibatches)
        if has_teacher:
            buffer.compute_teacher_logprobs(minibatches)
        if in_reward or uses_vtrace or has_teacher:
            if needs_old or not self._is_sampler_policy():
                buffer.compute_old_logprobs(minibatches)
            if uses_vtrace or buffer.old_logprobs_RS is None:
                buffer.copy_sampler_logprobs(minibatches)
        metrics = buffer.estimate_advantages(self.kl_coef if in_reward else 0.0)
        needs_all_rows = (
            in_loss
            or self.entropy_coef > 0
            or settings.trust_region_coef > 0
            or self._teacher_divergence is not None
            # A custom loss may be different from 0 at an advantage of 0.
            or self.actor_critic.custom_functions.loss is not None
            or (critic is not None and critic.value_head is not None)
        )
        if not needs_all_rows:
            self.trained_rows = buffer.find_rows_with_advantage()
        plan = [self._select_trained_rows(indices) for indices in minibatches]
        if in_loss:
            buffer.compute_ref_logprobs(plan)
        if buffer.old_logprobs_RS is None and needs_old:
            is_single_process = self.actor_critic.optimizer_step.process_group.size == 1
            if is_single_process and settings.minibatches == 1 and settings.kl_max is None:
                self._first_logprobs_RS = torch.zeros(buffer.shape, device=buffer.device)
            else:
                buffer.compute_old_logprobs(plan)
        return metrics

    def _is_sampler_policy(self) -> bool:
        """Return whether the sampler's log-probs differ from the policy's by rounding only.

        That needs float32, no importance weights and no dropout.
        """
        if self.buffer.mask_seed is not None or self.settings.corrects_sampler:
            return False
        return self.actor_critic.optimizer_step.computes_in_float32

    def _resolve_sampler_kl_max(self) -> float | None:
        """Return the limit of KL(sampler || trainer), in nats per token; None = no limit."""
        if self.settings.sampler_kl_max is not None:
            return self.settings.sampler_kl_max
        if self.settings.corrects_sampler or self.buffer.mask_seed is not None:
            return None
        return 1e-3 if self.actor_critic.optimizer_step.computes_in_float32 else 0.1

    def _split_minibatches(self, rng: np.random.Generator) -> list[list[int]]:
        """Split the row indices into the optimizer steps of one pass; in order if there is a single step."""
        count, size = self.settings.minibatches, len(self.buffer.samples)
        order = rng.permutation(size) if count > 1 else np.arange(size)
        return [indices.tolist() for indices in np.array_split(order, count) if len(indices)]

    def _select_trained_rows(self, indices: Sequence[int]) -> list[int]:
        return [index for index in indices if index in self.trained_rows]

    def _run_optimizer_step(self, indices: Sequence[int]) -> dict[str, float]:
        """Run one optimizer step of the policy and of a separate critic on these rows; {} without a loss token."""
        metrics: dict[str, float] = {}
        batches: Batches = []
        if not self.critic_only:
            batches = self.buffer.build_local_batches(self._select_trained_rows(indices))
        if batches:
            self.denominators = self._count_denominators(indices, self.buffer.host_mask_RS)
            if self._teacher_divergence is not None:
                span_mask_RS = self._teacher_divergence.host_mask_RS
                self.span_denominators = self._count_denominators(indices, span_mask_RS)
            if self.settings.router_aux_loss_coef > 0:
                self.num_routed_tokens = self._count_real_tokens(batches)
            metrics = self._run_policy_step(batches)
            if "policy/importance_mean" in metrics:
                # Effective sample size over loss tokens (Kish); a mean square of 0 = all were dropped.
                square = metrics.pop("policy/importance_square_mean")
                share = metrics["policy/importance_mean"] ** 2 / square if square else 0.0
                metrics["policy/effective_sample_share"] = share
        if self.actor_critic.critic_optimizer_step is not None:
            metrics |= self._run_critic_step(indices)
        return metrics

    def _run_policy_step(self, batches: Batches) -> dict[str, float]:
        """Run the policy's optimizer step; undo it beyond `kl_max` (`refused` is then 1)."""
        optimizer_step, limit = self.actor_critic.optimizer_step, self.settings.kl_max
        if limit is None:
            return optimizer_step.run_step(batches, self.compute_loss)
        result = run_guarded_step(
            optimizer_step,
            lambda: optimizer_step.run_step(batches, self.compute_loss),
            lambda: [self._measure_mean_kl(batches)],
            [limit],
        )
        return {
            **result.metrics,
            "policy/kl_after_max": result.kls[0],
            "refused": float(result.is_refused),
        }

    def _measure_mean_kl(self, batches: Batches) -> float:
        """Measure the mean KL(old || current policy) per loss token of the step, k3 estimator."""

        def measure_batch(batch: TrainBatch) -> torch.Tensor:
            batch = batch.to(self.actor_critic.device)
            with self.buffer.use_dropout_masks(batch):
                logprobs_BS, _ = completion_logprobs(self.actor_critic.policy, batch)
            old_BS = self.buffer.select_batch_rows(self.buffer.old_logprobs_RS, batch)
            return masked_sum(kl_k3(old_BS, logprobs_BS), batch.loss_mask_BS)

        def measure_local_batches() -> float:
            real_batches = [batch for batch in batches if not isinstance(batch, DummyBatch)]
            memory_fit = MemoryFit("KL after the update")
            return sum(read_scalars(memory_fit.compute_batches(real_batches, measure_batch)))

        optimizer_step = self.actor_critic.optimizer_step
        with self.buffer.use_pass_mode(self.actor_critic.policy), optimizer_step.enable_autocast():
            total = optimizer_step.sharded.run_independently_with_full_weights(
                measure_local_batches
            )
        all_totals = optimizer_step.process_group.all_gather(total)
        return sum(all_totals) / self.denominators.num_forward_tokens

    def _count_real_tokens(self, batches: Batches) -> int:
        """Count the real tokens, prompts included, of the step's micro-batches in all processes."""
        num_tokens = sum(
            int(batch.attention_mask_BS.sum())
            for batch in batches
            if not isinstance(batch, DummyBatch)
        )
        return sum(self.actor_critic.optimizer_step.process_group.all_gather(num_tokens))

    def _count_denominators(
        self, indices: Sequence[int], host_mask_RS: torch.Tensor
    ) -> LossDenominators:
        """Count the denominators of a step, including rows of advantage 0 that are not run, whose loss is 0."""
        mask_RS = host_mask_RS[list(indices)]
        forward_mask_RS = host_mask_RS[self._select_trained_rows(indices)]
        return LossDenominators(
            num_loss_tokens=int(mask_RS.sum()),
            num_forward_tokens=int(forward_mask_RS.sum()),
            num_sequences=int(mask_RS.any(1).sum()),
            num_forward_sequences=int(forward_mask_RS.any(1).sum()),
            num_rollouts=sum(not self.buffer.is_left_out[index] for index in indices),
        )

    def compute_loss(self, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of one micro-batch over the step's denominators; metrics are per token that was run."""
        settings, buffer = self.settings, self.buffer
        batch = batch.to(self.actor_critic.device)
        mask_BS, sampler_BS = batch.loss_mask_BS, batch.sampler_logprobs_BS
        head = self.actor_critic.critic.value_head if self.actor_critic.critic is not None else None
        if self._trust_region is not None:
            self._trust_region.prepare_batch(batch)
        divergence_BS = None
        if self._top_k_region is not None:
            divergence_BS = self._top_k_region.measure_divergence(batch)
        teacher_loss: tuple[torch.Tensor, dict[str, Any]] | None = None
        if self._teacher_divergence is not None:
            outputs, teacher_loss = self._teacher_divergence.compute_loss(
                batch, self.denominators, self.span_denominators
            )
        else:
            with buffer.use_dropout_masks(batch):
                outputs = compute_token_outputs(
                    self.actor_critic.policy,
                    batch,
                    with_entropy=True,
                    value_head=head,
                    with_load_balancing=settings.router_aux_loss_coef > 0,
                )
        logprobs_BS = outputs.logprobs_BS
        if self._first_logprobs_RS is not None:
            width = logprobs_BS.shape[1]
            rows_B = buffer.index_rows(batch)
            self._first_logprobs_RS[rows_B, :width] = logprobs_BS.detach().float()
        count = self.denominators.num_forward_tokens
        old_BS = logprobs_BS.detach()
        if buffer.old_logprobs_RS is not None:
            old_BS = buffer.select_batch_rows(buffer.old_logprobs_RS, batch)
        advantages_BS = buffer.select_batch_rows(buffer.advantages_RS, batch)
        assert sampler_BS is not None
        weights_BS = compute_importance_weights(settings, logprobs_BS, old_BS, sampler_BS, mask_BS)
        policy_metrics: dict[str, Any] = {}
        if weights_BS is not None:
            if settings.importance_mask != "none":
                dropped_BS = (weights_BS == 0).to(weights_BS.dtype)
                policy_metrics["importance_dropped"] = masked_sum(dropped_BS, mask_BS) / count
            policy_metrics["importance_mean"] = masked_sum(weights_BS, mask_BS) / count
            square_mean = masked_sum(weights_BS.square(), mask_BS) / count
            policy_metrics["importance_square_mean"] = square_mean
        if teacher_loss is not None:
            loss, loss_metrics = teacher_loss
            loss_metrics |= measure_policy_kl(logprobs_BS, old_BS, mask_BS, count)
        else:
            loss, loss_metrics = self._compute_policy_loss(
                batch, logprobs_BS, old_BS, advantages_BS, weights_BS, divergence_BS
            )
        policy_metrics |= loss_metrics
        policy_metrics |= measure_sampler_agreement(sampler_BS, old_BS, mask_BS, count)
        loss, term_metrics = self._add_loss_terms(loss, outputs, old_BS, batch)
        policy_metrics |= term_metrics
        metrics = {f"policy/{name}": value for name, value in policy_metrics.items()}
        if outputs.values_BS is not None:
            assert settings.value_function is not None
            value, value_metrics = self._compute_value_loss(outputs.values_BS, batch, count)
            loss = loss + settings.value_function.value_coef * value
            metrics |= value_metrics
        return loss, metrics

    def _compute_policy_loss(
        self,
        batch: TrainBatch,
        logprobs_BS: torch.Tensor,
        old_BS: torch.Tensor,
        advantages_BS: torch.Tensor,
        importance_BS: torch.Tensor | None,
        divergence_BS: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the policy term by the user's loss or the algorithm's."""
        settings, counts, mask_BS = self.settings, self.denominators, batch.loss_mask_BS
        custom_loss = self.actor_critic.custom_functions.loss
        if custom_loss is not None:
            return compute_custom_policy_loss(
                custom_loss,
                settings,
                logprobs_BS,
                old_BS,
                advantages_BS,
                mask_BS,
                counts,
                importance_BS,
            )
        if importance_BS is not None:
            advantages_BS = advantages_BS * importance_BS
        return compute_policy_loss(
            settings,
            logprobs_BS,
            old_BS,
            advantages_BS,
            mask_BS,
            counts,
            sampler_logprobs_BS=batch.sampler_logprobs_BS,
            divergence_BS=divergence_BS,
        )

    def _add_loss_terms(
        self, loss: torch.Tensor, outputs: TokenOutputs, old_BS: torch.Tensor, batch: TrainBatch
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Add the entropy, reference KL, trust region and router terms of nonzero weight to the loss."""
        settings, mask_BS = self.settings, batch.loss_mask_BS
        count = self.denominators.num_forward_tokens
        weights_BS = compute_token_weights(settings, mask_BS, self.denominators)
        assert outputs.entropy_BS is not None
        bonus, metrics = entropy_bonus(
            outputs.entropy_BS, mask_BS, num_loss_tokens=count, loss_weights_BT=weights_BS
        )
        if self.entropy_coef > 0:
            loss = loss + self.entropy_coef * bonus
        if self.kl_coef > 0 and settings.kl_in == "loss":
            ref_BS = self.buffer.select_batch_rows(self.buffer.ref_logprobs_RS, batch)
            penalty, kl_metrics = kl_penalty(
                outputs.logprobs_BS,
                ref_BS,
                mask_BS,
                num_loss_tokens=count,
                estimator=settings.kl_estimator,
                loss_weights_BT=weights_BS,
            )
            loss = loss + self.kl_coef * penalty
            metrics |= kl_metrics
        if outputs.load_balancing_loss is not None:
            token_share = batch.attention_mask_BS.sum() / self.num_routed_tokens
            router_loss = outputs.load_balancing_loss * token_share
            loss = loss + settings.router_aux_loss_coef * router_loss
            metrics["router_aux_loss"] = router_loss.detach()
        if self._trust_region is not None:
            penalty, exact_metrics = self._trust_region.compute_penalty(batch, weights_BS, count)
            loss = loss + settings.trust_region_coef * penalty
            metrics |= exact_metrics
        elif settings.trust_region_coef > 0:
            penalty, _ = kl_penalty(
                old_BS,
                outputs.logprobs_BS,
                mask_BS,
                num_loss_tokens=count,
                loss_weights_BT=weights_BS,
            )
            loss = loss + settings.trust_region_coef * penalty
        return loss, metrics

    def _compute_value_loss(
        self, values_BS: torch.Tensor, batch: TrainBatch, count: float
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the critic's loss of a micro-batch, over `count` loss tokens of the step."""
        buffer, critic = self.buffer, self.settings.value_function
        assert critic is not None
        loss, metrics = value_loss(
            values_BS,
            buffer.select_batch_rows(buffer.returns_RS, batch),
            batch.loss_mask_BS,
            num_loss_tokens=count,
            old_values_BT=buffer.select_batch_rows(buffer.values_RS, batch),
            value_clip_eps=critic.value_clip_eps,
        )
        return loss, {f"value/{name}": value for name, value in metrics.items()}

    def _run_critic_step(self, indices: Sequence[int]) -> dict[str, float]:
        """Run one optimizer step of a separate critic on all these rows."""
        critic, optimizer_step = self.actor_critic.critic, self.actor_critic.critic_optimizer_step
        assert critic is not None and optimizer_step is not None
        batches = self.buffer.build_local_batches(indices)
        if not batches:
            return {}
        count = int(self.buffer.host_mask_RS[list(indices)].sum())

        def compute_loss(batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            batch = batch.to(self.actor_critic.device)
            with self.buffer.use_dropout_masks(batch):
                values_BS, _ = critic.compute_values(batch)
            return self._compute_value_loss(values_BS, batch, count)

        metrics = optimizer_step.run_step(batches, compute_loss)
        return {
            "value/loss": metrics["value/loss"],
            "value/clip_fraction": metrics["value/clip_fraction"],
            "value/grad_norm": metrics["train/grad_norm"],
            "value/skipped_steps": metrics["train/skipped_steps"],
        }
