"""Moves and rollbacks of the curriculum as the tracking server shows them."""

from types import SimpleNamespace

from rl_core.settings import CurriculumStage, PolicySettings
from tasks.stages.policy import _describe_curriculum, _show_curriculum


class Tracker:
    def __init__(self):
        self.tags, self.files = {}, {}

    def set_tag(self, name, value):
        self.tags[name] = value

    def log_dict(self, values, name):
        self.files[name] = values


def move(kind, iteration, source, target):
    return {
        "kind": kind,
        "iteration": iteration,
        "from": source,
        "to": target,
        "why": "w",
        "metrics": {"m": 0.5},
    }


def test_tags_and_artifact():
    stages = tuple(CurriculumStage(name=name, levels={"easy": 1.0}) for name in ("one", "two"))
    context = SimpleNamespace(tracker=Tracker(), settings=PolicySettings(curriculum=stages))
    _show_curriculum(context, [])
    assert context.tracker.tags == {
        "curriculum.stage": "one",
        "curriculum.moves": "still in 'one', the first of 2 stages",
        "curriculum.rollbacks": "0",
    }
    history = [
        move("advance", 3, "one", "two"),
        move("rollback", 9, "two", "two"),
        move("unwatched", 20, "two", "two"),
    ]
    _show_curriculum(context, history)
    assert context.tracker.tags == {
        "curriculum.stage": "two",
        "curriculum.moves": "two from iteration 3, two from iteration 9 (rollback), two from iteration 20 (unwatched)",
        "curriculum.rollbacks": "1",
    }
    assert context.tracker.files == {"curriculum.json": {"history": history}}
    assert _describe_curriculum([], ()) == _describe_curriculum([], stages[:1]) == "one stage"
