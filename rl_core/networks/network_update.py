"""Update of an actor-critic: epochs x minibatches of PPO on the steps of its buffers.

Suffixes: M rows, D numbers of an observation, A actions or numbers of an action. Losses take columns: M1 is [M, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_core.losses.importance import importance_ratios
from rl_core.losses.masking import build_full_mask, masked_whiten
from rl_core.losses.policy import clipped_policy_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.losses.value import explained_variance, value_loss
from rl_core.networks.actor_critic import ActorCritic
from rl_core.networks.fused_loss import LossOptions, NetworkArrays, compute_fused_loss
from rl_core.networks.step_buffer import BATCH_FIELDS, NetworkBatch, RewardStatistics, StepBuffer
from rl_core.rollouts.rollout_metrics import aggregate_step_metrics
from rl_core.settings import NetworkSettings
from rl_core.timing import span
from rl_core.training.optimizer_step import Loss, OptimizerStep
from rl_core.training.optimizers import adapt_learning_rate_scale

WHITENING_EPSILON = 1e-8
MIN_CLIP_EPS = 1e-6  # a clip range must be above 0


class NetworkUpdate:
    """One iteration's optimizer steps on the steps of the buffers.

    L = clipped policy loss + value_coef value loss - entropy_coef entropy, each a mean over the rows of the step.
    """

    def __init__(
        self,
        model: ActorCritic,
        optimizer_step: OptimizerStep,
        settings: NetworkSettings,
        buffers: Sequence[StepBuffer],
        reward_statistics: RewardStatistics | None = None,
    ) -> None:
        """Store the parts.

        Args:
            buffers: of this iteration first, then of earlier ones (`replay`).
            reward_statistics: normalise the rewards; None = they stay as they are.
        """
        self.model = model
        self.optimizer_step = optimizer_step
        self.settings = settings
        self.buffers = buffers
        self.reward_statistics = reward_statistics
        self.clip_eps = compute_clip_eps(
            settings, optimizer_step.num_steps, optimizer_step.total_steps
        )
        self._arrays = NetworkArrays(model)
        self._entropies: list[torch.Tensor] = []  # of the policy before the first optimizer step
        self.num_rows = 1  # of the current optimizer step, the denominator of its losses
        self._mask_M1: torch.Tensor | None = None  # of the newest micro-batch; most are of one size

    def run_update(self, rng: np.random.Generator) -> dict[str, float]:
        """Run all optimizer steps; metrics are means over them (`_max`: the largest)."""
        settings = self.settings
        with span("measure"):
            rows = self._build_rows()
        metrics = self._compute_metrics(rows)
        rows.observations_MD = self.model.normalised(rows.observations_MD)
        if settings.normalise_advantages == "iteration" or self._is_one_minibatch:
            rows.advantages_M1 = whiten_advantages(rows.advantages_M1)
        step_metrics: list[dict[str, float]] = []
        for _ in range(settings.epochs):
            minibatches = self._split_into_minibatches(rows, rng)
            step_metrics += [self._run_optimizer_step(minibatch) for minibatch in minibatches]
        metrics |= aggregate_step_metrics(step_metrics)
        if settings.clip_schedule != "constant":
            metrics["train/clip_eps"] = self.clip_eps
        metrics["train/skipped_steps"] = float(self.optimizer_step.skipped_steps)
        if settings.desired_kl is not None:
            last_pass = aggregate_step_metrics(step_metrics[-settings.minibatches :])
            self._adapt_learning_rate(last_pass.get("policy/update_kl"))
        return metrics

    def _build_rows(self) -> NetworkBatch:
        """Compute old log-probs, values, advantages and targets of every buffer's steps, under the current model."""
        batches = [self._build_buffer_rows(buffer) for buffer in self.buffers]
        return NetworkBatch(
            *(torch.cat([getattr(batch, name) for batch in batches]) for name in BATCH_FIELDS)
        )

    @torch.no_grad()
    def _build_buffer_rows(self, buffer: StepBuffer) -> NetworkBatch:
        settings = self.settings
        observations_MD = buffer.read_real_steps("observations")
        actions = buffer.read_real_steps("actions")
        inputs_MD = self.model.normalised(observations_MD)
        logprobs_M, entropy_M = self.model.policy.logprobs_and_entropy(inputs_MD, actions)
        self._entropies.append(entropy_M)
        ratios_M = None
        if settings.advantages == "vtrace":
            behaviour_M1 = buffer.behaviour_logprobs_M[:, None]
            mask_M1 = torch.ones_like(behaviour_M1, dtype=torch.bool)
            ratios_M = importance_ratios(logprobs_M[:, None], behaviour_M1, mask_M1)[:, 0]
        advantages_M, targets_M, values_M = buffer.estimate_advantages(
            self.model.values,
            gamma=settings.gamma,
            trace_lambda=settings.gae_lambda,
            reward_scale=settings.reward_scale,
            reward_statistics=self.reward_statistics,
            ratios_M=ratios_M,
            rho_cap=settings.vtrace_rho,
            c_cap=settings.vtrace_c,
        )
        columns = (x_M[:, None] for x_M in (logprobs_M, advantages_M, targets_M, values_M))
        return NetworkBatch(observations_MD, actions, *columns)

    def _compute_metrics(self, rows: NetworkBatch) -> dict[str, float]:
        mask_M1 = build_full_mask(len(rows.advantages_M1), 1)
        metrics = {
            "train/advantages_mean": float(rows.advantages_M1.mean()),
            "train/advantages_std": float(rows.advantages_M1.std(correction=0)),
            "policy/entropy": float(torch.cat(self._entropies).mean()),
            "value/explained_variance": explained_variance(
                rows.values_M1, rows.targets_M1, mask_M1
            ),
        }
        if len(self.buffers) > 1:
            num_replayed = len(rows.advantages_M1) - self.buffers[0].num_steps
            metrics["train/replayed_steps"] = float(num_replayed)
        return metrics

    def _split_into_minibatches(
        self, rows: NetworkBatch, rng: np.random.Generator
    ) -> list[NetworkBatch]:
        """Split the rows into the optimizer steps of one pass, in random order; in order if there is a single step."""
        if self.settings.minibatches == 1:
            return [rows]
        count = min(self.settings.minibatches, len(rows.advantages_M1))
        minibatches = rows.split_into_minibatches(count, rng)
        if self.settings.normalise_advantages == "minibatch":
            for minibatch in minibatches:
                minibatch.advantages_M1 = whiten_advantages(minibatch.advantages_M1)
        return minibatches

    @property
    def _is_one_minibatch(self) -> bool:
        """True if advantages are normalised over an optimizer step's rows, equal at every step."""
        return self.settings.normalise_advantages == "minibatch" and self.settings.minibatches == 1

    def _run_optimizer_step(self, rows: NetworkBatch) -> dict[str, float]:
        """Run one optimizer step on these rows."""
        self.num_rows = len(rows.advantages_M1)
        size = self.settings.micro_batch_tokens
        if self.num_rows <= size:
            return self.optimizer_step.run_step([rows], self.compute_loss)
        batches = [
            rows.select_rows(slice(start, start + size)) for start in range(0, self.num_rows, size)
        ]
        return self.optimizer_step.run_step(batches, self.compute_loss)

    def compute_loss(self, batch: NetworkBatch) -> tuple[Loss, dict[str, Any]]:
        """Compute the loss of one micro-batch over the rows of the optimizer step; metrics are per row.

        Args:
            batch: with normalised observations, as in `compose_loss`.
        """
        settings = self.settings
        options = LossOptions(
            self.num_rows,
            self.clip_eps,
            settings.value_clip_eps,
            settings.value_coef,
            settings.entropy_coef,
        )
        fused = compute_fused_loss(self._arrays, batch, options)
        return self.compose_loss(batch) if fused is None else fused

    def compose_loss(self, batch: NetworkBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the same loss from `rl_core.losses`, which name the tensor that is not finite."""
        settings, count = self.settings, self.num_rows
        outputs_MA = self.model.policy(batch.observations_MD)
        values_M1 = self.model.value(batch.observations_MD)[:, None]
        logprobs_M1 = self.model.policy.logprob_column(outputs_MA, batch.actions)
        if self._mask_M1 is None or len(self._mask_M1) != len(logprobs_M1):
            self._mask_M1 = build_full_mask(len(logprobs_M1), 1)
        mask_M1 = self._mask_M1
        policy, policy_metrics = clipped_policy_loss(
            logprobs_M1,
            batch.old_logprobs_M1,
            batch.advantages_M1,
            mask_M1,
            num_loss_tokens=count,
            clip_eps=self.clip_eps,
        )
        value, value_metrics = value_loss(
            values_M1,
            batch.targets_M1,
            mask_M1,
            num_loss_tokens=count,
            old_values_BT=batch.values_M1 if settings.value_clip_eps is not None else None,
            value_clip_eps=settings.value_clip_eps,
        )
        loss = policy + (value if settings.value_coef == 1 else settings.value_coef * value)
        if settings.entropy_coef > 0:
            entropy_M = self.model.policy.entropy_of(outputs_MA)
            bonus, entropy_metrics = entropy_bonus(
                entropy_M[:, None], mask_M1, num_loss_tokens=count
            )
            loss = loss + settings.entropy_coef * bonus
            policy_metrics |= entropy_metrics
        metrics = {f"policy/{name}": number for name, number in policy_metrics.items()}
        return loss, metrics | {f"value/{name}": number for name, number in value_metrics.items()}

    def _adapt_learning_rate(self, kl: float | None) -> None:
        """Adapt the learning rate to the KL of the iteration's last pass; None = every step of it was skipped."""
        settings, optimizer_step = self.settings, self.optimizer_step
        assert settings.desired_kl is not None
        if kl is not None:
            optimizer_step.learning_rate_scale = adapt_learning_rate_scale(
                optimizer_step.learning_rate_scale,
                kl,
                target=settings.desired_kl,
                factor=settings.learning_rate_factor,
                low=settings.learning_rate_low / settings.learning_rate,
                high=settings.learning_rate_high / settings.learning_rate,
            )


def compute_clip_eps(settings: NetworkSettings, step: int, total_steps: int) -> float:
    """Compute the clip range of the iteration whose first optimizer step is number `step` (0 = the first).

    linear: falls from clip_eps towards min_clip_ratio * clip_eps, which it would reach at step `total_steps`.
    """
    if settings.clip_schedule == "constant":
        return settings.clip_eps
    left = 1.0 - min(1.0, step / max(1, total_steps))
    ratio = settings.min_clip_ratio
    return max(settings.clip_eps * (ratio + (1.0 - ratio) * left), MIN_CLIP_EPS)


def compute_policy_logprobs(
    model: ActorCritic, observations_MD: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    """Compute log-probabilities of the actions under the current policy, nats, [M], without gradient."""
    with torch.no_grad():
        inputs_MD = model.normalised(observations_MD)
        return model.policy.logprobs_and_entropy(inputs_MD, actions)[0]


def whiten_advantages(advantages_M1: torch.Tensor) -> torch.Tensor:
    """Scale advantages to mean 0 and variance 1, as `masked_whiten`. Raises: NonFiniteTensor, DataError."""
    values_M1 = advantages_M1.numpy()
    centered_M1 = values_M1 - values_M1.mean()
    squares = float(np.vdot(centered_M1, centered_M1))
    if len(values_M1) < 2 or not math.isfinite(squares):
        return masked_whiten(advantages_M1, build_full_mask(len(advantages_M1), 1))
    scale = 1.0 / math.sqrt(squares / (len(values_M1) - 1) + WHITENING_EPSILON)
    return torch.from_numpy(centered_M1 * np.float32(scale))
