"""Returns and advantages by turn, worked by hand, for both signs."""

import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.turn_advantages import discount_turn_rewards, step_advantages, turn_advantages


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_returns_by_hand():
    # from the last: 2; -1 + 0.5 * 2 = 0; 4 + 0.5 * 0 = 4
    assert discount_turn_rewards(double([4.0, -1.0, 2.0]), 0.5).tolist() == [4.0, 0.0, 2.0]
    assert discount_turn_rewards(double([0.0, 0.0, 1.0]), 1.0).tolist() == [1.0, 1.0, 1.0]
    assert discount_turn_rewards(double([3.0, 5.0]), 0.0).tolist() == [3.0, 5.0]
    assert discount_turn_rewards(double([]), 0.5).tolist() == []


def test_steps_are_compared_in_equal_states_only():
    # state a: returns 1, 0, 2 with mean 1 and deviation 1; state b: alone
    actual, sizes = step_advantages(double([1.0, 7.0, 0.0, 2.0]), ["a", "b", "a", "a"])
    assert actual.tolist() == pytest.approx([0.0, 0.0, -1 / 1.0001, 1 / 1.0001], abs=1e-15)
    assert sizes == [3, 1]
    # leave one out: 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2
    actual, _ = step_advantages(double([1.0, 0.0, 2.0]), "aaa", method="rloo")
    assert actual.tolist() == [0.0, -1.5, 1.5]
    actual, _ = step_advantages(double([1.0, 4.0, 0.0]), "aba", method="dr_grpo")
    assert actual.tolist() == [0.5, 0.0, -0.5]


def test_a_group_by_hand():
    """Check two rollouts of equal start: the first ends well after a detour through x, the second fails at once."""
    actual = turn_advantages(
        double([1.0, -1.0]),
        [double([0.0, 0.0, 1.0]), double([-1.0])],
        [["s", "x", "s"], ["s"]],
        gamma=0.5,
        episode_weight=2.0,
        step_weight=3.0,
        method="dr_grpo",
    )
    # returns 1/4, 1/2, 1 and -1; of state s: 1/4, 1, -1 with mean 1/12
    expected = [2 + 3 * (1 / 4 - 1 / 12), 2.0, 2 + 3 * (1 - 1 / 12)], [-2 + 3 * (-1 - 1 / 12)]
    assert [row.tolist() for row in actual.advantages] == [
        pytest.approx(row, abs=1e-14) for row in expected
    ]
    assert actual.set_sizes == [3, 1]
    assert actual.step_advantages_K.tolist() == pytest.approx([1 / 6, 0, 11 / 12, -13 / 12])


def test_equal_outcomes_differ_by_their_lengths():
    # both rollouts earn 1, so no episode advantage; the shorter way from the shared state is better by the discount
    actual = turn_advantages(
        double([0.0, 0.0]),
        [double([0.0, 1.0]), double([1.0])],
        [["s", "t"], ["s"]],
        gamma=0.9,
        method="dr_grpo",
    )
    assert [row.tolist() for row in actual.advantages] == [
        pytest.approx([-0.05, 0.0]),
        pytest.approx([0.05]),
    ]


def test_a_turn_without_key_earns_for_others_and_is_not_compared():
    actual = turn_advantages(
        double([0.5, -0.5]),
        [double([0.0, 4.0]), double([0.0, 0.0])],
        [["s", None], ["s", "t"]],
        gamma=1.0,
        method="dr_grpo",
    )
    assert [row.tolist() for row in actual.advantages] == [[2.5, 0.5], [-2.5, -0.5]]
    assert actual.set_sizes == [2, 1]


def test_rollouts_without_turns():
    actual = turn_advantages(double([1.0, -1.0]), [double([]), double([])], [[], []])
    assert [row.tolist() for row in actual.advantages] == [[], []]
    assert actual.set_sizes == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: discount_turn_rewards(double([1.0]), 1.5), "gamma: 1.5"),
        (lambda: discount_turn_rewards(double([float("nan")]), 1.0), "turn rewards"),
        (lambda: step_advantages(double([1.0]), ["a", "b"]), "for 2 keys"),
        (
            lambda: turn_advantages(double([1.0]), [double([1.0])], [["a", "b"]]),
            r"\[1\] rewards, \[2\] keys",
        ),
        (
            lambda: turn_advantages(double([1.0]), [double([1.0])], [["a"]], step_weight=-1.0),
            "not below 0",
        ),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(DataError, match=message):
        call()
