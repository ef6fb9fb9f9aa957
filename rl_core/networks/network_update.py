"""Update of an actor-critic on the steps of an iteration: epochs x minibatches of PPO's loss.

Suffixes: M rows, D numbers of an observation. Losses take columns: M1 is [M, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.errors import DataError
from rl_core.losses.importance import importance_ratios
from rl_core.losses.masking import full_mask, masked_whiten
from rl_core.losses.policy import clipped_policy_loss
from rl_core.losses.supervised import entropy_bonus
from rl_core.losses.value import explained_variance, value_loss
from rl_core.networks.actor_critic import ActorCritic
from rl_core.networks.step_buffer import StepBuffer
from rl_core.rollouts.rollout_metrics import mean_metrics
from rl_core.settings import NetworkSettings
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep

__all__ = ["NetworkBatch", "NetworkUpdate", "adapted_rate_scale", "policy_logprobs"]


@dataclass
class NetworkBatch:
    """Rows of a micro-batch."""

    observations_MD: torch.Tensor  # as the environment gave them
    actions: torch.Tensor  # int64 [M], or float [M, A]
    old_logprobs_M1: torch.Tensor  # of the policy before the first optimizer step, nats
    advantages_M1: torch.Tensor
    targets_M1: torch.Tensor  # of the value network
    values_M1: torch.Tensor  # of the value network before the first optimizer step

    def rows(self, index: torch.Tensor | slice) -> NetworkBatch:
        """Some of the rows."""
        return NetworkBatch(*(getattr(self, name)[index] for name in NAMES))


NAMES = tuple(field.name for field in dataclasses.fields(NetworkBatch))


class NetworkUpdate:
    """One iteration's optimizer steps on the buffers' steps.

    L = clipped policy loss + value_coef value loss - entropy_coef entropy, each a mean over the rows of the step.
    """

    def __init__(
        self,
        model: ActorCritic,
        optimizer_step: OptimizerStep,
        settings: NetworkSettings,
        buffers: Sequence[StepBuffer],
    ) -> None:
        """`buffers`: of this iteration first, then of earlier ones (`replay`)."""
        self.model = model
        self.optimizer_step = optimizer_step
        self.settings = settings
        self.buffers = buffers
        self._entropies: list[torch.Tensor] = []  # of the policy before the first optimizer step
        self.num_rows = 1  # of the current optimizer step, the denominator of its losses
        self._mask_M1: torch.Tensor | None = None  # of the newest micro-batch; most are of one size

    def run(self, rng: np.random.Generator) -> dict[str, float]:
        """All optimizer steps; metrics are means over them (`_max`: the largest)."""
        settings = self.settings
        with span("measure"):
            rows = self._rows()
        metrics = self._metrics(rows)
        if settings.normalise_advantages == "iteration" or self._is_one_minibatch:
            rows.advantages_M1 = whitened(rows.advantages_M1)
        parts: list[dict[str, float]] = []
        for _ in range(settings.epochs):
            parts += [self._step(minibatch) for minibatch in self._minibatches(rows, rng)]
        metrics |= mean_metrics(parts)
        metrics["train/skipped_steps"] = float(self.optimizer_step.skipped_steps)
        if settings.kl_target is not None:
            last = mean_metrics(parts[-settings.minibatches :])
            self._adapt(last.get("policy/update_kl"))
        return metrics

    def _rows(self) -> NetworkBatch:
        """Old log-probs, values, advantages and targets of every buffer's steps, under the model as it is."""
        found = [self._rows_of(buffer) for buffer in self.buffers]
        return NetworkBatch(*(torch.cat([getattr(part, name) for part in found]) for name in NAMES))

    @torch.no_grad()
    def _rows_of(self, buffer: StepBuffer) -> NetworkBatch:
        settings = self.settings
        observations_MD, actions = buffer.flat("observations"), buffer.flat("actions")
        seen_MD = self.model.normalised(observations_MD)
        logprobs_M, entropy_M = self.model.policy.logprobs_and_entropy(seen_MD, actions)
        self._entropies.append(entropy_M)
        ratios_M = None
        if settings.advantages == "vtrace":
            behaviour_M1 = buffer.behaviour_logprobs_M[:, None]
            everything_M1 = torch.ones_like(behaviour_M1, dtype=torch.bool)
            ratios_M = importance_ratios(logprobs_M[:, None], behaviour_M1, everything_M1)[:, 0]
        advantages_M, targets_M, values_M = buffer.estimate(
            self.model.values, gamma=settings.gamma, trace_lambda=settings.gae_lambda,
            reward_scale=settings.reward_scale, ratios_M=ratios_M, rho_cap=settings.vtrace_rho, c_cap=settings.vtrace_c,
        )  # fmt: skip
        columns = (found[:, None] for found in (logprobs_M, advantages_M, targets_M, values_M))
        return NetworkBatch(observations_MD, actions, *columns)

    def _metrics(self, rows: NetworkBatch) -> dict[str, float]:
        everything_M1 = full_mask(len(rows.advantages_M1), 1)
        metrics = {
            "train/advantages_mean": float(rows.advantages_M1.mean()),
            "train/advantages_std": float(rows.advantages_M1.std(correction=0)),
            "policy/entropy": float(torch.cat(self._entropies).mean()),
            "value/explained_variance": explained_variance(rows.values_M1, rows.targets_M1, everything_M1),
        }
        if len(self.buffers) > 1:
            metrics["train/replayed_steps"] = float(len(rows.advantages_M1) - self.buffers[0].num_steps)
        return metrics

    def _minibatches(self, rows: NetworkBatch, rng: np.random.Generator) -> list[NetworkBatch]:
        """Rows of each optimizer step of one pass, in random order; in order if there is a single step."""
        if self.settings.minibatches == 1:
            return [rows]
        order = torch.from_numpy(rng.permutation(len(rows.advantages_M1)))
        found = [rows.rows(index) for index in order.tensor_split(self.settings.minibatches) if len(index)]
        if self.settings.normalise_advantages == "minibatch":
            for minibatch in found:
                minibatch.advantages_M1 = whitened(minibatch.advantages_M1)
        return found

    @property
    def _is_one_minibatch(self) -> bool:
        """True = advantages are normalised over an optimizer step's rows, which are the same at every step."""
        return self.settings.normalise_advantages == "minibatch" and self.settings.minibatches == 1

    def _step(self, rows: NetworkBatch) -> dict[str, float]:
        """One optimizer step on these rows."""
        self.num_rows = len(rows.advantages_M1)
        size = self.settings.micro_batch_tokens
        if self.num_rows <= size:
            return self.optimizer_step.apply([rows], self.loss)
        batches = [rows.rows(slice(start, start + size)) for start in range(0, self.num_rows, size)]
        return self.optimizer_step.apply(batches, self.loss)

    def loss(self, batch: NetworkBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss of one micro-batch over the rows of the optimizer step; metrics per row."""
        settings, count = self.settings, self.num_rows
        outputs_MA, values_M1 = self.model.outputs_and_values(batch.observations_MD)
        logprobs_M1 = self.model.policy.logprob_column(outputs_MA, batch.actions)
        if self._mask_M1 is None or len(self._mask_M1) != len(logprobs_M1):
            self._mask_M1 = full_mask(len(logprobs_M1), 1)
        mask_M1 = self._mask_M1
        policy, parts = clipped_policy_loss(
            logprobs_M1, batch.old_logprobs_M1, batch.advantages_M1, mask_M1, num_loss_tokens=count,
            clip_eps=settings.clip_eps,
        )  # fmt: skip
        value, value_parts = value_loss(
            values_M1, batch.targets_M1, mask_M1, num_loss_tokens=count,
            old_values_BT=batch.values_M1 if settings.value_clip_eps is not None else None,
            value_clip_eps=settings.value_clip_eps,
        )  # fmt: skip
        loss = policy + (value if settings.value_coef == 1 else settings.value_coef * value)
        if settings.entropy_coef > 0:
            entropy_M = self.model.policy.entropy_of(outputs_MA)
            bonus, entropy = entropy_bonus(entropy_M[:, None], mask_M1, num_loss_tokens=count)
            loss = loss + settings.entropy_coef * bonus
            parts |= entropy
        metrics = {f"policy/{name}": number for name, number in parts.items()}
        return loss, metrics | {f"value/{name}": number for name, number in value_parts.items()}

    def _adapt(self, kl: float | None) -> None:
        """Adapt the learning rate to the KL of the iteration's last pass; None = every step of it was skipped."""
        settings, optimizer_step = self.settings, self.optimizer_step
        assert settings.kl_target is not None
        if kl is not None:
            optimizer_step.learning_rate_scale = adapted_rate_scale(
                optimizer_step.learning_rate_scale, kl, target=settings.kl_target, factor=settings.kl_factor,
                low=settings.learning_rate_low / settings.learning_rate,
                high=settings.learning_rate_high / settings.learning_rate,
            )  # fmt: skip


def adapted_rate_scale(scale: float, kl: float, *, target: float, factor: float, low: float, high: float) -> float:
    """Scale of the learning rate after an iteration: over `factor` if kl > 2 target, times it if kl < target / 2.

    Args:
        kl: KL(old || new), nats per action; an estimate may be slightly negative.
        low, high: limits of the scale.
    Raises: DataError for a KL that is not finite, or limits that exclude one another.
    Source: Rudin et al. 2021, arXiv:2109.11978, appendix A.5 (adaptive learning rate).
    """
    if not np.isfinite(kl) or not 0 < low <= high or target <= 0 or factor <= 1:
        raise DataError(f"kl {kl}, limits {low} to {high}, target {target} or factor {factor} is out of range")
    if kl > 2 * target:
        scale = scale / factor
    elif kl < target / 2:
        scale = scale * factor
    return min(max(scale, low), high)


def policy_logprobs(model: ActorCritic, observations_MD: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the actions under the present policy, nats, [M]; no gradient."""
    with torch.no_grad():
        return model.policy.logprobs_and_entropy(model.normalised(observations_MD), actions)[0]


def whitened(advantages_M1: torch.Tensor) -> torch.Tensor:
    """Advantages of mean 0 and variance 1."""
    return masked_whiten(advantages_M1, full_mask(len(advantages_M1), 1))
