"""Policy-gradient losses: normalised ones for the trainers, plain sums for clients of the training service.

Losses named `*_loss` divide by a global denominator. Those named `summed_*`, `importance_sampling_loss`,
`proximal_regression_loss` and `score_centered_loss` are plain sums over tokens, which remote clients select by name. A
request may be split anywhere: they divide by no count, so the gradient of the whole is the sum over its parts.

Suffixes: B rows, T tokens. r = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp. In the sums, p
is the current and q the sampler's log-probability, r = exp(p - q).
"""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.aggregation import aggregate
from rl_core.losses.host_reads import check_condition
from rl_core.losses.kl import (
    DivergenceKind,
    binary_divergence,
    kl_k1,
    kl_k3,
    truncated_forward_kl,
)
from rl_core.losses.masking import (
    check_count,
    check_finite,
    check_inputs,
    fill_masked,
    masked_max,
    masked_sum,
)

LOG_RATIO_LIMIT = 20.0
DPPO_WEIGHT_CAP = 20.0
NOT_RECORDED = -1e4  # nats; log-probabilities up to here mark entries without a token
Metrics = dict[str, torch.Tensor]


def clipped_policy_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the clipped policy-gradient loss over completion tokens.

    L = max(-r A, -clip(r, 1 - clip_eps, 1 + clip_eps_high) A), summed with each token's weight; with dual_clip c, at
    A < 0 at most -c A.

    Args:
        logprobs_BT: float [B, T], nats, current policy, with gradient.
        old_logprobs_BT: float [B, T], nats, the policy at the start of the iteration.
        advantages_BT: float [B, T].
        loss_mask_BT: bool [B, T], True = token counts.
        num_loss_tokens: loss tokens of the whole optimizer step, the denominator of the metrics.
        clip_eps_high: None = clip_eps.
        dual_clip: above 1; None = off.
        loss_weights_BT: float [B, T], see `aggregation.token_weights`; None = the token mean, 1 / num_loss_tokens.
    Returns: scalar loss; {"loss", "clip_fraction" and its parts _low, _high and, with dual_clip, _dual, "ratio_mean",
        "ratio_max", "update_kl" (k3) and "update_kl_k1" of KL(old || current), nats per token}. A token counts as
        clipped if a clip zeroes its gradient.
    Raises: DataError on shapes, non-finite values, an empty step, or limits out of range.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; DAPO, arXiv:2503.14476 (clip_eps_high); Ye et al. 2019,
        arXiv:1912.09729, eq. 5 (dual clip).
    """
    high = clip_eps if clip_eps_high is None else clip_eps_high
    if not 0 < clip_eps < 1 or high <= 0:
        raise DataError(
            f"clip_eps {clip_eps} must lie between 0 and 1, clip_eps_high {high} above 0"
        )
    if dual_clip is not None and dual_clip <= 1:
        raise DataError(f"dual_clip: {dual_clip} must be above 1")
    ratio_BT, advantages_BT = policy_ratio(
        logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT
    )
    count = check_count("num_loss_tokens", num_loss_tokens)
    losses_BT = clipped_terms(ratio_BT, advantages_BT, 1 - clip_eps, 1 + high)
    if dual_clip is not None:
        capped_BT = torch.minimum(losses_BT, -dual_clip * advantages_BT)
        losses_BT = torch.where(advantages_BT < 0, capped_BT, losses_BT)
    loss = aggregate(
        losses_BT, loss_mask_BT, num_loss_tokens=count, loss_weights_BT=loss_weights_BT
    )
    with torch.no_grad():
        clipped = {
            "clip_fraction_low": (ratio_BT < 1 - clip_eps) & (advantages_BT < 0),
            "clip_fraction_high": (ratio_BT > 1 + high) & (advantages_BT > 0),
        }
        if dual_clip is not None:
            clipped["clip_fraction_dual"] = (ratio_BT > dual_clip) & (advantages_BT < 0)
        counts = {name: masked_sum(tokens_BT, loss_mask_BT) for name, tokens_BT in clipped.items()}
        low, *others = counts.values()
        metrics = {
            "loss": loss.detach(),
            "clip_fraction": sum(others, low) / count,  # no token is in two of them
            **{name: number / count for name, number in counts.items()},
            **_compute_ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, loss_mask_BT, count),
        }
    return loss, metrics


def cispo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    clip_eps_high: float = 0.2,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the CISPO loss L = -stopgrad(min(r, 1 + clip_eps_high)) A logprobs; no token loses its gradient.

    Args, Raises: as `clipped_policy_loss`.
    Returns: scalar loss; {"loss", "clip_fraction" (truncated weights), "ratio_mean", "ratio_max", "update_kl",
        "update_kl_k1"}.
    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    if clip_eps_high <= 0:
        raise DataError(f"clip_eps_high: {clip_eps_high} must be above 0")
    ratio_BT, advantages_BT = policy_ratio(
        logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT
    )
    count = check_count("num_loss_tokens", num_loss_tokens)
    weights_BT = ratio_BT.detach().clamp(max=1 + clip_eps_high)
    losses_BT = -weights_BT * advantages_BT * fill_masked(logprobs_BT, loss_mask_BT)
    loss = aggregate(
        losses_BT, loss_mask_BT, num_loss_tokens=count, loss_weights_BT=loss_weights_BT
    )
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "clip_fraction": masked_sum((ratio_BT > 1 + clip_eps_high).float(), loss_mask_BT)
            / count,
            **_compute_ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, loss_mask_BT, count),
        }
    return loss, metrics


def dppo_loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    threshold: float = 0.15,
    threshold_high: float | None = None,
    kind: DivergenceKind = "tv",
    divergence_BT: torch.Tensor | None = None,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the DPPO loss L = -M stopgrad(min(r, 20)) A logprobs, masked by a divergence instead of the ratio.

    M = 0 where the update would lead further away from a policy that is too far already: at A > 0 and r > 1 if the
    divergence exceeds `threshold_high`, at A < 0 and r < 1 if it exceeds `threshold`; else 1. So an unlikely token may
    grow to many times its probability, while a likely one is stopped early.

    Args:
        sampler_logprobs_BT: float [B, T], nats, of the policy that sampled; r is the ratio to it.
        threshold, threshold_high: above 0; threshold_high None = threshold.
        kind: `kl.binary_divergence` of the sampled tokens, if `divergence_BT` is None.
        divergence_BT: float [B, T], a better estimate, such as `kl.top_k_divergence`.
        others, Raises: as `clipped_policy_loss`.
    Returns: scalar loss; {"loss", "clip_fraction" (masked tokens) and its parts _low (A < 0) and _high, "ratio_mean",
        "ratio_max", "divergence_mean", "update_kl", "update_kl_k1"}.
    Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879. The cap of
        the weight, 20, is that of TRL and verl.
    """
    high = threshold if threshold_high is None else threshold_high
    if threshold <= 0 or high <= 0:
        raise DataError(f"threshold {threshold} and threshold_high {high} must be above 0")
    ratio_BT, advantages_BT = policy_ratio(
        logprobs_BT, sampler_logprobs_BT, advantages_BT, loss_mask_BT
    )
    count = check_count("num_loss_tokens", num_loss_tokens)
    if divergence_BT is None:
        divergence_BT = binary_divergence(
            fill_masked(logprobs_BT, loss_mask_BT),
            fill_masked(sampler_logprobs_BT, loss_mask_BT),
            kind,
        )
    check_inputs(loss_mask_BT, divergence=divergence_BT)
    divergence_BT = fill_masked(divergence_BT.detach(), loss_mask_BT)
    low_BT = (advantages_BT < 0) & (ratio_BT < 1) & (divergence_BT > threshold)
    high_BT = (advantages_BT > 0) & (ratio_BT > 1) & (divergence_BT > high)
    weights_BT = ratio_BT.detach().clamp(max=DPPO_WEIGHT_CAP).masked_fill(low_BT | high_BT, 0.0)
    losses_BT = -weights_BT * advantages_BT * fill_masked(logprobs_BT, loss_mask_BT)
    loss = aggregate(
        losses_BT, loss_mask_BT, num_loss_tokens=count, loss_weights_BT=loss_weights_BT
    )
    with torch.no_grad():
        low, high_count = (
            masked_sum(part_BT, loss_mask_BT) / count for part_BT in (low_BT, high_BT)
        )
        metrics = {
            "loss": loss.detach(),
            "clip_fraction": low + high_count,
            "clip_fraction_low": low,
            "clip_fraction_high": high_count,
            "divergence_mean": masked_sum(divergence_BT, loss_mask_BT) / count,
            **_compute_ratio_metrics(
                ratio_BT, logprobs_BT, sampler_logprobs_BT, loss_mask_BT, count
            ),
        }
    return loss, metrics


def gspo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_sequences: float,
    clip_eps: float = 3e-4,
    clip_eps_high: float = 4e-4,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the GSPO loss: one clipped ratio per sequence, s = exp(mean of its tokens' log-ratios); mean over
    sequences.

    Args:
        advantages_B: float [B], one per sequence.
        num_sequences: sequences with loss tokens in the whole optimizer step, the denominator of the metrics.
        loss_weights_BT: float [B, T], see `aggregation.token_weights`; every token has its sequence's loss. None = the
            sequence mean, 1 / num_sequences for each sequence.
    Returns: scalar loss; {"loss", "clip_fraction" and its _low and _high, "ratio_mean", "ratio_max"} per sequence.
        Rows without loss tokens are ignored.
    Raises: DataError as `clipped_policy_loss`.
    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7.
    """
    if not 0 < clip_eps < 1 or clip_eps_high <= 0:
        raise DataError(
            f"clip_eps {clip_eps} must lie between 0 and 1, clip_eps_high {clip_eps_high} above 0"
        )
    check_inputs(loss_mask_BT, logprobs=logprobs_BT, old_logprobs=old_logprobs_BT)
    if loss_mask_BT.ndim != 2 or advantages_B.shape != loss_mask_BT.shape[:1]:
        raise DataError(
            f"advantages: shape {tuple(advantages_B.shape)}, expected [B] of {tuple(loss_mask_BT.shape)}"
        )
    check_finite(advantages=advantages_B)
    count = check_count("num_sequences", num_sequences)
    lengths_B = loss_mask_BT.sum(1)
    mask_B = lengths_B > 0
    log_ratio_sums_B = fill_masked(logprobs_BT - old_logprobs_BT, loss_mask_BT).sum(1)
    log_ratio_B = log_ratio_sums_B / lengths_B.clamp(min=1)
    ratio_B = log_ratio_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    losses_B = clipped_terms(ratio_B, advantages_B, 1 - clip_eps, 1 + clip_eps_high)
    weights_B = None
    if loss_weights_BT is not None:
        weights_B = fill_masked(loss_weights_BT, loss_mask_BT).sum(1)
    loss = aggregate(losses_B, mask_B, num_loss_tokens=count, loss_weights_BT=weights_B)
    with torch.no_grad():
        low_B = (ratio_B < 1 - clip_eps) & (advantages_B < 0)
        high_B = (ratio_B > 1 + clip_eps_high) & (advantages_B > 0)
        metrics = {
            "loss": loss.detach(),
            "clip_fraction": masked_sum((low_B | high_B).float(), mask_B) / count,
            "clip_fraction_low": masked_sum(low_B.float(), mask_B) / count,
            "clip_fraction_high": masked_sum(high_B.float(), mask_B) / count,
            "ratio_mean": masked_sum(ratio_B, mask_B) / count,
            "ratio_max": masked_max(ratio_B, mask_B),
        }
    return loss, metrics


def sapo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the SAPO loss, which replaces the clip by a soft gate of the ratio: L = -(4 / tau) sigmoid(tau (r - 1))
    A.

    Its gradient is that of -r A times 4 p (1 - p), p = sigmoid(tau (r - 1)): 1 at r = 1, falling smoothly to both sides
    for either sign of A. A larger tau falls faster.

    Args:
        tau_positive, tau_negative: tau where A > 0, and elsewhere; above 0.
        others, Raises: as `clipped_policy_loss`.
    Returns: scalar loss; {"loss", "gate_mean" (mean of 4 p (1 - p)), "ratio_mean", "ratio_max", "update_kl",
        "update_kl_k1"}.
    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347, section 3.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise DataError(
            f"tau_positive {tau_positive} and tau_negative {tau_negative} must be above 0"
        )
    ratio_BT, advantages_BT = policy_ratio(
        logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT
    )
    count = check_count("num_loss_tokens", num_loss_tokens)
    tau_BT = torch.full_like(advantages_BT, tau_negative).masked_fill(
        advantages_BT > 0, tau_positive
    )
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
    losses_BT = -4 / tau_BT * gate_BT * advantages_BT
    loss = aggregate(
        losses_BT, loss_mask_BT, num_loss_tokens=count, loss_weights_BT=loss_weights_BT
    )
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "gate_mean": masked_sum(4 * gate_BT * (1 - gate_BT), loss_mask_BT) / count,
            **_compute_ratio_metrics(ratio_BT, logprobs_BT, old_logprobs_BT, loss_mask_BT, count),
        }
    return loss, metrics


def reinforce_loss(
    logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    num_loss_tokens: float,
    loss_weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Compute the REINFORCE loss L = -A logprobs, A = return - baseline, detached.

    Args, Raises: as `clipped_policy_loss`.
    Returns: scalar loss; {"loss"}.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", eq. 11.
    """
    check_inputs(loss_mask_BT, logprobs=logprobs_BT, advantages=advantages_BT)
    count = check_count("num_loss_tokens", num_loss_tokens)
    advantages_BT = fill_masked(advantages_BT.detach(), loss_mask_BT)
    losses_BT = -advantages_BT * fill_masked(logprobs_BT, loss_mask_BT)
    loss = aggregate(
        losses_BT, loss_mask_BT, num_loss_tokens=count, loss_weights_BT=loss_weights_BT
    )
    return loss, {"loss": loss.detach()}


def clipped_terms(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    low: float | torch.Tensor,
    high: float | torch.Tensor,
) -> torch.Tensor:
    """Compute max(-r A, -clip(r, low, high) A) per entry; limits are numbers or tensors of the same shape."""
    clipped = torch.clamp(ratio, low, high)  # type: ignore[arg-type]  # the stubs have no union
    losses = -advantages
    return torch.maximum(ratio * losses, clipped * losses)


def policy_ratio(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the inputs and return the ratio (1 where the mask is False) and the advantages (0 there), both [B, T]."""
    check_inputs(
        loss_mask_BT, logprobs=logprobs_BT, old_logprobs=old_logprobs_BT, advantages=advantages_BT
    )
    log_ratio_BT = fill_masked(logprobs_BT - old_logprobs_BT.detach(), loss_mask_BT)
    ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ratio_BT, fill_masked(advantages_BT.detach(), loss_mask_BT)


def _compute_ratio_metrics(
    ratio_BT: torch.Tensor,
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    count: float,
) -> Metrics:
    """Return metrics of the ratio and of KL(old || current) at samples of the old policy, per token."""
    return {
        "ratio_mean": masked_sum(ratio_BT, loss_mask_BT) / count,
        "ratio_max": masked_max(ratio_BT, loss_mask_BT),
        "update_kl": masked_sum(kl_k3(old_logprobs_BT, logprobs_BT), loss_mask_BT) / count,
        "update_kl_k1": masked_sum(kl_k1(old_logprobs_BT, logprobs_BT), loss_mask_BT) / count,
    }


def importance_sampling_loss(
    logprobs_BT: torch.Tensor,
    sampler_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> torch.Tensor:
    """Compute L = -sum r A, without a clip.

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
    """Compute L = -sum min(r A, clip(r, low, high) A).

    Args: as `importance_sampling_loss`.
        low_BT, high_BT: float [B, T], thresholds of the ratio, 0 <= low <= high.
    Raises: DataError, also for thresholds out of range.
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
    """Compute L = -sum stopgrad(clip(r, low, high)) A p; no token loses its gradient.

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
    """Compute L = -sum (A p - beta / 2 (p - q)^2), a policy gradient held near the sampler; clients call it dro.

    Args, Raises: as `importance_sampling_loss`; DataError for beta below 0.
    Source: Richemond et al. 2024, arXiv:2405.19107 (direct reward optimisation), per token.
    """
    if beta < 0:
        raise DataError(f"beta: {beta} must be at least 0")
    check_inputs(
        mask_BT,
        logprobs=logprobs_BT,
        sampler_logprobs=sampler_logprobs_BT,
        advantages=advantages_BT,
    )
    log_ratio_BT = logprobs_BT - sampler_logprobs_BT.detach()
    terms_BT = advantages_BT.detach() * logprobs_BT - 0.5 * beta * log_ratio_BT.square()
    return -masked_sum(terms_BT, mask_BT)


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
    """Compute L = -sum min(s A, clip(s, low, high) A), s = exp(mean of p - q over the row's tokens of
    `ratio_mask_BT`).

    Args: as `summed_ppo_loss`.
        ratio_mask_BT: bool [B, T], the tokens that form a row's ratio. A row without any has ratio 1 and no gradient.
    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7; summed over tokens, so a row counts by its length.
    """
    _check_thresholds(mask_BT, low_BT, high_BT)
    check_inputs(
        mask_BT,
        logprobs=logprobs_BT,
        sampler_logprobs=sampler_logprobs_BT,
        advantages=advantages_BT,
    )
    ratio_mask_BT = ratio_mask_BT & mask_BT
    log_ratios_BT = fill_masked(logprobs_BT - sampler_logprobs_BT.detach(), ratio_mask_BT)
    log_ratio_B = log_ratios_BT.sum(1) / ratio_mask_BT.sum(1).clamp(min=1)
    ratio_B = log_ratio_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ratio_BT = ratio_B[:, None].expand_as(log_ratios_BT)
    advantages_BT = fill_masked(advantages_BT.detach(), mask_BT)
    return clipped_terms(ratio_BT, advantages_BT, low_BT, high_BT).sum()


def _check_thresholds(mask_BT: torch.Tensor, low_BT: torch.Tensor, high_BT: torch.Tensor) -> None:
    check_inputs(mask_BT, clip_low_threshold=low_BT, clip_high_threshold=high_BT)
    check_condition(
        ~(mask_BT & ((low_BT < 0) | (high_BT < low_BT))).any(),
        lambda: DataError(
            "thresholds of the ratio: 0 <= clip_low_threshold <= clip_high_threshold must hold"
        ),
    )


def score_centered_loss(
    logprobs_BT: torch.Tensor,
    top_logprobs_BTK: torch.Tensor,
    sampler_top_logprobs_BTK: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    kl_coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute L = -sum (A p + (A - kl_coeff) KL(q || p)), q the distribution that each token was sampled from.

    The gradient of -A (p + KL(q || p)) is -A (grad p - E_q[grad p]): REINFORCE without the expected score of the
    sampler, which is 0 on policy and a drift towards the sampler elsewhere. `kl_coeff` pulls the policy to the sampler.
    KL(q || p) is over the recorded tokens and all others merged into one (`truncated_forward_kl`); it is exact if every
    token was recorded. No ratio appears, so nothing is clipped.

    Args:
        logprobs_BT: float [B, T], nats, of the sampled tokens, with gradient.
        top_logprobs_BTK: float [B, T, K], nats, of the recorded tokens, with gradient.
        sampler_top_logprobs_BTK: float [B, T, K], nats, q of the same tokens; `NOT_RECORDED` or less = no token.
        advantages_BT: float [B, T]. mask_BT: bool [B, T], True = token counts.
    Returns: scalar; KL(q || p) [B, T], detached, 0 where the mask is False.
    Raises: DataError on shapes or non-finite values.
    Source: Marek and Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning", arXiv:2609.20807;
        the tail of q is modelled as the policy's tail, rescaled to the mass of q that was not recorded.
    """
    check_inputs(mask_BT, logprobs=logprobs_BT, advantages=advantages_BT)
    shape = (*mask_BT.shape, top_logprobs_BTK.shape[-1])
    if top_logprobs_BTK.shape != shape or sampler_top_logprobs_BTK.shape != shape:
        raise DataError(
            f"score centering: shapes of the recorded tokens {tuple(top_logprobs_BTK.shape)} and "
            f"{tuple(sampler_top_logprobs_BTK.shape)}, expected {shape}"
        )
    q_NK = sampler_top_logprobs_BTK[mask_BT].detach()
    p_NK = top_logprobs_BTK[mask_BT]
    p_NK = torch.where(q_NK > NOT_RECORDED, p_NK, torch.full_like(p_NK, 2 * NOT_RECORDED))
    kl_N = truncated_forward_kl(q_NK, 1.0 - q_NK.exp().sum(-1), p_NK)
    advantages_N = advantages_BT[mask_BT].detach()
    loss = -(advantages_N * logprobs_BT[mask_BT] + (advantages_N - kl_coeff) * kl_N).sum()
    kl_BT = torch.zeros(mask_BT.shape, dtype=kl_N.dtype, device=kl_N.device)
    kl_BT[mask_BT] = kl_N.detach()
    return loss, kl_BT
