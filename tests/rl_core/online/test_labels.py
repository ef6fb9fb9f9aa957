"""Labels: thresholds, precedence, and the precision of pseudo-labels, by hand."""

import pytest

from rl_core.errors import DataError
from rl_core.online.labels import Label, PseudoLabelPrecision, feedback_label, prevailing, pseudo_label
from rl_core.online.voting import Ballot, tally


def vote(letters):
    return tally([Ballot(None if x == "-" else x, sample=i) for i, x in enumerate(letters)])


@pytest.mark.parametrize(
    ("letters", "options", "label"),
    [
        ("aaab", {"min_confidence": 0.75, "min_votes": 4}, "a"),
        ("aaab", {"min_confidence": 0.76, "min_votes": 4}, None),
        ("aaa", {"min_confidence": 0.5, "min_votes": 4}, None),
        ("a--", {"min_confidence": 0.5, "min_votes": 3}, None),  # silence counts against it
        ("---", {"min_confidence": 0.1, "min_votes": 1}, None),
        ("aaaaa", {"min_confidence": 0.56, "min_votes": 5, "confidence": "wilson"}, "a"),  # 5 / (5 + 3.8415) = 0.5655
        ("aaaaa", {"min_confidence": 0.57, "min_votes": 5, "confidence": "wilson"}, None),
    ],
)
def test_a_consensus_becomes_a_label_only_above_its_thresholds(letters, options, label):
    found = pseudo_label(vote(letters), **options)
    assert (found.text if found else None) == label
    assert found is None or (found.source == "consensus" and found.confidence == vote(letters).confidence)


def test_what_the_check_refuses_is_no_vote_behind_a_label():
    ballots = [Ballot(x, passed_check=x == "a", sample=i) for i, x in enumerate("abcaa")]
    outcome = tally(ballots, weights="check")
    assert outcome.confidence == 1.0 and outcome.num_ballots == 5
    assert pseudo_label(outcome, min_confidence=0.8, min_votes=3).text == "a"
    assert pseudo_label(outcome, min_confidence=0.8, min_votes=4) is None


def test_feedback_wins_also_over_what_comes_later():
    consensus, later = Label("answer", "consensus", text="a"), Label("answer", "consensus", text="c")
    said, again = feedback_label("a", right="b"), feedback_label("a", thumbs="up")
    played = Label("played", "environment")
    assert prevailing(None, played) is played and prevailing(played, consensus) is consensus
    assert prevailing(consensus, played) is consensus and prevailing(consensus, later) is later
    assert prevailing(consensus, said) is said and prevailing(said, later) is said
    assert prevailing(said, again) is again  # the caller changed his mind


def test_kinds_of_feedback():
    assert feedback_label("a", thumbs="up") == Label("answer", "feedback", text="a")
    assert feedback_label("a", thumbs="down", comment="no") == Label("score", "feedback", "a", 0.0, comment="no")
    assert feedback_label("a", score=-0.5) == Label("score", "feedback", "a", -0.5)
    assert feedback_label(None, thumbs="up") == Label("score", "feedback", None, 1.0)


@pytest.mark.parametrize(
    "options",
    [{}, {"right": "a", "thumbs": "up"}, {"right": " "}, {"score": 1.5}, {"score": float("nan")}, {"thumbs": "left"},
     {"right": "a", "comment": "x" * 70_000}],
)  # fmt: skip
def test_feedback_that_says_nothing_is_refused(options):
    with pytest.raises(DataError):
        feedback_label("a", **options)
    with pytest.raises(DataError):
        Label.from_json({"kind": "answer", "source": "feedback", "colour": 1})


def test_precision_by_hand():
    found, consensus = PseudoLabelPrecision(), Label("answer", "consensus", text="Red")
    verdicts = [
        found.observe(consensus, feedback_label("x", right="red")),
        found.observe(consensus, feedback_label("x", right="blue")),
        found.observe(consensus, feedback_label("red", score=0.5)),
        found.observe(consensus, feedback_label("blue", thumbs="down")),  # of another answer: tells nothing
    ]
    assert verdicts == [True, False, True, None]
    assert found.metrics()["online/pseudo_label_precision"] == 2 / 3
    found.take_back(verdicts[1])
    assert (found.agreed, found.disagreed) == (2, 0)
    assert PseudoLabelPrecision().metrics() == {}


@pytest.mark.parametrize(
    "agreed, disagreed, is_half",
    [(0, 0, True), (0, 3, True), (0, 4, False), (1, 5, True), (1, 6, True), (1, 7, False), (2, 4, True)],
)
def test_a_precision_is_refuted_by_its_whole_interval(agreed, disagreed, is_half):
    """Upper bounds of the 95% Wilson intervals: 0 of 3 56%, 0 of 4 49%, 1 of 7 51%, 1 of 8 47%, 2 of 6 70%."""
    found = PseudoLabelPrecision(agreed, disagreed)
    assert found.is_at_least(0.5) == is_half and found.is_at_least(0.0)
