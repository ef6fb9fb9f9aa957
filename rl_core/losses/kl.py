"""Kullback-Leibler divergence: sample-based estimators, exact and truncated values, coefficient controllers.

`truncated_forward_kl` and `top_k_divergence` work from a part of the old distribution: its most likely tokens and the
total mass of all others; `binary_divergence` from the sampled token alone.

Suffixes: B rows, T tokens, N positions, V vocabulary, K recorded tokens. All values in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from rl_core.errors import DataError
from rl_core.losses.aggregation import aggregate
from rl_core.losses.masking import check_count, check_finite, check_inputs, fill_masked

KLEstimator = Literal["k1", "k2", "k3"]
DivergenceKind = Literal["tv", "kl"]
NO_TOKEN = -1e4  # nats; a probability of 0
K3_LIMIT = 10.0  # exp(10) = 22,026: beyond it a single token would dominate the batch
_MIN_REST_MASS = (
    1e-12  # of the new policy's unrecorded tokens: keeps the KL finite if they have no mass
)


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute k1 = d = logprobs - ref_logprobs at samples of the policy: unbiased for KL(policy || ref), of either
    sign.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute k2 = d^2 / 2: biased, low variance, never negative; its gradient is unbiased for that of KL(policy ||
    ref).

    Source: Schulman 2020.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute k3 = exp(-d) - 1 + d with d clamped to +-10: unbiased (within the clamp), never negative at any token.

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
    """Compute KL(policy || reference) at the loss tokens as a loss term.

    The term is the mean per token, or the sum with the weights of the policy loss. With those weights, a coefficient
    balances a nat of KL at a token against that token's advantage, whatever the aggregation divides by.

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
    # Log-probabilities are 0 outside the mask, hence every estimator too.
    return kl, {"ref_kl": kl_BT.detach().sum() / count}


def exact_forward_kl(old_logits_NV: torch.Tensor, new_logits_NV: torch.Tensor) -> torch.Tensor:
    """Compute KL(old || new) = sum_v p_old (log p_old - log p_new) at every position, in at least float32.

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
    # p log p -> 0 as p -> 0; without the mask -inf - -inf would be NaN.
    allowed_NV = old_logits_NV != forbidden
    # Not computed: exp(log p) of an allowed token may be 0 in this dtype, and 0 * inf is NaN.
    excluded_NV = allowed_NV & (new_logits_NV == forbidden)
    counted_NV = allowed_NV & ~excluded_NV
    difference_NV = fill_masked(old_log_p_NV, counted_NV) - fill_masked(new_log_p_NV, counted_NV)
    kl_N = (old_log_p_NV.exp() * difference_NV).sum(-1)
    return kl_N.masked_fill(excluded_NV.any(-1), float("inf"))


def adaptive_kl_coef(
    kl_coef: float, kl: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """Return the next KL coefficient: kl_coef (1 + clip(kl / target - 1, +-0.2) min(1, num_samples / horizon)).

    A call changes the coefficient by 20% at most. More than one horizon of samples applies the full correction and no
    more, as it is one measurement; the source's rule, applied literally, would take the coefficient to 0 and below from
    five horizons on.

    Args:
        kl: measured KL in nats, same normalisation as `target`.
        horizon: samples over which the full correction is applied. num_samples: samples since the last call.
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
    """Return the next KL coefficient of a controller with a dead band around the target.

    It is multiplied by increase_factor above target + tolerance, divided by decrease_factor below target - tolerance,
    unchanged between, and clamped to [minimum, maximum].
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


def truncated_forward_kl(
    old_logprobs_NK: torch.Tensor, old_rest_N: torch.Tensor, new_logprobs_NK: torch.Tensor
) -> torch.Tensor:
    """Compute sum_k p_k log(p_k / q_k) + P log(P / Q), P and Q the masses of the tokens that were not recorded.

    This is a lower bound of KL(old || new) over the vocabulary, by the data-processing inequality: merging tokens never
    increases a divergence. It is exact if every token was recorded, or if p / q is equal for all unrecorded tokens.

    Args:
        old_logprobs_NK: float [N, K], nats, of the recorded tokens. old_rest_N: float [N], 1 - sum of their
            probabilities; rounding may take it slightly below 0.
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
    old_NK, new_NK = old_logprobs_NK.to(dtype), new_logprobs_NK.to(dtype)
    old_rest_N = old_rest_N.to(dtype).clamp(min=0.0)
    recorded_kl_N = (old_NK.exp() * (old_NK - new_NK)).sum(-1)
    # 1 - sum q: expm1 keeps the digits if the recorded tokens have nearly all of the mass.
    new_rest_N = -torch.expm1(torch.logsumexp(new_NK, -1))
    new_log_rest_N = torch.log(new_rest_N.clamp(min=_MIN_REST_MASS))
    rest_kl_N = torch.xlogy(old_rest_N, old_rest_N) - old_rest_N * new_log_rest_N
    return recorded_kl_N + torch.where(old_rest_N > 0, rest_kl_N, torch.zeros_like(rest_kl_N))


@torch.no_grad()
def binary_divergence(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, kind: DivergenceKind
) -> torch.Tensor:
    """Compute a divergence of the old from the current policy that tells the sampled token from all others only.

    With p and q the sampled token's probabilities under the current and the old policy:
    tv: |p - q|; kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Both are lower bounds of the total variation and of
    KL(old || current) over the vocabulary (data processing).

    Args:
        logprobs, old_logprobs: float of one shape, nats, at most 0 up to rounding.
    Returns: of that shape, detached.
    Raises: DataError for an unknown kind.
    Source: Qi et al. 2026, arXiv:2602.04879 (binary approximation).
    """
    if kind not in ("tv", "kl"):
        raise DataError(f"kind: '{kind}' must be tv or kl")
    new, old = logprobs.clamp(max=0.0), old_logprobs.clamp(max=0.0)
    if kind == "tv":
        return (new.exp() - old.exp()).abs()
    old_rest = -torch.expm1(old)
    new_rest = (-torch.expm1(new)).clamp(min=_MIN_REST_MASS)
    rest = torch.xlogy(old_rest, old_rest) - old_rest * new_rest.log()
    return old.exp() * (old - new) + rest


@torch.no_grad()
def top_k_divergence(
    logprobs_NK: torch.Tensor, old_logprobs_NK: torch.Tensor, kind: DivergenceKind
) -> torch.Tensor:
    """Compute a divergence of the old from the current policy over some tokens, all others merged into one.

    tv: 1/2 (sum_k |p_k - q_k| + |P - Q|); kl: `truncated_forward_kl`. P and Q are the masses of all other tokens.

    Args:
        logprobs_NK, old_logprobs_NK: float [N, K], nats, of the same distinct tokens. An entry without a token is
            `NO_TOKEN` in both.
    Returns: float [N], detached; a lower bound of the divergence over the vocabulary.
    Raises: DataError on shapes, non-finite values, or an unknown kind.
    Source: Qi et al. 2026, arXiv:2602.04879 (top-K approximation).
    """
    if kind not in ("tv", "kl"):
        raise DataError(f"kind: '{kind}' must be tv or kl")
    old_rest_N = 1.0 - old_logprobs_NK.exp().sum(-1)
    if kind == "kl":
        return truncated_forward_kl(old_logprobs_NK, old_rest_N, logprobs_NK)
    if logprobs_NK.shape != old_logprobs_NK.shape or logprobs_NK.ndim != 2:
        raise DataError(
            f"top-k divergence: shapes {tuple(logprobs_NK.shape)} and {tuple(old_logprobs_NK.shape)}, expected [N, K]"
        )
    check_finite(logprobs=logprobs_NK, old_logprobs=old_logprobs_NK)
    differences_NK = logprobs_NK.exp() - old_logprobs_NK.exp()
    return 0.5 * (differences_NK.abs().sum(-1) + differences_NK.sum(-1).abs())
