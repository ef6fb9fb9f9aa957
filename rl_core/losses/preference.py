"""Losses on preferences: Bradley-Terry, DPO, cDPO, IPO, chosen NLL, ties, reward regression; calibration metrics.

Ties follow Rao-Kupper's or Davidson's model. Both have one parameter, expressed here as the probability of a tie
between two answers of equal reward, so that they are interchangeable.

Suffix: B pairs (rows in the regression). Losses and metrics are divided by `num_pairs`, the pairs of the optimizer
step, so that micro-batches add up; metrics of the order are divided by `num_ordered`, the pairs that are not ties.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn import functional

from rl_core.errors import DataError
from rl_core.losses.host_reads import check_condition
from rl_core.losses.masking import check_count, check_finite

TieModel = Literal["rao_kupper", "davidson"]


def bradley_terry_loss(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    *,
    num_pairs: float,
    margin_B: torch.Tensor | None = None,
    center_coef: float = 0.01,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the ranking loss of a reward model: mean of -log sigmoid(r_c - r_r - margin) + center_coef (r_c +
    r_r)^2.

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
    excess_B = difference_B if margin_B is None else difference_B - margin_B
    ranking = -functional.logsigmoid(excess_B).sum() / count
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
    """Compute the direct preference optimisation loss; with label_smoothing e > 0, conservative DPO.

    L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h = policy log-ratio - reference log-ratio.
    Args:
        *_logprobs_B: float [B], nats, summed over the completion tokens.
    Returns: scalar loss; {"accuracy", "margin" (mean beta h), "chosen_reward", "rejected_reward"}.
    Raises: DataError on shapes, non-finite values, no pairs, or e outside [0, 0.5).
    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Mitchell 2023, "A note on DPO with noisy preferences".
    """
    if not 0 <= label_smoothing < 0.5:
        raise DataError(f"label_smoothing: {label_smoothing} must be at least 0 and below 0.5")
    rewards = _compute_implicit_rewards(
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
    """Compute the identity preference optimisation loss L = (h - 1 / (2 beta))^2.

    Args:
        *_logprobs_B: float [B], nats, MEAN over each completion's tokens, so that length does not matter.
    Returns, Raises: as `dpo_loss`.
    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17.
    """
    rewards = _compute_implicit_rewards(
        chosen_logprobs_B, rejected_logprobs_B, ref_chosen_logprobs_B, ref_rejected_logprobs_B, beta
    )
    count = check_count("num_pairs", num_pairs)
    h_B = (rewards[0] - rewards[1]) / beta
    return (h_B - 1 / (2 * beta)).square().sum() / count, preference_metrics(*rewards, count)


def chosen_nll(
    chosen_logprobs_B: torch.Tensor, num_tokens_B: torch.Tensor, *, num_pairs: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the cross-entropy of the chosen completions: mean over pairs of -log p(chosen) / number of its tokens.

    DPO alone may lower both likelihoods as long as the rejected one falls faster; this term counteracts that.
    Args:
        chosen_logprobs_B: float [B], nats, SUMMED over the completion tokens, with gradient.
        num_tokens_B: [B], number of completion tokens, at least 1.
    Returns: scalar loss, nats per token; {"chosen_nll"}.
    Raises: DataError on shapes, non-finite values, no pairs, or a completion without tokens.
    Source: Pang et al. 2024, arXiv:2404.19733, eq. 2.
    """
    check_pairs(chosen_logprobs=chosen_logprobs_B, num_tokens=num_tokens_B)
    check_condition(
        (num_tokens_B >= 1).all(),
        lambda: DataError("num_tokens: every completion needs at least one token"),
    )
    loss = -(chosen_logprobs_B / num_tokens_B).sum() / check_count("num_pairs", num_pairs)
    return loss, {"chosen_nll": loss.detach()}


def calibration_error(margin_B: torch.Tensor, *, num_bins: int = 10) -> float:
    """Compute the expected calibration error of a reward model from margins r_c - r_r.

    Confidence of a predicted order is c = sigmoid(|margin|); over equal-width bins on [0.5, 1]: sum of
    bin share x |mean c - accuracy|. A tie counts half.
    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    check_pairs(margin=margin_B)
    if not margin_B.numel() or num_bins < 1:
        raise DataError(
            f"margin: {margin_B.numel()} pairs in {num_bins} bins; at least one of each is needed"
        )
    margin_B = margin_B.detach().double()
    confidence_B = torch.sigmoid(margin_B.abs())
    right_B = (margin_B > 0).double() + 0.5 * (margin_B == 0).double()
    bins_B = ((confidence_B - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    gap_of_bins = torch.zeros(num_bins, dtype=torch.float64, device=margin_B.device)
    gap_of_bins.index_add_(0, bins_B, confidence_B - right_B)
    return float(gap_of_bins.abs().sum() / margin_B.numel())


def check_pairs(**tensors: torch.Tensor | None) -> None:
    """Raise DataError unless all tensors have the same shape [B] and are finite."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shape = next(iter(present.values())).shape
    for name, tensor in present.items():
        if tensor.ndim != 1 or tensor.shape != shape:
            raise DataError(
                f"{name}: shape {tuple(tensor.shape)}, expected [B] = {tuple(shape[:1])}"
            )
    check_finite(**{name: tensor.detach() for name, tensor in present.items()})


def _compute_implicit_rewards(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    ref_chosen_B: torch.Tensor,
    ref_rejected_B: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the implicit rewards beta (policy - reference log-probability) of chosen and rejected."""
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
    """Return the share of positive differences; a tie counts half."""
    difference_B = difference_B.detach()
    return ((difference_B > 0).float() + 0.5 * (difference_B == 0).float()).sum() / count


def preference_metrics(
    chosen_reward_B: torch.Tensor, rejected_reward_B: torch.Tensor, count: float
) -> dict[str, torch.Tensor]:
    """Return detached metrics of implicit rewards: accuracy, margin, chosen_reward, rejected_reward."""
    difference_B = chosen_reward_B - rejected_reward_B
    return {
        "accuracy": accuracy(difference_B, count),
        "margin": difference_B.detach().sum() / count,
        "chosen_reward": chosen_reward_B.detach().sum() / count,
        "rejected_reward": rejected_reward_B.detach().sum() / count,
    }


def tied_nll(
    difference_B: torch.Tensor,
    ties_B: torch.Tensor,
    *,
    model: TieModel,
    tie_probability: float = 0.5,
) -> torch.Tensor:
    """Compute the negative log-likelihood [B] that the first side wins, or of a tie, at reward difference d.

    rao_kupper: p(win) = sigmoid(d - a), p(tie) = (n^2 - 1) sigmoid(d - a) sigmoid(-d - a), a = log n, n = (1 + t) /
    (1 - t). davidson: p(win) = 1 / z, p(tie) = 2 n e^(-d/2) / z, z = 1 + e^-d + 2 n e^(-d/2), n = t / (1 - t).
    In both models p(tie) = t at d = 0, and p(win) + p(loss) + p(tie) = 1.
    Args:
        difference_B: float [B], d, with gradient. ties_B: bool [B], True = a tie.
        tie_probability: t, above 0 and below 1.
    Raises: DataError on shapes, non-finite differences, or t outside (0, 1).
    Source: Rao and Kupper 1967, JASA 62(317), eqs. 2.3 to 2.5; Davidson 1970, JASA 65(329), eq. 2.4; for both as losses
        Chen et al. 2024, arXiv:2409.17431, sec. 3.
    """
    check_pairs(difference=difference_B)
    if ties_B.shape != difference_B.shape or ties_B.dtype != torch.bool:
        raise DataError(
            f"ties: {ties_B.dtype} {tuple(ties_B.shape)}, expected bool {tuple(difference_B.shape)}"
        )
    if not 0 < tie_probability < 1:
        raise DataError(f"tie_probability: {tie_probability} must be above 0 and below 1")
    if model == "rao_kupper":
        nu = (1 + tie_probability) / (1 - tie_probability)
        win_B = -functional.logsigmoid(difference_B - math.log(nu))
        loss_B = -functional.logsigmoid(-difference_B - math.log(nu))
        return torch.where(ties_B, win_B + loss_B - math.log(nu * nu - 1), win_B)
    log_2nu = math.log(2 * tie_probability / (1 - tie_probability))
    half_B = log_2nu - difference_B / 2
    win_B = torch.logsumexp(torch.stack([torch.zeros_like(half_B), -difference_B, half_B]), 0)
    return torch.where(ties_B, win_B - half_B, win_B)


def tied_bradley_terry_loss(
    chosen_B: torch.Tensor,
    rejected_B: torch.Tensor,
    ties_B: torch.Tensor,
    *,
    num_pairs: float,
    num_ordered: float,
    model: TieModel,
    tie_probability: float = 0.5,
    margin_B: torch.Tensor | None = None,
    center_coef: float = 0.01,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the ranking loss of a reward model on pairs and ties; see `tied_nll` and `bradley_terry_loss`.

    Args:
        ties_B: bool [B], True = neither side is better; which of them is passed as chosen does not matter.
        num_ordered: pairs of the whole optimizer step that are not ties; 0 = none, and no metrics of the order.
        margin_B: float [B], required score margin of the ordered pairs.
    Returns: scalar loss; {"ranking_loss", "reward_mean", "accuracy" and "margin" (of the ordered pairs, if any),
        "tie_gap" (mean |r_c - r_r| of the ties, if any)}.
    """
    check_pairs(chosen=chosen_B, rejected=rejected_B, margin=margin_B)
    count = check_count("num_pairs", num_pairs)
    difference_B = chosen_B - rejected_B
    required_B = torch.where(ties_B, 0.0, margin_B) if margin_B is not None else 0.0
    nll_B = tied_nll(
        difference_B - required_B, ties_B, model=model, tie_probability=tie_probability
    )
    ranking = nll_B.sum() / count
    loss = ranking + center_coef * (chosen_B + rejected_B).square().sum() / count
    metrics = {
        "ranking_loss": ranking.detach(),
        "reward_mean": (chosen_B + rejected_B).detach().sum() / (2 * count),
        **_compute_order_metrics(difference_B, ties_B, count, num_ordered),
    }
    return loss, metrics


def tied_dpo_loss(
    chosen_reward_B: torch.Tensor,
    rejected_reward_B: torch.Tensor,
    ties_B: torch.Tensor,
    *,
    num_pairs: float,
    num_ordered: float,
    model: TieModel,
    tie_probability: float = 0.5,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the DPO loss on pairs and ties (DPO-RK, DPO-D): `tied_nll` of the implicit rewards' difference.

    Args:
        *_reward_B: float [B], beta times (policy - reference log-probability), with gradient.
        num_ordered: as in `tied_bradley_terry_loss`.
    Returns: scalar loss; {"chosen_reward", "rejected_reward" (both of all pairs), "accuracy", "margin", "tie_gap"}.
    Source: Chen et al. 2024, arXiv:2409.17431, eqs. 8 and 9.
    """
    check_pairs(chosen_reward=chosen_reward_B, rejected_reward=rejected_reward_B)
    count = check_count("num_pairs", num_pairs)
    difference_B = chosen_reward_B - rejected_reward_B
    nll_B = tied_nll(difference_B, ties_B, model=model, tie_probability=tie_probability)
    return nll_B.sum() / count, {
        "chosen_reward": chosen_reward_B.detach().sum() / count,
        "rejected_reward": rejected_reward_B.detach().sum() / count,
        **_compute_order_metrics(difference_B, ties_B, count, num_ordered),
    }


def tied_ipo_loss(
    chosen_reward_B: torch.Tensor,
    rejected_reward_B: torch.Tensor,
    ties_B: torch.Tensor,
    *,
    num_pairs: float,
    num_ordered: float,
    beta: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the IPO loss on pairs and ties: (h - y)^2, y = 1 / (2 beta) for a preference and 0 for a tie.

    h = difference / beta. IPO regresses h on (p - 1/2) / beta, p the probability that the first side is preferred,
    which is 1/2 for a tie.
    Args, Returns: as `tied_dpo_loss`, with means over the tokens.
    Source: Azar et al. 2023, arXiv:2310.12036, eqs. 9 and 17.
    """
    check_pairs(chosen_reward=chosen_reward_B, rejected_reward=rejected_reward_B)
    count = check_count("num_pairs", num_pairs)
    difference_B = chosen_reward_B - rejected_reward_B
    target_B = torch.where(ties_B, 0.0, 1 / (2 * beta)).to(difference_B)
    loss = (difference_B / beta - target_B).square().sum() / count
    return loss, {
        "chosen_reward": chosen_reward_B.detach().sum() / count,
        "rejected_reward": rejected_reward_B.detach().sum() / count,
        **_compute_order_metrics(difference_B, ties_B, count, num_ordered),
    }


def _compute_order_metrics(
    difference_B: torch.Tensor, ties_B: torch.Tensor, num_pairs: float, num_ordered: float
) -> dict[str, torch.Tensor]:
    """Return accuracy and margin of the ordered pairs and the mean distance of the ties, each only if the step has
    some.
    """
    difference_B = difference_B.detach()
    metrics = {}
    if num_ordered > 0:
        right_B = (difference_B > 0).float() + 0.5 * (difference_B == 0).float()
        metrics["accuracy"] = (right_B * ~ties_B).sum() / num_ordered
        metrics["margin"] = (difference_B * ~ties_B).sum() / num_ordered
    if num_pairs > num_ordered:
        metrics["tie_gap"] = (difference_B.abs() * ties_B).sum() / (num_pairs - num_ordered)
    return metrics


def reward_regression_loss(
    scores_B: torch.Tensor, targets_B: torch.Tensor, *, num_rows: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the mean squared error of a reward model's scores: L = sum (s - y)^2 / num_rows.

    Args:
        scores_B: float [B], with gradient. targets_B: float [B], y, scores assigned by people, in the same units.
        num_rows: rows of the whole optimizer step.
    Returns: scalar loss; {"absolute_error" (mean), "reward_mean"}.
    Raises: DataError on shapes, non-finite values, or no rows.
    Source: HelpSteer2-style regression reward models, Wang et al. 2024, arXiv:2406.08673, sec. 4.1.
    """
    check_pairs(scores=scores_B, targets=targets_B)
    count = check_count("num_rows", num_rows)
    error_B = scores_B - targets_B
    return error_B.square().sum() / count, {
        "absolute_error": error_B.detach().abs().sum() / count,
        "reward_mean": scores_B.detach().sum() / count,
    }


def pairwise_concordance(scores_B: torch.Tensor, targets_B: torch.Tensor) -> float:
    """Compute the share of row pairs with different targets that the scores order correctly; equal scores count half.

    This is (Kendall's tau without ties + 1) / 2, comparable to the accuracy on preference pairs.
    Raises: DataError if no two targets differ.
    """
    check_pairs(scores=scores_B, targets=targets_B)
    ahead_BB = targets_B[:, None] > targets_B[None, :]
    if not bool(ahead_BB.any()):
        raise DataError("targets: all are equal, so there is no order to compare")
    difference_BB = (scores_B[:, None] - scores_B[None, :]).double()
    right_BB = (difference_BB > 0).double() + 0.5 * (difference_BB == 0).double()
    return float(right_BB[ahead_BB].mean())
