"""Krippendorff's alpha compared with published values, and the agreement shown on the page."""

import random

import pytest

from rl_core.errors import DataError
from rl_core.preferences.agreement import compute_krippendorff_alpha, measure_agreement
from rl_core.preferences.rating_journal import Rating

# Krippendorff 2011, "Computing Krippendorff's alpha-reliability", example C: four observers, twelve units
_TABLE = """
1 2 3 3 2 1 4 1 2 . . .
1 2 3 3 2 2 4 1 2 5 . 3
. 3 3 3 2 3 4 2 2 5 1 .
1 2 3 3 2 4 4 1 2 5 1 .
"""
UNITS = [
    [float(value) for value in column if value != "."]
    for column in zip(*(line.split() for line in _TABLE.strip().splitlines()), strict=True)
]


def make_rating(item, rater, choice, number=1, time=0.0, score=None):
    return Rating(number=number, item=item, rater=rater, choice=choice, time=time, score=score)


def test_published_example():
    assert compute_krippendorff_alpha(UNITS, "nominal") == pytest.approx(0.743, abs=5e-4)
    assert compute_krippendorff_alpha(UNITS, "interval") == pytest.approx(0.849, abs=5e-4)


def test_one_unit_by_hand():
    # two units, values (1, 1) and (1, -1): observed 1/4 (4 * 2) / 1 ... = 8 / 4; expected 3 * 1 * 4 * 2 / 12 = 2
    assert compute_krippendorff_alpha([[1, 1], [1, -1]]) == pytest.approx(1 - (8 / 4) / 2)
    # constant values have no expected disagreement
    assert compute_krippendorff_alpha([[1, 1], [1, 1]]) is None
    assert compute_krippendorff_alpha([[1], [0]]) is None
    with pytest.raises(DataError, match="scale"):
        compute_krippendorff_alpha([[1, 0]], "ratio")


def test_interval_raters_repeats_and_time():
    """Let two people agree on nine of ten pairs, and a third one toss a coin, on 200 pairs."""
    rng, ratings = random.Random(0), []
    for number in range(200):
        truth = rng.choice(["first", "second"])
        other = {"first": "second", "second": "first"}[truth]
        choices = {
            "ann": truth if rng.random() < 0.95 else other,
            "bob": truth if rng.random() < 0.95 else other,
            "coin": rng.choice(["first", "second"]),
        }
        ratings += [
            make_rating(f"p{number}", rater, choice, time=float(number))
            for rater, choice in choices.items()
        ]
    ratings += [
        make_rating("p0", "ann", ratings[0].choice),
        make_rating("p1", "ann", "tie"),
        make_rating("p2", "ann", "skip"),
    ]
    agreement = measure_agreement(ratings)
    by_name = {rater_agreement.rater: rater_agreement for rater_agreement in agreement.raters}
    assert agreement.units == 200 and agreement.low < agreement.alpha < agreement.high
    # two of the three pairs of raters agree by chance: 0.81 / 3 = 0.27
    assert agreement.low > 0.1 and agreement.high < 0.45
    assert by_name["coin"].alpha == pytest.approx(0, abs=0.15)
    assert by_name["ann"].alpha > by_name["coin"].alpha + 0.2
    # a skipped question does not count as a repeat
    assert (by_name["ann"].consistency, by_name["ann"].repeats) == (0.5, 2)
    assert [units for _, _, units in agreement.over_time] == [25] * 8 and agreement.over_time[-1][
        0
    ] == 199


def test_nothing_rated_twice():
    agreement = measure_agreement(
        [make_rating("a", "ann", "first"), make_rating("b", "bob", "tie")]
    )
    assert (agreement.alpha, agreement.low, agreement.units, agreement.over_time) == (
        None,
        None,
        0,
        [],
    )
    assert [rater_agreement.rater for rater_agreement in agreement.raters] == ["ann", "bob"]
