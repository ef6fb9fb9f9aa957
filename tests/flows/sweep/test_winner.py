"""The winner of a sweep: ranking, fresh episodes, p-values adjusted for the number of finalists."""

import pytest

from flows.sweep.plan import SweepPlan
from flows.sweep.schedule import TrialOutcome
from flows.sweep.search import Dimension
from flows.sweep.winner import SweepChoice, compare_finalists, rank_configurations, select_finalists

PLAN = SweepPlan(
    config="test", dimensions=(Dimension("a", ("1", "2", "3", "4")),), seeds=2, finalists=2
)


def outcome(number, seed, value, status="finished"):
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
OUTCOMES = {key: outcome(*key, value) for key, value in VALUES.items()}


def test_the_best_mean_of_complete_configurations_comes_first_and_ties_keep_their_order():
    assert [one.number for one in rank_configurations(OUTCOMES, PLAN)] == [1, 0, 2], (
        "the fourth has one seed of two"
    )
    assert rank_configurations(OUTCOMES, PLAN)[0].interval.rate == pytest.approx(0.55)
    assert rank_configurations(OUTCOMES, PLAN)[0].best_seed == 1
    lost = {**OUTCOMES, (1, 0): outcome(1, 0, None, "failed")}
    assert [one.number for one in rank_configurations(lost, PLAN)] == [0, 2]
    least = SweepPlan(
        config="test", dimensions=PLAN.dimensions, seeds=2, metric="eval/loss", minimize=True
    )
    assert [one.number for one in rank_configurations(OUTCOMES, least)] == [0, 2, 1]


def test_the_configurations_own_settings_are_a_finalist_too():
    ranked = rank_configurations(OUTCOMES, PLAN)
    assert [one.number for one in select_finalists(ranked, PLAN, {"a": "3"})] == [1, 0, 2]
    assert [one.number for one in select_finalists(ranked, PLAN, {"a": "1"})] == [1, 0]


def test_fresh_episodes_give_the_figure_and_the_adjusted_p_values():
    """Ten episodes: the winner is right on all with both seeds, one finalist on none, the other on all but two."""
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
    # sign tests: 2^-10 and 2^-2; Holm doubles the smaller one
    assert [(one.number, one.difference) for one in comparisons] == [
        (0, 1.0),
        (2, pytest.approx(0.2)),
    ]
    assert [one.p_value for one in comparisons] == pytest.approx([2**-10, 0.25])
    assert [one.adjusted for one in comparisons] == pytest.approx([2**-9, 0.25])
    choice = SweepChoice(
        1, {"a": "2"}, "success", 0.55, "", draw=1, fresh=fresh, comparisons=comparisons
    )
    said = choice.describe_choice("a=2")
    assert (
        "success 0.55 where it was chosen, 1 [1, 1] over 2 seeds on fresh held-out episodes" in said
    )
    assert "not better for sure than 1 of 2 other finalists" in said


def test_without_fresh_episodes_the_figure_is_called_too_good():
    said = SweepChoice(1, {"a": "2"}, "success", 0.5, "", equal=2).describe_choice("a=2")
    assert said.startswith("a=2 is the first of 3 equally good: success 0.5 where it was chosen")
    said = SweepChoice(
        1, {"a": "2"}, "success", 0.55, "", why="no fresh episodes (too few)"
    ).describe_choice("a=2")
    assert said.endswith("no fresh episodes (too few), so that figure is too good to be true")
