"""The journal of ratings: numbers, undo, torn and damaged lines."""

import os

import pytest

from rl_core.errors import DataError
from rl_core.preferences.rating_journal import Rating, RatingJournal


def make_rating(item, rater="ann", choice="first", **fields):
    return Rating(number=0, item=item, rater=rater, choice=choice, **fields)


def test_ratings_and_undo_survive_a_restart(tmp_path):
    path = tmp_path / "deep" / "ratings.jsonl"
    journal = RatingJournal(path)
    assert journal.undo_last_rating("ann", 1.0) is None
    ratings = [
        journal.add_rating(make_rating("a")),
        journal.add_rating(make_rating("b", "bob")),
        journal.add_rating(make_rating("c", comment="x\u2028é" * 999)),
    ]
    assert [rating.number for rating in ratings] == [1, 2, 3] and len(ratings[2].comment) == 2000
    assert journal.undo_last_rating("ann", 5.0).item == "c"
    assert journal.add_rating(make_rating("d")).number == 4  # numbers are unique
    for reopened in (journal, RatingJournal(path)):
        assert [(rating.number, rating.item) for rating in reopened] == [
            (1, "a"),
            (2, "b"),
            (4, "d"),
        ]
        assert [rating.item for rating in reopened.list_ratings_of("ann")] == ["a", "d"]
        assert reopened.count_ratings_of("bob") == 1
        assert reopened.raters == ["ann", "bob"] and reopened.version == 5


def test_a_torn_line_is_cut_off_and_a_damaged_one_skipped(tmp_path, caplog):
    path = tmp_path / "ratings.jsonl"
    journal = RatingJournal(path)
    for item in "abc":
        journal.add_rating(make_rating(item))
    data = path.read_bytes()
    path.write_bytes(data + data[:40])
    reopened = RatingJournal(path)
    assert [rating.item for rating in reopened] == ["a", "b", "c"] and path.read_bytes() == data
    path.write_bytes(data.replace(b'"item":"b"', b'"item":"x"'))
    assert [rating.item for rating in RatingJournal(path)] == ["a", "c"]
    assert "checksum does not match" in caplog.text


def test_invalid_ratings_are_refused(tmp_path):
    journal = RatingJournal(tmp_path / "ratings.jsonl")
    for bad in (
        make_rating("a", choice="left"),
        make_rating("a", choice="score"),
        make_rating("a", score=3.0),
    ):
        with pytest.raises(DataError, match="is not a rating"):
            journal.add_rating(bad)
    assert len(journal) == 0 and not journal.path.exists()


def test_a_rating_is_on_disk_before_it_is_acknowledged(tmp_path, monkeypatch):
    journal = RatingJournal(tmp_path / "ratings.jsonl")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    journal.add_rating(make_rating("a"))
    journal.undo_last_rating("ann", 1.0)
    assert synced.count((tmp_path / "ratings.jsonl").stat().st_ino) == 2
