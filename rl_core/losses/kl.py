"""Kullback-Leibler divergence: sample-based estimators, exact value, coefficient controllers.

Suffixes: B rows, T tokens, N positions, V vocabulary. All values in nats.

Forward KL from a recorded part of the old distribution: its most likely tokens and the mass of all others.

Suffixes: N positions, K recorded tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.aggregation import aggregate
from rl_core.losses.masking import check_count, check_finite, check_inputs, fill_masked

KLEstimator = Literal["k1", "k2", "k3"]
K3_LIMIT = 10.0  # exp(10) = 22,026: beyond it a single token would dominate the batch


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k1 = d = logprobs - ref_logprobs at samples of the policy: unbiased for KL(policy || ref), of either sign.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k2 = d^2 / 2: biased, low variance, never negative; its gradient is unbiased for that of KL(policy || ref).

    Source: Schulman 2020.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k3 = exp(-d) - 1 + d with d clamped to +-10: unbiased (within the clamp), never negative at any token.

    Source: Schulman 2020; used in the loss by GRPO, arXiv:2402.03300, eq. 4.
    """
    d = (logprobs - ref_logprobs).clamp(-K3_LIMIT, K3_LIMIT)
    return torch.expm1(-d) + d  # expm1: exact near d = 0, where exp(-d) - 1 cancels


_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}


def kl_penalty(
    logprobs_BT: torch.Tensor,
    ref_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    estimator: KLEstimator = "k3",
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """KL(policy || reference) per loss token, as a loss term: its mean, or its sum with the weights of the policy loss.

    With the weights of the policy loss, a coefficient weighs a nat of KL at a token against that token's advantage,
    whatever the aggregation divides by.

    Args:
        logprobs_BT: float [B, T], current policy, with gradient.
        ref_logprobs_BT: float [B, T], reference model.
        loss_mask_BT: bool [B, T], True = token counts.
        num_loss_tokens: loss tokens of the whole optimizer step.
        loss_weights_BT: float [B, T], see `aggregation.token_weights`; None = the token mean, 1 / num_loss_tokens.
    Returns: scalar; {"ref_kl"}: the mean per loss token, detached.
    Raises: DataError on shapes, non-finite values, an empty step, an unknown estimator.
    """
    check_inputs(loss_mask_BT, logprobs=logprobs_BT, ref_logprobs=ref_logprobs_BT)
    if estimator not in _ESTIMATORS:
        raise DataError(f"estimator: '{estimator}' must be one of {', '.join(_ESTIMATORS)}")
    count = check_count("num_loss_tokens", num_loss_tokens)
    kl_BT = _ESTIMATORS[estimator](
        fill_masked(logprobs_BT, loss_mask_BT), fill_masked(ref_logprobs_BT, loss_mask_BT)
    )
    kl = aggregate(kl_BT, loss_mask_BT, num_loss_tokens=count, loss_weights_BT=loss_weights_BT)
    return kl, {
        "ref_kl": kl_BT.detach().sum() / count
    }  # log-probs are 0 outside the mask, hence every estimator too


def exact_forward_kl(old_logits_NV: torch.Tensor, new_logits_NV: torch.Tensor) -> torch.Tensor:
    """KL(old || new) = sum_v p_old (log p_old - log p_new) at every position, in at least float32.

    Args:
        old_logits_NV, new_logits_NV: float [N, V] (any leading axes); -inf = token cannot be sampled.
    Returns: float [N], gradient to both; infinite where the new policy excludes a token that the old one allows.
    Raises: DataError if shapes differ or a value is NaN or +inf.
    """
    if old_logits_NV.shape != new_logits_NV.shape:
        raise DataError(
            f"new_logits: shape {tuple(new_logits_NV.shape)}, old_logits has {tuple(old_logits_NV.shape)}"
        )
    forbidden = float("-inf")
    check_finite(
        old_logits=old_logits_NV.detach().masked_fill(old_logits_NV.detach() == forbidden, 0.0),
        new_logits=new_logits_NV.detach().masked_fill(new_logits_NV.detach() == forbidden, 0.0),
    )
    dtype = torch.promote_types(old_logits_NV.dtype, torch.float32)
    old_log_p_NV = torch.log_softmax(old_logits_NV, dim=-1, dtype=dtype)
    new_log_p_NV = torch.log_softmax(new_logits_NV, dim=-1, dtype=dtype)
    allowed_NV = (
        old_logits_NV != forbidden
    )  # p log p -> 0 as p -> 0; elsewhere -inf - -inf would be NaN
    difference_NV = fill_masked(old_log_p_NV, allowed_NV) - fill_masked(new_log_p_NV, allowed_NV)
    return (old_log_p_NV.exp() * difference_NV).sum(-1)


def adaptive_kl_coef(
    kl_coef: float, kl: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """Next KL coefficient: kl_coef (1 + clip(kl / target - 1, +-0.2) min(1, num_samples / horizon)).

    Args:
        kl: measured KL in nats, same normalisation as `target`.
        horizon: samples over which the full correction is applied. num_samples: samples since the last call. More than
            one horizon of them corrects in full, no further: it is one measurement, and the source's rule as it stands
            would take the coefficient to 0 and below from five horizons on. A call changes it by 20% at most.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (K_beta = num_samples / horizon, 0.1 there).
    """
    if target <= 0 or horizon <= 0:
        raise DataError(f"target {target} and horizon {horizon} must be above 0")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * min(1.0, num_samples / horizon))


def banded_kl_coef(
    kl_coef: float,
    kl: float,
    *,
    target: float,
    tolerance: float,
    increase_factor: float = 1.2,
    decrease_factor: float = 1.2,
    minimum: float = 1e-4,
    maximum: float = 1.0,
) -> float:
    """Next KL coefficient: multiplied by increase_factor above target + tolerance, divided by decrease_factor below
    target - tolerance, unchanged between, clamped to [minimum, maximum].
    """
    if tolerance < 0 or increase_factor < 1 or decrease_factor < 1 or not 0 < minimum <= maximum:
        raise DataError(
            "tolerance must be at least 0, factors at least 1, and 0 < minimum <= maximum"
        )
    if kl > target + tolerance:
        kl_coef *= increase_factor
    elif kl < target - tolerance:
        kl_coef /= decrease_factor
    return min(max(kl_coef, minimum), maximum)


_MIN_REST_MASS = 1e-12  # of the new policy's rest: a finite price for having none


def truncated_forward_kl(
    old_logprobs_NK: torch.Tensor, old_rest_N: torch.Tensor, new_logprobs_NK: torch.Tensor
) -> torch.Tensor:
    """sum_k p_k log(p_k / q_k) + P log(P / Q), P and Q the masses of the tokens that were not recorded.

    A lower bound of KL(old || new) over the vocabulary, by the data-processing inequality: taking many tokens for one
    never adds to a divergence. It is the exact value where everything was recorded, or where p / q is the same for all
    tokens of the rest.

    Args:
        old_logprobs_NK: float [N, K], nats, of the recorded tokens. old_rest_N: float [N], 1 - sum of their
            probabilities; rounding may take it a little below 0.
        new_logprobs_NK: float [N, K], nats, of the same tokens under the new policy, with gradient.
    Returns: float [N] in at least float32, with gradient to the new policy. At least 0 up to rounding.
    Raises: DataError if shapes differ or a value is not finite.
    Source: Cover and Thomas 2006, Elements of Information Theory, section 2.8 and theorem 2.7.1 (log-sum inequality).
    """
    if (
        new_logprobs_NK.shape != old_logprobs_NK.shape
        or old_rest_N.shape != old_logprobs_NK.shape[:1]
    ):
        raise DataError(
            f"recorded KL: shapes old {tuple(old_logprobs_NK.shape)}, rest {tuple(old_rest_N.shape)}, "
            f"new {tuple(new_logprobs_NK.shape)}"
        )
    check_finite(
        old_logprobs=old_logprobs_NK, old_rest=old_rest_N, new_logprobs=new_logprobs_NK.detach()
    )
    dtype = torch.promote_types(new_logprobs_NK.dtype, torch.float32)
    old_NK, new_NK, rest_N = (
        old_logprobs_NK.to(dtype),
        new_logprobs_NK.to(dtype),
        old_rest_N.to(dtype).clamp(min=0.0),
    )
    named_N = (old_NK.exp() * (old_NK - new_NK)).sum(-1)
    # log(1 - sum q): expm1 keeps the digits where the recorded tokens have nearly all of the mass
    new_log_rest_N = torch.log(
        (-torch.expm1(torch.logsumexp(new_NK, -1))).clamp(min=_MIN_REST_MASS)
    )
    unnamed_N = torch.xlogy(rest_N, rest_N) - rest_N * new_log_rest_N
    return named_N + torch.where(rest_N > 0, unnamed_N, torch.zeros_like(unnamed_N))
