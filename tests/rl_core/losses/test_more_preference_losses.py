"""SimPO, ORPO and KTO with values worked by hand for both signs; the oracle's random cases are in tests/oracles."""

import math

import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.labelled import kto_loss, kto_reference_point
from rl_core.losses.reference_free import orpo_loss, simpo_loss


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def softplus(x):
    return math.log1p(math.exp(x))  # -log sigmoid(-x)


def test_simpo_by_hand_both_ways():
    loss, metrics = simpo_loss(
        t(-1.0), t(-1.5), num_pairs=1
    )  # rewards -2 and -3, margin 1, target 0.5
    assert loss.item() == pytest.approx(softplus(-0.5))
    assert (metrics["chosen_reward"].item(), metrics["rejected_reward"].item()) == (-2, -3)
    assert (metrics["accuracy"].item(), metrics["margin"].item()) == (1, 1)
    swapped, metrics = simpo_loss(t(-1.5), t(-1.0), num_pairs=1)
    assert swapped.item() == pytest.approx(softplus(1.5)) and metrics["accuracy"].item() == 0
    two, _ = simpo_loss(t(-1.0), t(-1.5), num_pairs=2, beta=1.0, gamma=0.0)
    assert two.item() == pytest.approx(softplus(-0.5) / 2)


def test_orpo_by_hand_both_ways():
    # p = 1/2 and 1/3: odds 1 and 1/2, ratio 2, sigmoid(log 2) = 2/3
    half, third = math.log(1 / 2), math.log(1 / 3)
    loss, metrics = orpo_loss(t(half), t(third), num_pairs=1)
    assert loss.item() == pytest.approx(math.log(2) + 0.1 * math.log(3 / 2))
    assert (
        metrics["log_odds"].item() == pytest.approx(math.log(2)) and metrics["accuracy"].item() == 1
    )
    assert metrics["chosen_nll"].item() == pytest.approx(math.log(2))
    swapped, metrics = orpo_loss(t(third), t(half), num_pairs=2, beta=1.0)
    assert (
        swapped.item() == pytest.approx((math.log(3) + math.log(3)) / 2)
        and metrics["accuracy"].item() == 0
    )


def test_orpo_of_certain_completions_is_finite():
    chosen = torch.tensor([0.0, -1e-9], requires_grad=True)
    loss, _ = orpo_loss(chosen, torch.tensor([-1.0, 0.0]), num_pairs=2)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(chosen.grad).all()
    # held at log odds of -1e-6: 13.8; against p = 1/e: log odds of -0.541
    first, _ = orpo_loss(torch.tensor([0.0]), torch.tensor([-1.0]), num_pairs=1, beta=1.0)
    assert first.item() == pytest.approx(
        softplus(-(-math.log(1e-6) + math.log(math.e - 1))), rel=1e-2
    )


def test_kto_by_hand():
    # h = 3 (desirable), -1 (undesirable); z = 1
    arguments = (t(-7.0, -12.0), t(-10.0, -11.0), torch.tensor([True, False]))
    loss, metrics = kto_loss(
        *arguments,
        reference_point=1.0,
        num_desirable=1,
        num_undesirable=1,
        beta=0.5,
        desirable_weight=1.0,
        undesirable_weight=2.0,
    )
    assert loss.item() == pytest.approx(
        (1 / (1 + math.e) + 2 / (1 + math.e)) / 2
    )  # both are 1 ahead
    assert (metrics["chosen_reward"].item(), metrics["rejected_reward"].item()) == (1.5, -0.5)
    assert (metrics["margin"].item(), metrics["accuracy"].item()) == (2.0, 1.0)
    assert metrics["reference_point"].item() == 1.0
    turned, metrics = kto_loss(
        arguments[0],
        arguments[1],
        ~arguments[2],
        reference_point=1.0,
        num_desirable=1,
        num_undesirable=1,
        beta=0.5,
    )
    assert (
        turned.item() == pytest.approx(1 / (1 + math.exp(-1))) and metrics["accuracy"].item() == 0
    )


def test_the_reference_point_is_a_mean_that_is_at_least_0():
    assert kto_reference_point(6.0, num_rows=4) == 1.5
    assert kto_reference_point(-6.0, num_rows=4) == 0.0


def test_labels_of_one_kind_alone():
    loss, metrics = kto_loss(
        t(-3.0),
        t(-3.0),
        torch.tensor([False]),
        reference_point=0.0,
        num_desirable=0,
        num_undesirable=1,
    )
    assert (
        loss.item() == 0.5
        and metrics["chosen_reward"].item() == 0
        and metrics["accuracy"].item() == 0.5
    )


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (
        -torch.rand(4, generator=generator, dtype=torch.float64) - 0.1 for _ in range(2)
    )
    chosen.requires_grad_()
    rejected.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: simpo_loss(a, b, num_pairs=4)[0], (chosen, rejected)
    )
    assert torch.autograd.gradcheck(
        lambda a, b: orpo_loss(a, b, num_pairs=4)[0], (chosen, rejected)
    )
    labels = torch.tensor([True, False, False, True])
    counts = {"num_desirable": 2, "num_undesirable": 2, "reference_point": 0.2}
    assert torch.autograd.gradcheck(
        lambda a: kto_loss(a, rejected.detach(), labels, **counts)[0], (chosen,)
    )


def test_bad_input_is_refused():
    for options in ({"beta": 0.0}, {"gamma": -1.0}, {"gamma": math.inf}):
        with pytest.raises(DataError, match="beta, gamma"):
            simpo_loss(t(-1.0), t(-1.0), num_pairs=1, **options)
    with pytest.raises(DataError, match="num_pairs"):
        simpo_loss(t(-1.0), t(-1.0), num_pairs=0)
    with pytest.raises(DataError, match=r"rejected_logprobs: 0\.5; a log-probability is at most 0"):
        orpo_loss(t(-1.0), t(0.5), num_pairs=1)
    with pytest.raises(DataError, match="beta"):
        orpo_loss(t(-1.0), t(-1.0), num_pairs=1, beta=-1.0)
    with pytest.raises(DataError, match="shape"):
        simpo_loss(t(-1.0), t(-1.0, -2.0), num_pairs=1)
    one = {"reference_point": 0.0, "num_desirable": 1, "num_undesirable": 0}
    with pytest.raises(DataError, match=r"desirable: torch\.int64"):
        kto_loss(t(-1.0), t(-1.0), torch.tensor([1]), **one)
    with pytest.raises(DataError, match="at least 0"):
        kto_loss(t(-1.0), t(-1.0), torch.tensor([True]), **one, desirable_weight=-1.0)
    with pytest.raises(DataError, match="num_desirable"):
        kto_loss(t(-1.0), t(-1.0), torch.tensor([True]), **{**one, "num_desirable": 0})
