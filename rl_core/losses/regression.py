"""Regression of a reward model on scores that people gave. Suffix: B rows."""

from __future__ import annotations

import torch

from rl_core.errors import DataError
from rl_core.losses.masking import check_count
from rl_core.losses.preference import check_pairs

__all__ = ["concordance", "reward_regression_loss"]


def reward_regression_loss(
    scores_B: torch.Tensor, targets_B: torch.Tensor, *, num_rows: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean squared error between a reward model's scores and given ones: L = sum (s - y)^2 / num_rows.

    Args:
        scores_B: float [B], with gradient. targets_B: float [B], y, in the units of the scores.
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


def concordance(scores_B: torch.Tensor, targets_B: torch.Tensor) -> float:
    """Share of the row pairs with different targets that the scores order rightly; equal scores count half.

    (Kendall's tau without ties + 1) / 2: comparable to the accuracy on preference pairs.
    Raises: DataError where no two targets differ.
    """
    check_pairs(scores=scores_B, targets=targets_B)
    ahead_BB = targets_B[:, None] > targets_B[None, :]
    if not bool(ahead_BB.any()):
        raise DataError("targets: all are equal, so no order can be told")
    difference_BB = (scores_B[:, None] - scores_B[None, :]).double()
    right_BB = (difference_BB > 0).double() + 0.5 * (difference_BB == 0).double()
    return float(right_BB[ahead_BB].mean())
