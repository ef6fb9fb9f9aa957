"""Losses on pairs without a reference model: SimPO, ORPO.

Suffix: B pairs. Metrics are divided by `num_pairs`, the pairs of the optimizer step, so that micro-batches add up.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional

from rl_core.errors import DataError
from rl_core.losses.host_reads import check_condition
from rl_core.losses.masking import check_count
from rl_core.losses.preference import accuracy, check_pairs, preference_metrics

MAX_ROUNDING_ERROR = 1e-4  # by which a sum of float32 log-probabilities may exceed 0
MAX_ODDS_LOGPROB = (
    -1e-6
)  # per token; odds are infinite at 0, so larger log-probabilities are clamped


def simpo_loss(
    chosen_logprobs_B: torch.Tensor,
    rejected_logprobs_B: torch.Tensor,
    *,
    num_pairs: float,
    beta: float = 2.0,
    gamma: float = 0.5,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the simple preference optimisation loss L = -log sigmoid(beta (m_c - m_r) - gamma). No reference term.

    Args:
        *_logprobs_B: float [B], nats, MEAN m over each completion's tokens (length-normalised), with gradient.
        beta: scale of the rewards beta m. gamma: target margin between them, at least 0; not multiplied by beta.
    Returns: scalar loss; {"accuracy", "margin" (mean beta (m_c - m_r)), "chosen_reward", "rejected_reward"}.
    Raises: DataError on shapes, non-finite values, no pairs, beta not above 0, or gamma below 0.
    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    check_pairs(chosen_logprobs=chosen_logprobs_B, rejected_logprobs=rejected_logprobs_B)
    if not beta > 0 or not 0 <= gamma < math.inf:
        raise DataError(f"beta, gamma: {beta}, {gamma} must be above 0 and at least 0")
    count = check_count("num_pairs", num_pairs)
    rewards = beta * chosen_logprobs_B, beta * rejected_logprobs_B
    loss = -functional.logsigmoid(rewards[0] - rewards[1] - gamma).sum() / count
    return loss, preference_metrics(*rewards, count)


def orpo_loss(
    chosen_logprobs_B: torch.Tensor,
    rejected_logprobs_B: torch.Tensor,
    *,
    num_pairs: float,
    beta: float = 0.1,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the odds-ratio preference loss L = -m_c - beta log sigmoid(log odds_c - log odds_r). No reference term.

    odds = p / (1 - p), p = exp(m). The first term is the cross-entropy of the chosen completion, per token.
    Args:
        *_logprobs_B: float [B], nats, MEAN m over each completion's tokens (length-normalised), with gradient; at most
            0. Above -1e-6 the odds are those of -1e-6, without gradient.
        beta: weight of the odds-ratio term, lambda in the paper.
    Returns: scalar loss; {"accuracy", "margin", "chosen_reward", "rejected_reward" (of beta m), "chosen_nll" (mean
        -m_c), "log_odds" (mean log odds ratio)}.
    Raises: DataError on shapes, non-finite values, a mean above 0, no pairs, or beta not above 0.
    Source: Hong et al. 2024, arXiv:2403.07691, eqs. 4, 6 and 7.
    """
    check_pairs(chosen_logprobs=chosen_logprobs_B, rejected_logprobs=rejected_logprobs_B)
    if not beta > 0:
        raise DataError(f"beta: {beta} must be above 0")
    for name, logprobs_B in (("chosen", chosen_logprobs_B), ("rejected", rejected_logprobs_B)):
        check_condition(
            ~(logprobs_B > MAX_ROUNDING_ERROR).any(),
            functools.partial(_build_sign_error, name, logprobs_B.detach()),
        )
    count = check_count("num_pairs", num_pairs)
    log_odds_B = _compute_log_odds(chosen_logprobs_B) - _compute_log_odds(rejected_logprobs_B)
    nll = -chosen_logprobs_B.sum() / count
    loss = nll - beta * functional.logsigmoid(log_odds_B).sum() / count
    metrics = preference_metrics(beta * chosen_logprobs_B, beta * rejected_logprobs_B, count)
    metrics |= {"chosen_nll": nll.detach(), "log_odds": log_odds_B.detach().sum() / count}
    return loss, metrics | {"accuracy": accuracy(log_odds_B, count)}


def _build_sign_error(name: str, logprobs_B: torch.Tensor) -> DataError:
    largest = float(logprobs_B.max())
    return DataError(f"{name}_logprobs: {largest}; a log-probability is at most 0")


def _compute_log_odds(logprobs_B: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)), computing 1 - p without cancellation near p = 1."""
    clamped_B = logprobs_B.clamp(max=MAX_ODDS_LOGPROB)
    return clamped_B - torch.log(-torch.expm1(clamped_B))
