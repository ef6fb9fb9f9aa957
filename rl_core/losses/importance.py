"""Importance weights for off-policy samples (stale or replayed rollouts, numerically different samplers).

Suffixes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_count, check_inputs, fill_masked, masked_sum

__all__ = ["effective_sample_size", "truncated_importance_weights"]

LOG_WEIGHT_LIMIT = 20.0


def truncated_importance_weights(
    logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
) -> torch.Tensor:
    """min(exp(log pi - log mu), cap), without gradient, for each token or for the whole sequence.

    Args:
        logprobs_BT: float [B, T], nats, log pi of the trained policy.
        behavior_logprobs_BT: float [B, T], nats, log mu of the sampling policy.
        level: "sequence" = the product over a row's loss tokens, the same weight at each of them.
        cap: at least 1; the truncation trades variance for bias towards mu.
    Returns: float [B, T], 0 where the mask is False; multiply into token losses.
    Raises: DataError on shapes, non-finite values, an unknown level, or a cap below 1.
    Source: Ionides 2008, "Truncated importance sampling"; Espeholt et al. 2018, arXiv:1802.01561 (token level).
    """
    check_inputs(loss_mask_BT, logprobs=logprobs_BT, behavior_logprobs=behavior_logprobs_BT)
    if level not in ("token", "sequence") or cap < 1:
        raise DataError(f"level '{level}' must be token or sequence, cap {cap} at least 1")
    log_weights_BT = fill_masked((logprobs_BT - behavior_logprobs_BT).detach(), loss_mask_BT)
    if level == "sequence":
        log_weights_BT = log_weights_BT.sum(-1, keepdim=True).expand_as(log_weights_BT)
    weights_BT = log_weights_BT.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp().clamp(max=cap)
    return fill_masked(weights_BT, loss_mask_BT)


def effective_sample_size(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Effective sample size, (sum w)^2 / sum w^2 under the mask.

    Between 1 and the count under the mask, which equal weights reach; 0 if all weights are 0. For sequence weights pass
    [B] weights with a [B] mask.
    Raises: DataError on shapes, non-finite values, or an empty mask.
    Source: Kish 1965, "Survey Sampling".
    """
    check_inputs(mask_BT, weights=weights_BT)
    check_count("mask", int(mask_BT.sum()))
    squares = masked_sum(weights_BT.double().square(), mask_BT)
    return float(masked_sum(weights_BT.double(), mask_BT).square() / squares) if squares > 0 else 0.0
