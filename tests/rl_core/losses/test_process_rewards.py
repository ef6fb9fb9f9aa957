"""Process rewards by hand, both signs: values and rewards of steps, advantages, tokens, the loss of step labels."""

import math

import pytest
import torch
from oracles import process_oracles

from rl_core.errors import DataError
from rl_core.losses.process_rewards import (
    aggregate_steps,
    divide_into_step_rewards,
    process_advantages,
    spread_over_tokens,
    step_score_loss,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("aggregate", "value", "rewards"),
    [
        ("sum", 1.6, [0.9, 0.2, 0.5]),
        ("mean", 1.6 / 3, [0.3, 0.2 / 3, 0.5 / 3]),
        ("min", 0.2, [0.9, -0.7, 0.0]),  # the second step lowers the minimum by 0.7
    ],
)
def test_values_and_rewards_of_steps(aggregate, value, rewards):
    scores = tensor(0.9, 0.2, 0.5)
    assert float(aggregate_steps(scores, aggregate)) == pytest.approx(value, rel=1e-12)
    actual = divide_into_step_rewards(scores, aggregate)
    assert actual.tolist() == pytest.approx(rewards, rel=1e-12)
    assert float(divide_into_step_rewards(-scores, aggregate).sum()) == pytest.approx(
        float(aggregate_steps(-scores, aggregate)), rel=1e-12
    )


# Scores (1, 0) and (1): mean 2/3, deviation sqrt(1/3), so right = +a and wrong = -2a.
A = (1 / 3) / (math.sqrt(1 / 3) + 1e-4)


@pytest.mark.parametrize(
    ("aggregate", "first", "second"),
    [
        ("sum", [-A, -2 * A], [A]),
        ("mean", [-A / 2, -2 * A], [A]),
        ("min", [-2 * A, -2 * A], [A]),
    ],
)
def test_advantages_of_steps(aggregate, first, second):
    actual = process_advantages([tensor(1, 0), tensor(1)], aggregate=aggregate)
    assert actual[0].tolist() == pytest.approx(first, rel=1e-12)
    assert actual[1].tolist() == pytest.approx(second, rel=1e-12)
    flipped = process_advantages([tensor(0, 1), tensor(0)], aggregate=aggregate)
    if aggregate != "min":  # of negated scores the minimum is another step
        assert flipped[0].tolist() == pytest.approx([-value for value in first], rel=1e-12)


def test_other_scales_and_equal_scores():
    centered = process_advantages([tensor(1, 0), tensor(1)], aggregate="sum", method="dr_grpo")
    assert centered[0].tolist() == pytest.approx([-1 / 3, -2 / 3])
    left_out = process_advantages([tensor(1, 0), tensor(1)], aggregate="sum", method="rloo")
    assert left_out[0].tolist() == pytest.approx([-1 / 2, -1.0])  # times 3 / 2
    equal = process_advantages([tensor(0.5, 0.5), tensor(0.5)], aggregate="sum")
    assert [values.tolist() for values in equal] == [[0, 0], [0]]
    assert process_advantages([]) == [] and process_advantages([tensor(0.3)])[0].tolist() == [0]


@pytest.mark.parametrize("aggregate", ["sum", "mean", "min"])
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_advantages_agree_with_the_oracle(aggregate, method):
    for seed in range(60):
        scores = process_oracles.draw_scores(seed)
        expected = process_oracles.process_advantages(scores, aggregate, method)
        actual = process_advantages(
            [torch.tensor(row) for row in scores], aggregate=aggregate, method=method
        )
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-9, abs=1e-12)


def test_only_a_sum_pays_for_more_steps():
    """Check that a completion which repeats a right step gains by it under `sum` alone."""
    others = [tensor(1, 0), tensor(0, 1)]
    gains = {}
    for aggregate in ("sum", "mean", "min"):
        short = process_advantages([tensor(1), *others], aggregate=aggregate)[0][0]
        long = process_advantages([tensor(*[1] * 9), *others], aggregate=aggregate)[0][0]
        gains[aggregate] = float(long - short)
    assert gains["sum"] > 1 and gains["mean"] < 0 and gains["min"] < 0


def test_tokens_have_the_value_of_their_step():
    assert spread_over_tokens([0.5, -1.0], [1, 4], 6) == [0.5, 0.5, -1.0, -1.0, -1.0, 0.0]
    assert spread_over_tokens([0.5, -1.0, 2.0], [1, 1, 2], 3) == [0.5, 0.5, 2.0]
    assert spread_over_tokens([], [], 2) == [0.0, 0.0]
    for values, ends in (([1.0], [3]), ([1.0, 1.0], [2, 1]), ([1.0], [])):
        with pytest.raises(DataError):
            spread_over_tokens(values, ends, 3)


def test_the_loss_of_step_labels():
    scores = tensor(math.log(3), 0.0, -math.log(3)).requires_grad_()
    loss, metrics = step_score_loss(scores, tensor(1, 0, 1), num_steps=3)
    # -log 3/4, -log 1/2, -log 1/4
    expected = (math.log(4 / 3) + math.log(2) + math.log(4)) / 3
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert float(metrics["accuracy"]) == pytest.approx(2 / 3)
    assert float(metrics["reward_mean"]) == pytest.approx(1.5 / 3)
    loss.backward()
    assert scores.grad.tolist() == pytest.approx([(0.75 - 1) / 3, 0.5 / 3, (0.25 - 1) / 3])
    soft, _ = step_score_loss(tensor(math.log(3)), tensor(0.25), num_steps=1)
    assert float(soft) == pytest.approx(-0.25 * math.log(0.75) - 0.75 * math.log(0.25))
    parts = [step_score_loss(scores[i : i + 1], tensor(1), num_steps=3)[0] for i in range(3)]
    whole = step_score_loss(scores, tensor(1, 1, 1), num_steps=3)[0]
    assert float(sum(parts)) == pytest.approx(float(whole))  # micro-batches


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: aggregate_steps(tensor(), "sum"), "at least one step"),
        (lambda: aggregate_steps(tensor(1), "max"), "must be sum, mean or min"),
        (lambda: process_advantages([tensor(math.nan)]), "scores"),
        (lambda: step_score_loss(tensor(1), tensor(2), num_steps=1), "from 0 to 1"),
        (lambda: step_score_loss(tensor(1), tensor(1, 1), num_steps=1), "expected"),
        (lambda: step_score_loss(tensor(1), tensor(1), num_steps=0), "expected"),
        (lambda: step_score_loss(tensor(math.inf), tensor(1), num_steps=1), "scores"),
    ],
)
def test_refusals(call, problem):
    with pytest.raises(DataError, match=problem):
        call()
