"""Norm and clipping of gradients: the bits of torch's functions, which handle unsupported cases."""

import pytest
import torch

from rl_core.training import optimizers
from rl_core.training.optimizers import clip_gradients, compute_total_norm


def build_parameters(*dtypes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    results = []
    for index, dtype in enumerate(dtypes):
        parameter = torch.nn.Parameter(torch.zeros(3 + index, 70, dtype=dtype))
        parameter.grad = torch.randn(3 + index, 70, generator=generator).to(dtype)
        results.append(parameter)
    return results


@pytest.mark.parametrize(
    "dtypes", [[torch.float32] * 5, [torch.float32], [torch.float32, torch.bfloat16]]
)
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_norm_and_clipping_have_the_bits_of_torch(dtypes, max_norm):
    ours, theirs = build_parameters(*dtypes), build_parameters(*dtypes)
    theirs.append(torch.nn.Parameter(torch.zeros(2)))  # without a gradient
    ours.append(torch.nn.Parameter(torch.zeros(2)))
    norm = compute_total_norm([p.grad for p in ours if p.grad is not None])
    assert torch.equal(
        norm, torch.nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
    )
    clip_gradients(ours, max_norm, norm)
    torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, norm)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True) if a.grad is not None
    )
    assert (max_norm < norm) == (not torch.equal(ours[0].grad, build_parameters(*dtypes)[0].grad))


def test_no_gradient_at_all():
    assert compute_total_norm([]) == 0
    clip_gradients([torch.nn.Parameter(torch.zeros(2))], 1.0, torch.tensor(0.0))


def test_like_gradients_take_the_short_way(monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", None)
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", None)
    clip_gradients(
        build_parameters(torch.float32),
        1.0,
        compute_total_norm([build_parameters(torch.float32)[0].grad]),
    )
    assert not optimizers._has_single_device_and_dtype(
        [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    )
