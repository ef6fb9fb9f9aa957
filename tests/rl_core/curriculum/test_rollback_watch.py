"""The rollback monitor on metrics worked by hand."""

import json

import pytest

from rl_core.curriculum.manager import END_STAGE, CurriculumManager
from rl_core.errors import SettingsError
from rl_core.settings import CurriculumStage, ExitCondition, RollbackSettings

EXIT_CONDITIONS = (ExitCondition(window=2, threshold=0.9),)


def make_rollback(**options):
    return RollbackSettings(
        **{"window": 2, "margin": 0.2, "patience": 2, "cooldown": 3, "max_rollbacks": 2, **options}
    )


def make_manager(
    *, exits=EXIT_CONDITIONS, stages=("one", "two", "three"), stage_rollbacks=None, **options
):
    """Build a curriculum whose stages all end at a mean of 0.9.

    Args:
        stage_rollbacks: rollback settings of individual stages by name.
    """
    curriculum_stages = [
        CurriculumStage(
            name=name,
            levels={"easy": 1.0},
            exit_conditions=exits,
            rollback=(stage_rollbacks or {}).get(name),
        )
        for name in stages
    ]
    return CurriculumManager(
        curriculum_stages,
        ("easy",),
        rollback=make_rollback(**options) if options.pop("watch", True) else None,
    )


def observe_rates(manager, *rates):
    """Return the result of `observe_iteration` for each success rate."""
    return [manager.observe_iteration({"train/success_rate": rate}) for rate in rates]


def list_moves(manager):
    return [(move["kind"], move["iteration"], move["from"], move["to"]) for move in manager.history]


def test_a_drop_below_the_first_full_window_for_the_patience_rolls_back():
    manager = make_manager()
    # means of two: .5 (the level at entry), .45, .3 (not more than .2 below), .25 (1st), .25 (2nd)
    assert observe_rates(manager, 0.4, 0.6, 0.3, 0.3, 0.2, 0.3) == [None, None, None, None, None, 0]
    (move,) = manager.history
    assert list_moves(manager) == [("rollback", 6, "one", "one")]
    assert move["metrics"] == {
        "success_rate": pytest.approx(0.25),
        "success_rate at entry": pytest.approx(0.5),
    }
    assert move["why"] == (
        "success_rate 0.25 over 2 is more than 0.2 below 0.5 at entry, 2 times in a row (rollback 1 of 2)"
    )
    assert manager.stage_iterations == 0 and manager.iteration == 6 and manager.finished is None


def test_a_metric_with_better_lower_is_watched_upwards():
    manager = make_manager(metric="policy/ref_kl", better="lower", margin=0.1)
    values = [0.02, 0.04, 0.01, 0.16, 0.12, 0.2]
    # means of two: .03 (the level at entry), .025, .085, .14 (1st above .13), .16 (2nd); a fall has no effect
    targets = [
        manager.observe_iteration({"train/success_rate": 0.5, "policy/ref_kl": value})
        for value in values
    ]
    assert targets == [None, None, None, None, None, 0]
    assert manager.history[0]["why"] == (
        "policy/ref_kl 0.16 over 2 is more than 0.1 above 0.03 at entry, 2 times in a row (rollback 1 of 2)"
    )
    unreversed = make_manager(metric="policy/ref_kl", margin=0.1)
    targets = [
        unreversed.observe_iteration({"train/success_rate": 0.5, "policy/ref_kl": value})
        for value in values
    ]
    assert targets == [None] * 6


def test_metrics_of_the_watch():
    manager = make_manager()
    observe_rates(manager, 0.4)
    watch = {"curriculum/rollbacks": 0.0, "curriculum/below_entry": 0.0, "curriculum/cooldown": 0.0}
    assert manager.rollback_monitor.collect_metrics(0, manager._metric_history) == watch | {
        "curriculum/watched": 0.4
    }
    observe_rates(manager, 0.6, 0.0)
    assert manager.rollback_monitor.collect_metrics(0, manager._metric_history) == watch | {
        "curriculum/entry_level": 0.5,
        "curriculum/watched": 0.3,
    }
    manager.rollback_monitor.unwatched.append(0)
    assert "curriculum/watched" not in manager.collect_metrics()


def test_the_patience_counts_consecutive_iterations():
    manager = make_manager(patience=3)
    # level .5; means .25, .2 (two below), .4 (not), .25, .2, .2 (three)
    assert observe_rates(manager, 0.5, 0.5, 0.0, 0.4, 0.4, 0.1, 0.3, 0.1) == [None] * 7 + [0]


def test_nothing_is_checked_during_the_cooldown():
    manager = make_manager()
    observe_rates(manager, 0.5, 0.5, 0.0, 0.0)
    assert list_moves(manager) == [("rollback", 4, "one", "one")]
    # during three iterations the stage is not left, although the rate is 1.0
    assert observe_rates(manager, 1.0, 1.0, 1.0) == [None] * 3 and len(manager.history) == 1
    assert manager.collect_metrics()["curriculum/cooldown"] == 0
    observe_rates(manager, 1.0)
    assert list_moves(manager)[-1] == ("advance", 8, "one", "two")
    manager = make_manager()
    # nor is it rolled back at 0: only the 8th (the first below) and the 9th iteration are checked
    assert observe_rates(manager, 0.5, 0.5, *[0.0] * 7) == [
        None,
        None,
        None,
        0,
        None,
        None,
        None,
        None,
        0,
    ]


def test_a_stage_is_compared_with_its_first_entry_and_rollbacks_are_limited():
    manager = make_manager(cooldown=0)
    observe_rates(manager, 0.5, 0.5, 0.0, 0.0)
    assert list_moves(manager) == [("rollback", 4, "one", "one")]
    # The window restarts. With a new level of .25 this would not be a drop; compared with .5 it is.
    assert observe_rates(manager, 0.25, 0.25, 0.25) == [None, None, 0]
    assert observe_rates(manager, *[0.0] * 50) == [None] * 50  # the limit is two
    assert list_moves(manager)[1:] == [
        ("rollback", 7, "one", "one"),
        ("unwatched", 10, "one", "one"),
    ]
    assert "after 2 rollbacks: continuing" in manager.history[-1]["why"]
    assert manager.collect_metrics()["curriculum/rollbacks"] == 2 and manager.finished is None


def test_exhausted_rollbacks_can_stop_the_run():
    manager = make_manager(max_rollbacks=1, on_exhausted="stop", cooldown=0)
    assert observe_rates(manager, 0.5, 0.5, *[0.0] * 6) == [
        None,
        None,
        None,
        0,
        None,
        None,
        0,
        None,
    ]
    assert manager.finished.startswith(
        "curriculum stopped in stage 'one': success_rate 0 over 2 is more than 0.2 below"
    )
    assert list_moves(manager)[-1] == ("stop", 7, "one", END_STAGE)


def test_rollbacks_to_the_previous_stage_are_limited():
    manager = make_manager(to="previous", cooldown=0, max_rollbacks=2)
    up, down = [0.6, 1.0, 1.0], [0.7, 0.7, 0.0, 0.0]  # one: level .8, then 1.0; two: .7, .35, 0
    seen = []
    for _ in range(6):
        observe_rates(manager, *(up if manager.index == 0 else down))
        seen.append(manager.index)
    # after two rollbacks the curriculum stays in the second stage at any rate
    assert seen == [1, 0, 1, 0, 1, 1]
    observe_rates(manager, *[0.0] * 40)
    kinds = [move["kind"] for move in manager.history]
    assert kinds == ["advance", "rollback", "advance", "rollback", "advance", "unwatched"]
    assert manager.history[1]["to"] == "one"


def test_the_first_stage_has_none_before_it():
    manager = make_manager(to="previous")
    assert observe_rates(manager, 0.5, 0.5, 0.0, 0.0)[-1] == 0


def test_a_later_stage_has_another_level_and_a_new_one_at_each_entry():
    manager = make_manager(to="previous", cooldown=0)
    observe_rates(manager, 0.6, 1.0, 1.0, 0.7, 0.7, 0.0, 0.0)
    assert manager.index == 0 and manager.rollback_monitor.levels == {0: 0.8, 1: 0.7}
    observe_rates(manager, 1.0, 1.0)
    assert manager.index == 1 and manager.rollback_monitor.levels == {0: 0.8}
    observe_rates(manager, 0.5, 0.5)
    assert manager.rollback_monitor.levels == {0: 0.8, 1: 0.5}


def test_level_before_the_stage():
    manager = make_manager(level="before", cooldown=0)
    observe_rates(manager, 0.8, 1.0)
    assert manager.index == 1 and manager.rollback_monitor.levels[1] == 0.9
    # The first full window in the stage is already checked: 0 and .1 are below .7
    assert observe_rates(manager, 0.0, 0.0, 0.2) == [None, None, 1]


def test_restorable_stages():
    assert make_manager(watch=False).restorable_stages == set()
    assert make_manager(max_rollbacks=0).restorable_stages == set()
    assert make_manager(max_rollbacks=0, on_exhausted="stop").restorable_stages == {0}
    manager = make_manager(
        stages=("one", "two", "three"),
        watch=False,
        stage_rollbacks={"three": make_rollback(to="previous")},
    )
    restorable = []
    for index in range(3):
        manager.index = index
        restorable.append(manager.restorable_stages)
    assert restorable == [set(), {1}, {1, 2}]
    manager = make_manager(to="previous")
    manager.index = 2
    assert manager.restorable_stages == {0, 1, 2}
    manager = make_manager()
    manager.index = 2
    assert manager.restorable_stages == {2}


def test_a_stage_may_have_other_rollback_settings():
    manager = make_manager(patience=1, stage_rollbacks={"one": make_rollback(patience=4)})
    assert observe_rates(manager, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0) == [None] * 5 + [0]


def test_a_metric_that_does_not_exist_is_named():
    with pytest.raises(SettingsError, match="did you mean 'train/success_rate'"):
        observe_rates(make_manager(metric="sucess_rate"), 0.5)


@pytest.mark.parametrize("cut", range(0, 16, 3))
def test_a_restored_curriculum_continues_identically(cut):
    rates = [0.5, 0.5, 0.0, 0.0, 0.1, 0.3, 1.0, 1.0, 0.9, 1.0, 0.6, 0.6, 0.1, 0.2, 0.0, 0.0]
    exits = (ExitCondition(window=2, threshold=0.9, patience=2),)
    uninterrupted, first, second = (
        make_manager(exits=exits, to="previous", cooldown=1) for _ in range(3)
    )
    expected = observe_rates(uninterrupted, *rates)
    targets = observe_rates(first, *rates[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert targets + observe_rates(second, *rates[cut:]) == expected
    assert (
        second.state_dict() == uninterrupted.state_dict()
        and second.collect_metrics() == uninterrupted.collect_metrics()
    )
    assert {move["kind"] for move in uninterrupted.history} == {"rollback", "advance"}


def test_the_cooldown_continues_after_a_restart():
    """Fill windows at 1.0: they have no effect during the cooldown, and the first one after it advances the stage."""
    first, second = make_manager(), make_manager()
    assert observe_rates(first, 0.5, 0.5, 0.0, 0.0) == [None, None, None, 0]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.collect_metrics()["curriculum/cooldown"] == 3
    observe_rates(second, 1.0, 1.0, 1.0)
    assert [move[0] for move in list_moves(second)] == ["rollback"]
    observe_rates(second, 1.0)
    assert list_moves(second)[-1] == ("advance", 8, "one", "two")


def test_each_move_is_reported():
    manager, reports = make_manager(), []
    manager.on_move = reports.append
    observe_rates(manager, 0.5, 0.5, 0.0, 0.0, 0.0)
    assert [len(history) for history in reports] == [1] and reports[0] == manager.history
