"""Votes: winners, confidence and ties by hand; early stopping compared with every continuation."""

import itertools
import math

import pytest

from rl_core.errors import DataError
from rl_core.online.voting import (
    Ballot,
    VoteOutcome,
    count_samples_to_draw,
    is_settled,
    tally_votes,
)


def build_ballots(letters, **options):
    """Build one ballot per letter; `-` is a missing answer."""
    return [
        Ballot(None if letter == "-" else letter, sample=i, **options)
        for i, letter in enumerate(letters)
    ]


def test_a_vote_by_hand():
    outcome = tally_votes(build_ballots("aab-a"), max_samples=7)
    assert (outcome.answer, outcome.confidence, outcome.supporters) == ("a", 0.6, (0, 1, 4))
    # Wilson of 3 in 5 at z = 1.959964: centre 0.984146 / 1.768292, half 1.959964 sqrt(0.048 + 0.038415) / 1.768292
    assert (outcome.low, outcome.high) == pytest.approx((0.230724, 0.882379), abs=1e-6)
    # -(3/5 ln 3/5 + 2 * 1/5 ln 1/5)
    assert outcome.entropy == pytest.approx(0.6 * math.log(5 / 3) + 0.4 * math.log(5))
    assert outcome.is_early and not outcome.is_tie and outcome.effective_ballots == 5
    assert VoteOutcome.from_json(outcome.to_json()) == outcome


def test_weights_by_hand():
    # a: 0.5; b: 0.125 + 0.25 = 0.375, of 0.875
    weighted = [
        Ballot("a", math.log(0.5)),
        Ballot("B", math.log(0.125), sample=1),
        Ballot(" b ", math.log(0.25), sample=2),
    ]
    outcome = tally_votes(weighted, weights="logprob")
    assert outcome.answer == "a" and outcome.confidence == pytest.approx(4 / 7)
    # (0.875)^2 / (0.25 + 1/64 + 1/16) = 0.765625 / 0.328125
    assert outcome.effective_ballots == pytest.approx(7 / 3)
    long = [
        Ballot("a", math.log(0.5), 1),
        Ballot("b", math.log(0.25), 2),
        Ballot("b", math.log(0.125), 3),
    ]
    # all have a geometric mean of 1/2
    assert tally_votes(long, weights="mean_logprob").confidence == pytest.approx(2 / 3)
    checked = [
        Ballot("a", passed_check=False),
        Ballot("a", passed_check=False),
        Ballot("b", passed_check=True),
    ]
    outcome = tally_votes(checked, weights="check")
    assert (outcome.answer, outcome.confidence, outcome.entropy, outcome.supporters) == (
        "b",
        1.0,
        0.0,
        (2,),
    )


@pytest.mark.parametrize(("ties", "answer"), [("first", "b"), ("logprob", "a"), ("abstain", None)])
def test_ties(ties, answer):
    ballots = [
        Ballot("b", -2.0),
        Ballot("a", -3.0, sample=1),
        Ballot("a", -1.0, sample=2),
        Ballot("b", -2.0, sample=3),
    ]
    outcome = tally_votes(ballots, ties=ties)
    assert outcome.is_tie and outcome.answer == answer
    assert outcome.confidence == (0.5 if answer else 0.0)


def test_answers_are_equal_up_to_case_and_space_and_may_be_missing():
    assert tally_votes([Ballot("Red  Dog"), Ballot("red dog")]).confidence == 1.0
    outcome = tally_votes(build_ballots("--"))
    assert (outcome.answer, outcome.confidence, outcome.low, outcome.entropy) == (
        None,
        0.0,
        0.0,
        0.0,
    )
    assert tally_votes([Ballot("a", passed_check=False)], weights="check").answer is None
    # sharp s is folded; a lone surrogate is accepted
    assert tally_votes(
        [Ballot("STRASSE"), Ballot("straße"), Ballot("\ud800")]
    ).confidence == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_an_invalid_weight_is_refused(bad):
    with pytest.raises(DataError, match="logprob"):
        tally_votes([Ballot("a", bad)], weights="logprob")
    with pytest.raises(DataError, match="at least one"):
        tally_votes([])


@pytest.mark.parametrize("ties", ["first", "abstain", "logprob"])
def test_a_settled_vote_never_changes_and_an_open_one_can(ties):
    """Compare every sequence of five votes over two answers and no answer with all of its continuations."""
    for length in range(1, 6):
        for head in itertools.product("ab-", repeat=length):
            ballots = build_ballots(head, logprob=-0.5)
            now = tally_votes(ballots, ties=ties).answer
            continuations = [
                [Ballot(letter, logprob, sample=9) for letter in tail]
                for tail in itertools.product("abc", repeat=5 - length)
                for logprob in (-0.0, -1.0)
            ]
            can_change = any(
                tally_votes([*ballots, *tail], ties=ties).answer != now for tail in continuations
            )
            assert is_settled(ballots, 5, ties=ties) == (not can_change or length == 5), (
                head,
                ties,
            )


def test_a_batch_is_never_larger_than_needed():
    assert count_samples_to_draw([], 5) == 3  # a a a
    assert count_samples_to_draw([], 4) == 2  # two of four win, because the first answer wins a tie
    assert count_samples_to_draw([], 4, ties="abstain") == 3
    assert count_samples_to_draw(build_ballots("ab"), 5) == 2
    assert count_samples_to_draw(build_ballots("aaa"), 5) == 0
    assert count_samples_to_draw(build_ballots("aaa"), 5, min_samples=4) == 1
    assert count_samples_to_draw([], 1) == 1 and count_samples_to_draw(build_ballots("-"), 1) == 0
    # one further sample of weight 1 can settle the vote: 0.5 + 1 against the 1 that remains
    assert count_samples_to_draw([Ballot("a", math.log(0.5))], 3, weights="logprob") == 1


def test_weighted_votes_settle_only_when_the_rest_at_weight_one_cannot_win():
    half = [Ballot("a", math.log(0.5))]
    assert not is_settled(half, 2, weights="logprob")
    assert is_settled([*half, Ballot("a", math.log(0.75))], 3, weights="logprob")  # 1.25 > 1
