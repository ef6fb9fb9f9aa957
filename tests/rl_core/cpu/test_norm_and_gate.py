"""Norms and gates with compiled passes against autograd in float64, and the selection of products."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rl_core.cpu import layer_kernels, linear_layers


@pytest.fixture
def numbers():
    return torch.Generator().manual_seed(0)


class Norm(nn.Module):
    variance_epsilon = 1e-3

    def __init__(self, width, numbers):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, generator=numbers) + 0.5)


def compute_gradients(function, *inputs):
    """Return outputs of a function, and the gradients of a fixed weighting of them."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weights).to(x.dtype)).sum() for x in outputs)
    return [x.detach() for x in outputs], torch.autograd.grad(loss, inputs)


def check_agreement(compiled, reference, *inputs):
    for results, expected in zip(
        compute_gradients(compiled, *inputs),
        compute_gradients(reference, *(x.double() for x in inputs)),
        strict=True,
    ):
        for actual, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(
                actual.double(), exact, rtol=2e-6, atol=2e-6 * float(exact.abs().max())
            )


@pytest.mark.parametrize("shape", [(1, 16), (130, 48), (64, 256), (7, 33), (5, 3, 32)])
def test_norm(way, numbers, shape):
    module, x = Norm(shape[-1], numbers), torch.randn(shape, generator=numbers)

    def compiled(x, weight):
        return layer_kernels._Norm.apply(x, weight, module.variance_epsilon)

    check_agreement(
        compiled,
        lambda x, weight: functional.rms_norm(x, weight.shape, weight, 1e-3),
        x,
        module.weight.detach(),
    )


@pytest.mark.parametrize("width", [16, 48, 33])
def test_sum_and_its_norm(way, numbers, width):
    x, added = torch.randn(2, 150, width, generator=numbers)
    weight = torch.rand(width, generator=numbers)

    def reference(x, added, weight):
        return x + added, functional.rms_norm(x + added, weight.shape, weight, 1e-3)

    check_agreement(
        lambda *parts: layer_kernels._AddNorm.apply(*parts, 1e-3), reference, x, added, weight
    )
    strided = x.t().contiguous().t()  # as a user's module may return it
    check_agreement(
        lambda *parts: layer_kernels._AddNorm.apply(*parts, 1e-3), reference, strided, added, weight
    )


@pytest.mark.parametrize("width", [16, 80, 33])
def test_gate(way, numbers, width):
    both = 6 * torch.randn(90, 2 * width, generator=numbers)
    both[0, 0], both[1, 0], both[2, 0] = 200.0, -200.0, 0.0

    def reference(both):
        gate, up = both.chunk(2, dim=1)
        return functional.silu(gate) * up

    check_agreement(layer_kernels.apply_gated_silu, reference, both)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layers_side_by_side(way, numbers, has_bias):
    torch.manual_seed(0)
    modules = [nn.Linear(40, size, bias=has_bias) for size in (32, 16, 5)]
    x = torch.randn(70, 40, generator=numbers)
    x.requires_grad_()
    result = linear_layers.apply_linears(x, modules)
    doubles = [nn.Linear(40, size, bias=has_bias).double() for size in (32, 16, 5)]
    for module_32, module_64 in zip(modules, doubles, strict=True):
        module_64.load_state_dict(module_32.state_dict())
    y = x.detach().double().requires_grad_()
    expected = torch.cat([module(y) for module in doubles], dim=1)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(result.shape, generator=numbers)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)
    for module_32, module_64 in zip(modules, doubles, strict=True):
        for name, parameter in module_32.named_parameters():
            torch.testing.assert_close(
                parameter.grad.double(), module_64.get_parameter(name).grad, rtol=1e-5, atol=1e-5
            )


def test_no_rows(way):
    """As in a micro-batch without a token that carries loss."""
    modules = [nn.Linear(16, 16), nn.Linear(16, 32)]
    x = torch.zeros(0, 16, requires_grad=True)
    layer_kernels.apply_gated_silu(linear_layers.apply_linears(x, modules)[:, :32]).sum().backward()
    assert all(
        torch.equal(p.grad, torch.zeros_like(p)) for module in modules for p in module.parameters()
    )
    assert x.grad.shape == x.shape
    weight = torch.ones(16, requires_grad=True)
    layer_kernels._AddNorm.apply(x, x, weight, 1e-6)[1].sum().backward()
    assert torch.equal(weight.grad, torch.zeros(16))


def test_a_transposed_weight(way, numbers):
    x, weight = torch.randn(20, 16, generator=numbers), torch.randn(16, 24, generator=numbers).t()
    torch.testing.assert_close(
        layer_kernels.compute_linear(x, [weight]), x @ weight.t(), rtol=1e-5, atol=1e-5
    )
    grad = torch.randn(20, 24, generator=numbers)
    torch.testing.assert_close(
        layer_kernels.compute_input_grad(grad, [weight]), grad @ weight, rtol=1e-5, atol=1e-5
    )


def test_what_is_frozen_gets_no_gradient(way, numbers):
    frozen, free = nn.Linear(16, 16), nn.Linear(16, 32)
    frozen.requires_grad_(False)
    x = torch.randn(20, 16, generator=numbers)
    linear_layers.apply_linears(x, [frozen, free]).sum().backward()
    assert frozen.weight.grad is None and frozen.bias.grad is None
    torch.testing.assert_close(free.weight.grad, x.sum(0).expand(32, 16), rtol=1e-5, atol=1e-5)
    assert not linear_layers.apply_linears(x, [frozen, frozen]).requires_grad


def test_a_layer_of_another_kind_is_called_itself(numbers):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    linear, other, x = nn.Linear(16, 16), Doubled(16, 16), torch.randn(3, 16, generator=numbers)
    assert torch.equal(
        linear_layers.apply_linears(x, [linear, other]), torch.cat([linear(x), other(x)], dim=1)
    )
    events = []
    linear.register_forward_hook(lambda *event: events.append("forward"))
    linear_layers.apply_linears(x, [linear])
    free = nn.Linear(16, 16)
    free.register_full_backward_hook(lambda *event: events.append("backward"))
    linear_layers.apply_linears(x.requires_grad_(), [free]).sum().backward()
    assert events == ["forward", "backward"]


def test_other_dtypes_are_left_to_torch(numbers):
    x, weight = (
        torch.randn(9, 16, generator=numbers).double(),
        torch.randn(4, 16, generator=numbers).double(),
    )
    assert torch.equal(layer_kernels.compute_linear(x, [weight]), x @ weight.t())
    assert layer_kernels.compute_linear(x.bfloat16(), [weight.bfloat16()]).dtype == torch.bfloat16


@pytest.mark.skipif(layer_kernels.load_norm_and_gate() is None, reason="needs a C compiler")
def test_the_number_of_threads_changes_no_bit(numbers, monkeypatch):
    x, grad, added_grad = torch.randn(3, 500, 64, generator=numbers)
    weight = torch.rand(64, generator=numbers)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        compiled = layer_kernels.load_norm_and_gate()
        summed, normed, scale = compiled.compute_norm(x, grad, weight, 1e-6)
        grads = compiled.compute_norm_grad(
            grad, added_grad, summed, scale, weight, with_weight=True
        )
        results.append(
            [
                summed,
                normed,
                *grads,
                compiled.compute_gated_silu(x),
                compiled.compute_gated_silu_grad(x, grad[:, :32].contiguous()),
            ]
        )
    for other in results[1:]:
        assert all(
            torch.equal(first, second) for first, second in zip(results[0], other, strict=True)
        )
