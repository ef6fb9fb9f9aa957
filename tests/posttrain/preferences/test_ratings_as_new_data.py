"""Ratings as new data of `posttrain retrain`: those that came since a model was trained are told from earlier ones."""

import dataclasses

from posttrain.preferences.rating_session import RatingSession
from rl_core.preferences.items import RatedItem
from rl_core.settings import RatingSettings
from tasks.config import load_settings
from tasks.lifecycle.data_lineage import find_new_data, record_sources

ITEMS = [
    RatedItem(f"question {n}", (f"good {n}", f"bad {n}"), ("models:/m/1", "models:/m/2"))
    for n in range(30)
]


def answer(room, rater, choice="left"):
    shown = room.question(rater)
    return room.rate(
        rater, {"item": shown["question"]["item"], "count": shown["rated"], "choice": choice}, 1.0
    )


def settings_of(room):
    settings = load_settings("rlhf", ["stages.prepare_data.preferences=null"])
    data = dataclasses.replace(settings.stages.prepare_data, preferences=str(room.rows_file))
    return dataclasses.replace(
        settings, stages=dataclasses.replace(settings.stages, prepare_data=data)
    )


def test_later_ratings_are_appended_rows_and_a_skip_is_none(tmp_path):
    room = RatingSession(tmp_path, ITEMS, RatingSettings(choose="random", overlap=0.5))
    for _ in range(6):
        answer(room, "ann")
    room.write_data_file()
    settings = settings_of(room)
    seen = record_sources(settings)
    assert find_new_data(seen, record_sources(settings)).rows == 0
    answer(room, "ann", "skip")
    room.write_data_file()
    assert find_new_data(seen, record_sources(settings)).rows == 0
    for rater, choice in (("ann", "right"), ("bob", "tie"), ("bob", "both_bad"), ("ann", "left")):
        answer(room, rater, choice)
    room.write_data_file()
    found = find_new_data(seen, record_sources(settings))
    assert str(found) == "preferences: preferences.jsonl: 4 rows appended" and found.sources == {
        "preferences"
    }


def test_an_undo_of_a_new_rating_leaves_what_was_seen(tmp_path):
    with RatingSession(tmp_path, ITEMS, RatingSettings(choose="random", overlap=0.0)) as room:
        for _ in range(3):
            answer(room, "ann")
    room = RatingSession(
        tmp_path, ITEMS, RatingSettings(choose="random", overlap=0.0)
    )  # started again
    settings = settings_of(room)
    seen = record_sources(settings)
    answer(room, "ann")
    answer(room, "ann")
    room.undo_rating("ann", 2.0)
    room.write_data_file()
    assert (
        str(find_new_data(seen, record_sources(settings)))
        == "preferences: preferences.jsonl: 1 rows appended"
    )
    room.undo_rating("ann", 2.0)
    room.undo_rating("ann", 2.0)  # one that the model has learned from
    answer(room, "ann", "tie")
    room.write_data_file()
    assert (
        str(find_new_data(seen, record_sources(settings)))
        == "preferences: preferences.jsonl: rewritten of 3 rows"
    )
