"""Exit conditions on a function of the user's."""

import json
import sys
import types

import pytest

from rl_core.curriculum.manager import CurriculumManager
from rl_core.errors import SettingsError
from rl_core.settings import CurriculumStage, ExitCondition

CALLS = []


def best(history, name="train/success_rate"):
    """Largest value within the window; none before there are two."""
    CALLS.append({key: list(values) for key, values in history.items()})
    return max(history[name]) if len(history[name]) > 1 else None


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = types.ModuleType("own_conditions")
    made.best, made.number = best, 3
    made.raises, made.text = lambda history: history["absent"], lambda history: "x"
    made.always = lambda history: True
    made.two = lambda history, other: 1.0
    monkeypatch.setitem(sys.modules, "own_conditions", made)
    CALLS.clear()


def manager(function="best", **options):
    condition = ExitCondition(
        function=f"own_conditions:{function}", **{"window": 3, "threshold": 0.7, **options}
    )
    stages = [
        CurriculumStage(name=name, levels={"easy": 1.0}, exit_conditions=(condition,))
        for name in ("one", "two")
    ]
    return CurriculumManager(stages, ["easy"])


def feed(curriculum, *rates):
    for rate in rates:
        curriculum.observe({"train/success_rate": rate, "reward/mean": -rate})
    return curriculum.stage.name


def test_it_is_given_the_window_and_holds_once_that_is_full():
    curriculum = manager()
    assert feed(curriculum, 0.9, 0.1) == "one"  # 0.9, but two of three iterations
    assert curriculum.collect_metrics()["curriculum/own/best"] == 0.9
    assert feed(curriculum, 0.2) == "two"
    assert {"train/success_rate": [0.9, 0.1, 0.2], "reward/mean": [-0.9, -0.1, -0.2]} in CALLS
    assert "best 0.9 >= 0.7 over 3" in curriculum.history[0]["why"]
    # the window begins anew
    assert feed(curriculum, 0.1, 0.1, 0.1) == "two" and curriculum.finished is None
    assert CALLS[-1]["train/success_rate"] == [0.1, 0.1, 0.1]


def test_patience_options_and_resume():
    options = {
        "window": 2,
        "patience": 2,
        "options": {"name": "reward/mean"},
        "comparison": "<=",
        "threshold": -0.5,
    }
    whole, cut = manager(**options), manager(**options)
    assert feed(whole, 0.6, 0.7) == feed(cut, 0.6, 0.7) == "one"  # held once
    resumed = manager(**options)
    resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    assert feed(whole, 0.8) == feed(resumed, 0.8) == "two"


def test_a_truth_value_counts_as_1_and_a_streak_does_not_wait_for_a_metric():
    curriculum = manager("always", window=1, patience=2, threshold=0.8)
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
def test_what_cannot_be_called_is_refused_at_once(function, message):
    with pytest.raises(SettingsError, match=message):
        manager(function)


@pytest.mark.parametrize(
    ("function", "message"), [("raises", "raised KeyError: 'absent'"), ("text", "gave 'x'")]
)
def test_what_fails_later_names_the_function(function, message):
    with pytest.raises(SettingsError, match=f"'own_conditions:{function}' {message}"):
        feed(manager(function), 0.5)


def test_metric_and_statistic_are_not_for_functions():
    with pytest.raises(SettingsError, match="reads every metric by itself"):
        ExitCondition(function="a:b", statistic="slope")
    with pytest.raises(SettingsError, match="options: go to a function of yours"):
        ExitCondition(options={"a": 1})
