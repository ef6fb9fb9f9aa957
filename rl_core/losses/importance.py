"""Importance weights for off-policy samples (stale or replayed rollouts, numerically different samplers).

Suffixes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_count, check_inputs, fill_masked, masked_sum

ImportanceLevel = Literal["token", "sequence", "geometric"]
LOG_WEIGHT_LIMIT = 20.0


def importance_ratios(
    logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    level: ImportanceLevel = "token",
) -> torch.Tensor:
    """Compute the ratio pi / mu without gradient, its logarithm clamped to +-20.

    token: the ratio of each token. sequence: the product over a row's loss tokens. geometric: the geometric mean over a
    row's loss tokens, which does not grow with length. The last two are equal at all tokens of a row.

    Args:
        logprobs_BT: float [B, T], nats, log pi of the trained policy.
        behavior_logprobs_BT: float [B, T], nats, log mu of the sampling policy.
    Returns: float [B, T], 0 where the mask is False.
    Raises: DataError on shapes, non-finite values, or an unknown level.
    Source: the geometric mean as in GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7.
    """
    check_inputs(loss_mask_BT, logprobs=logprobs_BT, behavior_logprobs=behavior_logprobs_BT)
    if level not in ("token", "sequence", "geometric"):
        raise DataError(f"level: '{level}' must be token, sequence or geometric")
    log_ratios_BT = fill_masked((logprobs_BT - behavior_logprobs_BT).detach(), loss_mask_BT)
    if level != "token":
        log_ratio_B1 = log_ratios_BT.sum(-1, keepdim=True)
        if level == "geometric":
            log_ratio_B1 = log_ratio_B1 / loss_mask_BT.sum(-1, keepdim=True).clamp(min=1)
        log_ratios_BT = log_ratio_B1.expand_as(log_ratios_BT)
    return fill_masked(log_ratios_BT.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp(), loss_mask_BT)


def truncated_importance_weights(
    logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    level: ImportanceLevel = "token",
    cap: float = 2.0,
) -> torch.Tensor:
    """Compute min(ratio, cap) without gradient; the ratio is that of `importance_ratios`.

    Args:
        cap: at least 1; the truncation trades variance for bias towards mu.
        others, Raises: as `importance_ratios`; DataError also for a cap below 1.
    Returns: float [B, T], 0 where the mask is False; multiply into token losses.
    Source: Ionides 2008, "Truncated importance sampling"; Espeholt et al. 2018, arXiv:1802.01561 (token level).
    """
    if cap < 1:
        raise DataError(f"cap: {cap} must be at least 1")
    return importance_ratios(logprobs_BT, behavior_logprobs_BT, loss_mask_BT, level=level).clamp(
        max=cap
    )


def importance_mask(
    logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    level: ImportanceLevel,
    low: float,
    high: float,
) -> torch.Tensor:
    """Select the tokens whose ratio (`importance_ratios`) lies in [low, high].

    At the levels of sequences, whole rows are selected. Tokens outside the interval lose their policy gradient but stay
    in every denominator, as in TRL, NeMo-RL and OpenRLHF (verl divides by the selected tokens only), so that masking
    never enlarges the step of the other tokens.

    Args:
        low, high: 0 <= low < 1 < high.
        others, Raises: as `importance_ratios`; DataError also for limits out of range.
    Returns: bool [B, T], True = selected; False where the mask is False.
    Source: Ling Team 2025, arXiv:2510.18855 (IcePop, tokens); Liu, Li et al. 2025, "When Speed Kills Stability"
        (sequences and geometric means).
    """
    if not 0 <= low < 1 < high:
        raise DataError(f"low {low} and high {high} must satisfy 0 <= low < 1 < high")
    ratios_BT = importance_ratios(logprobs_BT, behavior_logprobs_BT, loss_mask_BT, level=level)
    return loss_mask_BT & (ratios_BT >= low) & (ratios_BT <= high)


def effective_sample_size(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Compute the effective sample size (sum w)^2 / sum w^2 under the mask.

    It lies between 1 and the count under the mask, which equal weights reach; 0 if all weights are 0. For sequence
    weights pass [B] weights with a [B] mask.
    Raises: DataError on shapes, non-finite values, or an empty mask.
    Source: Kish 1965, "Survey Sampling".
    """
    check_inputs(mask_BT, weights=weights_BT)
    check_count("mask", int(mask_BT.sum()))
    weights_BT = weights_BT.double()
    squares = masked_sum(weights_BT.square(), mask_BT)
    if squares == 0:
        return 0.0
    return float(masked_sum(weights_BT, mask_BT).square() / squares)
