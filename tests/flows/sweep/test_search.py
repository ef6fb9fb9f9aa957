"""Configurations drawn by Optuna: repeated exactly after a kill; successive halving checked by hand."""

import pytest

from flows.sweep.search import Dimension, PriorConfiguration, create_search
from rl_core.errors import SettingsError

RATES = [
    Dimension("rate", (), 1e-5, 1e-2, is_log=True),
    Dimension("size", (), 2, 16, is_whole=True),
]
OPTIONS = {"trials": 6, "seed": 3, "minimize": False}


def test_a_grid_continues_after_the_earlier_configurations():
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
            drawn.append(search.suggest())
            search.observe(number, -abs(float(drawn[-1]["rate"]) - 1e-3))
        return drawn

    uninterrupted = draw(create_search(method, RATES, [], OPTIONS), 6, 0)
    assert len({params["rate"] for params in uninterrupted}) == 6
    assert all(
        1e-5 <= float(params["rate"]) <= 1e-2 and 2 <= int(params["size"]) <= 16
        for params in uninterrupted
    )
    for cut in (1, 4):
        earlier = [
            PriorConfiguration(params, [-abs(float(params["rate"]) - 1e-3)], is_finished=True)
            for params in uninterrupted[:cut]
        ]
        resumed = create_search(method, RATES, earlier, OPTIONS)
        assert draw(resumed, 6 - cut, cut) == uninterrupted[cut:]
        assert resumed.suggest() is None


def test_an_unfinished_configuration_is_resumed_with_its_values():
    pytest.importorskip("optuna")
    first = create_search("random", RATES, [], OPTIONS)
    params = first.suggest()
    resumed = create_search("random", RATES, [PriorConfiguration(params)], OPTIONS)
    resumed.observe(0, 0.5)
    assert resumed.suggest() == first.suggest(), "the second one is drawn as it would have been"


def test_successive_halving_keeps_one_of_three():
    pytest.importorskip("optuna")
    search = create_search("halving", RATES, [], OPTIONS)
    continued = []
    for number, value in enumerate([0.1, 0.9, 0.2, 0.5, 0.95]):
        search.suggest()
        continued.append(search.should_continue(number, 0, value))
        search.observe(number, value, pruned=not continued[-1])
    # Of n values so far the best n // 3 continue, at least one: the first, and 0.9 as the best of two; not 0.2 and 0.5.
    assert continued == [True, True, False, False, True]
