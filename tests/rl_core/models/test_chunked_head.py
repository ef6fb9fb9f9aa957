"""Output head and log-softmax in chunks: gradients, hand-computed values, excluded tokens, adapters, memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from rl_core.cpu.low_rank import AdapterSpan
from rl_core.losses.kl import kl_penalty
from rl_core.models.chunked_head import compute_selected_logprobs, expand_temperatures


@pytest.mark.parametrize("temperatures", [None, (0.5, 2.0, 1.0, 0.7, 3.0)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [2, 100])
def test_gradcheck(with_entropy: bool, chunk: int, temperatures: tuple[float, ...] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    temperatures_N = torch.tensor(temperatures) if temperatures is not None else None

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        got = compute_selected_logprobs(
            *tensors,
            targets,
            temperatures_N=temperatures_N,
            with_entropy=with_entropy,
            chunk_tokens=chunk,
        )
        return tuple(value for value in got if value is not None)

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@pytest.mark.parametrize("chunk", [2, 100])
def test_each_output_alone_has_its_gradient(chunk: int) -> None:
    """The gradient is linear in both: an output that is only read adds nothing, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    weight, targets = (
        torch.randn(7, 3, generator=generator, dtype=torch.float64),
        torch.tensor([0, 6, 3, 3, 1]),
    )
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)

    def gradient(*names: str, with_entropy: bool = True) -> torch.Tensor:
        hidden = start.clone().requires_grad_()
        got = compute_selected_logprobs(
            hidden, weight, None, targets, with_entropy=with_entropy, chunk_tokens=chunk
        )
        values = {"logprobs": got[0], "entropy": got[1]}
        torch.stack([(values[name] ** 2).sum() for name in names]).sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    assert torch.equal(gradient("logprobs"), gradient("logprobs", with_entropy=False))
    both = gradient("logprobs", "entropy")
    torch.testing.assert_close(gradient("logprobs") + gradient("entropy"), both)
    assert gradient("entropy").abs().max() > 0.01


def test_values_by_hand() -> None:
    """Logits (0, ln 3) give p = (1/4, 3/4); entropy 1/4 ln 4 + 3/4 ln 4/3 = 0.5623."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = compute_selected_logprobs(
        hidden, weight, None, torch.tensor([0, 1]), with_entropy=True
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.75)])
    assert entropy is not None and entropy.tolist() == pytest.approx([0.562335, 0.562335])


@pytest.mark.parametrize(
    ("temperature", "p", "entropy", "kl_gradients"),
    [  # logits (0, ln 4): 4^(1/T) to 1. The reference has them reversed: q = (p_1, p_0).
        # k3 = q/p - ln(q/p) - 1 has the gradient (1 - q/p) d ln p, d ln p(token)/dz_1 = (onehot_1 - p_1) / T
        (
            0.5,
            (1 / 17, 16 / 17),
            math.log(17) - 16 / 17 * math.log(16),
            ((1 - 16) * 2 * -16 / 17, 15 / 16 * 2 * 1 / 17),
        ),
        (1.0, (1 / 5, 4 / 5), math.log(5) - 4 / 5 * math.log(4), ((1 - 4) * -4 / 5, 3 / 4 * 1 / 5)),
        (
            2.0,
            (1 / 3, 2 / 3),
            math.log(3) - 2 / 3 * math.log(2),
            ((1 - 2) / 2 * -2 / 3, 1 / 2 / 2 * 1 / 3),
        ),
    ],
)
def test_temperatures_by_hand(
    temperature: float, p: tuple[float, float], entropy: float, kl_gradients: tuple[float, float]
) -> None:
    """Both tokens' log-probabilities, the entropy, and a KL penalty's gradient on the second logit."""
    hidden, targets, temperatures_N = (
        torch.ones(2, 1),
        torch.tensor([0, 1]),
        torch.full((2,), temperature),
    )
    second_gradients = []
    for target in (0, 1):
        logits = torch.tensor([[0.0], [math.log(4)]], requires_grad=True)
        logprobs, entropies = compute_selected_logprobs(
            hidden, logits, None, targets, temperatures_N=temperatures_N, with_entropy=True
        )
        assert logprobs.tolist() == pytest.approx([math.log(value) for value in p], rel=1e-5)
        assert entropies is not None and entropies.tolist() == pytest.approx(
            [entropy] * 2, rel=1e-5
        )
        reference, _ = compute_selected_logprobs(
            hidden, logits.detach().flip(0), None, targets, temperatures_N=temperatures_N
        )
        assert reference.tolist() == pytest.approx(
            [math.log(value) for value in reversed(p)], rel=1e-5
        )
        mask = targets[None] == target
        loss, _ = kl_penalty(
            logprobs[None], reference[None], mask, num_loss_tokens=1, estimator="k3"
        )
        loss.backward()
        assert logits.grad is not None
        second_gradients.append(logits.grad[1].item())
        assert logits.grad.sum().item() == pytest.approx(0, abs=1e-5)
    assert second_gradients == pytest.approx(kl_gradients, rel=1e-4)


def test_certain_and_impossible_tokens_stay_finite() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [500.0]])
    logprobs, entropy = compute_selected_logprobs(
        hidden, weight, None, torch.tensor([0]), with_entropy=True
    )
    assert logprobs.item() == -500 and entropy is not None and entropy.item() == 0
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.item() == -500  # d(z_0 - lse)/dh = 0 - 500


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_peak_memory_of_a_large_vocabulary(
    temperature: float,
) -> None:
    """Peak memory of a fresh process, forward and backward: the table of logits alone would take 2.46 GB."""
    program = f"""
import resource, torch
temperature = {temperature}
from rl_core.models.chunked_head import compute_selected_logprobs
torch.manual_seed(0)
hidden, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(150_000, 16, requires_grad=True)
targets = torch.randint(0, 150_000, (4096,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
temperatures = torch.full((4096,), temperature) if temperature != 1 else None
logprobs, entropy = compute_selected_logprobs(
    hidden, weight, None, targets, temperatures_N=temperatures, with_entropy=True
)
(logprobs.sum() + entropy.sum()).backward()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = torch.log_softmax(hidden[:2] @ weight.T / temperature, -1)
assert torch.allclose(logprobs[:2], rows.gather(1, targets[:2, None])[:, 0], atol=1e-4)
assert bool(hidden.grad.abs().sum() > 0) and bool(weight.grad.abs().sum() > 0)
print((after - before) * 1024 / 1e9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.6


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("chunk", [2, 100])
def test_excluded_tokens_do_not_affect_entropy_and_gradients(
    chunk: int, temperature: float | None
) -> None:
    """A bias of minus infinity excludes tokens: everything equals a head without them."""
    generator = torch.Generator().manual_seed(0)
    allowed, targets_N = [0, 2, 3, 6], torch.tensor([2, 0, 3, 1, 1])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden_NH, weight_VH, bias_V = random(5, 4), random(7, 4), random(7)
    bias_V[[1, 4, 5]] = -math.inf
    up_N, entropy_up_N = random(5), random(5)

    def gradients_of(indices: list[int], targets: torch.Tensor) -> list[torch.Tensor]:
        inputs = [
            tensor.clone().requires_grad_()
            for tensor in (hidden_NH, weight_VH[indices], bias_V[indices])
        ]
        temperatures = (
            torch.full((5,), temperature, dtype=torch.float64) if temperature is not None else None
        )
        logprobs, entropy = compute_selected_logprobs(
            *inputs, targets, temperatures_N=temperatures, with_entropy=True, chunk_tokens=chunk
        )
        assert entropy is not None
        (logprobs @ up_N + entropy @ entropy_up_N).backward()
        return [logprobs, entropy, *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    expected = gradients_of(allowed, targets_N)
    masked = gradients_of(list(range(7)), torch.tensor(allowed)[targets_N])
    for value, reference in zip(masked[:3], expected[:3], strict=True):
        torch.testing.assert_close(value, reference)
    for value, reference in zip(masked[3:], expected[3:], strict=True):
        torch.testing.assert_close(value[allowed], reference)
        assert not value[[1, 4, 5]].any()


def test_a_forbidden_token_keeps_the_log_probability_minus_infinity() -> None:
    bias_V = torch.tensor([0.0, -math.inf, 0.0])
    logprobs, entropy = compute_selected_logprobs(
        torch.ones(2, 1), torch.zeros(3, 1), bias_V, torch.tensor([0, 1]), with_entropy=True
    )
    assert logprobs.tolist() == [pytest.approx(-math.log(2)), -math.inf]
    assert entropy is not None and entropy.tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("chunk", [2, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_adapters_of_the_head_over_spans_of_positions(chunk: int, temperature: float) -> None:
    """Two adapters and positions without one, in float64, against autograd of the merged weights."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden_NH, weight_VH, bias_V, up_N, entropy_up_N = (
        random(7, 4),
        random(6, 4),
        random(6),
        random(7),
        random(7),
    )
    factors = [random(2, 4), random(6, 2), random(3, 4), random(6, 3)]
    targets_N, ranges = torch.tensor([2, 0, 3, 1, 5, 4, 1]), [(0, 3), (4, 7)]

    def leaves() -> list[torch.Tensor]:
        return [
            source.clone().requires_grad_() for source in (hidden_NH, weight_VH, bias_V, *factors)
        ]

    inputs = leaves()
    spans = [
        AdapterSpan(start, stop, [(0, 6)], 0.5, [inputs[3 + 2 * index]], [inputs[4 + 2 * index]])
        for index, (start, stop) in enumerate(ranges)
    ]
    logprobs, entropy = compute_selected_logprobs(
        *inputs[:3],
        targets_N,
        temperatures_N=expand_temperatures([temperature], [7], hidden_NH.device),
        adapters=spans,
        with_entropy=True,
        chunk_tokens=chunk,
    )
    assert entropy is not None
    (logprobs @ up_N + entropy @ entropy_up_N).backward()

    expected = leaves()
    logits = expected[0] @ expected[1].T + expected[2]
    for index, (start, stop) in enumerate(ranges):
        added = (
            0.5 * expected[0][start:stop] @ expected[3 + 2 * index].T @ expected[4 + 2 * index].T
        )
        logits = torch.cat([logits[:start], logits[start:stop] + added, logits[stop:]])
    p = torch.log_softmax(logits / torch.tensor(temperature, dtype=torch.float32).double(), -1)
    expected_logprobs, expected_entropy = (
        p.gather(1, targets_N[:, None])[:, 0],
        -(p.exp() * p).sum(-1),
    )
    (expected_logprobs @ up_N + expected_entropy @ entropy_up_N).backward()
    torch.testing.assert_close(logprobs, expected_logprobs)
    torch.testing.assert_close(entropy, expected_entropy)
    for tensor, reference in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, reference.grad)


def test_a_temperature_is_not_rounded_to_the_models_dtype() -> None:
    """0.7 in bfloat16 would be 0.6992: log-probabilities would belong to another distribution than the sampler's."""
    assert expand_temperatures([1.0, 1.0], [2, 3], torch.device("cpu")) is None
    expanded = expand_temperatures([0.7, 1.0], [2, 1], torch.device("cpu"))
    assert expanded is not None and expanded.dtype == torch.float32
    assert expanded.tolist() == [torch.tensor(0.7).item()] * 2 + [1.0]
