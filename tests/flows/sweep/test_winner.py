"""The winner of a sweep: ranking, fresh episodes, p-values adjusted for the number of finalists."""

import dataclasses
import json

import pytest
from helpers.evaluations import build_evaluation

from flows.sweep.plan import SweepPlan
from flows.sweep.schedule import TrialOutcome
from flows.sweep.search import Dimension
from flows.sweep.winner import (
    StartModelResult,
    SweepChoice,
    _add_fresh_results,
    compare_finalists,
    compare_with_start_model,
    rank_configurations,
    select_finalists,
)

PLAN = SweepPlan(
    config="test", dimensions=(Dimension("a", ("1", "2", "3", "4")),), seeds=2, finalists=2
)


def make_outcome(number, seed, value, status="finished"):
    return TrialOutcome(
        number=number,
        seed=seed,
        params={"a": str(number + 1)},
        status=status,
        value=value,
        model=f"m{seed}",
    )


VALUES = {
    (0, 0): 0.5,
    (0, 1): 0.5,
    (1, 0): 0.2,
    (1, 1): 0.9,
    (2, 0): 0.6,
    (2, 1): 0.4,
    (3, 0): 0.99,
}
OUTCOMES = {key: make_outcome(*key, value) for key, value in VALUES.items()}


def test_the_best_mean_of_complete_configurations_comes_first_and_ties_keep_their_order():
    assert [candidate.number for candidate in rank_configurations(OUTCOMES, PLAN)] == [1, 0, 2], (
        "the fourth has one seed of two"
    )
    assert rank_configurations(OUTCOMES, PLAN)[0].interval.rate == pytest.approx(0.55)
    assert rank_configurations(OUTCOMES, PLAN)[0].best_seed == 1
    outcomes = {**OUTCOMES, (1, 0): make_outcome(1, 0, None, "failed")}
    assert [candidate.number for candidate in rank_configurations(outcomes, PLAN)] == [0, 2]
    loss_plan = SweepPlan(
        config="test", dimensions=PLAN.dimensions, seeds=2, metric="eval/loss", minimize=True
    )
    assert [candidate.number for candidate in rank_configurations(OUTCOMES, loss_plan)] == [0, 2, 1]


def test_the_unvaried_settings_are_also_a_finalist():
    ranked = rank_configurations(OUTCOMES, PLAN)
    assert [candidate.number for candidate in select_finalists(ranked, PLAN, {"a": "3"})] == [
        1,
        0,
        2,
    ]
    assert [candidate.number for candidate in select_finalists(ranked, PLAN, {"a": "1"})] == [1, 0]


def test_fresh_episodes_give_the_figure_and_the_adjusted_p_values():
    """Compare on ten episodes: the winner is right on all with both seeds.

    One finalist is right on none, the other one on all but two.
    """
    finalists = rank_configurations(OUTCOMES, PLAN)
    right = dict.fromkeys(range(10), 1.0)
    played = {
        "0001-s0": right,
        "0001-s1": right,
        "0000-s0": dict.fromkeys(range(10), 0.0),
        "0000-s1": dict.fromkeys(range(10), 0.0),
        "0002-s0": {**right, 0: 0.0, 1: 0.0},
        "0002-s1": {**right, 0: 0.0, 1: 0.0},
    }
    fresh, comparisons = compare_finalists(1, finalists, played, metric="success", seed=0)
    assert fresh == {1: [1.0, 1.0], 0: [0.0, 0.0], 2: [0.8, 0.8]}
    # Sign tests: 2^-10 and 2^-2; Holm doubles the smaller one.
    assert [(comparison.number, comparison.difference) for comparison in comparisons] == [
        (0, 1.0),
        (2, pytest.approx(0.2)),
    ]
    assert [comparison.p_value for comparison in comparisons] == pytest.approx([2**-10, 0.25])
    assert [comparison.adjusted for comparison in comparisons] == pytest.approx([2**-9, 0.25])
    choice = SweepChoice(
        1, {"a": "2"}, "success", 0.55, "", draw=1, fresh=fresh, comparisons=comparisons
    )
    text = choice.describe_choice("a=2")
    assert (
        "success 0.55 where it was chosen, 1 [1, 1] over 2 seeds on fresh held-out episodes" in text
    )
    assert "not significantly better than 1 of 2 other finalists" in text


@pytest.mark.parametrize(
    ("metric", "fresh", "difference"),
    # of four fresh episodes the third tells no success; rewards are known for all
    [
        ("success", {1: [1.0, 1.0], 0: [1 / 3, 1 / 3]}, 2 / 3),
        ("reward", {1: [0.5] * 2, 0: [0.25] * 2}, 0.25),
    ],
)
def test_fresh_episodes_whose_success_is_unknown_are_left_out(tmp_path, metric, fresh, difference):
    plan = dataclasses.replace(PLAN, metric=metric)
    finalists = rank_configurations(OUTCOMES, plan)[:2]
    played = {
        1: build_evaluation([1, 1, None, 1], rewards=[0.0, 0.0, 1.0, 1.0]),
        0: build_evaluation([0, 0, None, 1], rewards=[0.0, 0.0, 0.0, 1.0]),
    }
    models = {f"000{number}-s{seed}": "m" for number in played for seed in (0, 1)}
    values = {name: played[int(name[3])].to_json() for name in models}
    (tmp_path / "evaluation.json").write_text(json.dumps(values))
    choice = SweepChoice(1, {"a": "2"}, metric, 0.55, "")
    choice = _add_fresh_results(choice, finalists[0], finalists, tmp_path, models, plan, 0, 1)
    assert choice.fresh == {number: pytest.approx(values) for number, values in fresh.items()}
    (comparison,) = choice.comparisons
    assert (comparison.number, comparison.difference) == (0, pytest.approx(difference))


def test_without_fresh_episodes_the_figure_is_called_too_optimistic():
    text = SweepChoice(1, {"a": "2"}, "success", 0.5, "", equal=2).describe_choice("a=2")
    assert text.startswith("a=2 is the first of 3 equally good: success 0.5 where it was chosen")
    text = SweepChoice(
        1, {"a": "2"}, "success", 0.55, "", why="no fresh episodes (too few)"
    ).describe_choice("a=2")
    assert text.endswith("no fresh episodes (too few), so that figure is too optimistic")


@pytest.mark.parametrize(
    ("outcomes", "gain"),
    [
        ({"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.0}, 1 / 6),  # (1 - 0) + (0.5 - 1) + (0 - 0), of 3
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, -1 / 2),  # (1 - 1) + (0.5 - 1) + (0 - 1), of 3
    ],
)
def test_the_gain_over_the_start_model_is_paired_and_averaged_over_seeds(outcomes, gain):
    """The fourth episode failed with one seed and is not compared."""
    winner = [{"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}]
    start = compare_with_start_model(StartModelResult("m", 0.5), winner, outcomes, seed=0)
    assert start.gain[0] == pytest.approx(gain) and start.gain[1] <= start.gain[0] <= start.gain[2]
    assert start.fresh == sum(outcomes.values()) / 4 and start.value == 0.5
