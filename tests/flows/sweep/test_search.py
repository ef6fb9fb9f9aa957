"""Configurations drawn by Optuna: the same again after a kill, and successive halving by hand."""

import pytest

from flows.sweep.search import Dimension, PriorConfiguration, create_search
from rl_core.errors import SettingsError

RATES = [
    Dimension("rate", (), 1e-5, 1e-2, is_log=True),
    Dimension("size", (), 2, 16, is_whole=True),
]
OPTIONS = {"trials": 6, "seed": 3, "minimize": False}


def test_a_grid_goes_on_behind_what_was_asked_for():
    varied = [Dimension("a", ("1", "2", "3"))]
    search = create_search("grid", varied, [PriorConfiguration({"a": "1"})], OPTIONS)
    assert [search.suggest(), search.suggest(), search.suggest()] == [{"a": "2"}, {"a": "3"}, None]


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(
        SettingsError, match=r"need the package optuna; install it, or posttrain\[sweep\]"
    ):
        create_search("random", RATES, [], OPTIONS)


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_search_that_was_killed_draws_the_same_configurations(method):
    pytest.importorskip("optuna")

    def draw(search, count, first):
        drawn = []
        for number in range(first, first + count):
            drawn.append(search.ask())
            search.tell(number, -abs(float(drawn[-1]["rate"]) - 1e-3))
        return drawn

    whole = draw(create_search(method, RATES, [], OPTIONS), 6, 0)
    assert len({one["rate"] for one in whole}) == 6
    assert all(1e-5 <= float(one["rate"]) <= 1e-2 and 2 <= int(one["size"]) <= 16 for one in whole)
    for cut in (1, 4):
        asked = [
            PriorConfiguration(one, [-abs(float(one["rate"]) - 1e-3)], is_finished=True)
            for one in whole[:cut]
        ]
        again = create_search(method, RATES, asked, OPTIONS)
        assert draw(again, 6 - cut, cut) == whole[cut:]
        assert again.suggest() is None


def test_a_configuration_that_was_not_finished_is_taken_up_with_its_values():
    pytest.importorskip("optuna")
    first = create_search("random", RATES, [], OPTIONS)
    params = first.suggest()
    again = create_search("random", RATES, [PriorConfiguration(params)], OPTIONS)
    again.observe(0, 0.5)
    assert again.suggest() == first.suggest(), "the second one is drawn as it would have been"


def test_successive_halving_keeps_one_of_three():
    pytest.importorskip("optuna")
    search = create_search("halving", RATES, [], OPTIONS)
    going_on = []
    for number, value in enumerate([0.1, 0.9, 0.2, 0.5, 0.95]):
        search.suggest()
        going_on.append(search.should_continue(number, 0, value))
        search.observe(number, value, pruned=not going_on[-1])
    # Of n values so far the best n // 3 go on, at least one: the first always, 0.9 as the best of two; 0.2 and 0.5 not.
    assert going_on == [True, True, False, False, True]
