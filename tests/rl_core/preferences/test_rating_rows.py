"""Items from files and trajectories, and ratings as rows that training reads unchanged."""

import json

import pytest

from rl_core.data.records import read_preferences
from rl_core.errors import DataError
from rl_core.preferences.items import RatedItem, extract_answer, load_items, read_items, write_items
from rl_core.preferences.rating_journal import Rating, build_rating_rows, write_rating_rows
from rl_core.types import Trajectory, Turn

CALLS = [
    {"role": "assistant", "content": '{"name": "look"}'},
    {"role": "tool", "content": "a red dot\u2028 ü"},
    {"role": "assistant", "content": "red"},
]
ITEMS = [
    RatedItem("1 ?", ("one", "uno"), ("m/1", "m/2")),
    RatedItem(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "2 ?"}],
        (CALLS, "two"),
        ("m/1", "m/2"),
    ),
    RatedItem("3 ?", ("three",), ("m/1",)),
]


def make_rating(number, item, choice, **fields):
    return Rating(
        number=number,
        item=ITEMS[item].id,
        rater="ann",
        choice=choice,
        time=7.0,
        seconds=2.5,
        **fields,
    )


def test_rows_are_read_by_training_with_ties_and_scores(tmp_path, caplog):
    ratings = [
        make_rating(1, 0, "second", left=1, reason="clearer"),
        make_rating(2, 1, "tie"),
        make_rating(3, 1, "both_bad", comment="neither"),
        make_rating(4, 0, "skip"),
        make_rating(5, 1, "first"),
    ]
    path = tmp_path / "preferences.jsonl"
    assert write_rating_rows(path, build_rating_rows(ITEMS, ratings)) == 4
    records = read_preferences(path)
    rows = records.rows
    assert (rows[0]["chosen"], rows[0]["rejected"]) == ("uno", "one") and "tie" not in rows[0]
    assert [bool(row.get("tie")) for row in rows] == [False, True, True, False]
    assert rows[3]["chosen"] == CALLS and rows[3]["prompt"][0]["role"] == "system"
    assert records.unread_columns == set() and "not read" not in caplog.text
    assert not records.repeats.contradictions
    raw = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert raw[0]["judgement"] == {
        "rater": "ann",
        "time": 7.0,
        "seconds": 2.5,
        "number": 1,
        "choice": "second",
        "sources": ["m/2", "m/1"],
        "reason": "clearer",
        "asked": 1,
        "shown_left": 1,
    }
    scored = tmp_path / "scores.jsonl"
    write_rating_rows(scored, build_rating_rows(ITEMS, [make_rating(1, 2, "score", score=4.0)]))
    assert read_preferences(scored).rows == [{"prompt": "3 ?", "completion": "three", "score": 4.0}]


def test_items_are_read_from_files_and_written_back(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "1 ?", "answers": ["one", "uno"], "sources": ["a", "b"]},
        {"prompt": "1 ?", "answers": ["uno", "one"]},  # the same pair
        {"prompt": "2 ?", "answers": [CALLS, "two"]},
        {"prompt": "3 ?", "answers": ["same", "same"]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    items = load_items(path, answers=2)
    assert [item.answers[0] for item in items] == ["one", CALLS]
    assert len(load_items(path, answers=1)) == 5
    write_items(tmp_path / "kept" / "items.jsonl", ITEMS)
    reread = read_items(tmp_path / "kept" / "items.jsonl")
    assert [item.id for item in reread] == [item.id for item in ITEMS]
    assert reread[1].answers[0] == CALLS
    preferences = tmp_path / "old.jsonl"
    preferences.write_text(json.dumps({"prompt": "p", "chosen": "good", "rejected": "bad"}) + "\n")
    assert load_items(preferences, answers=2)[0].answers == ("good", "bad")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1 ?", "answers": ["a", "b", "c"]}, "answers must be a list of one or two"),
        ({"prompt": "", "answers": ["a", "b"]}, "prompt: must be text or a list of messages"),
        ({"prompt": "1 ?", "answers": ["a", 3]}, r"answers\[1\]: must be text"),
        (
            {"prompt": "1 ?", "answers": ["a", "b"], "sources": ["m"]},
            "sources must name one model for each",
        ),
        ({"prompt": "1 ?", "answers": ["a", "a"]}, "holds no item with 2 different answers"),
        ({"prompt": "1 ?", "answers": [[{"role": "martian", "content": ""}], "b"]}, "role"),
    ],
)
def test_bad_files_are_named(tmp_path, row, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        load_items(path, answers=2)


def test_a_trajectory_as_an_answer():
    turns = [Turn("look", observation="a dot"), Turn("red", observation="the end that nobody saw")]
    trajectory = Trajectory("e", "easy", "k", 1, "?", "red", turns=turns)
    assert extract_answer(trajectory) == [
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "a dot"},
        {"role": "assistant", "content": "red"},
    ]
    assert extract_answer(Trajectory("e", "easy", "k", 1, "?", "red", turns=turns[:1])) == "look"
