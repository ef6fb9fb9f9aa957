import json

import numpy as np
import pytest

from rl_core.curriculum.conditions import evaluate_condition
from rl_core.curriculum.manager import END_STAGE, CurriculumManager
from rl_core.errors import ResumeRefused, SettingsError
from rl_core.metric_history import MetricHistory
from rl_core.settings import CurriculumStage, ExitCondition

LEVELS = ("easy", "hard")


def stage(name, levels=None, *, window=2, threshold=0.8, **options):
    options.setdefault("exit_conditions", (ExitCondition(window=window, threshold=threshold),))
    return CurriculumStage(name=name, levels=levels or {"easy": 1.0}, **options)


def feed(manager, *rates):
    for rate in rates:
        manager.observe_iteration({"train/success_rate": rate, "reward/mean": -rate})
    return manager.stage.name


@pytest.mark.parametrize(
    ("comparison", "at", "above", "below"),
    [
        (">=", True, True, False),
        (">", False, True, False),
        ("<=", True, False, True),
        ("<", False, False, True),
    ],
)
def test_comparisons(comparison, at, above, below):
    condition = ExitCondition(metric="reward/mean", window=1, comparison=comparison, threshold=0.5)
    for value, expected in ((0.5, at), (0.6, above), (0.4, below)):
        history = MetricHistory()
        history.record_values({"reward/mean": value}, 1)
        assert evaluate_condition(condition, history).holds is expected


def test_a_condition_holds_only_with_a_full_window():
    manager = CurriculumManager([stage("one", window=3), stage("two")], LEVELS)
    assert feed(manager, 1.0, 1.0) == "one"
    assert feed(manager, 1.0) == "two"


def test_the_average_counts_not_the_last_value():
    manager = CurriculumManager([stage("one"), stage("two")], LEVELS)
    assert feed(manager, 0.5, 1.0, 0.5) == "one"  # averages .75, .75
    assert feed(manager, 1.1) == "two"  # .8


def test_windows_are_filled_within_the_stage():
    manager = CurriculumManager([stage("one"), stage("two"), stage("three")], LEVELS)
    assert feed(manager, 1.0, 1.0) == "two"
    assert feed(manager, 1.0) == "two"  # the successes of stage one count for nothing here
    assert feed(manager, 1.0) == "three"


def test_all_any_min_and_max_iterations():
    both = (
        ExitCondition(window=1, threshold=0.8),
        ExitCondition(metric="reward/mean", window=1, threshold=0.0),
    )
    every = CurriculumManager([stage("one", exit_conditions=both), stage("two")], LEVELS)
    assert feed(every, 1.0, 1.0) == "one"  # reward is -1
    some = CurriculumManager(
        [stage("one", exit_conditions=both, require="any"), stage("two")], LEVELS
    )
    assert feed(some, 1.0) == "two"
    late = CurriculumManager([stage("one", window=1, min_iterations=3), stage("two")], LEVELS)
    assert feed(late, 1.0, 1.0) == "one"
    assert feed(late, 1.0) == "two"
    forced = CurriculumManager(
        [stage("one", exit_conditions=(), max_iterations=2), stage("two")], LEVELS
    )
    assert feed(forced, 0.0) == "one"
    assert feed(forced, 0.0) == "two"
    assert forced.history[0]["why"] == "max_iterations: 2 reached"


def test_history_says_when_from_where_and_why():
    manager = CurriculumManager([stage("one"), stage("two", exit_conditions=())], LEVELS)
    feed(manager, 0.0, 0.7, 0.9, 0.3)
    assert manager.export_history() == [
        {
            "kind": "advance",
            "iteration": 3,
            "from": "one",
            "to": "two",
            "why": "success_rate 0.8 >= 0.8 over 2",
            "metrics": {"success_rate": pytest.approx(0.8)},
        }
    ]
    assert manager.finished is None and manager.iteration == 4 and manager.stage_iterations == 1


def test_early_stop_needs_the_last_stage_and_its_own_full_window():
    early = ExitCondition(window=2, threshold=0.9)
    manager = CurriculumManager(
        [stage("one", window=4), stage("two", exit_conditions=())], LEVELS, early_stop=early
    )
    feed(manager, 1.0, 1.0, 1.0)
    assert manager.finished is None
    feed(manager, 1.0, 1.0)
    assert manager.stage.name == "two" and manager.finished is None
    feed(manager, 1.0)
    assert manager.finished == "curriculum finished: early_stop: success_rate 1 >= 0.9 over 2"
    assert manager.history[-1]["to"] == END_STAGE
    feed(manager, 1.0)
    assert len(manager.history) == 2 and manager.iteration == 6


def test_leaving_the_last_stage_finishes():
    manager = CurriculumManager([stage("one")], LEVELS)
    feed(manager, 1.0, 1.0)
    assert manager.finished is not None and manager.history[-1]["to"] == END_STAGE


def test_without_stages_all_levels_are_practised_for_ever():
    manager = CurriculumManager((), LEVELS)
    feed(manager, *[1.0] * 20)
    assert manager.finished is None and manager.history == []
    rng = np.random.default_rng(0)
    drawn = [manager.draw_level(rng) for _ in range(1000)]
    assert 430 < drawn.count("easy") < 570


def test_levels_are_drawn_by_their_weights_and_reproducibly():
    manager = CurriculumManager([stage("one", {"easy": 3.0, "hard": 1.0})], LEVELS)
    drawn = [manager.draw_level(np.random.default_rng(s)) for s in range(1000)]
    assert 700 < drawn.count("easy") < 800
    assert drawn[:50] == [manager.draw_level(np.random.default_rng(s)) for s in range(50)]


def test_metrics():
    manager = CurriculumManager(
        [stage("one", window=4)], LEVELS, early_stop=ExitCondition(window=8, threshold=0.9)
    )
    assert manager.collect_metrics()["curriculum/window_filled"] == 0
    feed(manager, 0.5, 1.0)
    assert manager.collect_metrics() == {
        "curriculum/stage": 0.0,
        "curriculum/stage_iterations": 2.0,
        "curriculum/moves": 0.0,
        "curriculum/window_filled": 0.25,
        "curriculum/average/success_rate": 0.75,
    }


@pytest.mark.parametrize("cut", range(7))
def test_a_restored_curriculum_goes_on_equally(cut):
    rates = [0.7, 0.9, 0.1, 0.9, 0.9, 1.0, 1.0]

    def make():
        stages = [stage("one"), stage("two", window=3, min_iterations=4), stage("three")]
        return CurriculumManager(stages, LEVELS, early_stop=ExitCondition(window=1))

    whole, first, second = make(), make(), make()
    feed(whole, *rates)
    feed(first, *rates[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    feed(second, *rates[cut:])
    assert (
        second.state_dict() == whole.state_dict()
        and second.collect_metrics() == whole.collect_metrics()
    )
    assert [move["iteration"] for move in whole.history] == [2, 6, 7]


def test_mistakes_are_named():
    with pytest.raises(SettingsError, match="same name"):
        CurriculumManager([stage("one"), stage("one")], LEVELS)
    with pytest.raises(SettingsError, match="cannot be named"):
        CurriculumManager([stage(END_STAGE)], LEVELS)
    wrong = stage("one", exit_conditions=(ExitCondition(metric="sucess_rate"),))
    with pytest.raises(SettingsError, match="did you mean 'train/success_rate'"):
        feed(CurriculumManager([wrong], LEVELS), 0.5)
    late = stage(
        "one", exit_conditions=(ExitCondition(metric="train/success_rate_by_level/hard", window=1),)
    )
    manager = CurriculumManager([late], LEVELS)
    # not drawn this time
    manager.observe_iteration(
        {"train/success_rate": 1.0}, known=["train/success_rate_by_level/hard"]
    )
    assert manager.finished is None
    with pytest.raises(ResumeRefused, match="saved with stages"):
        CurriculumManager([stage("two")], LEVELS).load_state_dict(manager.state_dict())


def test_a_plateau_is_a_slope():
    flat = ExitCondition(statistic="slope", window=3, comparison="<=", threshold=0.1)
    manager = CurriculumManager([stage("one", exit_conditions=(flat,)), stage("two")], LEVELS)
    # slopes of three: (v3 - v1) / 2 = .2, .2, .15, .05
    assert feed(manager, 0.1, 0.3, 0.5, 0.7, 0.8) == "one"
    assert manager.collect_metrics()["curriculum/slope/success_rate"] == pytest.approx(0.15)
    assert feed(manager, 0.8) == "two"
    assert manager.history[0]["why"] == "slope of success_rate 0.05 <= 0.1 over 3"
    assert manager.history[0]["metrics"] == {"slope of success_rate": pytest.approx(0.05)}


def test_a_slope_needs_its_full_window():
    flat = ExitCondition(statistic="slope", window=3, comparison="<=", threshold=0.1)
    manager = CurriculumManager([stage("one", exit_conditions=(flat,)), stage("two")], LEVELS)
    assert feed(manager, 0.5, 0.5) == "one"
    assert feed(manager, 0.5) == "two"
    with pytest.raises(SettingsError, match="window: 1 point has no slope"):
        ExitCondition(statistic="slope", window=1)


def test_patience_counts_iterations_in_a_row():
    long = (ExitCondition(window=2, threshold=0.8, patience=2),)
    manager = CurriculumManager(
        [stage("one", exit_conditions=long), stage("two", exit_conditions=long)], LEVELS
    )
    # means .8 (1st), .5 (none), .8 (1st), .9 (2nd)
    assert feed(manager, 0.6, 1.0, 0.0, 1.6) == "one"
    assert feed(manager, 0.2) == "two"
    assert manager.history[0]["iteration"] == 5
    assert manager.history[0]["why"] == "success_rate 0.9 >= 0.8 over 2, 2 times in a row"
    feed(manager, 1.0, 1.0)  # the patience begins anew with the stage
    assert manager.finished is None
    feed(manager, 1.0)
    assert manager.finished is not None


def test_patience_waits_while_a_metric_is_not_observed():
    name = "train/success_rate_by_level/hard"
    hard = (ExitCondition(metric=name, window=1, threshold=0.8, patience=2),)
    manager = CurriculumManager([stage("one", exit_conditions=hard), stage("two")], LEVELS)
    for metrics in ({name: 1.0}, {}, {}):
        manager.observe_iteration({"train/success_rate": 0.0, **metrics}, known=[name])
    assert manager.index == 0
    manager.observe_iteration({name: 1.0})
    assert manager.index == 1
