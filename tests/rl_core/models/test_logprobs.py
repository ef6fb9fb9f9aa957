"""Selective log-probabilities against the naive computation, values and gradients."""

from __future__ import annotations

import math
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

from rl_core.errors import DataError
from rl_core.models import chunked_head
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
    """Build rows of 9, 6 and 4 tokens, loss on scattered ones, padding with a token that also occurs as a real one."""
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(0, VOCAB, (3, 9), generator=generator)
    loss_BS = torch.zeros(3, 9, dtype=torch.bool)
    for row, length in enumerate((9, 6, 4)):
        ids_BS[row, length:] = 0
        loss_BS[row, 2:length:2] = True
        loss_BS[row, length - 1] = True
    attention_BS = torch.arange(9)[None] < torch.tensor([[9], [6], [4]])
    return TrainBatch(ids_BS, attention_BS, loss_BS)


def compute_naive(model: torch.nn.Module, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probs and entropies row by row, unpadded, over all logits."""
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


def compute_gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_against_naive(
    model: torch.nn.Module,
    batch: TrainBatch,
    with_entropy: bool,
    chunk: int | None,
    tolerance: float,
) -> None:
    weights_BS = torch.linspace(-1, 1, batch.input_ids_BS.numel()).view(batch.input_ids_BS.shape)
    logprobs, got_entropy = completion_logprobs(
        model, batch, with_entropy=with_entropy, chunk_tokens=chunk
    )
    expected, want_entropy = compute_naive(model, batch)
    torch.testing.assert_close(logprobs, expected, atol=tolerance, rtol=tolerance)
    got_loss, want_loss = (logprobs * weights_BS).sum(), (expected * weights_BS).sum()
    if with_entropy:
        assert got_entropy is not None
        torch.testing.assert_close(got_entropy, want_entropy, atol=tolerance, rtol=tolerance)
        got_loss, want_loss = (
            got_loss + (got_entropy * weights_BS**2).sum(),
            want_loss + (want_entropy * weights_BS**2).sum(),
        )
    else:
        assert got_entropy is None
    got_gradients, want_gradients = (
        compute_gradients(model, got_loss),
        compute_gradients(model, want_loss),
    )
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
    check_against_naive(
        make_model(tie_word_embeddings=tied), make_batch(), with_entropy, chunk, 1e-9
    )


def make_batch_at_temperatures() -> TrainBatch:
    """Build rows at 1/2, 2 and 1, with a single token of the first at 4: packed rows and thoughts mix temperatures
    within a row.
    """
    batch = make_batch()
    batch.temperatures_BS = torch.tensor([[0.5], [2.0], [1.0]]).repeat(1, 9)
    batch.temperatures_BS[0, 4] = 4.0
    return batch


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_at_temperatures(with_entropy: bool, chunk: int | None) -> None:
    check_against_naive(
        make_model(tie_word_embeddings=True),
        make_batch_at_temperatures(),
        with_entropy,
        chunk,
        1e-9,
    )


def test_in_float32_and_for_another_family() -> None:
    check_against_naive(make_model(torch.float32), make_batch(), True, 3, 1e-4)
    check_against_naive(make_model(torch.float32), make_batch_at_temperatures(), True, 3, 1e-4)
    torch.manual_seed(0)
    gpt2 = (
        GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=32)
        )
        .double()
        .eval()
    )
    check_against_naive(gpt2, make_batch(), True, 3, 1e-9)
    check_against_naive(gpt2, make_batch_at_temperatures(), True, 3, 1e-9)


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
    check_against_naive(model, make_batch(), True, 3, 1e-6)
    check_against_naive(model, make_batch_at_temperatures(), True, 3, 1e-6)


def test_adapters_get_the_gradient() -> None:
    model = add_adapter(
        make_model(torch.float32), LoraSettings(rank=2, target_modules=("q_proj", "lm_head"))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)  # larger ones amplify rounding
    check_against_naive(model, make_batch(), True, 2, 1e-4)


def test_temperature_1_changes_no_bit() -> None:
    """Neither without temperatures nor for a row at 1 next to one at another temperature."""
    results = []
    for temperatures in (None, [1.0, 1.0, 1.0], [0.5, 1.0, 0.5]):
        model, batch = make_model(torch.float32), make_batch()
        if temperatures is not None:
            batch.temperatures_BS = torch.tensor(temperatures)[:, None].repeat(1, 9)
        logprobs_BS, entropy_BS = completion_logprobs(model, batch, with_entropy=True)
        assert entropy_BS is not None
        results.append(
            (
                logprobs_BS,
                entropy_BS,
                compute_gradients(model, logprobs_BS.sum() + entropy_BS.sum()),
            )
        )
    unset, ones, mixed = results
    assert all(torch.equal(value, ones[2][name]) for name, value in unset[2].items())
    for index in (0, 1):
        assert torch.equal(ones[index], unset[index]) and torch.equal(
            mixed[index][1], unset[index][1]
        )
        assert (mixed[index][0] - unset[index][0]).abs().max() > 0.1


def test_whole_distributions_stay_at_temperature_1() -> None:
    """Probe measurements do not depend on the sampling temperature."""
    model, batch = make_model(torch.float32), make_batch_at_temperatures()
    (hot,), (unset,) = (
        iter_next_token_logprobs(model, batch),
        iter_next_token_logprobs(model, make_batch()),
    )
    assert torch.equal(hot, unset)


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
    """completion_logprobs passes no attention mask because of this."""
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        masked_BSH = model.model(
            batch.input_ids_BS, attention_mask=batch.attention_mask_BS.long()
        ).last_hidden_state
        states_BSH = model.model(batch.input_ids_BS).last_hidden_state
    torch.testing.assert_close(
        states_BSH[batch.attention_mask_BS], masked_BSH[batch.attention_mask_BS], atol=1e-12, rtol=0
    )


def test_the_head_sees_only_positions_that_carry_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = chunked_head._compute_log_softmax

    def count_rows(
        hidden: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows.append(len(hidden))
        return original(hidden, *rest, **options)

    monkeypatch.setattr(chunked_head, "_compute_log_softmax", count_rows)
    model, batch = make_model(), make_batch()
    logprobs_BS, _ = completion_logprobs(model, batch, chunk_tokens=4)
    assert rows == [4, 4, 1] and batch.num_loss_tokens == 9
    logprobs_BS.sum().backward()
    assert rows == [4, 4, 1] * 2
    rows.clear()
    completion_logprobs(model, batch)[0].sum().backward()
    assert rows == [9], "one chunk is not recomputed"


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
    batch = make_batch_at_temperatures()
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
    torch.testing.assert_close(logprobs_BS, compute_naive(model, batch)[0], atol=0.15, rtol=0.1)
    assert (
        model.lm_head.weight.grad is not None and model.lm_head.weight.grad.dtype == torch.float32
    )


def test_logits_that_a_model_masks_itself_have_an_entropy() -> None:
    """A head that masks some tokens with minus infinity, so the model's own logits are used."""
    model, batch = make_model(), make_batch()
    expected_entropy = completion_logprobs(model, batch, with_entropy=True)[1]

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
    assert entropy is not None and expected_entropy is not None
    torch.testing.assert_close(entropy, expected_entropy)
    grads = compute_gradients(model, logprobs.sum() + entropy.sum())
    assert all(bool(gradient.isfinite().all()) for gradient in grads.values())
