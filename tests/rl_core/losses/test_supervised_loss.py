import math

import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.supervised import entropy_bonus, entropy_coef_at, supervised_loss, token_entropy

MASK = torch.tensor([[False, True, True], [False, True, False]])


def compute_entropy(logits):
    return token_entropy(torch.log_softmax(logits, dim=-1))


def test_supervised_loss_by_hand():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -3.0, math.nan]], requires_grad=True)
    loss, metrics = supervised_loss(logprobs, MASK, num_loss_tokens=3)
    assert loss.item() == pytest.approx(2.0)  # (1 + 2 + 3) / 3: the prompt's -9 counts nowhere
    assert metrics["nll"].item() == pytest.approx(2.0) and not metrics["nll"].requires_grad
    loss.backward()
    assert logprobs.grad.tolist() == [
        [0, pytest.approx(-1 / 3), pytest.approx(-1 / 3)],
        [0, pytest.approx(-1 / 3), 0],
    ]


def test_micro_batches_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(8, 5, generator=generator)
    mask = torch.rand(8, 5, generator=generator) < 0.5
    count = int(mask.sum())
    full, _ = supervised_loss(logprobs, mask, num_loss_tokens=count)
    rows = [
        supervised_loss(logprobs[i : i + 1], mask[i : i + 1], num_loss_tokens=count)[0]
        for i in range(8)
    ]
    assert sum(rows).item() == pytest.approx(full.item(), abs=1e-6)


def test_errors_name_the_tensor():
    with pytest.raises(DataError, match="logprobs: -inf"):
        supervised_loss(torch.full((2, 3), -math.inf), MASK, num_loss_tokens=3)
    with pytest.raises(DataError, match="num_loss_tokens: 0"):
        supervised_loss(torch.zeros(2, 3), MASK, num_loss_tokens=0)
    with pytest.raises(DataError, match="entropy: shape"):
        entropy_bonus(torch.zeros(2, 2), MASK, num_loss_tokens=3)


def test_entropy_bonus_lowers_the_loss_where_entropy_is_high():
    entropy = torch.tensor([[5.0, 1.0, 0.5], [5.0, 1.5, 5.0]], requires_grad=True)
    loss, metrics = entropy_bonus(entropy, MASK, num_loss_tokens=3)
    assert loss.item() == pytest.approx(-1.0)
    assert metrics["entropy"].item() == pytest.approx(1.0)


def test_entropy_by_hand():
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -1e9, -1e9], [50.0, 0.0, 0.0, 0.0]]
    )
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert compute_entropy(logits).tolist() == pytest.approx([math.log(4), quarter, 0.0], abs=1e-6)


def test_entropy_gradient():
    logits = torch.randn(
        5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(compute_entropy, (logits,))


def test_impossible_tokens_have_no_part_in_the_entropy():
    """Check 0 log 0 = 0: the entropy and its gradient are those of the possible tokens."""
    possible = torch.randn(
        3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
    )
    entropy = compute_entropy(possible)
    entropy.sum().backward()
    full = torch.full((3, 6), -math.inf, dtype=torch.float64)
    full[:, [0, 2, 3, 5]] = possible.detach()
    full.requires_grad_()
    actual = compute_entropy(full)
    actual.sum().backward()
    torch.testing.assert_close(actual, entropy)
    torch.testing.assert_close(full.grad[:, [0, 2, 3, 5]], possible.grad)
    assert full.grad[:, [1, 4]].tolist() == [[0, 0]] * 3
    assert (
        compute_entropy(torch.tensor([[math.nan, 0.0]])).isnan().all()
    )  # what is no logit stays visible


def test_entropy_coefficient_decays_to_its_floor():
    assert entropy_coef_at(0, start=0.01) == 0.01
    assert entropy_coef_at(2, start=0.01, decay=0.5) == pytest.approx(0.0025)
    assert entropy_coef_at(10_000, start=0.01, floor=0.001) == 0.001
    with pytest.raises(DataError):
        entropy_coef_at(1, start=0.01, decay=1.5)
