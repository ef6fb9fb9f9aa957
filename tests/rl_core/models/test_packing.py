"""Packed rows against padded ones: the same loss, gradients and metrics, and no leak between sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.capabilities import check_sequence_packing
from rl_core.errors import DataError
from rl_core.losses.supervised import supervised_loss
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings

VOCAB = 50
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=24,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
)
FAMILIES = {
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**SHAPE, **options)),
    "qwen3": lambda **options: Qwen3ForCausalLM(Qwen3Config(**SHAPE, **options)),
    "gemma3": lambda **options: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=4, **options)
    ),
    "gpt2": lambda **options: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=1,
        )
    ),
}


def create_model(
    family: str = "llama", dtype: torch.dtype = torch.float64, **options: object
) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES[family](**options).to(dtype).eval()


def build_rows(lengths: tuple[int, ...] = (9, 4, 2, 7, 3, 6), seed: int = 0) -> list[TrainRow]:
    """Build rows of one or two prompt tokens and a completion whose even tokens and last one carry loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        cut = 1 + (index % 2 if length > 2 else 0)
        mask = [position % 2 == 0 or position == length - 1 for position in range(cut, length)]
        rows.append(TrainRow(prompt_ids=ids[:cut], completion_ids=ids[cut:], loss_mask=mask))
    return rows


def compute_loss_and_gradients(
    model: torch.nn.Module, rows: list[TrainRow], packing: bool, max_tokens: int = 10_000
) -> tuple[float, dict[str, torch.Tensor]]:
    batches = build_batches(rows, max_tokens, 0, packing=packing)
    count = sum(batch.num_loss_tokens for batch in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss, _ = supervised_loss(
            completion_logprobs(model, batch)[0], batch.loss_mask_BS, num_loss_tokens=count
        )
        loss.backward()
        total += float(loss.detach())
    return total, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "dtype", "attention", "tolerance"),
    [
        ("llama", torch.float64, "sdpa", 1e-10),
        ("qwen3", torch.float64, "sdpa", 1e-10),
        ("llama", torch.float32, "sdpa", 2e-6),  # both are within 1.2e-6 of float64
        ("qwen3", torch.float32, "sdpa", 2e-6),
        ("llama", torch.float32, "eager", 1e-6),
        ("gpt2", torch.float32, "sdpa", 1e-6),  # positions are embeddings
        ("gemma3", torch.float32, "sdpa", 1e-6),  # a sliding window of 4
    ],
)
def test_loss_and_gradients_are_those_of_padded_rows(family, dtype, attention, tolerance):
    model = create_model(family, dtype, attn_implementation=attention)
    assert check_sequence_packing(model).allowed
    rows = build_rows()
    want, want_gradients = compute_loss_and_gradients(model, rows, packing=False)
    for max_tokens in (10_000, 9):  # all rows at once, and one packed row at a time
        got, got_gradients = compute_loss_and_gradients(
            model, rows, packing=True, max_tokens=max_tokens
        )
        assert got == pytest.approx(want, rel=tolerance)
        scale = max(float(value.abs().max()) for value in want_gradients.values())
        for name, value in want_gradients.items():
            torch.testing.assert_close(
                got_gradients[name], value, rtol=0, atol=tolerance * max(1, scale), msg=name
            )


def test_rows_are_packed_to_the_length_of_the_longest():
    (batch,) = build_batches(build_rows((9, 4, 2, 7, 3, 6)), 10_000, 0, packing=True)
    assert batch.position_ids_BS.tolist() == [  # 9 | 7+2 | 6+3 | 4
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 0, 1],
        [0, 1, 2, 3, 4, 5, 0, 1, 2],
        [0, 1, 2, 3, 0, 0, 0, 0, 0],
    ]
    assert batch.attention_mask_BS.sum().item() == 31
    assert batch.num_loss_tokens == sum(
        sum(row.loss_mask) for row in build_rows((9, 4, 2, 7, 3, 6))
    )
    assert not (batch.loss_mask_BS & (batch.position_ids_BS == 0)).any()
    assert build_batches(build_rows(), 10_000, 0)[0].position_ids_BS is None


def test_every_field_of_a_row_is_packed_where_its_tokens_are():
    rows = [
        TrainRow([1], [2, 3], [True, False], sampler_logprobs=[-1.0, -2.0]),
        TrainRow([4, 5], [6], [True], sampler_logprobs=[-3.0]),
        TrainRow([1], [2, 3, 4, 5, 6], [True] * 5, sampler_logprobs=[1.0, 2.0, 3.0, 4.0, 5.0]),
    ]
    (batch,) = build_batches(rows, 10_000, 9, packing=True)
    assert batch.input_ids_BS.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]]
    assert batch.sampler_logprobs_BS.tolist() == [[0, 1, 2, 3, 4, 5], [0, -1, 0, 0, 0, -3]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_else_is_in_the_row_changes_nothing(attention):
    """Bit for bit: other tokens around a sequence and after it."""
    model = create_model(dtype=torch.float32, attn_implementation=attention)
    rows = build_rows((3, 3, 3, 9))
    (batch,) = build_batches(rows, 10_000, 0, packing=True)
    assert batch.position_ids_BS[1].tolist() == [0, 1, 2] * 3
    with torch.no_grad():
        original = completion_logprobs(model, batch)[0]
        batch.input_ids_BS[1, :3] = torch.tensor([40, 41, 42])
        batch.input_ids_BS[1, 6:] = torch.tensor([43, 44, 45])
        changed = completion_logprobs(model, batch)[0]
    assert torch.equal(original[1, 3:6], changed[1, 3:6])
    assert (original[1, [1, 2, 7, 8]] != changed[1, [1, 2, 7, 8]]).any()
    # without positions sequences do leak, so the test is able to fail
    leaking = dataclasses.replace(batch, position_ids_BS=None)
    with torch.no_grad():
        assert not torch.allclose(
            completion_logprobs(model, leaking)[0][1, 3:6], original[1, 3:6], atol=1e-3
        )


def test_flash_kernels_get_the_rows_end_to_end(monkeypatch):
    """They read positions only in a batch of one row; the results are the same."""
    model = create_model()
    (batch,) = build_batches(build_rows(), 10_000, 0, packing=True)
    want = completion_logprobs(model, batch)[0]
    shapes = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    for module in ("rl_core.models.hidden_states", "rl_core.capabilities.training"):
        monkeypatch.setattr(f"{module}.needs_single_packed_row", lambda model: True)
    torch.testing.assert_close(completion_logprobs(model, batch)[0], want, rtol=0, atol=1e-10)
    assert check_sequence_packing(model).allowed
    assert shapes[0] == (1, batch.input_ids_BS.numel())


def test_the_first_token_of_a_packed_sequence_carries_no_loss():
    (batch,) = build_batches(build_rows(), 10_000, 0, packing=True)
    batch.loss_mask_BS[1, 7] = True
    with pytest.raises(DataError, match="first token of a packed sequence"):
        completion_logprobs(create_model(), batch)


def create_deep_model(seed):
    """Create a model in bfloat16 with enough layers for its rounding errors to add up."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def test_rounding_over_many_layers_does_not_refuse_packing(monkeypatch):
    from rl_core.capabilities import training

    for seed in (1, 0, 2, 3, 4):  # how far a model rounds depends on the processor
        model = create_deep_model(seed)
        leak, effect, difference, share = training._measure_packing_leak(model)
        if difference > torch.finfo(torch.bfloat16).eps ** 0.5:  # more than in a shallow model
            break
    else:
        pytest.fail("no model of five rounds by more than a shallow one")
    assert leak <= effect / 50 and share < 0.2
    assert check_sequence_packing(model).allowed

    # learned positions that are not reset at each sequence: separated by the mask, yet other states
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=30, n_head=4, n_positions=64)
    wrong = GPT2LMHeadModel(config).to(torch.bfloat16).eval()
    assert check_sequence_packing(wrong).allowed
    embed = wrong.transformer.wpe.forward
    monkeypatch.setattr(
        wrong.transformer.wpe,
        "forward",
        lambda positions: embed(torch.arange(positions.shape[-1]).expand(positions.shape)),
    )
    leak, effect, _, share = training._measure_packing_leak(wrong)
    assert leak <= effect / 50 and share > 0.5
    assert not check_sequence_packing(wrong).allowed


def test_models_that_would_mix_sequences_are_detected(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        # has no position ids
        config = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2)
        assert not check_sequence_packing(BloomForCausalLM(config).to(dtype)).allowed
        assert check_sequence_packing(create_model(dtype=dtype)).allowed
    adapted = add_adapter(
        create_model(dtype=torch.float32), LoraSettings(rank=2, target_modules=("q_proj",))
    )
    assert check_sequence_packing(adapted).allowed
    # positions without a block mask: RoPE is right within each sequence, but tokens attend to the whole row
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None
    )
    assert not check_sequence_packing(create_model(dtype=torch.float32)).allowed
    assert not check_sequence_packing(create_model("gpt2", dtype=torch.float32)).allowed
