import math

import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.preference import (
    bradley_terry_loss,
    calibration_error,
    chosen_nll,
    dpo_loss,
    ipo_loss,
)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def softplus(x):
    return math.log1p(math.exp(x))  # -log sigmoid(-x)


def test_bradley_terry_by_hand_both_ways():
    loss, metrics = bradley_terry_loss(t(1.0), t(0.0), num_pairs=1)
    assert loss.item() == pytest.approx(softplus(-1) + 0.01)  # 0.313262 + 0.01 (1 + 0)^2
    assert metrics["accuracy"].item() == 1 and metrics["margin"].item() == 1
    loss, metrics = bradley_terry_loss(t(0.0), t(1.0), num_pairs=1)
    assert loss.item() == pytest.approx(softplus(1) + 0.01)
    assert metrics["accuracy"].item() == 0 and metrics["margin"].item() == -1


def test_margin_centring_ties_and_the_global_denominator():
    loss, metrics = bradley_terry_loss(
        t(1.0, 2.0), t(0.0, 2.0), num_pairs=4, margin_B=t(0.5, 0.0), center_coef=0.1
    )
    expected = softplus(-0.5) + softplus(0) + 0.1 * (1 + 16)
    assert loss.item() == pytest.approx(expected / 4)
    assert metrics["accuracy"].item() == pytest.approx(1.5 / 4)  # one right, one tie
    assert metrics["reward_mean"].item() == pytest.approx(5 / 8)
    assert metrics["ranking_loss"].item() == pytest.approx((softplus(-0.5) + softplus(0)) / 4)
    assert bradley_terry_loss(t(-900.0), t(900.0), num_pairs=1, center_coef=0)[
        0
    ].item() == pytest.approx(1800)


def test_dpo_by_hand():
    # policy log-ratio 2, reference log-ratio 0: h = 2, beta h = 0.2
    args = (t(-10.0), t(-12.0), t(-11.0), t(-11.0))
    loss, metrics = dpo_loss(*args, num_pairs=1)
    assert loss.item() == pytest.approx(softplus(-0.2))  # 0.598139
    assert metrics["chosen_reward"].item() == pytest.approx(0.1)
    assert metrics["rejected_reward"].item() == pytest.approx(-0.1)
    assert (metrics["accuracy"].item(), metrics["margin"].item()) == (1, pytest.approx(0.2))
    swapped, metrics = dpo_loss(args[1], args[0], args[3], args[2], num_pairs=1)
    assert swapped.item() == pytest.approx(softplus(0.2)) and metrics["accuracy"].item() == 0
    smooth, _ = dpo_loss(*args, num_pairs=1, label_smoothing=0.1)
    assert smooth.item() == pytest.approx(0.9 * softplus(-0.2) + 0.1 * softplus(0.2))
    assert dpo_loss(t(-3.0), t(-4.0), t(-3.0), t(-4.0), num_pairs=1)[0].item() == pytest.approx(
        math.log(2)
    )


def test_ipo_by_hand():
    args = (t(-10.0), t(-12.0), t(-11.0), t(-11.0))
    assert ipo_loss(*args, num_pairs=1)[0].item() == pytest.approx(9.0)  # (2 - 5)^2
    assert ipo_loss(args[1], args[0], args[2], args[3], num_pairs=1)[0].item() == pytest.approx(
        49.0
    )
    loss, metrics = ipo_loss(*args, num_pairs=2, beta=0.25)
    assert loss.item() == pytest.approx(0.0)  # 1 / (2 beta) = 2 = h
    assert metrics["margin"].item() == pytest.approx(0.25)


@pytest.mark.parametrize(
    "loss_fn", [dpo_loss, ipo_loss, lambda *a, **k: dpo_loss(*a, **k, label_smoothing=0.2)]
)
def test_gradcheck(loss_fn):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(4)]
    chosen, rejected = values[0].requires_grad_(), values[1].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: loss_fn(a, b, *values[2:], num_pairs=4)[0], (chosen, rejected)
    )
    assert torch.autograd.gradcheck(
        lambda a, b: bradley_terry_loss(a, b, num_pairs=4)[0], (chosen, rejected)
    )


def test_chosen_nll_by_hand():
    loss, metrics = chosen_nll(t(-6.0, -2.0), t(3, 4), num_pairs=4)  # 2 and 0.5 nats per token
    assert loss.item() == metrics["chosen_nll"].item() == pytest.approx(2.5 / 4)
    with pytest.raises(DataError, match="needs at least one token"):
        chosen_nll(t(-6.0), t(0), num_pairs=1)


def test_calibration_by_hand():
    ln3 = math.log(3)  # sure at 0.75
    assert calibration_error(t(ln3, ln3, ln3, -ln3)) == pytest.approx(0.0)  # right in 3 of 4
    assert calibration_error(t(ln3, ln3)) == pytest.approx(0.25)
    assert calibration_error(t(-ln3)) == pytest.approx(0.75)
    assert calibration_error(t(0.0, 0.0)) == 0.0  # no predicted order, half right
    # bins are judged one by one: (2 * |0.75 - 1| + |sigmoid(5) - 0|) / 3, though errors of other sign could cancel
    sure = 1 / (1 + math.exp(-5))
    assert calibration_error(t(ln3, ln3, -5.0)) == pytest.approx((0.5 + sure) / 3)


def test_bad_input_is_named():
    with pytest.raises(DataError, match=r"rejected: shape \(2,\)"):
        bradley_terry_loss(t(1.0), t(1.0, 2.0), num_pairs=1)
    with pytest.raises(DataError, match="chosen: nan"):
        bradley_terry_loss(t(math.nan), t(1.0), num_pairs=1)
    with pytest.raises(DataError, match="num_pairs: 0"):
        bradley_terry_loss(t(1.0), t(1.0), num_pairs=0)
    with pytest.raises(DataError, match="label_smoothing"):
        dpo_loss(t(1.0), t(1.0), t(1.0), t(1.0), num_pairs=1, label_smoothing=0.5)
    with pytest.raises(DataError, match="beta"):
        ipo_loss(t(1.0), t(1.0), t(1.0), t(1.0), num_pairs=1, beta=0)
    with pytest.raises(DataError, match="ref_rejected_logprobs"):
        dpo_loss(t(1.0), t(1.0), t(1.0), t(math.inf), num_pairs=1)
    with pytest.raises(DataError):
        calibration_error(t())
