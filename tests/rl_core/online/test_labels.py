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


def tally_letters(letters):
    return tally_votes([Ballot(None if x == "-" else x, sample=i) for i, x in enumerate(letters)])


@pytest.mark.parametrize(
    ("letters", "options", "text"),
    [
        ("aaab", {"min_confidence": 0.75, "min_votes": 4}, "a"),
        ("aaab", {"min_confidence": 0.76, "min_votes": 4}, None),
        ("aaa", {"min_confidence": 0.5, "min_votes": 4}, None),
        # a missing answer lowers the confidence
        ("a--", {"min_confidence": 0.5, "min_votes": 3}, None),
        ("---", {"min_confidence": 0.1, "min_votes": 1}, None),
        # 5 / (5 + 3.8415) = 0.5655
        ("aaaaa", {"min_confidence": 0.56, "min_votes": 5, "confidence": "wilson"}, "a"),
        ("aaaaa", {"min_confidence": 0.57, "min_votes": 5, "confidence": "wilson"}, None),
    ],
)
def test_a_consensus_becomes_a_label_only_above_its_thresholds(letters, options, text):
    pseudo_label = create_pseudo_label(tally_letters(letters), **options)
    assert (pseudo_label.text if pseudo_label else None) == text
    assert pseudo_label is None or (
        pseudo_label.source == "consensus"
        and pseudo_label.confidence == tally_letters(letters).confidence
    )


def test_answers_that_fail_the_check_do_not_support_a_label():
    ballots = [Ballot(x, passed_check=x == "a", sample=i) for i, x in enumerate("abcaa")]
    outcome = tally_votes(ballots, weights="check")
    assert outcome.confidence == 1.0 and outcome.num_ballots == 5
    assert create_pseudo_label(outcome, min_confidence=0.8, min_votes=3).text == "a"
    assert create_pseudo_label(outcome, min_confidence=0.8, min_votes=4) is None


def test_feedback_replaces_earlier_and_later_labels():
    consensus = Label("answer", "consensus", text="a")
    later = Label("answer", "consensus", text="c")
    feedback = create_feedback_label("a", right_answer="b")
    later_feedback = create_feedback_label("a", thumbs="up")
    played = Label("played", "environment")
    assert choose_prevailing_label(None, played) is played
    assert choose_prevailing_label(played, consensus) is consensus
    assert choose_prevailing_label(consensus, played) is consensus
    assert choose_prevailing_label(consensus, later) is later
    assert choose_prevailing_label(consensus, feedback) is feedback
    assert choose_prevailing_label(feedback, later) is feedback
    assert choose_prevailing_label(feedback, later_feedback) is later_feedback


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
        {"right_answer": "a", "thumbs": "up"},
        {"right_answer": " "},
        {"score": 1.5},
        {"score": float("nan")},
        {"thumbs": "left"},
        {"right_answer": "a", "comment": "x" * 70_000},
    ],
)
def test_feedback_without_information_is_refused(options):
    with pytest.raises(DataError):
        create_feedback_label("a", **options)
    with pytest.raises(DataError):
        Label.from_json({"kind": "answer", "source": "feedback", "colour": 1})


def test_precision_by_hand():
    precision = PseudoLabelPrecision()
    consensus = Label("answer", "consensus", text="Red")
    verdicts = [
        precision.observe(consensus, create_feedback_label("x", right_answer="red")),
        precision.observe(consensus, create_feedback_label("x", right_answer="blue")),
        precision.observe(consensus, create_feedback_label("red", score=0.5)),
        # feedback about another answer says nothing about the consensus
        precision.observe(consensus, create_feedback_label("blue", thumbs="down")),
    ]
    assert verdicts == [True, False, True, None]
    assert precision.compute_metrics()["online/pseudo_label_precision"] == 2 / 3
    precision.remove_observation(verdicts[1])
    assert (precision.agreed, precision.disagreed) == (2, 0)
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
    """Compare upper bounds of 95% Wilson intervals with one half.

    0 of 3: 56%, 0 of 4: 49%, 1 of 7: 51%, 1 of 8: 47%, 2 of 6: 70%.
    """
    precision = PseudoLabelPrecision(agreed, disagreed)
    assert precision.is_at_least(0.5) == is_half and precision.is_at_least(0.0)
