"""Curriculum stages: exit conditions, windows, patience, early stop, level weights, resume."""

import json

import numpy as np
import pytest

from rl_core.curriculum.conditions import evaluate_condition
from rl_core.curriculum.manager import END_STAGE, CurriculumManager
from rl_core.errors import ResumeRefused, SettingsError
from rl_core.metric_history import MetricHistory
from rl_core.settings import CurriculumStage, ExitCondition

LEVELS = ("easy", "hard")


def make_stage(name, levels=None, *, window=2, threshold=0.8, **options):
    options.setdefault("exit_conditions", (ExitCondition(window=window, threshold=threshold),))
    return CurriculumStage(name=name, levels=levels or {"easy": 1.0}, **options)


def observe_rates(manager, *rates):
    """Observe one iteration per success rate, and return the name of the stage afterwards."""
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
    manager = CurriculumManager([make_stage("one", window=3), make_stage("two")], LEVELS)
    assert observe_rates(manager, 1.0, 1.0) == "one"
    assert observe_rates(manager, 1.0) == "two"


def test_the_average_counts_not_the_last_value():
    manager = CurriculumManager([make_stage("one"), make_stage("two")], LEVELS)
    assert observe_rates(manager, 0.5, 1.0, 0.5) == "one"  # averages .75, .75
    assert observe_rates(manager, 1.1) == "two"  # .8


def test_windows_are_filled_within_the_stage():
    manager = CurriculumManager([make_stage("one"), make_stage("two"), make_stage("three")], LEVELS)
    assert observe_rates(manager, 1.0, 1.0) == "two"
    assert observe_rates(manager, 1.0) == "two"  # the successes of stage one do not count
    assert observe_rates(manager, 1.0) == "three"


def test_all_any_min_and_max_iterations():
    conditions = (
        ExitCondition(window=1, threshold=0.8),
        ExitCondition(metric="reward/mean", window=1, threshold=0.0),
    )
    all_required = CurriculumManager(
        [make_stage("one", exit_conditions=conditions), make_stage("two")], LEVELS
    )
    assert observe_rates(all_required, 1.0, 1.0) == "one"  # reward is -1
    any_required = CurriculumManager(
        [make_stage("one", exit_conditions=conditions, require="any"), make_stage("two")], LEVELS
    )
    assert observe_rates(any_required, 1.0) == "two"
    late = CurriculumManager(
        [make_stage("one", window=1, min_iterations=3), make_stage("two")], LEVELS
    )
    assert observe_rates(late, 1.0, 1.0) == "one"
    assert observe_rates(late, 1.0) == "two"
    forced = CurriculumManager(
        [make_stage("one", exit_conditions=(), max_iterations=2), make_stage("two")], LEVELS
    )
    assert observe_rates(forced, 0.0) == "one"
    assert observe_rates(forced, 0.0) == "two"
    assert forced.history[0]["why"] == "max_iterations: 2 reached"


def test_history_describes_each_move():
    manager = CurriculumManager([make_stage("one"), make_stage("two", exit_conditions=())], LEVELS)
    observe_rates(manager, 0.0, 0.7, 0.9, 0.3)
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


def test_early_stop_needs_the_last_stage_and_a_full_window_in_it():
    early = ExitCondition(window=2, threshold=0.9)
    manager = CurriculumManager(
        [make_stage("one", window=4), make_stage("two", exit_conditions=())],
        LEVELS,
        early_stop=early,
    )
    observe_rates(manager, 1.0, 1.0, 1.0)
    assert manager.finished is None
    observe_rates(manager, 1.0, 1.0)
    assert manager.stage.name == "two" and manager.finished is None
    observe_rates(manager, 1.0)
    assert manager.finished == "curriculum finished: early_stop: success_rate 1 >= 0.9 over 2"
    assert manager.history[-1]["to"] == END_STAGE
    observe_rates(manager, 1.0)
    assert len(manager.history) == 2 and manager.iteration == 6


def test_leaving_the_last_stage_finishes():
    manager = CurriculumManager([make_stage("one")], LEVELS)
    observe_rates(manager, 1.0, 1.0)
    assert manager.finished is not None and manager.history[-1]["to"] == END_STAGE


def test_without_stages_all_levels_are_practised_forever():
    manager = CurriculumManager((), LEVELS)
    observe_rates(manager, *[1.0] * 20)
    assert manager.finished is None and manager.history == []
    rng = np.random.default_rng(0)
    drawn = [manager.draw_level(rng) for _ in range(1000)]
    assert 430 < drawn.count("easy") < 570


def test_levels_are_drawn_by_their_weights_and_reproducibly():
    manager = CurriculumManager([make_stage("one", {"easy": 3.0, "hard": 1.0})], LEVELS)
    drawn = [manager.draw_level(np.random.default_rng(s)) for s in range(1000)]
    assert 700 < drawn.count("easy") < 800
    assert drawn[:50] == [manager.draw_level(np.random.default_rng(s)) for s in range(50)]


def test_metrics():
    manager = CurriculumManager(
        [make_stage("one", window=4)], LEVELS, early_stop=ExitCondition(window=8, threshold=0.9)
    )
    assert manager.collect_metrics()["curriculum/window_filled"] == 0
    observe_rates(manager, 0.5, 1.0)
    assert manager.collect_metrics() == {
        "curriculum/stage": 0.0,
        "curriculum/stage_iterations": 2.0,
        "curriculum/moves": 0.0,
        "curriculum/window_filled": 0.25,
        "curriculum/average/success_rate": 0.75,
    }


@pytest.mark.parametrize("cut", range(7))
def test_a_restored_curriculum_continues_identically(cut):
    rates = [0.7, 0.9, 0.1, 0.9, 0.9, 1.0, 1.0]

    def make_manager():
        stages = [
            make_stage("one"),
            make_stage("two", window=3, min_iterations=4),
            make_stage("three"),
        ]
        return CurriculumManager(stages, LEVELS, early_stop=ExitCondition(window=1))

    uninterrupted, first, second = make_manager(), make_manager(), make_manager()
    observe_rates(uninterrupted, *rates)
    observe_rates(first, *rates[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    observe_rates(second, *rates[cut:])
    assert (
        second.state_dict() == uninterrupted.state_dict()
        and second.collect_metrics() == uninterrupted.collect_metrics()
    )
    assert [move["iteration"] for move in uninterrupted.history] == [2, 6, 7]


def test_mistakes_are_named():
    with pytest.raises(SettingsError, match="same name"):
        CurriculumManager([make_stage("one"), make_stage("one")], LEVELS)
    with pytest.raises(SettingsError, match="cannot be named"):
        CurriculumManager([make_stage(END_STAGE)], LEVELS)
    wrong = make_stage("one", exit_conditions=(ExitCondition(metric="sucess_rate"),))
    with pytest.raises(SettingsError, match="did you mean 'train/success_rate'"):
        observe_rates(CurriculumManager([wrong], LEVELS), 0.5)
    late = make_stage(
        "one", exit_conditions=(ExitCondition(metric="train/success_rate_by_level/hard", window=1),)
    )
    manager = CurriculumManager([late], LEVELS)
    # the hard level is not drawn in this iteration
    manager.observe_iteration(
        {"train/success_rate": 1.0}, known=["train/success_rate_by_level/hard"]
    )
    assert manager.finished is None
    with pytest.raises(ResumeRefused, match="saved with stages"):
        CurriculumManager([make_stage("two")], LEVELS).load_state_dict(manager.state_dict())


def test_a_plateau_is_a_slope():
    flat = ExitCondition(statistic="slope", window=3, comparison="<=", threshold=0.1)
    manager = CurriculumManager(
        [make_stage("one", exit_conditions=(flat,)), make_stage("two")], LEVELS
    )
    # slopes of three: (v3 - v1) / 2 = .2, .2, .15, .05
    assert observe_rates(manager, 0.1, 0.3, 0.5, 0.7, 0.8) == "one"
    assert manager.collect_metrics()["curriculum/slope/success_rate"] == pytest.approx(0.15)
    assert observe_rates(manager, 0.8) == "two"
    assert manager.history[0]["why"] == "slope of success_rate 0.05 <= 0.1 over 3"
    assert manager.history[0]["metrics"] == {"slope of success_rate": pytest.approx(0.05)}


def test_a_slope_needs_its_full_window():
    flat = ExitCondition(statistic="slope", window=3, comparison="<=", threshold=0.1)
    manager = CurriculumManager(
        [make_stage("one", exit_conditions=(flat,)), make_stage("two")], LEVELS
    )
    assert observe_rates(manager, 0.5, 0.5) == "one"
    assert observe_rates(manager, 0.5) == "two"
    with pytest.raises(SettingsError, match="window: 1 point has no slope"):
        ExitCondition(statistic="slope", window=1)


def test_patience_counts_iterations_in_a_row():
    long = (ExitCondition(window=2, threshold=0.8, patience=2),)
    manager = CurriculumManager(
        [make_stage("one", exit_conditions=long), make_stage("two", exit_conditions=long)], LEVELS
    )
    # means .8 (1st), .5 (none), .8 (1st), .9 (2nd)
    assert observe_rates(manager, 0.6, 1.0, 0.0, 1.6) == "one"
    assert observe_rates(manager, 0.2) == "two"
    assert manager.history[0]["iteration"] == 5
    assert manager.history[0]["why"] == "success_rate 0.9 >= 0.8 over 2, 2 times in a row"
    observe_rates(manager, 1.0, 1.0)  # the patience restarts with the stage
    assert manager.finished is None
    observe_rates(manager, 1.0)
    assert manager.finished is not None


def test_patience_waits_while_a_metric_is_not_observed():
    name = "train/success_rate_by_level/hard"
    hard = (ExitCondition(metric=name, window=1, threshold=0.8, patience=2),)
    manager = CurriculumManager(
        [make_stage("one", exit_conditions=hard), make_stage("two")], LEVELS
    )
    for metrics in ({name: 1.0}, {}, {}):
        manager.observe_iteration({"train/success_rate": 0.0, **metrics}, known=[name])
    assert manager.index == 0
    manager.observe_iteration({name: 1.0})
    assert manager.index == 1
