"""Policy loss of a micro-batch per algorithm, importance weights, agreement with the sampler, KL controller.

Suffixes: B rows, S whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_core.losses.aggregation import token_weights
from rl_core.losses.importance import importance_mask, truncated_importance_weights
from rl_core.losses.kl import adaptive_kl_coef, banded_kl_coef, kl_k1, kl_k3
from rl_core.losses.masking import masked_max, masked_sum
from rl_core.losses.policy import (
    cispo_loss,
    clipped_policy_loss,
    dppo_loss,
    gspo_loss,
    reinforce_loss,
    sapo_loss,
)
from rl_core.settings import PolicySettings
from rl_core.trainers.policy_gradient.custom_functions import CustomLoss

Metrics = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LossDenominators:
    """Denominators of one optimizer step. Rows of advantage 0 count but need not be run, as they contribute nothing."""

    num_loss_tokens: float  # tokens that count in the loss
    num_forward_tokens: (
        float  # those of them that run through the model; metrics are means over them
    )
    num_sequences: float  # rows with loss tokens that count
    num_forward_sequences: float
    num_rollouts: float = (
        0  # rows of the step, including filtered ones, without those that have no reward
    )


def compute_token_weights(
    settings: PolicySettings,
    loss_mask_BS: torch.Tensor,
    counts: LossDenominators,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the weight of each token in policy loss, KL and entropy terms [B, S], by the settings' aggregation.

    The denominator of `constant` counts every rollout of the step, including filtered and short ones.
    """
    denominators = {
        "token_mean": counts.num_loss_tokens,
        "sequence_mean": counts.num_sequences,
        "constant": counts.num_rollouts * settings.sampling.max_completion_tokens,
    }
    return token_weights(
        loss_mask_BS,
        aggregation=settings.aggregation,
        denominator=denominators[settings.aggregation],
        dtype=torch.promote_types(dtype, torch.float32),
    )


def compute_policy_loss(
    settings: PolicySettings,
    logprobs_BS: torch.Tensor,
    old_logprobs_BS: torch.Tensor,
    advantages_BS: torch.Tensor,
    loss_mask_BS: torch.Tensor,
    counts: LossDenominators,
    *,
    sampler_logprobs_BS: torch.Tensor | None = None,
    divergence_BS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the algorithm's loss, aggregated over the step, and its metrics per token that was run.

    grpo, dr_grpo, dapo, maxrl, gdpo, rloo, ppo use `clipped_policy_loss`; the others their own functions.
    Args: as `clipped_policy_loss`; gspo takes each row's mean advantage over its loss tokens.
        sampler_logprobs_BS: of the policy that sampled, for dppo; None = the old policy sampled.
        divergence_BS: for dppo; None = that of the sampled tokens.
    Returns: scalar loss with gradient; {"loss", "update_kl" (k3) and "update_kl_k1" of KL(old || new), and, if the
        algorithm has a ratio, "ratio_mean", "ratio_max", "clip_fraction"...}.
    """
    low, high = settings.clip
    tensors = (logprobs_BS, old_logprobs_BS, advantages_BS, loss_mask_BS)
    weights_BS = compute_token_weights(settings, loss_mask_BS, counts, logprobs_BS.dtype)
    count = counts.num_forward_tokens
    if settings.algorithm == "gspo":
        lengths_B = loss_mask_BS.sum(1).clamp(min=1)
        advantages_B = torch.where(loss_mask_BS, advantages_BS, 0.0).sum(1) / lengths_B
        loss, metrics = gspo_loss(
            logprobs_BS,
            old_logprobs_BS,
            advantages_B,
            loss_mask_BS,
            num_sequences=counts.num_forward_sequences,
            clip_eps=low,
            clip_eps_high=high,
            loss_weights_BT=weights_BS,
        )
    elif settings.algorithm == "cispo":
        loss, metrics = cispo_loss(
            *tensors, num_loss_tokens=count, clip_eps_high=high, loss_weights_BT=weights_BS
        )
    elif settings.algorithm == "sapo":
        loss, metrics = sapo_loss(
            *tensors,
            num_loss_tokens=count,
            tau_positive=settings.sapo_tau_positive,
            tau_negative=settings.sapo_tau_negative,
            loss_weights_BT=weights_BS,
        )
    elif settings.algorithm == "dppo":
        anchor_BS = old_logprobs_BS if sampler_logprobs_BS is None else sampler_logprobs_BS
        loss, metrics = dppo_loss(
            logprobs_BS,
            anchor_BS.to(logprobs_BS.dtype),
            advantages_BS,
            loss_mask_BS,
            num_loss_tokens=count,
            threshold=low,
            threshold_high=high,
            kind=settings.divergence_kind,
            divergence_BT=divergence_BS,
            loss_weights_BT=weights_BS,
        )
    elif settings.algorithm == "reinforce":
        loss, metrics = reinforce_loss(
            logprobs_BS,
            advantages_BS,
            loss_mask_BS,
            num_loss_tokens=count,
            loss_weights_BT=weights_BS,
        )
    else:
        loss, metrics = clipped_policy_loss(
            *tensors,
            num_loss_tokens=count,
            clip_eps=low,
            clip_eps_high=high,
            dual_clip=settings.dual_clip,
            loss_weights_BT=weights_BS,
        )
    return loss, metrics | measure_policy_kl(logprobs_BS, old_logprobs_BS, loss_mask_BS, count)


def compute_custom_policy_loss(
    custom_loss: CustomLoss,
    settings: PolicySettings,
    logprobs_BS: torch.Tensor,
    old_logprobs_BS: torch.Tensor,
    advantages_BS: torch.Tensor,
    loss_mask_BS: torch.Tensor,
    counts: LossDenominators,
    importance_BS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the user's loss instead of the algorithm's; arguments and result as `compute_policy_loss`.

    Importance weights multiply the weights of the tokens' losses, as a custom loss may use advantages in any way.
    """
    weights_BS = compute_token_weights(settings, loss_mask_BS, counts, logprobs_BS.dtype)
    count = counts.num_forward_tokens
    if importance_BS is not None:
        weights_BS = weights_BS * importance_BS
    loss, metrics = custom_loss(
        logprobs_BS,
        old_logprobs_BS,
        advantages_BS,
        loss_mask_BS,
        num_loss_tokens=count,
        loss_weights_BT=weights_BS,
    )
    return loss, metrics | measure_policy_kl(logprobs_BS, old_logprobs_BS, loss_mask_BS, count)


def compute_importance_weights(
    settings: PolicySettings,
    logprobs_BS: torch.Tensor,
    old_logprobs_BS: torch.Tensor,
    sampler_logprobs_BS: torch.Tensor,
    mask_BS: torch.Tensor,
) -> torch.Tensor | None:
    """Compute importance weights [B, S] over the sampler, truncated, 0 where `importance_mask` drops; None = all 1.

    They are weights of the old policy, because the loss contains the ratio of the current policy to it; of the current
    policy for reinforce, whose loss has no ratio. V-trace's weights are already part of the advantages. Weights are
    never negative, so multiplying the advantages by them multiplies every loss.
    """
    target_BS = old_logprobs_BS
    if settings.algorithm == "reinforce" and settings.loss is None:
        target_BS = logprobs_BS.detach()
    pair = (target_BS, sampler_logprobs_BS, mask_BS)
    weights_BS = None
    if settings.importance != "none" and settings.importance != "vtrace":
        weights_BS = truncated_importance_weights(
            *pair, level=settings.importance, cap=settings.weight_cap
        )
    if settings.importance_mask != "none":
        selected_BS = importance_mask(
            *pair,
            level=settings.importance_mask,
            low=settings.importance_low,
            high=settings.importance_high,
        ).to(target_BS.dtype)
        weights_BS = selected_BS if weights_BS is None else weights_BS * selected_BS
    return weights_BS


@torch.no_grad()
def measure_sampler_agreement(
    sampler_logprobs_BS: torch.Tensor,
    old_logprobs_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    count: float,
) -> Metrics:
    """Return KL(sampler || old policy) per token (k3) and the largest difference of log-probs, in nats."""
    difference_BS = (sampler_logprobs_BS - old_logprobs_BS).abs()
    return {
        "sampler_kl": masked_sum(kl_k3(sampler_logprobs_BS, old_logprobs_BS), mask_BS) / count,
        "sampler_difference_max": masked_max(difference_BS, mask_BS),
    }


@torch.no_grad()
def measure_policy_kl(
    logprobs_BS: torch.Tensor, old_logprobs_BS: torch.Tensor, mask_BS: torch.Tensor, count: float
) -> Metrics:
    """Return KL(old || new) per token at the sampled tokens, by k3 and k1."""
    return {
        "update_kl": masked_sum(kl_k3(old_logprobs_BS, logprobs_BS), mask_BS) / count,
        "update_kl_k1": masked_sum(kl_k1(old_logprobs_BS, logprobs_BS), mask_BS) / count,
    }


def compute_next_kl_coef(settings: PolicySettings, kl_coef: float, kl: float) -> float:
    """Return the weight of the KL term after an iteration, moved towards the value at which the KL is kl_target.

    Args:
        kl: measured KL to the reference, nats per token.
    """
    if settings.kl_controller == "fixed":
        return kl_coef
    if settings.kl_controller == "banded":
        band = settings.kl_band
        return banded_kl_coef(
            kl_coef,
            kl,
            target=settings.kl_target,
            tolerance=band.width * settings.kl_target,
            increase_factor=band.increase,
            decrease_factor=band.decrease,
            minimum=band.minimum,
            maximum=band.maximum,
        )
    num_samples = settings.prompts_per_iteration * settings.group_size
    return adaptive_kl_coef(
        kl_coef, kl, target=settings.kl_target, horizon=settings.kl_horizon, num_samples=num_samples
    )
