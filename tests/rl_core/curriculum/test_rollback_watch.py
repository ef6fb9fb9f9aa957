"""State machine of the rollback watch on given metrics, worked by hand."""

import json

import pytest

from rl_core.curriculum.manager import END_STAGE, CurriculumManager
from rl_core.errors import SettingsError
from rl_core.settings import CurriculumStage, ExitCondition, RollbackSettings

LEAVE = (ExitCondition(window=2, threshold=0.9),)


def rollback(**options):
    return RollbackSettings(
        **{"window": 2, "margin": 0.2, "patience": 2, "cooldown": 3, "max_rollbacks": 2, **options}
    )


def make(*, exits=LEAVE, stages=("one", "two", "three"), own=None, **options):
    """A curriculum whose every stage is left at a mean of 0.9; `own`: the rollback settings of stages by name."""
    made = [
        CurriculumStage(
            name=name, levels={"easy": 1.0}, exit_conditions=exits, rollback=(own or {}).get(name)
        )
        for name in stages
    ]
    return CurriculumManager(
        made, ("easy",), rollback=rollback(**options) if options.pop("watch", True) else None
    )


def feed(manager, *rates):
    """Result of `observe` for each success rate."""
    return [manager.observe_iteration({"train/success_rate": rate}) for rate in rates]


def kinds(manager):
    return [(move["kind"], move["iteration"], move["from"], move["to"]) for move in manager.history]


def test_fires_when_too_far_below_the_first_full_window_for_its_patience():
    manager = make()
    # means of two: .5 (the level at entry), .45, .3 (not more than .2 below), .25 (1st), .25 (2nd)
    assert feed(manager, 0.4, 0.6, 0.3, 0.3, 0.2, 0.3) == [None, None, None, None, None, 0]
    (move,) = manager.history
    assert (move["kind"], move["iteration"], move["from"], move["to"]) == (
        "rollback",
        6,
        "one",
        "one",
    )
    assert move["metrics"] == {
        "success_rate": pytest.approx(0.25),
        "success_rate at entry": pytest.approx(0.5),
    }
    assert move["why"] == (
        "success_rate 0.25 over 2 is more than 0.2 below 0.5 at entry, 2 times in a row (rollback 1 of 2)"
    )
    assert manager.stage_iterations == 0 and manager.iteration == 6 and manager.finished is None


def test_a_metric_of_which_less_is_better_is_watched_upwards():
    manager = make(metric="policy/ref_kl", better="lower", margin=0.1)
    values = [0.02, 0.04, 0.01, 0.16, 0.12, 0.2]
    # means of two: .03 (the level at entry), .025, .085, .14 (1st above .13), .16 (2nd); falling alone does nothing
    found = [
        manager.observe_iteration({"train/success_rate": 0.5, "policy/ref_kl": value})
        for value in values
    ]
    assert found == [None, None, None, None, None, 0]
    assert manager.history[0]["why"] == (
        "policy/ref_kl 0.16 over 2 is more than 0.1 above 0.03 at entry, 2 times in a row (rollback 1 of 2)"
    )
    falls = make(metric="policy/ref_kl", margin=0.1)
    feed_both = [
        falls.observe_iteration({"train/success_rate": 0.5, "policy/ref_kl": value})
        for value in values
    ]
    assert feed_both == [None] * 6


def test_what_a_page_shows_of_the_watch():
    manager = make()
    feed(manager, 0.4)
    watch = {"curriculum/rollbacks": 0.0, "curriculum/below_entry": 0.0, "curriculum/cooldown": 0.0}
    assert manager.rollback_monitor.collect_metrics(0, manager._metric_history) == watch | {
        "curriculum/watched": 0.4
    }
    feed(manager, 0.6, 0.0)
    assert manager.rollback_monitor.collect_metrics(0, manager._metric_history) == watch | {
        "curriculum/entry_level": 0.5,
        "curriculum/watched": 0.3,
    }
    manager.rollback_monitor.unwatched.append(0)
    assert "curriculum/watched" not in manager.collect_metrics()


def test_the_patience_is_in_a_row():
    manager = make(patience=3)
    # level .5; means .25, .2 (two below), .4 (not), .25, .2, .2 (three)
    assert feed(manager, 0.5, 0.5, 0.0, 0.4, 0.4, 0.1, 0.3, 0.1) == [None] * 7 + [0]


def test_nothing_is_judged_in_the_cool_down():
    manager = make()
    feed(manager, 0.5, 0.5, 0.0, 0.0)
    assert kinds(manager) == [("rollback", 4, "one", "one")]
    # three iterations in which the stage is not left at 1.0
    assert feed(manager, 1.0, 1.0, 1.0) == [None] * 3 and len(manager.history) == 1
    assert manager.collect_metrics()["curriculum/cooldown"] == 0
    feed(manager, 1.0)
    assert kinds(manager)[-1] == ("advance", 8, "one", "two")
    manager = make()
    # nor rolled back at 0: judged are the 8th (once below) and the 9th
    assert feed(manager, 0.5, 0.5, *[0.0] * 7) == [None, None, None, 0, None, None, None, None, 0]


def test_held_against_the_first_entry_and_bounded():
    manager = make(cooldown=0)
    feed(manager, 0.5, 0.5, 0.0, 0.0)
    assert kinds(manager) == [("rollback", 4, "one", "one")]
    # The window is filled anew; .25 would be no fall from a new level of .25, but it is one from .5.
    assert feed(manager, 0.25, 0.25, 0.25) == [None, None, 0]
    assert feed(manager, *[0.0] * 50) == [None] * 50  # two were allowed
    assert kinds(manager)[1:] == [("rollback", 7, "one", "one"), ("unwatched", 10, "one", "one")]
    assert "after 2 rollbacks: continuing" in manager.history[-1]["why"]
    assert manager.collect_metrics()["curriculum/rollbacks"] == 2 and manager.finished is None


def test_stops_where_that_is_asked_for():
    manager = make(max_rollbacks=1, on_exhausted="stop", cooldown=0)
    assert feed(manager, 0.5, 0.5, *[0.0] * 6) == [None, None, None, 0, None, None, 0, None]
    assert manager.finished.startswith(
        "curriculum stopped in stage 'one': success_rate 0 over 2 is more than 0.2 below"
    )
    assert kinds(manager)[-1] == ("stop", 7, "one", END_STAGE)


def test_to_the_previous_stage_and_up_again_is_bounded():
    manager = make(to="previous", cooldown=0, max_rollbacks=2)
    up, down = [0.6, 1.0, 1.0], [0.7, 0.7, 0.0, 0.0]  # one: level .8, then 1.0; two: .7, .35, 0
    seen = []
    for _ in range(6):
        feed(manager, *up) if manager.index == 0 else feed(manager, *down)
        seen.append(manager.index)
    # up, back, up, back, up, and there it stays however far it falls
    assert seen == [1, 0, 1, 0, 1, 1]
    feed(manager, *[0.0] * 40)
    assert [move["kind"] for move in manager.history] == [
        "advance",
        "rollback",
        "advance",
        "rollback",
        "advance",
        "unwatched",
    ]
    assert manager.history[1]["to"] == "one"


def test_the_first_stage_has_none_before_it():
    manager = make(to="previous")
    assert feed(manager, 0.5, 0.5, 0.0, 0.0)[-1] == 0


def test_a_later_stage_has_its_own_level_and_a_new_one_when_entered_anew():
    manager = make(to="previous", cooldown=0)
    feed(manager, 0.6, 1.0, 1.0, 0.7, 0.7, 0.0, 0.0)
    assert manager.index == 0 and manager.rollback_monitor.levels == {0: 0.8, 1: 0.7}
    feed(manager, 1.0, 1.0)
    assert manager.index == 1 and manager.rollback_monitor.levels == {0: 0.8}
    feed(manager, 0.5, 0.5)
    assert manager.rollback_monitor.levels == {0: 0.8, 1: 0.5}


def test_level_before_the_stage():
    manager = make(level="before", cooldown=0)
    feed(manager, 0.8, 1.0)
    assert manager.index == 1 and manager.rollback_monitor.levels[1] == 0.9
    # The very first full window in the stage is judged: 0 and .1 are below .7
    assert feed(manager, 0.0, 0.0, 0.2) == [None, None, 1]


def test_which_entries_have_to_be_kept():
    assert make(watch=False).restorable_stages == set()
    assert make(max_rollbacks=0).restorable_stages == set()
    assert make(max_rollbacks=0, on_exhausted="stop").restorable_stages == {0}
    manager = make(
        stages=("one", "two", "three"), watch=False, own={"three": rollback(to="previous")}
    )
    kept = []
    for index in range(3):
        manager.index = index
        kept.append(manager.restorable_stages)
    assert kept == [set(), {1}, {1, 2}]
    manager = make(to="previous")
    manager.index = 2
    assert manager.restorable_stages == {0, 1, 2}
    manager = make()
    manager.index = 2
    assert manager.restorable_stages == {2}


def test_a_stage_may_have_its_own_rollback():
    manager = make(patience=1, own={"one": rollback(patience=4)})
    assert feed(manager, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0) == [None] * 5 + [0]


def test_a_metric_that_does_not_exist_is_named():
    with pytest.raises(SettingsError, match="did you mean 'train/success_rate'"):
        feed(make(metric="sucess_rate"), 0.5)


@pytest.mark.parametrize("cut", range(0, 16, 3))
def test_a_restored_curriculum_goes_on_equally(cut):
    rates = [0.5, 0.5, 0.0, 0.0, 0.1, 0.3, 1.0, 1.0, 0.9, 1.0, 0.6, 0.6, 0.1, 0.2, 0.0, 0.0]
    exits = (ExitCondition(window=2, threshold=0.9, patience=2),)
    whole, first, second = (make(exits=exits, to="previous", cooldown=1) for _ in range(3))
    expected = feed(whole, *rates)
    found = feed(first, *rates[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + feed(second, *rates[cut:]) == expected
    assert (
        second.state_dict() == whole.state_dict()
        and second.collect_metrics() == whole.collect_metrics()
    )
    assert {move["kind"] for move in whole.history} == {"rollback", "advance"}


def test_the_cool_down_goes_on_after_a_restart():
    """Full windows at 1.0 within the cool-down move nothing; the first one behind it does."""
    first, second = make(), make()
    assert feed(first, 0.5, 0.5, 0.0, 0.0) == [None, None, None, 0]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.collect_metrics()["curriculum/cooldown"] == 3
    feed(second, 1.0, 1.0, 1.0)
    assert [move[0] for move in kinds(second)] == ["rollback"]
    feed(second, 1.0)
    assert kinds(second)[-1] == ("advance", 8, "one", "two")


def test_each_move_is_told():
    manager, told = make(), []
    manager.on_move = told.append
    feed(manager, 0.5, 0.5, 0.0, 0.0, 0.0)
    assert [len(history) for history in told] == [1] and told[0] == manager.history
