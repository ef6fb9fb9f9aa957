"""Loss on single completions labelled desirable or undesirable: KTO.

Suffix: B rows. Sums are divided by the counts of the optimizer step, so that micro-batches add up.
"""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_count
from rl_core.losses.preference import check_pairs


def kto_reference_point(mismatched_logratio_sum: float, *, num_rows: float) -> float:
    """Compute the reference point z of KTO: max(0, mean of log policy - log reference), in nats, constant for a step.

    Args:
        mismatched_logratio_sum: sum over the rows of the step, each row with a completion of another prompt and summed
            over its tokens; without gradient. Estimates KL(policy || reference), which is at least 0.
    Raises: DataError for no rows.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306, sec. 4.1 (the estimate of z0).
    """
    return max(0.0, mismatched_logratio_sum / check_count("num_rows", num_rows))


def kto_loss(
    logprobs_B: torch.Tensor,
    ref_logprobs_B: torch.Tensor,
    desirable_B: torch.Tensor,
    *,
    reference_point: float,
    num_desirable: float,
    num_undesirable: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the Kahneman-Tversky loss on unpaired labels, the mean over the rows of the step.

    L = w_d (1 - sigmoid(beta (h - z))) for a desirable row, w_u (1 - sigmoid(beta (z - h))) for an undesirable one,
    h = log policy - log reference of the completion.
    Args:
        logprobs_B, ref_logprobs_B: float [B], nats, SUMMED over the completion tokens; the first with gradient.
        desirable_B: bool [B], True = desirable.
        reference_point: z, nats, from `kto_reference_point` over the whole step; no gradient passes through it.
        num_desirable, num_undesirable: rows of either kind in the whole step; their sum is the denominator.
        desirable_weight, undesirable_weight: w_d and w_u, at least 0.
    Returns: scalar loss; {"accuracy" (rows on their side of z; a tie counts half), "chosen_reward" and
        "rejected_reward" (mean beta h of the desirable and of the undesirable rows), "margin" (their difference),
        "reference_point"}. Means of a kind without rows are 0.
    Raises: DataError on shapes, non-finite values, no rows, a weight below 0, z below 0, or beta not above 0.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eqs. 7 and 8.
    """
    check_pairs(logprobs=logprobs_B, ref_logprobs=ref_logprobs_B)
    if desirable_B.dtype != torch.bool or desirable_B.shape != logprobs_B.shape:
        raise DataError(
            f"desirable: {desirable_B.dtype} {tuple(desirable_B.shape)}, expected bool as logprobs"
        )
    if not beta > 0 or not (
        desirable_weight >= 0 and undesirable_weight >= 0 and reference_point >= 0
    ):
        raise DataError(
            "beta must be above 0; desirable_weight, undesirable_weight, reference_point at least 0"
        )
    count = check_count("num_desirable + num_undesirable", num_desirable + num_undesirable)
    ratio_B = logprobs_B - ref_logprobs_B
    sign_B = desirable_B.to(logprobs_B.dtype) * 2 - 1
    weight_B = (
        torch.full_like(ratio_B, undesirable_weight)
        .masked_fill(desirable_B, desirable_weight)
        .detach()
    )
    ahead_B = beta * sign_B * (ratio_B - reference_point)
    # 1 - sigmoid(x) = sigmoid(-x), without cancellation.
    loss = (weight_B * torch.sigmoid(-ahead_B)).sum() / count
    rewards_B, ahead_B = beta * ratio_B.detach(), ahead_B.detach()
    chosen = (rewards_B * desirable_B).sum() / max(num_desirable, 1)
    rejected = (rewards_B * ~desirable_B).sum() / max(num_undesirable, 1)
    return loss, {
        "accuracy": ((ahead_B > 0).float() + 0.5 * (ahead_B == 0).float()).sum() / count,
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reference_point": reference_point * torch.ones_like(logprobs_B).sum() / count,
    }
