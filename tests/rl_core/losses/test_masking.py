import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, NonFiniteTensor
from rl_core.losses.masking import (
    build_full_mask,
    check_count,
    check_finite,
    check_inputs,
    fill_masked,
    masked_max,
    masked_sum,
    masked_whiten,
)

MASK = torch.tensor([[True, True, False], [True, False, False]])
VALUES = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, 9.0]])


def test_sum_and_max_ignore_what_is_outside_the_mask():
    assert masked_sum(VALUES, MASK).item() == 6.0
    assert masked_max(VALUES, MASK).item() == 3.0
    assert masked_max(-VALUES, MASK).item() == -1.0


def test_nan_outside_the_mask_does_not_reach_the_gradient():
    values = VALUES.clone().requires_grad_()
    fill_masked(values, MASK).square().sum().backward()
    assert values.grad.tolist() == [[2.0, 4.0, 0.0], [6.0, 0.0, 0.0]]


def test_whitening_by_hand():
    # 1 2 3: mean 2, unbiased variance 1
    assert masked_whiten(VALUES, MASK).tolist() == [
        [pytest.approx(-1), 0, 0],
        [pytest.approx(1), 0, 0],
    ]
    selected = masked_whiten(VALUES * 2, MASK, shift_mean=False)  # mean 4, std 2: 4 -1, 4, 4 + 1
    assert selected.tolist() == [[pytest.approx(3), pytest.approx(4), 0], [pytest.approx(5), 0, 0]]


def test_whitening_of_one_value_and_of_equal_values_is_zero():
    assert masked_whiten(torch.tensor([[5.0, 1.0]]), torch.tensor([[True, False]])).tolist() == [
        [0, 0]
    ]
    assert masked_whiten(torch.full((1, 3), 5.0), torch.ones(1, 3).bool()).tolist() == [[0, 0, 0]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=2, max_size=6),
    st.integers(0, 99),
)
def test_whitened_values_have_mean_0_and_variance_1(mask_rows, seed):
    mask = torch.tensor(mask_rows)
    if mask.sum() < 3:
        return
    values = 7 + 3 * torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    white = masked_whiten(values, mask)[mask]
    assert white.mean().item() == pytest.approx(0, abs=1e-9)
    assert white.var().item() == pytest.approx(1, rel=1e-5)


def test_bad_input_is_named():
    with pytest.raises(DataError, match=r"advantages: shape \(2, 2\), loss_mask has \(2, 3\)"):
        check_inputs(MASK, logprobs=torch.zeros(2, 3), advantages=torch.zeros(2, 2))
    with pytest.raises(NonFiniteTensor, match=r"advantages: nan at \(0, 1\); 1 of 6"):
        check_inputs(
            MASK,
            logprobs=torch.zeros(2, 3),
            advantages=torch.tensor([[0, math.nan, math.nan], [0, 0, 0]]),
        )
    with pytest.raises(DataError, match="loss_mask: dtype"):
        check_inputs(MASK.float(), logprobs=torch.zeros(2, 3))
    with pytest.raises(DataError, match="logprobs: dtype"):
        check_inputs(MASK, logprobs=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"num_loss_tokens: 0.*mask empty"):
        check_count("num_loss_tokens", int(torch.zeros_like(MASK).sum()))
    check_inputs(MASK, values=VALUES)  # what is outside may be anything


def test_a_full_mask_is_the_mask_of_ones_in_every_function():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4, 3, generator=generator, requires_grad=True)
    full, ones = build_full_mask(4, 3), torch.ones(4, 3, dtype=torch.bool)
    assert full.is_full and torch.equal(full, ones)
    assert not getattr(full[:2], "is_full", False) and not getattr(full.clone(), "is_full", False)
    for function in (fill_masked, masked_sum, masked_max, masked_whiten):
        assert torch.equal(function(values, full), function(values, ones)), function.__name__
        gradients = [
            torch.autograd.grad(function(values, mask).square().sum(), values)[0]
            for mask in (full, ones)
        ]
        assert torch.equal(*gradients), function.__name__


def test_large_finite_numbers_are_finite_and_infinities_that_cancel_are_not():
    check_finite(a=torch.full((4,), 3e38), b=torch.tensor([-3e38]))  # their sum overflows
    check_finite(a=torch.tensor([1e300, 1e300], dtype=torch.float64))
    check_finite()
    with pytest.raises(NonFiniteTensor, match=r"b: inf at \(1,\); 2 of 3 are not finite"):
        check_finite(a=torch.ones(2), b=torch.tensor([0.0, float("inf"), float("-inf")]))


def test_squares_beyond_float32_are_whitened_too():
    """Check +-1e30: squares of 1e60 overflow float32, where the whitened values were 0."""
    values = torch.tensor([[1e30, -1e30, 0.0, 5.0]])
    mask = torch.tensor([[True, True, True, False]])
    # mean 0, unbiased variance 1e60
    assert masked_whiten(values, mask).tolist() == [[1.0, -1.0, 0.0, 0.0]]
    assert masked_whiten(values, mask).dtype == torch.float32
    large = torch.tensor([[3e38, 3e38, 0.0]])  # their sum overflows as well: mean 2e38, std 1.73e38
    torch.testing.assert_close(
        masked_whiten(large, torch.ones(1, 3).bool()),
        torch.tensor([[3**-0.5, 3**-0.5, -2 * 3**-0.5]]),
    )
    with pytest.raises(DataError, match="too large to whiten"):
        masked_whiten(torch.tensor([[1e200, 0.0]], dtype=torch.float64), torch.ones(1, 2).bool())
