"""Policy losses as plain sums over tokens, with thresholds of the ratio: those that remote clients ask for by name.

A request may be cut into parts at any place, so nothing here divides by a count: the gradient of the whole is the sum
of the gradients of its parts. Suffixes: B rows, T tokens. p current, q sampler's log-probabilities, r = exp(p - q).
"""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_inputs, fill_masked, masked_sum
from rl_core.losses.policy import LOG_RATIO_LIMIT, clipped_terms, policy_ratio

__all__ = [
    "importance_sampling_loss",
    "proximal_regression_loss",
    "summed_cispo_loss",
    "summed_gspo_loss",
    "summed_ppo_loss",
]


def importance_sampling_loss(
    logprobs_BT: torch.Tensor, sampler_logprobs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """L = -sum r A, without a clip.

    Args:
        logprobs_BT: float [B, T], nats, with gradient.
        sampler_logprobs_BT: float [B, T], nats, of the distribution that the tokens were drawn from.
        advantages_BT: float [B, T]. mask_BT: bool [B, T], True = token counts.
    Returns: scalar.
    Raises: DataError on shapes or non-finite values. log r is clamped to +-20.
    Source: Williams 1992, reweighted; as in the Tinker cookbook's tutorial on losses.
    """
    ratio_BT, advantages_BT = policy_ratio(logprobs_BT, sampler_logprobs_BT, advantages_BT, mask_BT)
    return -(ratio_BT * advantages_BT).sum()


def summed_ppo_loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    low_BT: torch.Tensor,
    high_BT: torch.Tensor,
) -> torch.Tensor:
    """L = -sum min(r A, clip(r, low, high) A).

    Args: as `importance_sampling_loss`; low_BT, high_BT: float [B, T], thresholds of the ratio,
        0 <= low <= high.
    Raises: DataError, also for such thresholds.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    _check_thresholds(mask_BT, low_BT, high_BT)
    ratio_BT, advantages_BT = policy_ratio(logprobs_BT, sampler_logprobs_BT, advantages_BT, mask_BT)
    return clipped_terms(ratio_BT, advantages_BT, low_BT, high_BT).sum()


def summed_cispo_loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    low_BT: torch.Tensor,
    high_BT: torch.Tensor,
) -> torch.Tensor:
    """L = -sum stopgrad(clip(r, low, high)) A p; no token loses its gradient.

    Args, Raises: as `summed_ppo_loss`.
    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    _check_thresholds(mask_BT, low_BT, high_BT)
    ratio_BT, advantages_BT = policy_ratio(logprobs_BT, sampler_logprobs_BT, advantages_BT, mask_BT)
    weights_BT = torch.clamp(ratio_BT.detach(), low_BT, high_BT)
    return -(weights_BT * advantages_BT * fill_masked(logprobs_BT, mask_BT)).sum()


def proximal_regression_loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    beta: float,
) -> torch.Tensor:
    """L = -sum (A p - beta / 2 (p - q)^2), called dro by clients: a policy gradient held near the sampler.

    Args, Raises: as `importance_sampling_loss`; DataError for beta below 0.
    Source: Richemond et al. 2024, arXiv:2405.19107 (direct reward optimisation), per token.
    """
    if beta < 0:
        raise DataError(f"beta: {beta} must be at least 0")
    check_inputs(mask_BT, logprobs=logprobs_BT, sampler_logprobs=sampler_logprobs_BT, advantages=advantages_BT)
    move_BT = logprobs_BT - sampler_logprobs_BT.detach()
    return -masked_sum(advantages_BT.detach() * logprobs_BT - 0.5 * beta * move_BT.square(), mask_BT)


def summed_gspo_loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    ratio_mask_BT: torch.Tensor,
    low_BT: torch.Tensor,
    high_BT: torch.Tensor,
) -> torch.Tensor:
    """L = -sum min(s A, clip(s, low, high) A), s = exp(mean of p - q over the row's tokens of `ratio_mask_BT`).

    Args: as `summed_ppo_loss`; ratio_mask_BT: bool [B, T], the tokens that form a row's ratio. A row without any has
        ratio 1 and no gradient.
    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7; summed over tokens, so a row counts by its length.
    """
    _check_thresholds(mask_BT, low_BT, high_BT)
    check_inputs(mask_BT, logprobs=logprobs_BT, sampler_logprobs=sampler_logprobs_BT, advantages=advantages_BT)
    moves_BT = fill_masked(logprobs_BT - sampler_logprobs_BT.detach(), ratio_mask_BT & mask_BT)
    counts_B = (ratio_mask_BT & mask_BT).sum(1).clamp(min=1)
    ratio_B = (moves_BT.sum(1) / counts_B).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ratio_BT = ratio_B[:, None].expand_as(moves_BT)
    return clipped_terms(ratio_BT, fill_masked(advantages_BT.detach(), mask_BT), low_BT, high_BT).sum()


def _check_thresholds(mask_BT: torch.Tensor, low_BT: torch.Tensor, high_BT: torch.Tensor) -> None:
    check_inputs(mask_BT, clip_low_threshold=low_BT, clip_high_threshold=high_BT)
    if bool((mask_BT & ((low_BT < 0) | (high_BT < low_BT))).any()):
        raise DataError("thresholds of the ratio: 0 <= clip_low_threshold <= clip_high_threshold must hold")
