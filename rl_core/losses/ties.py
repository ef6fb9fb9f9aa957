"""Pairwise losses on preferences of which some are ties: Bradley-Terry and DPO under Rao-Kupper's or Davidson's model.

Suffix: B pairs. Both models have one parameter, given here as the probability of a tie between two answers of equal
reward, so that they can be exchanged. Metrics of the order are divided by `num_ordered`, the pairs of the optimizer
step that are no ties; the loss by `num_pairs`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn import functional

from rl_core.errors import DataError
from rl_core.losses.masking import check_count
from rl_core.losses.preference import check_pairs

__all__ = ["TieModel", "tied_bradley_terry_loss", "tied_dpo_loss", "tied_ipo_loss", "tied_nll"]

TieModel = Literal["rao_kupper", "davidson"]


def tied_nll(
    difference_B: torch.Tensor, ties_B: torch.Tensor, *, model: TieModel, tie_probability: float = 0.5
) -> torch.Tensor:
    """Negative log-likelihood [B] of the first side being preferred, or of a tie, given d = reward difference.

    rao_kupper: p(win) = sigmoid(d - a), p(tie) = (n^2 - 1) sigmoid(d - a) sigmoid(-d - a), a = log n, n = (1 + t) /
    (1 - t). davidson: p(win) = 1 / z, p(tie) = 2 n e^(-d/2) / z, z = 1 + e^-d + 2 n e^(-d/2), n = t / (1 - t).
    Either way p(tie) = t at d = 0, and p(win) + p(loss) + p(tie) = 1.
    Args:
        difference_B: float [B], d, with gradient. ties_B: bool [B], True = a tie.
        tie_probability: t, above 0 and below 1.
    Raises: DataError on shapes, non-finite differences, or t outside (0, 1).
    Source: Rao and Kupper 1967, JASA 62(317), eqs. 2.3 to 2.5; Davidson 1970, JASA 65(329), eq. 2.4; for both as losses
        Chen et al. 2024, arXiv:2409.17431, sec. 3.
    """
    check_pairs(difference=difference_B)
    if ties_B.shape != difference_B.shape or ties_B.dtype != torch.bool:
        raise DataError(f"ties: {ties_B.dtype} {tuple(ties_B.shape)}, expected bool {tuple(difference_B.shape)}")
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
    """Ranking loss of a reward model on pairs and ties; see `tied_nll` and `preference.bradley_terry_loss`.

    Args:
        ties_B: bool [B], True = neither side is better; which one stands as chosen has no meaning.
        num_ordered: pairs of the whole optimizer step that are no ties; 0 = none, then there is no metric of the order.
        margin_B: float [B], required score margin of the ordered pairs.
    Returns: scalar loss; {"ranking_loss", "reward_mean", "accuracy" and "margin" (of the ordered pairs, where there are
        some), "tie_gap" (mean |r_c - r_r| of the ties, where there are some)}.
    """
    check_pairs(chosen=chosen_B, rejected=rejected_B, margin=margin_B)
    count = check_count("num_pairs", num_pairs)
    difference_B = chosen_B - rejected_B
    required_B = torch.where(ties_B, 0.0, margin_B) if margin_B is not None else 0.0
    nll_B = tied_nll(difference_B - required_B, ties_B, model=model, tie_probability=tie_probability)
    ranking = nll_B.sum() / count
    loss = ranking + center_coef * (chosen_B + rejected_B).square().sum() / count
    metrics = {
        "ranking_loss": ranking.detach(),
        "reward_mean": (chosen_B + rejected_B).detach().sum() / (2 * count),
        **_of_order(difference_B, ties_B, count, num_ordered),
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
    """DPO on pairs and ties (DPO-RK, DPO-D): `tied_nll` of the implicit rewards' difference.

    Args:
        *_reward_B: float [B], beta times (policy - reference log-probability), with gradient.
        num_ordered: as in `tied_bradley_terry_loss`.
    Returns: scalar loss; {"chosen_reward", "rejected_reward" (both of all pairs), "accuracy", "margin", "tie_gap"}.
    Source: Chen et al. 2024, arXiv:2409.17431, eqs. 8 and 9.
    """
    check_pairs(chosen_reward=chosen_reward_B, rejected_reward=rejected_reward_B)
    count = check_count("num_pairs", num_pairs)
    difference_B = chosen_reward_B - rejected_reward_B
    loss = tied_nll(difference_B, ties_B, model=model, tie_probability=tie_probability).sum() / count
    return loss, {
        "chosen_reward": chosen_reward_B.detach().sum() / count,
        "rejected_reward": rejected_reward_B.detach().sum() / count,
        **_of_order(difference_B, ties_B, count, num_ordered),
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
    """IPO on pairs and ties: (h - y)^2, y = 1 / (2 beta) for a preference and 0 for a tie; h = difference / beta.

    IPO regresses h on (p - 1/2) / beta, p the probability that the first side is preferred, which is 1/2 for a tie.
    Args, Returns: as `tied_dpo_loss`, on means over the tokens.
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
        **_of_order(difference_B, ties_B, count, num_ordered),
    }


def _of_order(
    difference_B: torch.Tensor, ties_B: torch.Tensor, num_pairs: float, num_ordered: float
) -> dict[str, torch.Tensor]:
    """Accuracy and margin of the ordered pairs, and the mean distance of the ties; each where the step has some."""
    difference_B = difference_B.detach()
    found = {}
    if num_ordered > 0:
        right_B = (difference_B > 0).float() + 0.5 * (difference_B == 0).float()
        found["accuracy"] = (right_B * ~ties_B).sum() / num_ordered
        found["margin"] = (difference_B * ~ties_B).sum() / num_ordered
    if num_pairs > num_ordered:
        found["tie_gap"] = (difference_B.abs() * ties_B).sum() / (num_pairs - num_ordered)
    return found
