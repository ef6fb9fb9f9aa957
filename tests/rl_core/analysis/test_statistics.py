import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from rl_core.analysis.statistics import (
    Rate,
    StepLoop,
    bootstrap_mean,
    bootstrap_paired_difference,
    compute_clustered_rate,
    compute_distinct_words,
    compute_entropy,
    compute_mean_pass_at_k,
    compute_moving_average,
    compute_rate_difference,
    find_loop,
    pass_at_k,
    sign_test,
    wilson_interval,
)
from rl_core.errors import DataError


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # z = 1.959964, z^2 = 3.841459; 8/10: centre .8 + .192073 = .992073, half 1.959964 sqrt(.016 + .00960365)
        # = .313617, divided by 1.3841459 -> .490162, .943318
        (8, 10, 0.490162, 0.943318),
        (2, 10, 0.056682, 0.509838),  # the mirror image
        (0, 10, 0.0, 3.841459 / 13.841459),  # z^2 / (n + z^2)
        (10, 10, 10 / 13.841459, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_by_hand(successes, n, low, high):
    assert_allclose(wilson_interval(successes, n), (low, high), atol=2e-6)


def test_wilson_at_90_percent():
    # z = 1.644854, z^2 = 2.705543; 1/2 of 4: half 1.644854 sqrt(.0625 + .042274) = .532419, 1 + z^2/4 = 1.676386
    # -> (.838193 -+ .532419) / 1.676386
    assert_allclose(wilson_interval(2, 4, 0.9), (0.182401, 0.817599), atol=2e-6)


@pytest.mark.parametrize(
    ("successes", "n", "confidence"), [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0)]
)
def test_wilson_refuses(successes, n, confidence):
    with pytest.raises(DataError):
        wilson_interval(successes, n, confidence)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_is_never_a_point(pair):
    successes, n = pair
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1 and high > low


def test_clustered_rate_is_wilson_with_one_sample_each():
    rate = compute_clustered_rate([1] * 8 + [0] * 2, [1] * 10)
    assert rate.n == 10 and rate.rate == 0.8
    assert_allclose((rate.low, rate.high), wilson_interval(8, 10), rtol=1e-12)


def test_clustered_rate_counts_identical_samples_once():
    # every episode's 5 samples agree: 10 episodes are worth 10 observations, not 50
    rate = compute_clustered_rate([5] * 8 + [0] * 2, [5] * 10)
    assert rate.n == 50 and rate.rate == 0.8
    assert_allclose((rate.low, rate.high), wilson_interval(8, 10), rtol=1e-9)
    assert rate.high - rate.low > 1.5 * (wilson_interval(40, 50)[1] - wilson_interval(40, 50)[0])


def test_clustered_rate_between_the_extremes():
    # c = 4, 2, 0, 2 of 4: p = .5, spread = 4 + 0 + 4 + 0 = 8, n_eff = .25 * 256 / 8 = 8
    rate = compute_clustered_rate([4, 2, 0, 2], [4] * 4)
    assert_allclose((rate.low, rate.high), wilson_interval(4, 8), rtol=1e-12)
    # every episode at exactly p: more even than chance; never more than all 16 samples
    rate = compute_clustered_rate([2, 2, 2, 2], [4] * 4)
    assert_allclose((rate.low, rate.high), wilson_interval(2, 4), rtol=1e-12)
    rate = compute_clustered_rate([2, 2, 2, 3], [4] * 4)
    assert_allclose((rate.low, rate.high), wilson_interval(9, 16), rtol=1e-12)


def test_clustered_rate_at_the_ends_and_empty():
    assert_allclose(compute_clustered_rate([4, 4], [4, 4])[1:3], wilson_interval(2, 2))
    assert_allclose(compute_clustered_rate([0, 0], [4, 4])[1:3], wilson_interval(0, 2))
    assert compute_clustered_rate([], []) == (0.0, 0.0, 1.0, 0)
    with pytest.raises(DataError):
        compute_clustered_rate([2], [1])
    with pytest.raises(DataError):
        compute_clustered_rate([1, 1], [1])


def test_paired_bootstrap_sign_and_seed():
    a, b = [1, 1, 1, 0, 1, 1, 0, 1] * 10, [0, 1, 0, 0, 1, 0, 0, 1] * 10
    difference = bootstrap_paired_difference(a, b, 1000, seed=3)
    assert_allclose(difference.difference, 3 / 8)
    assert 0 < difference.low < 3 / 8 < difference.high
    assert bootstrap_paired_difference(a, b, 1000, seed=3) == difference
    assert bootstrap_paired_difference(a, b, 1000, seed=4) != difference
    back = bootstrap_paired_difference(b, a, 1000, seed=3)
    assert back.difference == -3 / 8 and back.high < 0


def test_paired_bootstrap_is_narrower_than_unpaired():
    rng = np.random.default_rng(0)
    hard = rng.random(400)
    b = (hard < 0.5).astype(float)
    a = (hard < 0.55).astype(float)  # solves all that b solves, and slightly more
    paired = bootstrap_paired_difference(a, b, 2000, seed=0)
    assert paired.low > 0
    shuffled = bootstrap_paired_difference(a, rng.permutation(b), 2000, seed=0)
    assert shuffled.low < 0 < shuffled.high


def test_bootstrap_has_the_binomial_width():
    # 100 values, half 1: bootstrap sd = .05, interval .5 -+ 1.96 * .05
    result = bootstrap_mean([0.0, 1.0], [50, 50], samples=20_000, seed=1)
    assert_allclose(result, (0.5, 0.402, 0.598), atol=0.011)
    narrow = bootstrap_mean([0.0, 1.0], [50, 50], samples=20_000, seed=1, confidence=0.5)
    assert_allclose(narrow, (0.5, 0.5 - 0.674 * 0.05, 0.5 + 0.674 * 0.05), atol=0.011)


def test_bootstrap_resamples_episodes_not_samples():
    # 20 episodes whose 50 samples agree: the interval is that of 20 draws, sd = sqrt(.25/20) = .112
    a = np.repeat([[1.0], [0.0]], 10, axis=0) * np.ones((1, 50))
    result = bootstrap_paired_difference(a, np.zeros((20, 50)), 5000, seed=0)
    assert_allclose(result.high - result.low, 2 * 1.96 * 0.112, atol=0.06)


def test_bootstrap_chunks_do_not_change_the_result(monkeypatch):
    values, counts = np.arange(50.0), np.full(50, 3)
    unchunked = bootstrap_mean(values, counts, samples=200, seed=0)
    monkeypatch.setattr("rl_core.analysis.statistics._CELLS_PER_CHUNK", 1000)
    assert bootstrap_mean(values, counts, samples=200, seed=0) == unchunked


@pytest.mark.parametrize(
    ("a", "b"), [([1], [1, 0]), ([], []), ([[1, 0]], [[[1]]]), ([math.nan], [0])]
)
def test_paired_bootstrap_refuses(a, b):
    with pytest.raises(DataError):
        bootstrap_paired_difference(a, b)


def test_sign_test_by_hand():
    assert_allclose(sign_test(5, 0), 2 / 32)  # 2 * .5^5
    assert_allclose(sign_test(1, 4), 2 * (1 + 5) / 32)
    assert sign_test(3, 3) == 1.0 and sign_test(0, 0) == 1.0
    assert_allclose(
        sign_test(300, 340), 2 * sum(math.comb(640, i) for i in range(301)) / 2**640, rtol=1e-9
    )
    # a million pairs: z = (498,999.5 - 500,000 + 1) / 500 with continuity correction -> about 2 Phi(-1.999)
    assert_allclose(sign_test(499_000, 501_000), 0.04561, rtol=1e-3)
    with pytest.raises(DataError):
        sign_test(-1, 2)


def test_pass_at_k_by_hand():
    assert_allclose(pass_at_k(4, 1, 1), 0.25)
    assert_allclose(pass_at_k(4, 1, 2), 0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert_allclose(pass_at_k(5, 2, 3), 0.9)  # 1 - C(3,3)/C(5,3) = 1 - 1/10; not 1 - .6^3 = .784
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(4, 1, 4) == 1.0
    for n, c, k in [(2, 1, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)]:
        with pytest.raises(DataError):
            pass_at_k(n, c, k)


def test_mean_pass_at_k_skips_episodes_with_too_few_samples():
    assert_allclose(compute_mean_pass_at_k([4, 4, 1], [1, 0, 1], 2), 0.25)
    assert compute_mean_pass_at_k([1], [1], 2) is None
    assert (
        compute_mean_pass_at_k([2, 2, 1], [1, 0, 1], 2) == 0.5
    )  # exactly enough samples are enough


def test_entropy_by_hand():
    assert_allclose(compute_entropy([2, 2, 0]), math.log(2))
    assert_allclose(compute_entropy([1, 3]), -0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert compute_entropy([]) == 0.0 and compute_entropy([7]) == 0.0


def test_distinct_n_by_hand():
    # bigrams: (zoom 1) (1 2) | (zoom 1) (1 3): 3 of 4 are distinct; none across the two texts
    assert compute_distinct_words(["zoom 1 2", "zoom 1 3"], 2) == 0.75
    assert compute_distinct_words(["zoom 1 2", "zoom 1 3"], 1) == 4 / 6
    assert compute_distinct_words(["zoom"], 2) == 0.0


@pytest.mark.parametrize(
    ("steps", "loop"),
    [
        ("abcd", None),
        ("", None),
        ("a", None),
        ("aba", None),  # coming back once is no cycle
        ("abcab", None),
        ("aa", StepLoop(0, 1, 2)),
        ("abab", StepLoop(0, 2, 2)),  # no two neighbours are equal
        ("xabcabcy", StepLoop(1, 3, 2)),
        ("ababa", StepLoop(0, 2, 2)),  # half a block at the end is not counted
        ("abbbbc", StepLoop(1, 1, 4)),
        ("aabcbcbc", StepLoop(2, 2, 3)),  # covers six steps rather than two
    ],
)
def test_find_loop(steps, loop):
    assert find_loop(steps) == loop


def test_find_loop_with_more_repeats():
    assert find_loop("abab", min_repeats=3) is None
    assert find_loop("zababab", min_repeats=3) == StepLoop(1, 2, 3)
    with pytest.raises(DataError):
        find_loop("aa", min_repeats=1)


@given(st.lists(st.integers(0, 2), max_size=14))
def test_find_loop_agrees_with_brute_force(steps):
    best = 0
    for start in range(len(steps)):
        for period in range(1, len(steps)):
            block, repeats = steps[start : start + period], 1
            while steps[start + repeats * period : start + (repeats + 1) * period] == block:
                repeats += 1
            if repeats > 1:
                best = max(best, repeats * period)
    loop = find_loop(steps)
    assert (loop.period * loop.repeats if loop else 0) == best


def test_moving_average_by_hand():
    assert_allclose(compute_moving_average([1, 2, 6, 4], 2), [1, 1.5, 4, 5])
    assert compute_moving_average([], 3).tolist() == []


def test_the_difference_of_two_shares_is_the_published_one():
    # Newcombe 1998, table II: 56/70 - 48/80, method 10: 0.2000 [0.0524, 0.3339]; 5/56 - 0/29: [-0.0381, 0.1926].
    def make_rate(successes, n):
        return Rate(successes / n, *wilson_interval(successes, n), n)

    assert_allclose(
        compute_rate_difference(make_rate(56, 70), make_rate(48, 80)),
        (0.2, 0.0524, 0.3339),
        atol=5e-5,
    )
    assert_allclose(
        compute_rate_difference(make_rate(5, 56), make_rate(0, 29)),
        (5 / 56, -0.0381, 0.1926),
        atol=5e-5,
    )
    difference = compute_rate_difference(make_rate(48, 80), make_rate(56, 70))
    assert_allclose(difference, (-0.2, -0.3339, -0.0524), atol=5e-5)
