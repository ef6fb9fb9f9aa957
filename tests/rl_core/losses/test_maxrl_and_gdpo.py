"""MaxRL and GDPO advantages: by hand, both signs, against enumeration and numpy, and on input nobody expects."""

import itertools
import math

import numpy as np
import pytest
import torch
from oracles import policy_oracles as oracle

from rl_core.errors import DataError
from rl_core.losses.advantages import (
    batch_advantages,
    decoupled_advantages,
    group_advantages,
    maxrl_advantages,
)
from rl_core.trainers.policy_gradient.advantages import compute_relative_advantages


def rewards_of(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_maxrl_by_hand():
    # one success of four: mean 1/4, (1 - 1/4) / (1/4) = 3 and -1; three of four: 1/3 and -1
    actual = maxrl_advantages(rewards_of([0, 1, 0, 0], [1, 1, 0, 1], [0.2, 0.6, 0.4, 0.0]))
    assert actual[0].tolist() == [-1, 3, -1, -1]
    assert actual[1].tolist() == pytest.approx([1 / 3, 1 / 3, -1, 1 / 3])
    # mean 0.3: -1/3, 1, 1/3, -1
    assert actual[2].tolist() == pytest.approx([-1 / 3, 1, 1 / 3, -1])


@pytest.mark.parametrize(
    "row", [[0.0] * 4, [1.0] * 4, [0.3] * 4, [-1.0] * 4, [-2.0, -1.0, 0.0, 0.0]]
)
@pytest.mark.parametrize("order", [None, 2])
def test_maxrl_of_groups_without_a_success_or_a_failure_is_zero(row, order):
    if order is not None and not set(row) <= {0.0, 1.0}:
        with pytest.raises(DataError, match="each reward must be 0 or 1"):
            maxrl_advantages(rewards_of(row), order=order)
        return
    assert maxrl_advantages(rewards_of(row), order=order).abs().max() < 1e-12


def test_maxrl_with_negative_rewards_is_scaled_by_the_best():
    # mean (1 - 1 - 1 - 1) / 4 = -1/2 is replaced by max / G = 1/4: 1.5 * 4 and -0.5 * 4
    actual = maxrl_advantages(rewards_of([1, -1, -1, -1], [1e-9, -1, 0, 0]))
    assert actual[0].tolist() == [6, -2, -2, -2]
    assert torch.isfinite(actual).all() and float(actual[1].sum()) == pytest.approx(0, abs=1e-3)


def test_maxrl_of_one_rollout_is_zero():
    for order in (None, 1, 5):
        assert maxrl_advantages(rewards_of([1.0], [0.0]), order=order).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("order", [1, 2, 3, 4, None])
def test_maxrl_is_unbiased_for_the_truncated_likelihood(size, order):
    """Enumerate all outcomes of a group: E[1/G sum A_i d log p(x_i)] = d/dlogit of -sum_k (1 - p)^k / k."""
    p = 0.3
    expected = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        probability = math.prod(p if x else 1 - p for x in outcome)
        advantages = maxrl_advantages(rewards_of(list(outcome)), order=order)[0].tolist()
        scores = [x - p for x in outcome]  # derivative of log p(x) by the logit
        expected += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / size
    limit = size - 1 if order is None else min(order, size - 1)
    truncated = sum((1 - p) ** (k - 1) for k in range(1, limit + 1)) * p * (1 - p)
    assert expected == pytest.approx(truncated, rel=1e-12)


def test_order_one_is_rloo_and_the_largest_order_the_default():
    rewards = rewards_of([1, 0, 0, 1, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 0])
    rloo = group_advantages(rewards, method="rloo")
    torch.testing.assert_close(maxrl_advantages(rewards, order=1), rloo)
    torch.testing.assert_close(maxrl_advantages(rewards, order=4), maxrl_advantages(rewards))
    # one short of the largest: between the two
    between = maxrl_advantages(rewards, order=3)[1, 4]
    assert rloo[1, 4] < between < 4


def test_maxrl_refuses_what_it_cannot_read():
    with pytest.raises(DataError, match="order: 0"):
        maxrl_advantages(rewards_of([1, 0]), order=0)
    with pytest.raises(DataError, match="rewards"):
        maxrl_advantages(rewards_of([1, float("nan")]))
    with pytest.raises(DataError, match="each reward must be 0 or 1"):
        maxrl_advantages(rewards_of([1, 0.5, 0.0]), order=1)


def test_decoupled_by_hand():
    # two components of a group of two: (1, 0) and (0, 0): the first alone tells them apart
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    actual = decoupled_advantages(rewards_of([1, 0], [0, 0]), torch.tensor([2.0, 5.0]).double())
    assert actual.tolist() == pytest.approx([2 * half, -2 * half])
    # opposite components of equal weight cancel; a negative weight turns one around
    cancel = decoupled_advantages(rewards_of([1, 0], [0, 9]), torch.ones(2).double())
    assert cancel.abs().max() < 1e-4  # 1e-4 beside the deviation of a component
    turned = decoupled_advantages(rewards_of([1, 0], [0, 9]), torch.tensor([1.0, -1.0]).double())
    assert turned.tolist() == pytest.approx([2 * half, -2 * half], rel=1e-3)
    assert decoupled_advantages(rewards_of([3, 1]), torch.ones(2).double()).tolist() == [0.0]
    assert (
        decoupled_advantages(torch.zeros(3, 0).double(), torch.zeros(0).double()).tolist()
        == [0] * 3
    )
    with pytest.raises(DataError, match=r"weights \(3,\)"):
        decoupled_advantages(rewards_of([1, 0]), torch.ones(3).double())
    with pytest.raises(DataError, match="rewards"):
        decoupled_advantages(rewards_of([1, float("nan")], [0, 1]), torch.ones(2).double())
    with pytest.raises(DataError, match="weights"):
        decoupled_advantages(rewards_of([1, 2], [0, 1]), torch.tensor([1.0, float("inf")]).double())


@pytest.mark.parametrize("seed", range(20))
def test_gdpo_equals_the_oracle(seed):
    """Compare groups of other sizes and components, one of them constant, with numpy."""
    rng = np.random.default_rng([7, seed])
    groups, components = [], []
    for number in range(4):
        size = int(rng.integers(1, 6))
        names = {"task": 1.0, "length": 0.3} if number % 2 else {"task": 1.0, "style": -0.7}
        rows = [
            {
                name: (
                    2.0 if name == "style" and number == 0 else float(rng.standard_normal()),
                    weight,
                )
                for name, weight in names.items()
            }
            for _ in range(size)
        ]
        components.append(rows)
        groups.append(
            torch.tensor([sum(v * w for v, w in row.values()) for row in rows], dtype=torch.float64)
        )
    actual = torch.cat(compute_relative_advantages(groups, "gdpo", components=components)).numpy()
    summed = np.concatenate(
        [
            sum(
                weight * oracle.compare(np.array([row[name][0] for row in rows]), "grpo")
                for name, (_, weight) in rows[0].items()
            )
            for rows in components
        ]
    )
    deviation = np.sqrt(((summed - summed.mean()) ** 2).sum() / (len(summed) - 1))
    expected = (summed - summed.mean()) / (deviation + 1e-4) if deviation >= 1e-3 else 0 * summed
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_gdpo_tells_apart_what_grpo_merges():
    """Rewards (1, 0) and (0, 1) have one sum; a component that is rarely met counts more."""
    rows = [{"a": (x, 1.0), "b": (y, 1.0)} for x, y in ((1, 0), (0, 1), (0, 0), (0, 1))]
    total = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    gdpo = compute_relative_advantages([total], "gdpo", components=[rows])[0]
    grpo = compute_relative_advantages([total], "grpo")[0]
    assert grpo[0] == grpo[1] and gdpo[0] > gdpo[1] > gdpo[2]
    alone = compute_relative_advantages([total], "gdpo")[0]  # no components: the reward is one
    torch.testing.assert_close(alone, batch_advantages(grpo[None])[0])
    missing = [{"a": (1.0, 1.0)}, {}, {"b": (1.0, 1.0)}, {}]  # 0 where a rollout lacks a component
    assert torch.isfinite(
        compute_relative_advantages([total], "gdpo", components=[missing])[0]
    ).all()
