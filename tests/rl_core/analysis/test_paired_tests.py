"""Exact paired tests against enumeration of all cases."""

import itertools
import math

import numpy as np
import pytest

from rl_core.analysis.significance_tests import (
    betting_test,
    compute_remaining_alpha,
    compute_spent_alpha,
    estimate_episodes_needed,
    run_gain_test,
    sign_flip_test,
)
from rl_core.errors import DataError


def enumerate_sign_patterns(differences):
    """Return the share of all 2^n sign patterns whose sum is at least the observed one."""
    sizes = np.abs(differences)
    sums = np.array(
        [np.dot(signs, sizes) for signs in itertools.product((-1, 1), repeat=len(sizes))]
    )
    return float((sums >= np.sum(differences) - 1e-12).mean())


def test_wins_and_losses_by_hand():
    # at least 5 of 6 heads: (6 + 1) / 64
    assert sign_flip_test([1.0, -1.0, 0.0], [5, 1, 100]) == pytest.approx(7 / 64)
    assert sign_flip_test([1.0, -1.0], [1, 5]) == pytest.approx(63 / 64)
    assert sign_flip_test([0.0], [9]) == sign_flip_test([], []) == 1.0


def test_many_episodes_keep_the_digits_of_a_small_p():
    exact = sum(math.comb(1300, k) for k in range(800, 1301)) / 2**1300  # 3e-17
    assert sign_flip_test([1.0, -1.0], [800, 500]) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("grid", [1, 2, 3, 8, 12])
def test_samples_against_all_sign_patterns(seed, grid):
    rng = np.random.default_rng([seed, grid])
    differences = rng.integers(-grid, grid + 1, 11) / grid
    values, counts = np.unique(differences, return_counts=True)
    assert sign_flip_test(values, counts) == pytest.approx(
        enumerate_sign_patterns(differences), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(4))
def test_real_rewards_against_all_sign_patterns(seed):
    rng = np.random.default_rng(seed)
    differences = rng.normal(0.3, 1.0, 12)
    p_value = sign_flip_test(differences, np.ones(12, int), draws=200_000, seed=1)
    exact = enumerate_sign_patterns(differences)
    assert abs(p_value - exact) < 5 * math.sqrt(exact * (1 - exact) / 200_000) + 1e-5
    assert p_value != sign_flip_test(
        differences, np.ones(12, int), draws=200_000, seed=2
    )  # signs were drawn
    assert sign_flip_test([1e-3 * math.pi], [40], draws=999) == pytest.approx(1 / 1000)  # never 0


def test_kinds_of_test_and_their_counts():
    result = run_gain_test([1, 1, -1, 0, 0])
    assert (result.name, result.episodes, result.discordant) == ("sign test", 5, 3)
    assert result.p_value == pytest.approx(4 / 8)
    assert run_gain_test([0.5, 1, -0.5]).name == "sign-flip test"
    assert run_gain_test([1, 1, -1], margin=0.1).name == "betting test"
    assert run_gain_test([1, 1, -1], margin=0.1, bounded=False).name == "sign-flip test"
    # around the margin .5: .5, .5, -1.5; only +++, and ++- and its permutations with a sum of at least -.5: 7 of 8
    assert run_gain_test([1, 1, -1], margin=0.5, bounded=False).p_value == pytest.approx(
        enumerate_sign_patterns([0.5, 0.5, -1.5])
    )
    for wrong in ([], [math.nan], [[1.0]]):
        with pytest.raises(DataError):
            run_gain_test(wrong)
    with pytest.raises(DataError):
        betting_test([1.5], [3], 0.1)


@pytest.mark.parametrize("margin", [-0.2, -0.02, 0.05, 0.3])
@pytest.mark.parametrize("level", [0.025, 0.1, 0.3])
def test_the_betting_test_keeps_its_level_for_every_share_of_ties(margin, level):
    """Compute the exact size over all outcomes of 20 episodes, with the mean at the margin and any share of losses."""
    n = 20
    cases = [(wins, losses) for wins in range(n + 1) for losses in range(n + 1 - wins)]
    rejected = [
        betting_test([1.0, -1.0, 0.0], [wins, losses, n - wins - losses], margin) <= level
        for wins, losses in cases
    ]
    sizes = []
    for share in np.linspace(max(0.0, -margin), (1 - margin) / 2, 9):
        up, down = share + margin, share
        sizes.append(
            sum(
                math.comb(n, w)
                * math.comb(n - w, b)
                * up**w
                * down**b
                * max(0.0, 1 - up - down) ** (n - w - b)
                for (w, b), out in zip(cases, rejected, strict=True)
                if out
            )
        )
    assert max(sizes) <= level
    assert any(rejected)  # the test is able to reject


def test_the_betting_test_finds_what_is_there():
    assert betting_test([1.0, -1.0, 0.0], [100, 20, 380], 0.02) < 1e-4
    assert (
        betting_test([0.0], [1000], -0.05) < 1e-9
    )  # 1,000 equal episodes are not a loss of 5 points
    assert betting_test([1.0, -1.0, 0.0], [20, 100, 380], 0.02) == 1.0


def test_alpha_is_spent_and_never_overspent():
    assert [compute_spent_alpha(0.06, k) for k in (1, 2, 3)] == pytest.approx([0.03, 0.01, 0.005])
    assert [compute_remaining_alpha(0.06, k) for k in (1, 2, 3)] == pytest.approx(
        [0.03, 0.02, 0.015]
    )
    assert sum(compute_spent_alpha(0.05, k) for k in range(1, 10_000)) < 0.05
    with pytest.raises(DataError):
        compute_spent_alpha(0.05, 0)


def test_episodes_that_it_would_take():
    # mean .1, variance .2 - .01 = .19; (1.95996 + .84162)^2 * .19 / .01 = 149.1 -> 150
    assert estimate_episodes_needed([1.0] * 15 + [-1.0] * 5 + [0.0] * 80, 0.0, 0.025) == 150
    assert estimate_episodes_needed([1.0, -1.0], 0.0, 0.025) is None
