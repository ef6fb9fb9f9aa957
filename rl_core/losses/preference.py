"""Pairwise losses: Bradley-Terry reward model, DPO, cDPO, IPO, NLL of the chosen completion; calibration error.

Suffix: B pairs. Metrics are divided by `num_pairs`, the pairs of the optimizer step, so that micro-batches add up.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from rl_core.errors import DataError
from rl_core.losses.masking import check_count, check_finite

__all__ = [
    "accuracy",
    "bradley_terry_loss",
    "calibration_error",
    "check_pairs",
    "chosen_nll",
    "dpo_loss",
    "ipo_loss",
    "preference_metrics",
]


def bradley_terry_loss(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    *,
    num_pairs: float,
    margin_B: torch.Tensor | None = None,
    center_coef: float = 0.01,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Ranking loss of a reward model: mean of -log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)^2.

    Args:
        chosen_B, rejected_B: float [B], scores, with gradient.
        num_pairs: pairs of the whole optimizer step.
        margin_B: float [B], required score margin (arXiv:2307.09288, eq. 2); None = 0.
        center_coef: centers scores near 0, as ranking leaves their offset free (arXiv:2312.09244).
    Returns: scalar loss; {"ranking_loss", "accuracy" (a tie counts half), "margin" (mean r_c - r_r), "reward_mean"}.
    Raises: DataError on shapes, non-finite scores, or no pairs.
    """
    check_pairs(chosen=chosen_B, rejected=rejected_B, margin=margin_B)
    count = check_count("num_pairs", num_pairs)
    difference_B = chosen_B - rejected_B
    ranking = -functional.logsigmoid(difference_B - margin_B if margin_B is not None else difference_B).sum() / count
    loss = ranking + center_coef * (chosen_B + rejected_B).square().sum() / count
    metrics = {
        "ranking_loss": ranking.detach(),
        "accuracy": accuracy(difference_B, count),
        "margin": difference_B.detach().sum() / count,
        "reward_mean": (chosen_B + rejected_B).detach().sum() / (2 * count),
    }
    return loss, metrics


def dpo_loss(
    chosen_logprobs_B: torch.Tensor,
    rejected_logprobs_B: torch.Tensor,
    ref_chosen_logprobs_B: torch.Tensor,
    ref_rejected_logprobs_B: torch.Tensor,
    *,
    num_pairs: float,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Direct preference optimisation; with label_smoothing e > 0, conservative DPO.

    L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h = policy log-ratio - reference log-ratio.
    Args:
        *_logprobs_B: float [B], nats, summed over the completion tokens.
    Returns: scalar loss; {"accuracy", "margin" (mean beta h), "chosen_reward", "rejected_reward"}.
    Raises: DataError on shapes, non-finite values, no pairs, or e outside [0, 0.5).
    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Mitchell 2023, "A note on DPO with noisy preferences".
    """
    if not 0 <= label_smoothing < 0.5:
        raise DataError(f"label_smoothing: {label_smoothing} must be at least 0 and below 0.5")
    rewards = _implicit_rewards(
        chosen_logprobs_B, rejected_logprobs_B, ref_chosen_logprobs_B, ref_rejected_logprobs_B, beta
    )
    count = check_count("num_pairs", num_pairs)
    scaled_B = rewards[0] - rewards[1]
    losses_B = -(1 - label_smoothing) * functional.logsigmoid(scaled_B)
    losses_B = losses_B - label_smoothing * functional.logsigmoid(-scaled_B)
    return losses_B.sum() / count, preference_metrics(*rewards, count)


def ipo_loss(
    chosen_logprobs_B: torch.Tensor,
    rejected_logprobs_B: torch.Tensor,
    ref_chosen_logprobs_B: torch.Tensor,
    ref_rejected_logprobs_B: torch.Tensor,
    *,
    num_pairs: float,
    beta: float = 0.1,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Identity preference optimisation: L = (h - 1 / (2 beta))^2.

    Args:
        *_logprobs_B: float [B], nats, MEAN over each completion's tokens, so that length does not matter.
    Returns, Raises: as `dpo_loss`.
    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17.
    """
    rewards = _implicit_rewards(
        chosen_logprobs_B, rejected_logprobs_B, ref_chosen_logprobs_B, ref_rejected_logprobs_B, beta
    )
    count = check_count("num_pairs", num_pairs)
    h_B = (rewards[0] - rewards[1]) / beta
    return (h_B - 1 / (2 * beta)).square().sum() / count, preference_metrics(*rewards, count)


def chosen_nll(
    chosen_logprobs_B: torch.Tensor, num_tokens_B: torch.Tensor, *, num_pairs: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross-entropy of the chosen completions: mean over pairs of -log p(chosen) / number of its tokens.

    DPO alone may lower both likelihoods as long as the rejected one falls faster; this term counteracts that.
    Args:
        chosen_logprobs_B: float [B], nats, SUMMED over the completion tokens, with gradient.
        num_tokens_B: [B], number of completion tokens, at least 1.
    Returns: scalar loss, nats per token; {"chosen_nll"}.
    Raises: DataError on shapes, non-finite values, no pairs, or a completion without tokens.
    Source: Pang et al. 2024, arXiv:2404.19733, eq. 2.
    """
    check_pairs(chosen_logprobs=chosen_logprobs_B, num_tokens=num_tokens_B)
    if bool((num_tokens_B < 1).any()):
        raise DataError("num_tokens: every completion needs at least one token")
    loss = -(chosen_logprobs_B / num_tokens_B).sum() / check_count("num_pairs", num_pairs)
    return loss, {"chosen_nll": loss.detach()}


def calibration_error(margin_B: torch.Tensor, *, num_bins: int = 10) -> float:
    """Expected calibration error of a reward model, from margins r_c - r_r.

    Confidence of a predicted order is c = sigmoid(|margin|); over equal-width bins on [0.5, 1]: sum of
    bin share x |mean c - accuracy|. A tie counts half.
    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    check_pairs(margin=margin_B)
    if not margin_B.numel() or num_bins < 1:
        raise DataError(f"margin: {margin_B.numel()} pairs in {num_bins} bins; at least one of each is needed")
    margin_B = margin_B.detach().double()
    confidence_B = torch.sigmoid(margin_B.abs())
    right_B = (margin_B > 0).double() + 0.5 * (margin_B == 0).double()
    bins_B = ((confidence_B - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    gap_of_bins = torch.zeros(num_bins, dtype=torch.float64, device=margin_B.device)
    gap_of_bins.index_add_(0, bins_B, confidence_B - right_B)
    return float(gap_of_bins.abs().sum() / margin_B.numel())


def check_pairs(**tensors: torch.Tensor | None) -> None:
    """Raise DataError for tensors that are not of the same shape [B], or not finite."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shape = next(iter(present.values())).shape
    for name, tensor in present.items():
        if tensor.ndim != 1 or tensor.shape != shape:
            raise DataError(f"{name}: shape {tuple(tensor.shape)}, expected [B] = {tuple(shape[:1])}")
    check_finite(**{name: tensor.detach() for name, tensor in present.items()})


def _implicit_rewards(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    ref_chosen_B: torch.Tensor,
    ref_rejected_B: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implicit rewards beta (policy - reference log-probability) of chosen and rejected."""
    check_pairs(
        chosen_logprobs=chosen_B,
        rejected_logprobs=rejected_B,
        ref_chosen_logprobs=ref_chosen_B,
        ref_rejected_logprobs=ref_rejected_B,
    )
    if beta <= 0:
        raise DataError(f"beta: {beta} must be above 0")
    return beta * (chosen_B - ref_chosen_B), beta * (rejected_B - ref_rejected_B)


def accuracy(difference_B: torch.Tensor, count: float) -> torch.Tensor:
    """Share of positive differences; a tie counts half."""
    difference_B = difference_B.detach()
    return ((difference_B > 0).float() + 0.5 * (difference_B == 0).float()).sum() / count


def preference_metrics(
    chosen_reward_B: torch.Tensor, rejected_reward_B: torch.Tensor, count: float
) -> dict[str, torch.Tensor]:
    """Detached metrics of implicit rewards: accuracy, margin, chosen_reward, rejected_reward."""
    difference_B = chosen_reward_B - rejected_reward_B
    return {
        "accuracy": accuracy(difference_B, count),
        "margin": difference_B.detach().sum() / count,
        "chosen_reward": chosen_reward_B.detach().sum() / count,
        "rejected_reward": rejected_reward_B.detach().sum() / count,
    }
