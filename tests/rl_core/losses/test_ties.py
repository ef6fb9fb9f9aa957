"""Losses on pairs and ties, worked by hand."""

import math

import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    tied_bradley_terry_loss,
    tied_dpo_loss,
    tied_ipo_loss,
    tied_nll,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


YES, NO = torch.tensor([True]), torch.tensor([False])


def test_rao_kupper_by_hand():
    # t = 1/2: n = 3. d = log 3: win 1/(1+3/3) = 1/2, loss 1/(1+9) = 1/10, tie (9 - 1) 1/2 1/10 = 2/5
    actual = [
        tied_nll(t(math.log(3)), NO, model="rao_kupper").item(),
        tied_nll(t(-math.log(3)), NO, model="rao_kupper").item(),
        tied_nll(t(math.log(3)), YES, model="rao_kupper").item(),
        tied_nll(t(-math.log(3)), YES, model="rao_kupper").item(),
    ]
    assert [math.exp(-value) for value in actual] == pytest.approx([0.5, 0.1, 0.4, 0.4])


def test_davidson_by_hand():
    # t = 1/2: n = 1. d = log 4: z = 1 + 1/4 + 2 * 1/2 = 9/4; win 4/9, loss 1/9, tie 4/9
    four = math.log(4)
    actual = [
        tied_nll(t(d), tie, model="davidson").item()
        for d, tie in ((four, NO), (-four, NO), (four, YES))
    ]
    assert [math.exp(-value) for value in actual] == pytest.approx([4 / 9, 1 / 9, 4 / 9])


@pytest.mark.parametrize("model", ["rao_kupper", "davidson"])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_probabilities_sum_to_one_and_equal_answers_tie_as_asked(model, probability):
    for d in (-40.0, -2.0, 0.0, 0.7, 40.0):
        parts = [
            math.exp(-tied_nll(t(sign * d), tie, model=model, tie_probability=probability).item())
            for sign, tie in ((1, NO), (-1, NO), (1, YES))
        ]
        assert sum(parts) == pytest.approx(1)
    equal = tied_nll(t(0.0), YES, model=model, tie_probability=probability).item()
    assert math.exp(-equal) == pytest.approx(probability)


def test_a_rare_tie_is_bradley_terry():
    """With t -> 0 both models are Bradley-Terry."""
    baseline = bradley_terry_loss(t(1.3), t(0.2), num_pairs=1, center_coef=0)[0].item()
    for model in ("rao_kupper", "davidson"):
        assert tied_nll(t(1.1), NO, model=model, tie_probability=1e-9).item() == pytest.approx(
            baseline, rel=1e-6
        )


@pytest.mark.parametrize("model", ["rao_kupper", "davidson"])
def test_a_tie_pulls_the_scores_together_and_an_order_apart(model):
    for tie, sign in ((YES, 1), (NO, -1)):
        difference = t(1.5).requires_grad_()
        tied_nll(difference, tie, model=model).sum().backward()
        assert math.copysign(1, difference.grad.item()) == sign
    equal = t(0.0).requires_grad_()
    tied_nll(equal, YES, model=model).sum().backward()
    assert equal.grad.item() == pytest.approx(0)


def test_reward_model_loss_counts_order_and_ties_apart():
    ties = torch.tensor([False, True, False])
    loss, metrics = tied_bradley_terry_loss(
        t(1.0, 2.0, 0.0),
        t(0.0, 0.5, 1.0),
        ties,
        num_pairs=3,
        num_ordered=2,
        model="davidson",
        margin_B=t(0.5, 9.0, 0.0),
        center_coef=0.1,
    )
    nll = [math.log(1 + math.exp(-d) + 2 * math.exp(-d / 2)) for d in (0.5, 1.5, -1.0)]
    ranking = (
        nll[0] + nll[1] - math.log(2) + 0.75 + nll[2]
    )  # of the tie: log z - log(2 n) + d / 2, without the margin
    centre = 0.1 * (1 + 2.5**2 + 1)
    assert loss.item() == pytest.approx((ranking + centre) / 3)
    assert metrics["accuracy"].item() == 0.5 and metrics["margin"].item() == 0
    assert metrics["tie_gap"].item() == 1.5 and metrics["reward_mean"].item() == pytest.approx(
        4.5 / 6
    )
    full = tied_bradley_terry_loss(
        t(1.0), t(0.0), YES, num_pairs=1, num_ordered=0, model="rao_kupper"
    )[1]
    assert "accuracy" not in full and full["tie_gap"].item() == 1


def test_dpo_and_ipo_with_ties_go_over_into_those_without():
    rewards = t(0.4, -0.1), t(0.1, 0.3)
    none = torch.tensor([False, False])
    counts = {"num_pairs": 2, "num_ordered": 2}
    tied = tied_dpo_loss(*rewards, none, **counts, model="rao_kupper", tie_probability=1e-9)
    baseline = dpo_loss(
        rewards[0] / 0.1, rewards[1] / 0.1, t(0.0, 0.0), t(0.0, 0.0), num_pairs=2, beta=0.1
    )
    assert tied[0].item() == pytest.approx(baseline[0].item(), rel=1e-6)
    for name in baseline[1]:
        assert tied[1][name].item() == pytest.approx(baseline[1][name].item())
    tied = tied_ipo_loss(*rewards, none, **counts, beta=0.1)
    baseline = ipo_loss(
        rewards[0] / 0.1, rewards[1] / 0.1, t(0.0, 0.0), t(0.0, 0.0), num_pairs=2, beta=0.1
    )
    assert tied[0].item() == pytest.approx(baseline[0].item())
    # h = 3 for the tie: 3^2; h = -4 against 5: 81
    half = tied_ipo_loss(
        *rewards, torch.tensor([True, False]), num_pairs=2, num_ordered=1, beta=0.1
    )[0]
    assert half.item() == pytest.approx((9 + 81) / 2)


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="ties"):
        tied_nll(t(1.0), t(1.0), model="davidson")
    for probability in (0.0, 1.0):
        with pytest.raises(DataError, match="tie_probability"):
            tied_nll(t(1.0), YES, model="davidson", tie_probability=probability)
