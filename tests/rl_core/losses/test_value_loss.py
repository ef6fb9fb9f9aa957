import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.importance import effective_sample_size, truncated_importance_weights
from rl_core.losses.value import explained_variance, value_loss

ONE = torch.ones(1, 1).bool()


def t(*values):
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient", "clipped"),
    [
        (1.5, None, 1.0, None, 0.125, 0.5, 0),
        (0.5, None, 1.0, None, 0.125, -0.5, 0),
        (
            1.5,
            1.0,
            1.0,
            0.2,
            0.125,
            0.5,
            0,
        ),  # the clipped value, 1.2, is nearer: the larger error counts
        (1.0, 2.0, 1.0, 0.2, 0.32, 0.0, 1),  # moved too far: 1.8 is what counts, without gradient
        (2.0, 1.0, 2.0, 0.2, 0.32, 0.0, 1),
        (1.1, 1.0, 2.0, 0.2, 0.405, -0.9, 0),  # within the clip
    ],
)
def test_value_loss_by_hand(value, old, target, clip, loss, gradient, clipped):
    values = t(value).requires_grad_()
    result, metrics = value_loss(
        values,
        t(target),
        ONE,
        num_loss_tokens=1,
        old_values_BT=None if old is None else t(old),
        value_clip_eps=clip,
    )
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert metrics["clip_fraction"].item() == clipped


def test_value_loss_gradcheck_masks_and_errors():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    target, old = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.6
    assert torch.autograd.gradcheck(
        lambda x: value_loss(
            x, target, mask, num_loss_tokens=5, old_values_BT=old, value_clip_eps=0.3
        )[0],
        (values,),
    )
    baseline = sum(
        0.5 * (values[i, j] - target[i, j]).item() ** 2
        for i in range(3)
        for j in range(4)
        if mask[i, j]
    )
    assert value_loss(values, target, mask, num_loss_tokens=5)[0].item() == pytest.approx(
        baseline / 5
    )
    with pytest.raises(DataError, match="value_clip_eps"):
        value_loss(values, target, mask, num_loss_tokens=5, value_clip_eps=0.2)
    with pytest.raises(DataError, match="returns: shape"):
        value_loss(values, target[0], mask, num_loss_tokens=5)


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, True, False]])
    target = t(1.0, 2.0, 3.0, 99.0)
    assert explained_variance(target, target, mask) == 1.0
    assert explained_variance(t(2, 2, 2, 0).double(), target, mask) == pytest.approx(0.0)
    assert explained_variance(t(1.0, 2.0, 4.0, 0.0), target, mask) == pytest.approx(
        2 / 3
    )  # Var R-V 2/9, Var R 2/3
    assert explained_variance(t(3.0, 2.0, 1.0, 0.0), target, mask) == pytest.approx(-3.0)
    with pytest.raises(DataError, match="loss_mask: 0"):
        explained_variance(target, target, mask & False)


def test_importance_weights_by_hand():
    mask = torch.tensor([[True, True, False]])
    new, old = t(4.0, 0.5, 9.0).log(), t(1.0, 1.0, 1.0).log()
    assert truncated_importance_weights(new, old, mask).tolist() == [pytest.approx([2.0, 0.5, 0.0])]
    assert truncated_importance_weights(new, old, mask, cap=8).tolist() == [
        pytest.approx([4.0, 0.5, 0.0])
    ]
    sequence = truncated_importance_weights(
        new, old, mask, level="sequence", cap=1.5
    )  # 4 * 0.5 = 2, cut to 1.5
    assert sequence.tolist() == [pytest.approx([1.5, 1.5, 0.0])]
    inverse = truncated_importance_weights(old, new, mask, level="sequence", cap=1.5)
    assert inverse.tolist() == [pytest.approx([0.5, 0.5, 0.0])]
    assert not truncated_importance_weights(new.requires_grad_(), old, mask).requires_grad
    with pytest.raises(DataError, match="must be token, sequence or geometric"):
        truncated_importance_weights(new, old, mask, level="row")


def test_effective_sample_size_by_hand():
    mask = torch.ones(1, 3).bool()
    assert effective_sample_size(t(1.0, 1.0, 2.0), mask) == pytest.approx(16 / 6)
    assert effective_sample_size(t(0.3, 0.3, 0.3), mask) == pytest.approx(3)
    assert effective_sample_size(t(5.0, 0.0, 0.0), mask) == pytest.approx(1)
    assert effective_sample_size(t(0.0, 0.0, 0.0), mask) == 0
    assert effective_sample_size(
        t(1.0, 1.0, 9.0), torch.tensor([[True, True, False]])
    ) == pytest.approx(2)
    with pytest.raises(DataError, match="mask: 0"):
        effective_sample_size(t(1.0), ~ONE)
