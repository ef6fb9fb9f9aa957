"""KL from recorded tokens: numpy in float64, bounds, identities and gradients."""

import numpy as np
import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.kl import exact_forward_kl, truncated_forward_kl


def draw_distributions(count, size, seed):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(size, 0.3), size=count), rng.dirichlet(
        np.full(size, 0.3), size=count
    )


def record_top_tokens(p, q, count):
    """Return the arguments of the function for the `count` most likely tokens of p."""
    order = np.argsort(-p, axis=1)[:, :count]
    top, new = np.take_along_axis(p, order, 1), np.take_along_axis(q, order, 1)
    return torch.tensor(np.log(top)), torch.tensor(1 - top.sum(1)), torch.tensor(np.log(new))


def test_by_hand():
    # p = (1/2, 1/4 | 1/4), q = (1/4, 1/4 | 1/2): 1/2 log 2 + 0 + 1/4 log 1/2
    old, new = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    actual = truncated_forward_kl(old, torch.tensor([0.25]), new)
    assert actual.tolist() == pytest.approx([0.25 * np.log(2)])


@pytest.mark.parametrize("count", [1, 4, 19])
def test_against_numpy_and_below_the_exact_value(count):
    p, q = draw_distributions(50, 20, 1)
    top, rest, new = record_top_tokens(p, q, count)
    actual = truncated_forward_kl(top, rest, new).numpy()
    left, taken = 1 - np.exp(top.numpy()).sum(1), 1 - np.exp(new.numpy()).sum(1)
    expected = (np.exp(top.numpy()) * (top.numpy() - new.numpy())).sum(1) + left * np.log(
        left / taken
    )
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
    exact = exact_forward_kl(torch.tensor(np.log(p)), torch.tensor(np.log(q))).numpy()
    assert (actual <= exact + 1e-12).all() and (actual >= -1e-12).all()
    if count == 19:  # one token is left: nothing is lost
        assert actual == pytest.approx(exact, rel=1e-9)
    else:
        assert actual.mean() < 0.99 * exact.mean()


def test_all_tokens_are_the_exact_value_and_a_rest_below_zero_is_rounding():
    p, q = draw_distributions(10, 6, 2)
    top, rest, new = record_top_tokens(p, q, 6)
    exact = exact_forward_kl(torch.tensor(np.log(p)), torch.tensor(np.log(q)))
    for arguments in (torch.zeros_like(rest), rest - 1e-9):
        assert truncated_forward_kl(top, arguments, new).tolist() == pytest.approx(
            exact.tolist(), rel=1e-6
        )


def test_the_gradient_is_finite_where_nothing_is_left_and_right_elsewhere():
    p, q = draw_distributions(3, 5, 3)
    top, rest, _ = record_top_tokens(p, q, 2)
    order = torch.tensor(np.argsort(-p, axis=1)[:, :2].copy())
    logits = torch.tensor(np.log(q), requires_grad=True)

    def value(logits):
        return truncated_forward_kl(top, rest, torch.log_softmax(logits, -1).gather(1, order)).sum()

    assert torch.autograd.gradcheck(value, (logits,))
    sure = torch.tensor([[0.0]], requires_grad=True)  # the new policy has all its mass on one token
    truncated_forward_kl(torch.tensor([[np.log(0.5)]]), torch.tensor([0.5]), sure).sum().backward()
    assert torch.isfinite(sure.grad).all()


def test_bad_input_is_refused():
    two, one = torch.log(torch.tensor([[0.5, 0.2]])), torch.tensor([0.3])
    with pytest.raises(DataError, match="shapes"):
        truncated_forward_kl(two, one, two[:, :1])
    with pytest.raises(DataError, match="old_rest"):
        truncated_forward_kl(two, one * float("nan"), two)
