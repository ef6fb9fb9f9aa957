import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_core.losses.kl import (
    adaptive_kl_coef,
    banded_kl_coef,
    exact_forward_kl,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_penalty,
)

LN2 = math.log(2)
ZERO = torch.tensor(0.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "above", "below"),
    [
        (kl_k1, LN2, -LN2),
        (kl_k2, 0.24022650695, 0.24022650695),  # ln(2)^2 / 2
        (kl_k3, 0.5 - 1 + LN2, 2 - 1 - LN2),  # 0.19315, 0.30685
    ],
)
def test_estimators_by_hand_on_both_sides(estimator, above, below):
    d = torch.tensor(LN2, dtype=torch.float64)
    assert estimator(d, ZERO).item() == pytest.approx(above)
    assert estimator(ZERO, d).item() == pytest.approx(below)
    assert estimator(d, d).item() == 0


def test_k3_is_clamped_and_never_negative():
    assert kl_k3(ZERO - 30, ZERO).item() == pytest.approx(math.exp(10) - 11)
    d = torch.linspace(-12, 12, 1001, dtype=torch.float32)
    assert (kl_k3(d, torch.zeros_like(d)) >= 0).all()
    small = torch.tensor(
        [-1e-4, -1e-5, 1e-5, 1e-4]
    )  # exp(-d) - 1 + d in float32 would be rounding alone
    assert torch.allclose(kl_k3(small, torch.zeros(4)), small**2 / 2, rtol=1e-2, atol=2e-12)


def test_estimators_average_to_the_exact_divergence():
    # policy (.75, .25), reference (.5, .5): every outcome weighed by its probability instead of sampled
    p, q = (
        torch.tensor([0.75, 0.25], dtype=torch.float64),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
    )
    exact = exact_forward_kl(p.log()[None], q.log()[None]).item()
    assert exact == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))  # 0.13081
    for estimator in (kl_k1, kl_k3):
        assert (p * estimator(p.log(), q.log())).sum().item() == pytest.approx(exact)
    assert exact_forward_kl(q.log()[None], p.log()[None]).item() == pytest.approx(
        0.143841, rel=1e-5
    )


def test_exact_kl_with_ruled_out_tokens():
    old = torch.tensor([[0.0, 0.0, -math.inf]])
    assert exact_forward_kl(old, torch.tensor([[0.0, 0.0, -math.inf]])).item() == 0
    assert exact_forward_kl(old, torch.zeros(1, 3)).item() == pytest.approx(math.log(1.5), rel=1e-6)
    assert exact_forward_kl(torch.zeros(1, 3), old).item() == math.inf
    # exp(-200) is 0 in float32 and exp(-800) in float64, and yet the token is allowed
    for logit, dtype in ((-200.0, torch.float32), (-800.0, torch.float64)):
        unlikely = torch.tensor([[0.0, 0.0, logit]], dtype=dtype)
        rows = torch.cat([unlikely, unlikely])
        new = torch.tensor(
            [[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True
        )
        kl = exact_forward_kl(rows, new)
        assert kl[0].item() == math.inf
        assert kl[1].item() == pytest.approx(math.log(1.5), rel=1e-6)
        (gradient,) = torch.autograd.grad(kl[1], new)
        assert gradient.isfinite().all()
        assert exact_forward_kl(unlikely, unlikely).item() == 0
    with pytest.raises(DataError, match="new_logits: nan"):
        exact_forward_kl(torch.zeros(1, 3), torch.full((1, 3), math.nan))
    with pytest.raises(DataError, match="new_logits: shape"):
        exact_forward_kl(torch.zeros(1, 3), torch.zeros(1, 2))


def test_exact_kl_gradcheck():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    new = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: exact_forward_kl(old, x), (new,))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(0, 999), st.sampled_from(["k1", "k2", "k3"])
)
def test_penalty_equals_a_reference_loop(rows, width, seed, estimator):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    ref = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    expected = 0.0
    for b in range(rows):
        for t in range(width):
            if mask[b, t]:
                d = logprobs[b, t].item() - ref[b, t].item()
                expected += {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
    loss, metrics = kl_penalty(logprobs, ref, mask, num_loss_tokens=17, estimator=estimator)
    assert loss.item() == pytest.approx(expected / 17, abs=1e-12)
    assert metrics["ref_kl"].item() == loss.item()


def test_penalty_gradcheck_and_errors():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, False, True]])
    ref = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    logprobs = torch.randn(1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, ref, mask, num_loss_tokens=2)[0], (logprobs,)
    )
    with pytest.raises(DataError, match="estimator: 'k4'"):
        kl_penalty(ref, ref, mask, num_loss_tokens=2, estimator="k4")
    with pytest.raises(DataError, match="num_loss_tokens: 0"):
        kl_penalty(ref, ref, mask, num_loss_tokens=0)


def test_controllers_by_hand():
    step = dict(target=1.0, horizon=1000, num_samples=100)
    assert adaptive_kl_coef(0.1, 2.0, **step) == pytest.approx(0.102)  # error clipped to +0.2
    assert adaptive_kl_coef(0.1, 0.0, **step) == pytest.approx(0.098)
    assert adaptive_kl_coef(0.1, 0.9, **step) == pytest.approx(0.099)
    assert adaptive_kl_coef(0.1, 1.0, **step) == pytest.approx(0.1)
    # more samples than the horizon: the full correction and no more, so that a coefficient never turns negative
    for num_samples in (1000, 5000, 5001, 10**6):
        many = dict(target=1.0, horizon=1000, num_samples=num_samples)
        assert adaptive_kl_coef(0.1, 0.0, **many) == pytest.approx(0.08)
        assert adaptive_kl_coef(0.1, 2.0, **many) == pytest.approx(0.12)
        assert adaptive_kl_coef(0.1, 0.9, **many) == pytest.approx(0.09)
    band = dict(target=0.1, tolerance=0.02, increase_factor=2.0, decrease_factor=4.0)
    assert banded_kl_coef(0.2, 0.121, **band) == pytest.approx(0.4)
    assert banded_kl_coef(0.2, 0.079, **band) == pytest.approx(0.05)
    assert banded_kl_coef(0.2, 0.11, **band) == 0.2
    assert banded_kl_coef(0.9, 1.0, **band) == 1.0
    assert banded_kl_coef(2e-4, 0.0, **band) == 1e-4
    with pytest.raises(DataError):
        adaptive_kl_coef(0.1, 1.0, target=0, horizon=1, num_samples=1)
    with pytest.raises(DataError):
        banded_kl_coef(0.1, 1.0, target=1, tolerance=-1)
