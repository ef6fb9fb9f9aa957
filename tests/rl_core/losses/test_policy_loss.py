import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, NonFiniteTensor
from rl_core.losses.aggregation import token_weights
from rl_core.losses.policy import (
    cispo_loss,
    clipped_policy_loss,
    dppo_loss,
    gspo_loss,
    reinforce_loss,
    sapo_loss,
)

E = math.e
ONE = torch.ones(1, 1).bool()


def compute_single_token_loss(log_ratio, advantage, **options):
    """Return loss, gradient with respect to the log-prob, and metrics of one token whose old log-prob is -2."""
    logprobs = torch.tensor([[log_ratio - 2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -2.0, dtype=torch.float64)
    advantages = torch.full((1, 1), advantage, dtype=torch.float64)
    loss, metrics = clipped_policy_loss(
        logprobs, old, advantages, ONE, num_loss_tokens=1, **options
    )
    loss.backward()
    return (
        loss.item(),
        logprobs.grad.item(),
        {name: value.item() for name, value in metrics.items()},
    )


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "options", "loss", "gradient", "low", "high"),
    [
        (1.0, 1.0, {}, -1.2, 0.0, 0, 1),  # ratio e, clipped from above
        (1.0, -1.0, {}, E, E, 0, 0),  # not clipped: the policy has to come back
        (-1.0, 1.0, {}, -1 / E, -1 / E, 0, 0),
        (-1.0, -1.0, {}, 0.8, 0.0, 1, 0),  # ratio 1/e, clipped from below
        (0.0, 2.0, {}, -2.0, -2.0, 0, 0),
        (0.0, -2.0, {}, 2.0, 2.0, 0, 0),
        (1.0, 1.0, {"clip_eps_high": 0.28}, -1.28, 0.0, 0, 1),
        (-1.0, -1.0, {"clip_eps_high": 0.28}, 0.8, 0.0, 1, 0),
        (0.25, 1.0, {"clip_eps_high": 0.5}, -math.exp(0.25), -math.exp(0.25), 0, 0),
        (1.0, -1.0, {"dual_clip": 2.0}, 2.0, 0.0, 0, 0),
        (1.0, -1.0, {"dual_clip": 3.0}, E, E, 0, 0),
        (1.0, 1.0, {"dual_clip": 2.0}, -1.2, 0.0, 0, 1),
        (-1.0, -1.0, {"dual_clip": 2.0}, 0.8, 0.0, 1, 0),
        (30.0, -1.0, {}, math.exp(20), 0.0, 0, 0),  # the log-ratio is clamped
    ],
)
def test_one_token_by_hand(log_ratio, advantage, options, loss, gradient, low, high):
    value, slope, metrics = compute_single_token_loss(log_ratio, advantage, **options)
    assert value == pytest.approx(loss, rel=1e-9)
    assert slope == pytest.approx(gradient, rel=1e-9)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (low, high)
    capped = "dual_clip" in options and loss == options["dual_clip"]
    assert metrics["clip_fraction"] == low + high + capped
    assert metrics.get("clip_fraction_dual", 0) == capped
    assert ("clip_fraction_dual" in metrics) == ("dual_clip" in options)


@pytest.mark.parametrize(
    "options", [{}, {"dual_clip": 1.5}, {"dual_clip": 1.1, "clip_eps_high": 0.6}]
)
def test_a_token_is_clipped_if_it_has_no_gradient(options):
    """Check 500 tokens of both signs; the ratio's clamp at e^20 is out of reach."""
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (
        torch.randn(1, 500, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    logprobs.requires_grad_()
    mask = torch.rand(1, 500, generator=generator) < 0.8
    loss, metrics = clipped_policy_loss(
        logprobs, old, advantages, mask, num_loss_tokens=int(mask.sum()), **options
    )
    loss.backward()
    without = (logprobs.grad[mask] == 0).double().mean()
    assert metrics["clip_fraction"].item() == pytest.approx(without.item())
    parts = [value.item() for name, value in metrics.items() if name.startswith("clip_fraction_")]
    assert sum(parts) == pytest.approx(without.item()) and min(parts) > 0.05


def test_metrics_by_hand():
    # ratios 2 and 1/4 on two of four tokens of the step
    logprobs = torch.tensor([[math.log(0.4), math.log(0.05), math.nan]])
    old = torch.tensor([[math.log(0.2), math.log(0.2), 0.0]])
    mask = torch.tensor([[True, True, False]])
    _, metrics = clipped_policy_loss(logprobs, old, torch.ones(1, 3), mask, num_loss_tokens=4)
    values = {name: value.item() for name, value in metrics.items()}
    assert values["ratio_mean"] == pytest.approx(2.25 / 4)
    assert values["ratio_max"] == pytest.approx(2.0)
    assert values["update_kl_k1"] == pytest.approx((-math.log(2) + math.log(4)) / 4)  # -log r
    assert values["update_kl"] == pytest.approx(
        (2 - 1 - math.log(2) + 0.25 - 1 + math.log(4)) / 4
    )  # r - 1 - log r
    assert values["clip_fraction"] == 0.25
    assert values["loss"] == pytest.approx(-(1.2 + 0.25) / 4)


def compute_reference_loss(logprobs, old, advantages, mask, eps, high, denominator):
    total = 0.0
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t]:
                ratio = math.exp(logprobs[b][t] - old[b][t])
                clipped = min(max(ratio, 1 - eps), 1 + high)
                total -= min(ratio * advantages[b][t], clipped * advantages[b][t])
    return total / denominator


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 9999))
def test_equals_a_reference_loop_however_it_is_cut(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, width, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs, old, advantages = draw() / 3, draw() / 3, draw()
    mask = torch.rand(rows, width, generator=generator) < 0.6
    options = dict(num_loss_tokens=11, clip_eps=0.2, clip_eps_high=0.28)
    full, metrics = clipped_policy_loss(logprobs, old, advantages, mask, **options)
    expected = compute_reference_loss(
        logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), 0.2, 0.28, 11
    )
    assert full.item() == pytest.approx(expected, abs=1e-12)
    parts = [
        clipped_policy_loss(
            logprobs[i : i + 1], old[i : i + 1], advantages[i : i + 1], mask[i : i + 1], **options
        )
        for i in range(rows)
    ]
    for name in ("loss", "update_kl", "update_kl_k1", "ratio_mean", "clip_fraction"):
        assert sum(part[name].item() for _, part in parts) == pytest.approx(
            metrics[name].item(), abs=1e-6
        )
    padded = [torch.nn.functional.pad(x, (2, 3)) for x in (logprobs, old, advantages, mask)]
    assert clipped_policy_loss(*padded, **options)[0].item() == pytest.approx(
        full.item(), abs=1e-12
    )


def test_at_ratio_1_the_gradient_is_the_policy_gradient():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.7
    clipped, metrics = clipped_policy_loss(
        logprobs, logprobs.detach(), advantages, mask, num_loss_tokens=5
    )
    baseline, _ = reinforce_loss(logprobs, advantages, mask, num_loss_tokens=5)
    assert torch.equal(
        torch.autograd.grad(clipped, logprobs)[0], torch.autograd.grad(baseline, logprobs)[0]
    )
    assert metrics["update_kl"].item() == 0 and metrics["ratio_max"].item() == 1


def test_gradchecks():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    logprobs, old, advantages = (draw(3, 4) / 4).requires_grad_(), draw(3, 4) / 4, draw(3, 4)
    mask = torch.rand(3, 4, generator=generator) < 0.8
    mask[0] = False
    weights = token_weights(mask, aggregation="sequence_mean", denominator=2, dtype=torch.float64)
    for options in ({}, {"dual_clip": 1.1}, {"clip_eps_high": 0.3, "loss_weights_BT": weights}):
        assert torch.autograd.gradcheck(
            lambda x, o=options: clipped_policy_loss(
                x, old, advantages, mask, num_loss_tokens=6, **o
            )[0],
            (logprobs,),
        )
    assert torch.autograd.gradcheck(
        lambda x: gspo_loss(
            x, old, advantages[:, 0], mask, num_sequences=2, clip_eps=0.05, clip_eps_high=0.1
        )[0],
        (logprobs,),
    )
    for function in (
        lambda x: reinforce_loss(x, advantages, mask, num_loss_tokens=6)[0],
        lambda x: sapo_loss(x, old, advantages, mask, num_loss_tokens=6)[0],
    ):
        assert torch.autograd.gradcheck(function, (logprobs,))


def test_token_weights_by_hand():
    # rows of 2 and 1 loss tokens, one without any
    mask = torch.tensor([[True, False, True], [True, False, False], [False, False, False]])
    weights = {
        "token_mean": token_weights(mask, aggregation="token_mean", denominator=3),
        "sequence_mean": token_weights(mask, aggregation="sequence_mean", denominator=2),
        "constant": token_weights(
            mask, aggregation="constant", denominator=12
        ),  # 3 rollouts of at most 4 tokens
    }
    third = pytest.approx(1 / 3)
    assert weights["token_mean"].tolist() == [[third, 0, third], [third, 0, 0], [0, 0, 0]]
    assert weights["sequence_mean"].tolist() == [[0.25, 0, 0.25], [0.5, 0, 0], [0, 0, 0]]
    twelfth = pytest.approx(1 / 12)
    assert weights["constant"].tolist() == [[twelfth, 0, twelfth], [twelfth, 0, 0], [0, 0, 0]]
    with pytest.raises(DataError, match="token_mean, sequence_mean or constant"):
        token_weights(mask, aggregation="sum", denominator=3)
    with pytest.raises(DataError, match="expected torch"):
        token_weights(mask[0], aggregation="token_mean", denominator=3)
    with pytest.raises(DataError, match="denominator"):
        token_weights(mask, aggregation="token_mean", denominator=0)


def test_loss_weights_leave_metrics_alone():
    args = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
    weights = torch.full((1, 2), 1 / 8)
    loss, metrics = clipped_policy_loss(*args, num_loss_tokens=2, loss_weights_BT=weights)
    assert loss.item() == -0.25 and metrics["ratio_mean"].item() == 1.0
    with pytest.raises(DataError, match="loss_weights"):
        clipped_policy_loss(*args, num_loss_tokens=2, loss_weights_BT=weights[0])


def test_sapo_by_hand():
    # -(4 / tau) sigmoid(tau (r - 1)) A; its gradient in the log-prob is -r A 4 p (1 - p)
    for log_ratio, advantage, tau in (
        (0.0, 2.0, 1.0),
        (1.0, 1.0, 1.0),
        (1.0, -1.0, 1.05),
        (-1.0, -1.0, 1.05),
    ):
        logprobs = torch.tensor([[log_ratio]], requires_grad=True)
        loss, metrics = sapo_loss(
            logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), ONE, num_loss_tokens=1
        )
        ratio = math.exp(log_ratio)
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert loss.item() == pytest.approx(-4 / tau * p * advantage)
        assert metrics["gate_mean"].item() == pytest.approx(4 * p * (1 - p))
        loss.backward()
        assert logprobs.grad.item() == pytest.approx(-ratio * advantage * 4 * p * (1 - p))
    with pytest.raises(DataError, match="tau_positive"):
        sapo_loss(
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            torch.zeros(1, 1),
            ONE,
            num_loss_tokens=1,
            tau_positive=0,
        )


def test_gspo_by_hand():
    # log-ratios .1 and .3 (and a masked one): s = e^0.2, clipped at 1.0004 when that helps
    mask = torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    old = torch.zeros(3, 3, dtype=torch.float64)
    logprobs = torch.tensor([[0.1, 0.3, 9.0]] * 3, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 7.0], dtype=torch.float64)
    loss, metrics = gspo_loss(logprobs, old, advantages, mask, num_sequences=2)
    s = math.exp(0.2)
    assert loss.item() == pytest.approx((-1.0004 + s) / 2)
    assert metrics["clip_fraction_high"].item() == 0.5 and metrics["clip_fraction_low"].item() == 0
    assert metrics["ratio_mean"].item() == pytest.approx(s) and metrics[
        "ratio_max"
    ].item() == pytest.approx(s)
    loss.backward()
    # row 1: d/dx of s / 2 = s / 2 / 2 per token
    assert logprobs.grad.tolist() == [
        [0, 0, 0],
        [pytest.approx(s / 4), pytest.approx(s / 4), 0],
        [0, 0, 0],
    ]


def test_cispo_keeps_every_gradient_and_cuts_the_weight():
    for log_ratio, weight in ((1.0, 1.2), (-1.0, 1 / E)):
        for advantage in (1.0, -1.0):
            logprobs = torch.tensor([[log_ratio - 2.0]], dtype=torch.float64, requires_grad=True)
            old, advantages = (
                torch.full((1, 1), -2.0).double(),
                torch.full((1, 1), advantage).double(),
            )
            loss, metrics = cispo_loss(logprobs, old, advantages, ONE, num_loss_tokens=1)
            loss.backward()
            assert loss.item() == pytest.approx(-weight * advantage * (log_ratio - 2))
            assert logprobs.grad.item() == pytest.approx(-weight * advantage)
            assert metrics["clip_fraction"].item() == (1 if log_ratio > 0 else 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("old", "new"), [(0.01, 0.1), (0.5, 0.7), (0.5, 0.3), (0.1, 0.01), (0.4, 0.5)]
)
def test_dppo_masks_by_the_difference_of_probabilities(old, new, advantage):
    """Check both signs: 0.01 to 0.1 is ten times as much and stays; 0.5 to 0.7 goes too far, if A leads there."""
    logprobs = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    loss, metrics = dppo_loss(
        logprobs,
        torch.tensor([[math.log(old)]]).double(),
        torch.tensor([[advantage]]).double(),
        ONE,
        num_loss_tokens=1,
        threshold=0.15,
    )
    loss.backward()
    is_masked = abs(new - old) > 0.15 and (new > old) == (advantage > 0)
    gradient = 0.0 if is_masked else -min(new / old, 20.0) * advantage
    assert logprobs.grad.item() == pytest.approx(gradient)
    assert loss.item() == pytest.approx(gradient * math.log(new))
    assert metrics["clip_fraction"].item() == is_masked
    assert metrics["clip_fraction_low"].item() == (is_masked and advantage < 0)
    assert metrics["divergence_mean"].item() == pytest.approx(abs(new - old))


def test_dppo_caps_its_weight_and_reads_a_given_divergence():
    logprobs = torch.full((1, 1), -1.0, dtype=torch.float64, requires_grad=True)
    old, minus = torch.full((1, 1), -9.0).double(), torch.full((1, 1), -1.0).double()
    loss, _ = dppo_loss(logprobs, old, minus, ONE, num_loss_tokens=1)  # A < 0: never masked here
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(20.0)
    masked, metrics = dppo_loss(
        logprobs, old, -minus, ONE, num_loss_tokens=1, divergence_BT=torch.ones(1, 1).double()
    )
    assert masked.item() == 0 and metrics["divergence_mean"].item() == 1
    with pytest.raises(DataError, match="threshold 0"):
        dppo_loss(logprobs, old, minus, ONE, num_loss_tokens=1, threshold=0)
    with pytest.raises(DataError, match="divergence"):
        dppo_loss(logprobs, old, minus, ONE, num_loss_tokens=1, divergence_BT=torch.ones(2))


def test_reinforce_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = reinforce_loss(
        logprobs, torch.tensor([[2.0, -3.0]]), torch.ones(1, 2).bool(), num_loss_tokens=2
    )
    assert loss.item() == pytest.approx(-(2 * -1 + -3 * -2) / 2)
    loss.backward()
    assert logprobs.grad.tolist() == [[-1.0, 1.5]]


def test_bad_input_is_named():
    zeros, mask = torch.zeros(2, 2), torch.ones(2, 2).bool()
    with pytest.raises(DataError, match=r"advantages: shape \(2,\)"):
        clipped_policy_loss(zeros, zeros, torch.zeros(2), mask, num_loss_tokens=1)
    with pytest.raises(NonFiniteTensor, match="old_logprobs: -inf"):
        clipped_policy_loss(zeros, zeros - math.inf, zeros, mask, num_loss_tokens=1)
    with pytest.raises(NonFiniteTensor, match="logprobs: nan"):
        clipped_policy_loss(zeros * math.nan, zeros, zeros, mask, num_loss_tokens=1)
    with pytest.raises(DataError, match="num_loss_tokens: 0"):
        clipped_policy_loss(zeros, zeros, zeros, mask & False, num_loss_tokens=0)
    for bad in ({"clip_eps": 0.0}, {"clip_eps": 1.0}, {"clip_eps_high": 0.0}, {"dual_clip": 1.0}):
        with pytest.raises(DataError, match="clip"):
            clipped_policy_loss(zeros, zeros, zeros, mask, num_loss_tokens=1, **bad)
    with pytest.raises(DataError, match="advantages"):
        gspo_loss(zeros, zeros, zeros, mask, num_sequences=2)
    with pytest.raises(DataError, match="num_sequences"):
        gspo_loss(zeros, zeros, zeros[0], mask, num_sequences=0)
