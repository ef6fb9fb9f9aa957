"""Exit conditions on a function of the user."""

import json
import sys
import types

import pytest

from rl_core.curriculum.manager import CurriculumManager
from rl_core.errors import SettingsError
from rl_core.settings import CurriculumStage, ExitCondition

CALLS = []


def compute_best(history, name="train/success_rate"):
    """Return the largest value in the window; None before there are two values."""
    CALLS.append({key: list(values) for key, values in history.items()})
    return max(history[name]) if len(history[name]) > 1 else None


@pytest.fixture(autouse=True)
def custom_module(monkeypatch):
    """Install a module with functions for exit conditions."""
    module = types.ModuleType("user_conditions")
    module.best = compute_best
    module.number = 3
    module.raises = lambda history: history["absent"]
    module.text = lambda history: "x"
    module.always = lambda history: True
    module.two = lambda history, other: 1.0
    monkeypatch.setitem(sys.modules, "user_conditions", module)
    CALLS.clear()


def make_manager(function="best", **options):
    condition = ExitCondition(
        function=f"user_conditions:{function}", **{"window": 3, "threshold": 0.7, **options}
    )
    stages = [
        CurriculumStage(name=name, levels={"easy": 1.0}, exit_conditions=(condition,))
        for name in ("one", "two")
    ]
    return CurriculumManager(stages, ["easy"])


def observe_rates(curriculum, *rates):
    """Observe one iteration per success rate, and return the name of the stage afterwards."""
    for rate in rates:
        curriculum.observe_iteration({"train/success_rate": rate, "reward/mean": -rate})
    return curriculum.stage.name


def test_a_function_receives_the_window_and_holds_once_it_is_full():
    curriculum = make_manager()
    assert observe_rates(curriculum, 0.9, 0.1) == "one"  # 0.9, but only two of three iterations
    assert curriculum.collect_metrics()["curriculum/own/best"] == 0.9
    assert observe_rates(curriculum, 0.2) == "two"
    assert {"train/success_rate": [0.9, 0.1, 0.2], "reward/mean": [-0.9, -0.1, -0.2]} in CALLS
    assert "best 0.9 >= 0.7 over 3" in curriculum.history[0]["why"]
    # the window restarts with the stage
    assert observe_rates(curriculum, 0.1, 0.1, 0.1) == "two" and curriculum.finished is None
    assert CALLS[-1]["train/success_rate"] == [0.1, 0.1, 0.1]


def test_patience_options_and_resume():
    options = {
        "window": 2,
        "patience": 2,
        "options": {"name": "reward/mean"},
        "comparison": "<=",
        "threshold": -0.5,
    }
    uninterrupted, interrupted = make_manager(**options), make_manager(**options)
    # held once
    assert observe_rates(uninterrupted, 0.6, 0.7) == observe_rates(interrupted, 0.6, 0.7) == "one"
    resumed = make_manager(**options)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert observe_rates(uninterrupted, 0.8) == observe_rates(resumed, 0.8) == "two"


def test_a_truth_value_counts_as_1_and_a_streak_does_not_wait_for_a_metric():
    curriculum = make_manager("always", window=1, patience=2, threshold=0.8)
    curriculum.observe_iteration({"reward/mean": 1.0})
    curriculum.observe_iteration({"reward/mean": 1.0})
    assert curriculum.stage.name == "two"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "no function 'absent' there"),
        ("number", "is a int, expected a function"),
        ("two", "is called with"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_immediately(function, message):
    with pytest.raises(SettingsError, match=message):
        make_manager(function)


@pytest.mark.parametrize(
    ("function", "message"), [("raises", "raised KeyError: 'absent'"), ("text", "returned 'x'")]
)
def test_a_later_error_names_the_function(function, message):
    with pytest.raises(SettingsError, match=f"'user_conditions:{function}' {message}"):
        observe_rates(make_manager(function), 0.5)


def test_metric_and_statistic_are_not_for_functions():
    with pytest.raises(SettingsError, match="reads the metrics itself"):
        ExitCondition(function="a:b", statistic="slope")
    with pytest.raises(SettingsError, match="options: are passed to a custom function"):
        ExitCondition(options={"a": 1})
