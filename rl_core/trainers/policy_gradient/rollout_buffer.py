"""Models of a policy-gradient trainer, and the rollout buffer of one iteration.

The models are policy and critic with their optimizers, reference and teacher. The buffer holds samples by group, old
and reference log-probs, values and advantages.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence, G rollouts per prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_core.capabilities import refuse_image_training
from rl_core.distributed import SINGLE_PROCESS, DummyBatch, ProcessGroup
from rl_core.errors import DataError, SettingsError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.teacher import LocalTeacher, ServedTeacher, Teacher
from rl_core.losses.advantages import distillation_advantages
from rl_core.losses.host_reads import read_scalars
from rl_core.losses.importance import effective_sample_size, importance_ratios
from rl_core.losses.kl import kl_k1
from rl_core.losses.masking import fill_masked, masked_sum, masked_whiten
from rl_core.losses.value import explained_variance
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.forward_modes import seed_dropout_masks, use_training_mode
from rl_core.models.heads import PolicyWithCritic, SeparateCritic, ValueHead, read_hidden_size
from rl_core.models.logprobs import check_contexts, check_router, completion_logprobs
from rl_core.models.lora import disable_adapter, draw_adapter_masks, is_lora
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import build_batches
from rl_core.settings import PolicySettings
from rl_core.timing import span
from rl_core.trainers.policy_gradient.advantages import (
    RoleBaselines,
    build_role_baselines,
    compare_rewards,
    compute_value_advantages,
    select_group_method,
)
from rl_core.trainers.policy_gradient.custom_functions import CustomFunctions, load_custom_functions
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.policy_gradient.self_distillation import SelfTeacher
from rl_core.trainers.policy_gradient.turn_credit import (
    TurnComparison,
    estimate_token_advantages,
)
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

StepPlan = Sequence[Sequence[int]]  # row indices of each optimizer step


@dataclass
class ActorCriticModels:
    """The trainable models (policy, critic), their optimizers, and the frozen reference."""

    policy: PreTrainedModel
    optimizer_step: OptimizerStep  # of the policy, value head included
    pad_id: int
    # Frozen reference of the KL term. If it is the policy itself: the policy without its adapters.
    reference: PreTrainedModel | None = None
    critic: PolicyWithCritic | None = None  # None = an algorithm without values
    critic_optimizer_step: OptimizerStep | None = None  # of a separate critic
    teacher: Teacher | SelfTeacher | None = None  # advantages come from it, not from rewards
    custom_functions: CustomFunctions = field(default_factory=CustomFunctions)
    role_baselines: RoleBaselines | None = None  # None = the algorithm's comparison of rewards

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        return next(self.policy.parameters()).device


def check_models(
    settings: PolicySettings,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    teacher: Teacher | SelfTeacher | None,
) -> None:
    """Refuse models that cannot be trained with these settings.

    Raises: SettingsError for a KL term without a reference, an unusable reference, a router's loss for a model without
        a router, or a distillation without a teacher.
    """
    if settings.is_taught != (teacher is not None):
        raise SettingsError("teacher: a distillation needs one, and no other algorithm takes one")
    if settings.kl_coef > 0 and reference is None:
        raise SettingsError(f"kl_coef: {settings.kl_coef} needs a reference model")
    if reference is model and not is_lora(model):
        raise SettingsError(
            "kl_coef: a model without adapters cannot be its own reference; pass a copy"
        )
    check_router(model, settings.router_aux_loss_coef)
    refuse_image_training(model, settings)


def build_actor_critic(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    settings: PolicySettings,
    pad_id: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    teacher: Teacher | SelfTeacher | None = None,
    custom_functions: CustomFunctions | None = None,
) -> ActorCriticModels:
    """Build the policy, critic and optimizers that the algorithm needs; freeze the reference.

    Args:
        reference: may be `model` itself if it has adapters; the reference is then the model without them, not a copy.
        custom_functions: None = those that the settings name.
    """
    if reference is not None and reference is not model:
        reference.requires_grad_(False).eval()
    if custom_functions is None:
        custom_functions = load_custom_functions(settings)
    build_step = functools.partial(
        OptimizerStep,
        total_steps=settings.iterations * settings.epochs * settings.minibatches,
        max_nonfinite=settings.max_nonfinite,
        process_group=process_group,
    )
    critic_settings = settings.value_function
    if critic_settings is None:
        return ActorCriticModels(
            model,
            build_step(model, settings),
            pad_id,
            reference,
            teacher=teacher,
            custom_functions=custom_functions,
            role_baselines=build_role_baselines(settings),
        )
    if critic_settings.kind == "shared":
        head = ValueHead(read_hidden_size(model)).to(next(model.parameters()).device)
        policy_with_head = PolicyWithCritic(model, head)
        return ActorCriticModels(
            model,
            build_step(policy_with_head, settings),
            pad_id,
            reference,
            policy_with_head,
            custom_functions=custom_functions,
        )
    critic = SeparateCritic(model)
    learning_rate = critic_settings.learning_rate or settings.learning_rate
    return ActorCriticModels(
        model,
        build_step(model, settings),
        pad_id,
        reference,
        PolicyWithCritic(model, critic),
        build_step(critic, dataclasses.replace(settings, learning_rate=learning_rate)),
        custom_functions=custom_functions,
    )


class RolloutBuffer:
    """Samples by group, and tensors [R, S] over all their rows, 0 where a token carries no loss; without gradient.

    Row r is the r-th sample, group after group. Up to four distributions give log-probs of the same tokens:
    `sampler_logprobs_RS` of the policy that sampled, `old_logprobs_RS` of the policy before this iteration's update,
    `ref_logprobs_RS` of the reference, `teacher_logprobs_RS` of the teacher.

    With dropout (`mask_seed`), a row gets the same masks in every pass of the iteration: old policy, all epochs,
    critic, and the reference, which is the policy's network before training. Ratios and KL then reflect the weights
    only: 1 and 0 before the first step. As masks also depend on shapes, each row is its own micro-batch; masks are
        therefore independent of the
    other rows, of minibatches and of the number of processes.
    """

    def __init__(
        self,
        actor_critic: ActorCriticModels,
        settings: PolicySettings,
        groups: Sequence[Sequence[TrainingSample]],
    ) -> None:
        """Build the masks; nothing is computed yet. `groups`: fresh ones, without advantages, and replayed ones."""
        self.groups = [list(group) for group in groups]
        self.samples = [sample for group in self.groups for sample in group]
        if not self.samples or any(sample.row.sampler_logprobs is None for sample in self.samples):
            raise DataError("samples: at least one is needed, each with the sampler's log-probs")
        if any(sample.row.temperature <= 0 for sample in self.samples):
            raise DataError(
                "samples: one was sampled greedily (temperature 0), so there is no policy to improve"
            )
        if any(sample.row.context_starts for sample in self.samples):
            check_contexts(actor_critic.policy)
        self.actor_critic = actor_critic
        self.settings = settings
        self.device = actor_critic.device
        width = max(
            len(sample.row.prompt_ids) + len(sample.row.completion_ids) for sample in self.samples
        )
        self.shape = (len(self.samples), width)
        # No reward: no loss, and no part in a mean, a deviation or a denominator. A teacher needs no reward.
        self.is_left_out = [
            sample.is_masked and not settings.is_taught for sample in self.samples
        ]  # [R]
        mask_RS = torch.zeros(self.shape, dtype=torch.bool)
        for index, sample in enumerate(self.samples):
            start, mask = len(sample.row.prompt_ids), sample.row.loss_mask
            if self.is_left_out[index]:
                continue
            mask_RS[index, start : start + len(mask)] = torch.tensor(mask, dtype=torch.bool)
        # True = counts in the loss; on the policy's device, and on the host, where tokens are counted
        self.mask_RS, self.host_mask_RS = mask_RS.to(self.device), mask_RS
        self.advantages_RS = torch.zeros(self.shape, device=self.device)
        # the same on the host, where they were made there; None = they were not
        self._host_advantages_RS: torch.Tensor | None = None
        self.returns_RS: torch.Tensor | None = None
        self.old_logprobs_RS: torch.Tensor | None = None  # None = the update's own, detached
        self.sampler_logprobs_RS: torch.Tensor | None = None  # None = only micro-batches need it
        self.ref_logprobs_RS: torch.Tensor | None = None
        self.teacher_logprobs_RS: torch.Tensor | None = None
        self.values_RS: torch.Tensor | None = None  # before the update
        self.value_after_R: torch.Tensor | None = None
        self.mask_seed: int | None = None  # of the rows' dropout masks; None = no dropout

    def build_local_batches(
        self, indices: Sequence[int]
    ) -> list[TrainBatch | DummyBatch[TrainBatch]]:
        """Build this process's micro-batches of these rows; `TrainBatch.rows` indexes the rows of the iteration."""
        process_group = self.actor_critic.optimizer_step.process_group
        if process_group.size > 1:
            # A share without a loss token would leave a process without a micro-batch.
            has_loss = self.host_mask_RS.any(1).tolist()
            indices = [index for index in indices if has_loss[index]]
        if not indices:
            return []
        rows = [self.samples[index].row for index in indices]
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
        return [*process_group.build_local_batches(indices, lengths, self._pad_batches)]

    def _pad_batches(self, indices: Sequence[int]) -> list[TrainBatch]:
        rows = [self.samples[index].row for index in indices]
        # With dropout each row is its own micro-batch: no second row fits into one token.
        max_tokens = self.settings.micro_batch_tokens if self.mask_seed is None else 1
        batches = build_batches(
            rows, max_tokens, self.actor_critic.pad_id, shares_prefixes=self._can_share_prefixes()
        )
        for batch in batches:
            batch.rows = [indices[index] for index in batch.rows]
            batch.loss_mask_BS &= self.host_mask_RS[batch.rows, : batch.loss_mask_BS.shape[1]]
        return [batch for batch in batches if batch.num_loss_tokens]

    def _can_share_prefixes(self) -> bool:
        """Return whether all models that read the micro-batches compute common beginnings of rows once."""
        actor_critic, teacher = self.actor_critic, self.actor_critic.teacher
        reads_vocabulary = self.settings.trust_region_kl == "exact" or self.settings.uses_top_k
        if self.mask_seed is not None or reads_vocabulary:
            return False  # single rows; distributions over the vocabulary at each row's tokens
        models: list[nn.Module] = [actor_critic.policy]
        if actor_critic.reference is not None:
            models.append(actor_critic.reference)
        if isinstance(teacher, LocalTeacher):
            models.append(teacher.model)
        elif teacher is not None and not isinstance(teacher, ServedTeacher | SelfTeacher):
            return False  # unknown passes
        critic = actor_critic.critic.critic if actor_critic.critic is not None else None
        if isinstance(critic, SeparateCritic):
            models.append(critic.trunk)
        return actor_critic.optimizer_step.can_share_prefixes(*models)

    def select_batch_rows(self, values_RS: torch.Tensor | None, batch: TrainBatch) -> torch.Tensor:
        """Select the rows of a micro-batch [B, S] from a tensor over all rows, 0 where the mask is False."""
        assert values_RS is not None, "not computed"
        width = batch.loss_mask_BS.shape[1]
        return fill_masked(values_RS[self.index_rows(batch), :width], batch.loss_mask_BS)

    def index_rows(self, batch: TrainBatch) -> torch.Tensor:
        """Return the indices [B] of a micro-batch's rows on the device, without waiting for it (a list would)."""
        return torch.tensor(batch.rows).to(self.device, non_blocking=True)

    def find_rows_with_advantage(self) -> set[int]:
        """Return the rows that have an advantage other than 0."""
        advantages_RS = self._host_advantages_RS
        if advantages_RS is None:
            advantages_RS = self.advantages_RS
        return set(torch.nonzero(advantages_RS.any(1).cpu()).flatten().tolist())

    def use_pass_mode(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for passes that an update is compared with: eval mode, or training mode with dropout."""
        if self.mask_seed is None:
            return use_eval_mode(model)
        return use_training_mode(model, dropout=True)

    def use_dropout_masks(self, batch: TrainBatch) -> AbstractContextManager[None]:
        """Return a context in which each pass over this micro-batch draws the same dropout masks of its row."""
        if self.mask_seed is None:
            return nullcontext()
        return seed_dropout_masks(self.device, compute_sequence_seed(self.mask_seed, *batch.rows))

    @torch.no_grad()
    def compute_old_logprobs(self, plan: StepPlan) -> None:
        """Compute log-probs of the policy before the first update, in the micro-batches of the update."""
        with span("measure"):
            self.old_logprobs_RS = self._compute_logprobs(self.actor_critic.policy, plan)

    def copy_sampler_logprobs(self, plan: StepPlan) -> None:
        """Copy the sampler's log-probs into a tensor, as old log-probs of a KL reward; see `estimate_advantages`."""
        logprobs_RS = torch.zeros(self.shape, device=self.device)
        for batch in self._iter_local_batches(plan):
            assert batch.sampler_logprobs_BS is not None
            width = batch.sampler_logprobs_BS.shape[1]
            logprobs_RS[self.index_rows(batch), :width] = batch.sampler_logprobs_BS
        process_group = self.actor_critic.optimizer_step.process_group
        self.sampler_logprobs_RS = process_group.all_reduce_sum(logprobs_RS)

    @torch.no_grad()
    def compute_ref_logprobs(self, plan: StepPlan) -> None:
        """Compute log-probs of the reference, once for all epochs; with dropout under the policy's masks."""
        policy, reference = self.actor_critic.policy, self.actor_critic.reference
        assert reference is not None
        without = disable_adapter(reference) if reference is policy else nullcontext()
        masks = nullcontext() if self.mask_seed is None else draw_adapter_masks(policy, reference)
        with span("reference"), without, masks:
            self.ref_logprobs_RS = self._compute_logprobs(reference, plan)

    @torch.no_grad()
    def compute_teacher_logprobs(self, plan: StepPlan) -> None:
        """Compute log-probs of the teacher, once for all epochs."""
        teacher = self.actor_critic.teacher
        assert teacher is not None
        with span("teacher"):
            if isinstance(teacher, SelfTeacher):
                self.teacher_logprobs_RS = teacher.compute_row_logprobs(self, plan)
                return
            self.teacher_logprobs_RS = self._fill_logprobs(plan, teacher.compute_logprobs)

    @torch.no_grad()
    def compute_values(self, plan: StepPlan) -> None:
        """Compute values before every loss token, and after the last token of each row."""
        critic = self.actor_critic.critic
        assert critic is not None
        values_RS = torch.zeros(self.shape, device=self.device)
        after_R = torch.zeros(self.shape[0], device=self.device)

        def fill(batch: TrainBatch) -> None:
            with self.use_dropout_masks(batch):
                values_BS, after_B = critic.compute_values(batch)
            rows_B = self.index_rows(batch)
            values_RS[rows_B, : values_BS.shape[1]] = values_BS.float()
            after_R[rows_B] = after_B.float()

        optimizer_step = self.actor_critic.critic_optimizer_step or self.actor_critic.optimizer_step
        with span("measure"), self.use_pass_mode(critic), optimizer_step.enable_autocast():
            optimizer_step.sharded.run_independently_with_full_weights(
                lambda: self.run_on_each_batch(plan, fill)
            )
        self.values_RS = optimizer_step.process_group.all_reduce_sum(values_RS)
        self.value_after_R = optimizer_step.process_group.all_reduce_sum(after_R)

    def _compute_logprobs(self, model: PreTrainedModel, plan: StepPlan) -> torch.Tensor:
        def compute_batch(batch: TrainBatch) -> torch.Tensor:
            with self.use_dropout_masks(batch):
                return completion_logprobs(model, batch)[0]

        with self.use_pass_mode(model):
            return self._fill_logprobs(plan, compute_batch)

    def _fill_logprobs(
        self, plan: StepPlan, logprobs: Callable[[TrainBatch], torch.Tensor]
    ) -> torch.Tensor:
        """Compute log-probs [R, S] of all rows of the plan, each micro-batch by the process it belongs to."""
        logprobs_RS = torch.zeros(self.shape, device=self.device)

        def fill(batch: TrainBatch) -> None:
            logprobs_BS = logprobs(batch)
            logprobs_RS[self.index_rows(batch), : logprobs_BS.shape[1]] = logprobs_BS.float()

        optimizer_step = self.actor_critic.optimizer_step
        with optimizer_step.enable_autocast():
            optimizer_step.sharded.run_independently_with_full_weights(
                lambda: self.run_on_each_batch(plan, fill)
            )
        return optimizer_step.process_group.all_reduce_sum(
            logprobs_RS
        )  # rows of other processes are 0

    def run_on_each_batch(self, plan: StepPlan, function: Callable[[TrainBatch], None]) -> None:
        """Call the function with each of this process's micro-batches of the plan, on the policy's device."""
        MemoryFit("scoring of rollouts").compute_batches(self._iter_local_batches(plan), function)

    def _iter_local_batches(self, plan: StepPlan) -> Iterator[TrainBatch]:
        """Yield this process's micro-batches, on the policy's device."""
        for indices in plan:
            for batch in self.build_local_batches(indices):
                if not isinstance(batch, DummyBatch):
                    yield batch.to(self.device)

    def estimate_advantages(self, kl_reward_coef: float = 0.0) -> dict[str, float]:
        """Fill in advantages, and returns if there are values; a replayed sample keeps its advantage.

        Args:
            kl_reward_coef: weight of k1 to the reference in the reward, per token; needs old (or the sampler's)
                log-probs and the reference's.
        Returns: value/... and policy/ref_kl, if they apply.
        """
        rewards_R = torch.tensor([sample.reward for sample in self.samples], dtype=torch.float64)
        metrics: dict[str, float] = {}
        penalty_RS: torch.Tensor | None = None
        if kl_reward_coef > 0:
            old_RS = self._select_old_logprobs()
            assert self.ref_logprobs_RS is not None
            kl_RS = fill_masked(kl_k1(old_RS, self.ref_logprobs_RS), self.mask_RS)
            penalty_RS = kl_reward_coef * kl_RS
            if bool(
                self.host_mask_RS.any()
            ):  # without a token the controller has nothing to follow
                metrics["policy/ref_kl"] = float(kl_RS.sum() / self.mask_RS.sum())
        if self.actor_critic.teacher is not None:
            metrics |= self._estimate_from_teacher()
        elif self.settings.value_function is not None:
            metrics |= self._estimate_from_values(rewards_R, penalty_RS)
        else:
            if penalty_RS is not None:
                rewards_R = rewards_R - penalty_RS.sum(1).double().cpu()
            metrics |= self._estimate_from_rewards(rewards_R, penalty_RS)
        if self.settings.uses_whitening and bool(self.host_mask_RS.any()):
            self.advantages_RS = masked_whiten(self.advantages_RS, self.mask_RS)
            self._host_advantages_RS = None
        return metrics

    def _select_old_logprobs(self) -> torch.Tensor:
        """Return the old log-probs if they were computed, else the sampler's."""
        logprobs_RS = self.old_logprobs_RS
        if logprobs_RS is None:
            logprobs_RS = self.sampler_logprobs_RS
        assert logprobs_RS is not None
        return logprobs_RS

    def _estimate_from_rewards(
        self, rewards_R: torch.Tensor, penalty_RS: torch.Tensor | None
    ) -> dict[str, float]:
        """Estimate group-relative or batch advantages of the fresh groups; filtered tokens lose their mask.

        Masked samples are left out of every comparison: a group of 8 with 6 masked is a group of 2. The rewards have
        the penalties taken off already; by turn, each turn has those of its tokens.
        """
        rows = iter(range(len(self.samples)))
        compared_rows: list[list[int]] = []  # of each fresh group with a reward
        for group in self.groups:
            group_rows = [next(rows) for _ in group]
            if any(sample.is_replayed for sample in group):
                continue
            known_rows = [row for row in group_rows if not self.samples[row].is_masked]
            if known_rows:
                compared_rows.append(known_rows)
            for row in group_rows:
                self.samples[row].advantage = 0.0
        metrics: dict[str, float] = {}
        if compared_rows:
            actor_critic = self.actor_critic
            compared, metrics = compare_rewards(
                self.settings,
                rewards_R,
                [[self.samples[row] for row in group] for group in compared_rows],
                compared_rows,
                actor_critic.custom_functions.advantages,
                actor_critic.role_baselines,
                actor_critic.optimizer_step.process_group,
            )
            for known_rows, advantages_G in zip(compared_rows, compared, strict=True):
                for row, advantage in zip(known_rows, advantages_G.tolist(), strict=True):
                    self.samples[row].advantage = advantage
            if self.settings.turn_credit is not None:
                metrics |= self._divide_among_turns(compared_rows, compared, penalty_RS)
        advantages_RS = torch.zeros(self.shape)
        for row, sample in enumerate(self.samples):
            assert sample.advantage is not None
            row_S = torch.full(self.shape[1:], sample.advantage, dtype=torch.float64)
            if sample.token_advantages is not None:
                start = len(sample.row.prompt_ids)
                row_S[start : start + len(sample.token_advantages)] = row_S.new_tensor(
                    sample.token_advantages
                )
            if self.settings.filter_threshold:
                # carries no loss and counts in no denominator
                self.host_mask_RS[row] &= row_S.abs() >= self.settings.filter_threshold
            mask_S = self.host_mask_RS[row]
            advantages_RS[row][mask_S] = row_S[mask_S].float()
        self.mask_RS = self.host_mask_RS.to(self.device, non_blocking=True)
        self.advantages_RS = advantages_RS.to(self.device, non_blocking=True)
        self._host_advantages_RS = advantages_RS
        return metrics

    def _divide_among_turns(
        self,
        rows: Sequence[Sequence[int]],
        advantages: Sequence[torch.Tensor],
        penalty_RS: torch.Tensor | None,
    ) -> dict[str, float]:
        """Set the advantages of the tokens of these groups by turn; return the metrics of the comparison."""
        settings = self.settings.turn_credit
        assert settings is not None
        penalty_RS = None if penalty_RS is None else penalty_RS.double().cpu()
        comparison = TurnComparison()
        for group_rows, advantages_G in zip(rows, advantages, strict=True):
            samples = [self.samples[row] for row in group_rows]
            penalties = None
            if penalty_RS is not None:
                penalties = [
                    penalty_RS[row, len(self.samples[row].row.prompt_ids) :] for row in group_rows
                ]
            by_token = estimate_token_advantages(
                advantages_G,
                [sample.turns for sample in samples],
                [len(sample.row.completion_ids) for sample in samples],
                settings,
                select_group_method(self.settings.algorithm),
                penalties,
                comparison,
            )
            for sample, token_advantages in zip(samples, by_token, strict=True):
                sample.token_advantages = token_advantages
        return comparison.compute_metrics()

    def _estimate_from_values(
        self, rewards_R: torch.Tensor, penalty_RS: torch.Tensor | None
    ) -> dict[str, float]:
        """Estimate advantages and returns of all loss tokens by GAE or V-trace; filtered tokens lose their mask.

        A row that is left out has no loss token, so its reward is not read.
        Returns: metrics over the loss tokens; {} if no token carries loss.
        """
        assert self.values_RS is not None and self.value_after_R is not None
        if not bool(self.host_mask_RS.any()):
            self.returns_RS = torch.zeros_like(self.advantages_RS)
            return {}
        ratios_RS = self._compute_trace_ratios()
        is_truncated_R = torch.tensor([s.is_truncated for s in self.samples], device=self.device)
        self.advantages_RS, self.returns_RS = compute_value_advantages(
            rewards_R.to(device=self.device, dtype=torch.float32),
            is_truncated_R,
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
        count = self.mask_RS.sum()
        returns_mean, values_mean = read_scalars(
            [
                masked_sum(self.returns_RS, self.mask_RS) / count,
                masked_sum(self.values_RS, self.mask_RS) / count,
            ]
        )
        metrics = {
            "value/explained_variance": explained_variance(
                self.values_RS, self.returns_RS, self.mask_RS
            ),
            "value/returns_mean": returns_mean,
            "value/values_mean": values_mean,
        }
        if ratios_RS is not None:
            weights_RS = ratios_RS.clamp(max=self.settings.weight_cap)
            metrics["policy/importance_mean"] = float(masked_sum(weights_RS, self.mask_RS) / count)
            size = effective_sample_size(weights_RS, self.mask_RS)
            metrics["policy/effective_sample_share"] = size / float(count)
        if self.settings.filter_threshold:
            self.mask_RS = self.mask_RS & (
                self.advantages_RS.abs() >= self.settings.filter_threshold
            )
            self.host_mask_RS = self.mask_RS.cpu()
            self.advantages_RS = fill_masked(self.advantages_RS, self.mask_RS)
        return metrics

    def _estimate_from_teacher(self) -> dict[str, float]:
        """Estimate advantages of a distillation: the contribution of each token (with a discount, of later ones too)
        to -KL.
        """
        student_RS = self._select_old_logprobs()
        assert self.teacher_logprobs_RS is not None
        self.advantages_RS = distillation_advantages(
            student_RS, self.teacher_logprobs_RS, self.mask_RS, gamma=self.settings.gamma
        )
        kl_sum = masked_sum(kl_k1(student_RS, self.teacher_logprobs_RS), self.mask_RS)
        return {"policy/teacher_kl": float(kl_sum / self.mask_RS.sum().clamp(min=1))}

    def _compute_trace_ratios(self) -> torch.Tensor | None:
        """Compute the ratio of the old policy to the sampler at each loss token, for V-trace; None = no V-trace."""
        if self.settings.importance != "vtrace":
            return None
        assert self.old_logprobs_RS is not None and self.sampler_logprobs_RS is not None
        return importance_ratios(self.old_logprobs_RS, self.sampler_logprobs_RS, self.mask_RS)
