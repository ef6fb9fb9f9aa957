"""The packed forward pass against that of transformers: hidden states, gradients, models it leaves alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.capabilities import check_training_forward
from rl_core.cpu import packed_forward
from rl_core.cpu.packed_forward import find_shared_prefixes
from rl_core.errors import DataError
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.lora import add_adapter, unwrap_model
from rl_core.settings import LoraSettings
from rl_core.types import TrainBatch

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, **more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SIZES, **more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **more)),
}
LENGTHS = [3, 17, 9, 30, 30, 1, 12, 28, 5, 22, 16, 2]


@pytest.fixture(autouse=True)
def every_way(way, monkeypatch):
    """A dozen rows make several of the rectangles that torch attends in."""
    monkeypatch.setattr(packed_forward, "_MIN_RECTANGLE_ROWS", 2)


def model_of(family: str = "llama", **more) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family](**more).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones at first, which would hide a forgotten weight
                weight.uniform_(0.5, 1.5)
    return model


def batch_of(lengths=LENGTHS) -> TrainBatch:
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(1, 61, (len(lengths), max(lengths)), generator=generator)
    real_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    loss_BS = real_BS & (torch.rand(ids_BS.shape, generator=generator) < 0.5)
    loss_BS[:, 0] = False
    return TrainBatch(ids_BS, real_BS, loss_BS)


def states_and_gradients(model, read_BS, states_BSH):
    """Hidden states, and the gradient of a random weighting of them."""
    weights = torch.randn(states_BSH.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (states_BSH * weights)[read_BS].sum().backward()
    return states_BSH[read_BS].detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def plain_states(model, batch):
    """transformers' own, each row alone and without padding."""
    lengths = batch.attention_mask_BS.sum(1).tolist()
    states = [
        model.base_model(input_ids=ids_S[None, :length], use_cache=False).last_hidden_state[0]
        for ids_S, length in zip(batch.input_ids_BS, lengths, strict=True)
    ]
    return nn.utils.rnn.pad_sequence(states, batch_first=True)


def compare(model, batch, needed_BS, read_BS):
    ours = states_and_gradients(model, read_BS, compute_hidden_states(model, batch, needed_BS))
    theirs = states_and_gradients(model, read_BS, plain_states(model, batch))
    assert distance(ours[0], theirs[0]) < 1e-5
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert distance(ours[1][name], gradient) < 3e-5, name


def distance(one, two) -> float:
    """Of two tensors, relative to the second's size: single entries near 0 are sums whose parts cancel."""
    return float((one - two).norm() / two.norm().clamp_min(0.1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_partial", [False, True])
def test_states_and_gradients_are_those_of_transformers(family, is_partial):
    model, batch = model_of(family), batch_of()
    assert check_training_forward(model).allowed
    needed_BS = batch.loss_mask_BS if is_partial else None
    compare(model, batch, needed_BS, batch.loss_mask_BS if is_partial else batch.attention_mask_BS)


@pytest.mark.parametrize("lengths", [[7, 7, 7], [1], [5, 1, 1, 1, 9]])
def test_odd_shapes(lengths):
    model, batch = model_of(), batch_of(lengths)
    compare(model, batch, None, batch.attention_mask_BS)


def test_biases_rope_scaling_and_equal_heads():
    more = {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **more}, attention_bias=True, mlp_bias=True))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name:
                weight.normal_(std=0.1)
    assert check_training_forward(model).allowed
    batch = batch_of()
    compare(model, batch, None, batch.attention_mask_BS)


def test_attention_is_scaled_as_the_model_says():
    model, batch = model_of(), batch_of()
    for layer in model.base_model.layers:
        layer.self_attn.scaling = 0.2  # 16 ** -0.5 by default
    compare(model, batch, None, batch.attention_mask_BS)


def test_adapters_get_the_same_gradient():
    model = add_adapter(model_of(), LoraSettings(rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide an adapter that is passed over
                weight.normal_(std=0.05, generator=torch.Generator().manual_seed(3))
    base, batch = unwrap_model(model), batch_of()
    assert check_training_forward(base).allowed
    compare(base, batch, batch.loss_mask_BS, batch.loss_mask_BS)


def test_padding_costs_nothing_but_attention(monkeypatch):
    """Linear layers see real tokens alone, and the last MLP the needed ones alone."""
    model, batch = model_of(), batch_of()
    seen: dict[str, list[int]] = {"q_proj": [], "down_proj": []}
    for name, module in model.named_modules():
        key = name.rsplit(".", 1)[-1]
        if key in seen:
            module.register_forward_pre_hook(
                lambda module, args, key=key: seen[key].append(len(args[0]))
            )
    compute_hidden_states(model, batch, batch.loss_mask_BS)
    real, needed = sum(LENGTHS), int(batch.loss_mask_BS.sum())
    assert seen == {"q_proj": [real] * 3, "down_proj": [real, real, needed]}


def alike(lengths=(20, 23, 18, 9, 9, 30, 4, 1, 12, 20)) -> TrainBatch:
    """Rows of which some begin alike, some hold all of another, and two are equal; row 6 has nothing of the others."""
    batch = batch_of(list(lengths))
    ids_BS = batch.input_ids_BS
    ids_BS[1, :15] = ids_BS[0, :15]
    ids_BS[2, :11] = ids_BS[0, :11]
    ids_BS[3, :9] = ids_BS[0, :9]
    ids_BS[4] = ids_BS[3]
    ids_BS[5, :19] = ids_BS[1, :19]
    ids_BS[7, :1] = ids_BS[0, :1]
    ids_BS[8, :3], ids_BS[9, :5] = ids_BS[0, :3], ids_BS[8, :5]
    return batch


def beginnings(batch) -> list[tuple[int, ...]]:
    """Each real token with its whole prefix."""
    rows = zip(batch.input_ids_BS.tolist(), batch.attention_mask_BS.sum(1).tolist(), strict=True)
    return [tuple(ids[: end + 1]) for ids, length in rows for end in range(length)]


def test_what_rows_have_in_common_is_found():
    batch = alike()
    known = beginnings(batch)
    shared = find_shared_prefixes(batch.input_ids_BS, batch.attention_mask_BS.sum(1).tolist())
    assert len(shared.first_N) == len(set(known)) < len(known) - 50
    assert [known[shared.first_N[number]] for number in shared.unique_T] == known
    assert sorted([*shared.first_N.tolist(), *shared.repeated_R.tolist()]) == list(
        range(len(known))
    )
    assert (
        find_shared_prefixes(
            batch.input_ids_BS, batch.attention_mask_BS.sum(1).tolist(), min_share=0.5
        )
        is None
    )
    assert find_shared_prefixes(batch_of([5, 5]).input_ids_BS, [5, 5]) is None
    padded = torch.tensor(
        [[1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 3, 4]]
    )  # padding is nobody's beginning
    one, two, three, four = (
        find_shared_prefixes(padded, [3, 2, 4]).unique_T[5:].tolist()
    )  # of the last row
    assert find_shared_prefixes(padded, [3, 2, 4]).unique_T.tolist()[:5] == [
        one,
        two,
        three,
        one,
        two,
    ]
    assert sorted([one, two, three, four]) == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=7))
def test_every_common_beginning_is_found(rows):
    ids_BS = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    known = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    shared = find_shared_prefixes(ids_BS, [len(row) for row in rows])
    if len(set(known)) == len(known):
        assert shared is None
    else:
        assert [known[shared.first_N[number]] for number in shared.unique_T] == known
        assert len(shared.first_N) == len(set(known))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_partial", [False, True])
def test_common_beginnings_are_computed_once(family, is_partial):
    model, batch = model_of(family), alike()
    seen = {"q_proj": [], "down_proj": []}
    hooks = []
    for name, module in model.named_modules():
        key = name.rsplit(".", 1)[-1]
        if key in seen:
            add = lambda module, args, key=key: seen[key].append(len(args[0]))  # noqa: E731
            hooks.append(module.register_forward_pre_hook(add))
    needed_BS = batch.loss_mask_BS if is_partial else None
    read_BS = batch.loss_mask_BS if is_partial else batch.attention_mask_BS
    compute_hidden_states(model, batch, needed_BS)
    known = beginnings(batch)
    is_read = read_BS[batch.attention_mask_BS].tolist()
    unique = len(set(known))
    needed = len({beginning for beginning, read in zip(known, is_read, strict=True) if read})
    assert needed < int(read_BS.sum())  # some of what is read stands in several rows
    assert seen == {"q_proj": [unique] * 3, "down_proj": [unique, unique, needed]}
    for hook in hooks:  # a layer that is watched is called as a module
        hook.remove()
    compare(model, batch, needed_BS, read_BS)


def test_rows_get_noise_of_their_own_from_adapters_that_drop_out():
    torch.manual_seed(0)
    model = unwrap_model(add_adapter(model_of(), LoraSettings(rank=4, dropout=0.5)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5)
    batch = alike()
    assert not torch.allclose(*compute_hidden_states(model.train(), batch)[3:5, :9])
    assert torch.equal(*compute_hidden_states(model.eval(), batch)[3:5, :9])


def test_rectangles_hold_rows_of_similar_length():
    rows = packed_forward._build_rectangles(LENGTHS)
    assert sum(count for count, _ in rows.shapes) == len(LENGTHS)
    assert len(rows.shapes) > 2
    tokens = sum(count * width for count, width in rows.shapes)
    assert tokens < 0.75 * len(LENGTHS) * max(LENGTHS)
    assert rows.tokens_P[rows.indices_N].tolist() == list(range(sum(LENGTHS)))


def without_sdpa():
    model = model_of()
    model.set_attn_implementation("eager")
    return model


def with_activation_checkpointing():
    model = model_of()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


OTHERS = {
    "float64": lambda: model_of().double(),
    "bfloat16": lambda: model_of().bfloat16(),
    "another activation": lambda: model_of(hidden_act="gelu"),
    "a window": lambda: model_of(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0
    ),
    "dropout": lambda: model_of(attention_dropout=0.1),
    "frequencies that follow the length": lambda: model_of(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "another family": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "other kernels": without_sdpa,
    "activation checkpointing": with_activation_checkpointing,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_whatever_differs_is_left_to_transformers(kind):
    model, batch = OTHERS[kind](), batch_of()
    assert not check_training_forward(model).allowed
    torch.manual_seed(5)
    ours = compute_hidden_states(model, batch)
    torch.manual_seed(5)
    theirs = model.base_model(input_ids=batch.input_ids_BS, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_autocast_is_left_to_transformers():
    model = model_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not check_training_forward(model).allowed


def test_dropout_does_not_matter_in_eval():
    model = model_of(attention_dropout=0.1).eval()
    assert check_training_forward(model).allowed
    batch = batch_of()
    compare(model, batch, None, batch.attention_mask_BS)


def test_masks_of_different_rows_are_noticed():
    batch = batch_of([9, 4, 6])
    batch.attention_mask_BS = batch.attention_mask_BS.flip(0)
    with pytest.raises(DataError, match="attention_mask is False where a hidden state is needed"):
        compute_hidden_states(model_of(), batch, batch.loss_mask_BS)


def test_the_same_bits_again():
    model, batch = model_of(), batch_of()
    first = states_and_gradients(
        model, batch.attention_mask_BS, compute_hidden_states(model, batch)
    )
    again = states_and_gradients(
        model, batch.attention_mask_BS, compute_hidden_states(model, batch)
    )
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(first[1][name], again[1][name]) for name in first[1])
