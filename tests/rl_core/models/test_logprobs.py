"""Selective log-probabilities against the naive computation, values and gradients."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rl_core.cpu.low_rank import AdapterSpan
from rl_core.errors import DataError
from rl_core.losses.kl import kl_penalty
from rl_core.models import chunked_head
from rl_core.models.chunked_head import compute_selected_logprobs, expand_temperatures
from rl_core.models.logprobs import completion_logprobs, iter_next_token_logprobs
from rl_core.models.lora import add_adapter
from rl_core.settings import LoraSettings
from rl_core.types import TrainBatch

VOCAB = 50


def make_model(dtype: torch.dtype = torch.float64, **options: object) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            **{
                "vocab_size": VOCAB,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 24,
                "max_position_embeddings": 64,
                "initializer_range": 0.3,
                "pad_token_id": 0,
                **options,
            }
        )
        return LlamaForCausalLM(config).to(dtype)


def make_batch() -> TrainBatch:
    """Rows of 9, 6 and 4 tokens, loss on scattered ones, padding with a token that also occurs as a real one."""
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(0, VOCAB, (3, 9), generator=generator)
    loss_BS = torch.zeros(3, 9, dtype=torch.bool)
    for row, length in enumerate((9, 6, 4)):
        ids_BS[row, length:] = 0
        loss_BS[row, 2:length:2] = True
        loss_BS[row, length - 1] = True
    attention_BS = torch.arange(9)[None] < torch.tensor([[9], [6], [4]])
    return TrainBatch(ids_BS, attention_BS, loss_BS)


def naive(model: torch.nn.Module, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, unpadded, over all logits."""
    logprobs = torch.zeros(batch.input_ids_BS.shape, dtype=next(model.parameters()).dtype)
    entropy = torch.zeros_like(logprobs)
    for row, (ids, real, loss) in enumerate(
        zip(batch.input_ids_BS, batch.attention_mask_BS, batch.loss_mask_BS, strict=True)
    ):
        ids = ids[real]
        logits = model(ids[None]).logits[0].to(logprobs.dtype)
        for s in range(1, len(ids)):
            if loss[s]:
                temperature = (
                    batch.temperatures_BS[row, s] if batch.temperatures_BS is not None else 1.0
                )
                log_p = torch.log_softmax(logits[s - 1] / temperature, -1)
                logprobs[row, s] = log_p[ids[s]]
                entropy[row, s] = -(log_p.exp() * log_p).sum()
    return logprobs, entropy


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(
    model: torch.nn.Module,
    batch: TrainBatch,
    with_entropy: bool,
    chunk: int | None,
    tolerance: float,
) -> None:
    weights_BS = torch.linspace(-1, 1, batch.input_ids_BS.numel()).view(batch.input_ids_BS.shape)
    got, got_entropy = completion_logprobs(
        model, batch, with_entropy=with_entropy, chunk_tokens=chunk
    )
    want, want_entropy = naive(model, batch)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    got_loss, want_loss = (got * weights_BS).sum(), (want * weights_BS).sum()
    if with_entropy:
        assert got_entropy is not None
        torch.testing.assert_close(got_entropy, want_entropy, atol=tolerance, rtol=tolerance)
        got_loss, want_loss = (
            got_loss + (got_entropy * weights_BS**2).sum(),
            want_loss + (want_entropy * weights_BS**2).sum(),
        )
    else:
        assert got_entropy is None
    got_gradients, want_gradients = gradients(model, got_loss), gradients(model, want_loss)
    assert got_gradients.keys() == want_gradients.keys()
    for name, value in want_gradients.items():
        torch.testing.assert_close(
            got_gradients[name], value, atol=tolerance, rtol=tolerance, msg=name
        )


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_values_and_gradients_equal_the_naive_ones(
    tied: bool, with_entropy: bool, chunk: int | None
) -> None:
    check(make_model(tie_word_embeddings=tied), make_batch(), with_entropy, chunk, 1e-9)


def at_temperatures() -> TrainBatch:
    """Rows at 1/2, 2 and 1, and a single token of the first at 4: packed rows and thoughts differ within a row."""
    batch = make_batch()
    batch.temperatures_BS = torch.tensor([[0.5], [2.0], [1.0]]).repeat(1, 9)
    batch.temperatures_BS[0, 4] = 4.0
    return batch


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_at_temperatures(with_entropy: bool, chunk: int | None) -> None:
    check(make_model(tie_word_embeddings=True), at_temperatures(), with_entropy, chunk, 1e-9)


def test_in_float32_and_for_another_family() -> None:
    check(make_model(torch.float32), make_batch(), True, 3, 1e-4)
    check(make_model(torch.float32), at_temperatures(), True, 3, 1e-4)
    torch.manual_seed(0)
    gpt2 = (
        GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        )
        .double()
        .eval()
    )
    check(gpt2, make_batch(), True, 3, 1e-9)
    check(gpt2, at_temperatures(), True, 3, 1e-9)


def test_a_model_that_caps_its_logits_is_noticed() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=64,
        final_logit_softcapping=2.0,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config).double()
    check(model, make_batch(), True, 3, 1e-6)
    check(model, at_temperatures(), True, 3, 1e-6)


def test_adapters_get_the_gradient() -> None:
    model = add_adapter(
        make_model(torch.float32), LoraSettings(rank=2, target_modules=("q_proj", "lm_head"))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    check(model, make_batch(), True, 2, 1e-3)


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
    """The gradient is linear in both: what is only looked at adds nothing, to the bit."""
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
    [  # logits (0, ln 4): 4^(1/T) to 1. The reference has them the other way round: q = (p_1, p_0).
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
    """Both tokens' log-probabilities, the entropy, and the gradient that a KL penalty has on the second logit."""
    hidden, targets, temperatures_N = (
        torch.ones(2, 1),
        torch.tensor([0, 1]),
        torch.full((2,), temperature),
    )
    found = []
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
        found.append(logits.grad[1].item())
        assert logits.grad.sum().item() == pytest.approx(0, abs=1e-5)
    assert found == pytest.approx(kl_gradients, rel=1e-4)


def test_at_temperature_1_nothing_changes_to_the_bit() -> None:
    """Neither where no temperature is given nor for a row at 1 beside a row of another one."""
    results = []
    for temperatures in (None, [1.0, 1.0, 1.0], [0.5, 1.0, 0.5]):
        model, batch = make_model(torch.float32), make_batch()
        if temperatures is not None:
            batch.temperatures_BS = torch.tensor(temperatures)[:, None].repeat(1, 9)
        logprobs_BS, entropy_BS = completion_logprobs(model, batch, with_entropy=True)
        assert entropy_BS is not None
        results.append(
            (logprobs_BS, entropy_BS, gradients(model, logprobs_BS.sum() + entropy_BS.sum()))
        )
    plain, ones, mixed = results
    assert all(torch.equal(value, ones[2][name]) for name, value in plain[2].items())
    for index in (0, 1):
        assert torch.equal(ones[index], plain[index]) and torch.equal(
            mixed[index][1], plain[index][1]
        )
        assert (mixed[index][0] - plain[index][0]).abs().max() > 0.1


def test_whole_distributions_stay_at_temperature_1() -> None:
    """Probe measurements do not depend on the sampling temperature."""
    model, batch = make_model(torch.float32), at_temperatures()
    (hot,), (plain,) = (
        iter_next_token_logprobs(model, batch),
        iter_next_token_logprobs(model, make_batch()),
    )
    assert torch.equal(hot, plain)


def test_certain_and_impossible_tokens_stay_finite() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [500.0]])
    logprobs, entropy = compute_selected_logprobs(
        hidden, weight, None, torch.tensor([0]), with_entropy=True
    )
    assert logprobs.item() == -500 and entropy is not None and entropy.item() == 0
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.item() == -500  # d(z_0 - lse)/dh = 0 - 500


def test_more_padding_changes_nothing() -> None:
    model, batch = make_model(), make_batch()
    wide = TrainBatch(
        torch.nn.functional.pad(batch.input_ids_BS, (0, 5), value=7),
        torch.nn.functional.pad(batch.attention_mask_BS, (0, 5)),
        torch.nn.functional.pad(batch.loss_mask_BS, (0, 5)),
    )
    with torch.no_grad():
        narrow_BS, wide_BS = (
            completion_logprobs(model, batch)[0],
            completion_logprobs(model, wide)[0],
        )
    torch.testing.assert_close(wide_BS[:, :9], narrow_BS, atol=1e-12, rtol=0)
    assert not wide_BS[:, 9:].any()


def test_without_a_mask_the_attention_is_the_same_as_with_it() -> None:
    """Basis for completion_logprobs passing no attention mask."""
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        masked_BSH = model.model(
            batch.input_ids_BS, attention_mask=batch.attention_mask_BS.long()
        ).last_hidden_state
        plain_BSH = model.model(batch.input_ids_BS).last_hidden_state
    torch.testing.assert_close(
        plain_BSH[batch.attention_mask_BS], masked_BSH[batch.attention_mask_BS], atol=1e-12, rtol=0
    )


def test_the_head_sees_only_positions_that_carry_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = chunked_head._compute_log_softmax

    def counting(hidden: torch.Tensor, *more: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows.append(len(hidden))
        return original(hidden, *more)

    monkeypatch.setattr(chunked_head, "_compute_log_softmax", counting)
    model, batch = make_model(), make_batch()
    logprobs_BS, _ = completion_logprobs(model, batch, chunk_tokens=4)
    assert rows == [4, 4, 1] and batch.num_loss_tokens == 9
    logprobs_BS.sum().backward()
    assert rows == [4, 4, 1] * 2
    rows.clear()
    completion_logprobs(model, batch)[0].sum().backward()
    assert rows == [9], "one chunk is not computed twice"


def test_no_loss_token_gives_zeros_that_can_be_differentiated() -> None:
    model, batch = make_model(), make_batch()
    batch.loss_mask_BS[:] = False
    logprobs_BS, entropy_BS = completion_logprobs(model, batch, with_entropy=True)
    assert entropy_BS is not None and not logprobs_BS.any() and not entropy_BS.any()
    (logprobs_BS.sum() + entropy_BS.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_bad_shapes() -> None:
    model, batch = make_model(), make_batch()
    batch.loss_mask_BS[0, 0] = True
    with pytest.raises(DataError, match="position 0"):
        completion_logprobs(model, batch)
    with pytest.raises(DataError, match="must be equal"):
        completion_logprobs(
            model,
            TrainBatch(batch.input_ids_BS, batch.attention_mask_BS, batch.loss_mask_BS[:, 1:]),
        )
    batch = at_temperatures()
    assert batch.temperatures_BS is not None
    batch.temperatures_BS[1, 2] = 0.0
    with pytest.raises(DataError, match="must be above 0"):
        completion_logprobs(model, batch)
    batch.temperatures_BS = torch.ones(3)
    with pytest.raises(DataError, match=r"temperatures \(3,\) must be \(3, 9\)"):
        completion_logprobs(model, batch)


def test_autocast_computes_the_head_in_bfloat16() -> None:
    model, batch = make_model(torch.float32), make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs_BS, _ = completion_logprobs(model, batch)
    logprobs_BS.sum().backward()
    assert logprobs_BS.dtype == torch.float32
    torch.testing.assert_close(logprobs_BS, naive(model, batch)[0], atol=0.15, rtol=0.1)
    assert (
        model.lm_head.weight.grad is not None and model.lm_head.weight.grad.dtype == torch.float32
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_vocabulary_of_150_000_over_4_096_tokens_needs_no_table_of_both(
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
def test_tokens_that_a_head_forbids_have_no_part_in_entropy_and_gradients(
    chunk: int, temperature: float | None
) -> None:
    """A bias of minus infinity takes tokens out: everything is as in a head that has not got them."""
    generator = torch.Generator().manual_seed(0)
    allowed, targets_N = [0, 2, 3, 6], torch.tensor([2, 0, 3, 1, 1])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden_NH, weight_VH, bias_V = random(5, 4), random(7, 4), random(7)
    bias_V[[1, 4, 5]] = -math.inf
    up_N, entropy_up_N = random(5), random(5)

    def gradients_of(places: list[int], targets: torch.Tensor) -> list[torch.Tensor]:
        inputs = [
            part.clone().requires_grad_() for part in (hidden_NH, weight_VH[places], bias_V[places])
        ]
        temperatures = (
            torch.full((5,), temperature, dtype=torch.float64) if temperature is not None else None
        )
        logprobs, entropy = compute_selected_logprobs(
            *inputs, targets, temperatures_N=temperatures, with_entropy=True, chunk_tokens=chunk
        )
        assert entropy is not None
        (logprobs @ up_N + entropy @ entropy_up_N).backward()
        return [logprobs, entropy, *(part.grad for part in inputs if part.grad is not None)]

    expected = gradients_of(allowed, targets_N)
    found = gradients_of(list(range(7)), torch.tensor(allowed)[targets_N])
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(found[3:], expected[3:], strict=True):
        torch.testing.assert_close(one[allowed], other)
        assert not one[[1, 4, 5]].any()


def test_a_forbidden_token_keeps_the_log_probability_minus_infinity() -> None:
    bias_V = torch.tensor([0.0, -math.inf, 0.0])
    logprobs, entropy = compute_selected_logprobs(
        torch.ones(2, 1), torch.zeros(3, 1), bias_V, torch.tensor([0, 1]), with_entropy=True
    )
    assert logprobs.tolist() == [pytest.approx(-math.log(2)), -math.inf]
    assert entropy is not None and entropy.tolist() == pytest.approx([math.log(2)] * 2)


def test_logits_that_a_model_masks_itself_have_an_entropy() -> None:
    """A head that caps its logits, with some tokens at minus infinity, as the model's own logits are used."""
    model, batch = make_model(), make_batch()
    plain_entropy = completion_logprobs(model, batch, with_entropy=True)[1]

    class Masking(torch.nn.Module):
        def __init__(self, head: torch.nn.Linear) -> None:
            super().__init__()
            self.head, self.weight, self.bias = head, head.weight, head.bias

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.cat([self.head(hidden), self.head(hidden)[..., :2]], dim=-1)
            return torch.cat(
                [logits[..., :-2], torch.full_like(logits[..., -2:], -math.inf)], dim=-1
            )

    model.lm_head = Masking(model.lm_head)
    logprobs, entropy = completion_logprobs(model, batch, with_entropy=True)
    assert entropy is not None and plain_entropy is not None
    torch.testing.assert_close(entropy, plain_entropy)
    found = gradients(model, logprobs.sum() + entropy.sum())
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())


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
    targets_N, places = torch.tensor([2, 0, 3, 1, 5, 4, 1]), [(0, 3), (4, 7)]

    def leaves() -> list[torch.Tensor]:
        return [part.clone().requires_grad_() for part in (hidden_NH, weight_VH, bias_V, *factors)]

    found = leaves()
    spans = [
        AdapterSpan(start, stop, [(0, 6)], 0.5, [found[3 + 2 * index]], [found[4 + 2 * index]])
        for index, (start, stop) in enumerate(places)
    ]
    logprobs, entropy = compute_selected_logprobs(
        *found[:3],
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
    for index, (start, stop) in enumerate(places):
        added = (
            0.5 * expected[0][start:stop] @ expected[3 + 2 * index].T @ expected[4 + 2 * index].T
        )
        logits = torch.cat([logits[:start], logits[start:stop] + added, logits[stop:]])
    p = torch.log_softmax(logits / torch.tensor(temperature, dtype=torch.float32).double(), -1)
    chosen, own_entropy = p.gather(1, targets_N[:, None])[:, 0], -(p.exp() * p).sum(-1)
    (chosen @ up_N + own_entropy @ entropy_up_N).backward()
    torch.testing.assert_close(logprobs, chosen)
    torch.testing.assert_close(entropy, own_entropy)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_temperature_is_not_rounded_to_the_models_dtype() -> None:
    """0.7 in bfloat16 would be 0.6992: log-probabilities would be those of another distribution than the sampler's."""
    assert expand_temperatures([1.0, 1.0], [2, 3], torch.device("cpu")) is None
    found = expand_temperatures([0.7, 1.0], [2, 1], torch.device("cpu"))
    assert found is not None and found.dtype == torch.float32
    assert found.tolist() == [torch.tensor(0.7).item()] * 2 + [1.0]
