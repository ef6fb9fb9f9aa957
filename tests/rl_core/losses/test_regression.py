"""Regression on scores, worked by hand."""

import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.preference import pairwise_concordance, reward_regression_loss


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_squared_error_over_the_rows_of_the_step():
    loss, metrics = reward_regression_loss(t(1.0, -2.0), t(0.0, 1.0), num_rows=4)
    assert loss.item() == pytest.approx((1 + 9) / 4)
    assert metrics["absolute_error"].item() == 1 and metrics["reward_mean"].item() == pytest.approx(
        -0.25
    )
    with pytest.raises(DataError, match="scores"):
        reward_regression_loss(t(float("nan")), t(0.0), num_rows=1)


def test_concordance_counts_pairs_with_different_targets():
    # targets 1 < 2 < 3: pairs (3,2) right, (3,1) equal scores, (2,1) wrong
    assert pairwise_concordance(t(5.0, 1.0, 5.0), t(1.0, 2.0, 3.0)) == pytest.approx(
        (1 + 0.5 + 0) / 3
    )
    assert pairwise_concordance(t(0.0, 1.0, 9.0), t(1.0, 2.0, 2.0)) == 1
    with pytest.raises(DataError, match="all are equal"):
        pairwise_concordance(t(0.0, 1.0), t(2.0, 2.0))
