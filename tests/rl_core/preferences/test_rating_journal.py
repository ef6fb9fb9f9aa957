"""The journal of ratings: numbers, undo, torn and damaged lines."""

import os

import pytest

from rl_core.errors import DataError
from rl_core.preferences.rating_journal import Rating, RatingJournal


def rating(item, rater="ann", choice="first", **more):
    return Rating(number=0, item=item, rater=rater, choice=choice, **more)


def test_ratings_and_undo_are_there_again(tmp_path):
    path = tmp_path / "deep" / "ratings.jsonl"
    journal = RatingJournal(path)
    assert journal.undo_last_rating("ann", 1.0) is None
    kept = [
        journal.add_rating(rating("a")),
        journal.add_rating(rating("b", "bob")),
        journal.add_rating(rating("c", comment="x\u2028é" * 999)),
    ]
    assert [one.number for one in kept] == [1, 2, 3] and len(kept[2].comment) == 2000
    assert journal.undo_last_rating("ann", 5.0).item == "c"
    assert journal.add_rating(rating("d")).number == 4  # a number is never given twice
    for again in (journal, RatingJournal(path)):
        assert [(one.number, one.item) for one in again] == [(1, "a"), (2, "b"), (4, "d")]
        assert [one.item for one in again.list_ratings_of("ann")] == [
            "a",
            "d",
        ] and again.count_ratings_of("bob") == 1
        assert again.raters == ["ann", "bob"] and again.version == 5


def test_a_torn_line_is_cut_off_and_a_damaged_one_left_out(tmp_path, caplog):
    path = tmp_path / "ratings.jsonl"
    journal = RatingJournal(path)
    for item in "abc":
        journal.add_rating(rating(item))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    again = RatingJournal(path)
    assert [one.item for one in again] == ["a", "b", "c"] and path.read_bytes() == whole
    path.write_bytes(whole.replace(b'"item":"b"', b'"item":"x"'))
    assert [one.item for one in RatingJournal(path)] == ["a", "c"]
    assert "checksum does not match" in caplog.text


def test_what_means_nothing_is_refused(tmp_path):
    journal = RatingJournal(tmp_path / "ratings.jsonl")
    for bad in (rating("a", choice="left"), rating("a", choice="score"), rating("a", score=3.0)):
        with pytest.raises(DataError, match="is not a rating"):
            journal.add_rating(bad)
    assert len(journal) == 0 and not journal.path.exists()


def test_a_rating_is_on_the_disk_before_anybody_is_told(tmp_path, monkeypatch):
    journal = RatingJournal(tmp_path / "ratings.jsonl")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    journal.add_rating(rating("a"))
    journal.undo_last_rating("ann", 1.0)
    assert synced.count((tmp_path / "ratings.jsonl").stat().st_ino) == 2
