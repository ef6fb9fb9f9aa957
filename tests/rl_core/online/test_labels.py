"""Labels: thresholds, precedence, and the precision of pseudo-labels, by hand."""

import pytest

from rl_core.errors import DataError
from rl_core.online.labels import (
    Label,
    PseudoLabelPrecision,
    choose_prevailing_label,
    create_feedback_label,
    create_pseudo_label,
)
from rl_core.online.voting import Ballot, tally_votes


def vote(letters):
    return tally_votes([Ballot(None if x == "-" else x, sample=i) for i, x in enumerate(letters)])


@pytest.mark.parametrize(
    ("letters", "options", "label"),
    [
        ("aaab", {"min_confidence": 0.75, "min_votes": 4}, "a"),
        ("aaab", {"min_confidence": 0.76, "min_votes": 4}, None),
        ("aaa", {"min_confidence": 0.5, "min_votes": 4}, None),
        ("a--", {"min_confidence": 0.5, "min_votes": 3}, None),  # silence counts against it
        ("---", {"min_confidence": 0.1, "min_votes": 1}, None),
        (
            "aaaaa",
            {"min_confidence": 0.56, "min_votes": 5, "confidence": "wilson"},
            "a",
        ),  # 5 / (5 + 3.8415) = 0.5655
        ("aaaaa", {"min_confidence": 0.57, "min_votes": 5, "confidence": "wilson"}, None),
    ],
)
def test_a_consensus_becomes_a_label_only_above_its_thresholds(letters, options, label):
    found = create_pseudo_label(vote(letters), **options)
    assert (found.text if found else None) == label
    assert found is None or (
        found.source == "consensus" and found.confidence == vote(letters).confidence
    )


def test_what_the_check_refuses_is_no_vote_behind_a_label():
    ballots = [Ballot(x, passed_check=x == "a", sample=i) for i, x in enumerate("abcaa")]
    outcome = tally_votes(ballots, weights="check")
    assert outcome.confidence == 1.0 and outcome.num_ballots == 5
    assert create_pseudo_label(outcome, min_confidence=0.8, min_votes=3).text == "a"
    assert create_pseudo_label(outcome, min_confidence=0.8, min_votes=4) is None


def test_feedback_wins_also_over_what_comes_later():
    consensus, later = (
        Label("answer", "consensus", text="a"),
        Label("answer", "consensus", text="c"),
    )
    said, again = (
        create_feedback_label("a", right_answer="b"),
        create_feedback_label("a", thumbs="up"),
    )
    played = Label("played", "environment")
    assert (
        choose_prevailing_label(None, played) is played
        and choose_prevailing_label(played, consensus) is consensus
    )
    assert (
        choose_prevailing_label(consensus, played) is consensus
        and choose_prevailing_label(consensus, later) is later
    )
    assert (
        choose_prevailing_label(consensus, said) is said
        and choose_prevailing_label(said, later) is said
    )
    assert choose_prevailing_label(said, again) is again  # the caller changed his mind


def test_kinds_of_feedback():
    assert create_feedback_label("a", thumbs="up") == Label("answer", "feedback", text="a")
    assert create_feedback_label("a", thumbs="down", comment="no") == Label(
        "score", "feedback", "a", 0.0, comment="no"
    )
    assert create_feedback_label("a", score=-0.5) == Label("score", "feedback", "a", -0.5)
    assert create_feedback_label(None, thumbs="up") == Label("score", "feedback", None, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"right": "a", "thumbs": "up"},
        {"right": " "},
        {"score": 1.5},
        {"score": float("nan")},
        {"thumbs": "left"},
        {"right": "a", "comment": "x" * 70_000},
    ],
)
def test_feedback_that_says_nothing_is_refused(options):
    with pytest.raises(DataError):
        create_feedback_label("a", **options)
    with pytest.raises(DataError):
        Label.from_json({"kind": "answer", "source": "feedback", "colour": 1})


def test_precision_by_hand():
    found, consensus = PseudoLabelPrecision(), Label("answer", "consensus", text="Red")
    verdicts = [
        found.observe(consensus, create_feedback_label("x", right_answer="red")),
        found.observe(consensus, create_feedback_label("x", right_answer="blue")),
        found.observe(consensus, create_feedback_label("red", score=0.5)),
        found.observe(
            consensus, create_feedback_label("blue", thumbs="down")
        ),  # of another answer: tells nothing
    ]
    assert verdicts == [True, False, True, None]
    assert found.compute_metrics()["online/pseudo_label_precision"] == 2 / 3
    found.remove_observation(verdicts[1])
    assert (found.agreed, found.disagreed) == (2, 0)
    assert PseudoLabelPrecision().compute_metrics() == {}


@pytest.mark.parametrize(
    "agreed, disagreed, is_half",
    [
        (0, 0, True),
        (0, 3, True),
        (0, 4, False),
        (1, 5, True),
        (1, 6, True),
        (1, 7, False),
        (2, 4, True),
    ],
)
def test_a_precision_is_refuted_by_its_whole_interval(agreed, disagreed, is_half):
    """Upper bounds of the 95% Wilson intervals: 0 of 3 56%, 0 of 4 49%, 1 of 7 51%, 1 of 8 47%, 2 of 6 70%."""
    found = PseudoLabelPrecision(agreed, disagreed)
    assert found.is_at_least(0.5) == is_half and found.is_at_least(0.0)
