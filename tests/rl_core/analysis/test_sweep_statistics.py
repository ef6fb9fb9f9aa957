"""Statistics over seeds and over many comparisons: printed tables and values worked by hand."""

import math

import pytest

from rl_core.analysis.significance_tests import (
    adjust_p_values_holm,
    compute_seed_interval,
    compute_student_quantile,
)
from rl_core.errors import DataError


@pytest.mark.parametrize(
    "probability, degrees, expected",  # from a printed table of Student's t
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 10, 2.22814),
        (0.995, 4, 4.60409),
        (0.025, 2, -4.30265),
    ],
)
def test_quantiles_of_student(probability, degrees, expected):
    assert compute_student_quantile(probability, degrees) == pytest.approx(expected, rel=1e-5)


def test_quantiles_approach_those_of_the_normal_distribution():
    assert compute_student_quantile(0.975, 5000) == pytest.approx(1.95996, rel=1e-3)
    with pytest.raises(DataError, match="probability 1"):
        compute_student_quantile(1.0, 3)


def test_the_interval_over_three_seeds():
    # mean 0.6, s = 0.1, half = 4.30265 * 0.1 / sqrt(3) = 0.248414
    interval = compute_seed_interval([0.5, 0.6, 0.7])
    assert interval.n == 3 and interval.rate == pytest.approx(0.6)
    assert (interval.low, interval.high) == pytest.approx(
        (0.6 - 0.248414, 0.6 + 0.248414), rel=1e-5
    )
    assert compute_seed_interval([0.25]) == (0.25, -math.inf, math.inf, 1), (
        "one seed tells nothing of others"
    )
    with pytest.raises(DataError, match="finite"):
        compute_seed_interval([0.1, math.nan])


def test_adjusted_p_values_by_hand():
    # sorted 0.01, 0.03, 0.04: 3 * 0.01 = 0.03, 2 * 0.03 = 0.06, 1 * 0.04 = 0.04, which is raised to 0.06
    assert adjust_p_values_holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert adjust_p_values_holm([0.6, 0.7]) == [1.0, 1.0] and adjust_p_values_holm([]) == []
