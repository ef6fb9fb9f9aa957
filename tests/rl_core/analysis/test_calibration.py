import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.analysis.results import (
    calibrate_reward_model,
    compute_auc,
    compute_correlation,
    compute_reliability,
)
from rl_core.errors import DataError
from rl_core.losses.preference import calibration_error

LOGIT_3 = math.log(3)  # sigmoid = 0.75


def test_reliability_by_hand():
    # confidence 0.75 four times, right three times: no gap. Confidence 0.9 twice, both wrong: a gap of 0.9.
    bins, ece = compute_reliability(
        [LOGIT_3, LOGIT_3, LOGIT_3, -LOGIT_3, -math.log(9), -math.log(9)], 10
    )
    assert [b.right.n for b in bins] == [4, 2]
    assert [b.confidence for b in bins] == pytest.approx([0.75, 0.9])
    assert [b.right.rate for b in bins] == [0.75, 0.0]
    assert ece == pytest.approx(2 / 6 * 0.9)
    assert bins[1].right.low == 0 and 0.6 < bins[1].right.high < 0.7  # Wilson at 0 of 2: 0.658
    assert (
        compute_reliability([0.0], 10)[1] == 0.0
    )  # a tie is half right, and its confidence is one half


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=40), st.integers(1, 10))
def test_reliability_agrees_with_what_training_logs(margins, bins):
    expected = calibration_error(torch.tensor(margins, dtype=torch.float64), num_bins=bins)
    assert compute_reliability(margins, bins)[1] == pytest.approx(expected, abs=1e-9)


def test_ranking_by_hand():
    assert compute_auc([2.0, 1.0], [0.0, 1.0]) == (2 + 1.5) / 4
    assert compute_auc([0.0], [1.0]) == 0.0
    assert compute_auc([], [1.0]) is None and compute_auc([1.0], []) is None


def test_correlation_by_hand():
    # values 0 1 2 3, flags 0 0 1 1: cov = 2, |a|^2 = 5, |b|^2 = 1
    assert compute_correlation([0, 1, 2, 3], [0, 0, 1, 1]) == pytest.approx(2 / math.sqrt(5))
    assert compute_correlation([0, 1, 2, 3], [1, 1, 0, 0]) == pytest.approx(-2 / math.sqrt(5))
    assert (
        compute_correlation([1.0, 1.0], [0, 1]) is None
        and compute_correlation([1.0, 2.0], [1, 1]) is None
    )


def test_pairs_are_built_within_episodes_only():
    # episode a: success 2 against failures 0 and 3; episode b has a success alone: no pair
    calibration = calibrate_reward_model(
        [2.0, 0.0, 3.0, 9.0], [True, False, False, True], ["a", "a", "a", "b"]
    )
    assert calibration.pairs == 2
    assert calibration.accuracy.rate == 0.5 and calibration.accuracy.n == 2
    assert calibration.auc == 0.75  # over all: 2 beats 0 and not 3, 9 beats both
    assert len(calibration.bins) == 1  # too few pairs for more
    assert calibration.collect_metrics().keys() == {
        "ece",
        "accuracy",
        "correlation",
        "auc",
        "pairs",
        "trajectories",
    }
    assert "scores" not in calibration.to_json()


def test_without_pairs_no_value_is_invented():
    calibration = calibrate_reward_model([1.0, 2.0], [True, True], [1, 1])
    assert calibration.bins == [] and calibration.collect_metrics() == {
        "pairs": 0.0,
        "trajectories": 2.0,
    }


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, math.nan]])
def test_bad_input(scores):
    with pytest.raises(DataError):
        calibrate_reward_model(scores, [True, False][: max(len(scores), 2)], [1, 1])
