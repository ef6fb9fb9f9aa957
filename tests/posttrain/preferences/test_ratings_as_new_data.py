"""Ratings as new data of `posttrain retrain`: those recorded after a model was trained are detected."""

import dataclasses

from posttrain.preferences.rating_session import RatingSession
from rl_core.preferences.items import RatedItem
from rl_core.settings import RatingSettings
from tasks.config import load_settings
from tasks.lifecycle.data_lineage import find_new_data, inspect_data_sources

ITEMS = [
    RatedItem(f"question {n}", (f"good {n}", f"bad {n}"), ("models:/m/1", "models:/m/2"))
    for n in range(30)
]


def record_answer(room, rater, choice="left"):
    state = room.describe_question(rater)
    return room.record_rating(
        rater, {"item": state["question"]["item"], "count": state["rated"], "choice": choice}, 1.0
    )


def load_rating_settings(room):
    settings = load_settings("rlhf", ["stages.prepare_data.preferences=null"])
    data = dataclasses.replace(settings.stages.prepare_data, preferences=str(room.rows_file))
    return dataclasses.replace(
        settings, stages=dataclasses.replace(settings.stages, prepare_data=data)
    )


def test_later_ratings_are_appended_rows_without_skips(tmp_path):
    room = RatingSession(tmp_path, ITEMS, RatingSettings(choose="random", overlap=0.5))
    for _ in range(6):
        record_answer(room, "ann")
    room.write_data_file()
    settings = load_rating_settings(room)
    seen = inspect_data_sources(settings)
    assert find_new_data(seen, inspect_data_sources(settings)).rows == 0
    record_answer(room, "ann", "skip")
    room.write_data_file()
    assert find_new_data(seen, inspect_data_sources(settings)).rows == 0
    for rater, choice in (("ann", "right"), ("bob", "tie"), ("bob", "both_bad"), ("ann", "left")):
        record_answer(room, rater, choice)
    room.write_data_file()
    new_data = find_new_data(seen, inspect_data_sources(settings))
    assert str(
        new_data
    ) == "preferences: preferences.jsonl: 4 rows appended" and new_data.sources == {"preferences"}


def test_undo_of_a_new_rating_leaves_earlier_rows(tmp_path):
    with RatingSession(tmp_path, ITEMS, RatingSettings(choose="random", overlap=0.0)) as room:
        for _ in range(3):
            record_answer(room, "ann")
    room = RatingSession(tmp_path, ITEMS, RatingSettings(choose="random", overlap=0.0))  # restarted
    settings = load_rating_settings(room)
    seen = inspect_data_sources(settings)
    record_answer(room, "ann")
    record_answer(room, "ann")
    room.undo_rating("ann", 2.0)
    room.write_data_file()
    assert (
        str(find_new_data(seen, inspect_data_sources(settings)))
        == "preferences: preferences.jsonl: 1 rows appended"
    )
    room.undo_rating("ann", 2.0)
    room.undo_rating("ann", 2.0)  # of a rating that the model has learned from
    record_answer(room, "ann", "tie")
    room.write_data_file()
    assert (
        str(find_new_data(seen, inspect_data_sources(settings)))
        == "preferences: preferences.jsonl: rewritten of 3 rows"
    )
